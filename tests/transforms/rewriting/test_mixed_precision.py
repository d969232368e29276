"""Mixed precision: what is computed in 16 bits, against PyTorch's autocast, and what it costs to communicate."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from distir import Plan, distribute, simulate
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Role, verify
from distir.ir.errors import MismatchError, UsageError
from distir.ir.function import Attributes, Op
from distir.ir.type import BFloat16, DType, Float16, Float32, Float64, Int64, Tensor, Tuple
from distir.models.decoder import decoder
from distir.models.gpt import gpt
from distir.models.named import named
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.training import AdamW, training_step, with_loss
from distir.transforms.rewriting.fuse import fuse
from distir.transforms.rewriting.mixed_precision import check_mixed_precision, mixed_precision
from distir.transforms.rewriting.precision import with_dtype
from tests.transforms.programs import TOLERANCE, error
from tests.transforms.reference import labels_for, pair, sound

torch.set_num_threads(1)
WEIGHT = Role("parameter")
LOW = pytest.mark.parametrize("low", [BFloat16, Float16], ids=str)
PRODUCTS = {
    "MatMul",
    "MatMulGradWeight",
    "Attention",
    "AttentionGrad",
    "LayerNorm",
    "LayerNormGrad",
    "Gelu",
    "GeluGrad",
}


def dtypes(function: Function, name: str) -> set[DType]:
    """The dtypes of the first operands and results of all ops of that name."""
    ops = [op for op in function.ops if op.op_type == name]
    return {tensor(v).dtype for op in ops for v in (op.inputs[0], op.outputs[0])}


@LOW
def test_products_are_narrow_and_state_is_wide(low: DType) -> None:
    step = sound(training_step(gpt(2, 16, 4, 32, 8, 4), "cross-entropy", AdamW(), precision=low))
    for name in PRODUCTS:
        assert dtypes(step, name) == {low}, name
    assert dtypes(step, "AdamW") == {Float32}
    assert tensor(step.outputs[0]).dtype is Float32
    rows = [v for op in step.ops if op.op_type == "CrossEntropy" for v in op.outputs]
    assert {tensor(v).dtype for v in rows} == {Float32}
    floating = [v for v in step.inputs if tensor(v).dtype.floating]
    assert {tensor(v).dtype for v in floating} == {Float32}
    casts = Counter(op.inputs[0] for op in step.ops if op.op_type == "Cast")
    assert all(casts[w] == 1 for w in step.inputs if w.kind == "parameter")  # once a step, however often it is used


def test_logits_are_never_wide() -> None:
    """Neither whole, nor split over classes, where the cross-entropy is computed in parts."""
    function = gpt(1, 16, 4, 32, 8, 4)
    step = training_step(function, "cross-entropy", AdamW(), precision=BFloat16)
    for program, parts in ((step, False), (distribute(step, Plan(dp=2, tp=2, microbatches=2)), True)):
        made = [v for f in (*program.callees(), program) for op in f.ops for v in op.outputs if op.spec.bundle is None]
        logits = [v for v in made if isinstance(v.type, Tensor) and v.type.global_shape == (4, 8, 32)]
        assert logits
        assert {tensor(v).dtype for v in logits} == {BFloat16}
        assert parts == any(op.op_type == "LogitSums" for f in (*program.callees(), program) for op in f.ops)


@LOW
def test_norms_in_one_op_are_narrow_and_their_statistics_wide(low: DType) -> None:
    sizes = {"layers": 1, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 32, "seq": 8}
    config = named("llama:" + ",".join(f"{k}={n}" for k, n in sizes.items()), {})
    step = sound(training_step(decoder(config), "cross-entropy", AdamW(), precision=low))
    for name in ("RMSNorm", "RMSNormGrad"):
        assert dtypes(step, name) == {low}, name
    scales = [op.outputs[1] for op in step.ops if op.op_type == "RMSNorm"]
    assert [tensor(v) for v in scales] == [Tensor(Float32, (1, 8, 1))] * 3


def norm_program(low: DType) -> tuple[Function, dict[str, Op]]:
    """A root-mean-square norm written out, without epsilon, then a product; the mixed program and its ops by name."""
    f = FunctionMaker("norm")
    x = f.add_input_value("x", Tensor(Float32, (4, 6)), Role("data", 0))
    gain, w = (f.add_input_value(n, Tensor(Float32, s), Role("parameter")) for n, s in (("g", (6,)), ("w", (6, 5))))
    h = f.emit("MatMul", x, w)
    back = f.emit("MatMul", h, f.emit("Transpose", w, perm=(1, 0)))
    square = f.add_op("Pow", "square", [back, f.emit("Constant", value=(2.0,), shape=(), dtype=Float32)])
    mean = f.add_op("ReduceMean", "mean", [square], {"axes": (1,), "keepdims": 1})
    scaled = f.add_op("Div", "scaled", [back, f.add_op("Sqrt", "root", [mean])])
    y = f.add_op("MatMul", "y", [f.add_op("Mul", "gained", [scaled, gain]), w])
    f.set_outputs([y])
    mixed = mixed_precision(f.finalize(), low)
    return mixed, {op.outputs[0].name: op for op in mixed.ops}


@LOW
def test_statistics_are_wide_and_what_follows_is(low: DType) -> None:
    _, ops = norm_program(low)
    assert {tensor(ops[n].outputs[0]).dtype for n in ("square", "mean", "root", "scaled", "gained")} == {Float32}
    product = [op for op in ops.values() if op.op_type == "MatMul"]
    assert {tensor(v).dtype for op in product for v in (*op.inputs, *op.outputs)} == {low}


def test_what_has_no_weight_stays_wide() -> None:
    """Masks and angles that are computed of positions are rounded once, where a product needs them."""
    f = FunctionMaker("angles")
    at = f.add_input_value("at", Tensor(Int64, (8,)), Role("constant"))
    x = f.add_input_value("x", Tensor(Float32, (4, 8)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float32, (8, 8)), Role("parameter"))
    turn = f.emit("Mul", f.emit("Cast", at, to=Float32), f.emit("Constant", value=(0.1,), shape=(), dtype=Float32))
    f.set_outputs([f.emit("Mul", f.emit("MatMul", x, w), f.add_op("Cos", "cos", [turn]))])
    mixed = mixed_precision(f.finalize(), BFloat16)
    by_name = {v.name: v for v in mixed.producers()}
    assert tensor(by_name["cos"]).dtype is Float32
    assert tensor(by_name["cos.bf16"]).dtype is BFloat16
    assert tensor(mixed.outputs[0]).dtype is Float32  # results keep their types


def faulty(mixed: Function, name: str) -> Function:
    """The program with the operands of the op that makes a value in the other precision."""
    maker = FunctionMaker(mixed.name)
    maker.inputs.extend(mixed.inputs)
    env: dict[Any, Any] = {v: v for v in mixed.inputs}
    for op in mixed.ops:
        operands = [env[v] for v in op.inputs]
        if op.outputs[0].name == name:
            other = Float32 if tensor(op.inputs[0]).dtype is not Float32 else BFloat16
            operands = [maker.emit("Cast", v, to=other) for v in operands]
        maker.add_op(op.spec, None, operands, op.attributes)
        made = maker.ops[-1].outputs
        if op.outputs[0].name == name:
            made = tuple(maker.emit("Cast", v, to=tensor(w).dtype) for v, w in zip(made, op.outputs, strict=True))
        env.update(zip(op.outputs, made, strict=True))
    maker.set_outputs([env[v] for v in mixed.outputs])
    return maker.finalize()


def test_casts_that_change_nothing_are_left_out_of_floats_alone() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float32, (4, 3)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float32, (3, 5)), WEIGHT)
    index = f.add_input_value("index", Tensor(Int64, (4,)), Role("data", 0))
    y = f.emit("Cast", f.emit("MatMul", x, w), to=Float32)
    f.set_outputs([f.emit("SoftmaxCrossEntropyLoss", y, f.emit("Cast", index, to=Int64), reduction="mean")])
    function = f.finalize()
    narrow = mixed_precision(function, BFloat16)
    check_mixed_precision(function, narrow, BFloat16)
    casts = [tensor(op.inputs[0]).dtype for op in narrow.ops if op.op_type == "Cast"]
    assert casts.count(Int64) == 1


def test_the_law_is_checked() -> None:
    function = fuse(with_loss(gpt(1, 16, 4, 32, 8, 4), "cross-entropy"))
    mixed = mixed_precision(function, BFloat16)
    check_mixed_precision(function, mixed, BFloat16)
    product = next(op for op in mixed.ops if op.op_type == "MatMul")
    with pytest.raises(MismatchError, match=r"expected %.* in bf16, got f32"):
        check_mixed_precision(function, faulty(mixed, product.outputs[0].name), BFloat16)
    ops = list(mixed.ops)
    k = next(k for k, op in enumerate(ops) if op.op_type == "Gelu")
    ops[k] = Op(ops[k].spec, ops[k].inputs, Attributes({"approximate": "none"}), ops[k].outputs, ops[k].of)
    other = Function(mixed.name, mixed.inputs, tuple(ops), mixed.outputs, mixed.updates, mixed.sources)
    with pytest.raises(MismatchError):
        check_mixed_precision(function, other, BFloat16)


def test_what_cannot_be_mixed() -> None:
    function = gpt(1, 16, 4, 32, 8, 4)
    with pytest.raises(UsageError, match=r"mixed precision needs a float32 program: %attention_mask of gpt is f64"):
        training_step(with_dtype(function, Float64), precision=BFloat16)
    with pytest.raises(UsageError, match="of bfloat16 or float16 and float32, got f64"):
        training_step(function, precision=Float64)
    with pytest.raises(UsageError, match="in f32 or in the precision, bf16; got f16"):
        training_step(function, precision=BFloat16, grad_dtype=Float16)


# ---------------------------------------------------------------- against PyTorch


@pytest.mark.parametrize("low", [BFloat16, Float16], ids=str)
def test_as_close_to_float32_as_autocast(low: DType) -> None:
    """The gradients' distance from those in float32 is that of torch's autocast of the same model."""
    p = pair("gpt2-tiny")
    target = labels_for(p.function, True)

    def ours(precision: DType) -> tuple[float, dict[str, np.ndarray]]:
        step = sound(training_step(p.function, gradients=True, precision=precision))
        state = {v: np.zeros(shape_of(v), tensor(v).dtype.numpy) for v in step.inputs if v.kind == "state"}
        given = {**p.feeds, **state, step.inputs[len(p.function.inputs)]: target}
        got = dict(zip(step.outputs, SequentialExecutor().compute(step, given), strict=True))
        names = [step.updates[v].name for v in step.outputs if v in step.updates]
        gradients = zip([n for n in names if n in p.weights()], step.outputs[1:], strict=False)
        return float(got[step.outputs[0]]), {n: np.asarray(got[g], np.float64) for n, g in gradients}

    def theirs(dtype: torch.dtype | None) -> tuple[float, dict[str, np.ndarray]]:
        p.module.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = p.module(**p.inputs)
            loss = torch.nn.functional.cross_entropy(y.flatten(0, -2).float(), torch.from_numpy(target).flatten())
        loss.backward()
        return loss.item(), {n: w.grad.double().numpy() for n, w in p.weights().items() if w.grad is not None}

    exact_loss, exact = theirs(None)
    their_loss, their = theirs(torch.bfloat16 if low is BFloat16 else torch.float16)
    our_loss, our = ours(low)
    assert abs(our_loss - exact_loss) <= 4 * abs(their_loss - exact_loss) + 2e-4 * abs(exact_loss)
    assert our.keys() == their.keys() == exact.keys()

    def distance(found: dict[str, np.ndarray]) -> float:
        far = sum(float(np.sum((found[n] - exact[n]) ** 2)) for n in exact)
        return (far / sum(float(np.sum(exact[n] ** 2)) for n in exact)) ** 0.5

    assert 1e-5 < distance(our) <= 2 * distance(their)


# ---------------------------------------------------------------- under a plan


PLANS = [
    Plan(dp=2, tp=2, microbatches=2),
    Plan(dp=2, pp=2, microbatches=2, zero=1),
    Plan(pp=3, microbatches=4),
    Plan(dp=4, microbatches=2, zero=2),
    Plan(dp=2, tp=2, pp=2, microbatches=2, zero=3, sequence_parallel=True, recompute="selective"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["", "gradients in float32"])
@LOW
def test_distributed_equals_sequential(low: DType, wide: bool, plan: Plan) -> None:
    """All types widened to float64 after the program was distributed in its own."""
    summed = Float32 if wide else low
    step = training_step(
        gpt(2, 16, 4, 32, 8, 8), "cross-entropy", AdamW(clip_norm=0.1), precision=low, grad_dtype=summed
    )
    program = distribute(step, plan)
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 8, shape_of(v))
        if tensor(v).dtype is Int64 and v.kind != "state"
        else rng.standard_normal(shape_of(v)) * 0.2
        if v.kind == "parameter"
        else np.zeros(shape_of(v), tensor(v).dtype.numpy)
        for v in step.inputs
    ]
    run = SequentialExecutor()
    got, want = (run.compute(with_dtype(f, Float64), arrays) for f in (program, step))
    assert error(got, want) <= TOLERANCE
    before = {v: x for v, x in zip(step.inputs, arrays, strict=True) if v.kind == "parameter"}
    for k, v in enumerate(step.outputs):
        if (w := step.updates.get(v)) in before:
            assert error([got[k] - before[w]], [want[k] - before[w]]) <= TOLERANCE * np.abs(want[k] - before[w]).max()


def sent(program: Function, kind: str) -> set[str]:
    """The dtypes of weights or gradients that a collective of that kind takes along dp."""
    found: set[str] = set()
    for op in (op for f in (*program.callees(), program) for op in f.ops):
        if op.op_type == kind and op.attributes["axis"] == "dp":
            sent = op.inputs[0].type
            members = sent.types if isinstance(sent, Tuple) else (sent,)
            found |= {str(t.dtype) for t in members if isinstance(t, Tensor) and t.shape}
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("grad_dtype", [Float32, BFloat16], ids=str)
def test_zero_gathers_narrow_weights(zero: int, grad_dtype: DType) -> None:
    step = training_step(gpt(2, 16, 4, 32, 8, 8), optimizer=AdamW(), precision=BFloat16, grad_dtype=grad_dtype)
    program = distribute(step, Plan(dp=2, microbatches=2, zero=zero))
    assert sent(program, "MPIAllgather") == {"bf16"}
    assert sent(program, "MPIReduceScatter") == {str(grad_dtype)}
    where = {f.name for f in program.callees() for op in f.ops if op.op_type == "MPIAllgather"}
    once = {name for name in where if name.startswith("prologue")}
    assert (where == once) == (zero < 3)  # once a step, or for every pass
    parameters = [tensor(v) for v in program.inputs if v.kind == "parameter"]
    shards = {t.dtype for t in parameters if t.shape != t.global_shape}
    assert shards == {Float32}


@pytest.mark.parametrize("narrow", [False, True])
def test_only_what_is_used_as_narrow_is_sharded_without_its_update(narrow: bool) -> None:
    """ZeRO 1: gathering a weight that an op has computed from it in float32 would save nothing."""
    f = FunctionMaker("negated")
    x, w = (f.add_input_value(n, Tensor(Float32, (8, 8)), r) for n, r in (("x", Role("data", 0)), ("w", WEIGHT)))
    f.set_outputs([f.emit("MatMul", x, w if narrow else f.emit("Neg", w))])
    step = training_step(f.finalize(), "mse", precision=BFloat16 if narrow else Float32)
    program = distribute(step, Plan(dp=2, zero=1))
    shape = next(tensor(v).shape for v in program.inputs if v.kind == "parameter")
    assert shape == ((4, 8) if narrow else (8, 8))


def test_bytes_of_a_parameter() -> None:
    """18 of float32 gradients, a copy in bfloat16, weights and two moments; with ZeRO 1 over d replicas 6 + 12 / d."""
    step = training_step(gpt(4, 256, 4, 512, 8, 16), optimizer=AdamW(), precision=BFloat16)
    count = sum(int(np.prod(shape_of(v))) for v in step.inputs if v.kind == "parameter")
    for zero, want in ((0, 18.0), (1, 6 + 12 / 8)):
        stages = simulate(step, Plan(dp=8, microbatches=2, zero=zero), "dgx-a100").simulation.stages
        peak = max(s.tensors for s in stages)
        assert want * count <= peak <= (want + 2.5) * count, (zero, peak / count)


def test_an_optimizer_takes_a_narrow_gradient() -> None:
    f = FunctionMaker()
    w, g = f.add_input_value("w", Tensor(Float32, (3,))), f.add_input_value("g", Tensor(BFloat16, (3,)))
    f.emit("SGD", w, g, lr=0.1)
    function = f.finalize()
    verify(function)
    x, d = np.array([1, 2, 3], np.float32), np.array([1, 0.5, 0.25]).astype(BFloat16.numpy)
    (got,) = SequentialExecutor().compute(function, [x, d])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, x - np.float32(0.1) * d.astype(np.float32))
