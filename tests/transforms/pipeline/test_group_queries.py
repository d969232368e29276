"""Attention takes keys and values that queries share as they are, wherever they are held; else it is left alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distir
from distir.executor import SequentialExecutor
from distir.ir import Function, FunctionMaker, Value, validate, verify
from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError, MismatchError
from distir.ir.function import Op
from distir.ir.type import REPLICATE, Float64, Placement, Shard, Tensor
from distir.ops.rules import shape_of
from distir.transforms.differentiation.grad import grad
from distir.transforms.pipeline.group_queries import group_queries
from distir.transforms.plan import InputSplit
from tests.transforms.programs import error

MESH = Mesh([Device("cpu", k) for k in range(2)], {"tp": 2}, "pair")


def repeated(f: FunctionMaker, x: Value, times: int) -> Value:
    """Each head of keys or values that many times in a row."""
    *lead, heads, length, width = shape_of(x)
    x = f.emit("Reshape", x, shape=(*lead, heads, 1, length, width))
    x = f.emit("Expand", x, shape=(*lead, heads, times, length, width))
    return f.emit("Reshape", x, shape=(*lead, heads * times, length, width))


def program(
    lead: tuple[int, ...] = (2,),
    heads: int = 2,
    times: int = 3,
    queries: int = 5,
    keys: int = 5,
    width: int = 3,
    **form: Any,
) -> Function:
    """The sum of weighed attention."""
    f = FunctionMaker("f")
    shapes = {"q": (*lead, heads * times, queries, 4), "k": (*lead, heads, keys, 4), "v": (*lead, heads, keys, width)}
    q, k, v = (f.add_input_value(n, Tensor(Float64, s)) for n, s in shapes.items())
    y, _ = f.emit("Attention", q, *[repeated(f, x, times) for x in (k, v)], scale=0.5, **form)
    weight = f.add_input_value("weight", Tensor(Float64, shape_of(y)))
    y = f.emit("Mul", y, weight)
    f.set_outputs([f.emit("ReduceSum", y, axes=tuple(range(len(shape_of(y)))), keepdims=0)])
    return f.finalize()


def kinds(f: Function) -> Counter[str]:
    ops = Counter(op.op_type for g in (f, *f.callees()) for op in g.ops)
    return Counter({name: n for name, n in ops.items() if "Attention" in name})


def agrees(before: Function) -> Function:
    """The function after the pass: it verifies, has the terms and the results of the one before."""
    after = group_queries(before)
    verify(after)
    validate(after, before)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape_of(v)) for v in before.inputs]
    run = SequentialExecutor().compute
    assert error(run(after, arrays), run(before, arrays)) <= 1e-12
    assert group_queries(after) is after
    forward = [op for op in after.ops if op.op_type == "GroupedAttention"]
    assert all(op.of in forward for op in after.ops if op.op_type == "GroupedAttentionGrad")
    return after


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([{}, {"causal": True}, {"causal": True, "window": 2}, {"softcap": 0.7}]),
    st.booleans(),
)
def test_it_computes_the_same(
    lead: list[int], heads: int, times: int, queries: int, keys: int, form: dict[str, Any], backward: bool
) -> None:
    f = program(tuple(lead), heads, times, queries, keys, **form)
    f = grad(f, 0, f.inputs[:3]) if backward else f
    after = agrees(f)
    assert kinds(after) == ({"GroupedAttention": 1, "GroupedAttentionGrad": 1} if backward else {"GroupedAttention": 1})
    assert "Reshape" not in {op.op_type for op in after.ops}


def changed(kind: str) -> Function:
    """A program in which keys are not repeated as they would have to be, or are used for something else too."""
    f = FunctionMaker("f")
    q = f.add_input_value("q", Tensor(Float64, (2, 6, 5, 4)))
    k, v = (f.add_input_value(n, Tensor(Float64, (2, 2, 5, 4))) for n in "kv")
    wide = repeated(f, k, 3)
    if kind == "other order":
        x = f.emit("Reshape", k, shape=(2, 1, 2, 5, 4))
        wide = f.emit("Reshape", f.emit("Expand", x, shape=(2, 3, 2, 5, 4)), shape=(2, 6, 5, 4))
    elif kind == "a size to be worked out":
        x = f.emit("Expand", f.emit("Reshape", k, shape=(2, 2, 1, 5, 4)), shape=(2, 2, 3, 5, 4))
        wide = f.emit("Reshape", x, shape=(2, -1, 5, 4))
    elif kind == "computed":
        wide = f.emit("Neg", wide)
    values = f.emit("Neg", repeated(f, v, 3)) if kind == "values alone" else repeated(f, v, 3)
    mask = [f.add_input_value("mask", Tensor(Float64, (5, 5)))] if kind == "a mask" else []
    y, _ = f.emit("Attention", q, wide, values, *mask, scale=0.5)
    y = f.emit("Add", y, wide) if kind == "another use" else y
    f.set_outputs([f.emit("ReduceSum", y, axes=(0, 1, 2, 3), keepdims=0)])
    return f.finalize()


LEFT = ["other order", "a size to be worked out", "computed", "values alone"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", LEFT)
def test_what_is_expanded_otherwise_is_left(kind: str, backward: bool) -> None:
    f = changed(kind)
    f = grad(f, 0, f.inputs[:3]) if backward else f
    assert group_queries(f) is f


APART = {"sizes left open before": (2, 2, 2, -1, 4), "in other parts": (2, 1, 2, 10, 4)}
JOINED = {"to another shape": (2, 20, 2), "sizes left open": (2, 2, 5, -1)}


def backward(kind: str) -> Function:
    """A gradient of keys that is summed otherwise than over the heads that share them, or is used as it is, too."""
    f = FunctionMaker("f")
    q = f.add_input_value("q", Tensor(Float64, (2, 4, 5, 4)))
    k, v = (f.add_input_value(n, Tensor(Float64, (2, 2, 5, 4))) for n in "kv")
    operands = [q, repeated(f, k, 2), repeated(f, v, 2)]
    y, lse = f.emit("Attention", *operands, scale=0.5)
    of = f.ops[-1]
    slots = [*operands, y, lse, f.add_input_value("d", Tensor(Float64, (2, 4, 5, 4)))]
    _, dk, dv = f.add_op("AttentionGrad", None, slots, {"scale": 0.5}, of=of)
    found: list[Value] = []
    for x, how in ((dv, "as it is"), (dk, kind)):
        apart = APART.get(how, (2, 2, 2, 5, 4))
        axis, keepdims = 1 if how == "over other heads" else 2, how != "without a dim"
        x = f.emit("ReduceSum", f.emit("Reshape", x, shape=apart), axes=(axis,), keepdims=int(keepdims))
        found.append(f.emit("Reshape", x, shape=JOINED.get(how, (2, 2, 5, 4))))
    f.set_outputs([y, *found, *([dk] if kind == "used as it is" else [])])
    return f.finalize()


OTHERWISE = ["over other heads", "without a dim", "used as it is"]


@pytest.mark.parametrize("kind", [*OTHERWISE, *APART, *JOINED])
def test_gradients_that_are_not_those_of_shared_heads_are_left(kind: str) -> None:
    assert kinds(agrees(backward("as it is"))).keys() == {"GroupedAttention", "GroupedAttentionGrad"}
    f = backward(kind)
    assert group_queries(f) is f


def test_masks_are_passed_on_unless_they_are_trained() -> None:
    f = changed("a mask")
    assert kinds(agrees(f)) == {"GroupedAttention": 1}
    assert kinds(agrees(grad(f, 0, f.inputs[:3]))) == {"GroupedAttention": 1, "GroupedAttentionGrad": 1}
    trained = grad(f, 0, f.inputs)
    assert group_queries(trained) is trained


def test_expanded_keys_that_are_used_elsewhere_too_stay_there() -> None:
    """Their gradient is summed with that of the other use before it is summed over heads: then nothing is grouped."""
    f = changed("another use")
    after = agrees(f)
    assert kinds(after) == {"GroupedAttention": 1}
    assert [op.op_type for op in after.ops].count("Expand") == 1
    g = grad(f, 0, f.inputs[:3])
    assert group_queries(g) is g


def placed(heads: Placement, keys: Placement, times: int = 2, mask: Any = ()) -> Function:
    """Attention of 2 heads of keys on two devices."""
    f = FunctionMaker("f")
    types = [(2, 2 * times, 4, 4), heads], [(2, 2, 4, 4), keys], [(2, 2, 4, 4), keys]
    q, k, v = (
        f.add_input_value(n, Tensor.whole(Float64, s, MESH, [p])) for n, (s, p) in zip("qkv", types, strict=True)
    )
    masks = [f.add_input_value("mask", Tensor.whole(Float64, s, MESH, [p])) for s, p in ([mask] if mask else [])]
    f.set_outputs(f.emit("GroupedAttention", q, k, v, *masks))
    return f.finalize()


@pytest.mark.parametrize(
    ("keys", "values", "mask"),
    [((2, 3, 4, 4), (2, 3, 4, 4), None), ((2, 2, 4, 4), (2, 4, 4, 4), None), ((2, 2, 4, 4), (2, 2, 4, 4), (3, 4, 4))],
    ids=str,
)
def test_operands_that_do_not_fit_are_refused(
    keys: tuple[int, ...], values: tuple[int, ...], mask: tuple[int, ...] | None
) -> None:
    f = FunctionMaker("f")
    shapes = [(2, 4, 4, 4), keys, values, *([mask] if mask else [])]
    given = [f.add_input_value("x", Tensor(Float64, s)) for s in shapes]
    with pytest.raises(IRTypeError, match="expected"):
        f.emit("GroupedAttention", *given)


@pytest.mark.parametrize(
    ("operand", "shape"),
    [(3, (2, 4, 4, 5)), (4, (2, 4, 5)), (5, (2, 4, 5, 4)), (6, (3, 4, 4)), (6, (1, 1, 1, 4, 4))],
    ids=str,
)
def test_what_does_not_fit_a_gradient_is_refused(operand: int, shape: tuple[int, ...]) -> None:
    f = FunctionMaker("f")
    y, keys = (2, 4, 4, 4), (2, 2, 4, 4)
    shapes = [y, keys, keys, y, y[:-1], y, (4, 4)]
    shapes[operand] = shape
    given = [f.add_input_value("x", Tensor(Float64, s)) for s in shapes]
    with pytest.raises(IRTypeError, match=f"operand {operand}: expected"):
        f.emit("GroupedAttentionGrad", *given)


@pytest.mark.parametrize(
    ("heads", "keys", "times"),
    [
        (Shard(0), Shard(0), 2),
        (Shard(1), Shard(1), 3),
        (Shard(1, 2), REPLICATE, 2),  # each device has half of the heads of queries of each head of keys
        (Shard(2), REPLICATE, 3),
    ],
    ids=str,
)
def test_heads_of_keys_are_split_with_those_of_queries(heads: Placement, keys: Placement, times: int) -> None:
    y, lse = placed(heads, keys, times).outputs
    assert [v.type.placements for v in (y, lse)] == [(heads,), (heads,)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("mask", "heads", "keys", "held"),
    [
        ((1, 1, 4, 4), Shard(0), Shard(0), REPLICATE),
        ((2, 1, 1, 4), Shard(0), Shard(0), Shard(0)),
        ((4, 4, 4), Shard(1), Shard(1), Shard(0)),
        ((4, 4, 4), Shard(1, 2), REPLICATE, Shard(0, 2)),
        ((4, 4), Shard(2), REPLICATE, Shard(0)),
        ((1, 4), Shard(2), REPLICATE, REPLICATE),
    ],
    ids=str,
)
def test_masks_are_split_with_the_scores(
    mask: tuple[int, ...], heads: Placement, keys: Placement, held: Placement
) -> None:
    y, _ = placed(heads, keys, mask=(mask, held)).outputs
    assert y.type.placements == (heads,)  # type: ignore[union-attr]
    other = REPLICATE if isinstance(held, Shard) else Shard(len(mask) - 1)
    with pytest.raises(IRTypeError, match="operand 3"):
        placed(heads, keys, mask=(mask, other))


@pytest.mark.parametrize(
    ("heads", "keys"),
    [(Shard(1), REPLICATE), (Shard(1, 2), Shard(1)), (Shard(2), Shard(2)), (Shard(3), REPLICATE)],
    ids=str,
)
def test_other_splits_are_refused(heads: Placement, keys: Placement) -> None:
    with pytest.raises(IRTypeError, match="operand"):
        placed(heads, keys)


SIZES = "llama:layers=2,hidden=32,heads=8,kv_heads={},vocab=64,seq=16,batch=8"
CONTEXT = (InputSplit("cp", 2, (("input_ids", 1), ("labels", 1))),)
PLANS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (1, {"dp": 2, "microbatches": 2, "zero": 1}),
    (2, {"tp": 2, "pp": 2, "microbatches": 2}),
    (2, {"tp": 4, "dp": 2}),  # the heads of queries that share one of keys are split
    (1, {"tp": 2, "sequence_parallel": True, "recompute": "full"}),
    (2, {"tp": 2, "sequence_parallel": True, "recompute": "selective", "microbatches": 2}),
    (2, {"split": CONTEXT}),
    (2, {"pp": 2, "microbatches": 2, "recompute": "full", "split": CONTEXT}),
    (4, {"dp": 2, "zero": 3, "pp": 2, "microbatches": 4}),
    (1, {"tp": 2, "split": CONTEXT}),  # gradients of keys are summed along both
    (1, {"tp": 4, "microbatches": 2, "split": CONTEXT, "sequence_parallel": True}),
]
"""Heads of keys, and a plan."""


@pytest.mark.parametrize(("heads", "plan"), PLANS, ids=str)
def test_steps_keep_keys_and_values_as_they_are(heads: int, plan: dict[str, Any]) -> None:
    """Forward and backward, under a plan; nothing is expanded to all heads, and the step is the same."""
    model = distir.load(SIZES.format(heads), loss="cross-entropy", optimizer="adamw", dtype="float64")
    f = distir.distribute(model, distir.Plan(**plan))
    found = kinds(f)
    assert found.keys() == {"GroupedAttention", "GroupedAttentionGrad"}
    everything = [op for g in (f, *f.callees()) for op in g.ops]
    assert not [op for op in everything if op.op_type == "Expand" and len(shape_of(op.outputs[0])) > 3]
    result = distir.run(model, distir.Plan(**plan), steps=2, backend="numpy", check=True)
    assert result.check is not None
    assert result.check.ok


def test_what_is_gathered_for_something_else_too_is_gathered_once() -> None:
    """Of two attentions that share keys and values one takes values that are computed: it needs them expanded."""
    f = FunctionMaker("f")
    q = f.add_input_value("q", Tensor.whole(Float64, (2, 4, 4, 4), MESH, [Shard(2)]))
    wide: list[Value] = []
    for name in "kv":
        x = f.add_input_value(name, Tensor.whole(Float64, (2, 2, 4, 4), MESH, [Shard(2)]))
        x = f.emit("MPIAllgather", f.emit("Reshape", x, shape=(2, 2, 1, 4, 4)), axis="tp")
        wide.append(f.emit("Reshape", f.emit("Expand", x, shape=(2, 2, 2, 4, 4)), shape=(2, 4, 4, 4)))
    results = [f.emit("Attention", q, *row)[0] for row in (wide, [wide[0], f.emit("Neg", wide[1])])]
    f.set_outputs(results)
    after = agrees(f.finalize())
    assert kinds(after) == {"Attention": 1, "GroupedAttention": 1}
    assert [op.op_type for op in after.ops].count("MPIAllgather") == 2


def other(op: Op, fault: str) -> Op:
    """An op of attention that takes, or gives, something else."""
    ins, outs, attributes = list(op.inputs), list(op.outputs), op.attributes
    if fault == "keys for values":
        ins[2] = ins[1]
    elif fault == "gradients exchanged" and len(outs) == 3:
        outs[1], outs[2] = outs[2], outs[1]
    elif fault == "another scale":
        attributes = type(attributes)({**attributes, "scale": 0.25})
    elif fault == "no mask":
        attributes = attributes.without("causal")
    return Op(op.spec, tuple(ins), attributes, tuple(outs), op.of)


@pytest.mark.parametrize("fault", ["keys for values", "gradients exchanged", "another scale", "no mask"])
def test_faults_are_found(fault: str) -> None:
    f = program(queries=4, keys=4, width=4, causal=True)
    f = grad(f, 0, f.inputs[:3])
    right = group_queries(f)
    ops = tuple([other(op, fault) if "Attention" in op.op_type else op for op in right.ops])
    wrong = Function(right.name, right.inputs, ops, right.outputs, right.updates, right.sources)
    with pytest.raises(MismatchError):
        validate(wrong, f)
