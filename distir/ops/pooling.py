"""Maxima and means over windows that slide over the spatial dims, and their gradients.

Spatial dims are split where windows lie side by side: a window is then on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, FactorMapping, op
from distir.ir.type import DType, Shard
from distir.ops.rules import expect, expect_shape, passed, rounded_once, same, shape_of
from distir.ops.windows import WINDOWS, counts, extents, padded, sizes_with, spatial, taps, unpadded

_POOL = f"kernel:sizes {WINDOWS}"
_MEAN = f"{_POOL} counted:sizes"


def _dtype(attrs: Attrs, *dtypes: DType) -> list[DType]:
    expect(0, dtypes[0], "float")
    return same(attrs, *dtypes)


def _counts(attrs: Attrs, sizes: Shape, what: str = "operand 0") -> Shape:
    """How many windows there are. Raises IRTypeError for windows in which there may be pads alone."""
    kernel, pads, rank = attrs["kernel"], attrs["pads"], len(sizes)
    if len(kernel) != rank or 0 in kernel:
        raise IRTypeError(f"attribute kernel: expected {rank} integers from 1, got {kernel}")
    found = counts(attrs, sizes, kernel, what)
    for i, wide in enumerate(extents(attrs, kernel)):
        begin_of_last = (found[i] - 1) * attrs["strides"][i]
        if pads[i] >= wide or begin_of_last >= sizes[i] + pads[i]:
            raise IRTypeError(f"attribute pads: expected none with a window of {wide} in them, got {pads}")
    counted = attrs.get("counted", pads)
    if len(counted) != 2 * rank or any(a > b for a, b in zip(counted, pads, strict=True)):
        raise IRTypeError(f"attribute counted: expected {2 * rank} integers, none above those of pads, got {counted}")
    return found


def _pool_infer(attrs: Attrs, x: Shape) -> list[Shape]:
    return [(*x[:2], *_counts(attrs, spatial(0, x)))]


def _shard(
    attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape], slot: int, split: Shard, n: int
) -> FactorMapping | None:
    if split.dim < 2:
        return passed(len(ins), split, ())
    i, size = split.dim - 2, max(ins[0][split.dim], outs[0][split.dim])
    wide = attrs["kernel"][i]
    apart = attrs["strides"][i] == wide and attrs["dilations"][i] == 1 and not any(attrs["pads"][i :: len(outs[0]) - 2])
    return passed(len(ins), split, ()) if apart and size % (split.outer * n * wide) == 0 else None


def _work(attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape]) -> tuple[float, float]:
    """One operation for each element of each window."""
    windows = min(math.prod(s) for s in (*ins, *outs))
    return float(windows) * math.prod(attrs["kernel"]), 0.0


def _taps(x: Any, kernel: Shape, strides: Shape, dilations: Shape) -> Iterator[Any]:
    """For each position in the kernel, in order, a view of what all windows of the padded `x` have there."""
    return (x[cut] for cut in taps(tuple(x.shape[2:]), kernel, strides, dilations))


# ---------------------------------------------------------------- maxima: pads are -inf


def _max_pool(xp: Any, x: Any, kernel: Shape, strides: Shape, dilations: Shape, pads: Shape) -> Any:
    y: Any = None
    for at in _taps(padded(xp, x, pads, -math.inf), kernel, strides, dilations):
        y = at if y is None else xp.maximum(y, at)
    return xp.asarray(y + 0, dtype=x.dtype)  # no view of the operand


def _max_pool_grad_infer(attrs: Attrs, x: Shape, d: Shape) -> list[Shape]:
    expect_shape(1, d, _pool_infer(attrs, x)[0])
    return [x]


def _max_pool_grad(xp: Any, x: Any, d: Any, kernel: Shape, strides: Shape, dilations: Shape, pads: Shape) -> Any:
    """The first of equal elements of a window takes all of its gradient, as in torch."""
    x = padded(xp, x, pads, -math.inf)
    slope, free = xp.zeros_like(x), d == d
    largest = _max_pool(xp, x, kernel, strides, dilations, (0,) * len(pads))
    for at, into in zip(*[_taps(a, kernel, strides, dilations) for a in (x, slope)], strict=True):
        hit = free & (at == largest)
        into += xp.where(hit, d, 0)
        free = free & ~hit
    return unpadded(slope, pads)


op(
    "MaxPool",
    attributes=_POOL,
    infer=_pool_infer,
    dtype=_dtype,
    shard=_shard,
    work=_work,
    exact=True,
    eval=_max_pool,
    grad=lambda f, o, d: [f.add_op("MaxPoolGrad", None, [*o.inputs, d], o.attributes)],
)
op(  # x, d
    "MaxPoolGrad",
    attributes=_POOL,
    infer=_max_pool_grad_infer,
    dtype=_dtype,
    shard=_shard,
    linear=[{1}],
    work=_work,
    eval=_max_pool_grad,
)

# ---------------------------------------------------------------- means: of all but those pads that are not `counted`


def _divisors(xp: Any, like: Any, sizes: Shape, pads: Shape, counted: Shape, *window: Shape) -> Any:
    """How many elements of each window count, (1, 1, *counts)."""
    ones = xp.zeros((1, 1, *sizes_with(counted, sizes)), dtype=like.dtype) + 1
    left = tuple([a - b for a, b in zip(pads, counted, strict=True)])
    return xp.maximum(sum(_taps(padded(xp, ones, left), *window)), 1)


@rounded_once
def _mean_pool(xp: Any, x: Any, kernel: Shape, strides: Shape, dilations: Shape, pads: Shape, counted: Shape) -> Any:
    window = kernel, strides, dilations
    total = sum(_taps(padded(xp, x, pads), *window))
    return total / _divisors(xp, x, x.shape[2:], pads, counted, *window)


def _mean_pool_grad_infer(attrs: Attrs, d: Shape) -> list[Shape]:
    if len(attrs["sizes"]) != len(spatial(0, d)):
        raise IRTypeError(f"attribute sizes: expected {len(d) - 2} integers, got {attrs['sizes']}")
    expect_shape(0, d, (*d[:2], *_counts(attrs, attrs["sizes"], "attribute sizes")))
    return [(*d[:2], *attrs["sizes"])]


@rounded_once
def _mean_pool_grad(
    xp: Any, d: Any, kernel: Shape, strides: Shape, dilations: Shape, pads: Shape, counted: Shape, sizes: Shape
) -> Any:
    window = kernel, strides, dilations
    slope = xp.zeros((*d.shape[:2], *sizes_with(pads, sizes)), dtype=d.dtype)
    share = d / _divisors(xp, d, sizes, pads, counted, *window)
    for into in _taps(slope, *window):
        into += share
    return unpadded(slope, pads)


def _emit_mean_pool_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    return [f.emit("AveragePoolGrad", d, **o.attributes, sizes=shape_of(o.inputs[0])[2:])]


op(
    "AveragePool",
    attributes=_MEAN,
    infer=_pool_infer,
    dtype=_dtype,
    shard=_shard,
    linear=[{0}],
    work=_work,
    eval=_mean_pool,
    grad=_emit_mean_pool_grad,
)
op(  # of an operand with these spatial `sizes`
    "AveragePoolGrad",
    attributes=f"{_MEAN} sizes:sizes",
    infer=_mean_pool_grad_infer,
    dtype=_dtype,
    shard=_shard,
    linear=[{0}],
    local=lambda attrs, ins, outs: {"sizes": outs[0].shape[2:]},
    work=_work,
    eval=_mean_pool_grad,
    grad=lambda f, o, d: [f.add_op("AveragePool", None, [d], o.attributes.without("sizes"))],
)
