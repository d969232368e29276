"""Root-mean-square norms are matched in all the ways they are written, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Role, Value
from distir.ir.type import BFloat16, DType, Float32, Float64, Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.grad import grad
from distir.transforms.differentiation.training import training_step
from distir.transforms.rewriting.fuse import fuse
from tests.transforms.rewriting.test_fuse_gelu import equal, kinds

EPSILON = 0.125
Write = Callable[["Norms", Value, Value], Value]


class Norms(FunctionMaker):
    """A maker of the parts of norms."""

    def of(self, number: float, like: Value) -> Value:
        return self.emit("Constant", value=(number,), shape=(), dtype=tensor(like).dtype)

    def mul(self, a: Value, b: Value) -> Value:
        return self.emit("Mul", a, b)

    def div(self, a: Value, b: Value) -> Value:
        return self.emit("Div", a, b)

    def square(self, x: Value) -> Value:
        return self.emit("Pow", x, self.of(2.0, x))

    def mean(self, x: Value, axes: tuple[int, ...] = (2,)) -> Value:
        return self.emit("ReduceMean", x, axes=axes, keepdims=1)

    def more(self, mean: Value, epsilon: float = EPSILON) -> Value:
        return self.emit("Add", mean, self.of(epsilon, mean))

    def root(self, x: Value, epsilon: float = EPSILON) -> Value:
        return self.emit("Sqrt", self.more(self.mean(self.square(x)), epsilon))

    def scale(self, x: Value) -> Value:
        return self.emit("Reciprocal", self.root(x))

    def to(self, x: Value, dtype: DType) -> Value:
        return self.emit("Cast", x, to=dtype)


def program(
    write: Write, dtype: DType = Float64, of_gain: DType | None = None, gain: tuple[int, ...] = (6,)
) -> Function:
    """The norm of a product, and what follows it."""
    f = Norms()
    x = f.add_input_value("x", Tensor(dtype, (3, 2, 4)), Role("data", 0))
    w = f.add_input_value("w", Tensor(dtype, (4, 6)), Role("parameter"))
    g = f.add_input_value("g", Tensor(of_gain or dtype, gain), Role("parameter"))
    f.set_outputs([f.emit("Neg", write(f, f.emit("MatMul", x, w), g))])
    return f.finalize()


WAYS: dict[str, Write] = {
    "exported": lambda f, x, g: f.mul(g, f.mul(x, f.scale(x))),
    "gain last": lambda f, x, g: f.mul(f.mul(x, f.scale(x)), g),
    "scale first": lambda f, x, g: f.mul(x, f.mul(f.scale(x), g)),
    "divided": lambda f, x, g: f.mul(f.div(x, f.root(x)), g),
    "one over the root": lambda f, x, g: f.mul(f.mul(f.div(f.of(1.0, x), f.root(x)), x), g),
    "a product for the square": lambda f, x, g: f.mul(
        f.mul(x, f.emit("Reciprocal", f.emit("Sqrt", f.emit("Add", f.of(EPSILON, x), f.mean(f.mul(x, x)))))), g
    ),
    "powers": lambda f, x, g: f.mul(f.mul(x, f.emit("Pow", f.more(f.mean(f.square(x))), f.of(-0.5, x))), g),
}


@pytest.mark.parametrize("dtype", [Float64, Float32, BFloat16], ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write_it(way: str, dtype: DType) -> None:
    function = program(WAYS[way], dtype)
    fused = fuse(function)
    assert kinds(fused) == ["MatMul", "RMSNormalization", "Neg"]
    assert fused.ops[1].attributes == {"axis": 2, "epsilon": EPSILON}
    assert fused.ops[1].outputs[0] in {v for op in function.ops for v in op.outputs}
    equal(function, fused, {Float64: 1e-12, Float32: 1e-6}.get(dtype, 0.05))


def test_over_several_dims() -> None:
    def write(f: Norms, x: Value, g: Value) -> Value:
        scale = f.emit("Reciprocal", f.emit("Sqrt", f.more(f.mean(f.square(x), (1, 2)))))
        return f.mul(f.mul(x, scale), g)

    function = program(write, gain=(2, 6))
    fused = fuse(function)
    assert fused.ops[1].attributes == {"axis": 1, "epsilon": EPSILON}
    equal(function, fused)


CASTS: dict[str, tuple[Write, DType, list[str]]] = {
    # 16-bit x; the gain's dtype; what is left
    "statistics": (lambda f, x, g: f.mul(f.mul(x, f.to(f.scale(f.to(x, Float32)), BFloat16)), g), BFloat16, []),
    "norm, then gain": (lambda f, x, g: f.mul(g, f.to(wide(f, x), BFloat16)), BFloat16, []),
    "gain, then rounded": (lambda f, x, g: f.to(f.mul(wide(f, x), f.to(g, Float32)), BFloat16), BFloat16, []),
    "a wide gain": (lambda f, x, g: f.to(f.mul(wide(f, x), g), BFloat16), Float32, ["Cast", "Cast"]),
}


def wide(f: Norms, x: Value) -> Value:
    x = f.to(x, Float32)
    return f.mul(x, f.scale(x))


@pytest.mark.parametrize("name", CASTS)
def test_statistics_in_single_precision(name: str) -> None:
    """The op computes them so; a gain that is wider than x is not rounded."""
    write, of_gain, left = CASTS[name]
    function = program(write, BFloat16, of_gain)
    fused = fuse(function)
    assert sorted(kinds(fused)) == sorted(["MatMul", "RMSNormalization", "Neg", *left])
    op = next(op for op in fused.ops if op.op_type == "RMSNormalization")
    assert {tensor(v).dtype for v in (*op.inputs, *op.outputs)} == {of_gain}
    equal(function, fused, 0.05)


NEAR_MISSES: dict[str, Write] = {
    "centred": lambda f, x, g: f.mul(f.mul(f.emit("Sub", x, f.mean(x)), f.scale(x)), g),
    "of the centred": lambda f, x, g: f.mul(f.mul(x, f.scale(f.emit("Sub", x, f.mean(x)))), g),
    "epsilon taken away": lambda f, x, g: f.mul(
        f.div(x, f.emit("Sqrt", f.emit("Sub", f.mean(f.square(x)), f.of(1e-9, x)))), g
    ),
    "epsilon below 0": lambda f, x, g: f.mul(f.div(x, f.root(x, -1e-9)), g),
    "no epsilon": lambda f, x, g: f.mul(f.div(x, f.emit("Sqrt", f.mean(f.square(x)))), g),
    "epsilon on the root": lambda f, x, g: f.mul(f.div(x, f.more(f.emit("Sqrt", f.mean(f.square(x))))), g),
    "epsilon of each column": lambda f, x, g: f.mul(
        f.div(x, f.emit("Sqrt", f.emit("Add", f.mean(f.square(x)), f.emit("Abs", g)))), g
    ),
    "a cube": lambda f, x, g: f.mul(f.div(x, f.emit("Sqrt", f.more(f.mean(f.emit("Pow", x, f.of(3.0, x)))))), g),
    "a product of two": lambda f, x, g: f.mul(f.div(x, f.emit("Sqrt", f.more(f.mean(f.mul(x, f.emit("Abs", x)))))), g),
    "a sum": lambda f, x, g: f.mul(
        f.div(x, f.emit("Sqrt", f.more(f.emit("ReduceSum", f.square(x), axes=(2,), keepdims=1)))), g
    ),
    "over other dims": lambda f, x, g: f.mul(f.div(x, f.emit("Sqrt", f.more(f.mean(f.square(x), (1,))))), g),
    "over more dims": lambda f, x, g: f.mul(f.div(x, f.emit("Sqrt", f.more(f.mean(f.square(x), (1, 2))))), g),
    "no root": lambda f, x, g: f.mul(f.div(x, f.more(f.mean(f.square(x)))), g),
    "times the root": lambda f, x, g: f.mul(f.mul(x, f.root(x)), g),
    "the root over x": lambda f, x, g: f.mul(f.div(f.root(x), x), g),
    "over the gain": lambda f, x, g: f.div(f.mul(x, f.scale(x)), g),
    "plus the gain": lambda f, x, g: f.emit("Add", f.mul(x, f.scale(x)), g),
    "of another value": lambda f, x, g: f.mul(f.mul(f.emit("Abs", x), f.scale(x)), g),
    "without a gain": lambda f, x, g: f.mul(x, f.scale(x)),
    "a product of x": lambda f, x, g: f.mul(f.mul(x, g), f.scale(x)),  # which may be needed elsewhere
    "without x": lambda f, x, g: f.mul(f.scale(x), g),
    "the square of x": lambda f, x, g: f.mul(f.mul(x, f.mul(x, f.scale(x))), f.emit("Abs", g)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    function = program(NEAR_MISSES[name])
    assert "RMSNormalization" not in kinds(fuse(function))
    assert fuse(function) is function


@pytest.mark.parametrize("gain", [(1,), (1, 6), (2, 6), (3, 2, 6)], ids=str)
def test_a_gain_of_other_dims_stays(gain: tuple[int, ...]) -> None:
    function = program(WAYS["exported"], gain=gain)
    assert fuse(function) is function


@pytest.mark.parametrize(("axes", "gain"), [((1,), (2, 6)), ((0, 2), (3, 2, 6)), ((0,), (3, 2, 6))], ids=str)
def test_other_dims_stay_also_with_a_gain_of_the_dims_from_the_first_on(
    axes: tuple[int, ...], gain: tuple[int, ...]
) -> None:
    function = program(lambda f, x, g: f.mul(f.div(x, f.emit("Sqrt", f.more(f.mean(f.square(x), axes)))), g), gain=gain)
    assert fuse(function) is function


def of_an_input(shape: tuple[int, ...], write: Write) -> Function:
    f = Norms()
    x = f.add_input_value("x", Tensor(Float64, shape))
    f.set_outputs([write(f, x, f.add_input_value("g", Tensor(Float64, shape[-1:])))])
    return f.finalize()


def test_means_without_their_dim_stay() -> None:
    """Of a square matrix: each column is divided by the root of a row."""

    def write(f: Norms, x: Value, g: Value) -> Value:
        mean = f.emit("ReduceMean", f.square(x), axes=(1,), keepdims=0)
        return f.mul(f.div(x, f.emit("Sqrt", f.more(mean))), g)

    function = of_an_input((4, 4), write)
    assert fuse(function) is function


@pytest.mark.parametrize("shape", [(1,), (4,)], ids=str)
def test_a_scale_is_no_gain(shape: tuple[int, ...]) -> None:
    def write(f: Norms, x: Value, g: Value) -> Value:
        scale = f.emit("Reciprocal", f.emit("Sqrt", f.more(f.mean(f.square(x), (0,)))))
        return f.mul(x, f.mul(scale, scale))

    function = of_an_input(shape, write)
    assert fuse(function) is function


@pytest.mark.parametrize("part", ["square", "epsilon", "one"])
def test_numbers_of_more_dims_stay(part: str) -> None:
    """The result has these dims, too."""

    def write(f: Norms, x: Value, g: Value) -> Value:
        def number(n: float, name: str) -> Value:
            return f.emit("Constant", value=(n,), shape=(1,) * 4 if name == part else (), dtype=Float64)

        squares = f.emit("Pow", x, number(2.0, "square"))
        mean = f.mean(squares, (len(shape_of(squares)) - 1,))
        root = f.emit("Sqrt", f.emit("Add", mean, number(EPSILON, "epsilon")))
        return f.mul(f.mul(x, f.div(number(1.0, "one"), root)), g)

    function = program(write)
    assert fuse(function) is function


def test_narrower_statistics_stay() -> None:
    """In single precision of a double: the op's are double. Only what is single all through is a norm."""

    def write(f: Norms, x: Value, g: Value) -> Value:
        return f.mul(f.mul(x, f.to(f.scale(f.to(x, Float32)), Float64)), g)

    function = program(write)
    assert fuse(function) is function


@pytest.mark.parametrize("kind", ["Pow", "ReduceMean", "Add", "Sqrt", "Reciprocal"])
def test_what_is_needed_elsewhere_stays(kind: str) -> None:
    function = program(WAYS["exported"])
    inside = next(op for op in function.ops if op.op_type == kind).outputs[0]
    shown = Function("f", function.inputs, function.ops, (*function.outputs, inside))
    assert fuse(shown) is shown


def test_a_row_s_norm_saves_x_and_a_number() -> None:
    function = program(WAYS["exported"])
    step = training_step(function, "mse", "sgd")
    (norm,) = [op for op in step.ops if op.op_type == "RMSNorm"]
    (slope,) = [op for op in step.ops if op.op_type == "RMSNormGrad"]
    x, scale = norm.inputs[0], norm.outputs[1]
    assert list(slope.inputs[:3]) == [x, norm.inputs[1], scale]
    assert shape_of(scale) == (3, 2, 1)
    backward = {v for op in step.ops if op.of is not None for v in op.inputs}
    made = {v for op in step.ops if op.of is None for v in op.outputs}
    of_norm = {v for v in backward & made if shape_of(v) in ((3, 2, 6), (3, 2, 1))}
    assert of_norm - {x, scale} <= {v for op in step.ops if op.op_type in ("Sub", "Neg") for v in op.outputs}


def test_gradients_are_those_of_the_parts() -> None:
    function = program(WAYS["exported"])
    results: list[list[np.ndarray]] = []
    for f in (function, fuse(function)):
        maker = FunctionMaker()
        maker.inputs += f.inputs
        maker.ops += f.ops
        maker.set_outputs([maker.emit("ReduceSum", maker.emit("Exp", f.outputs[0]), axes=(0, 1, 2), keepdims=0)])
        step = grad(maker.finalize(), 0, list(f.inputs))
        rng = np.random.default_rng(1)
        results.append(SequentialExecutor().compute(step, [rng.standard_normal(shape_of(v)) for v in f.inputs]))
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
