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
from distir.ops.rules import expect, expect_shape, known, points, same, scalar, shape_of, sum_to, tensor

# ---------------------------------------------------------------- the squared error, point by point, over N


def _loss_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    slope = f.emit("Mul", f.add_op("LossGrad", None, o.inputs, o.attributes), d)
    return [sum_to(f, slope, o.inputs[0]), f.emit("Neg", sum_to(f, slope, o.inputs[1]))]


op("Loss", axes=points(2), dtype=same, eval=lambda xp, a, z, N=1: (a - z) ** 2 / N, grad=_loss_grad)
op("LossGrad", axes=points(2), dtype=same, linear=[{0, 1}], eval=lambda xp, a, z, N=1: 2 * (a - z) / N)

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


op("MSELoss", infer=_mse_infer, dtype=same, eval=_mse, decompose=_mse_decompose)

# ---------------------------------------------------------------- cross-entropy: logits (.., v), labels (..)


def _labelled(attrs: Attrs, logits: Shape, labels: Shape) -> list[Shape]:
    expect_shape(1, labels, logits[:-1])
    return _reduced(attrs, labels)


def _label_dtype(attrs: Attrs, logits: DType, labels: DType) -> list[DType]:
    expect(0, logits, "float")
    expect(1, labels, "int")
    return [logits]


def _cross_entropy(xp: Any, x: Any, label: Any, ignore_index: int | None = None, reduction: str = "mean") -> Any:
    top = xp.max(x, axis=-1)
    total, picked = _logit_sums(xp, x, label, top, 0)
    rows = xp.log(total) + top - picked
    valid = (label == label) if ignore_index is None else (label != ignore_index)
    rows = xp.where(valid, rows, 0)
    if reduction == "none":
        return rows
    return xp.sum(rows) if reduction == "sum" else xp.sum(rows) / xp.sum(valid, dtype=x.dtype)


def _cross_entropy_decompose(f: FunctionMaker, o: Op) -> list[Value]:
    """In pieces of which each may have the vocabulary split. The count depends on the labels alone."""
    logits, labels = o.inputs
    ignored = o.attributes.get("ignore_index")
    top = f.emit("Detach", f.emit("ReduceMax", logits, axes=(len(shape_of(logits)) - 1,), keepdims=0))
    total, picked = f.emit("LogitSums", logits, labels, top)
    rows = f.emit("Add", f.emit("Sub", f.emit("Log", total), picked), top)
    valid = None
    if ignored is not None:
        valid = f.emit("Not", f.emit("Equal", labels, scalar(f, ignored, labels)))
        rows = f.emit("Mask", valid, rows)
    if _reduction(o.attributes) == "none":
        return [rows]
    loss = _total(f, rows)
    if _reduction(o.attributes) == "sum":
        return [loss]
    if valid is None:
        count = scalar(f, float(math.prod(shape_of(labels))), logits)
    else:  # counted in integers: small floats would round it
        count = f.emit("Cast", _total(f, f.emit("Cast", valid, to=Int64)), to=tensor(logits).dtype)
    return [f.emit("Div", loss, count)]


op(  # ignored labels count neither in the sum nor in the mean; class dim last
    "SoftmaxCrossEntropyLoss",
    infer=_labelled,
    dtype=_label_dtype,
    eval=_cross_entropy,
    decompose=_cross_entropy_decompose,
)


def _rows(sides: str) -> Any:
    """The axes `sides`, where operands of the shape of the labels do not broadcast."""

    def axes(attrs: Attrs, shapes: Sequence[Shape]) -> str:
        for k, s in enumerate(shapes[1:]):
            expect_shape(k + 1, s, shapes[0][:-1])
        return sides

    return axes


def _sums_dtype(attrs: Attrs, logits: DType, labels: DType, *rest: DType) -> list[DType]:
    _label_dtype(attrs, logits, labels)
    return same(attrs, logits, *rest)


def _logit_sums(xp: Any, x: Any, label: Any, top: Any, start: int) -> tuple[Any, Any]:
    row = label - start
    here = (row >= 0) & (row < x.shape[-1])
    picked = xp.take_along_axis(x, xp.expand_dims(xp.where(here, row, 0), -1), axis=-1)
    total = xp.sum(xp.exp(x - xp.expand_dims(top, -1)), axis=-1)
    return total, xp.where(here, picked[..., 0], 0)


def _logit_sums_slope(xp: Any, x: Any, label: Any, top: Any, dtotal: Any, dpicked: Any, start: int) -> Any:
    row = label - start
    here = (row >= 0) & (row < x.shape[-1])
    d = xp.exp(x - xp.expand_dims(top, -1)) * xp.expand_dims(dtotal, -1)
    return xp.add_last(d, xp.where(here, row, 0), xp.where(here, dpicked, 0))


def _logit_sums_grad(f: FunctionMaker, o: Op, *d: Value | None) -> list[Value | None]:
    return [f.emit("LogitSumsGrad", *o.inputs, *known(f, o, d)), None, None]


op(  # logits, labels, rows' maxima -> sums of exp(logits - maximum), logits of the labels (0 where not here)
    "LogitSums",
    axes=_rows("... v, ..., ... -> ..., ... | v:sum"),
    dtype=lambda attrs, *dtypes: _sums_dtype(attrs, *dtypes) * 2,
    outputs=2,
    index=(0, -1),
    neutral=float("-inf"),
    eval=_logit_sums,
    grad=_logit_sums_grad,
)
op(
    "LogitSumsGrad",
    axes=_rows("... v, ..., ..., ..., ... -> ... v"),
    dtype=_sums_dtype,
    linear=[{3, 4}],
    index=(0, -1),
    donates=(0,),
    eval=_logit_sums_slope,
)
