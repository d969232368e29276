"""Collectives that follow each other along different axes become one along all, where that is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distir.executor import SequentialExecutor
from distir.ir import Function, FunctionMaker, Value, verify
from distir.ir.device import Device, Mesh
from distir.ir.type import REPLICATE, SUM, Float64, Partial, Placement, Shard, Tensor
from distir.transforms.pipeline.join_axes import join_axes
from tests.transforms.programs import Plan, check, collectives, small_gpt

SIZES = {"a": 2, "b": 2, "c": 2}
MESH = Mesh([Device("cpu", k) for k in range(8)], SIZES, "grid")
Step = tuple[str, str, dict[str, Any]]


def chain(placements: tuple[Placement, ...], *steps: Step, mesh: Mesh = MESH) -> Function:
    """An input, to which the collectives are applied one after another."""
    f = FunctionMaker("f")
    v = f.add_input_value("x", Tensor.whole(Float64, (8, 16), mesh, placements))
    for op, axis, given in steps:
        v = f.emit(op, v, axis=axis, **given)
    f.set_outputs([v])
    return f.finalize()


def joined(before: Function) -> list[tuple[str, Any]]:
    """The collectives after the pass, with their axes; the results are the same."""
    after = join_axes(before)
    verify(after)
    assert [v.type for v in after.outputs] == [v.type for v in before.outputs]
    terms = np.random.default_rng(0).integers(-9, 9, (8, 16)).astype(float)
    for got, want in zip(
        SequentialExecutor().compute(after, [terms]), SequentialExecutor().compute(before, [terms]), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert join_axes(after) is after
    return [(op.op_type, op.attributes["axis"]) for op in after.ops if "axis" in op.attributes]


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_sums(order: str) -> None:
    """Whatever their order is: the axes then are in the mesh's."""
    steps: list[Step] = [("MPIAllreduce", a, {}) for a in order]
    assert joined(chain((SUM, SUM, SUM), *steps)) == [("MPIAllreduce", ("a", "b", "c"))]
    assert joined(chain((SUM,) * 3, *steps[:2])) == [("MPIAllreduce", tuple(sorted(order[:2])))]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_gathers_and_scatters(order: str) -> None:
    """The axis whose parts are larger varies slowest, whatever was done first."""
    inner, outer = order[::-1]
    split = {outer: Shard(1), inner: Shard(1, 2), "c": REPLICATE}
    t = tuple([split[a] for a in "abc"])
    for first, second in ((outer, inner), (inner, outer)):
        gathers: list[Step] = [("MPIAllgather", first, {}), ("MPIAllgather", second, {})]
        assert joined(chain(t, *gathers)) == [("MPIAllgather", (outer, inner))]
        scatters: list[Step] = [("MPIReduceScatter", a, dict(split[a].attributes)) for a in (first, second)]
        assert joined(chain((SUM, SUM, REPLICATE), *scatters)) == [("MPIReduceScatter", (outer, inner))]


@pytest.mark.parametrize(
    ("placements", "steps"),
    [
        ((SUM, Partial("max"), REPLICATE), [("MPIAllreduce", "a", {}), ("MPIAllreduce", "b", {})]),
        ((Shard(0), Shard(1), REPLICATE), [("MPIAllgather", "a", {}), ("MPIAllgather", "b", {})]),
        ((Shard(0), Shard(0, 4), REPLICATE), [("MPIAllgather", "a", {}), ("MPIAllgather", "b", {})]),
        ((SUM, SUM, REPLICATE), [("MPIReduceScatter", "a", {"dim": 0}), ("MPIReduceScatter", "b", {"dim": 1})]),
        ((SUM, SUM, REPLICATE), [("MPIReduceScatter", "a", {"dim": 0}), ("MPIAllreduce", "b", {})]),
        ((SUM, SUM, REPLICATE), [("MPIReduceScatter", "a", {"dim": 0}), ("MPIAllgather", "a", {})]),
        ((Shard(0), Shard(0, 2), REPLICATE), [("MPIAlltoall", "b", {"dim": 1}), ("MPIAllgather", "a", {})]),
        ((Shard(0), Shard(1), SUM), [("HaloExchange", a, {"lo": 1, "hi": 1}) for a in "ab"]),
    ],
)  # fmt: skip
def test_others_stay(placements: tuple[Placement, ...], steps: list[Step]) -> None:
    before = chain(placements, *steps)
    assert join_axes(before) is before


def test_microbatches_stay() -> None:
    mesh = Mesh(MESH.devices[:4], {"mb": 2, "a": 2, "b": 2})
    before = chain(
        (SUM, SUM, SUM), ("MPIAllreduce", "mb", {}), ("MPIAllreduce", "a", {}), ("MPIAllreduce", "b", {}), mesh=mesh
    )
    assert [op.attributes["axis"] for op in join_axes(before).ops] == ["mb", ("a", "b")]


def test_what_is_used_between_stays() -> None:
    """By another op, or as an output."""
    for again in (True, False):
        f = FunctionMaker("f")
        x = f.add_input_value("x", Tensor.whole(Float64, (8, 16), MESH, (SUM, SUM, REPLICATE)))
        y = f.emit("MPIAllreduce", x, axis="a")
        z = f.emit("MPIAllreduce", y, axis="b")
        f.set_outputs([z, f.emit("MPIAllreduce", f.emit("Neg", y), axis="b") if again else y])
        before = f.finalize()
        assert join_axes(before) is before


def test_several_chains_at_once() -> None:
    f = FunctionMaker("f")
    xs = [f.add_input_value("x", Tensor.whole(Float64, (8, 16), MESH, (SUM, SUM, REPLICATE))) for _ in range(2)]
    ys: list[Value] = [f.emit("MPIAllreduce", x, axis="a") for x in xs]
    f.set_outputs([f.emit("Neg", f.emit("MPIAllreduce", y, axis="b")) for y in ys])
    after = join_axes(f.finalize())
    verify(after)
    assert [op.op_type for op in after.ops] == ["MPIAllreduce", "Neg"] * 2
    assert after.outputs == f.finalize().outputs


@pytest.mark.parametrize("plan", [Plan(2, split=("cp=2:*.1",)), Plan(2, 2, split=("cp=2:*.1",), zero=1)], ids=str)
def test_gradients_are_reduced_once(plan: Plan) -> None:
    """In buckets, too."""
    found = {}
    for bucket_mb in (0.0, 25.0):
        function = check(small_gpt(), plan._replace(bucket_mb=bucket_mb))
        found[bucket_mb] = sum(collectives(function, axes)["MPIAllreduce"] for axes in (("dp", "cp"), ("cp", "dp")))
    if not plan.zero:
        assert found[0.0] > 10
        assert 1 <= found[25.0] <= 4
