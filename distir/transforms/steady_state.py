"""One iteration of training: a distributed program without the distribution of its inputs from a host."""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.type import Tensor


def steady_state_transform(function: Function) -> tuple[Function, list[Value]]:
    """The function with what its inputs' distribution makes as inputs, and these inputs.

    An op that moves an input from one device to others is taken away, again and again, and its results become inputs
    of the input's role; an input that nothing uses any more goes.
    """
    moved: dict[Value, Value] = {v: v for v in function.inputs}  # to the input it comes from
    kept: list[Op] = []
    taken: list[Value] = []
    for op in function.ops:
        if op.spec.comm is not None and op.inputs and all([v in moved for v in op.inputs]) and _distributes(op):
            for v in op.outputs:
                moved[v] = moved[op.inputs[0]]
                taken.append(v)
        else:
            kept.append(op)
    used = {v for op in kept for v in op.inputs}.union(function.outputs)
    new = {v: Value(v.name, v.type, moved[v].role) for v in taken if v in used}
    # Names stay, so they are still unique; types stay, so results are the same Values, and most ops the same Ops.
    maker = FunctionMaker(function.name)
    maker.inputs = [*(v for v in function.inputs if v in used), *new.values()]
    maker.ops = [op if op.of is None and new.keys().isdisjoint(op.inputs) else _on(op, new) for op in kept]
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
    """The op on other operands of the same types."""
    return Op(op.spec, tuple([new.get(v, v) for v in op.inputs]), op.attributes, op.outputs)


def _distributes(op: Op) -> bool:
    """True for a communication op that only moves a value, whole in time, off the one device that holds it."""
    before = op.inputs[0].type
    moves = op.spec.bundle is None and op.callee is None
    return moves and isinstance(before, Tensor) and before.device is not None and not before.placements
