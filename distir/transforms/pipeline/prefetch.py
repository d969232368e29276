"""Prefetches sharded weights: gathers several at once, one unit ahead of the compute that needs them.

A unit's gather is issued before the first op that needs the unit before it, so that the next layer's weights are
gathered while a layer is computed. At most two units are whole at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from distir.ir.device import AxisNames, names_of
from distir.ir.function import NO_ATTRIBUTES, Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import Tensor
from distir.transforms.append import append
from distir.transforms.pipeline.bucket import GATHERS, bundle_collective, maker_like

_AFTER = lookup("After")


def gathered_along(function: Function, axes: Collection[str]) -> list[AxisNames]:
    """What values of a body are gathered along: one of these axes, alone or with others."""
    found = [op.attributes["axis"] for op in function.ops if op.spec in GATHERS]
    return [axis for axis in dict.fromkeys(found) if not set(axes).isdisjoint(names_of(axis))]


def prefetch(function: Function, axis: AxisNames, limit: float) -> Function:
    """A body with the gathers along `axis` of its inputs in units of at least `limit` bytes, each issued one ahead.

    The bytes are those of the gathered values, on a device. Members of a unit have the same dtype and mesh.
    """
    units = _units(function, axis, limit)
    if not units:
        return function
    gathers = {op for unit in units for op in unit}
    number = {unit[0]: k for k, unit in enumerate(units)}
    maker = maker_like(function)
    producer = function.producers()
    there: set[Op] = set()
    reached: Value | None = None  # the last computed value: the next gather starts after it
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


def _units(function: Function, axis: AxisNames, limit: float) -> list[list[Op]]:
    """The gathers of a body's weights, inputs that are the same for all microbatches, and of views of them, in program
    order, in units."""
    given = set(function.inputs)
    units: list[list[Op]] = []
    room = False
    kind: object = None
    size = 0
    for op in function.ops:
        if op.spec.alias and given.issuperset(op.inputs):
            given.update(op.outputs)
        t = op.outputs[0].type if op.spec in GATHERS and op.attributes["axis"] == axis else None
        if not isinstance(t, Tensor) or t.over_time.dim is not None or not given.issuperset(op.inputs):
            continue
        if not room or (t.dtype, t.device) != kind:
            units.append([])
            kind, size = (t.dtype, t.device), 0
        units[-1].append(op)
        size += t.bytes
        room = size < limit
    return units


def _views(unit: list[Op], producer: Mapping[Value, Op]) -> list[Op]:
    """The views of the body's inputs that a unit gathers, in topological order."""
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
        maker.ops.append(Op(unit[0].spec, (part,), unit[0].attributes, unit[0].outputs))
