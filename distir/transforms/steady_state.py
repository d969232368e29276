"""One iteration of training: a distributed program without the distribution of its inputs from a host."""

from __future__ import annotations

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
        if op.inputs and all(v in moved for v in op.inputs) and _distributes(op):
            for v in op.outputs:
                moved[v] = moved[op.inputs[0]]
                taken.append(v)
        else:
            kept.append(op)
    used = {v for op in kept for v in op.inputs} | set(function.outputs)
    maker = FunctionMaker(function.name)
    env: dict[Value, Value] = {}
    for v in (*function.inputs, *taken):
        if v in used:
            env[v] = maker.add_input_value(v.name, v.type, moved[v].role)
    for op in kept:
        names = [v.name for v in op.outputs]
        maker.add_op(op.spec, None, [env[v] for v in op.inputs], op.attributes, (), names)
        env.update(zip(op.outputs, maker.ops[-1].outputs, strict=True))
    maker.set_outputs(env[v] for v in function.outputs)
    homes: dict[Value, list[Value]] = {}
    for v in taken:
        if v in env:
            homes.setdefault(moved[v], []).append(env[v])
    for new, old in function.updates.items():
        here = [v for v in homes.get(old, []) if v.type.device is new.type.device]
        if here or old in env:
            maker.updates[env[new]] = here[0] if here else env[old]
    maker.sources = {env[v]: shape for v, shape in function.sources.items()}
    return maker.finalize(), list(maker.inputs)


def _distributes(op: Op) -> bool:
    """True for an op that only moves a value, whole in time, off the one device that holds it."""
    before = op.inputs[0].type
    moves = op.spec.comm is not None and op.spec.bundle is None and op.callee is None
    return moves and isinstance(before, Tensor) and before.device is not None and not before.placements
