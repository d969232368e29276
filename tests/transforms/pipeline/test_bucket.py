"""Gradient buckets: which gradients are reduced together, when, and within the limit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import distir
from distir.ir import Device, Function, FunctionMaker, Mesh, Op, Value, verify
from distir.ir.errors import IRTypeError, UsageError
from distir.ir.type import REPLICATE, SUM, Float32, Float64, Partial, Shard, Tensor, Tuple
from distir.transforms.differentiation.training import AdamW
from distir.transforms.pipeline.bucket import bucket, reductions_first
from tests.transforms.programs import ADAMW, Plan, check, distributed, small_gpt

MESH = Mesh([Device("gpu", 0), Device("gpu", 1)], {"dp": 2}, "m")
W = Tensor.whole(Float32, (64,), MESH, (SUM,))
"""The type of a gradient of 256 bytes, a partial sum."""


def sums(f: Function) -> list[Op]:
    return [op for op in f.ops if op.spec.name in ("MPIAllreduce", "MPIReduceScatter")]


def members(op: Op) -> int:
    t = op.inputs[0].type
    return len(t.types) if isinstance(t, Tuple) else 1


def chain(types: list[Tensor], used_at: int | None = None) -> Function:
    """Every input negated and reduced, in order; the result of number `used_at` is used immediately."""
    f = FunctionMaker("f")
    outs = []
    for k, x in enumerate([f.add_input_value(f"x{k}", t) for k, t in enumerate(types)]):
        y = f.add_op("MPIAllreduce", f"y{k}", [f.emit("Neg", x)], {"axis": "dp"})
        outs.append(f.emit("Neg", y) if k == used_at else y)
    f.set_outputs(outs)
    return f.finalize()


@pytest.mark.parametrize(
    ("limit", "want"),
    [(0, [1] * 6), (256, [1] * 6), (257, [2, 2, 2]), (768, [3, 3]), (1025, [5, 1]), (math.inf, [6])],
)
def test_a_bucket_is_full_at_its_limit(limit: float, want: list[int]) -> None:
    f = bucket(chain([W] * 6), ("dp",), limit)
    verify(f)
    assert [members(op) for op in sums(f)] == want


def test_a_bucket_is_reduced_right_after_its_last_member() -> None:
    f = bucket(chain([W] * 4), ("dp",), 512)
    assert [op.spec.name for op in f.ops] == ["Neg", "Neg", "Pack", "MPIAllreduce", "Unpack"] * 2


def test_a_result_that_is_used_ends_its_bucket() -> None:
    f = bucket(chain([W] * 6, used_at=2), ("dp",), math.inf)
    verify(f)
    assert [members(op) for op in sums(f)] == [3, 3]


def test_dtypes_and_reductions_do_not_mix() -> None:
    double = Tensor.whole(Float64, (64,), MESH, (SUM,))
    most = Tensor.whole(Float32, (64,), MESH, (Partial("max"),))
    f = FunctionMaker("f")
    xs = [f.add_input_value(f"x{k}", t) for k, t in enumerate([W, double, most] * 2)]
    f.set_outputs([f.add_op("MPIAllreduce", f"y{k}", [x], {"axis": "dp"}) for k, x in enumerate(xs)])
    g = bucket(f.finalize(), ("dp",), math.inf)
    verify(g)
    assert [members(op) for op in sums(g)] == [2, 2, 2]


def test_nothing_to_do_gives_the_very_function() -> None:
    f = chain([W] * 3)
    assert bucket(f, ("dp",), 0) is f
    assert bucket(f, ("tp",), math.inf) is f
    assert reductions_first(f, ("tp",)) is f


def bundle(types: list[Tensor], op: str, **attributes: object) -> None:
    f = FunctionMaker("f")
    xs = [f.add_input_value(f"x{k}", t) for k, t in enumerate(types)]
    f.add_op(op, "y", [f.emit("Pack", *xs)], {"axis": types[0].mesh.axes[0] if types else "dp", **attributes})


def test_what_is_no_bundle_is_refused() -> None:
    double = Tensor.whole(Float64, (64,), MESH, (SUM,))
    most = Tensor.whole(Float32, (64,), MESH, (Partial("max"),))
    there = Tensor.whole(Float32, (64,), MESH, (REPLICATE,))
    for other in (double, most):
        with pytest.raises(IRTypeError, match="one dtype, mesh and reduction"):
            bundle([W, other], "MPIAllreduce")
    with pytest.raises(IRTypeError):
        bundle([W, there], "MPIAllreduce")
    with pytest.raises(IRTypeError, match="non-empty"):
        bundle([], "MPIAllreduce")
    with pytest.raises(IRTypeError, match="dim: expected 2 entries, got 1"):
        bundle([W, W], "MPIReduceScatter", dim=(0,), outer=(1,))
    in_time = Tensor.whole(Float32, (64,), Mesh([Device("gpu", 0)], {"mb": 2}, "t"), (SUM,))
    with pytest.raises(IRTypeError, match="in bundles"):
        bundle([in_time], "MPIAllreduce")


def test_a_bundle_is_typed_member_by_member() -> None:
    f = FunctionMaker("f")
    xs = [f.add_input_value(f"x{k}", Tensor.whole(Float32, (4, 8), MESH, (SUM,))) for k in range(2)]
    y = f.add_op("MPIReduceScatter", "y", [f.emit("Pack", *xs)], {"axis": "dp", "dim": (0, 1), "outer": (1, 1)})
    assert [t.placements for t in y.type.types] == [(Shard(0),), (Shard(1),)]
    z = f.add_op("MPIAllgather", "z", [y], {"axis": "dp"})
    assert [t.placements for t in z.type.types] == [(REPLICATE,)] * 2


@pytest.mark.parametrize("limit", [0, 0.001, math.inf])
def test_of_a_training_step(limit: float) -> None:
    """The first backward ops' gradients are reduced first, and all but the last bucket before the last gradient."""
    program = distributed(small_gpt(), Plan(2, bucket_mb=limit)).program
    (body,) = [f for f in program.callees() if f.name.startswith("bwd")]
    found = sums(body)
    weights = len([v for v in program.inputs if v.kind == "parameter"])
    assert sum(map(members, found)) >= weights
    if limit == 0:
        assert all(members(op) == 1 for op in found)
    elif limit == math.inf:
        assert len(found) == 1
    else:
        assert 1 < len(found) < weights
        made = [k for k, op in enumerate(body.ops) if op.spec.comm is None]
        assert body.ops.index(found[-2]) < made[-1]


@pytest.mark.parametrize("optimizer", [ADAMW, AdamW(0.01, clip_norm=0.1)], ids=["plain", "clipped"])
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_that_wait_for_the_backward_pass_share_buckets_too(zero: int, optimizer: AdamW) -> None:
    """Each is reduced beside its first use. All are reduced with the loss, or scattered."""
    plan = Plan(2, microbatches=2, overlap=False, bucket_mb=math.inf, zero=zero)
    step = small_gpt(layers=4, optimizer=optimizer)
    (update,) = [f for f in distributed(step, plan).program.callees() if f.name.startswith("update")]
    found = [op for op in sums(update) if op.attributes["axis"] == "dp"]
    weights = len([v for v in step.function.inputs if v.kind == "parameter"])
    assert members(found[0]) == weights + (zero == 0)
    check(step, plan)


def test_few_large_buckets_cost_fewer_latencies() -> None:
    model = distir.load("examples/gpt2-tiny.onnx", dims={"batch": 8}, loss="cross-entropy")
    seconds = [
        distir.simulate(model, distir.Plan(dp=8, bucket_mb=x), "dgx-h100").step_seconds for x in (0, 25, math.inf)
    ]
    assert seconds[0] > seconds[1]
    assert str(distir.Plan(dp=8, bucket_mb=4)).endswith("buckets of 4 MiB")
    assert distir.Plan(bucket_mb=math.inf).to_json()["bucket_mb"] == "inf"
    with pytest.raises(UsageError, match="bucket_mb"):
        distir.Plan(bucket_mb=math.nan)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_passes_send_along_an_axis_waits_for_no_reduction_along_another(zero: int) -> None:
    """Gradients of norms are summed over replicas and, with sequence parallelism, over the shards."""
    model = distir.load(
        "gpt:layers=4,hidden=16,heads=4,vocab=16,seq=4,batch=8", loss="cross-entropy", optimizer="adamw"
    )
    plan = distir.Plan(dp=2, tp=2, pp=2, microbatches=4, schedule="interleaved", chunks=2, zero=zero)
    program = distir.distribute(model, replace(plan, sequence_parallel=True))
    last = [op.callee for op in program.ops if op.callee is not None and op.attributes.get("mb") == 3]
    reduced = 0
    for body in last:
        behind: set[Value] = set()  # what needs a sum over the replicas
        for op in body.ops:
            axis = op.attributes.get("axis") if op.spec.comm is not None else None
            assert axis in (None, "dp") or behind.isdisjoint(op.inputs), f"{op} along {axis} waits for one along dp"
            if (axis == "dp" and op in sums(body)) or not behind.isdisjoint(op.inputs):
                behind.update(op.outputs)
                reduced += axis == "dp"
    assert reduced
