"""Sequence parallelism: exact, two collectives a block and direction in the place of each all-reduce, less saved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distir.api import load, simulate
from distir.ir import Function, FunctionMaker, Role, Value
from distir.ir.errors import InfeasibleError
from distir.ir.type import DType, Float32, Float64, Shard, Tensor, Tuple
from distir.ops.rules import tensor
from distir.transforms import plan as plans_of
from distir.transforms.differentiation.training import training_step
from distir.transforms.parallel3d import distribute
from distir.transforms.passes import PassContext, run_passes
from distir.transforms.pipeline.recompute import _cheap, _saving, _still_saved
from tests.transforms.llama import llama
from tests.transforms.programs import (
    ADAMW,
    EXAMPLES,
    Plan,
    Program,
    check,
    collectives,
    distributed,
    filled,
    gpt2_tiny,
    imported_mlp,
    small_gpt,
)
from tests.transforms.test_tensor_parallel import body, executed, over

PLANS = [
    Plan(1, 2, sequence_parallel=True),
    Plan(1, 4, sequence_parallel=True),
    Plan(2, 2, 2, 2, zero=3, sequence_parallel=True),
    Plan(2, 2, 1, 4, zero=2, recompute="selective", sequence_parallel=True),
    Plan(1, 2, 2, 4, "interleaved", chunks=2, recompute="full", sequence_parallel=True),
    Plan(1, 2, 4, 4, "gpipe", overlap=False, sequence_parallel=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("program", [gpt2_tiny, lambda: small_gpt(layers=4, optimizer=ADAMW)], ids=["gpt2", "gpt"])
def test_equals_sequential(program: Callable[[], Program], plan: Plan) -> None:
    check(program(), plan)


def moved(program: Program, plan: Plan, name: str) -> Counter[tuple[str, int]]:
    """What a body sends over tp of activations, with how many elements: of gradients of vectors there are buckets."""
    found = Counter[tuple[str, int]]()
    for op in over(body(program, plan, name), "tp"):
        t = op.outputs[0].type
        for member in t.types if isinstance(t, Tuple) else (t,):
            assert isinstance(member, Tensor)
            found[op.op_type, math.prod(member.global_shape)] += len(member.shape) > 1
    return +found


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_two_gathers_and_two_scatters_a_block_and_direction(tp: int, overlap: bool) -> None:
    """And no all-reduce, where there were two: the same bytes, sent in two halves."""
    plan = Plan(1, tp, overlap=overlap, sequence_parallel=True)
    for phase in ("fwd0", "bwd0"):
        counts = [moved(small_gpt(layers=n), plan, phase) for n in (3, 4, 5)]
        size = 8 * 4 * 8  # batch, sequence, width
        assert (
            counts[1] - counts[0] == counts[2] - counts[1] == {("MPIAllgather", size): 2, ("MPIReduceScatter", size): 2}
        )


@pytest.mark.parametrize("tp", [2, 4])
def test_gpt2_reduces_nothing_but_rows_of_logits(tp: int) -> None:
    """Beside the blocks: a scatter of the embedding, a gather before the logits, and of these the other way."""
    plan, tokens, width = Plan(1, tp, sequence_parallel=True), 8 * 16, 64
    forward = moved(gpt2_tiny(), plan, "fwd0")
    assert forward == {
        ("MPIReduceScatter", tokens * width): 1 + 2 * 2,
        ("MPIAllgather", tokens * width): 2 * 2 + 1,
        ("MPIAllreduce", tokens): 3,  # maxima, sums and the logits of the labels: too little to be split
    }
    backward = moved(gpt2_tiny(), plan, "bwd0")
    assert {kind for kind, _ in backward} == {"MPIReduceScatter", "MPIAllgather"}


@pytest.mark.parametrize("tp", [2, 4])
def test_between_products_a_device_holds_its_part_of_the_sequence(tp: int) -> None:
    """Every norm, sum of a residual, and their gradients: a tp-th of the tokens."""
    plan = Plan(1, tp, sequence_parallel=True)
    for phase in ("fwd0", "bwd0"):
        found = [op for op in executed(body(gpt2_tiny(), plan, phase)) if op.op_type in ("LayerNorm", "LayerNormGrad")]
        assert len(found) == 5
        for op in found:
            assert isinstance(tensor(op.outputs[0]).on("tp"), Shard)


def placed(program: Program, plan: Plan) -> Function:
    return run_passes(program.function, ("fuse", "decompose", "pad", "place"), PassContext(plan.plan, plan.devices))


@pytest.mark.parametrize("tp", [2, 4])
def test_with_selective_recomputation_all_that_is_saved_of_a_block_is_split(tp: int) -> None:
    """Gathers are made again, as in Megatron-LM: a layer more saves no value whole, where without the split two are."""
    whole: dict[bool, int] = {}
    for on in (False, True):
        counts: list[int] = []
        for layers in (2, 3):
            saving = _saving(placed(small_gpt(layers=layers), Plan(1, tp, sequence_parallel=on)))
            saved = _still_saved(saving, _cheap(saving))
            counts.append(sum(not isinstance(tensor(v).on("tp"), Shard) for v in saved))
        whole[on] = counts[1] - counts[0]
    assert whole == {False: 2, True: 0}


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_predicted_memory_falls(recompute: str) -> None:
    model = load(EXAMPLES / "gpt2-tiny.onnx", {"batch": 64}, loss="cross-entropy", optimizer="adamw")
    plans = [plans_of.Plan(tp=4, sequence_parallel=on, recompute=recompute) for on in (False, True)]
    before, after = (max(s.tensors for s in simulate(model, p, "dgx-a100").simulation.stages) for p in plans)
    assert after < before


@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_of_norms_are_reduced_over_shards_in_one_bucket(dp: int) -> None:
    """Each shard has a part of the sums over the sequence: after the last microbatch, all of them at once."""
    function = distributed(gpt2_tiny(), Plan(dp, 2, 1, 4, sequence_parallel=True)).program
    axis = "tp" if dp == 1 else ("dp", "tp")
    bundles = [op.inputs[0].type for op in over(function, axis) if op.op_type == "MPIAllreduce"]
    members = [t.types for t in bundles if isinstance(t, Tuple)]
    of_vectors = [row for row in members if all(isinstance(t, Tensor) and len(t.shape) == 1 for t in row)]
    assert [len(row) for row in of_vectors] == [10]


def test_a_sequence_that_does_not_divide() -> None:
    """The MLP has no dim of the data beside the batch that its products leave whole."""
    with pytest.raises(InfeasibleError, match="sequence parallelism over tp 2 splits nothing in") as e:
        distributed(imported_mlp(), Plan(1, 2, sequence_parallel=True))
    assert e.value.hint == "it needs a dim of the data, other than the batch, that 2 divides; else do without it"
    check(imported_mlp(), Plan(2, 1, sequence_parallel=True))  # without shards there is nothing to do


@pytest.mark.parametrize("layers", [2, 9])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama:kv_heads=2", "llama:kv_heads=1", "gpt:tied=1", "gpt:tied=0"])
def test_long_sequences_are_split_as_short_ones(layers: int, precision: str, name: str) -> None:
    """Tables of positions, whether learned or not, are then larger than all other weights."""
    plan, counts = Plan(1, 2, sequence_parallel=True), list[Counter[str]]()
    for sequence in (16, 4096, 262144):
        sizes = f"{name},layers={layers},hidden=64,heads=4,vocab=96,seq={sequence},batch=4"
        model = load(sizes, loss="cross-entropy", optimizer="adamw", precision=precision)
        counts.append(collectives(distribute(model.function, plan.plan, plan.devices).placed, "tp"))
    assert all([found["MPIReduceScatter"] >= 4 * layers for found in counts])
    if name.startswith("llama"):  # the gradient of a table that is learned may be gathered sooner or later
        assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("flat", [False, True], ids=["products of 3 dims", "flat products"])
def test_sums_of_several_products_are_scattered_once(flat: bool) -> None:
    """The gradients through queries, keys and values, and through both halves of a gated MLP, are added up before."""
    counts: list[Counter[str]] = []
    for layers in (2, 3):
        model = llama(layers, width=64, heads=8, kv=4, ffn=176, vocabulary=512, sequence=64, batch=8, flat=flat)
        step = training_step(model, "cross-entropy", ADAMW)
        plan = Plan(1, 2, sequence_parallel=True)
        counts.append(collectives(distribute(step, plan.plan, plan.devices).placed, "tp"))
    layer = counts[1] - counts[0]
    assert (layer["MPIReduceScatter"], layer["MPIAllgather"]) == (4, 4)


def test_it_does_not_matter_what_was_asked_before() -> None:
    """What splits nothing is refused, also after another plan of the program for which that holds."""
    program = filled(imported_mlp().function, {}, np.random.default_rng(0))  # none was placed yet
    for split in (("xp=2:layers.1.weight.0",), ()):
        with pytest.raises(InfeasibleError, match="sequence parallelism over tp 2 splits nothing in"):
            distributed(program, Plan(1, 2, sequence_parallel=True, split=split))


def encoder(sequence: int, dtype: DType = Float64) -> Function:
    """A block on float data: its width is a dim of the data too, and one of the norm, which cannot be split.

    Weights are held in a dtype of their own, and cast for use.
    """
    f = FunctionMaker("encoder")
    x = f.add_input_value("x", Tensor(Float64, (8, sequence, 16)), Role("data", 0))
    shapes = {"up": (16, 32), "down": (32, 16), "scale": (16,), "bias": (16,), "positions": (sequence, 16)}
    w = {name: f.add_input_value(name, Tensor(dtype, shape), Role("parameter")) for name, shape in shapes.items()}
    if dtype is not Float64:
        w = {name: f.emit("Cast", v, to=Float64) for name, v in w.items()}
    x = f.emit("Add", x, w["positions"])
    y = f.emit("Add", x, f.emit("MatMul", f.emit("Relu", f.emit("MatMul", x, w["up"])), w["down"]))
    f.set_outputs([f.emit("LayerNormalization", y, w["scale"], w["bias"], axis=-1, epsilon=1e-5)])
    return f.finalize()


@pytest.mark.parametrize("dtype", [Float64, Float32], ids=["weights as they are", "weights that are cast"])
def test_features_are_no_sequence(dtype: DType) -> None:
    """Also where a weight, a table of positions, has the sequence as a dim."""
    plan = Plan(1, 2, sequence_parallel=True)
    split = distribute(training_step(encoder(6, dtype), "mse", ADAMW), plan.plan, plan.devices).placed
    norms = [op for op in split.ops if op.op_type == "LayerNorm"]
    assert [tensor(op.outputs[0]).on("tp") for op in norms] == [Shard(1)]
    plan = Plan(1, 4, sequence_parallel=True)  # does not divide 6, but 16
    with pytest.raises(InfeasibleError, match="splits nothing"):
        distribute(training_step(encoder(6, dtype), "mse", ADAMW), plan.plan, plan.devices)


def attended(sequence: int) -> Function:
    """Attention whose scores are capped, which no fused op computes, and a product after it."""
    f = FunctionMaker("attended")
    x = f.add_input_value("x", Tensor(Float64, (8, sequence, 16)), Role("data", 0))

    def linear(x: Value) -> Value:
        return f.emit("MatMul", x, f.add_input_value("w", Tensor(Float64, (16, 16)), Role("parameter")))

    def heads(x: Value) -> Value:
        return f.emit("Transpose", f.emit("Reshape", linear(x), shape=(8, sequence, 4, 4)), perm=(0, 2, 1, 3))

    scale, bias = [f.add_input_value(n, Tensor(Float64, (16,)), Role("parameter")) for n in ("scale", "bias")]
    y = f.emit("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)
    q, k, v = heads(y), heads(y), heads(y)
    scores = f.emit("Tanh", f.emit("MatMul", q, f.emit("Transpose", k, perm=(0, 1, 3, 2))))
    mixed = f.emit("Transpose", f.emit("MatMul", f.emit("Softmax", scores, axis=3), v), perm=(0, 2, 1, 3))
    f.set_outputs([f.emit("Add", x, linear(f.emit("Reshape", mixed, shape=(8, sequence, 16))))])
    return f.finalize()


def test_products_of_activations_have_no_features() -> None:
    """The keys that the scores are products with have the sequence as a dim, and are no weights."""
    plan = Plan(1, 2, sequence_parallel=True)
    split = distribute(training_step(attended(8), "mse", ADAMW), plan.plan, plan.devices).placed
    norms = [op for op in split.ops if op.op_type == "LayerNorm"]
    assert [tensor(op.outputs[0]).on("tp") for op in norms] == [Shard(1)]


def towers(*layers: int) -> Function:
    """Towers of so many blocks, each on data of its own; the result is their product."""
    f = FunctionMaker("towers")

    def weight(*shape: int) -> Value:
        return f.add_input_value("w", Tensor(Float64, shape), Role("parameter"))

    tops: list[Value] = []
    for k, blocks in enumerate(layers):
        x = f.add_input_value(f"x{k}", Tensor(Float64, (8, 8, 16)), Role("data", 0))
        for _ in range(blocks):
            y = f.emit("LayerNormalization", x, weight(16), weight(16), axis=-1, epsilon=1e-5)
            y = f.emit("MatMul", f.emit("Relu", f.emit("MatMul", y, weight(16, 64))), weight(64, 16))
            x = f.emit("Add", x, y)
        tops.append(f.emit("MatMul", x, weight(16, 16)))
    f.set_outputs([f.emit("Mul", *tops)])
    return f.finalize()


def test_a_small_part_of_a_model_is_split_too() -> None:
    """One block beside six is worth collectives of its own, as are the ends of each tower."""
    plan = Plan(1, 2, sequence_parallel=True)
    split = distribute(training_step(towers(6, 1), "mse", ADAMW), plan.plan, plan.devices).placed
    norms = [op for op in split.ops if op.op_type == "LayerNorm"]
    assert [tensor(op.outputs[0]).on("tp") for op in norms] == [Shard(1)] * 7


CP2, CP4 = ("cp=2:*.1",), ("cp=4:*.1",)
INSIDE = [
    *[Plan(1, tp, sequence_parallel=True, split=split) for tp, split in ((2, CP2), (4, CP2), (2, CP4))],
    Plan(2, 2, 2, 2, zero=3, sequence_parallel=True, split=CP2),
    Plan(2, 2, 1, 2, zero=1, sequence_parallel=True, split=CP2, bucket_mb=0.0),
    Plan(2, 2, 1, 4, zero=2, recompute="selective", sequence_parallel=True, split=CP4),
    Plan(1, 2, 2, 2, recompute="gathers", sequence_parallel=True, split=CP2),
    Plan(1, 2, 2, 4, "interleaved", chunks=2, recompute="full", sequence_parallel=True, split=CP2),
    Plan(1, 2, 4, 4, "gpipe", host=True, overlap=False, sequence_parallel=True, split=CP2),
]


@pytest.mark.parametrize("plan", INSIDE, ids=str)
@pytest.mark.parametrize("flat", [True, False], ids=["flat products", "products of 3 dims"])
def test_inside_context_parallelism_equals_sequential(flat: bool, plan: Plan) -> None:
    check(gpt2_tiny() if flat else small_gpt(layers=4, sequence=16, optimizer=ADAMW), plan)


@pytest.mark.parametrize("heads", [1, 3])
def test_inside_context_parallelism_whole_heads_equal_sequential(heads: int) -> None:
    """Where shards cannot split the heads, they can split the queries of each device further."""
    program, plan = small_gpt(width=4 * heads, heads=heads, sequence=8), Plan(1, 2, sequence_parallel=True, split=CP2)
    check(program, plan)
    found = [tensor(op.outputs[0]) for op in executed(body(program, plan, "fwd0")) if op.op_type == "Attention"]
    assert [(t.on("cp"), t.on("tp")) for t in found] == [(Shard(2), Shard(2, 2))] * 2


@pytest.mark.parametrize("phase", ["fwd0", "bwd0"])
@pytest.mark.parametrize(("cp", "tp"), [(2, 2), (2, 4), (4, 2)])
def test_inside_context_parallelism_both_send_what_each_sends_alone(cp: int, tp: int, phase: str) -> None:
    """A layer more takes the collectives along tp of the one, those along cp of the other, and none beside them."""

    def sent(axis: str, **settings: Any) -> Counter[tuple[str, int]]:
        counts: list[Counter[tuple[str, int]]] = []
        for n in (2, 3):
            found = Counter[tuple[str, int]]()
            for op in over(body(small_gpt(n, sequence=16), Plan(1, tp, **settings), phase), axis):
                t = op.outputs[0].type
                if isinstance(t, Tensor):  # gradients of weights are in buckets
                    found[op.op_type, math.prod(t.global_shape)] += 1
            counts.append(found)
        return counts[1] - counts[0]

    split = (f"cp={cp}:*.1",)
    assert sent("tp", sequence_parallel=True, split=split) == sent("tp", sequence_parallel=True)
    assert sent("cp", sequence_parallel=True, split=split) == sent("cp", split=split)
    assert {kind for kind, _ in sent("tp", sequence_parallel=True, split=split)} == {"MPIAllgather", "MPIReduceScatter"}


@pytest.mark.parametrize("phase", ["fwd0", "bwd0"])
def test_inside_context_parallelism_a_device_holds_its_part_of_each_part(phase: str) -> None:
    """Norms, and their gradients: the sequence is split along cp, and each of its 2 parts along tp."""
    function = body(gpt2_tiny(), Plan(1, 4, sequence_parallel=True, split=CP2), phase)
    found = [tensor(op.outputs[0]) for op in executed(function) if op.op_type in ("LayerNorm", "LayerNormGrad")]
    assert len(found) == 5
    for t in found:
        at, inside = t.on("cp"), t.on("tp")
        assert isinstance(at, Shard)
        assert inside is Shard(at.dim, 2 * at.outer)


@pytest.mark.parametrize("recompute", ["none", "gathers", "selective"])
def test_inside_context_parallelism_predicted_memory_falls(recompute: str) -> None:
    model = load(EXAMPLES / "gpt2-tiny.onnx", {"batch": 64}, loss="cross-entropy", optimizer="adamw")
    split = (plans_of.InputSplit.parse("cp=2:*.1"),)
    plans = [
        plans_of.Plan(tp=4, split=cp, sequence_parallel=on, recompute=recompute)
        for cp, on in (((), True), (split, False), (split, True))
    ]
    one, other, both = (max(s.tensors for s in simulate(model, p, "dgx-a100").simulation.stages) for p in plans)
    assert both < min(one, other)


def test_a_part_of_a_sequence_that_does_not_divide() -> None:
    with pytest.raises(InfeasibleError, match="sequence parallelism over tp 4 splits nothing in") as e:
        distributed(small_gpt(), Plan(1, 4, sequence_parallel=True, split=("cp=2:input_ids.1,labels.1",)))
    want = "it needs a dim of the data, other than the batch, that 4 divides, or 8 where it is in 2 parts already; else"
    assert e.value.hint == f"{want} do without it"
