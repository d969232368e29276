"""Assigns each op of a training step to a phase: prologue, forward, backward or update.

Phases follow from the dataflow along the time axis. Ops on values that do not vary in time run once, before the first
microbatch (prologue); ops that depend on a finished sum over microbatches run once, after the last (update). Of the
rest, backward ops are those that differentiate another op (`of`) or depend on one that does; in a program with a
hand-written backward pass, those that the first output (the loss) does not need. Free ops on values that do not vary
(views of weights, constants, a microbatch's slice of the data) belong to no phase: every body that needs one copies it.

With one microbatch nothing varies in time. Then ops that depend on data are forward or backward, and those that follow
the backward pass and that no gradient needs are update.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from distir.ir.cached import cached, producers
from distir.ir.device import TIME, Mesh, names_of
from distir.ir.function import Function, Op, Value
from distir.ir.type import REPLICATE, Tensor, Type
from distir.transforms.pipeline.copies import copies
from distir.transforms.roles import weights

FREE, PROLOGUE, FORWARD, BACKWARD, UPDATE = "", "P", "F", "B", "U"


class Phase(NamedTuple):
    """A part of a training step. A `timed` one runs once a microbatch, as a cell of a schedule; others once a step."""

    letter: str
    word: str
    body: str
    """The prefix of its functions' names."""
    timed: bool = False
    needs: tuple[tuple[int, str], ...] = ()
    """The cells of the same microbatch that a cell depends on: (offset from its stage, phase)."""
    in_flight: int = 0
    """By how much a cell changes the number of microbatches that a stage has saved values of."""


PHASES = {
    phase.letter: phase
    for phase in (
        Phase(PROLOGUE, "prologue", "prologue"),
        Phase(FORWARD, "forward", "fwd", True, ((-1, FORWARD),), 1),
        Phase(BACKWARD, "backward", "bwd", True, ((0, FORWARD), (1, BACKWARD)), -1),
        Phase(UPDATE, "update", "update"),
    )
}
"""In the order in which they run."""
CELLS = tuple([phase.letter for phase in PHASES.values() if phase.timed])
"""The phases that a schedule orders."""


class PhaseRules(NamedTuple):
    """What decides phases beside the program: the phase of the ops that begin the backward pass (that no other backward
    op feeds), and whether weights that are sharded over replicas are gathered in every pass that uses them (ZeRO 3),
    or once a step. The gathers `kept` are part of the forward pass."""

    loss_gradient: str = BACKWARD
    gathers_again: bool = True
    kept: frozenset[Op] = frozenset()


RULES = PhaseRules()


@cached
def users(function: Function) -> dict[Value, list[Op]]:
    """The ops that use each value, once for each operand that is the value."""
    found: dict[Value, list[Op]] = {}
    for op in function.ops:
        for v in op.inputs:
            if v in found:
                found[v].append(op)
            else:
                found[v] = [op]
    return found


def uses_of(op: Op, used: Mapping[Value, Sequence[Op]], phase: Mapping[Op, str]) -> list[Op]:
    """The ops that use a result, directly or through free ops. `used`: see `users`."""
    found: list[Op] = []
    for use in [use for v in op.outputs for use in used.get(v, ())]:
        found += uses_of(use, used, phase) if phase[use] == FREE else [use]
    return found


def ends_time(op: Op) -> bool:
    """True if the op completes a sum over microbatches, or concatenates values that are split over them."""
    if op.spec.comm is None or op.attributes.get("axis") != TIME:
        return False
    before, after = op.inputs[0].type, op.outputs[0].type
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return before.over_time is not REPLICATE and after.over_time is REPLICATE


@cached
def time_ends(function: Function) -> dict[Op, None]:
    """The ops for which `ends_time` holds, in program order."""
    return dict.fromkeys([op for op in function.ops if op.spec.comm is not None and ends_time(op)])


def varies(v: Value) -> bool:
    """True if the value differs between microbatches."""
    return isinstance(v.type, Tensor) and v.type.on(TIME) is not REPLICATE


class Varying(dict[Type, bool]):
    """Cache of `varies` by type."""

    def __missing__(self, t: Type) -> bool:
        found = self[t] = isinstance(t, Tensor) and t.on(TIME) is not REPLICATE
        return found


@cached
def replica_axes(function: Function) -> tuple[str, ...]:
    """The axes of devices along which data are split: devices along them have replicas, or shards, of the weights."""
    owned = set(weights(function))
    found: dict[str, None] = {}
    for v in function.inputs:
        t = v.type
        if v not in owned and isinstance(t, Tensor) and isinstance(t.device, Mesh):
            for axis in t.device.axes:
                if axis != TIME and t.on(axis).dim is not None:
                    found[axis] = None
    return tuple(found)


def _leading(function: Function, backward: Collection[Op], again: Collection[Value]) -> set[Value]:
    """The values of the forward pass that lead to ops which are differentiated. A backward op of what makes them is not
    of the loss, though it may need no gradient: it transposes a saved value, for example."""
    differentiated = {op.of for op in backward if op.outputs[0] not in again}
    found: set[Value] = set()
    for op in reversed(function.ops):
        if op not in backward and (op in differentiated or not found.isdisjoint(op.outputs)):
            found.update(op.inputs)
    return found


@cached
def phases(function: Function, rules: PhaseRules = RULES) -> dict[Op, str]:
    """The phase of every op of a program that is placed but not scheduled."""
    backward = _backward(function)
    if rules.loss_gradient == FORWARD:
        again = copies(function)
        made = {v for op in backward for v in op.outputs if v not in again}
        leads = _leading(function, backward, again)
        start = {
            op
            for op in backward
            if op.outputs[0] not in again
            and made.isdisjoint(op.inputs)
            and (op.of is None or leads.isdisjoint(op.of.outputs))
        }
        needed = {v for op in start for v in op.inputs}
        for op in reversed(function.ops):
            if op.outputs[0] in again and not needed.isdisjoint(op.outputs):
                start.add(op)
                needed.update(op.inputs)
        backward -= start
    varying = Varying()
    moving = {v for op in function.ops for v in op.outputs if varying[v.type]}
    moving.update([v for v in function.inputs if varying[v.type]])
    if not moving:
        return _unvaried(function, backward, rules)
    phase: dict[Op, str] = {}
    after: set[Value] = set()
    free = set(function.inputs)  # values that any body can take as inputs or recompute at no cost
    late: set[Value] = set()
    results = set(function.outputs)
    ends = time_ends(function)
    parts = set(weights(function))  # weights, and prologue results of weights alone: they may be sharded over replicas
    replicas = replica_axes(function) if rules.gathers_again else ()
    for op in function.ops:
        ins, outs, spec = op.inputs, op.outputs, op.spec
        may_be_free = spec.alias or not ins or (spec.comm is not None and spec.comm.gathers)
        if op in ends or not after.isdisjoint(ins):
            phase[op] = UPDATE
            after.update(outs)
        elif op in rules.kept:
            phase[op] = FORWARD
            free.update(outs)
            parts.update(outs)
        elif may_be_free and _is_free(op, free, parts, replicas) and results.isdisjoint(outs):
            phase[op] = FREE
            free.update(outs)
            if spec.comm is not None and parts.issuperset(ins):  # it may be gathered along a further axis
                parts.update(outs)
        elif moving.isdisjoint(outs) and moving.isdisjoint(ins):
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
            phase[producer[op.inputs[0]]] = FORWARD  # a concatenated value must be made by a body
    return phase


def _is_free(op: Op, free: set[Value], parts: set[Value], replicas: Collection[str]) -> bool:
    """Whether the op is a view or constant of free values, or gathers a weight that is sharded over replicas."""
    comm = op.spec.comm
    if comm is not None and comm.gathers and parts.issuperset(op.inputs):
        return all([name in replicas for name in names_of(op.attributes["axis"])])
    return (op.spec.alias or not op.inputs) and free.issuperset(op.inputs)


def _unvaried(function: Function, backward: set[Op], rules: PhaseRules) -> dict[Op, str]:
    """The phases if nothing varies in time: one microbatch is the whole batch."""
    phase: dict[Op, str] = {}
    parts = set(weights(function))
    depends = {v for v in function.inputs if v not in parts and v.kind != "constant"}
    free, late, results = set(function.inputs), set[Value](), set(function.outputs)
    needed = _needed(function, backward)
    replicas = replica_axes(function) if rules.gathers_again else ()
    for op in function.ops:
        ins, outs = op.inputs, op.outputs
        if op in rules.kept:
            phase[op] = FORWARD
            free.update(outs)
            parts.update(outs)
        elif _is_free(op, free, parts, replicas) and results.isdisjoint(outs):
            phase[op] = FREE
            free.update(outs)
            if op.spec.comm is not None and parts.issuperset(ins):
                parts.update(outs)
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
    """The ops of `backward` and all that they depend on."""
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
