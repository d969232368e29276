"""Reductions over dims: attributes `axes` (a tuple of dims) and `keepdims`; running statistics."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import DType, Float32, Float64
from distir.ops.rules import expect_shape, letters, points, same, scalar, shape_of


def _axes(kind: str) -> Callable[[Attrs, Sequence[Shape]], str]:
    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        names = letters(len(shapes[0]))
        gone = {names[i] for i in attrs["axes"]}
        result = ["1" if n in gone else n for n in names if n not in gone or attrs.get("keepdims")]
        return f"{' '.join(names)} -> {' '.join(result)} | {' '.join(f'{n}:{kind}' for n in sorted(gone))}"

    return axes


def _row(shape: Shape) -> str:
    return " ".join(letters(len(shape)))


def _over(name: str) -> Callable[..., Any]:
    """The namespace's reduction of that name."""
    return lambda xp, x, axes, keepdims=0: getattr(xp, name)(x, axis=axes, keepdims=bool(keepdims))


def _back(f: FunctionMaker, o: Op, d: Value) -> Value:
    """`d` with the reduced dims as dims of size 1."""
    if o.attributes.get("keepdims"):
        return d
    shape, gone = shape_of(o.inputs[0]), o.attributes["axes"]
    return f.emit("Reshape", d, shape=tuple(1 if i in gone else n for i, n in enumerate(shape)))


def _sum_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    shape, gone = shape_of(o.inputs[0]), o.attributes["axes"]
    if sorted(gone) != list(range(len(gone))):  # leading dims come back by expanding
        d = _back(f, o, d)
    return [d if shape_of(d) == shape else f.emit("Expand", d, shape=shape)]


op(
    "ReduceSum",
    attributes="axes:dims keepdims:flag?",
    axes=_axes("sum"),
    precision="wide",
    linear=[{0}],
    eval=_over("sum"),
    grad=_sum_grad,
)


def _addends(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    if not shapes:
        raise IRTypeError("expected at least one operand, got none")
    for k, shape in enumerate(shapes):
        expect_shape(k, shape, shapes[0])
    return f"{', '.join([_row(shapes[0])] * len(shapes))} -> {_row(shapes[0])}"


def _sum_of_squares(xp: Any, x: Any) -> Any:
    """Values of less than 32 bits are squared in float32: float16 would overflow."""
    x = xp.cast(x, Float32) if x.dtype.itemsize < Float32.size else x
    return xp.cast(xp.sum(x * x, axis=tuple(range(x.ndim))), Float64)


op(  # of all elements, as float64
    "SumOfSquares",
    axes=lambda attrs, shapes: f"{_row(shapes[0])} -> | {' '.join([f'{n}:sum' for n in letters(len(shapes[0]))])}",
    dtype=lambda attrs, dtype: [Float64],
    eval=_sum_of_squares,
)
op(  # of all operands, which are of one shape
    "Sum",
    axes=_addends,
    dtype=same,
    linear="all",
    addends=True,
    eval=lambda xp, *xs: functools.reduce(operator.add, xs),
    grad=lambda f, o, d: [d] * len(o.inputs),
)


def _extreme_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    x, y = o.inputs[0], o.outputs[0]
    return [f.emit("ReduceMaxGrad", x, _back(f, o, y), _back(f, o, d), axes=o.attributes["axes"])]


def _extreme_axes(operands: int) -> Callable[[Attrs, Sequence[Shape]], str]:
    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        names = letters(len(shapes[0]))
        row = " ".join(names)
        return f"{', '.join([row] * operands)} -> {row} | {' '.join(f'{names[i]}:whole' for i in attrs['axes'])}"

    return axes


def _others(xp: Any, x: Any, d: Any, axes: tuple[int, ...]) -> Any:
    """`d` times the product of all elements but each: of those before it and of those after it, so that none is divided
    by."""
    perm = (*[i for i in range(x.ndim) if i not in axes], *axes)
    there = xp.permute_dims(x, perm)
    flat = xp.reshape(there, (*there.shape[: x.ndim - len(axes)], -1))
    one = xp.zeros_like(flat[..., :1]) + 1
    before = xp.cumprod(xp.concat([one, flat[..., :-1]], axis=-1), axis=-1)
    after = xp.cumprod(xp.concat([one, xp.flip(flat, axis=(-1,))[..., :-1]], axis=-1), axis=-1)
    others = xp.reshape(before * xp.flip(after, axis=(-1,)), there.shape)
    return d * xp.permute_dims(others, tuple(sorted(range(x.ndim), key=perm.__getitem__)))


def _extreme_slope(xp: Any, x: Any, y: Any, d: Any, axes: tuple[int, ...]) -> Any:
    hit = x == y
    return xp.where(hit, d / xp.sum(hit, axis=axes, keepdims=True, dtype=x.dtype), 0)


def _extreme(name: str, kind: str, how: str) -> None:
    op(
        name,
        attributes="axes:dims keepdims:flag?",
        axes=_axes(kind),
        exact=True,
        eval=_over(how),
        grad=_extreme_grad,
    )


_extreme("ReduceMax", "max", "max")
_extreme("ReduceMin", "whole", "min")
op(  # of ReduceMax and ReduceMin: equal elements share it
    "ReduceMaxGrad",
    attributes="axes:dims",
    axes=_extreme_axes(3),
    dtype=same,
    linear=[{2}],
    eval=_extreme_slope,
)


def _prod_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    return [f.emit("ReduceProdGrad", o.inputs[0], _back(f, o, d), axes=o.attributes["axes"])]


op(
    "ReduceProd",
    attributes="axes:dims keepdims:flag?",
    axes=_axes("whole"),
    precision="wide",
    eval=_over("prod"),
    grad=_prod_grad,
)
op("ReduceProdGrad", attributes="axes:dims", axes=_extreme_axes(2), dtype=same, linear=[{1}], eval=_others)


def _mean_decompose(f: FunctionMaker, o: Op) -> list[Value]:
    (x,) = o.inputs
    count = math.prod(shape_of(x)[i] for i in o.attributes["axes"])
    return [f.emit("Div", f.add_op("ReduceSum", None, [x], o.attributes), scalar(f, float(count), x))]


op(
    "ReduceMean",
    attributes="axes:dims keepdims:flag?",
    axes=_axes("mean"),
    precision="wide",
    eval=lambda xp, x, axes, keepdims=0: (
        xp.sum(x, axis=axes, keepdims=bool(keepdims)) / math.prod(x.shape[i] for i in axes)
    ),
    decompose=_mean_decompose,
)


# ---------------------------------------------------------------- sums of all elements up to each, along a dim


def _cumulative_axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
    names = letters(len(shapes[0]))
    return f"{' '.join(names)} -> {' '.join(names)} | {names[attrs['axis']]}:whole"


def _cumulative_dtype(attrs: Attrs, x: DType) -> list[DType]:
    if x.kind == "bool":
        raise IRTypeError("operand 0: expected numbers, got bool")
    return [x]


def _cum_sum(xp: Any, x: Any, axis: int, exclusive: bool = False, reverse: bool = False) -> Any:
    x = xp.flip(x, axis=axis) if reverse else x
    y = xp.cumsum(x, axis=axis)
    if exclusive:
        first, before = ((*[slice(None)] * axis, part) for part in (slice(0, 1), slice(0, -1)))
        y = xp.concat([xp.zeros_like(y[first]), y[before]], axis=axis)
    return xp.flip(y, axis=axis) if reverse else y


def _cum_sum_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    return [f.add_op("CumSum", None, [d], {**o.attributes, "reverse": not o.attributes.get("reverse", False)})]


op(  # along a dim, from its end if `reverse`; `exclusive`: without the element itself
    "CumSum",
    attributes="axis:dim exclusive:flag? reverse:flag?",
    axes=_cumulative_axes,
    dtype=_cumulative_dtype,
    linear=[{0}],
    precision="wide",
    eval=_cum_sum,
    grad=_cum_sum_grad,
)

op(  # running, of the batch -> the first; a training step takes the batch's in its place
    "RunningStatistic",
    attributes="momentum:number correction:number",
    axes=points(2),
    dtype=same,
    linear=[{0}],
    precision="wide",
    eval=lambda xp, running, batch, momentum, correction: xp.broadcast_to(running, batch.shape),
    grad=lambda f, o, d: [d, None],
    alias=True,
)
op(  # running, of the batch -> the second; next is running * momentum + it * (1 - momentum) * correction
    "BatchStatistic",
    attributes="momentum:number correction:number",
    axes=points(2),
    dtype=same,
    linear=[{1}],
    precision="wide",
    training_only=True,
    eval=lambda xp, running, batch, momentum, correction: batch,
    grad=lambda f, o, d: [None, d],
)
