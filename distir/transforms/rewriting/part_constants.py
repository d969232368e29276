"""Constant arrays of one number, such as biases of zeros, are made once for each use.

One that several layers share would tie the splits of these layers to each other. A copy costs nothing: it is a view of
a `Constant`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distir.ir.cached import cached
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ops.rules import shape_of
from distir.transforms.rewriting.cleanup import extend
from distir.transforms.rewriting.laws import Law, rewrites

_VIEWS = ("Expand", "Identity", "Reshape", "Transpose")


@cached
@rewrites(Law.SAME)
def part_constants(function: Function) -> Function:
    """The function in which every op has its own copy of each operand that is a view of a `Constant`, and that has more
    than one element. The function itself if no such value is used twice."""
    chains = _chains(function)
    if all(math.prod(shape_of(v)) == 1 for v in chains):  # as mostly
        return function
    used: set[Value] = {v for v in function.outputs if v in chains}
    maker = extend(function)
    ops: list[Op] = []
    made: dict[Op, Op] = {}  # what became of each op, for the backward ops that name it in `of`
    for op in function.ops:
        inputs = list(op.inputs)
        for k, v in enumerate(inputs if op.outputs[0] not in chains else ()):
            if v not in chains or math.prod(shape_of(v)) == 1:
                continue
            if v in used:
                copies = _copies(chains[v], maker)
                ops += copies
                inputs[k] = copies[-1].outputs[0]
            used.add(v)
        of = made.get(op.of) if op.of else None
        same = inputs == list(op.inputs) and of is op.of
        made[op] = op if same else Op(op.spec, tuple(inputs), op.attributes, op.outputs, of)
        ops.append(made[op])
    if len(ops) == len(function.ops):
        return function
    return Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)


def _chains(function: Function) -> dict[Value, list[Op]]:
    """For each value that is a view of a `Constant` of one element the ops that make it, in order."""
    chains: dict[Value, list[Op]] = {}
    constant, views = lookup("Constant"), [lookup(name) for name in _VIEWS]
    for op in function.ops:
        if op.spec is constant and math.prod(shape_of(op.outputs[0])) == 1:
            chains[op.outputs[0]] = [op]
        elif op.spec in views and op.inputs[0] in chains:
            chains[op.outputs[0]] = [*chains[op.inputs[0]], op]
    return chains


def _copies(chain: Sequence[Op], maker: FunctionMaker) -> list[Op]:
    """The ops of a chain once more, with results of their own."""
    made: list[Op] = []
    for op in chain:
        v = op.outputs[0]
        inputs = (made[-1].outputs[0],) if made else ()
        made.append(Op(op.spec, inputs, op.attributes, (Value(maker.fresh(v.name), v.type),), op.of))
    return made
