"""Gathers of weights that are kept in parts: several at once, and one unit ahead of the compute that needs them.

A unit is gathered when the first op that needs the unit before it is about to run: so while one layer is computed the
next one's weights are on their way, and no more than two units are held whole at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.function import NO_ATTRIBUTES, Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import Tensor
from distir.transforms.bucket import bundle_collective, maker_like
from distir.transforms.known import append

_GATHER, _AFTER = map(lookup, ("MPIAllgather", "After"))


def prefetch(function: Function, axis: str, limit: float) -> Function:
    """A body with its gathers along `axis` of what it was given in units of at least `limit` bytes, each one ahead.

    The bytes are those of the wholes, on a device. Members of a unit have the same dtype and mesh.
    """
    units = _units(function, axis, limit)
    if not units:
        return function
    gathers = {op for unit in units for op in unit}
    number = {unit[0]: k for k, unit in enumerate(units)}
    maker = maker_like(function)
    producer = function.producers()
    there: set[Op] = set()
    reached: Value | None = None  # what was computed last
    for op in function.ops:
        if op in number:
            k = number[op]
            for unit in units[k + 1 : k + 2] if k else units[:2]:
                for view in _views(unit, producer):
                    if view not in there:
                        there.add(view)
                        maker.ops.append(view)
                _append(maker, unit, reached)
        if op not in gathers and op not in there:
            maker.ops.append(op)
            there.add(op)
            if op.outputs and not op.spec.alias:
                reached = op.outputs[0]
    return maker.finalize()


def _units(function: Function, axis: str, limit: float) -> list[list[Op]]:
    """The gathers of what a body was given, in the order in which they are needed."""
    given = set(function.inputs)
    units: list[list[Op]] = []
    room = False
    kind: object = None
    size = 0
    for op in function.ops:
        if op.spec.alias and given.issuperset(op.inputs):
            given.update(op.outputs)
        t = op.outputs[0].type if op.spec is _GATHER and op.attributes["axis"] == axis else None
        if not isinstance(t, Tensor) or not given.issuperset(op.inputs):
            continue
        if not room or (t.dtype, t.device) != kind:
            units.append([])
            kind, size = (t.dtype, t.device), 0
        units[-1].append(op)
        size += t.bytes
        room = size < limit
    return units


def _views(unit: list[Op], producer: Mapping[Value, Op]) -> list[Op]:
    """The views of what the body was given that a unit gathers, in order."""
    found: list[Op] = []
    todo = [v for op in unit for v in op.inputs]
    while todo:
        op = producer.get(todo.pop())
        if op is not None:
            found.append(op)
            todo += op.inputs
    return found[::-1]


def _append(maker: FunctionMaker, unit: list[Op], reached: Value | None) -> None:
    if len(unit) > 1:
        bundle_collective(maker, unit, reached)
    elif reached is None:
        maker.ops.append(unit[0])
    else:
        part = unit[0].inputs[0]
        (part,) = append(maker, _AFTER, (part, reached), NO_ATTRIBUTES, (part.name,), (part.type,))
        maker.ops.append(Op(_GATHER, (part,), unit[0].attributes, unit[0].outputs))
