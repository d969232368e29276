"""Fused programs compute the same: forward, gradients, next weights; sequential and distributed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from distir.importer import import_from_onnx
from distir.ir import Function, FunctionMaker, same, validate, verify
from distir.ir.function import Role
from distir.ir.type import Float64, Tensor
from distir.transforms.differentiation import training
from distir.transforms.differentiation.training import SGD, AdamW, training_step
from distir.transforms.parallel3d import distribute, source_of
from distir.transforms.rewriting.fuse import fuse
from distir.transforms.rewriting.precision import with_dtype
from tests.transforms.programs import (
    BATCH,
    EXAMPLES,
    TOLERANCE,
    Plan,
    Program,
    check,
    error,
    gpt2_tiny,
    run,
    small_gpt,
)


def kinds(function: Function) -> Counter[str]:
    return Counter(op.op_type for op in function.ops)


def exported() -> Function:
    """GPT-2 as it is exported, in float32."""
    return import_from_onnx(EXAMPLES / "gpt2-tiny.onnx", dims={"batch": BATCH})[0]


def test_gpt2_as_it_is_exported() -> None:
    function = exported()
    fused = fuse(function)
    verify(fused)
    before, after = kinds(function), kinds(fused)
    assert (before["Softmax"], before["Tanh"], before["Pow"]) == (2, 2, 2)
    assert (after["Attention"], after["Gelu"]) == (2, 2)
    assert not {"Softmax", "Tanh", "Pow", "Mul"} & set(after)
    assert len(fused.ops) <= len(function.ops) - 2 * 13
    assert fused.inputs == function.inputs
    assert fused.outputs == function.outputs


def test_it_is_found_once_and_then_there_is_nothing_to_find() -> None:
    function = exported()
    assert fuse(function) is fuse(function)
    assert fuse(fuse(function)) is fuse(function)
    step = training_step(function)
    assert fuse(step) is step


@pytest.mark.parametrize("optimizer", [SGD(0.1), AdamW(0.01)], ids=["sgd", "adamw"])
def test_the_training_step_is_the_same(optimizer: SGD | AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradients and next weights, with the constants as exact in both as in float64."""
    program = small_gpt(optimizer=optimizer)
    forward = small_forward()
    monkeypatch.setattr(training, "fuse", lambda function: function)
    plain = training_step(forward, "cross-entropy", optimizer, gradients=True)
    assert "Attention" in kinds(program.function)
    assert "Attention" not in kinds(plain)
    assert len(plain.ops) > 1.3 * len(program.function.ops)
    want = Program(plain, program.arrays).results()
    bound = TOLERANCE if isinstance(optimizer, AdamW) else 1e-12  # AdamW magnifies rounding, by 1.15e-12 on some CPUs
    assert error(program.results(), want) <= bound


def small_forward() -> Function:
    from distir.models.gpt import gpt

    return gpt(2, 8, 4, 16, 4, BATCH, Float64)


@pytest.mark.parametrize("plan", [Plan(), Plan(2, 2, 2, 2), Plan(1, 4, 1, 2), Plan(1, 2, 2, 4, "gpipe")], ids=str)
def test_forward_programs_are_fused_when_they_are_distributed(plan: Plan) -> None:
    function = small_forward()
    arrays = gpt2_like_arrays(function)
    made = distribute(function, plan.plan, plan.devices)
    verify(made.program)
    validate(made.program, source_of(made.program, function))
    used = kinds(made.placed)
    assert used["Attention"] == used["Gelu"] == 2
    program = Program(function, arrays)
    assert error(run(made.program, program), program.results()) <= TOLERANCE


def gpt2_like_arrays(function: Function) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays: list[np.ndarray] = []
    for v in function.inputs:
        t = v.type
        assert isinstance(t, Tensor)
        integers = t.dtype.kind == "int"
        arrays.append(rng.integers(0, 4, t.shape) if integers else rng.standard_normal(t.shape))
    return arrays


def test_an_exported_model_read_in_double_precision_is_left_with_its_own_constants() -> None:
    """Its tanh has constants of single precision: they are no Gelu's in double precision. Attention has none."""
    function = with_dtype(exported(), Float64)
    after = kinds(fuse(function))
    assert (after["Attention"], after["Gelu"], after["Tanh"]) == (2, 0, 2)


def test_the_exported_step_under_plans() -> None:
    for plan in (Plan(2, 2, 1, 2), Plan(1, 4, 2, 2)):
        check(gpt2_tiny(), plan)


def test_what_a_backward_op_differentiates_stays() -> None:
    """An existing backward pass may be `of` ops whose values it does not use."""
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float64, (4,)), Role("data", 0))
    s = f.emit("Sigmoid", x)
    y = f.emit("Mul", x, s)
    d = f.emit("Neg", x)
    f.ops[-1].of = f.ops[0]
    f.set_outputs([y, d])
    function = f.finalize()
    assert fuse(function) is function


def test_names_do_not_matter() -> None:
    function = exported()
    f = FunctionMaker("renamed")
    env = {v: f.add_input_value("v", v.type, v.role) for v in function.inputs}
    for op in function.ops:
        made = f.add_op(op.spec, "v", [env[v] for v in op.inputs], op.attributes)
        env.update(zip(op.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    f.set_outputs([env[v] for v in function.outputs])
    assert kinds(fuse(f.finalize())) == kinds(fuse(function))


def test_the_order_of_operands_and_dead_ops_do_not_matter() -> None:
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float64, (4,)))
    f.emit("Sin", x)
    f.set_outputs([f.emit("Mul", f.emit("Sigmoid", x), x)])
    fused = fuse(f.finalize())
    g = FunctionMaker()
    g.set_outputs([g.add_op("Silu", "mul", [g.add_input_value("x", Tensor(Float64, (4,)))])])
    assert same(fused, g.finalize())
