"""Gelu and Silu are matched in all the ways they are written, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Value, verify
from distir.ir.type import BFloat16, DType, Float32, Float64, Tensor
from distir.transforms.rewriting.fuse import fuse

C, A = math.sqrt(2 / math.pi), 0.044715
Write = Callable[["Writer", Value], Value]


class Writer(FunctionMaker):
    """A maker of products and sums."""

    dtype: DType = Float64

    def of(self, x: float) -> Value:
        """The number, rounded to the dtype."""
        rounded = float(np.asarray(x, self.dtype.numpy))
        return self.emit("Constant", value=(rounded,), shape=(), dtype=self.dtype)

    def mul(self, a: Value, b: Value | float) -> Value:
        return self.emit("Mul", a, b if isinstance(b, Value) else self.of(b))

    def add(self, a: Value, b: Value | float) -> Value:
        return self.emit("Add", a, b if isinstance(b, Value) else self.of(b))

    def tanh(self, x: Value) -> Value:
        """tanh(c (x + a x^3)), as exporters write it."""
        cube = self.emit("Pow", x, self.of(3.0))
        return self.emit("Tanh", self.mul(self.add(x, self.mul(cube, A)), C))

    def erf(self, x: Value) -> Value:
        return self.emit("Erf", self.emit("Div", x, self.of(math.sqrt(2))))


def program(write: Write, dtype: DType = Float64) -> Function:
    f = Writer()
    f.dtype = dtype
    x = f.add_input_value("x", Tensor(dtype, (3, 4)))
    y = f.emit("MatMul", x, f.add_input_value("w", Tensor(dtype, (4, 5))))
    f.set_outputs([f.emit("Neg", write(f, y))])
    return f.finalize()


def kinds(function: Function) -> list[str]:
    return [op.op_type for op in function.ops]


def equal(function: Function, fused: Function, tolerance: float = 1e-12) -> None:
    verify(fused)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in function.inputs]  # type: ignore[union-attr]
    for want, got in zip(*[SequentialExecutor().compute(f, arrays) for f in (function, fused)], strict=True):
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)


def cube_by_products(f: Writer, x: Value) -> Value:
    cube = f.mul(f.mul(x, x), x)
    return f.emit("Tanh", f.mul(f.add(f.mul(cube, A), x), C))


def inside_distributed(f: Writer, x: Value) -> Value:
    return f.emit("Tanh", f.mul(f.mul(x, C), f.add(f.mul(f.emit("Pow", x, f.of(2.0)), A), 1.0)))


GELUS: dict[str, tuple[str, Write]] = {
    "gelu_new": ("tanh", lambda f, x: f.mul(f.mul(x, 0.5), f.add(f.tanh(x), 1.0))),
    "half last": ("tanh", lambda f, x: f.mul(f.mul(x, f.add(f.tanh(x), 1.0)), 0.5)),
    "half inside": ("tanh", lambda f, x: f.mul(x, f.add(f.mul(f.tanh(x), 0.5), 0.5))),
    "divided by 2": ("tanh", lambda f, x: f.emit("Div", f.mul(f.add(f.of(1.0), f.tanh(x)), x), f.of(2.0))),
    "products": ("tanh", lambda f, x: f.mul(f.mul(f.of(0.5), x), f.add(cube_by_products(f, x), 1.0))),
    "distributed": ("tanh", lambda f, x: f.mul(f.mul(x, 0.5), f.add(inside_distributed(f, x), 1.0))),
    "a sum": ("tanh", lambda f, x: f.add(f.mul(x, 0.5), f.mul(f.mul(x, 0.5), f.tanh(x)))),
    "erf": ("none", lambda f, x: f.mul(f.mul(x, f.add(f.erf(x), 1.0)), 0.5)),
    "erf of a product": (
        "none",
        lambda f, x: f.mul(f.mul(x, 0.5), f.add(f.emit("Erf", f.mul(x, math.sqrt(0.5))), 1.0)),
    ),
    "1 less -erf": ("none", lambda f, x: f.mul(f.mul(x, 0.5), f.emit("Sub", f.of(1.0), f.emit("Neg", f.erf(x))))),
}


@pytest.mark.parametrize("dtype", [Float64, Float32, BFloat16], ids=repr)
@pytest.mark.parametrize("name", GELUS)
def test_gelu(name: str, dtype: DType) -> None:
    approximate, write = GELUS[name]
    function = program(write, dtype)
    fused = fuse(function)
    assert kinds(fused) == ["MatMul", "Gelu", "Neg"]
    assert fused.ops[1].attributes == {"approximate": approximate}
    assert fused.ops[1].outputs[0] in {v for op in function.ops for v in op.outputs}
    equal(function, fused, {Float64: 1e-12, Float32: 1e-6}.get(dtype, 0.05))


def test_gelu_of_an_input_and_of_a_gelu() -> None:
    f = Writer()
    x = f.add_input_value("x", Tensor(Float64, (4,)))
    write = GELUS["gelu_new"][1]
    f.set_outputs([write(f, write(f, x))])
    function = f.finalize()
    assert kinds(fuse(function)) == ["Gelu", "Gelu"]
    equal(function, fuse(function))


NEAR_MISSES: dict[str, Write] = {
    "another cube": lambda f, x: f.mul(
        f.mul(x, 0.5), f.add(f.emit("Tanh", f.mul(f.add(x, f.mul(f.emit("Pow", x, f.of(3.0)), 0.0447)), C)), 1.0)
    ),
    "another scale": lambda f, x: f.mul(
        f.mul(x, 0.5), f.add(f.emit("Tanh", f.mul(f.add(x, f.mul(f.emit("Pow", x, f.of(3.0)), A)), 0.7979)), 1.0)
    ),
    "another power": lambda f, x: f.mul(
        f.mul(x, 0.5), f.add(f.emit("Tanh", f.mul(f.add(x, f.mul(f.emit("Pow", x, f.of(2.0)), A)), C)), 1.0)
    ),
    "not halved": lambda f, x: f.mul(x, f.add(f.tanh(x), 1.0)),
    "less 1": lambda f, x: f.mul(f.mul(x, 0.5), f.emit("Sub", f.tanh(x), f.of(1.0))),
    "another factor": lambda f, x: f.mul(f.mul(f.emit("Abs", x), 0.5), f.add(f.tanh(x), 1.0)),
    "erf unscaled": lambda f, x: f.mul(f.mul(x, 0.5), f.add(f.emit("Erf", x), 1.0)),
    "tanh of erf's": lambda f, x: f.mul(
        f.mul(x, 0.5), f.add(f.emit("Tanh", f.emit("Div", x, f.of(math.sqrt(2)))), 1.0)
    ),
    "sigmoid": lambda f, x: f.mul(x, f.emit("Sigmoid", f.mul(x, 1.702))),
    "a sum with it": lambda f, x: f.add(x, f.emit("Sigmoid", x)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    function = program(NEAR_MISSES[name])
    assert fuse(function) is function


def test_rounded_constants_are_not_those_of_a_wider_type() -> None:
    """An f32 model read as f64: its Gelu is another function, by 1e-8."""
    f = Writer()
    x = f.add_input_value("x", Tensor(Float64, (4,)))
    c, a = (float(np.float32(n)) for n in (C, A))
    inner = f.mul(f.add(x, f.mul(f.emit("Pow", x, f.of(3.0)), a)), c)
    f.set_outputs([f.mul(f.mul(x, 0.5), f.add(f.emit("Tanh", inner), 1.0))])
    function = f.finalize()
    assert fuse(function) is function


@pytest.mark.parametrize("kind", ["Tanh", "Pow", "Add"])
def test_what_is_needed_elsewhere_stays(kind: str) -> None:
    """A value inside is an output, or used by another op."""
    function = program(GELUS["gelu_new"][1])
    inside = next(op for op in function.ops if op.op_type == kind).outputs[0]
    shown = Function("f", function.inputs, function.ops, (*function.outputs, inside))
    assert fuse(shown) is shown
    f = FunctionMaker()
    f.inputs += function.inputs
    f.ops += function.ops
    f.set_outputs([*function.outputs, f.emit("Sin", inside)])
    used = f.finalize()
    assert fuse(used) is used


def test_the_operand_may_be_used_elsewhere() -> None:
    f = Writer()
    x = f.add_input_value("x", Tensor(Float64, (4,)))
    y = f.emit("Sin", x)
    f.set_outputs([f.add(GELUS["gelu_new"][1](f, y), y)])
    function = f.finalize()
    assert kinds(fuse(function)) == ["Sin", "Gelu", "Add"]
    equal(function, fuse(function))


@pytest.mark.parametrize("swapped", [False, True])
def test_silu(swapped: bool) -> None:
    def write(f: Writer, x: Value) -> Value:
        s = f.emit("Sigmoid", x)
        return f.mul(s, x) if swapped else f.mul(x, s)

    function = program(write)
    assert kinds(fuse(function)) == ["MatMul", "Silu", "Neg"]
    equal(function, fuse(function))


def test_the_logarithm_of_a_sigmoid_does_not_underflow() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float32, (7,)))
    f.set_outputs([f.emit("Log", f.emit("Sigmoid", x))])
    fused = fuse(f.finalize())
    assert kinds(fused) == ["Neg", "Softplus", "Neg"]
    given = np.asarray([-200, -110, -18, -1, 0, 3, 60], np.float32)
    got = SequentialExecutor().compute(fused, [given])[0]
    assert np.allclose(got, -np.logaddexp(0, -given.astype(np.float64)), rtol=3e-7, atol=0)


def test_a_sigmoid_with_other_uses_stays() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float32, (7,)))
    s = f.emit("Sigmoid", x)
    f.set_outputs([f.emit("Log", s), s])
    function = f.finalize()
    assert fuse(function) is function
