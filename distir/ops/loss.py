"""Losses. A mean is a sum over a count, and the count is part of the program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, op
from distir.ir.type import DType, Int64
from distir.ops.rules import cast, expect, expect_shape, points, same, scalar, shape_of, statistic, sum_to, tensor, wide

# ---------------------------------------------------------------- the squared error, point by point, over N


def _loss_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    slope = f.emit("Mul", f.add_op("LossGrad", None, o.inputs, o.attributes), d)
    return [sum_to(f, slope, o.inputs[0]), f.emit("Neg", sum_to(f, slope, o.inputs[1]))]


op(
    "Loss",
    attributes="N:number?",
    axes=points(2),
    dtype=same,
    precision="wide",
    eval=lambda xp, a, z, N=1: (a - z) ** 2 / N,
    grad=_loss_grad,
)
op(
    "LossGrad",
    attributes="N:number?",
    axes=points(2),
    dtype=same,
    linear=[{0, 1}],
    eval=lambda xp, a, z, N=1: 2 * (a - z) / N,
)

# ---------------------------------------------------------------- a reduction: "mean", "sum" or "none"


def _reduction(attrs: Attrs) -> str:
    reduction = attrs.get("reduction", "mean")
    if reduction not in ("mean", "sum", "none"):
        raise IRTypeError(f"attribute reduction: expected mean, sum or none, got {reduction!r}")
    return reduction


def _reduced(attrs: Attrs, shape: Shape) -> list[Shape]:
    return [shape if _reduction(attrs) == "none" else ()]


def _total(f: FunctionMaker, v: Value) -> Value:
    rank = len(shape_of(v))
    return f.emit("ReduceSum", v, axes=tuple(range(rank)), keepdims=0) if rank else v


def _mse_infer(attrs: Attrs, a: Shape, z: Shape) -> list[Shape]:
    expect_shape(1, z, a)
    return _reduced(attrs, a)


def _mse(xp: Any, a: Any, z: Any, reduction: str = "mean") -> Any:
    squares = (a - z) ** 2
    if reduction == "none":
        return squares
    total = xp.sum(squares)
    return total / math.prod(a.shape) if reduction == "mean" else total


def _mse_decompose(f: FunctionMaker, o: Op) -> list[Value]:
    a, z = o.inputs
    error = f.emit("Sub", a, z)
    squares = f.emit("Mul", error, error)
    if _reduction(o.attributes) == "none":
        return [squares]
    total = _total(f, squares)
    if _reduction(o.attributes) == "sum":
        return [total]
    return [f.emit("Div", total, scalar(f, float(math.prod(shape_of(a))), a))]


op(
    "MSELoss",
    attributes="reduction:text?",
    infer=_mse_infer,
    dtype=same,
    precision="wide",
    eval=_mse,
    decompose=_mse_decompose,
)

# ---------------------------------------------------------------- cross-entropy: logits (.., v), labels (..)


def _labelled(attrs: Attrs, logits: Shape, labels: Shape) -> list[Shape]:
    expect_shape(1, labels, logits[:-1])
    return _reduced(attrs, labels)


def _label_dtype(attrs: Attrs, logits: DType, labels: DType) -> list[DType]:
    expect(0, logits, "float")
    expect(1, labels, "int")
    return [logits]


def _loss_dtype(attrs: Attrs, logits: DType, labels: DType) -> list[DType]:
    _label_dtype(attrs, logits, labels)
    result = attrs.get("result", logits)
    if result not in (logits, statistic(logits)):
        raise IRTypeError(f"attribute result: expected {logits} or {statistic(logits)}, got {result}")
    return [result]


def _cross_entropy(
    xp: Any,
    x: Any,
    label: Any,
    ignore_index: int | None = None,
    reduction: str = "mean",
    result: DType | None = None,
) -> Any:
    rows, _ = _rows(xp, x, label, ignore_index, result=result)
    if reduction == "none":
        return rows
    valid = (label == label) if ignore_index is None else (label != ignore_index)
    return xp.sum(rows) if reduction == "sum" else xp.sum(rows) / xp.sum(valid, dtype=rows.dtype)


def _cross_entropy_decompose(f: FunctionMaker, o: Op) -> list[Value]:
    """The rows' losses, and their sum over the count, which depends on the labels alone."""
    logits, labels = o.inputs
    ignored = o.attributes.get("ignore_index")
    given = {k: x for k in ("ignore_index", "result") if (x := o.attributes.get(k)) is not None}
    rows, _ = f.emit("CrossEntropy", logits, labels, **given)
    if _reduction(o.attributes) == "none":
        return [rows]
    loss = _total(f, rows)
    if _reduction(o.attributes) == "sum":
        return [loss]
    if ignored is None:
        count = scalar(f, float(math.prod(shape_of(labels))), rows)
    else:  # counted in integers: small floats would round it
        valid = f.emit("Cast", f.emit("Not", f.emit("Equal", labels, scalar(f, ignored, labels))), to=Int64)
        count = f.emit("Cast", _total(f, valid), to=tensor(rows).dtype)
    return [f.emit("Div", loss, count)]


op(  # ignored labels count neither in the sum nor in the mean; class dim last
    "SoftmaxCrossEntropyLoss",
    attributes="ignore_index:int/none? reduction:text? result:dtype?",
    infer=_labelled,
    dtype=_loss_dtype,
    eval=_cross_entropy,
    decompose=_cross_entropy_decompose,
)


# ---------------------------------------------------------------- its rows, the classes whole or in parts


def _rows_dtype(attrs: Attrs, logits: DType, labels: DType) -> list[DType]:
    return [*_loss_dtype(attrs, logits, labels), statistic(logits)]


def _rows(
    xp: Any,
    x: Any,
    label: Any,
    ignore_index: int | None = None,
    result: DType | None = None,
    count: int | None = None,
    start: int = 0,
) -> tuple[Any, Any]:
    x = x[..., :count]
    top = xp.max(x, axis=-1)
    total, picked = _logit_sums(xp, x, label, top, start)
    lse = xp.log(total) + wide(xp, top)
    rows = lse - picked if ignore_index is None else xp.where(label != ignore_index, lse - picked, 0)
    return (xp.asarray(rows, dtype=x.dtype) if result is None else xp.cast(rows, result)), lse


def _rows_decompose(f: FunctionMaker, o: Op) -> list[Value]:
    """By ops that allow the classes to be split."""
    logits, labels = o.inputs
    ignored = o.attributes.get("ignore_index")
    if (count := o.attributes.get("count")) is not None:
        last = len(shape_of(logits)) - 1
        logits = f.emit("FillTail", logits, dim=last, size=count, value=float("-inf"))
    top = f.emit("ReduceMax", logits, axes=(len(shape_of(logits)) - 1,), keepdims=0)
    total, picked = f.emit("LogitSums", logits, labels, top)
    lse = f.emit("Add", f.emit("Log", total), cast(f, top, tensor(total).dtype))
    rows = f.emit("Sub", lse, picked)
    if ignored is not None:
        rows = f.emit("Mask", f.emit("Equal", labels, scalar(f, ignored, labels)), rows, keep=False)
    return [cast(f, rows, tensor(o.outputs[0]).dtype), lse]


def _rows_grad(f: FunctionMaker, o: Op, d: Value, *saved: None) -> list[Value | None]:
    attributes = {k: x for k, x in o.attributes.items() if k != "result"}
    return [f.add_op("CrossEntropyGrad", None, [*o.inputs, o.outputs[1], d], attributes), None]


def _slope_dtype(attrs: Attrs, logits: DType, labels: DType, lse: DType, d: DType) -> list[DType]:
    if lse is not statistic(logits):
        raise IRTypeError(f"operand 2: expected {statistic(logits)}, got {lse}")
    if d is not statistic(logits):
        same(attrs, logits, logits, logits, d)
    return _label_dtype(attrs, logits, labels)


def _slope(
    xp: Any,
    x: Any,
    label: Any,
    lse: Any,
    d: Any,
    start: int,
    classes: int,
    ignore_index: int | None = None,
    count: int | None = None,
) -> Any:
    if count is not None and count < start + x.shape[-1]:  # the rest is padding
        tail = xp.zeros_like(x[..., max(0, count - start) :])
        if count <= start:
            return tail
        slope = _slope(xp, x[..., : count - start], label, lse, d, start, classes, ignore_index)
        return xp.concat((slope, tail), axis=-1)
    row = label - start
    here = (row >= 0) & (row < x.shape[-1])
    d = wide(xp, d) if ignore_index is None else xp.where(label != ignore_index, wide(xp, d), 0)
    slope = xp.exp(wide(xp, x) - xp.expand_dims(lse, -1)) * xp.expand_dims(d, -1)
    return xp.asarray(xp.add_last(slope, xp.where(here, row, 0), xp.where(here, -d, 0)), dtype=x.dtype)


def _of_labels(sides: str) -> Any:
    """The axes `sides`, where operands of the shape of the labels do not broadcast."""

    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        for k, s in enumerate(shapes[1:]):
            expect_shape(k + 1, s, shapes[0][:-1])
        return sides

    return axes


def _sums_dtype(attrs: Attrs, logits: DType, labels: DType, top: DType) -> list[DType]:
    same(attrs, *_label_dtype(attrs, logits, labels), top)
    return [statistic(logits)] * 2


def _logit_sums(xp: Any, x: Any, label: Any, top: Any, start: int) -> tuple[Any, Any]:
    row = label - start
    here = (row >= 0) & (row < x.shape[-1])
    picked = xp.take_along_axis(x, xp.expand_dims(xp.where(here, row, 0), -1), axis=-1)
    total = xp.sum(xp.exp(wide(xp, x) - wide(xp, xp.expand_dims(top, -1))), axis=-1)
    return total, wide(xp, xp.where(here, picked[..., 0], 0))


op(  # logits, labels -> the rows' losses, 0 for ignored labels, and the log-sum-exp of their logits, saved
    "CrossEntropy",
    attributes="ignore_index:int/none? result:dtype? count:size?",
    axes=_of_labels("... v, ... -> ..., ... | v:whole"),
    dtype=_rows_dtype,
    outputs=2,
    saved=1,
    index=(0, -1),
    unpadded="count",
    ignored="ignore_index",
    logits="forward",
    eval=_rows,
    grad=_rows_grad,
    decompose=_rows_decompose,
)
op(  # the gradient of the logits, from these, the labels, what is saved, and the rows' gradients
    "CrossEntropyGrad",
    attributes="ignore_index:int/none? count:size?",
    axes=_of_labels("... v, ..., ..., ... -> ... v"),
    dtype=_slope_dtype,
    linear=[{3}],
    index=(0, -1),
    unpadded="count",
    ignored="ignore_index",
    local=lambda attrs, ins, outs: {"classes": ins[0].global_shape[-1]},
    logits="backward",
    eval=_slope,
)
op(  # logits, labels, rows' maxima -> sums of exp(logits - maximum), logits of the labels (0 where not here)
    "LogitSums",
    axes=_of_labels("... v, ..., ... -> ..., ... | v:sum"),
    dtype=_sums_dtype,
    outputs=2,
    index=(0, -1),
    neutral=float("-inf"),
    logits="forward",
    eval=_logit_sums,
)
