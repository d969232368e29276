"""Import rules of ONNX ops that sample elements along dims at positions known at import: `Resize`, and pads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from distir.importer.node import Node, Result
from distir.importer.registry import rule
from distir.ir.function import Value
from distir.ir.type import Float32
from distir.ops.rules import shape_of, tensor


class _Axis(NamedTuple):
    """One dim that is resized."""

    dim: int
    size: int
    scale: float
    wanted: int
    """The new size, `scale * size` rounded."""
    region: tuple[float, float]
    """Where the region of interest begins and ends, as parts of the dim."""


@rule("Resize")
def _resize(n: Node) -> Result:
    """Each dim alone: an element becomes the weighted sum of a few, at indices that are known."""
    mode, how = n.attr("mode", "nearest"), n.attr("coordinate_transformation_mode", "half_pixel")
    n.require("mode", "nearest", "nearest", "linear", "cubic")
    n.require("coordinate_transformation_mode", "half_pixel", *_POSITIONS)
    n.require("nearest_mode", "round_prefer_floor", *_NEAREST)
    rounding, a = _NEAREST[n.attr("nearest_mode", "round_prefer_floor")], n.attr("cubic_coeff_a", -0.75)
    antialias, inside = n.attr("antialias", 0), n.attr("exclude_outside", 0)
    outside_value = n.attr("extrapolation_value", 0.0)
    x = n.operand(0)
    dtype, outside = tensor(x).dtype, []
    if mode != "nearest" and not dtype.floating:
        raise n.error(f"mode={mode!r} of {dtype} is not supported", "supported: nearest, or floats")
    x = n.emit("Cast", x, to=Float32) if mode != "nearest" and dtype.size < 4 else x
    for axis in _axes(n):
        at = _POSITIONS[how](axis, np.arange(*n.room(axis.wanted), dtype=np.float64))
        if how == "tf_crop_and_resize":
            outside.append((axis.dim, (at < 0) | (at > axis.size - 1)))
        if mode == "nearest":
            x = _taken(n, x, axis.dim, np.clip(rounding(at), 0, axis.size - 1).astype(np.int64))
        elif axis.wanted != axis.size or not np.array_equal(at, np.arange(axis.size)):
            kernel = _linear if mode == "linear" else lambda t: _cubic(t, a)
            radius, shrink = 1 if mode == "linear" else 2, min(axis.scale, 1.0) if antialias else 1.0
            reach = math.ceil(radius / shrink)
            n.room(axis.wanted, 2 * reach + 1)
            index = np.floor(at).astype(np.int64)[:, None] + np.arange(-reach, reach + 1)
            weights = kernel((index - at[:, None]) * shrink)
            weights = np.where((index < 0) | (index >= axis.size), 0, weights) if inside else weights
            weights = weights / weights.sum(1, keepdims=True)
            x = _weighted(n, x, axis.dim, np.clip(index, 0, axis.size - 1), weights)
    x = x if tensor(x).dtype is dtype else n.emit("Cast", x, to=dtype)
    for dim, hit in outside:
        if hit.any():
            mask = n.array("outside", hit.reshape(-1, *[1] * (len(shape_of(x)) - dim - 1)))
            x = n.emit("Where", mask, n.constant(float(outside_value), x), x)
    return x


def _axes(n: Node) -> list[_Axis]:
    """The dims to resize; without the attribute `axes` all, but for those that stay as they are."""
    shape = n.shape()
    axes = [n.wrap(a, len(shape)) for a in n.attr("axes", tuple(range(len(shape))))]
    policy = n.attr("keep_aspect_ratio_policy", "stretch")
    n.require("keep_aspect_ratio_policy", "stretch", "stretch", "not_larger", "not_smaller")
    sizes = n.ints(3, "the sizes")
    sizes = sizes or None
    scales = None if sizes is not None or not n.has(2) else [float(x) for x in n.numbers(2, "the scales")]
    given = sizes if sizes is not None else scales
    if given is None or len(given) != len(axes):
        raise n.error(f"its scales or sizes {given} do not fit axes {tuple(axes)}")
    if 0 in [shape[d] for d in axes] or min(given) <= 0:
        raise n.error(f"shape {shape} cannot be resized by {given}")
    if sizes is not None:
        scales = [size / shape[d] for size, d in zip(sizes, axes, strict=True)]
        if policy != "stretch":
            scales = [(min if policy == "not_larger" else max)(scales)] * len(axes)
            sizes = tuple([math.floor(scales[0] * shape[d] + 0.5) for d in axes])
    assert scales is not None
    region = [float(x) for x in n.numbers(1, "the region")] if n.has(1) else []
    if n.attr("coordinate_transformation_mode") != "tf_crop_and_resize":
        region = [0.0] * len(axes) + [1.0] * len(axes)
    elif len(region) != 2 * len(axes):
        raise n.error(f"its region {region} does not fit axes {tuple(axes)}")
    wanted = sizes if sizes is not None else [math.floor(s * shape[d]) for s, d in zip(scales, axes, strict=True)]
    return [
        _Axis(d, shape[d], scales[i], wanted[i], (region[i], region[len(axes) + i]))
        for i, d in enumerate(axes)
        if (scales[i], wanted[i]) != (1, shape[d]) or n.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
    ]


# ---------------------------------------------------------------- where elements are sampled, and from which


def _half(a: _Axis, i: Any) -> Any:
    return (i + 0.5) / a.scale - 0.5


def _corners(a: _Axis, i: Any) -> Any:
    width = a.scale * a.size
    return i * 0 if width == 1 else i * (a.size - 1) / (width - 1)


def _cropped(a: _Axis, i: Any) -> Any:
    (begin, end), width = a.region, a.scale * a.size
    steps = i * 0 + 0.5 if width == 1 else i / (width - 1)
    return (begin + steps * (end - begin)) * (a.size - 1) if width != 1 else (begin + end) * (a.size - 1) / 2 + i * 0


def _symmetric(a: _Axis, i: Any) -> Any:
    return a.size / 2 * (1 - a.wanted / (a.scale * a.size)) + _half(a, i)


_POSITIONS: dict[str, Callable[[_Axis, Any], Any]] = {
    "half_pixel": _half,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda a, i: i * 0 - 0.5 if a.scale * a.size == 1 else _half(a, i),
    "align_corners": _corners,
    "asymmetric": lambda a, i: i / a.scale,
    "tf_crop_and_resize": _cropped,
}
"""For each `coordinate_transformation_mode` the position in the operand of the new elements `i`."""
_NEAREST: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _linear(t: Any) -> Any:
    return np.clip(1 - np.abs(t), 0, None)


def _cubic(t: Any, a: float) -> Any:
    """Keys' cubic convolution kernel (1981)."""
    t = np.abs(t)
    near, far = ((a + 2) * t - (a + 3)) * t * t + 1, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0))


def _taken(n: Node, x: Value, dim: int, index: np.ndarray) -> Value:
    """The elements at these indices of a dim. Each one several times in a row is an expanded dim: no rows are added up
    in its gradient."""
    shape, size = shape_of(x), shape_of(x)[dim]
    if np.array_equal(index, np.arange(size)):
        return x
    times = len(index) // size
    if np.array_equal(index, np.arange(size).repeat(times)):
        apart, full = (*shape[: dim + 1], 1, *shape[dim + 1 :]), (*shape[: dim + 1], times, *shape[dim + 1 :])
        return n.reshape(n.emit("Expand", n.reshape(x, apart), shape=full), (*shape[:dim], -1, *shape[dim + 1 :]))
    return n.emit("Gather", x, n.array("indices", index), axis=dim)


def _weighted(n: Node, x: Value, dim: int, index: np.ndarray, weights: np.ndarray) -> Value:
    """The sum of elements at these indices of a dim times weights: both have a row for each new element."""
    total: Value | None = None
    for k in range(index.shape[1]):
        if not weights[:, k].any():
            continue
        w = weights[:, k].astype(tensor(x).dtype.numpy).reshape(-1, *[1] * (len(shape_of(x)) - dim - 1))
        part = n.emit("Mul", _taken(n, x, dim, index[:, k]), n.array("weights", w))
        total = part if total is None else n.emit("Add", total, part)
    assert total is not None
    return total


# ---------------------------------------------------------------- pads


@rule("Pad")
def _pad(n: Node) -> Result:
    """Pads dim by dim with a number, or with elements of the dim; a negative pad crops."""
    n.require("mode", "constant", "constant", "edge", "reflect", "wrap")
    mode, x, shape, pads = n.attr("mode", "constant"), n.operand(0), n.shape(), n.ints(1, "pads") or ()
    axes = [n.wrap(a, len(shape)) for a in n.ints(3, "axes") or range(len(shape))]
    if len(pads) != 2 * len(axes):
        raise n.error(f"pads {pads} do not fit axes {axes}")
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        size = shape_of(x)[axis]
        if before < 0 or after < 0:
            start, end = max(-before, 0), max(size - max(-after, 0), max(-before, 0))
            x = n.emit("Slice", x, starts=(start,), ends=(end,), axes=(axis,), steps=(1,))
        before, after = max(before, 0), max(after, 0)
        if not before and not after:
            continue
        if mode == "constant":
            x = _with_number(n, x, axis, before, after)
        elif not shape_of(x)[axis]:
            raise n.error(f"mode={mode!r}: dim {axis} has no elements")
        else:
            n.room(before + after + size)
            index = np.pad(np.arange(shape_of(x)[axis]), (before, after), mode=mode)
            x = n.emit("Gather", x, n.array("indices", index), axis=axis)
    return x


def _with_number(n: Node, x: Value, axis: int, before: int, after: int) -> Value:
    """`x` with so many elements before and after it along a dim: operand 2, or 0."""
    row = [x]
    for at, k in ((0, before), (2, after)):
        if k:
            shape = (*shape_of(x)[:axis], k, *shape_of(x)[axis + 1 :])
            if n.has(2) and n.proto.input[2] not in n.scope.known:
                part = n.emit("Expand", n.reshape(n.operand(2), ()), shape=shape)
            else:
                part = n.full(shape, n.numbers(2, "the number")[0].item() if n.has(2) else 0, x)
            row.insert(at, part)
    return n.emit("Concat", *row, axis=axis)
