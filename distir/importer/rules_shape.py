"""Import rules of ONNX ops: ops on shapes, indices and constants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distir.importer.marks import call_of
from distir.importer.node import Node, Result, collapsed
from distir.importer.registry import rule
from distir.importer.rules_index import gathered
from distir.importer.tensor_proto import dtype_of
from distir.ir.function import Value
from distir.ir.type import Int64
from distir.ops.rules import shape_of, tensor


@rule("Gather")
def _gather(n: Node) -> Result:
    """Indices may count from the end. One known index is a Slice."""
    axis, shape, padding = n.axis(0), n.shape(), _padding(n)
    if not n.scope.is_known(n.proto.input[1]):
        ids = n.operand(1)
        rows = n.emit("Gather", n.operand(0), ids, axis=axis)
        return rows if padding is None else _untrained(n, rows, n.emit("Equal", ids, n.constant(padding, ids)))
    given = n.known(1, "the indices")
    index = collapsed(given).astype(np.int64)
    if ((index < -shape[axis]) | (index >= shape[axis])).any():
        raise n.error(f"an index is out of range for dim {axis} of shape {shape}")
    index = np.broadcast_to(index % shape[axis], given.shape)
    if index.size != 1:
        rows = n.emit("Gather", n.operand(0), n.array("indices", index), axis=axis)
        if padding is None or not (collapsed(index) == padding).any():
            return rows
        return _untrained(n, rows, n.array("padding", index == padding))
    at = int(index.item())
    row = n.emit("Slice", n.operand(0), starts=(at,), ends=(at + 1,), axes=(axis,), steps=(1,))
    row = n.emit("Detach", row) if at == padding else row
    return n.reshape(row, (*shape[:axis], *index.shape, *shape[axis + 1 :]))


def _padding(n: Node) -> int | None:
    """The row of padding, which gets no gradient, where the node is torch's embedding in a trained table with one."""
    call = call_of(n.proto)
    if call.name != "embedding" or not n.scope.depends_on_parameters(n.operand(0)):
        return None
    if call.get(3, "scale_grad_by_freq", False):
        raise n.error("torch's exporter leaves scale_grad_by_freq out", "set it to False")
    row = call.get(2, "padding_idx", -1)
    return row if row >= 0 else None


def _untrained(n: Node, rows: Value, where: Value) -> Value:
    """Rows of a table, without a gradient `where` their index is that of padding."""
    where = n.reshape(where, (*shape_of(where), 1))
    return n.emit("Where", where, n.emit("Detach", rows), rows)


@rule("GatherND")
def _gather_nd(n: Node) -> Result:
    """By indices known at import, as rows of a table. A first dim that is indexed in order is not merged with others,
    as it may be the batch dim, to be split."""
    batch = n.attr("batch_dims", 0)
    parts = n.scope.joined.get(n.proto.input[1], [n.proto.input[1]])
    if batch or not all(part in n.scope.known for part in parts):
        return gathered(n, n.operand(0), batch)
    known = n.scope.is_known(n.proto.input[0])
    shape = n.known(0, "the data").shape if known else n.shape()
    index = _coordinates(n, shape)
    if known:
        return _picked(n.known(0, "the data"), index)
    full, dims, lead = index[0].shape, shape[: len(index)], 0
    if full and len(index) > 1 and full[0] == dims[0]:
        rows = np.arange(dims[0]).reshape(-1, *[1] * (len(full) - 1))
        lead = int(
            (collapsed(index[0]) == rows).all() and all((collapsed(x) == collapsed(x)[:1]).all() for x in index[1:])
        )
    if lead:
        index, dims = [x[0] for x in index[1:]], dims[1:]
    n.room(*index[0].shape)
    flat = np.ravel_multi_index(index, dims)
    rest = shape[lead + len(dims) :]
    x = n.reshape(n.operand(0), (*shape[:lead], math.prod(dims), *rest))
    if not np.array_equal(flat.reshape(-1), np.arange(math.prod(dims))):
        x = n.emit("Gather", x, n.array("indices", flat.reshape(-1)), axis=lead)
    return n.reshape(x, (*shape[:lead], *flat.shape, *rest))


def _coordinates(n: Node, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The coordinates that the last dim of the indices has: for each, nonnegative indices into one dim of the data."""
    name = n.proto.input[1]
    parts = n.scope.joined.get(name, [name])
    if not all(part in n.scope.known for part in parts):
        parts = [name]
    rows = [n.scope.known[part]() for part in parts] if parts != [name] else [n.known(1, "the indices")]
    if (count := sum(x.shape[-1] for x in rows)) > len(shape):
        raise n.error(f"its indices have {count:,} coordinates each, its data {len(shape)} dims")
    found = [x[..., k] for x in rows for k in range(x.shape[-1])]
    dims = shape[: len(found)]
    result: list[np.ndarray] = []
    for x, size in zip(found, dims, strict=True):
        some = collapsed(x).astype(np.int64)
        if ((some < -size) | (some >= size)).any():
            raise n.error(f"an index is out of range for dims {dims} of shape {shape}")
        result.append(np.broadcast_to(np.where(some < 0, some + size, some), x.shape))
    return result


def _picked(x: np.ndarray, index: Sequence[np.ndarray]) -> np.ndarray:
    """The elements of `x` at these coordinates; along dims of stride 0 index 0 is used."""
    full = np.broadcast_shapes(*[i.shape for i in index])
    at = tuple([collapsed(i) if x.strides[k] else np.zeros([1] * i.ndim, np.int64) for k, i in enumerate(index)])
    return np.broadcast_to(x[at], (*full, *x.shape[len(index) :]))


@rule("CumSum")
def _cum_sum(n: Node) -> Result:
    axis = n.wrap(int(n.numbers(1, "the axis")[0]), len(n.shape()))
    given = {name: True for name in ("exclusive", "reverse") if n.attr(name, 0)}
    return n.emit("CumSum", n.operand(0), axis=axis, **given)


@rule("Transpose")
def _transpose(n: Node) -> Result:
    rank = len(n.shape())
    perm = n.attr("perm", tuple(reversed(range(rank))))
    if sorted(perm) != list(range(rank)):
        raise n.error(f"perm {perm} is not a permutation of {rank} dims")
    return n.emit("Transpose", n.operand(0), perm=perm)


@rule("Reshape")
def _reshape(n: Node) -> Result:
    """A 0 in the target shape stands for the operand's dim, unless `allowzero`."""
    target, shape = n.ints(1, "the shape"), n.shape()
    if target is None:
        raise n.error("operand 1 is missing")
    if not n.attr("allowzero", 0):
        if any(d == 0 and i >= len(shape) for i, d in enumerate(target)):
            raise n.error(f"target {target} keeps a dim that shape {shape} does not have")
        target = tuple(shape[i] if d == 0 else d for i, d in enumerate(target))
    return n.reshape(n.operand(0), target)


@rule("Flatten")
def _flatten(n: Node) -> Result:
    shape, axis = n.shape(), n.attr("axis", 1)
    axis = axis if axis == len(shape) else n.wrap(axis, len(shape))
    return n.reshape(n.operand(0), (math.prod(shape[:axis]), math.prod(shape[axis:])))


@rule("Squeeze")
def _squeeze(n: Node) -> Result:
    shape, axes = n.shape(), n.axes()
    if axes is None:
        axes = [i for i, d in enumerate(shape) if d == 1]
    gone = {n.wrap(a, len(shape)) for a in axes}
    if any(shape[i] != 1 for i in gone):
        raise n.error(f"dims {sorted(gone)} of shape {shape} are not all 1")
    return n.reshape(n.operand(0), tuple(d for i, d in enumerate(shape) if i not in gone))


@rule("Unsqueeze")
def _unsqueeze(n: Node) -> Result:
    shape, axes = list(n.shape()), n.axes() or ()
    rank = len(shape) + len(axes)
    for a in sorted(n.wrap(a, rank) for a in axes):
        shape.insert(a, 1)
    return n.reshape(n.operand(0), tuple(shape))


@rule("Expand")
def _expand(n: Node) -> Result:
    want, shape = n.ints(1, "the shape") or (), n.shape()
    try:
        shape = np.broadcast_shapes(want, shape)
    except (ValueError, RuntimeError):  # of more dims than numpy takes
        raise n.error(f"shape {shape} does not expand to {want}") from None
    x = n.operand(0)
    return x if shape == shape_of(x) else n.emit("Expand", x, shape=shape)


@rule("Concat")
def _concat(n: Node) -> Result:
    """Operands without elements are left out, and what made them with them."""
    axis = n.axis(0)
    if axis == len(n.shape()) - 1:
        n.scope.joined[n.proto.output[0]] = list(n.proto.input)
    operands = n.operands()
    parts = [v for v in operands if shape_of(v)[axis]] or operands[:1]
    return parts[0] if len(parts) == 1 else n.emit("Concat", *parts, axis=axis)


@rule("Split")
def _split(n: Node) -> Sequence[Result]:
    axis, sizes = n.axis(0), n.ints(1, "the sizes") or n.attr("split")
    parts, size = len(n.proto.output), n.shape()[axis]
    n.require("num_outputs", parts, parts)
    if sizes is None:
        each = -(-size // parts)
        sizes = (*[each] * (parts - 1), size - each * (parts - 1))
    if len(sizes) == 1:
        return [n.operand(0)]
    if len(set(sizes)) == 1:
        return n.emit("Split", n.operand(0), axis=axis, parts=len(sizes))
    return n.emit("Split", n.operand(0), axis=axis, sizes=tuple(sizes))


@rule("Slice")
def _slice(n: Node) -> Result:
    """Starts and (exclusive) ends are clamped to the dim; with a negative step, an end of -1 is before the first."""
    shape = n.shape()
    starts, ends = n.ints(1, "starts") or (), n.ints(2, "ends") or ()
    axes = n.ints(3, "axes") or tuple(range(len(starts)))
    steps = n.ints(4, "steps") or (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise n.error(f"starts {starts}, ends {ends}, axes {axes}, steps {steps} do not fit")
    rows = []
    for start, end, axis, step in sorted(zip(starts, ends, axes, steps, strict=True), key=lambda r: r[2]):
        axis = n.wrap(axis, len(shape))
        start, end, step = slice(start, end, step).indices(shape[axis])
        if (start, end, step) != (0, shape[axis], 1):
            rows.append((start, end, axis, step))
    if not rows:
        return n.operand(0)
    starts, ends, axes, steps = zip(*rows, strict=True)
    return n.emit("Slice", n.operand(0), starts=starts, ends=ends, axes=axes, steps=steps)


@rule("Shape")
def _shape(n: Node) -> Result:
    shape = n.shape()
    start, end, _ = slice(n.attr("start", 0), n.attr("end")).indices(len(shape))
    return np.array(shape[start:end], np.int64)


@rule("Size")
def _size(n: Node) -> Result:
    return np.array(math.prod(n.shape()), np.int64)


@rule("Constant")
def _constant(n: Node) -> Result:
    for name in ("value", "value_int", "value_ints", "value_float", "value_floats"):
        value = n.attr(name)
        if isinstance(value, np.ndarray):
            return value
        if value is not None:
            return np.array(value, np.float32 if "float" in name else np.int64)
    raise n.error("only numbers and tensors are supported")


@rule("ConstantOfShape")
def _constant_of_shape(n: Node) -> Result:
    value = n.attr("value", np.zeros(1, np.float32))
    return np.broadcast_to(value.reshape(()), n.ints(0, "the shape") or ())


@rule("EyeLike")
def _eye_like(n: Node) -> Result:
    rows, columns = n.shape()
    to = n.attr("dtype")
    dtype = tensor(n.operand(0)).dtype if to is None else dtype_of(to, f"{n.scope.path}: {n}: attribute dtype")
    n.room(rows, columns)
    return np.eye(rows, columns, n.attr("k", 0), dtype.numpy)


@rule("Trilu")
def _trilu(n: Node) -> Result:
    shape, upper = n.shape(), n.attr("upper", 1)
    k = int(n.known(1, "k").reshape(())) if n.has(1) else 0
    ones = np.ones(n.room(*shape[-2:]), bool)
    mask = np.triu(ones, k) if upper else np.tril(ones, k)
    return n.emit("Mask", n.array("kept", mask), n.operand(0))


@rule("Tile")
def _tile(n: Node) -> Result:
    """Before each repeated dim a new one is inserted, which is expanded and merged."""
    shape, repeats = n.shape(), n.ints(1, "repeats") or ()
    if len(repeats) != len(shape):
        raise n.error(f"repeats {repeats} do not fit shape {shape}")
    if all(r == 1 for r in repeats):
        return n.operand(0)
    apart = [d for s in shape for d in (1, s)]
    full = [d for r, s in zip(repeats, shape, strict=True) for d in (r, s)]
    expanded = n.emit("Expand", n.reshape(n.operand(0), tuple(apart)), shape=tuple(full))
    return n.reshape(expanded, tuple(r * s for r, s in zip(repeats, shape, strict=True)))


def _block(n: Node) -> int:
    size = n.attr("blocksize")
    if size < 1:
        raise n.error(f"blocks of {size}")
    return size


@rule("DepthToSpace")
def _depth_to_space(n: Node) -> Result:
    """(b, c, h, w) -> (b, c / k², h·k, w·k): two of a channel's sub-dimensions, in the mode's order, refine h and w."""
    (b, c, h, w), k, mode = n.shape(), _block(n), n.attr("mode", "DCR")
    if mode == "DCR":
        shape, perm = (b, k, k, c // (k * k), h, w), (0, 3, 4, 1, 5, 2)
    else:
        shape, perm = (b, c // (k * k), k, k, h, w), (0, 1, 4, 2, 5, 3)
    apart = n.emit("Transpose", n.reshape(n.operand(0), shape), perm=perm)
    return n.reshape(apart, (b, c // (k * k), h * k, w * k))


@rule("SpaceToDepth")
def _space_to_depth(n: Node) -> Result:
    n.require("mode", "DCR", "DCR", "CRD")
    (b, c, h, w), k = n.shape(), _block(n)
    apart = n.reshape(n.operand(0), (b, c, h // k, k, w // k, k))
    perm = (0, 3, 5, 1, 2, 4) if n.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return n.reshape(n.emit("Transpose", apart, perm=perm), (b, c * k * k, h // k, w // k))


@rule("OneHot")
def _one_hot(n: Node) -> Result:
    """The second of the two values where an index, possibly negative, equals the column number, else the first."""
    rank = len(n.shape())
    depth = int(n.numbers(1, "the depth")[0])
    axis = n.wrap(n.attr("axis", -1), rank + 1)
    index = n.emit("Cast", n.reshape(n.operand(0), (*n.shape()[:axis], 1, *n.shape()[axis:])), to=Int64)
    column = np.arange(*n.room(depth)).reshape(-1, *[1] * (rank - axis))
    hit = n.emit("Or", *(n.emit("Equal", index, n.array("columns", column - d)) for d in (0, depth)))
    if n.proto.input[2] in n.scope.known:
        off, on = [
            n.array(name, np.asarray(x)) for name, x in zip(("off", "on"), n.known(2, "the values"), strict=True)
        ]
    else:
        off, on = [n.reshape(v, ()) for v in n.emit("Split", n.operand(2), axis=0, parts=2)]
    return n.emit("Where", hit, on, off)
