"""Import rules of ONNX ops: convolutions and pools.

Pads that a node asks for (`auto_pad`, `ceil_mode`, `output_shape`) are computed here: the program's ops have numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from distir.importer.marks import call_of
from distir.importer.node import Node, Result, collapsed
from distir.importer.registry import rule
from distir.importer.rules_math import divisor, where_not
from distir.ir.function import Value
from distir.ir.type import Float32
from distir.ops.rules import shape_of, tensor
from distir.ops.windows import extents

Ints = tuple[int, ...]
_HOW = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


class _Window(NamedTuple):
    """The attributes that convolutions and pools share, one number for each spatial dim (of `pads` two)."""

    kernel: Ints
    strides: Ints
    dilations: Ints
    pads: Ints
    how: str
    """ONNX's `auto_pad`."""

    @property
    def extents(self) -> Ints:
        """How many elements a window reaches over."""
        return extents({"dilations": self.dilations}, self.kernel)

    def slid(self) -> dict[str, Any]:
        return {"strides": self.strides, "dilations": self.dilations, "pads": self.pads}


def _window(n: Node, kernel: Ints, rank: int) -> _Window:
    """The node's attributes. Raises ModelError unless they are for `rank` spatial dims."""
    n.require("auto_pad", "NOTSET", *_HOW)
    ones = (1,) * rank
    found = _Window(
        kernel,
        n.attr("strides", ones),
        n.attr("dilations", ones),
        n.attr("pads", (0,) * 2 * rank),
        n.attr("auto_pad", "NOTSET"),
    )
    given = [("kernel_shape", kernel, rank, 1), ("strides", found.strides, rank, 1)]
    given += [("dilations", found.dilations, rank, 1), ("pads", found.pads, 2 * rank, 0)]
    for name, row, size, least in given:
        if len(row) != size or min(row) < least:
            raise n.error(f"attribute {name}={row}: expected {size} integers from {least}, of {rank} spatial dims")
    if found.how != "NOTSET" and any(found.pads):
        raise n.error(f"has both pads {found.pads} and auto_pad {found.how}")
    return found


def _spatial(n: Node) -> Ints:
    """The spatial dims of operand 0, (batch, channels, *spatial)."""
    shape = n.shape()
    if not 3 <= len(shape) <= 5:
        raise n.error(f"operand 0: expected (batch, channels, 1 to 3 spatial dims), got shape {shape}")
    return shape[2:]


def _halves(total: Sequence[int], upper: bool) -> Ints:
    """Pads of these totals along each dim; of an odd one the end (`upper`) or the begin has more."""
    less, more = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    return less + more if upper else more + less


def _padded(w: _Window, sizes: Ints) -> _Window:
    """With the pads of `auto_pad`: SAME gives a window at each stride."""
    if w.how not in ("SAME_UPPER", "SAME_LOWER"):
        return w
    rows = zip(sizes, w.strides, w.extents, strict=True)
    total = [max(0, (-(-size // stride) - 1) * stride + wide - size) for size, stride, wide in rows]
    return w._replace(pads=_halves(total, w.how == "SAME_UPPER"))


def _rounded_up(w: _Window, sizes: Ints) -> _Window:
    """With pads at the end such that a window that is only partly inside counts, too (`ceil_mode`), if it begins
    before those pads."""
    rank = len(sizes)
    end: list[int] = []
    for i, (size, stride, wide) in enumerate(zip(sizes, w.strides, w.extents, strict=True)):
        before, after = size + w.pads[i], w.pads[rank + i]
        last = min(-(-(before + after - wide) // stride), (before - 1) // stride)
        end.append(max(after, last * stride + wide - before))
    return w._replace(pads=(*w.pads[:rank], *end))


def _filters(n: Node, rank: int) -> tuple[Ints, int]:
    """The kernel, and the number of groups. Raises ModelError unless the filters, operand 1, fit."""
    shape, groups = n.shape(1), n.attr("group", 1)
    if len(shape) != rank + 2 or math.prod(shape) == 0:
        raise n.error(f"operand 1: expected filters of {rank} spatial dims, got shape {shape}")
    if n.attr("kernel_shape", shape[2:]) != shape[2:]:
        raise n.error(f"kernel_shape {n.attr('kernel_shape')}: expected that of operand 1, {shape}")
    return shape[2:], groups


def _plus_bias(n: Node, y: Value, *ones: int) -> Value:
    """`y` plus operand 2, if there is one: a number for each channel, the dim of `y` before those of `ones`.

    Zeros that are no parameter are left out: torch's exporter writes them where a module has no bias, and for 3 spatial
    dims in a wrong shape.
    """
    if not n.has(2) or (n.scope.is_known(n.proto.input[2]) and not collapsed(n.known(2, "the bias")).any()):
        return y
    shape, channels = n.shape(2), shape_of(y)[-1 - len(ones)]
    if shape != (channels,):
        raise n.error(f"operand 2: expected a bias for {channels} channels, got shape {shape}")
    return n.emit("Add", y, n.reshape(n.operand(2), (channels, *ones)))


@rule("Conv")
def _conv(n: Node) -> Result:
    sizes = _spatial(n)
    kernel, groups = _filters(n, len(sizes))
    w = _padded(_window(n, kernel, len(sizes)), sizes)
    side_by_side = w.strides == w.extents == kernel != (1,) * len(kernel) and not any(w.pads)
    if side_by_side and groups == 1 and all(size % k == 0 for size, k in zip(sizes, kernel, strict=True)):
        return _patches(n, kernel)
    y = n.emit("Conv", n.operand(0), n.operand(1), **w.slid(), groups=groups)
    return _plus_bias(n, y, *[1] * len(sizes))


def _patches(n: Node, kernel: Ints) -> Value:
    """A convolution of adjacent patches, as in a vision transformer, becomes a matrix product."""
    (batch, channels, *sizes), filters = n.shape(), n.shape(1)[0]
    if n.shape(1)[1] != channels:
        raise n.error(f"operand 1: expected filters of {channels} channels, got shape {n.shape(1)}")
    parts = [(size // k, k) for size, k in zip(sizes, kernel, strict=True)]
    x = n.reshape(n.operand(0), (batch, channels, *[d for part in parts for d in part]))
    end = 2 + 2 * len(kernel)
    x = n.emit("Transpose", x, perm=(0, *range(2, end, 2), 1, *range(3, end, 2)))
    size = channels * math.prod(kernel)
    x = n.reshape(x, (batch, *[count for count, _ in parts], size))
    y = n.emit("MatMul", x, n.emit("Transpose", n.reshape(n.operand(1), (filters, size)), perm=(1, 0)))
    y = _plus_bias(n, y)
    return n.emit("Transpose", y, perm=(0, len(parts) + 1, *range(1, len(parts) + 1)))


@rule("ConvTranspose")
def _conv_transpose(n: Node) -> Result:
    """The gradient of a convolution's operand: filters (channels, results / groups, *kernel) are that one's."""
    counts = _spatial(n)
    rank = len(counts)
    kernel, groups = _filters(n, rank)
    w = _window(n, kernel, rank)
    more, wanted = n.attr("output_padding", (0,) * rank), n.attr("output_shape")
    rows = zip(counts, w.strides, w.extents, more, strict=True)
    natural = [(count - 1) * stride + wide + extra for count, stride, wide, extra in rows]
    if wanted is None and w.how in ("SAME_UPPER", "SAME_LOWER"):
        wanted = tuple([count * stride for count, stride in zip(counts, w.strides, strict=True)])
    if wanted is not None:
        sizes = tuple(wanted[-rank:])
        total = [max(0, size - want) for size, want in zip(natural, sizes, strict=True)]
        w = w._replace(pads=_halves(total, w.how == "SAME_UPPER"))
    else:
        sizes = tuple([size - w.pads[i] - w.pads[rank + i] for i, size in enumerate(natural)])
    if min(sizes) < 1:
        raise n.error(f"its result would have spatial dims {sizes}")
    for i, size in enumerate(sizes):  # what no window reaches must be less than a stride
        left = size + w.pads[i] + w.pads[rank + i] - (counts[i] - 1) * w.strides[i] - w.extents[i]
        if not 0 <= left < w.strides[i]:
            message = f"{left} elements of spatial dim {i} more than its windows reach"
            raise n.error(f"{message} are not supported", f"supported: from 0 to less than the stride, {w.strides[i]}")
    y = n.emit("ConvGradInput", n.operand(0), n.operand(1), **w.slid(), groups=groups, sizes=sizes)
    return _plus_bias(n, y, *[1] * rank)


def _pool_window(n: Node) -> tuple[_Window, Ints]:
    """The window, and its pads before more were added by rounding up."""
    sizes = _spatial(n)
    w = _padded(_window(n, n.attr("kernel_shape", ()), len(sizes)), sizes)
    return (_rounded_up(w, sizes) if n.attr("ceil_mode", 0) else w), w.pads


@rule("MaxPool")
def _max_pool(n: Node) -> Result:
    """Integers, of 8 bits, are floats in between."""
    n.attr("storage_order")  # of the positions
    if any(n.proto.output[1:]):
        raise n.error(f"its result {n.proto.output[1]!r}, the positions of the maxima, is not supported")
    w, _ = _pool_window(n)
    x = n.operand(0)
    dtype = tensor(x).dtype
    x = x if dtype.floating else n.emit("Cast", x, to=Float32)
    y = n.emit("MaxPool", x, kernel=w.kernel, **w.slid())
    return y if dtype.floating else n.emit("Cast", y, to=dtype)


@rule("AveragePool")
def _average_pool(n: Node) -> Result:
    """Pads that rounding up has added never count. torch's exporter leaves a divisor of its own out."""
    w, pads = _pool_window(n)
    call, counts_pads = call_of(n.proto), n.attr("count_include_pad", 0)
    own = call.get(6, "divisor_override", None) if call.name in ("avg_pool2d", "avg_pool3d") else None
    if own is not None:
        mean = n.emit("AveragePool", n.operand(0), kernel=w.kernel, **w.slid(), counted=w.pads)
        return n.emit("Mul", mean, n.constant(math.prod(w.kernel) / own, mean))
    counted = pads if counts_pads else (0,) * len(pads)
    return n.emit("AveragePool", n.operand(0), kernel=w.kernel, **w.slid(), counted=counted)


@rule("LpPool")
def _lp_pool(n: Node) -> Result:
    """The p-th root of the sum, which is the mean times the size of the window."""
    w, _ = _pool_window(n)
    x, p = n.operand(0), n.attr("p", 2)
    powers = n.emit("Abs", x)
    powers = powers if p == 1 else n.emit("Pow", powers, n.constant(float(p), x))
    mean = n.emit("AveragePool", powers, kernel=w.kernel, **w.slid(), counted=w.pads)
    total = n.emit("Mul", mean, n.constant(float(math.prod(w.kernel)), x))
    if p == 1:
        return total
    return where_not(n, n.emit("Pow", divisor(n, total), n.constant(1 / p, x)), total)


@rule("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(n: Node) -> Result:
    op_type = "ReduceMean" if n.proto.op_type == "GlobalAveragePool" else "ReduceMax"
    return n.emit(op_type, n.operand(0), axes=tuple(range(2, len(n.shape()))), keepdims=1)
