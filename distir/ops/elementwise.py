"""Ops on the points of their operands, which broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import DType
from distir.ops.rules import expect, no_grad, points, same, smooth, sum_to, tensor, truth

# ---------------------------------------------------------------- arithmetic


def _each(f: FunctionMaker, o: Op, *grads: Value | None) -> list[Value | None]:
    """Gradients of the result's shape, summed to the operands'."""
    return [None if d is None else sum_to(f, d, v) for v, d in zip(o.inputs, grads, strict=True)]


def _div_dtype(attrs: Attrs, a: DType, b: DType) -> list[DType]:
    expect(0, a, "float")
    return same(attrs, a, b)


def _div_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value | None]:
    b = o.inputs[1]
    slope = f.emit("Neg", f.emit("Div", o.outputs[0], b))
    return _each(f, o, f.emit("Div", d, b), f.emit("Mul", d, slope))


def _pow_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value | None]:
    a, b = o.inputs
    if tensor(a).dtype is not tensor(b).dtype:  # an integer exponent
        return _each(f, o, f.emit("PowGrad", a, f.emit("Cast", b, to=tensor(a).dtype), d), None)
    return _each(f, o, f.emit("PowGrad", a, b, d), f.emit("PowGradExponent", a, b, d))


def _pow_dtype(attrs: Attrs, a: DType, b: DType) -> list[DType]:
    return [a] if b.kind == "int" else same(attrs, a, b)


def _larger_grad(f: FunctionMaker, o: Op, d: Value, compare: str) -> list[Value | None]:
    """Where both are equal, the gradient is the first operand's."""
    other = f.emit(compare, *o.inputs)
    return _each(f, o, f.emit("Mask", other, d, keep=False), f.emit("Mask", other, d))


op(
    "Add",
    axes=points(2),
    dtype=same,
    linear=[{0, 1}],
    eval=lambda xp, a, b: a + b,
    grad=lambda f, o, d: _each(f, o, d, d),
)
op(
    "Sub",
    axes=points(2),
    dtype=same,
    linear=[{0, 1}],
    eval=lambda xp, a, b: a - b,
    grad=lambda f, o, d: [sum_to(f, d, o.inputs[0]), f.emit("Neg", sum_to(f, d, o.inputs[1]))],
)
op(
    "Mul",
    axes=points(2),
    dtype=same,
    linear=[{0}, {1}],
    eval=lambda xp, a, b: a * b,
    grad=lambda f, o, d: _each(f, o, f.emit("Mul", d, o.inputs[1]), f.emit("Mul", d, o.inputs[0])),
)
op(
    "Div",
    axes=points(2),
    dtype=_div_dtype,
    linear=[{0}],
    eval=lambda xp, a, b: a / b,
    grad=_div_grad,
)
op(
    "Neg",
    axes=points(1),
    linear=[{0}],
    exact=True,
    eval=lambda xp, a: -a,
    grad=lambda f, o, d: [f.emit("Neg", d)],
)
op(
    "Pow",
    axes=points(2),
    dtype=_pow_dtype,
    precision="wide",
    eval=lambda xp, a, b: xp.asarray(a**b, dtype=a.dtype),
    grad=_pow_grad,
)
op("PowGrad", axes=points(3), dtype=same, linear=[{2}], eval=lambda xp, a, b, d: d * b * a ** (b - 1))
op(
    "PowGradExponent",
    axes=points(3),
    dtype=same,
    linear=[{2}],
    eval=lambda xp, a, b, d: d * a**b * xp.where(a > 0, xp.log(xp.where(a > 0, a, 1)), 0),
)
op(
    "Max",
    axes=points(2),
    dtype=same,
    exact=True,
    eval=lambda xp, a, b: xp.maximum(a, b),
    grad=lambda f, o, d: _larger_grad(f, o, d, "Less"),
)
op(
    "Min",
    axes=points(2),
    dtype=same,
    exact=True,
    eval=lambda xp, a, b: xp.minimum(a, b),
    grad=lambda f, o, d: _larger_grad(f, o, d, "Greater"),
)

# ---------------------------------------------------------------- functions of one operand


def _sigmoid(xp: Any, x: Any) -> Any:
    """Through exp(-|x|), which does not overflow; exact to rounding where the result is small, too."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x < 0, e, 1) / (1 + e)


def _silu_slope(xp: Any, x: Any, d: Any) -> Any:
    s = _sigmoid(xp, x)
    return d * s * (1 + x * (1 - s))


def _within(xp: Any, x: Any, d: Any, min: float | None = None, max: float | None = None) -> Any:
    if min is not None:
        d = xp.where(x >= min, d, 0)
    return d if max is None else xp.where(x <= max, d, 0)


smooth("Reciprocal", lambda xp, x: 1 / x, lambda xp, y, d: -d * y * y, "y", torch="reciprocal", precision="wide")
smooth("Sqrt", lambda xp, x: xp.sqrt(x), lambda xp, y, d: 0.5 * d / y, "y", torch="sqrt", precision="wide")
smooth("Exp", lambda xp, x: xp.exp(x), lambda xp, y, d: d * y, "y", torch="exp", precision="wide")
smooth("Log", lambda xp, x: xp.log(x), lambda xp, x, d: d / x, torch="log", precision="wide")
smooth("Abs", lambda xp, x: xp.abs(x), lambda xp, x, d: d * xp.sign(x), torch="abs", exact=True)
smooth("Sin", lambda xp, x: xp.sin(x), lambda xp, x, d: d * xp.cos(x), torch="sin")
smooth("Cos", lambda xp, x: xp.cos(x), lambda xp, x, d: -d * xp.sin(x), torch="cos")
smooth("Asin", lambda xp, x: xp.arcsin(x), lambda xp, x, d: d / xp.sqrt(1 - x * x), torch="asin")
smooth("Acos", lambda xp, x: xp.arccos(x), lambda xp, x, d: -d / xp.sqrt(1 - x * x), torch="acos")
smooth("Atan", lambda xp, x: xp.arctan(x), lambda xp, x, d: d / (1 + x * x), torch="atan")
smooth("Asinh", lambda xp, x: xp.arcsinh(x), lambda xp, x, d: d / xp.sqrt(x * x + 1), torch="asinh")
smooth("Acosh", lambda xp, x: xp.arccosh(x), lambda xp, x, d: d / xp.sqrt(x * x - 1), torch="acosh")
smooth("Atanh", lambda xp, x: xp.arctanh(x), lambda xp, x, d: d / (1 - x * x), torch="atanh")
smooth("Tanh", lambda xp, x: xp.tanh(x), lambda xp, y, d: d * (1 - y * y), "y", torch="tanh")
smooth("Relu", lambda xp, x: xp.clip(x, 0, None), lambda xp, y, d: xp.where(y > 0, d, 0), "y", torch="relu", exact=True)
smooth("Sigmoid", _sigmoid, lambda xp, y, d: d * y * (1 - y), "y", torch="sigmoid")
smooth(
    "Silu",
    lambda xp, x: x * _sigmoid(xp, x),
    _silu_slope,
    torch="nn.functional.silu",
    definition=lambda f, o: [f.emit("Mul", o.inputs[0], f.emit("Sigmoid", o.inputs[0]))],
)
smooth(
    "Softplus",
    lambda xp, x: xp.clip(x, 0, None) + xp.log1p(xp.exp(-xp.abs(x))),
    lambda xp, x, d: d * _sigmoid(xp, x),
    precision="wide",
)
smooth(
    "Erf",
    lambda xp, x: xp.erf(x),
    lambda xp, x, d: d * (2 / math.sqrt(math.pi)) * xp.exp(-x * x),
    torch="erf",
)
smooth(
    "Clip",
    lambda xp, x, min=None, max=None: xp.clip(x, min, max),
    _within,
    attributes="min:number/none? max:number/none?",
    exact=True,
)


def _flat(name: str, eval: Callable[..., Any], torch: str) -> None:
    """A function of one operand that is constant but for its steps."""
    op(name, axes=points(1), exact=True, eval=eval, grad=no_grad, torch=torch)


_flat("Sign", lambda xp, x: xp.sign(x), "sign")
_flat("Floor", lambda xp, x: xp.floor(x), "floor")
_flat("Ceil", lambda xp, x: xp.ceil(x), "ceil")
_flat("Round", lambda xp, x: xp.round(x), "round")

# ---------------------------------------------------------------- types and truth


def _cast_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value | None]:
    dtype = tensor(o.inputs[0]).dtype
    return [f.emit("Cast", d, to=dtype) if dtype.floating else None]


op(
    "Cast",
    attributes="to:dtype",
    axes=points(1),
    dtype=lambda attrs, d: [attrs["to"]],
    # not linear towards integers: rounding each addend is not rounding the sum
    linear=lambda attrs: [{0}] if attrs["to"].floating else [],
    eval=lambda xp, x, to: xp.cast(x, to),
    grad=_cast_grad,
)


def _compare(name: str, eval: Callable[..., Any]) -> None:
    op(name, axes=points(2), dtype=truth, eval=eval, grad=no_grad)


_compare("Equal", lambda xp, a, b: a == b)
_compare("Greater", lambda xp, a, b: a > b)
_compare("GreaterOrEqual", lambda xp, a, b: a >= b)
_compare("Less", lambda xp, a, b: a < b)
_compare("LessOrEqual", lambda xp, a, b: a <= b)


def _logic(attrs: Attrs, *dtypes: DType) -> list[DType]:
    for k, d in enumerate(dtypes):
        expect(k, d, "bool")
    return [dtypes[0]]


op("Not", axes=points(1), dtype=_logic, eval=lambda xp, a: xp.logical_not(a), grad=no_grad)
op("And", axes=points(2), dtype=_logic, eval=lambda xp, a, b: xp.logical_and(a, b), grad=no_grad)
op("Or", axes=points(2), dtype=_logic, eval=lambda xp, a, b: xp.logical_or(a, b), grad=no_grad)
op("Xor", axes=points(2), dtype=_logic, eval=lambda xp, a, b: xp.logical_xor(a, b), grad=no_grad)


def _chosen(attrs: Attrs, condition: DType, *dtypes: DType) -> list[DType]:
    expect(0, condition, "bool")
    for k, d in enumerate(dtypes):
        if d is not dtypes[0]:
            raise IRTypeError(f"operand {k + 1}: expected {dtypes[0]}, got {d}")
    return [dtypes[0]]


def _where_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value | None]:
    c = o.inputs[0]
    return _each(f, o, None, f.emit("Mask", c, d), f.emit("Mask", c, d, keep=False))


op(
    "Where",
    axes=points(3),
    dtype=_chosen,
    linear=[{1, 2}],
    exact=True,
    eval=lambda xp, c, a, b: xp.where(c, a, b),
    grad=_where_grad,
    torch="where",
)
op(  # x where the condition is `keep`, else 0: a Where with 0 that is linear in x
    "Mask",
    attributes="keep:flag?",
    axes=points(2),
    dtype=_chosen,
    linear=[{1}],
    exact=True,
    eval=lambda xp, c, x, keep=True: xp.where(c, x, 0) if keep else xp.where(c, 0, x),
    grad=lambda f, o, d: _each(f, o, None, f.add_op("Mask", None, [o.inputs[0], d], o.attributes)),
)
