"""Softmax, normalisation and activations of neural networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ops.rules import expect_shape, letters, same, smooth, sum_to

Axes = Callable[[Attrs, Sequence[Shape]], str]

# ---------------------------------------------------------------- softmax, along the attribute `axis`


def _along(operands: int) -> Axes:
    """All operands and the result have one shape, and the axis stays whole."""

    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        for k, s in enumerate(shapes):
            expect_shape(k, s, shapes[0])
        names = letters(len(shapes[0]))
        row = " ".join(names)
        return f"{', '.join([row] * operands)} -> {row} | {names[attrs.get('axis', -1)]}:whole"

    return axes


def _softmax(xp: Any, x: Any, axis: int = -1) -> Any:
    e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return e / xp.sum(e, axis=axis, keepdims=True)


def _log_softmax(xp: Any, x: Any, axis: int = -1) -> Any:
    x = x - xp.max(x, axis=axis, keepdims=True)
    return x - xp.log(xp.sum(xp.exp(x), axis=axis, keepdims=True))


def _emit_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    name = {"Softmax": "SoftmaxGrad", "LogSoftmax": "LogSoftmaxGrad"}[o.op_type]
    return [f.add_op(name, None, [o.outputs[0], d], o.attributes)]


op("Softmax", axes=_along(1), eval=_softmax, grad=_emit_grad, torch="softmax")
op("LogSoftmax", axes=_along(1), eval=_log_softmax, grad=_emit_grad, torch="log_softmax")
op(
    "SoftmaxGrad",
    axes=_along(2),
    dtype=same,
    linear=[{1}],
    eval=lambda xp, y, d, axis=-1: y * (d - xp.sum(y * d, axis=axis, keepdims=True)),
)
op(
    "LogSoftmaxGrad",
    axes=_along(2),
    dtype=same,
    linear=[{1}],
    eval=lambda xp, y, d, axis=-1: d - xp.exp(y) * xp.sum(d, axis=axis, keepdims=True),
)

# ---------------------------------------------------------------- layer norm, over the dims from `axis` on


def _norm_dims(attrs: Attrs, rank: int) -> int:
    """How many trailing dims are normalised."""
    axis = attrs.get("axis", -1)
    return rank - axis if axis >= 0 else -axis


def _norm_axes(*rows: str) -> Axes:
    """Axes from a letter for each operand, last the result: "x" of all dims, "w" of the normalised ones."""

    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        names = letters(len(shapes[0]))
        n = _norm_dims(attrs, len(names))
        if not 0 < n <= len(names):
            raise IRTypeError(f"operand 0: shape {shapes[0]} has no axis {attrs.get('axis', -1)}")
        lead, tail = names[: len(names) - n], names[len(names) - n :]
        words = {"x": " ".join(names), "w": " ".join(tail)}
        for k, (row, s) in enumerate(zip(rows, shapes, strict=False)):
            expect_shape(k, s, shapes[0] if row == "x" else shapes[0][len(lead) :])
        kinds = [f"{t}:whole" for t in tail] + ([f"{i}:sum" for i in lead] if rows[-1] == "w" else [])
        operands = ", ".join(words[r] for r in rows[:-1])
        return f"{operands} -> {words[rows[-1]]} | {' '.join(kinds)}"

    return axes


def _standard(xp: Any, x: Any, epsilon: float, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """`x` less its mean, over its deviation; and one over the deviation."""
    count = math.prod(x.shape[i] for i in dims)
    x = x - xp.sum(x, axis=dims, keepdims=True) / count
    scale = 1 / xp.sqrt(xp.sum(x * x, axis=dims, keepdims=True) / count + epsilon)
    return x * scale, scale


def _dims(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(range(axis % x.ndim, x.ndim))


def _layer_norm(xp: Any, x: Any, gain: Any, bias: Any = None, axis: int = -1, epsilon: float = 1e-5) -> Any:
    y = _standard(xp, x, epsilon, _dims(x, axis))[0] * gain
    return y if bias is None else y + bias


def _layer_norm_grad(xp: Any, x: Any, gain: Any, d: Any, axis: int = -1, epsilon: float = 1e-5) -> Any:
    dims = _dims(x, axis)
    count = math.prod(x.shape[i] for i in dims)
    y, scale = _standard(xp, x, epsilon, dims)
    d = d * gain
    mean = xp.sum(d, axis=dims, keepdims=True) / count
    along = xp.sum(d * y, axis=dims, keepdims=True) / count
    return scale * (d - mean - y * along)


def _gain_grad(xp: Any, x: Any, d: Any, axis: int = -1, epsilon: float = 1e-5) -> Any:
    y, _ = _standard(xp, x, epsilon, _dims(x, axis))
    lead = tuple(range(axis % x.ndim))
    return xp.sum(d * y, axis=lead) if lead else d * y


def _emit_norm_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    x, gain, *bias = o.inputs
    dx = f.add_op("LayerNormGrad", None, [x, gain, d], o.attributes)
    return [dx, f.add_op("LayerNormGradWeight", None, [x, d], o.attributes), *[sum_to(f, d, b) for b in bias]]


op(
    "LayerNormalization",
    axes=lambda attrs, shapes: _norm_axes(*["x", "w", "w"][: max(2, len(shapes))], "x")(attrs, shapes),
    dtype=same,
    weight=1,
    eval=_layer_norm,
    grad=_emit_norm_grad,
)
op("LayerNormGrad", axes=_norm_axes("x", "w", "x", "x"), dtype=same, linear=[{2}], eval=_layer_norm_grad)
op("LayerNormGradWeight", axes=_norm_axes("x", "x", "w"), dtype=same, linear=[{1}], eval=_gain_grad)

# ---------------------------------------------------------------- Gelu, `approximate` "none" or "tanh"

_C = math.sqrt(2 / math.pi)


def _gelu(xp: Any, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + xp.tanh(_C * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + xp.erf(x * math.sqrt(0.5)))


def _gelu_slope(xp: Any, x: Any, d: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        t = xp.tanh(_C * (x + 0.044715 * x * x * x))
        return d * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x))
    density = xp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return d * (0.5 * (1 + xp.erf(x * math.sqrt(0.5))) + x * density)


smooth("Gelu", _gelu, _gelu_slope, torch="nn.functional.gelu")
