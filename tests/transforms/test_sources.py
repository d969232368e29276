"""Source shapes: a changed, missing or invented one is an error of `verify` or `validate`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distir.ir import Function, Role, parse, pformat, validate, verify
from distir.ir.errors import InfeasibleError, IRTypeError, MismatchError, ModelError
from distir.ir.type import Tensor
from distir.transforms.parallel3d import source_of
from tests.transforms.programs import Plan, Program, distributed, imported_mlp, small_gpt
from tests.transforms.random_programs import LARGE, random_plans, random_programs

_SOURCE = re.compile(r" source=\(([^)]*)\)")


def shapes(old: str) -> Iterator[str]:
    """Other shapes than that in the text, and invalid ones."""
    sizes = [int(n) for n in old.split(",") if n]
    for k, n in enumerate(sizes):
        for new in (n - 5, n - 1, n + 1, 0, -n, float(n)):
            row = [*sizes[:k], new, *sizes[k + 1 :]]
            yield f"({', '.join(map(str, row))}{',' * (len(row) == 1)})"
    yield f"({', '.join(map(str, [*sizes, 1]))},)"
    yield "()"
    if len(set(sizes)) > 1:
        yield f"({', '.join(map(str, sizes[::-1]))})"


def edits(text: str) -> Iterator[tuple[str, str]]:
    """Each edit of a `source=`: a description, and the text after it."""
    for found in _SOURCE.finditer(text):
        head, tail = text[: found.start()], text[found.end() :]
        where = f"number {text[: found.start()].count(' source=')} {found[0]}"
        yield f"{where} left out", head + tail
        for new in shapes(found[1]):
            yield f"{where} as {new}", f"{head} source={new}{tail}"


def accepted(text: str, program: Program) -> bool:
    try:
        f = parse(text)
        verify(f)
        validate(f, source_of(f, program.function))
    except (ModelError, MismatchError):
        return False
    return True


def compare(program: Program, plan: Plan) -> int:
    """Assert that every edit of the plan's program is refused; returns their number."""
    text = pformat(distributed(program, plan).program)
    assert accepted(text, program)
    rows = list(edits(text))
    assert [what for what, new in rows if accepted(new, program)] == []
    return len(rows)


@pytest.mark.parametrize(
    ("program", "plan"),
    [
        (lambda: small_gpt(vocabulary=15), Plan(2, 2, 2, 2)),
        (lambda: small_gpt(vocabulary=15), Plan(1, 2, 1, 1, host=True)),
        (lambda: small_gpt(vocabulary=15), Plan(2, 2, 1, 1, zero=3)),
    ],
    ids=["gpt", "host", "zero"],
)
def test_every_edit_of_a_source_is_refused(program, plan: Plan) -> None:
    assert compare(program(), plan) >= 20


@settings(max_examples=12, deadline=None, suppress_health_check=LARGE)
@given(random_programs(), random_plans, st.data())
def test_every_edit_of_a_source_of_random_programs_is_refused(program: Program, plan: Plan, data: st.DataObject):
    plan = plan._replace(tp=max(2, plan.tp)) if plan.dp * plan.pp <= 4 else plan
    try:
        text = pformat(distributed(program, plan).program)
    except InfeasibleError:
        assume(False)
        return
    rows = list(edits(text))
    assume(rows)
    what, new = data.draw(st.sampled_from(rows))
    assert not accepted(new, program), what


def marked(f: Function) -> Iterator[str]:
    """One more input, or output, that is said to have been padded."""
    for v in f.inputs:
        if v.kind == "parameter" and isinstance(v.type, Tensor) and v.type.shape and not (v.role and v.role.source):
            role, shape = v.role, v.type.global_shape
            v.role = Role("parameter", None, (shape[0] - 1, *shape[1:]))
            yield pformat(f)
            v.role = Role("parameter", None, shape)
            yield pformat(f)
            v.role = role
    for v in f.outputs:
        if v not in f.sources and isinstance(v.type, Tensor):
            f.sources[v] = v.type.global_shape
            yield pformat(f)
            del f.sources[v]


@pytest.mark.parametrize("program", [imported_mlp, lambda: small_gpt(vocabulary=15)], ids=["mlp", "gpt"])
def test_sources_that_are_made_up_are_refused(program) -> None:
    f = distributed(program(), Plan(1, 2, 1, 1)).program
    texts = list(marked(f))
    assert len(texts) > 8
    assert not any(accepted(text, program()) for text in texts)


def test_an_update_has_the_source_of_its_input() -> None:
    """`verify` alone finds it, without the source program."""
    text = pformat(distributed(small_gpt(vocabulary=15), Plan(1, 2, 1, 1)).program)
    new = text.replace("-> %wte source=(15, 8)", "-> %wte source=(14, 8)")
    assert new != text
    with pytest.raises(IRTypeError, match=r"expected the input's source shape, \(15, 8\), got \(14, 8\)"):
        verify(parse(new))
    with pytest.raises(MismatchError, match=r"output %wte\S*: expected the source shape \(15, 8\), got \(14, 8\)"):
        validate(parse(new), source_of(parse(new), small_gpt(vocabulary=15).function))
