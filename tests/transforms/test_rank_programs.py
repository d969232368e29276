"""What ranks run is well typed, and a fault in it is found although all ranks of a stage have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from distir.backends.compiled import sort
from distir.ir import Function, Mesh, Op, Value, verify
from distir.ir.errors import IRTypeError, ModelError
from distir.ir.function import Attributes
from distir.ops.comm import ALONG_AXIS
from distir.transforms.ahead import posted_ahead
from distir.transforms.order import check_order, check_programs
from distir.transforms.outline import outline
from distir.transforms.project import RankProgram, project_all
from distir.transforms.recompose import recompose
from tests.transforms.programs import Plan, distributed, imported_mlp, small_gpt

PLANS = [
    *(Plan(2, 1, 1, 1), Plan(1, 2, 1, 1), Plan(1, 1, 2, 2), Plan(2, 2, 2, 2), Plan(2, 1, 2, 4, zero=1)),
    *(Plan(2, 2, 1, 1, zero=3), Plan(2, 2, 2, 2, host=True), Plan(1, 1, 2, 4, "interleaved", chunks=2)),
]


def replaced(f: Function, old: Op, new: Op | None) -> Function:
    """The function with another op in the place of one; None: with its operand in the place of its result."""
    stands: dict[Value, Value] = {} if new else dict.fromkeys(old.outputs, old.inputs[0])
    ops = []
    for op in f.ops:
        if op is old and new is None:
            continue
        op = new if op is old and new else op
        ops.append(Op(op.spec, tuple([stands.get(v, v) for v in op.inputs]), op.attributes, op.outputs, op.of))
    outputs = tuple([stands.get(v, v) for v in f.outputs])
    updates = {stands.get(a, a): b for a, b in f.updates.items()}
    return Function(f.name, f.inputs, tuple(ops), outputs, updates, {stands.get(v, v): s for v, s in f.sources.items()})


def calling(f: Function, old: Function, new: Function) -> Function:
    """The program with another callee in the place of one."""
    if f is old:
        return new
    ops = [
        Op(op.spec, op.inputs, Attributes({**op.attributes, "callee": new}), op.outputs) if op.callee is old else op
        for op in f.ops
    ]
    return Function(f.name, f.inputs, tuple(ops), f.outputs, f.updates, f.sources)


def edits(f: Function) -> Iterator[tuple[str, Function]]:
    """A function with one fault, for each there is a place for."""
    for op in f.ops:
        if op.op_type in ALONG_AXIS and op.inputs[0].type is not op.outputs[0].type:
            yield f"{op} dropped", replaced(f, op, None)
            at = op.inputs[0].type.device
            axes = at.axes if isinstance(at, Mesh) else ()
            for axis in axes:
                if axis != op.attributes["axis"]:
                    other = Op(op.spec, op.inputs, Attributes({**op.attributes, "axis": axis}), op.outputs)
                    yield f"{op} along {axis}", replaced(f, op, other)
        elif op.op_type in ("Accumulate", "LocalSlice"):
            yield f"{op} dropped", replaced(f, op, None)
        elif op.attributes.get("mb") is not None:
            mb = Attributes({**op.attributes, "mb": 1 - min(op.attributes["mb"], 1)})
            yield f"{op} for microbatch {mb['mb']}", replaced(f, op, Op(op.spec, op.inputs, mb, op.outputs))


def faulty(programs: Sequence[RankProgram]) -> Iterator[tuple[str, list[RankProgram]]]:
    """The programs with a fault, the same on all ranks that share a program."""
    for f in dict.fromkeys(p.function for p in programs):
        for g in (f, *f.callees()):
            for what, new in edits(g):
                bad = calling(f, g, new)
                yield f"{g.name}: {what}", [p._replace(function=bad) if p.function is f else p for p in programs]


def passes(check, programs: Sequence[RankProgram]) -> bool:
    try:
        check(programs)
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_faults_of_all_ranks_of_a_stage_are_found(plan: Plan) -> None:
    programs = project_all(distributed(small_gpt(vocabulary=15), plan).program)
    check_programs(programs)
    seen = Counter[bool]()
    for what, bad in faulty(programs):
        seen[passes(check_order, bad)] += 1
        assert not passes(check_programs, bad), what
    if plan != Plan(1, 1, 2, 4, "interleaved", chunks=2):
        assert seen[True] >= 5, "faults that the order of communication does not show"


@pytest.mark.parametrize("program", [small_gpt, imported_mlp, lambda: small_gpt(vocabulary=15)])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_is_made_of_the_programs_is_well_typed(program, plan: Plan) -> None:
    """Joined products, of many matrices too and of partial sums, and runs cut out for a compiler."""
    kinds = Counter[str]()
    for f in dict.fromkeys(posted_ahead(p).function for p in project_all(distributed(program(), plan).program)):
        verify(f)
        verify(outline(f, sort))
        for g in (f, *f.callees()):
            new = recompose(g)
            verify(new)
            kinds.update(op.op_type for op in new.ops)
    assert kinds["Gemm"] > 0


def test_the_rank_is_named() -> None:
    programs = project_all(distributed(small_gpt(), Plan(1, 2, 2, 2)).program)
    bad = next(bad for what, bad in faulty(programs) if "bwd1" in what and "dropped" in what)
    with pytest.raises(IRTypeError, match=r"^rank 2: \w+\.?\w*: op \d+ %"):
        check_programs(bad)
