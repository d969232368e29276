"""Removes the distribution of inputs from a host, which leaves one steady-state iteration of training."""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.type import Tensor


def steady_state_transform(function: Function) -> tuple[Function, list[Value]]:
    """The function with its inputs where their distribution would put them; also returns these inputs.

    Ops that move an input from one device to others are removed, transitively; their results become inputs of the same
    role. Inputs without uses are removed.
    """
    moved: dict[Value, Value] = {v: v for v in function.inputs}  # value -> the input that it is a copy or shard of
    remaining: list[Op] = []
    taken: list[Value] = []
    for op in function.ops:
        if op.spec.comm is not None and op.inputs and all([v in moved for v in op.inputs]) and _distributes(op):
            for v in op.outputs:
                moved[v] = moved[op.inputs[0]]
                taken.append(v)
        else:
            remaining.append(op)
    used = {v for op in remaining for v in op.inputs}.union(function.outputs)
    new = {v: Value(v.name, v.type, moved[v].role) for v in taken if v in used}
    # Names do not change, so they stay unique; types do not, so results are the same Values, and most ops the same Ops.
    maker = FunctionMaker(function.name)
    maker.inputs = [*(v for v in function.inputs if v in used), *new.values()]
    maker.ops = [op if op.of is None and new.keys().isdisjoint(op.inputs) else _on(op, new) for op in remaining]
    maker.set_outputs(new.get(v, v) for v in function.outputs)
    homes: dict[Value, list[Value]] = {}
    for v, here in new.items():
        homes.setdefault(moved[v], []).append(here)
    for after, before in function.updates.items():
        here = [v for v in homes.get(before, ()) if v.type.device is after.type.device]
        if here or before in used:
            maker.updates[new.get(after, after)] = here[0] if here else before
    maker.sources = {new.get(v, v): shape for v, shape in function.sources.items()}
    return maker.finalize(), list(maker.inputs)


def _on(op: Op, new: Mapping[Value, Value]) -> Op:
    """The op with operands replaced by others of the same types."""
    return Op(op.spec, tuple([new.get(v, v) for v in op.inputs]), op.attributes, op.outputs)


def _distributes(op: Op) -> bool:
    """True for a communication op that only moves a value from a single device."""
    before = op.inputs[0].type
    moves = op.spec.bundle is None and op.callee is None
    return moves and isinstance(before, Tensor) and before.device is not None and not before.placements
