"""Import rules of ONNX ops: `Einsum`, products of elements one after the other, windows over channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distir.importer.node import Node, Result
from distir.importer.registry import rule
from distir.ir.function import Value
from distir.ir.type import Bool
from distir.ops.rules import shape_of, tensor

Labels = tuple[str, ...]


@rule("Einsum")
def _einsum(n: Node) -> Result:
    """Two operands after the other: products over the labels that nothing else needs."""
    xs = n.operands()
    rows, wanted = _equation(n, [len(shape_of(x)) for x in xs])
    sizes: dict[str, int] = {}
    for x, labels in zip(xs, rows, strict=True):
        for name, size in zip(labels, shape_of(x), strict=True):
            if size != sizes.get(name, 1) != 1 and size != 1:
                raise n.error(f"label {name!r} has sizes {sizes[name]} and {size}")
            sizes[name] = max(size, sizes.get(name, 1)) if size else 0
    terms = [_diagonal(n, _expanded(n, x, labels, sizes), labels) for x, labels in zip(xs, rows, strict=True)]
    total, labels = terms[0]
    for k, (x, of) in enumerate(terms[1:], 1):
        needed = {*wanted, *[name for _, row in terms[k + 1 :] for name in row]}
        total, labels = _contracted(n, (total, labels), (x, of), needed)
    total, labels = _summed(n, total, labels, {*wanted})
    return _ordered(n, total, labels, wanted)


def _equation(n: Node, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """The labels of each operand's dims and of the result's; the dims of an ellipsis are numbered from the last."""
    text = str(n.attr("equation", "")).replace(" ", "")
    left, arrow, right = text.partition("->")
    sides = left.split(",")
    if len(sides) != len(ranks):
        raise n.error(f"equation {text!r} has {len(sides)} operands, got {len(ranks)}")
    most = 0
    rows: list[Labels] = []
    for side, rank in zip(sides, ranks, strict=True):
        before, dots, after = side.partition("...")
        more = rank - len(before) - len(after)
        if more < 0 or (more and not dots) or not f"{before}{after}x".isalpha():
            raise n.error(f"equation {text!r} does not fit an operand of rank {rank}")
        most = max(most, more)
        rows.append((*before, *[f".{k}" for k in range(more, 0, -1)], *after))
    rest = tuple([f".{k}" for k in range(most, 0, -1)])
    if arrow:
        before, dots, after = right.partition("...")
        wanted = (*before, *(rest if dots else ()), *after)
    else:
        names = [name for row in rows for name in row if name not in rest]
        wanted = (*rest, *sorted(name for name in set(names) if names.count(name) == 1))
    if len(set(wanted)) != len(wanted) or not set(wanted) <= {name for row in rows for name in row}:
        raise n.error(f"equation {text!r}: its result's labels are not those of operands, each once")
    return rows, wanted


def _expanded(n: Node, x: Value, labels: Labels, sizes: dict[str, int]) -> Value:
    """With dims of size 1 as large as others of that label."""
    full = tuple([sizes[name] for name in labels])
    return x if full == shape_of(x) else n.emit("Expand", x, shape=full)


def _diagonal(n: Node, x: Value, labels: Labels) -> tuple[Value, Labels]:
    """Of dims of one label the elements of equal index: all others are masked, and one of the dims summed up."""
    for name in dict.fromkeys(labels):
        while labels.count(name) > 1:
            i = labels.index(name)
            j = labels.index(name, i + 1)
            size, rank = shape_of(x)[i], len(labels)
            eye = np.eye(*n.room(size, size), dtype=bool).reshape([size if d in (i, j) else 1 for d in range(rank)])
            x = n.emit("ReduceSum", n.emit("Mask", n.array("diagonal", eye), x), axes=(j,), keepdims=0)
            labels = (*labels[:j], *labels[j + 1 :])
    return x, labels


def _summed(n: Node, x: Value, labels: Labels, needed: set[str]) -> tuple[Value, Labels]:
    gone = tuple([i for i, name in enumerate(labels) if name not in needed])
    if gone:
        x = n.emit("ReduceSum", x, axes=gone, keepdims=0)
    return x, tuple([name for name in labels if name in needed])


def _ordered(n: Node, x: Value, labels: Labels, wanted: Labels) -> Value:
    return x if labels == wanted else n.emit("Transpose", x, perm=tuple([labels.index(name) for name in wanted]))


def _contracted(n: Node, a: tuple[Value, Labels], b: tuple[Value, Labels], needed: set[str]) -> tuple[Value, Labels]:
    """The product of two operands, summed over the labels of both that are not needed: those of both that are stay in
    front, then come those of the first alone, and of the second."""
    (x, left), (y, right) = _summed(n, *a, needed | {*b[1]}), _summed(n, *b, needed | {*a[1]})
    both = tuple([name for name in left if name in right and name in needed])
    inner = tuple([name for name in left if name in right and name not in needed])
    own, other = (tuple([name for name in row if name not in both + inner]) for row in (left, right))
    x, y = _ordered(n, x, left, both + own + inner), _ordered(n, y, right, both + inner + other)
    sizes = dict(zip((*both, *own, *inner), shape_of(x), strict=True)) | dict(
        zip((*both, *inner, *other), shape_of(y), strict=True)
    )
    lead, rows, columns = (tuple([sizes[name] for name in group]) for group in (both, own, other))
    if inner:
        k = math.prod([sizes[name] for name in inner])
        x, y = n.reshape(x, (*lead, math.prod(rows), k)), n.reshape(y, (*lead, k, math.prod(columns)))
        product = n.emit("MatMul", x, y)
    else:
        x, y = n.reshape(x, (*lead, *rows, *[1] * len(columns))), n.reshape(y, (*lead, *[1] * len(rows), *columns))
        product = n.emit("Mul", x, y)
    return n.reshape(product, (*lead, *rows, *columns)), both + own + other


@rule("CumProd")
def _cum_prod(n: Node) -> Result:
    """Each element is the product of a row in which the elements that do not count are 1."""
    x, shape = n.operand(0), n.shape()
    axis = n.wrap(int(n.numbers(1, "the axis")[0]), len(shape))
    size = shape[axis]
    ones = np.ones(n.room(size, size), bool)
    counts = np.tril(ones, -1 if n.attr("exclusive", 0) else 0)
    counts = counts[::-1, ::-1] if n.attr("reverse", 0) else counts
    apart, full = (*shape[:axis], 1, *shape[axis:]), (*shape[:axis], size, *shape[axis:])
    mask = n.array("counts", counts.reshape(size, size, *[1] * (len(shape) - axis - 1)))
    each = n.emit("Where", mask, n.emit("Expand", n.reshape(x, apart), shape=full), n.constant(1, x))
    return n.emit("ReduceProd", each, axes=(axis + 1,), keepdims=0)


@rule("LRN")
def _local_response(n: Node) -> Result:
    """Divided by a power of the mean square over the nearest channels (Krizhevsky et al. 2012)."""
    x, shape, size = n.operand(0), n.shape(), n.attr("size")
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    flat = n.reshape(n.emit("Mul", x, x), (shape[0], 1, shape[1], math.prod(shape[2:])))
    window = {"kernel": (size, 1), "strides": (1, 1), "dilations": (1, 1), "pads": (before, 0, after, 0)}
    mean = n.emit("AveragePool", flat, **window, counted=(before, 0, after, 0))
    scaled = n.emit("Mul", n.reshape(mean, shape), n.constant(n.attr("alpha", 1e-4), x))
    base = n.emit("Add", scaled, n.constant(n.attr("bias", 1.0), x))
    return n.emit("Div", x, n.emit("Pow", base, n.constant(n.attr("beta", 0.75), x)))


@rule("Compress")
def _compress(n: Node) -> Result:
    """By a condition known at import: the elements, or the parts along an axis, where it is true."""
    x, hits = n.operand(0), np.flatnonzero(n.numbers(1, "the condition"))
    axis = n.attr("axis")
    if axis is None:
        x, axis = n.reshape(x, (math.prod(n.shape()),)), 0
    axis = n.wrap(axis, len(shape_of(x)))
    if hits.size and hits[-1] >= shape_of(x)[axis]:
        raise n.error(f"its condition is longer than dim {axis} of shape {shape_of(x)}")
    if tensor(x).dtype is Bool:
        raise n.error("of truth values is not supported")
    return n.emit("Gather", x, n.array("indices", hits), axis=axis)


@rule("Range")
def _range(n: Node) -> Result:
    """Of numbers known at import."""
    start, limit, delta = [n.numbers(i, what)[0] for i, what in enumerate(("start", "limit", "delta"))]
    if delta == 0:
        raise n.error("delta is 0")
    count = max(0, math.ceil((float(limit) - float(start)) / float(delta)))
    (count,) = n.room(count)
    wide = np.int64 if start.dtype.kind in "iu" else np.float64
    return (np.arange(count) * delta.astype(wide) + start.astype(wide)).astype(start.dtype)
