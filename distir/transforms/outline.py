"""Runs of ops that compute, as functions of their own: for a backend that compiles each of them as a whole.

    %a = MatMul(%x, %w)                   %b = Call(%x, %w)        # part0: MatMul, Relu
    %b = Relu(%a)                         %c = MPIAllreduce(%b)
    %c = MPIAllreduce(%b)                 %e = Call(%x, %c)        # part1: Neg, Mul
    %d = Neg(%x)
    %e = Mul(%c, %d)

Which ops join a run is for the caller to say. What is communicated is on its way for a while, but a call waits for all
that it is given: so a run ends before the first op that uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from distir.ir.function import Attributes, Function, Op, Value
from distir.ir.spec import lookup

CALL = lookup("Call")
_FEWEST = 2
"""Fewer ops than these stay where they are."""
Sort = Literal["joins", "stays", "moves"]
"""An op joins a run, or stays outside, before or after it; or it moves data: then runs end where it begins, and what it
gives is on its way."""


def outline(function: Function, sort: Callable[[Op], Sort]) -> Function:
    """The function, and all that it calls, with runs of at least two ops as calls.

    Inputs, outputs and what is computed stay the same. Which forward op one is `of` is not kept: it may be in another
    run.
    """
    return _outlined(function, sort, {})


def _outlined(function: Function, sort: Callable[[Op], Sort], done: dict[Function, Function]) -> Function:
    if function not in done:
        uses = _uses(function.ops)
        uses.update(function.outputs)
        ops: list[Op] = []
        parts = 0
        for run in _runs(function, sort):
            inside = _uses(run)
            results = [v for op in run for v in op.outputs if uses[v] > inside[v]]
            if len(run) >= _FEWEST and results:
                ops.append(_call(f"{function.name}.part{parts}", run, results))
                parts += 1
            else:
                ops += [_calling(op, sort, done) for op in run]
        f = function
        done[function] = Function(f.name, f.inputs, tuple(ops), f.outputs, f.updates, f.sources)
    return done[function]


def _uses(ops: Iterable[Op]) -> Counter[Value]:
    return Counter([v for op in ops for v in op.inputs])


def _runs(function: Function, sort: Callable[[Op], Sort]) -> Iterator[list[Op]]:
    """The ops in order, those of a run together. What stays goes before a run that it does not need, else after it."""
    run: list[Op] = []
    after: list[Op] = []
    of_run: set[Value] = set()
    of_after: set[Value] = set()
    moved: dict[Value, frozenset[Op]] = {}
    """By which ops: what these give comes together."""
    waited: set[Op] = set()
    """For these a run has waited."""
    for op in function.ops:
        place = sort(op)
        awaits = {m for v in op.inputs for m in moved.get(v, ())} - waited
        if place == "moves" or (place == "stays" and awaits):
            moved.update(dict.fromkeys(op.outputs, frozenset((op,) if place == "moves" else awaits)))
        if place == "stays" and of_run.isdisjoint(op.inputs) and of_after.isdisjoint(op.inputs):
            yield [op]
        elif place == "stays":
            after.append(op)
            of_after.update(op.outputs)
        else:
            if place == "moves" or awaits or not of_after.isdisjoint(op.inputs):
                yield from _ended(run, after)
                run, after, of_run, of_after = [], [], set(), set()
            if place == "moves":
                yield [op]
            else:
                waited |= awaits
                run.append(op)
                of_run.update(op.outputs)
    yield from _ended(run, after)


def _ended(run: list[Op], after: list[Op]) -> Iterator[list[Op]]:
    """A run, and then each op that has stayed behind it."""
    if run:
        yield run
    for op in after:
        yield [op]


def _calling(op: Op, sort: Callable[[Op], Sort], done: dict[Function, Function]) -> Op:
    """The op; if it is a call, of what its callee has become."""
    if op.callee is None:
        return op if op.of is None else Op(op.spec, op.inputs, op.attributes, op.outputs)
    attributes = Attributes({**op.attributes, "callee": _outlined(op.callee, sort, done)})
    return Op(op.spec, op.inputs, attributes, op.outputs)


def _call(name: str, ops: Sequence[Op], results: Sequence[Value]) -> Op:
    """The call of a function of these ops, whose Values are all its own."""
    new: dict[Value, Value] = {}

    def own(values: Sequence[Value]) -> tuple[Value, ...]:
        new.update((v, Value(v.name, v.type)) for v in values if v not in new)
        return tuple([new[v] for v in values])

    made = {v for op in ops for v in op.outputs}
    operands = tuple(dict.fromkeys([v for op in ops for v in op.inputs if v not in made]))
    inputs = own(operands)
    body = tuple([Op(op.spec, own(op.inputs), op.attributes, own(op.outputs)) for op in ops])
    callee = Function(name, inputs, body, own(results))
    return Op(CALL, operands, Attributes(callee=callee), tuple(results))
