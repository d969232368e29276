"""Attributes: compared exactly, and refused where an op cannot take them, whatever a text may hold."""

from __future__ import annotations

import gc
import pickle
from math import nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.executor.reference.sequential import evaluate
from distir.ir import Device, Function, Mesh, Op, Value, parse, pformat, verify
from distir.ir.attributes import declared
from distir.ir.errors import IRTypeError, ModelError
from distir.ir.function import Attributes
from distir.ir.infer import forget, infer
from distir.ir.spec import lookup
from distir.ir.type import REPLICATE, Bool, Float32, Float64, Int64, Partial, Shard, Tensor
from tests.ops.samples import SAMPLES

GOLDEN = sorted(Path(__file__).parents[1].joinpath("golden").glob("*.distir"))
OTHER = parse("fn g(%x: f32[2]) {\n  return %x\n}")
NUMBERS = (True, False, 0, 1, 2, -1, 3, 7, 10**30, -(10**20), 1.0, 0.5, nan, float("inf"), 0.0, -0.0)
WORDS = (None, "x", "", "mb", "dp", "tp", Float32, Bool, Int64, Shard(0), Shard(1, 3), REPLICATE, Partial("max"))
PLACES = (Mesh([Device("cpu", i) for i in range(4)], {"dp": 2, "tp": 2}), Device("cpu", 0), OTHER)
odd = st.sampled_from([*NUMBERS, *WORDS, *PLACES])
"""What a text can hold in an attribute, mostly where it has no place."""
odd |= st.lists(odd | st.tuples(odd, odd), max_size=3).map(tuple)


@st.composite
def edited(draw: st.DrawFn, attributes: Attributes) -> Attributes:
    """One of them changed, left out, or one more."""
    name = draw(st.sampled_from([*attributes, "axis", "dim", "outer", "device", "place", "callee", "mb", "more"]))
    old = attributes.get(name)
    if name in attributes and draw(st.integers(0, 5)) == 0:
        return attributes.without(name)
    new = draw(odd)
    if isinstance(old, tuple) and old and draw(st.booleans()):
        k = draw(st.integers(0, len(old) - 1))
        new = (*old[:k], new, *old[k + 1 :])
    return Attributes({**attributes, name: new})


@given(st.data())
def test_what_is_not_refused_is_evaluated_to_its_type(data: st.DataObject):
    """Of every op: a program that verifies does not end in an error of numpy's."""
    sample = data.draw(st.sampled_from(SAMPLES))
    types = tuple([Tensor(o.dtype, o.shape) for o in sample.operands])
    attributes = data.draw(edited(Attributes(sample.attributes)))
    try:
        results = infer(lookup(sample.op), attributes, types)
    except IRTypeError:
        return
    if attributes.get("device") is not None or sum(t.bytes for t in results) > 1 << 20:
        return
    ins = tuple([Value(f"x{k}", t) for k, t in enumerate(types)])
    op = Op(lookup(sample.op), ins, attributes, tuple([Value(f"y{k}", t) for k, t in enumerate(results)]))
    made = evaluate(op, sample.arrays(), None)
    made = made if isinstance(made, tuple | list) else (made,)
    assert [(x.shape, x.dtype) for x in made] == [(t.shape, t.dtype.numpy) for t in results]  # type: ignore[union-attr]


def refusal(f: Function) -> str | None:
    try:
        verify(f)
    except IRTypeError as e:
        return str(e)
    return None


@given(st.data())
def test_verify_refuses_or_accepts_and_does_not_remember(data: st.DataObject):
    """Any attribute of a distributed program changed: never another error, and the same answer at any time."""
    f = parse(data.draw(st.sampled_from(GOLDEN)).read_text())
    g = data.draw(st.sampled_from([f, *f.callees()]))
    op = data.draw(st.sampled_from(g.ops))
    op.attributes = data.draw(edited(op.attributes))
    seen = refusal(f)
    forget()
    assert refusal(f) == seen


@given(odd, odd)
def test_equal_attributes_have_equal_texts(a: Any, b: Any):
    a, b = Attributes(x=a), Attributes(x=b)
    same = pformat(Op(lookup("Neg"), (), a, ())) == pformat(Op(lookup("Neg"), (), b, ()))
    assert (a == b) == same
    assert (a != b) == (not same)
    assert not same or hash(a) == hash(b)


def test_numbers_that_python_takes_for_equal():
    for a, b in [(1, 1.0), (1, True), (0, False), (0.0, -0.0), ((1, 0), (1.0, 0)), ((1, 0), (True, False))]:
        assert Attributes(x=a) != Attributes(x=b)
    assert Attributes(x=(nan, 1.0)) == Attributes(x=(float("nan"), 1.0))


def test_equal_attributes_have_one_form():
    one, other = Attributes(a=1, b=(2, 0.5)), Attributes(b=(2, 0.5), a=1)
    assert one.form is other.form
    assert list(other) == ["b", "a"], "each keeps its order"
    assert one.form is pickle.loads(pickle.dumps(one)).form
    assert one.form is not Attributes(a=1.0, b=(2, 0.5)).form
    assert one == {"a": 1, "b": (2, 0.5)} != other.without("a")
    assert Attributes(a=[1]).form is not Attributes(a=[1]).form, "what cannot be hashed is equal to nothing"


def test_a_form_does_not_keep_a_callee_alive():
    f = Function("f", (), (), ())
    held = Attributes(callee=f, mb=0)
    assert held.form is Attributes(callee=f, mb=0).form
    assert held.form is not Attributes(callee=Function("f", (), (), ()), mb=0).form
    f.cache["held"] = held
    del f, held
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Function and "held" in x.cache]


TRANSPOSE = "fn main(%x: f64[4, 5]) {{\n  %y: f64[5, 4] = Transpose(%x, perm={})\n  return %y\n}}"
SCATTER = (
    "mesh stage0(dp=2) = cpu:0..1\nfn main(%x: f64[4, 4]+dp @ stage0) {{\n"
    '  %y: f64[2{{dp}}, 4] @ stage0 = MPIReduceScatter(%x, axis="dp", {})\n  return %y\n}}'
)


def test_what_was_seen_before_does_not_count():
    for perm in ("(1.0, 0)", "(1, 0)", "(1.0, 0)", "(True, False)"):
        f = parse(TRANSPOSE.format(perm))
        assert (refusal(f) is None) == (perm == "(1, 0)"), perm


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dim=0, outer=0", "with an outer from 1, got dim=0, outer=0"),
        ("dim=0, outer=-1", "with an outer from 1, got dim=0, outer=-1"),
        ("dim=-2", "a split is of a dim from 0"),
        ("dim=2", "dim 2 (size none) of shape (4, 4) cannot be split"),
        ("dim=0.0", "attribute dim: expected an integer"),
        ("dim=(0,)", "integers, got dim=(0,)"),
        ("outer=1", "attribute dim: expected an integer, or one for each member of a bundle, got no attribute"),
        ("dim=0, more=1", "expected no attribute more (hint: it takes axis, dim, outer)"),
    ],
)
def test_splits_that_there_are_not(how: str, message: str):
    assert message in (refusal(parse(SCATTER.format(how))) or "")
    verify(parse(SCATTER.format("dim=0, outer=1")))


def test_an_unknown_axis():
    text = SCATTER.format("dim=0").replace('axis="dp"', 'axis="tp"')
    assert "mesh stage0 has no axis 'tp'" in (refusal(parse(text)) or "")


@pytest.mark.parametrize("role", ["data(x)", "data(1.0)", "data(-1)", "data((0,))", "parameter source=(4.0, 5)"])
def test_roles_of_odd_values(role: str):
    try:
        f = parse(TRANSPOSE.format("(1, 0)").replace("f64[4, 5])", f"f64[4, 5] {role})"))
    except ModelError:
        return
    assert refusal(f) is not None


def test_a_kind_must_be_known():
    with pytest.raises(TypeError, match="expected a kind of"):
        declared("axis:dimension")


def test_a_result_has_a_dtype_and_a_shape():
    with pytest.raises(IRTypeError, match=r"attribute value: expected numbers of i64, got 0\.5"):
        infer(lookup("Constant"), Attributes(value=(0.5,), dtype=Int64, shape=(1,)), ())
    with pytest.raises(IRTypeError, match="expected a dim of a table of rank 2, got 2"):
        infer(lookup("GatherGrad"), Attributes(rows=4, axis=2), (Tensor(Float64, (3, 2)), Tensor(Int64, (3,))))
