"""Gathers change places with what expands a value, reduce-scatters with what sums it up, where less is sent then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import distir
from distir.executor import SequentialExecutor
from distir.executor.simulator.categories import leaves
from distir.ir import Function, FunctionMaker, Value, verify
from distir.ir.device import Device, Mesh
from distir.ir.type import SUM, BFloat16, Float32, Float64, Placement, Shard, Tensor
from distir.ops.rules import tensor
from distir.transforms.passes import PassContext, run_passes
from distir.transforms.pipeline.send_narrow import send_narrow
from distir.transforms.plan import InputSplit

MESH = Mesh([Device("cpu", k) for k in range(2)], {"cp": 2}, "line")
Build = Callable[[FunctionMaker, Value], list[Value]]


def function(shape: tuple[int, ...], placed: Placement, build: Build) -> Function:
    """What is built on an input of this shape, placed so over two devices."""
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor.whole(Float32, shape, MESH, (placed,)))
    f.set_outputs(build(f, x))
    return f.finalize()


def after(before: Function) -> list[str]:
    """The ops after the pass, which gives the same values of the same types."""
    found = send_narrow(before)
    verify(found)
    assert [v.type for v in found.outputs] == [v.type for v in before.outputs]
    x = np.random.default_rng(0).integers(-9, 9, tensor(before.inputs[0]).global_shape).astype(np.float32)
    for got, want in zip(
        SequentialExecutor().compute(found, [x]), SequentialExecutor().compute(before, [x]), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert send_narrow(found) is found
    return [op.op_type for op in found.ops]


def expanded(f: FunctionMaker, x: Value) -> Value:
    """Each row of 8 by 4 three times, as 24 rows; in float64."""
    y = f.emit("Expand", f.emit("Reshape", x, shape=(8, 1, 4)), shape=(8, 3, 4))
    return f.emit("Reshape", f.emit("Cast", y, to=Float64), shape=(24, 4))


def test_what_is_expanded_is_gathered_before() -> None:
    f = function((8, 4), Shard(1), lambda f, x: [f.emit("MPIAllgather", expanded(f, x), axis="cp")])
    assert after(f) == ["Reshape", "MPIAllgather", "Expand", "Cast", "Reshape"]


def test_what_is_summed_up_is_scattered_after() -> None:
    def build(f: FunctionMaker, x: Value) -> list[Value]:
        y = f.emit("MPIReduceScatter", x, axis="cp", dim=1)
        y = f.emit("ReduceSum", f.emit("Reshape", y, shape=(8, 3, 4)), axes=(1,), keepdims=0)
        return [f.emit("Reshape", y, shape=(4, 2, 4))]

    f = function((24, 4), SUM, build)
    assert after(f) == ["Reshape", "ReduceSum", "MPIReduceScatter", "Reshape"]
    (scatter,) = [op for op in send_narrow(f).ops if op.spec.comm]
    assert scatter.attributes["dim"] == 1


@pytest.mark.parametrize(
    ("shape", "placed", "build"),
    [
        # used as it is
        ((8, 4), Shard(1), lambda f, x: [f.emit("MPIAllgather", y := expanded(f, x), axis="cp"), f.emit("Neg", y)]),
        # a result
        ((8, 4), Shard(1), lambda f, x: [f.emit("MPIAllgather", y := expanded(f, x), axis="cp"), y]),
        # no wider
        ((8, 4), Shard(0), lambda f, x: [f.emit("MPIAllgather", f.emit("Neg", x), axis="cp")]),
        # two ops would be done on every device
        (
            (8, 4),
            Shard(0),
            lambda f, x: [f.emit("MPIAllgather", f.emit("Neg", f.emit("Cast", x, to=Float64)), axis="cp")],
        ),
        # what is summed up is split
        ((8, 4), SUM, lambda f, x: [f.emit("ReduceSum", f.emit("MPIReduceScatter", x, axis="cp", dim=0), axes=(0,))]),
        # a sum in 16 bits is another one
        ((8, 4), SUM, lambda f, x: [f.emit("Cast", f.emit("MPIReduceScatter", x, axis="cp", dim=0), to=BFloat16)]),
        # no sum passes it
        (
            (8, 4),
            SUM,
            lambda f, x: [f.emit("ReduceMax", f.emit("MPIReduceScatter", x, axis="cp", dim=0), axes=(1,), keepdims=0)],
        ),
    ],
)
def test_others_stay(shape: tuple[int, ...], placed: Placement, build: Build) -> None:
    f = function(shape, placed, build)
    assert send_narrow(f) is f


def test_gradients_know_what_their_forward_ops_have_become() -> None:
    """A scatter is done where the last op was that it changes places with, after what that is the gradient of."""

    def build(f: FunctionMaker, x: Value) -> list[Value]:
        y = f.emit("MPIReduceScatter", x, axis="cp", dim=1)
        forward = f.emit("Neg", x)
        total = f.add_op("ReduceSum", None, [y], {"axes": (0,), "keepdims": 1}, of=f.ops[-1])
        again = f.add_op("Neg", None, [total], of=f.ops[-1])
        return [f.add_op("Neg", None, [again], of=f.ops[-1]), forward]

    f = function((24, 4), SUM, build)
    assert after(f) == ["Neg", "ReduceSum", "MPIReduceScatter", "Neg", "Neg"]
    ops = send_narrow(f).ops
    assert [op.of and ops.index(op.of) for op in ops] == [None, 0, None, 1, 3]


LLAMA = "llama:layers=2,hidden=32,heads=8,kv_heads=2,vocab=64,seq=16,batch=8"
CONTEXT = InputSplit("cp", 2, (("input_ids", 1), ("labels", 1)))


def split_dims(model: distir.Model, *axes: InputSplit) -> dict[str, list[tuple[int, int]]]:
    numbers = {v.name: k for k, v in enumerate(model.function.inputs)}
    return {axis.axis: [(numbers[name], dim) for name, dim in axis.dims] for axis in axes}


def collectives(f: Function) -> int:
    return len([op for op in f.ops if op.spec.route == "axis"])


def test_keys_and_values_are_sent_with_the_heads_that_they_have() -> None:
    """Both ways: of 4 heads of queries that share one, a quarter of what expanded keys and values would be."""
    model = distir.load(LLAMA, loss="cross-entropy", dtype="float64")
    plan = distir.Plan(microbatches=2, split=(CONTEXT,))
    context = PassContext(plan, [Device("cpu", k) for k in range(2)], splits=split_dims(model, CONTEXT))
    placed = run_passes(model.function, ("fuse", "decompose", "pad", "place"), context)

    def sent(f: Function) -> list[int]:
        """The bytes of each value of several heads that is gathered or scattered, whole; some are sent together."""
        sends = [op for op in f.ops if op.op_type in ("MPIAllgather", "MPIReduceScatter")]
        pairs = [
            pair for op in sends for pair in zip(leaves(op.inputs[0].type), leaves(op.outputs[0].type), strict=True)
        ]
        return [max(a.bytes, b.bytes) for a, b in pairs if len(b.shape) > 3]

    wide, narrow = sent(placed), sent(run_passes(placed, ("narrow",), context))
    program = distir.distribute(model, distir.Plan(split=(CONTEXT,)))
    assert sorted([n for f in (program, *program.callees()) for n in sent(f)]) == sorted([2 * n for n in narrow])
    assert len(wide) == 2 * 2 * 2  # keys and values, forward and backward, of each layer
    assert narrow == [n // 4 for n in wide]


def test_along_two_axes_all_is_sent_narrow() -> None:
    model = distir.load(LLAMA, loss="cross-entropy", dtype="float64")
    pairs = tuple([InputSplit(axis, 2, CONTEXT.dims) for axis in ("cp", "cq")])
    context = PassContext(
        distir.Plan(split=pairs), [Device("cpu", k) for k in range(4)], splits=split_dims(model, *pairs)
    )
    joined = run_passes(model.function, ("fuse", "decompose", "pad", "place", "join"), context)
    narrow = run_passes(joined, ("narrow",), context)
    assert collectives(narrow) == collectives(joined)
    assert send_narrow(narrow) is narrow


@pytest.mark.parametrize("more", [{}, {"tp": 2, "sequence_parallel": True, "recompute": "full"}, {"dp": 2, "zero": 3}])
def test_the_step_is_the_same(more: dict[str, object]) -> None:
    model = distir.load(LLAMA, loss="cross-entropy", optimizer="adamw", dtype="float64")
    plan = distir.Plan(pp=2, microbatches=2, split=(CONTEXT,), **more)  # type: ignore[arg-type]
    result = distir.run(model, plan, steps=2, backend="numpy", check=True)
    assert result.check is not None
