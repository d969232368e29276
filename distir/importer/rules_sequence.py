"""Import rules of ONNX ops on sequences of tensors, whose lengths are known at import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distir.importer.node import NUMBERS, Node, Result
from distir.importer.registry import rule
from distir.ir.function import Op, Value
from distir.ops.rules import shape_of


@rule("SequenceEmpty", "SequenceConstruct")
def _construct(n: Node) -> Sequence[Result]:
    n.attr("dtype")
    return _made(n, n.operands())


@rule("SequenceInsert")
def _insert(n: Node) -> Sequence[Result]:
    parts = list(_parts(n))
    parts.insert(_position(n, 2, len(parts), end=1) if n.has(2) else len(parts), n.operand(1))
    return _made(n, parts)


@rule("SequenceErase")
def _erase(n: Node) -> Sequence[Result]:
    parts = list(_parts(n))
    del parts[_position(n, 1, len(parts)) if n.has(1) else len(parts) - 1]
    return _made(n, parts)


@rule("SequenceLength")
def _length(n: Node) -> Result:
    return np.array(len(_parts(n)), np.int64)


@rule("SequenceAt")
def _at(n: Node) -> Result:
    parts = _parts(n)
    return parts[_position(n, 1, len(parts))]


@rule("SplitToSequence")
def _split(n: Node) -> Sequence[Result]:
    """The sizes of the parts are given, or one size for all but the last, which has the remainder; without, parts are
    of size 1, and with keepdims=0 lack the dim."""
    axis, keepdims = n.axis(0), n.attr("keepdims", 1)  # without meaning if sizes are given
    split = n.numbers(1, "the sizes") if n.has(1) else np.array([1])
    size, each, one = n.shape()[axis], int(split[0]), not n.has(1) or n.known(1, "the sizes").ndim == 0
    if one and (each < 1 or size // each > NUMBERS):
        raise n.error(f"{size} cannot be split into parts of {each}", f"the most is {NUMBERS} parts")
    sizes = [int(x) for x in split] if not one else [each] * (size // each) + [size % each] * (size % each > 0)
    parts = [n.operand(0)] if len(sizes) == 1 else n.emit("Split", n.operand(0), axis=axis, sizes=tuple(sizes))
    return _made(n, parts if n.has(1) or keepdims else [n.dropped(x, (axis,)) for x in parts])


@rule("OptionalGetElement")
def _element(n: Node) -> Result:
    return n.operand(0)  # an optional value itself is refused


@rule("OptionalHasElement")
def _has_element(n: Node) -> Result:
    return np.array(n.has(0))


@rule("ConcatFromSequence")
def _concat(n: Node) -> Result:
    parts, new = _parts(n), int(n.attr("new_axis", 0))
    if not parts:
        raise n.error("of an empty sequence is not supported")
    axis = n.wrap(n.attr("axis"), len(shape_of(parts[0])) + new)
    if new:
        parts = [n.reshape(x, (*shape_of(x)[:axis], 1, *shape_of(x)[axis:])) for x in parts]
    elif axis == 0 and (bags := _bags(n, parts)) is not None:
        return bags
    return parts[0] if len(parts) == 1 else n.emit("Concat", *parts, axis=axis)


def _parts(n: Node) -> Sequence[Value]:
    """The elements of operand 0."""
    parts = n.scope.sequences.get(n.proto.input[0])
    if parts is None:
        raise n.error(f"its operand {n.proto.input[0]!r} is not a sequence that the file makes")
    return parts


def _made(n: Node, parts: Sequence[Value]) -> Sequence[Result]:
    n.scope.sequences[n.proto.output[0]] = list(parts)
    return []


def _position(n: Node, i: int, length: int, end: int = 0) -> int:
    """Operand i, known at import: a position of that many, counted from either end, or with `end` the one after."""
    at = int(n.numbers(i, "the position")[0])
    if not -length <= at < length + end:
        raise n.error(f"position {at} is not one of {length + end}")
    return at if at >= 0 else at + length


class _Bag(NamedTuple):
    """A row that is `kind`, a reduction, of the rows from `start` of a value."""

    kind: str
    source: Value
    start: int
    size: int


def _bags(n: Node, parts: Sequence[Value]) -> Value | None:
    """The rows `parts` where each reduces as many consecutive rows of one value, all in order: as one reduction, which
    can be split by rows as the loop over them cannot. torch's exporter writes EmbeddingBag as such a loop."""
    made = {v: op for op in n.scope.maker.ops for v in op.outputs}
    bags = [_bag(made, v) for v in parts]
    first = bags[0]
    if first is None:
        return None
    if bags != [first._replace(start=k * first.size) for k in range(len(bags))]:
        return None
    rows, *rest = shape_of(first.source)
    if rows != len(bags) * first.size:
        return None
    x = n.reshape(first.source, (len(bags), first.size, *rest))
    return n.emit(first.kind, x, axes=(1,), keepdims=0)


def _bag(made: Mapping[Value, Op], row: Value) -> _Bag | None:
    op = made.get(row)
    count = None
    if op is not None and op.op_type == "Div" and (by := made.get(op.inputs[1])) is not None:
        count = by.attributes["value"][0] if by.op_type == "Constant" else None
        op = made.get(op.inputs[0]) if count is not None else None
    if op is None or op.op_type not in ("ReduceSum", "ReduceMean", "ReduceMax"):
        return None
    if tuple(op.attributes["axes"]) != (0,) or not op.attributes.get("keepdims"):
        return None
    source, start = op.inputs[0], 0
    size = shape_of(source)[0]
    cut = made.get(source)
    if cut is not None and cut.op_type == "Slice" and (cut.attributes["axes"], cut.attributes["steps"]) == ((0,), (1,)):
        source, start = cut.inputs[0], cut.attributes["starts"][0]
    if count is None:
        return _Bag(op.op_type, source, start, size)
    return _Bag("ReduceMean", source, start, size) if op.op_type == "ReduceSum" and count == size else None
