"""Axes that split dims of inputs by name: context parallelism, experts, channels; exact beside all other axes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

import distir
from distir.api import load, simulate
from distir.ir import Function, FunctionMaker, Op
from distir.ir.errors import InfeasibleError, UsageError
from distir.ir.function import Role
from distir.ir.placement import REPLICATE
from distir.ir.spec import FactorMapping
from distir.ir.type import Float64, Shard, Tensor, Tuple
from distir.ops.rules import tensor
from distir.transforms import plan as plans_of
from distir.transforms.differentiation.training import training_step
from distir.transforms.sharding.classes import Classes
from distir.transforms.sharding.graph import graph_of
from distir.transforms.sharding.input_split import beside
from distir.transforms.sharding.place import Placed
from distir.transforms.sharding.zero import shard_state
from tests.transforms.programs import EXAMPLES, PLAIN, Plan, Program, check, distributed, filled, gpt2_tiny, small_gpt
from tests.transforms.test_tensor_parallel import body, executed

CP2, CP4 = ("cp=2:*.1",), ("cp=4:*.1",)


def along(function: Function, axis: str) -> Iterator[Op]:
    """The collectives over an axis, or over several with it, as they run."""
    for op in executed(function):
        given = op.attributes.get("axis", ())
        if op.spec.comm is not None and axis in ((given,) if isinstance(given, str) else given):
            yield op


def shapes(op: Op) -> list[tuple[int, ...]]:
    t = op.outputs[0].type
    return [tensor_type.global_shape for tensor_type in (t.types if isinstance(t, Tuple) else (t,))]  # type: ignore[union-attr]


def sent(function: Function) -> Counter[tuple[str, tuple[int, ...]]]:
    """The collectives over cp, with the sorted shape of what each communicates."""
    return Counter((op.op_type, tuple(sorted(shape))) for op in along(function, "cp") for shape in shapes(op))


# ---------------------------------------------------------------- context parallelism


@pytest.mark.parametrize(
    "plan",
    [
        Plan(split=CP2),
        Plan(split=CP4),
        Plan(2, 2, 1, 2, split=CP2),
        Plan(1, 2, 2, 4, "gpipe", split=CP2),
        Plan(2, 1, 1, 2, zero=1, split=CP2),
        Plan(2, 1, 2, 2, zero=2, split=CP2, recompute="selective"),
        Plan(2, 1, 1, 1, zero=3, split=CP2, recompute="full"),
        Plan(2, 2, 1, 4, zero=3, split=CP2, overlap=False),
        Plan(1, 1, 2, 4, "interleaved", chunks=2, split=CP2),
        Plan(2, 1, 2, 2, host=True, split=CP2),
        Plan(1, 1, 1, 2, split=("cp=2:input_ids.1,labels.1,position_ids.1",)),
    ],
    ids=str,
)
def test_context_parallelism_equals_sequential(plan: Plan) -> None:
    check(small_gpt(layers=2 * plan.chunks), plan)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("plan", [Plan(), Plan(2, 2, 1, 2), Plan(1, 1, 2, 4), Plan(2, 1, 1, 2, zero=3)], ids=str)
def test_context_parallelism_of_gpt2_equals_sequential(plan: Plan, cp: int) -> None:
    check(gpt2_tiny(), plan._replace(split=(f"cp={cp}:*.1",)))


@pytest.mark.parametrize("split", [CP2, CP4])
@pytest.mark.parametrize("tp", [1, 2])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(tp: int, split: tuple[str, ...]) -> None:
    """Two of each a layer, and nothing else but sums of the loss and of gradients of weights."""
    batch, heads, sequence, size = 8, 4, 4, 2
    forward, backward = [
        [sent(body(small_gpt(n), Plan(1, tp, split=split), name)) for n in (1, 2, 3)] for name in ("fwd0", "bwd0")
    ]
    of_layer = (*sorted((batch, heads, sequence, size)),)
    assert forward[1] - forward[0] == forward[2] - forward[1] == {("MPIAllgather", of_layer): 2}
    more = backward[2] - backward[1]
    assert {key: n for key, n in more.items() if key[0] != "MPIAllreduce"} == {("MPIReduceScatter", of_layer): 2}
    assert all(len(shape) <= 2 for kind, shape in more if kind == "MPIAllreduce")  # of weights
    assert {kind for kind, _ in forward[0]} <= {"MPIAllgather", "MPIAllreduce", "LocalSlice"}


@pytest.mark.parametrize("tp", [1, 2])
def test_queries_stay_split(tp: int) -> None:
    """A device has its rows of all that has a dim of the sequence, but for keys and values."""
    function = body(small_gpt(), Plan(1, tp, split=CP2), "fwd0")
    for op in executed(function):
        t = op.outputs[0].type
        if isinstance(t, Tensor) and len(t.shape) > 2:  # of tokens
            assert (t.on("cp").dim is None) == (op.op_type == "MPIAllgather"), op
    rows = [tensor(op.outputs[0]) for op in executed(function) if op.op_type == "Attention"]
    assert [t.on("cp") for t in rows] == [Shard(2)] * 2


def test_labels_and_ids_are_given_split() -> None:
    function = distributed(small_gpt(), Plan(2, split=CP2)).program
    found = {v.name: tensor(v).on("cp") for v in function.inputs if v.kind != "parameter"}
    assert found["input_ids"] is found["labels"] is Shard(1)
    assert found["position_ids"] is Shard(1)
    assert all(tensor(v).on("cp").dim is None for v in function.inputs if v.kind == "parameter")


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_predicted_memory_falls(recompute: str) -> None:
    model = load(EXAMPLES / "gpt2-tiny.onnx", {"batch": 256}, loss="cross-entropy", optimizer="sgd")
    plans = [
        plans_of.Plan(split=(plans_of.InputSplit.parse(f"cp={n}:*.1"),) if n > 1 else (), recompute=recompute)
        for n in (1, 2, 4, 8)
    ]
    peaks = [max(s.tensors for s in simulate(model, p, "dgx-a100").simulation.stages) for p in plans]
    for before, after in itertools.pairwise(peaks):
        assert after < 0.8 * before, peaks


def test_gradients_are_reduced_once_over_replicas_and_the_sequence() -> None:
    function = distributed(small_gpt(), Plan(2, split=CP2, bucket_mb=0)).program
    sums = [op for op in executed(function) if op.op_type == "MPIAllreduce"]
    weights = sum(v.kind == "parameter" for v in function.inputs)
    assert sum(op.attributes["axis"] in (("dp", "cp"), ("cp", "dp")) for op in sums) >= weights
    assert not [op for op in sums if op.attributes["axis"] == "dp"]


# ---------------------------------------------------------------- other dims


@functools.cache
def experts(count: int = 4, tokens: int = 4, width: int = 6) -> Program:
    """Every expert's tokens, from a dispatch that data give, through its own weights, and back."""
    f = FunctionMaker("experts")
    x = f.add_input_value("x", Tensor(Float64, (8, tokens, width)), Role("data", 0))
    w0 = f.add_input_value("router", Tensor(Float64, (width, width)), Role("parameter"))
    x = f.emit("Tanh", f.emit("MatMul", x, w0))
    up = f.add_input_value("up", Tensor(Float64, (count, width, 10)), Role("parameter"))
    down = f.add_input_value("down", Tensor(Float64, (count, 10, width)), Role("parameter"))
    dispatch = f.add_input_value("dispatch", Tensor(Float64, (count, 8 * tokens)), Role("constant"))
    rows = f.emit("Reshape", x, shape=(8 * tokens, width))
    mine = f.emit("Mul", f.emit("Reshape", dispatch, shape=(count, 8 * tokens, 1)), rows)
    y = f.emit("MatMul", f.emit("Relu", f.emit("MatMul", mine, up)), down)
    y = f.emit("ReduceSum", y, axes=(0,), keepdims=0)
    f.set_outputs([f.add_op("Identity", "y", [f.emit("Reshape", y, shape=(8, tokens, width))])])
    return filled(training_step(f.finalize(), "mse", PLAIN, gradients=True), {}, np.random.default_rng(0))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("plan", [Plan(), Plan(2), Plan(1, 2), Plan(2, zero=3), Plan(1, 1, 2)], ids=str)
def test_experts(plan: Plan, n: int) -> None:
    """Their weights, gradients and optimizer stay on the device that has them: nothing of them is sent."""
    function = check(experts(), plan._replace(split=(f"ep={n}:up.0,down.0",)))
    for v in function.inputs:
        if v.name in ("up", "down"):
            assert tensor(v).on("ep").dim == 0
    for op in along(function, "ep"):
        assert all(s not in ((4, 6, 10), (4, 10, 6)) for s in shapes(op)), op


@pytest.mark.parametrize(
    "split",
    [
        ("a=2:input_ids.1,labels.0",),
        ("a=2:h0.mlp.fc.weight.1", "b=2:h1.mlp.fc.weight.0"),
        ("a=2:wte.0",),
        ("a=2:wpe.0,input_ids.1",),
        ("a=2:*.1", "b=2:*.1"),
        ("a=2:*.1", "b=2:*.0"),
        ("a=4:input_ids.0",),
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", [Plan(), Plan(2, 1, 1, 2), Plan(1, 2)], ids=str)
def test_odd_choices_are_exact_or_refused(plan: Plan, split: tuple[str, ...]) -> None:
    with contextlib.suppress(InfeasibleError):
        check(small_gpt(), plan._replace(split=split))


@pytest.mark.parametrize("plan", [Plan(), Plan(2, 1, 1, 2), Plan(1, 2)], ids=str)
def test_each_axis_splits_what_it_names(plan: Plan) -> None:
    """Of one class: the labels are gathered along one axis, to be split along the other as what they are for."""
    function = check(small_gpt(), plan._replace(split=("a=2:input_ids.1", "b=2:labels.1")))
    given = {v.name: (tensor(v).on("a").dim, tensor(v).on("b").dim) for v in function.inputs}
    assert given["input_ids"] == (1, None)
    assert given["labels"] == (None, 1)


@pytest.mark.parametrize("plan", [Plan(), Plan(2, zero=2), Plan(1, 1, 2, 2)], ids=str)
def test_weights_of_one_class_along_two_axes(plan: Plan) -> None:
    """Their next values are split as they are."""
    check(small_gpt(), plan._replace(split=("a=2:h0.mlp.fc.weight.1", "b=2:h0.mlp.proj.weight.0")))


def test_a_dim_that_does_not_divide() -> None:
    with pytest.raises(InfeasibleError) as e:
        distributed(small_gpt(), Plan(split=("cp=3:input_ids.1",)))
    assert "input_ids" in e.value.message
    assert "\n" not in e.value.message


@pytest.mark.parametrize("text", ["", "cp", "cp=2", "cp=2:", "cp=0:x.1", "cp=x:x.1", "cp=2:x", "cp=2:x.-1", "2=2:x.1"])
def test_text_that_says_no_axis(text: str) -> None:
    with pytest.raises(UsageError, match="split: ") as e:
        distir.Plan(split=(text,))  # type: ignore[arg-type]
    assert "\n" not in e.value.message


def test_a_cast_that_another_axis_splits_stays_whole_under_zero() -> None:
    """dp holds rows of a weight; what is computed point by point from it is not, where another axis has such rows."""
    f = FunctionMaker("cast")
    w = f.add_input_value("w", Tensor(Float64, (4, 6)), Role("parameter"))
    f.set_outputs([f.emit("Tanh", w)])
    graph = graph_of(f.finalize())
    (weight,) = graph.inputs

    def under_zero(other: Shard | None) -> FactorMapping | None:
        mapping = None if other is None else graph.sigs[0].mapping(0, other, 2)
        others = [(Placed(0.0, [mapping], set(), {}), 2)]
        made = shard_state(graph, Placed(0.0, [None], set(), {}), 2, 3, others)
        assert made.inputs == {weight: Shard(0)}
        return made.mappings[0]

    assert under_zero(Shard(0)) is None  # the same rows
    for other in (None, Shard(1), Shard(0, 2)):  # nothing, columns, and rows inside those of dp
        mapping = under_zero(other)
        assert mapping is not None
        assert mapping.ins == mapping.outs == (Shard(0),)


def test_mappings_beside_one_with_a_halo() -> None:
    """No other axis splits a dim of which an op takes a halo, also not inside; nor the other way round."""
    wide = FactorMapping((Shard(2, halo=(1, 1, 0.0)), REPLICATE), (Shard(2),))
    inner = FactorMapping((Shard(2, 2), REPLICATE), (Shard(2, 2),))
    other_dim = FactorMapping((Shard(3, halo=(1, 1, 0.0)), REPLICATE), (Shard(3),))
    whole = FactorMapping((REPLICATE, Shard(0)), (Shard(1),))
    plain = FactorMapping((Shard(2), REPLICATE), (Shard(2),))
    rows = [wide, inner, other_dim, whole, plain]
    assert beside(rows, 2, wide, 2) == [other_dim, whole]
    assert beside(rows, 2, inner, 2) == [other_dim, whole, plain]
    assert beside(rows, 2, other_dim, 2) == [wide, inner, whole, plain]
    assert beside(rows, 2, None, 2) == rows


def test_classes_with_halos_clash_with_others_of_the_dim() -> None:
    """Of an image whose rows have halos along one axis, a part of these rows along another; not columns."""
    f = FunctionMaker("image")
    x = f.add_input_value("x", Tensor(Float64, (8, 2, 8, 8)), Role("data", 0))
    given = {"strides": (1, 1), "dilations": (1, 1), "groups": 1}
    w = f.add_input_value("w", Tensor(Float64, (2, 2, 3, 3)), Role("parameter"))
    h = f.emit("Conv", x, w, **given, pads=(1,) * 4)
    f.set_outputs([f.emit("Tanh", h)])
    graph = graph_of(f.finalize())
    image = graph.inputs[0]
    rows = Classes(graph, 2, [(image, Shard(2))])
    inside = Classes(graph, 2, [(image, Shard(2, 2))])
    columns = Classes(graph, 2, [(image, Shard(3))])
    (c,) = set(rows.at[image].values())
    assert c in rows.with_halos
    assert rows.clashing(2, inside, 2) >= {c}
    assert inside.clashing(2, rows, 2) >= set(inside.at[image].values())
    assert not rows.clashing(2, columns, 2)
