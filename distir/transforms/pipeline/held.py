"""Values that live longer than what they are needed for."""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.function import NO_ATTRIBUTES, Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.transforms.pipeline.phases import BACKWARD, phases

_AFTER = lookup("After")


def held(function: Function, ops: Mapping[Value, Op]) -> Function:
    """The function in which these values live until the backward pass comes to the given ops, though it needs them not:
    a gradient that the first op to differentiate one of these takes is available only after the value."""
    waiting: dict[Op, list[Value]] = {}
    for v, op in ops.items():
        waiting.setdefault(op, []).append(v)
    if not waiting:
        return function
    maker = FunctionMaker(function.name)
    maker.inputs.extend(function.inputs)
    maker.reserve([*function.inputs, *[v for op in function.ops for v in op.outputs]])
    phase = phases(function)
    late = {v for op in function.ops if phase[op] == BACKWARD for v in op.outputs}
    became: dict[Op, Op] = {}
    for op in function.ops:
        inputs = op.inputs
        taken = next((x for x in inputs if x in late), None)
        if op.of is not None and op.of in waiting and taken is not None:
            last = taken
            for v in waiting.pop(op.of):
                x = Value(maker.fresh(taken.name), taken.type)
                maker.ops.append(Op(_AFTER, (last, v), NO_ATTRIBUTES, (x,), op.of))
                last = x
            inputs = tuple([last if x is taken else x for x in inputs])
        of = became.get(op.of, op.of) if op.of else None
        changed = inputs != op.inputs or of is not op.of
        became[op] = Op(op.spec, inputs, op.attributes, op.outputs, of) if changed else op
        maker.ops.append(became[op])
    maker.set_outputs(function.outputs)
    maker.updates = dict(function.updates)
    maker.sources = dict(function.sources)
    return maker.finalize()
