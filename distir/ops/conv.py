"""Convolutions of 1 to 3 spatial dims and their gradients, which are convolutions, too.

Three arrays, x (n, g c, *sizes), w (g m, c, *kernel) and y (n, g m, *counts) of g groups, are related; each op computes
one of them from the other two, and so does its gradient. All split alike: along n, along the groups, along c (y is a
partial sum), along m (x is one), and along spatial dims (w is one): then a device needs a halo of x, or of y to compute
x, so that nothing is added up in the halo (`windows.halos`). A bias is another op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker, Op, Value
from distir.ir.spec import Attrs, FactorMapping, ShardRule, op
from distir.ir.type import REPLICATE, SUM, Placement, Shard, Tensor
from distir.ops.rules import expect_shape, rounded_once, same, shape_of
from distir.ops.windows import WINDOWS, counts, flat, halos, padded, sizes_with, spatial, taps, unpadded

# ---------------------------------------------------------------- types


def _result(attrs: Attrs, x: Shape, w: Shape, what: str = "operand 0") -> Shape:
    """The shape of y."""
    return (x[0], w[0], *counts(attrs, x[2:], w[2:], what))


def _weight(attrs: Attrs, k: int, w: Shape) -> Shape:
    """The shape of w, which is operand k. Raises IRTypeError unless the groups share its filters."""
    if len(w) < 3 or 0 in w or w[0] % attrs["groups"]:
        raise IRTypeError(f"operand {k}: expected filters for {attrs['groups']} groups, got shape {w}")
    return w


def _conv_infer(attrs: Attrs, x: Shape, w: Shape) -> list[Shape]:
    sizes, w = spatial(0, x), _weight(attrs, 1, w)
    if x[1] != attrs["groups"] * w[1]:
        raise IRTypeError(f"operand 1: expected filters of {x[1]} / {attrs['groups']} channels, got shape {w}")
    if len(sizes) != len(w) - 2:
        raise IRTypeError(f"operand 1: expected filters of {len(sizes)} spatial dims, got shape {w}")
    return [_result(attrs, x, w)]


def _grad_input_infer(attrs: Attrs, d: Shape, w: Shape) -> list[Shape]:
    w, rank = _weight(attrs, 1, w), len(spatial(0, d))
    if len(attrs["sizes"]) != rank or len(w) != rank + 2:
        raise IRTypeError(f"operand 1: expected filters of {rank} spatial dims, and sizes of so many, got shape {w}")
    x = (d[0], attrs["groups"] * w[1], *attrs["sizes"])
    expect_shape(0, d, _result(attrs, x, w, "attribute sizes"))
    return [x]


def _grad_weight_infer(attrs: Attrs, x: Shape, d: Shape) -> list[Shape]:
    rank, groups = len(spatial(0, x)), attrs["groups"]
    if len(attrs["kernel"]) != rank or 0 in attrs["kernel"]:
        raise IRTypeError(f"attribute kernel: expected {rank} integers from 1, got {attrs['kernel']}")
    if x[1] % groups:
        raise IRTypeError(f"operand 0: expected channels for {groups} groups, got shape {x}")
    w = _weight(attrs, 1, (*d[1:2], x[1] // groups, *attrs["kernel"]))
    expect_shape(1, d, _result(attrs, x, w))
    return [w]


# ---------------------------------------------------------------- placements


def _split(array: str, split: Shard, groups: int, n: int) -> dict[str, Placement] | None:
    """How x, w and y are split if one of them is split so over n devices; None for a split that is not allowed.

    A dim of channels is (g, c) or (g, m): its split is of whole groups, or inside each one.
    """
    dim, outer = split.dim, split.outer
    if dim == 0 and array != "w":
        return {"x": split, "w": REPLICATE, "y": split}
    if dim == 1 and array == "w":
        return {"x": Shard(1, groups * outer), "w": split, "y": REPLICATE}
    if dim != (0 if array == "w" else 1):
        return None  # spatial
    if outer % groups == 0:
        if array == "x":
            return {"x": split, "w": Shard(1, outer // groups), "y": REPLICATE}
        return {"x": REPLICATE, "w": Shard(0, outer), "y": Shard(1, outer)}
    if groups % (outer * n) == 0:
        return {"x": Shard(1, outer), "w": Shard(0, outer), "y": Shard(1, outer)}
    return None


def _split_space(
    arrays: str, attrs: Attrs, shapes: Mapping[str, Shape], split: Shard, n: int
) -> dict[str, Placement] | None:
    """The same for a spatial dim. The operands have halos: a device computes all of its part of the result."""
    i = split.dim - 2
    around = halos(attrs, shapes["w"][2:], i)
    if around is None or split.outer > 1 or shapes["x"][split.dim] % (n * attrs["strides"][i]):
        return None
    x, y = split, split
    if arrays[2] == "x":
        y = split.with_halo(*around.of_y)
    else:
        x = split.with_halo(*around.of_x)
    return {"x": x, "w": REPLICATE, "y": y}


def _shard(arrays: str) -> ShardRule:
    """Of the op that computes the last of these arrays from the first two."""

    def rule(
        attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape], slot: int, split: Shard, n: int
    ) -> FactorMapping | None:
        array = arrays[slot] if slot >= 0 else arrays[2]
        if split.dim >= 2 and array != "w":
            found = _split_space(arrays, attrs, dict(zip(arrays, (*ins, *outs), strict=True)), split, n)
        else:
            found = _split(array, split, attrs["groups"], n)
        if found is None:
            return None
        a, b, result = [found[array] for array in arrays]
        return FactorMapping((a, b), (SUM if result is REPLICATE else result,))

    return rule


def _local(arrays: str, size: str = "") -> Callable[..., Attrs]:
    """The groups that a device has, and the sizes of its piece of the result."""

    def local(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> Attrs:
        shape = {array: t.shape for array, t in zip(arrays, (*ins, *outs), strict=True)}
        here = {size: outs[0].shape[2:]} if size else {}
        kernel, pads = shape["w"][2:], list(attrs["pads"])
        for dim in ins[0].subdims:
            around = halos(attrs, kernel, dim - 2) if dim >= 2 else None
            if around is not None:
                pads[dim - 2 :: len(kernel)] = around.pads if arrays[2] == "x" else (0, 0)
        return {"groups": shape["x"][1] // shape["w"][1], "pads": tuple(pads), **here}

    return local


def _work(arrays: str) -> Callable[..., tuple[float, float]]:
    """A product and a sum for each element of y and each one of a filter."""

    def work(attrs: Attrs, ins: Sequence[Shape], outs: Sequence[Shape]) -> tuple[float, float]:
        shape = dict(zip(arrays, (*ins, *outs), strict=True))
        return 2.0 * math.prod(shape["y"]) * math.prod(shape["w"][1:]), 0.0

    return work


# ---------------------------------------------------------------- meaning: a product for each position in the kernel


@rounded_once
def _conv(xp: Any, x: Any, w: Any, strides: Shape, dilations: Shape, pads: Shape, groups: int) -> Any:
    x = padded(xp, x, pads)
    n, channels, *sizes = x.shape
    filters = flat(xp, w, groups, w.shape[0] // groups, w.shape[1])
    y, shape = 0.0, ()
    for k, cut in enumerate(taps(tuple(sizes), w.shape[2:], strides, dilations)):
        at = x[cut]
        shape = at.shape[2:]
        y = y + xp.matmul(filters[..., k], flat(xp, at, n, groups, channels // groups))
    return xp.reshape(y, (n, w.shape[0], *shape))


@rounded_once
def _grad_input(
    xp: Any, d: Any, w: Any, strides: Shape, dilations: Shape, pads: Shape, groups: int, sizes: Shape
) -> Any:
    n, m, c = d.shape[0], w.shape[0] // groups, w.shape[1]
    x = xp.zeros((n, groups * c, *sizes_with(pads, sizes)), dtype=d.dtype)
    filters = flat(xp, w, groups, m, c)
    rows = flat(xp, d, n, groups, m)
    for k, cut in enumerate(taps(x.shape[2:], w.shape[2:], strides, dilations)):
        part = xp.matmul(xp.permute_dims(filters[..., k], (0, 2, 1)), rows)
        x[cut] += xp.reshape(part, (n, groups * c, *d.shape[2:]))
    return unpadded(x, pads)


@rounded_once
def _grad_weight(
    xp: Any, x: Any, d: Any, strides: Shape, dilations: Shape, pads: Shape, groups: int, kernel: Shape
) -> Any:
    x = padded(xp, x, pads)
    n, c, m = x.shape[0], x.shape[1] // groups, d.shape[1] // groups
    length = n * math.prod(d.shape[2:])
    rows = xp.reshape(xp.permute_dims(flat(xp, d, n, groups, m), (1, 2, 0, 3)), (groups, m, length))
    parts: list[Any] = []
    for cut in taps(x.shape[2:], kernel, strides, dilations):
        columns = xp.permute_dims(flat(xp, x[cut], n, groups, c), (1, 0, 3, 2))
        parts.append(xp.matmul(rows, xp.reshape(columns, (groups, length, c))))
    return xp.reshape(xp.stack(parts, axis=-1), (groups * m, c, *kernel))


# ---------------------------------------------------------------- the ops


def _slid(o: Op) -> Attrs:
    """The attributes that all three have."""
    return {k: o.attributes[k] for k in ("strides", "dilations", "pads", "groups")}


def _conv_of(f: FunctionMaker, o: Op, x: Value, w: Value) -> Value:
    return f.emit("Conv", x, w, **_slid(o))


def _grad_input_of(f: FunctionMaker, o: Op, d: Value, w: Value, x: Value) -> Value:
    return f.emit("ConvGradInput", d, w, **_slid(o), sizes=shape_of(x)[2:])


def _grad_weight_of(f: FunctionMaker, o: Op, x: Value, d: Value, w: Value) -> Value:
    return f.emit("ConvGradWeight", x, d, **_slid(o), kernel=shape_of(w)[2:])


def _conv_grad(f: FunctionMaker, o: Op, d: Value) -> list[Value]:
    x, w = o.inputs
    return [_grad_input_of(f, o, d, w, x), _grad_weight_of(f, o, x, d, w)]


def _grad_input_grad(f: FunctionMaker, o: Op, x: Value) -> list[Value]:
    d, w = o.inputs
    return [_conv_of(f, o, x, w), _grad_weight_of(f, o, x, d, w)]


def _grad_weight_grad(f: FunctionMaker, o: Op, w: Value) -> list[Value]:
    x, d = o.inputs
    return [_grad_input_of(f, o, d, w, x), _conv_of(f, o, x, w)]


op(  # x, w -> y
    "Conv",
    attributes=f"{WINDOWS} groups:count",
    infer=_conv_infer,
    shard=_shard("xwy"),
    dtype=same,
    linear=[{0}, {1}],
    weight=1,
    precision="low",
    kernel="product",
    local=_local("xwy"),
    work=_work("xwy"),
    eval=_conv,
    grad=_conv_grad,
)
op(  # y, w -> x: the gradient of x, or a transposed convolution; x has the spatial `sizes`
    "ConvGradInput",
    attributes=f"{WINDOWS} groups:count sizes:sizes",
    infer=_grad_input_infer,
    shard=_shard("ywx"),
    dtype=same,
    linear=[{0}, {1}],
    weight=1,
    precision="low",
    kernel="product",
    local=_local("ywx", "sizes"),
    work=_work("ywx"),
    eval=_grad_input,
    grad=_grad_input_grad,
)
op(  # x, y -> w, whose spatial sizes are `kernel`
    "ConvGradWeight",
    attributes=f"{WINDOWS} groups:count kernel:sizes",
    infer=_grad_weight_infer,
    shard=_shard("xyw"),
    dtype=same,
    linear=[{0}, {1}],
    kernel="product",
    local=_local("xyw", "kernel"),
    work=_work("xyw"),
    eval=_grad_weight,
    grad=_grad_weight_grad,
)
