"""ZeRO: what is kept in parts, which collectives that takes, and how much memory is left."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import distir
from distir.executor.cost_model import CostModel
from distir.executor.simulator.memory import MemoryUse
from distir.executor.simulator.simulation import Simulator
from distir.hardware import load_cluster
from distir.ir import Function, FunctionMaker, Op, Role
from distir.ir.device import names_of
from distir.ir.errors import UsageError
from distir.ir.type import BFloat16, DType, Float32, Float64, Shard, Tensor
from distir.ops.rules import tensor
from distir.transforms.differentiation.training import SGD, AdamW, training_step
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.sharding.graph import graph_of
from distir.transforms.sharding.place import Placed
from distir.transforms.sharding.zero import shard_state
from tests.transforms.programs import Plan, Program, check, collectives, distributed, imported_mlp, small_gpt

ADAMW = AdamW(0.01)


def over_dp(f: Function) -> Counter[tuple[str, str]]:
    """(body without its number and turn, op) of every collective along dp."""
    found: Counter[tuple[str, str]] = Counter()
    for g in f.callees():
        phase = g.name.split(".")[0].rstrip("0123456789")
        for op in g.ops:
            if op.spec.name.startswith("MPI") and op.attributes["axis"] == "dp":
                found[phase, op.spec.name] += 1
    return found


def parts(f: Function, kind: str) -> tuple[int, int]:
    """How many inputs of a kind are split over dp, and how many there are."""
    types = [v.type for v in f.inputs if v.kind == kind and isinstance(v.type, Tensor) and v.type.shape]
    return sum(isinstance(t.on("dp"), Shard) for t in types), len(types)  # type: ignore[union-attr]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_kept_in_parts(zero: int) -> None:
    program = distributed(small_gpt(optimizer=ADAMW), Plan(2, zero=zero)).program
    assert parts(program, "state")[0] == (parts(program, "state")[1] if zero else 0)
    assert parts(program, "parameter")[0] == (parts(program, "parameter")[1] if zero == 3 else 0)


def test_gradients_are_scattered_once_or_in_each_microbatch() -> None:
    program = Program(training_step(matmuls(), "mse", ADAMW), [])
    scattered = [
        over_dp(distributed(program, Plan(2, 1, 1, 4, zero=zero, bucket_mb=0)).program)["bwd", "MPIReduceScatter"]
        for zero in (0, 1, 2)
    ]
    # the bodies of the first and of other microbatches are functions of their own
    assert scattered == [0, 3, 6]


def test_one_microbatch_makes_no_difference_between_1_and_2() -> None:
    program = Program(training_step(matmuls(), "mse", ADAMW), [])
    found = [over_dp(distributed(program, Plan(2, zero=zero, bucket_mb=0)).program) for zero in (1, 2)]
    assert found[0] == found[1]


def test_weights_are_gathered_in_both_passes_and_not_before() -> None:
    found = over_dp(distributed(small_gpt(), Plan(2, 1, 1, 2, zero=3, bucket_mb=0)).program)
    assert found["fwd", "MPIAllgather"] > 0
    assert found["bwd", "MPIAllgather"] > 0
    assert found["update", "MPIAllgather"] == 0


def test_a_dim_that_tensor_parallelism_splits_is_taken_last() -> None:
    program = distributed(imported_mlp(ADAMW), Plan(2, 2, zero=3)).program
    for v in program.inputs:
        t = v.type
        if v.kind == "parameter" and isinstance(t, Tensor) and len(t.shape) == 2:
            a, b = t.on("dp"), t.on("tp")
            assert isinstance(a, Shard)
            assert not isinstance(b, Shard) or a.dim != b.dim


def test_both_axes_split_the_only_dim() -> None:
    """A bias that tp splits is split by dp inside its parts."""
    check(imported_mlp(ADAMW), Plan(2, 2, 1, 2, zero=3))
    program = distributed(imported_mlp(ADAMW), Plan(2, 2, zero=3)).program
    both = [
        v
        for v in program.inputs
        if v.kind == "parameter" and isinstance(v.type, Tensor) and len(v.type.shape) == 1
        if isinstance(v.type.on("dp"), Shard) and isinstance(v.type.on("tp"), Shard)
    ]
    assert both


def odd(width: int) -> Program:
    """A product with a weight, and a gain, of odd widths."""
    f = FunctionMaker("odd")
    x = f.add_input_value("x", Tensor(Float64, (8, width)), Role("data", batch=0))
    w = f.add_input_value("w", Tensor(Float64, (width, 2 * width)), Role("parameter"))
    g = f.add_input_value("g", Tensor(Float64, (2 * width - 1,)), Role("parameter"))
    y = f.emit("Slice", f.emit("MatMul", x, w), starts=(0,), ends=(2 * width - 1,), axes=(1,), steps=(1,))
    f.set_outputs([f.emit("Mul", y, g)])
    step = training_step(f.finalize(), "mse", SGD(0.1, momentum=0.9), gradients=True)
    rng = np.random.default_rng(0)
    return Program(step, [rng.standard_normal(v.type.shape) for v in step.inputs])  # type: ignore[union-attr]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_does_not_divide_is_stored_with_padding_unless_that_is_much(zero: int) -> None:
    program = odd(2)
    check(program, Plan(2, 1, 1, 2, zero=zero))
    found = {v.name: tensor(v) for v in distributed(program, Plan(2, zero=zero)).program.inputs}
    assert found["g.momentum"].global_shape == (4,)
    assert isinstance(found["w.momentum"].on("dp"), Shard)
    assert isinstance(found["g.momentum"].on("dp"), Shard)
    found = {v.name: tensor(v) for v in distributed(program, Plan(8, zero=zero)).program.inputs}
    assert found["g.momentum"].global_shape == (3,)
    assert not isinstance(found["g.momentum"].on("dp"), Shard)


def matmuls(layers: int = 3, width: int = 16, cast: bool = False, dtype: DType = Float32) -> Function:
    """A chain of products with square weights; with `cast` they and all else are rounded to bfloat16 first."""
    f = FunctionMaker("m")
    x = f.add_input_value("x", Tensor(dtype, (8, width)), Role("data", batch=0))
    y = f.emit("Cast", x, to=BFloat16) if cast else x
    for k in range(layers):
        w = f.add_input_value(f"w{k}", Tensor(dtype, (width, width)), Role("parameter"))
        y = f.emit("MatMul", y, f.emit("Cast", w, to=BFloat16) if cast else w)
    f.set_outputs([f.emit("Cast", y, to=dtype) if cast else y])
    return f.finalize()


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), ADAMW], ids=["momentum", "adamw"])
@pytest.mark.parametrize("kind", ["Tanh", "Exp", "Sigmoid"])
def test_weights_that_tensor_parallelism_pads_are_kept_in_parts_too(kind: str, optimizer: SGD | AdamW) -> None:
    """Where what stands in the padding of their gradients is not known: it is cleared before the optimizer."""
    f = FunctionMaker("odd")
    x = f.add_input_value("x", Tensor(Float64, (8, 32)), Role("data", batch=0))
    w1, w2 = [
        f.add_input_value(n, Tensor(Float64, s), Role("parameter")) for n, s in (("w1", (32, 63)), ("w2", (63, 32)))
    ]
    f.set_outputs([f.emit("MatMul", f.emit(kind, f.emit("MatMul", x, w1)), w2)])
    step = training_step(f.finalize(), "mse", optimizer)
    rng = np.random.default_rng(0)  # not below 0: the optimizer takes roots of its state
    arrays = [(0.1 * rng.random(tensor(v).shape)).astype(tensor(v).dtype.numpy) for v in step.inputs]
    program = Program(step, arrays)
    for zero in (1, 2, 3):
        made = check(program, Plan(4, 2, zero=zero))
        assert any(v.role and v.role.source for v in made.inputs)  # it is padded
        split, weights = parts(made, "parameter")
        assert parts(made, "state") == (parts(made, "state")[1],) * 2
        assert split == (weights if zero == 3 else 0)


def gathers(f: Function) -> list[tuple[Function, Op]]:
    return [(g, op) for g in f.callees() for op in g.ops if op.spec.name == "MPIAllgather"]


def test_what_is_cast_is_gathered_as_the_narrower() -> None:
    step = training_step(matmuls(cast=True), "mse", SGD(0.1))
    program = distributed(Program(step, []), Plan(2, zero=3, bucket_mb=0)).program
    found = gathers(program)
    assert found
    assert {op.inputs[0].type.dtype for _, op in found} == {BFloat16}  # type: ignore[union-attr]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_are_summed_in_the_dtype_of_the_weight(microbatches: int, zero: int) -> None:
    """Though casts of them to it could work on shards: sums of bfloat16 would be rounded."""
    program = Program(training_step(matmuls(cast=True), "mse", SGD(0.1)), [])
    made = distributed(program, Plan(2, 1, 1, microbatches, zero=zero, bucket_mb=0)).program
    scattered = [op for f in made.callees() for op in f.ops if op.spec.name == "MPIReduceScatter"]
    assert scattered
    assert {op.inputs[0].type.dtype for op in scattered} == {Float32}  # type: ignore[union-attr]


def test_each_unit_is_gathered_one_ahead() -> None:
    """A gather comes right before the op that needs the one before it, after what that op waits for."""
    step = training_step(matmuls(6), "mse", SGD(0.1))
    program = distributed(Program(step, []), Plan(2, zero=3, bucket_mb=0)).program
    body = next(g for g in program.callees() if g.name.startswith("fwd"))
    names = [op.spec.name for op in body.ops if op.spec.name in ("MPIAllgather", "MatMul")]
    assert names == ["MPIAllgather", *["MPIAllgather", "MatMul"] * 5, "MatMul"]
    last = [op for op in body.ops if op.spec.name == "MPIAllgather"][-1]
    waits = next(op for op in body.ops if last.inputs[0] in op.outputs)
    third = [op for op in body.ops if op.spec.name == "MatMul"][3]
    assert waits.spec.name == "After"
    assert waits.inputs[1] is third.outputs[0]


def memory(function: Function, dp: int, zero: int) -> MemoryUse:
    """The live memory of a device of `dp`, one gradient a bucket."""
    cost = CostModel(load_cluster("dgx-h100", 1))
    devices = cost.topology.devices[:dp]
    program = parallel_transform_3d(function, dp, 1, 1, devices, 1, bucket_mb=0, zero=zero)
    return Simulator(cost).interpret(program).memory(devices[0])


def test_no_more_than_two_units_are_whole_at_a_time() -> None:
    """Live memory of a forward pass, of weights that are much larger than activations."""
    width, layers = 512, 12
    square = width * width * 4
    peak = [memory(matmuls(layers, width), 2, zero).total for zero in (0, 3)]
    assert peak[0] > layers * square
    assert layers / 2 * square < peak[1] < (layers / 2 + 2.5) * square


def test_memory_of_weights_gradients_and_state_falls_stage_by_stage() -> None:
    """In units of the weights: 1 of them, 1 of their gradients, 2 of moments; a gradient may be alive as it is made."""
    layers, width, dp = 16, 256, 4
    step = training_step(matmuls(layers, width), "mse", ADAMW)
    unit = layers * width * width * 4
    total = [memory(step, dp, zero).total / unit for zero in (0, 1, 2, 3)]
    slack = 4 / layers
    for found, least in zip(total, (4, 1 + 3 / dp, 1 + 3 / dp, 4 / dp), strict=True):
        assert least - 0.01 < found < least + slack


def test_zero_of_a_plan() -> None:
    assert str(distir.Plan(dp=2, zero=3)) == "dp 2 x tp 1 x pp 1, 1 microbatch, ZeRO 3"
    with pytest.raises(UsageError, match="zero is 0, 1, 2 or 3"):
        distir.Plan(zero=4)


def test_an_update_that_another_axis_splits_is_split_inside() -> None:
    """Where tp splits an optimizer's op, though it holds the weight and its gradient whole, dp splits each part."""
    f = FunctionMaker("linear")
    x = f.add_input_value("x", Tensor(Float64, (4, 3)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (3, 8)), Role("parameter"))
    f.set_outputs([f.emit("MatMul", x, w)])
    graph = graph_of(training_step(f.finalize(), "mse", SGD(0.1)))
    (j,) = [j for j, sig in enumerate(graph.sigs) if sig.spec.name == "SGD"]
    whole = Placed(0.0, [None] * len(graph.sigs), set(), {})
    mappings = list(whole.mappings)
    mappings[j] = graph.sigs[j].mapping(0, Shard(1), 2)
    split = shard_state(graph, whole, 2, 1, [(whole._replace(mappings=mappings), 2)]).mappings[j]
    assert split is not None
    assert split.ins[0] is Shard(1, 2)  # 3 rows do not divide; of 8 columns tp has the halves


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("turned", [False, True], ids=["weights as they are", "weights transposed"])
def test_a_gradient_of_the_whole_batch_is_scattered_too(turned: bool, zero: int) -> None:
    """It is no sum over microbatches, which would be reduced only where it is used."""
    f = FunctionMaker("whole")
    h = f.add_input_value("x", Tensor(Float64, (8, 4)), Role("data", 0))
    for name in "vw":
        w = f.add_input_value(name, Tensor(Float64, (4, 4)), Role("parameter"))
        h = f.emit("Tanh", f.emit("MatMul", h, f.emit("Transpose", w, perm=(1, 0)) if turned else w))
        if name == "v":
            h = f.emit("Sub", h, f.emit("ReduceMean", h, axes=(0,), keepdims=1))
    f.set_outputs([f.add_op("ReduceSum", "loss", [h], {"axes": (0, 1), "keepdims": 0})])
    program = Program(training_step(f.finalize(), "loss", SGD(0.1)), [])
    found = Counter(op.op_type for op in distributed(program, Plan(2, zero=zero)).placed.ops)
    whole = Counter(op.op_type for op in distributed(program, Plan(2)).placed.ops)
    assert (found["MPIReduceScatter"], whole["MPIReduceScatter"]) == (2, 0)
    assert whole["MPIAllreduce"] - found["MPIAllreduce"] == 2


@pytest.mark.parametrize(
    ("clipped", "split"),
    [(False, "MatMulGradWeight"), (True, "MatMulGradWeight"), (True, "SumOfSquares")],
    ids=["as it is made", "as it is made, before it is clipped", "where its norm is computed"],
)
def test_a_dim_that_another_axis_splits_of_the_gradient_is_taken_last(clipped: bool, split: str) -> None:
    """Though that axis leaves the optimizer's op whole."""
    f = FunctionMaker("linear")
    x = f.add_input_value("x", Tensor(Float64, (4, 6)), Role("data", 0))
    f.set_outputs([f.emit("MatMul", x, f.add_input_value("w", Tensor(Float64, (6, 8)), Role("parameter")))])
    graph = graph_of(training_step(f.finalize(), "mse", SGD(0.1, clip_norm=1.0 if clipped else None)))
    at = {sig.spec.name: j for j, sig in enumerate(graph.sigs)}
    whole = Placed(0.0, [None] * len(graph.sigs), set(), {})
    mappings = list(whole.mappings)
    mappings[at[split]] = graph.sigs[at[split]].mapping(0 if split == "SumOfSquares" else ~0, Shard(0), 2)
    assert mappings[at[split]] is not None
    for others, want in (([], Shard(0)), ([(whole._replace(mappings=mappings), 2)], Shard(1))):
        found = shard_state(graph, whole, 2, 1, others).mappings[at["SGD"]]
        assert found is not None
        assert found.ins[0] is want


def test_a_weight_that_is_not_trained_is_split_where_another_axis_does_not() -> None:
    f = FunctionMaker("linear")
    x = f.add_input_value("x", Tensor(Float64, (4, 6)), Role("data", 0))
    f.set_outputs([f.emit("MatMul", x, f.add_input_value("w", Tensor(Float64, (6, 8)), Role("parameter")))])
    graph = graph_of(f.finalize())
    whole = Placed(0.0, [None] * len(graph.sigs), set(), {})
    for given, want in (({}, Shard(0)), ({1: Shard(0)}, Shard(1))):
        assert shard_state(graph, whole, 2, 3, [(whole._replace(inputs=given), 2)]).inputs == {1: want}


CONTEXT = ("cp=2:input_ids.1,labels.1,position_ids.1,attention_mask.2",)
GROUPS = ("replicate=2:input_ids.0,labels.0",)


def ways(f: Function, kind: str) -> Counter[tuple[str, ...]]:
    """The axes along which matrices of a kind are split."""
    types = [v.type for v in f.inputs if v.kind == kind]
    return Counter(
        [
            tuple(axis for axis, p in zip(t.mesh.axes, t.placements, strict=True) if isinstance(p, Shard))
            for t in types
            if isinstance(t, Tensor) and len(t.shape) == 2
        ]
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_devices_of_context_parallelism_own_shares_of_a_replica_s(zero: int) -> None:
    program = small_gpt(optimizer=ADAMW)
    check(program, Plan(2, 1, 1, 2, zero=zero, split=CONTEXT))
    found = distributed(program, Plan(2, 1, 1, 2, zero=zero, split=CONTEXT)).program
    assert set(ways(found, "state")) == {("dp", "cp")}
    assert set(ways(found, "parameter")) == {("dp", "cp") if zero == 3 else ()}


def test_gradients_are_scattered_and_weights_gathered_along_both_at_once() -> None:
    program = distributed(small_gpt(optimizer=ADAMW), Plan(2, zero=1, bucket_mb=0, split=CONTEXT)).program
    sent = Counter([(op.spec.name, op.attributes.get("axis")) for f in program.callees() for op in f.ops])
    weights = sum(v.kind == "parameter" for v in program.inputs)
    for name in ("MPIReduceScatter", "MPIAllgather"):
        # positions are in parts along cp already
        assert sent[name, ("dp", "cp")] >= weights - 1
        assert sent[name, "dp"] <= 1


@pytest.mark.parametrize("zero", [1, 3])
def test_without_replicas_those_of_context_parallelism_own_all(zero: int) -> None:
    program = small_gpt(optimizer=ADAMW)
    check(program, Plan(microbatches=2, zero=zero, split=CONTEXT))
    assert set(ways(distributed(program, Plan(zero=zero, split=CONTEXT)).program, "state")) == {("cp",)}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_of_groups_have_all_of_their_group_s(zero: int) -> None:
    """Hybrid sharding: an axis that splits the batch alone."""
    program = small_gpt(optimizer=ADAMW)
    plan = Plan(2, 1, 1, 2, zero=zero, split=(*GROUPS, *CONTEXT))
    check(program, plan)
    assert set(ways(distributed(program, plan).program, "state")) == {("dp", "cp")}


@pytest.mark.parametrize("split", [GROUPS, (*GROUPS, *CONTEXT)], ids=len)
@pytest.mark.parametrize("zero", [2, 3])
def test_groups_reduce_their_sums_once_a_step(zero: int, split: tuple[str, ...]) -> None:
    plan = Plan(2, 1, 1, 2, zero=zero, bucket_mb=0, split=split)
    program = distributed(small_gpt(optimizer=ADAMW), plan).program
    sent = {f.name: collectives(f, "replicate").total() for f in program.callees()}
    assert sent["bwd0.first"] == 0 < sum(sent.values())


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("dp", "width"), [(2, 8), (8, 12)])
def test_nothing_is_sent_that_is_not_used(dp: int, width: int, zero: int) -> None:
    """Each gradient is scattered once."""
    placed = distributed(small_gpt(width=width, optimizer=ADAMW), Plan(dp, zero=zero, split=CONTEXT)).placed
    used = {*placed.outputs, *[v for op in placed.ops for v in op.inputs]}
    assert [op for op in placed.ops if op.spec.comm is not None and used.isdisjoint(op.outputs)] == []


@pytest.mark.parametrize("zero", [1, 3])
def test_what_replicas_do_not_split_is_reduced_along_all_axes_at_once(zero: int) -> None:
    """Widths that 2 divides, and 3 does not."""
    program = small_gpt(optimizer=ADAMW, batch=12)
    plan = Plan(3, zero=zero, bucket_mb=0, split=CONTEXT)
    check(program, plan)
    found = distributed(program, plan).program
    whole = [v for v in found.inputs if v.kind == "state" and not isinstance(tensor(v).on("dp"), Shard)]
    assert whole
    assert not any(isinstance(tensor(v).on("cp"), Shard) for v in whole)
    sent = Counter([(op.spec.name, op.attributes.get("axis")) for f in found.callees() for op in f.ops])
    assert sent["MPIAllreduce", ("dp", "cp")] >= len(whole) // 2
    assert sent["MPIAllreduce", "dp"] <= 1


@pytest.mark.parametrize(("dp", "width"), [(2, 8), (4, 12)])
def test_shares_of_shares_are_gathered_in_both_passes_and_not_before(dp: int, width: int) -> None:
    """Along both axes at once, or of a width of 12 one after the other: 4 divides one dim, 4 x 2 none."""
    plan = Plan(dp, 1, 1, 2, zero=3, bucket_mb=0, split=CONTEXT)
    program = distributed(small_gpt(width=width, optimizer=ADAMW), plan).program
    ahead: Counter[str] = Counter()
    for f in program.callees():
        inside = {v for op in f.ops if op.op_type == "After" for v in op.outputs}
        gathers = [op for op in f.ops if op.op_type == "MPIAllgather" and "dp" in names_of(op.attributes["axis"])]
        # positions are looked up once a step
        assert f.name.startswith(("fwd", "bwd")) or len(gathers) <= f.name.startswith("prologue")
        ahead[f.name] += sum(not inside.isdisjoint(op.inputs) for op in gathers)
    assert ahead["fwd0.first"] > 0 < ahead["bwd0.first"]
