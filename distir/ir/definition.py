"""The definition of an op by simpler ops, as a function of its operands."""

from __future__ import annotations

from typing import NamedTuple

from distir.ir.function import Function, FunctionMaker, Op, Value

WHERE = frozenset({"device", "place"})
"""Attributes that only say where an op is."""


class Definition(NamedTuple):
    """An op on whole operands, on no device, and the function of the same operands that defines it."""

    op: Op
    parts: Function


def definition_of(op: Op) -> Definition | None:
    """The definition of an op, placed or not; None if it has none. Raises IRTypeError if its parts do not fit."""
    rule = op.spec.meaning
    if rule is None:
        return None
    ins, outs = [tuple([Value(v.name, v.type.erased()) for v in row]) for row in (op.inputs, op.outputs)]
    attributes = op.attributes if WHERE.isdisjoint(op.attributes) else op.attributes.without(*WHERE)
    one = Op(op.spec, ins, attributes, outs)
    maker = FunctionMaker(op.op_type)
    maker.inputs.extend(ins)
    results = rule(maker, one)
    if results is None:
        return None
    maker.set_outputs(results)
    return Definition(one, maker.finalize())
