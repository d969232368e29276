"""Which phase of a training step each op belongs to: prologue, forward, backward or update.

Read from the dataflow along the time axis: what does not vary in time is done once before (prologue), what depends on
a finished sum over microbatches is done once after (update). Of the rest, backward ops are those that differentiate
another (`of`) or use what one made; in a program with a hand-written backward pass, those that the first output (the
loss) does not need. Free ops on values that do not vary (views of weights, constants, a microbatch's slice of the data)
belong to no phase: every body that needs one has its own.

Where one microbatch is the whole batch, nothing varies in time. Then what depends on data is forward or backward, and
what follows the backward pass and differentiates nothing, update.
"""

from __future__ import annotations

from distir.ir.device import TIME
from distir.ir.function import Function, Op, Value
from distir.ir.kept import kept
from distir.ir.spec import lookup
from distir.ir.type import REPLICATE, Tensor, Type
from distir.transforms.roles import weights
from distir.transforms.spread import DP

_GATHER = lookup("MPIAllgather")
FREE, PROLOGUE, FORWARD, BACKWARD, UPDATE = "", "P", "F", "B", "U"


producers = kept(Function.producers)
"""`Function.producers`, kept with the function."""


@kept
def users(function: Function) -> dict[Value, list[Op]]:
    """The ops that use each value, once an operand."""
    found: dict[Value, list[Op]] = {}
    for op in function.ops:
        for v in op.inputs:
            if v in found:
                found[v].append(op)
            else:
                found[v] = [op]
    return found


def ends_time(op: Op) -> bool:
    """True if the op makes whole what is summed, or joins what is split, over microbatches."""
    if op.spec.comm is None or op.attributes.get("axis") != TIME:
        return False
    before, after = op.inputs[0].type, op.outputs[0].type
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.on(TIME) is not REPLICATE
        and after.on(TIME) is REPLICATE
    )


def varies(v: Value) -> bool:
    """True if the value differs between microbatches."""
    return isinstance(v.type, Tensor) and v.type.on(TIME) is not REPLICATE


class Varying(dict[Type, bool]):
    """`varies` of values of a type, found once a type."""

    def __missing__(self, t: Type) -> bool:
        found = self[t] = isinstance(t, Tensor) and t.on(TIME) is not REPLICATE
        return found


@kept
def phases(function: Function, turn: str = BACKWARD) -> dict[Op, str]:
    """The phase of every op of a program that is placed but not scheduled.

    `turn` is the phase of the ops that start the backward pass, as the gradient of the loss does.
    """
    backward = _backward(function)
    if turn == FORWARD:
        made = {v for op in backward for v in op.outputs}
        backward = {op for op in backward if any(v in made for v in op.inputs)}
    varying = Varying()
    if not any([varying[v.type] for op in function.ops for v in (*op.inputs, *op.outputs)]):
        return _unvaried(function, backward)
    phase: dict[Op, str] = {}
    after: set[Value] = set()
    free = set(function.inputs)  # values that any body can have for nothing, or was given
    late: set[Value] = set()
    results = set(function.outputs)
    ends: list[Op] = []
    parts = set(weights(function))  # what may be kept in parts
    for op in function.ops:
        ins, outs = op.inputs, op.outputs
        if ended := op.spec.comm is not None and ends_time(op):
            ends.append(op)
        if ended or not after.isdisjoint(ins):
            phase[op] = UPDATE
            after.update(outs)
        elif _is_free(op, free, parts) and results.isdisjoint(outs):
            phase[op] = FREE
            free.update(outs)
        elif not any([varying[v.type] for v in (*ins, *outs)]):
            phase[op] = PROLOGUE
            free.update(outs)
            if parts.issuperset(ins):
                parts.update(outs)
        elif op in backward or not late.isdisjoint(ins):
            phase[op] = BACKWARD
            late.update(outs)
        else:
            phase[op] = FORWARD
    producer = producers(function)
    for op in ends:
        if phase[producer[op.inputs[0]]] == FREE:
            phase[producer[op.inputs[0]]] = FORWARD  # what is joined over time must be made somewhere
    return phase


def _is_free(op: Op, free: set[Value], parts: set[Value]) -> bool:
    """Whether the op costs nothing, of what every body can have, or gathers a weight that is kept in parts."""
    if op.spec is _GATHER and op.attributes["axis"] == DP and parts.issuperset(op.inputs):
        return True
    return (op.spec.alias or not op.inputs) and free.issuperset(op.inputs)


def _unvaried(function: Function, backward: set[Op]) -> dict[Op, str]:
    """The phases where nothing varies in time: one microbatch is the whole batch."""
    phase: dict[Op, str] = {}
    parts = set(weights(function))
    depends = {v for v in function.inputs if v not in parts and v.kind != "constant"}
    free, late, results = set(function.inputs), set[Value](), set(function.outputs)
    needed = _needed(function, backward)
    for op in function.ops:
        ins, outs = op.inputs, op.outputs
        if _is_free(op, free, parts) and results.isdisjoint(outs):
            phase[op] = FREE
            free.update(outs)
        elif depends.isdisjoint(ins):
            phase[op] = PROLOGUE
            free.update(outs)
            if parts.issuperset(ins):
                parts.update(outs)
        elif op in backward or not late.isdisjoint(ins):
            phase[op] = BACKWARD if op in needed else UPDATE
            late.update(outs)
        else:
            phase[op] = FORWARD
        if not depends.isdisjoint(ins):
            depends.update(outs)
    return phase


def _needed(function: Function, backward: set[Op]) -> set[Op]:
    """The ops that these need, and themselves."""
    values: set[Value] = set()
    needed: set[Op] = set()
    for op in reversed(function.ops):
        if op in backward or not values.isdisjoint(op.outputs):
            needed.add(op)
            values.update(op.inputs)
    return needed


def _backward(function: Function) -> set[Op]:
    backward = {op for op in function.ops if op.of is not None}
    if backward:
        return backward
    producer = producers(function)
    loss = next((v for v in function.outputs if v not in function.updates), None)
    forward: set[Op] = set()
    todo = [loss] if loss else []
    while todo:
        op = producer.get(todo.pop())
        if op is not None and op not in forward:
            forward.add(op)
            todo += op.inputs
    rest = [op for op in function.ops if op not in forward]
    inputs = set(function.inputs)
    weights = {v for op in forward for k, v in enumerate(op.inputs) if v in inputs and op.spec.weight == k}
    hand_written = any(v in weights for op in rest for v in op.inputs)
    return set(rest) if hand_written else set()
