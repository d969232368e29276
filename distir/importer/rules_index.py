"""Import rules of ONNX ops: elements picked and written by index, the largest elements and their positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from distir.importer.masked import INSTEAD, MASKED_WRITE
from distir.importer.node import Node, Result, collapsed
from distir.importer.registry import rule
from distir.ir.function import Value
from distir.ir.type import Bool, Int64, UInt8
from distir.ops.rules import shape_of, tensor

REDUCTIONS = {"mul": ("Mul", "ReduceProd"), "max": ("Max", "ReduceMax"), "min": ("Min", "ReduceMin")}
"""For each way to combine updates with the data the op on points and the reduction over dims."""


def as_numbers(n: Node, x: Value, change: Callable[[Value], Value]) -> Value:
    """`change(x)`; of truth values through integers, which may be added."""
    if tensor(x).dtype is not Bool:
        return change(x)
    return n.emit("Cast", change(n.emit("Cast", x, to=UInt8)), to=Bool)


def _index(n: Node, i: int, size: int, axis: int) -> Value:
    """Operand i, indices into a dim of `size`. Raises ModelError if they are known and one is out of range."""
    if n.scope.is_known(n.proto.input[i]):
        known = collapsed(n.known(i, "the indices"))
        if ((known < -size) | (known >= size)).any():
            raise n.error(f"an index is out of range for dim {axis} of size {size}")
    return n.operand(i)


def _part(n: Node, x: Value, shape: Sequence[int], but: int) -> Value:
    """The first elements of `x` along each dim but one, as many as `shape` has."""
    cut = [d for d, size in enumerate(shape_of(x)) if d != but and shape[d] != size]
    if not cut:
        return x
    ends = tuple([shape[d] for d in cut])
    return n.emit("Slice", x, starts=(0,) * len(cut), ends=ends, axes=tuple(cut), steps=(1,) * len(cut))


def _padded_to(n: Node, x: Value, shape: Sequence[int], but: int) -> Value:
    """`x` with zeros after it along each dim but one, up to `shape`."""
    for d, size in enumerate(shape):
        if d != but and shape_of(x)[d] != size:
            x = n.emit("PadTo", x, dim=d, size=size)
    return x


def _same_rank(n: Node, i: int) -> tuple[int, ...]:
    """The shape of operand i, indices. Raises ModelError unless it fits into that of operand 0 but for the axis."""
    axis, shape, of = n.axis(0), n.shape(), n.shape(i)
    if len(of) != len(shape) or any(b > a for d, (a, b) in enumerate(zip(shape, of, strict=True)) if d != axis):
        raise n.error(f"indices of shape {of} do not fit data of shape {shape} along axis {axis}")
    return of


@rule("GatherElements")
def _gather_elements(n: Node) -> Result:
    axis, of = n.axis(0), _same_rank(n, 1)
    index = _index(n, 1, n.shape()[axis], axis)
    x = _part(n, n.operand(0), of, axis)
    return as_numbers(n, x, lambda x: n.emit("GatherElements", x, index, axis=axis))


@rule("ScatterElements")
def _scatter_elements(n: Node) -> Result:
    """Updates are added up in zeros; they are added to the data, or stand in its place where there are any."""
    axis, x, shape, of = n.axis(0), n.operand(0), n.shape(), _same_rank(n, 1)
    if n.shape(2) != of:
        raise n.error(f"updates of shape {n.shape(2)} do not fit indices of shape {of}")
    index, updates, size = _index(n, 1, shape[axis], axis), n.operand(2), shape[axis]

    def spread(d: Value) -> Value:
        return _padded_to(n, n.emit("ScatterAdd", d, index, axis=axis, size=size), shape, axis)

    how = n.attr("reduction", "none")
    if how in REDUCTIONS:
        if tuple(of[:axis]) + tuple(of[axis + 1 :]) != tuple(shape[:axis]) + tuple(shape[axis + 1 :]):
            raise n.error(f"reduction={how!r} with indices of shape {of} in data of shape {shape} is not supported")
        return _combined(n, how, x, index, updates, axis)
    return _written(n, how, x, updates, spread)


def _written(n: Node, how: str, x: Value, updates: Value, spread: Callable[[Value], Value]) -> Value:
    """The data with updates added, or in its place. ONNX allows no position twice in the second case."""
    if how == "add":
        return n.emit("Add", x, spread(updates))
    if how != "none":
        raise n.error(f"attribute reduction={how!r} is not supported", f"supported: none, add, {', '.join(REDUCTIONS)}")
    one = n.full(shape_of(updates), 1, n.emit("Constant", value=(1,), shape=(), dtype=Int64))
    count = spread(one)
    hit = n.emit("Greater", count, n.constant(0, count))
    if tensor(x).dtype is Bool:
        x, updates = n.emit("Cast", x, to=UInt8), n.emit("Cast", updates, to=UInt8)
        return n.emit("Cast", n.emit("Where", hit, spread(updates), x), to=Bool)
    return n.emit("Where", hit, spread(updates), x)


def _combined(n: Node, how: str, x: Value, index: Value, updates: Value, axis: int) -> Value:
    """Every update at every position of the axis, those meant elsewhere as what changes nothing, reduced."""
    points, reduction = REDUCTIONS[how]
    size, of, dtype = shape_of(x)[axis], shape_of(index), tensor(x).dtype
    apart = (*of[:axis], 1, *of[axis:])
    whole = np.arange(*n.room(size)).reshape(-1, *[1] * (len(of) - axis))
    at = n.emit("Cast", n.reshape(index, apart), to=Int64)
    hit = n.emit("Or", *[n.emit("Equal", at, n.array("positions", whole - d)) for d in (0, size)])
    if how == "mul":
        nothing: float | int = 1
    elif dtype.floating:
        nothing = -math.inf if how == "max" else math.inf
    else:
        limits = np.iinfo(dtype.numpy)  # type: ignore[arg-type]
        nothing = int(limits.min if how == "max" else limits.max)
    each = n.emit("Where", hit, n.reshape(updates, apart), n.constant(nothing, updates))
    return n.emit(points, x, n.emit(reduction, each, axes=(axis + 1,), keepdims=0))


# ---------------------------------------------------------------- several dims at once


def positions(n: Node, i: int, dims: Sequence[int], lead: int) -> Value:
    """Operand i (*batch, *rows, k), coordinates in k dims of these sizes, as positions in all of them as one.

    The result has shape (*batch, rows): `lead` dims of a batch.
    """
    shape = n.shape(i)
    strides = [math.prod(dims[k + 1 :]) for k in range(len(dims))]
    total: Value | None = None
    for k, (size, stride) in enumerate(zip(dims, strides, strict=True)):
        c = n.emit("Slice", n.operand(i), starts=(k,), ends=(k + 1,), axes=(len(shape) - 1,), steps=(1,))
        c = c if tensor(c).dtype is Int64 else n.emit("Cast", c, to=Int64)
        negative = n.emit("Less", c, n.constant(0, c))
        c = n.emit("Where", negative, n.emit("Add", c, n.constant(size, c)), c)
        c = c if stride == 1 else n.emit("Mul", c, n.constant(stride, c))
        total = c if total is None else n.emit("Add", total, c)
    assert total is not None
    return n.reshape(total, (*shape[:lead], math.prod(shape[lead:-1])))


def gathered(n: Node, x: Value, lead: int) -> Value:
    """The parts of `x` (*batch, *dims, *rest) at the coordinates of operand 1 (*batch, *rows, k), which may depend on
    data: (*batch, *rows, *rest)."""
    shape, of = shape_of(x), n.shape(1)
    k = of[-1]
    if not 1 <= k <= len(shape) - lead or shape[:lead] != of[:lead]:
        raise n.error(f"indices of shape {of} do not fit data of shape {shape} after {lead} dims of a batch")
    dims, rest = shape[lead : lead + k], shape[lead + k :]
    at, result = positions(n, 1, dims, lead), (*of[:-1], *rest)
    flat = n.reshape(x, (*shape[:lead], math.prod(dims), *rest))
    if not lead:
        return n.reshape(as_numbers(n, flat, lambda v: n.emit("Gather", v, at, axis=0)), result)
    along = (*shape_of(at), *rest)
    at = n.emit("Expand", n.reshape(at, (*shape_of(at), *[1] * len(rest))), shape=along)
    return n.reshape(as_numbers(n, flat, lambda v: n.emit("GatherElements", v, at, axis=lead)), result)


@rule("ScatterND")
def _scatter_nd(n: Node) -> Result:
    x, shape, of = n.operand(0), n.shape(), n.shape(1)
    k = of[-1]
    if not 1 <= k <= len(shape) or n.shape(2) != (*of[:-1], *shape[k:]):
        raise n.error(f"indices of shape {of} and updates of shape {n.shape(2)} do not fit data of shape {shape}")
    at, rows, rest = positions(n, 1, shape[:k], 0), math.prod(shape[:k]), math.prod(shape[k:])
    flat, updates = n.reshape(x, (rows, rest)), n.reshape(n.operand(2), (shape_of(at)[0], rest))
    how = n.attr("reduction", "none")
    if how in REDUCTIONS:
        index = n.emit("Expand", n.reshape(at, (*shape_of(at), 1)), shape=shape_of(updates))
        return n.reshape(_combined(n, how, flat, index, updates, 0), shape)
    written = _written(n, how, flat, updates, lambda d: n.emit("GatherGrad", d, at, rows=rows, axis=0))
    return n.reshape(written, shape)


@rule(MASKED_WRITE)
def _masked_write(n: Node) -> Result:
    """`h[mask] = x`: see masked.py. The mask is over the first dims of h, `rest` are the others."""
    h, shape, of, given = n.operand(0), n.shape(), n.shape(1), n.shape(2)
    rest, expanded = n.ints(3, "the shape of what is selected") or (), n.ints(4, "the shape of the mask") or shape
    over = shape[: len(shape) - len(rest)]
    column = (*over, *[1] * len(rest))
    if (*over, *rest) != shape or expanded != shape or of not in (over, column):
        raise n.error(f"a mask of shape {of} does not fit data of shape {shape}")
    own = given[max(len(given) - len(rest), 0) :]
    if any(a not in (1, b) for a, b in zip(own, rest[len(rest) - len(own) :], strict=True)):
        raise n.error(f"a tensor of shape {given} does not fit what is selected, of shape {rest}")
    if math.prod(given) != math.prod(own):
        message = f"a tensor of shape {given} is assigned to what a mask selects of shape {shape}"
        raise n.error(f"{message}: only what is the same wherever the mask is true can be", INSTEAD["NonZero"])
    mask, x = n.reshape(n.operand(1), column), n.reshape(n.operand(2), own)
    mask = mask if tensor(mask).dtype is Bool else n.emit("Cast", mask, to=Bool)
    return n.emit("Where", mask, x, h)


# ---------------------------------------------------------------- the largest


@rule("ArgMax", "ArgMin")
def _arg_extreme(n: Node) -> Result:
    axis = n.axis(0)
    given = {"least": n.proto.op_type == "ArgMin", "last": bool(n.attr("select_last_index", 0))}
    index = n.emit("TopIndices", n.operand(0), axis=axis, k=1, **{k: True for k, v in given.items() if v})
    return index if n.attr("keepdims", 1) else n.dropped(index, (axis,))


@rule("TopK")
def _top_k(n: Node) -> Sequence[Result]:
    """Sorted, which `sorted=0` allows, too."""
    n.attr("sorted")
    axis, x, k = n.axis(-1), n.operand(0), n.ints(1, "k")
    if k is None or not 0 <= k[0] <= n.shape()[axis]:
        raise n.error(f"k is {k}, of {n.shape()[axis]} elements along axis {axis}")
    least = {} if n.attr("largest", 1) else {"least": True}
    index = n.emit("TopIndices", x, axis=axis, k=k[0], **least)
    return [n.emit("GatherElements", x, index, axis=axis), index]


@rule("Hardmax")
def _hardmax(n: Node) -> Result:
    """1 at the first maximum along the axis, else 0."""
    axis, x, shape = n.axis(-1), n.operand(0), n.shape()
    index = n.emit("TopIndices", x, axis=axis, k=1)
    column = np.arange(*n.room(shape[axis])).reshape(-1, *[1] * (len(shape) - axis - 1))
    return n.emit("Cast", n.emit("Equal", index, n.array("positions", column)), to=tensor(x).dtype)


@rule("ReverseSequence")
def _reverse_sequence(n: Node) -> Result:
    """The first elements of each row of the batch, as many as its length, in reverse order."""
    x, shape = n.operand(0), n.shape()
    batch, time = n.attr("batch_axis", 1), n.attr("time_axis", 0)
    if sorted((batch, time)) != [0, 1]:
        raise n.error(f"batch_axis={batch} and time_axis={time} are not 0 and 1")
    size, each = shape[time], (shape[batch], 1) if batch == 0 else (1, shape[batch])
    length = n.emit("Cast", n.reshape(n.operand(1), each), to=Int64)
    step = n.array("steps", np.arange(*n.room(size)).reshape((1, size) if batch == 0 else (size, 1)))
    back = n.emit("Sub", n.emit("Sub", length, n.constant(1, length)), step)
    index = n.emit("Where", n.emit("Less", step, length), back, step)
    index = n.emit("Expand", n.reshape(index, (*shape[:2], *[1] * (len(shape) - 2))), shape=shape)
    return as_numbers(n, x, lambda v: n.emit("GatherElements", v, index, axis=time))
