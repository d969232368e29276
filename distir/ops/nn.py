"""Softmax, normalisation and activations of neural networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import DType, Int64
from distir.ops.rules import (
    cast,
    expect,
    expect_shape,
    letters,
    points,
    rounded_once,
    same,
    scalar,
    shape_of,
    smooth,
    statistic,
    tensor,
    wide,
)

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


@rounded_once
def _softmax(xp: Any, x: Any, axis: int = -1) -> Any:
    e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return e / xp.sum(e, axis=axis, keepdims=True)


@rounded_once
def _log_softmax(xp: Any, x: Any, axis: int = -1) -> Any:
    x = x - xp.max(x, axis=axis, keepdims=True)
    return x - xp.log(xp.sum(xp.exp(x), axis=axis, keepdims=True))


def _emit_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    name = {"Softmax": "SoftmaxGrad", "LogSoftmax": "LogSoftmaxGrad"}[o.op_type]
    return [f.add_op(name, None, [o.outputs[0], d], o.attributes)]


op("Softmax", attributes="axis:axis?", axes=_along(1), eval=_softmax, grad=_emit_grad, torch="softmax")
op(
    "LogSoftmax",
    attributes="axis:axis?",
    axes=_along(1),
    precision="wide",
    eval=_log_softmax,
    grad=_emit_grad,
    torch="log_softmax",
)
op(
    "SoftmaxGrad",
    attributes="axis:axis?",
    axes=_along(2),
    dtype=same,
    linear=[{1}],
    eval=rounded_once(lambda xp, y, d, axis=-1: y * (d - xp.sum(y * d, axis=axis, keepdims=True))),
)
op(
    "LogSoftmaxGrad",
    attributes="axis:axis?",
    axes=_along(2),
    dtype=same,
    linear=[{1}],
    eval=rounded_once(lambda xp, y, d, axis=-1: d - xp.exp(y) * xp.sum(d, axis=axis, keepdims=True)),
)


def causal(xp: Any, rows: range, columns: range) -> Any:
    """Which columns of a square matrix come at or before the diagonal of these rows."""
    r, c = [xp.arange(x.start, x.stop, Int64) for x in (rows, columns)]
    return xp.expand_dims(c, 0) <= xp.expand_dims(r, 1)


@rounded_once
def _causal_mask(xp: Any, x: Any, start: Sequence[int], scale: float = 1.0, value: float = -math.inf) -> Any:
    seen = causal(xp, *[range(a, a + n) for a, n in zip(start[-2:], x.shape[-2:], strict=True)])
    return xp.where(seen, x * scale, value)


def _causal_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    return [f.add_op("CausalMask", None, [d], {**o.attributes, "value": 0.0})]


def _causal_dtype(attrs: Attrs, dtype: DType) -> list[DType]:
    expect(0, dtype, "float")
    return [dtype]


op(  # scores (.., s, t) times `scale`, and `value`, by default -inf, where a key comes after the query: in one op, as
    "CausalMask",  # in the kernels of trainers, so that scaled scores are not held as well
    attributes="scale:number? value:number?",
    axes=points(1),
    scores=True,
    dtype=_causal_dtype,
    linear=lambda attrs: [] if attrs.get("value", -math.inf) else [{0}],
    index=(0, None),
    donates=(0,),
    eval=_causal_mask,
    grad=_causal_grad,
)

# ---------------------------------------------------------------- layer norm, over the dims from `axis` on


def _norm_dims(attrs: Attrs, rank: int) -> int:
    """How many trailing dims are normalised."""
    axis = attrs.get("axis", -1)
    return rank - axis if axis >= 0 else -axis


def _norm_axes(operands: str, results: str) -> Axes:
    """Axes from a letter for each operand and result: "x" of all dims, "w" of the normalised ones, "m" of the others.

    The letters of operands that may be left out come last.
    """

    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        names = letters(len(shapes[0]))
        n = _norm_dims(attrs, len(names))
        if not 0 < n <= len(names):
            raise IRTypeError(f"operand 0: shape {shapes[0]} has no axis {attrs.get('axis', -1)}")
        lead, tail = names[: len(names) - n], names[len(names) - n :]
        words = {"x": " ".join(names), "w": " ".join(tail), "m": " ".join(lead + ["1"] * n)}
        whole = shapes[0]
        sizes = {"x": whole, "w": whole[len(lead) :], "m": whole[: len(lead)] + (1,) * n}
        rows = operands[: max(len(shapes), 2)]
        for k, (row, s) in enumerate(zip(rows, shapes, strict=False)):
            expect_shape(k, s, sizes[row])
        kinds = [f"{t}:whole" for t in tail] + ([f"{i}:sum" for i in lead] if "w" in results else [])
        made = results if attrs.get("bias", True) else results[:-1]
        return f"{', '.join(words[r] for r in rows)} -> {', '.join(words[r] for r in made)} | {' '.join(kinds)}"

    return axes


def _dims(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(range(axis % x.ndim, x.ndim))


def _layer_norm(
    xp: Any, x: Any, gain: Any, bias: Any = None, axis: int = -1, epsilon: float = 1e-5
) -> tuple[Any, Any, Any]:
    dims, centred = _dims(x, axis), wide(xp, x)
    count = math.prod(x.shape[i] for i in dims)
    mean = xp.sum(centred, axis=dims, keepdims=True) / count
    centred = centred - mean
    scale = 1 / xp.sqrt(xp.sum(centred * centred, axis=dims, keepdims=True) / count + epsilon)
    y = centred * scale * wide(xp, gain)
    y = y if bias is None else y + wide(xp, bias)
    return xp.asarray(y, dtype=x.dtype), mean, scale


def _layer_norm_definition(f: FunctionMaker, o: Op) -> list[Value]:
    """Centred, over the deviation, times the gain; in the dtype of statistics (Ba et al. 2016, equation 4)."""
    small = tensor(o.inputs[0]).dtype
    x, gain, *bias = [cast(f, v, statistic(small)) for v in o.inputs]
    axis, rank = o.attributes.get("axis", -1), len(shape_of(x))
    dims = tuple(range(axis % rank, rank))
    count = scalar(f, float(math.prod(shape_of(x)[i] for i in dims)), x)
    mean = f.emit("Div", f.emit("ReduceSum", x, axes=dims, keepdims=1), count)
    centred = f.emit("Sub", x, mean)
    squares = f.emit("ReduceSum", f.emit("Mul", centred, centred), axes=dims, keepdims=1)
    epsilon = scalar(f, o.attributes.get("epsilon", 1e-5), x)
    scale = f.emit("Reciprocal", f.emit("Sqrt", f.emit("Add", f.emit("Div", squares, count), epsilon)))
    y = f.emit("Mul", f.emit("Mul", centred, scale), gain)
    return [cast(f, f.emit("Add", y, bias[0]) if bias else y, small), mean, scale]


def _layer_norm_grad(
    xp: Any, x: Any, gain: Any, mean: Any, scale: Any, d: Any, axis: int = -1, bias: bool = True
) -> tuple[Any, ...]:
    dims, lead = _dims(x, axis), tuple(range(axis % x.ndim))
    count = math.prod(x.shape[i] for i in dims)
    y, d = (wide(xp, x) - mean) * scale, wide(xp, d)
    rows = d * wide(xp, gain)
    middle = xp.sum(rows, axis=dims, keepdims=True) / count
    along = xp.sum(rows * y, axis=dims, keepdims=True) / count
    results = scale * (rows - middle - y * along), xp.sum(d * y, axis=lead), xp.sum(d, axis=lead)
    return tuple([xp.asarray(r, dtype=x.dtype) for r in results[: 3 if bias else 2]])


def _emit_norm_grad(f: FunctionMaker, o: Op, d: Value, *saved: None) -> list[Value]:
    x, gain, *bias = o.inputs
    mean, scale = o.outputs[1:]
    attributes = {"axis": o.attributes.get("axis", -1), "bias": bool(bias)}
    return list(f.add_op("LayerNormGrad", None, [x, gain, mean, scale, d], attributes))


def _statistics_dtype(count: int) -> Callable[..., list[DType]]:
    """Of a result like the operands, and that many statistics."""

    def rule(attrs: Attrs, *dtypes: DType) -> list[DType]:
        (d,) = same(attrs, *dtypes)
        return [d, *[statistic(d)] * count]

    return rule


def _norm_grad_dtype(attrs: Attrs, x: DType, gain: DType, mean: DType, scale: DType, d: DType) -> list[DType]:
    return _slope_dtype(attrs, (x, gain, d), (mean, scale)) * _norm_results(attrs)


def _slope_dtype(attrs: Attrs, operands: Sequence[DType], saved: Sequence[DType]) -> list[DType]:
    """Of one gradient, from operands 0, 1 and the last, and the statistics between them."""
    (d,) = same(attrs, *operands)
    for k, dtype in enumerate(saved, 2):
        if dtype is not statistic(d):
            raise IRTypeError(f"operand {k}: expected {statistic(d)}, got {dtype}")
    return [d]


def _norm_results(attrs: Attrs) -> int:
    return 3 if attrs.get("bias", True) else 2


op(  # x, gain and, if there is one, bias
    "LayerNormalization",
    attributes="axis:axis? epsilon:number?",
    axes=_norm_axes("xww", "x"),
    dtype=same,
    weight=1,
    precision="low",
    eval=lambda xp, *operands, **attrs: _layer_norm(xp, *operands, **attrs)[0],
    decompose=lambda f, o: [f.add_op("LayerNorm", None, o.inputs, o.attributes)[0]],
)
op(  # the same, and the mean and one over the deviation of each row
    "LayerNorm",
    attributes="axis:axis? epsilon:number?",
    axes=_norm_axes("xww", "xmm"),
    dtype=_statistics_dtype(2),
    outputs=3,
    saved=2,
    weight=1,
    precision="low",
    eval=_layer_norm,
    grad=_emit_norm_grad,
    definition=_layer_norm_definition,
)
op(  # the gradients of x, gain and bias
    "LayerNormGrad",
    attributes="axis:axis? bias:flag?",
    axes=_norm_axes("xwmmx", "xww"),
    dtype=_norm_grad_dtype,
    outputs=_norm_results,
    linear=[{4}],
    eval=_layer_norm_grad,
)

# ---------------------------------------------------------------- root-mean-square norm (Zhang and Sennrich 2019)


def _rms_norm(xp: Any, x: Any, gain: Any, axis: int = -1, epsilon: float = 1e-5) -> tuple[Any, Any]:
    dims, rows = _dims(x, axis), wide(xp, x)
    count = math.prod(x.shape[i] for i in dims)
    scale = 1 / xp.sqrt(xp.sum(rows * rows, axis=dims, keepdims=True) / count + epsilon)
    return xp.asarray(rows * scale * wide(xp, gain), dtype=x.dtype), scale


def _rms_norm_definition(f: FunctionMaker, o: Op) -> list[Value]:
    """Over the root of the mean square, times the gain; in the dtype of statistics (equation 4)."""
    small = tensor(o.inputs[0]).dtype
    x, gain = [cast(f, v, statistic(small)) for v in o.inputs]
    axis, rank = o.attributes.get("axis", -1), len(shape_of(x))
    squares = f.emit("ReduceMean", f.emit("Mul", x, x), axes=tuple(range(axis % rank, rank)), keepdims=1)
    epsilon = scalar(f, o.attributes.get("epsilon", 1e-5), x)
    scale = f.emit("Reciprocal", f.emit("Sqrt", f.emit("Add", squares, epsilon)))
    return [cast(f, f.emit("Mul", f.emit("Mul", x, scale), gain), small), scale]


def _rms_norm_grad(xp: Any, x: Any, gain: Any, scale: Any, d: Any, axis: int = -1) -> tuple[Any, Any]:
    dims, lead = _dims(x, axis), tuple(range(axis % x.ndim))
    count = math.prod(x.shape[i] for i in dims)
    y, d = wide(xp, x) * scale, wide(xp, d)
    rows = d * wide(xp, gain)
    along = xp.sum(rows * y, axis=dims, keepdims=True) / count
    results = scale * (rows - y * along), xp.sum(d * y, axis=lead)
    return xp.asarray(results[0], dtype=x.dtype), xp.asarray(results[1], dtype=x.dtype)


def _rms_grad_dtype(attrs: Attrs, x: DType, gain: DType, scale: DType, d: DType) -> list[DType]:
    return _slope_dtype(attrs, (x, gain, d), (scale,)) * 2


def _emit_rms_grad(f: FunctionMaker, o: Op, d: Value, *saved: None) -> list[Value]:
    attributes = {"axis": o.attributes.get("axis", -1)}
    return list(f.add_op("RMSNormGrad", None, [*o.inputs, o.outputs[1], d], attributes))


op(  # x and gain
    "RMSNormalization",
    attributes="axis:axis? epsilon:number?",
    axes=_norm_axes("xw", "x"),
    dtype=same,
    weight=1,
    precision="low",
    eval=lambda xp, *operands, **attrs: _rms_norm(xp, *operands, **attrs)[0],
    decompose=lambda f, o: [f.add_op("RMSNorm", None, o.inputs, o.attributes)[0]],
)
op(  # the same, and one over the root of the mean square of each row
    "RMSNorm",
    attributes="axis:axis? epsilon:number?",
    axes=_norm_axes("xw", "xm"),
    dtype=_statistics_dtype(1),
    outputs=2,
    saved=1,
    weight=1,
    precision="low",
    norm="forward",
    eval=_rms_norm,
    grad=_emit_rms_grad,
    definition=_rms_norm_definition,
)
op(  # the gradients of x and gain
    "RMSNormGrad",
    attributes="axis:axis?",
    axes=_norm_axes("xwmx", "xw"),
    dtype=_rms_grad_dtype,
    outputs=2,
    linear=[{3}],
    norm="backward",
    eval=_rms_norm_grad,
)

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


def _gelu_definition(f: FunctionMaker, o: Op) -> list[Value]:
    """x (1 + erf(x / sqrt(2))) / 2, as torch's exporters write it; or by tanh (Hendrycks and Gimpel 2016)."""
    (x,) = o.inputs
    half, one = [scalar(f, c, x) for c in (0.5, 1.0)]
    if o.attributes.get("approximate") == "tanh":
        cube = f.emit("Mul", f.emit("Pow", x, scalar(f, 3.0, x)), scalar(f, 0.044715, x))
        t = f.emit("Tanh", f.emit("Mul", f.emit("Add", x, cube), scalar(f, _C, x)))
        return [f.emit("Mul", f.emit("Mul", x, half), f.emit("Add", t, one))]
    t = f.emit("Erf", f.emit("Div", x, scalar(f, math.sqrt(2), x)))
    return [f.emit("Mul", f.emit("Mul", x, f.emit("Add", t, one)), half)]


smooth(
    "Gelu",
    _gelu,
    _gelu_slope,
    torch="nn.functional.gelu",
    attributes="approximate:none|tanh?",
    definition=_gelu_definition,
)
