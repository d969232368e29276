"""Groups optimizers: one op updates all weights whose gradients are ready at the same time.

    %w, %m = SGD(%w0, %g, %m0)            %w, %m, %v, %n = GroupedSGD(%w0, %g, %m0, %v0, %h, %n0, count=2)
    %v, %n = SGD(%v0, %h, %n0)

Optimizer ops are first deferred until their results are used, which makes them consecutive. Of consecutive ones, those
with the same settings whose gradients come from the same collective form a group, so that each group waits for one
collective only. Groups are ordered as their collectives start; gradients that need none come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distir.ir.cached import cached, producers
from distir.ir.function import Attributes, Function, Op, Value
from distir.ops.optim import GROUPED
from distir.transforms.rank.idle import is_idle

Begin = tuple[int, int]
"""The position at which a collective starts: the number of the program's op and, in a call, of the callee's op."""
NO_COLLECTIVE: Begin = (-1, -1)
"""For a value that no collective makes."""


def may_group(op: Op) -> bool:
    """Whether several ops like this can be grouped into one."""
    return op.spec in GROUPED and not op.attributes.get("dampening")


def updates_weights(op: Op) -> bool:
    """Whether the op may update weights in place: a group of optimizers, or an optimizer that can be in one."""
    return op.spec.each is not None or may_group(op)


def group_optimizers(program: Function) -> dict[Function, Function]:
    """Maps the program and each callee to the same function with its optimizers grouped."""
    arrivals = _Arrivals(program)
    return {f: _grouped(f, arrivals) for f in (*program.callees(), program)}


def _grouped(function: Function, arrivals: _Arrivals) -> Function:
    if sum([op.spec in GROUPED for op in function.ops]) < 2:
        return function
    ops: list[Op] = []
    for row in _rows(_deferred(function).ops):
        if len(row) == 1:
            ops += row
            continue
        groups: dict[tuple[Begin, int], list[Op]] = {}
        settings: dict[tuple[object, ...], int] = {}
        for op in row:
            begin = arrivals.of(function, op.inputs[_gradient(op)])
            kind = settings.setdefault(_settings(op), len(settings))
            groups.setdefault((begin, kind), []).append(op)
        ops += [_as_one(groups[key]) for key in sorted(groups)]
    return Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)


def _gradient(op: Op) -> int:
    return 0 if op.spec.gradient is None else op.spec.gradient


@cached
def _deferred(function: Function) -> Function:
    """The function with its optimizers deferred until their results are used."""
    ops: list[Op] = []
    waiting: list[Op] = []
    made: set[Value] = set()
    for op in function.ops:
        if may_group(op) and made.isdisjoint(op.inputs):
            waiting.append(op)
            made.update(op.outputs)
            continue
        if not made.isdisjoint(op.inputs):
            ops += waiting
            waiting, made = [], set()
        ops.append(op)
    ops += waiting
    if ops == list(function.ops):
        return function
    return Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)


def _rows(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """The ops in order; consecutive optimizers that do not depend on each other are in one row."""
    row: list[Op] = []
    made: set[Value] = set()
    for op in ops:
        if row and not (may_group(row[0]) and may_group(op) and made.isdisjoint(op.inputs)):
            yield row
            row, made = [], set()
        row.append(op)
        made.update(op.outputs)
    if row:
        yield row


def _settings(op: Op) -> tuple[object, ...]:
    """Equal for optimizers that can be grouped: the op, its settings, dtype and device, and the numbers they share."""
    t = op.inputs[0].type
    return op.spec, op.attributes.form, len(op.inputs), op.inputs[_own(op) :], t.device, getattr(t, "dtype", None)


def _own(op: Op) -> int:
    """The number of operands that belong to one weight (all but the step): its gradient, and one for each result."""
    return len(op.outputs) + 1


def _as_one(ops: Sequence[Op]) -> Op:
    first, own = ops[0], _own(ops[0])
    if len(ops) == 1:
        return first
    inputs = [v for op in ops for v in op.inputs[:own]] + list(first.inputs[own:])
    attributes: dict[str, Any] = {"count": len(ops), **first.attributes}
    outputs = tuple([v for op in ops for v in op.outputs])
    return Op(GROUPED[first.spec], tuple(inputs), Attributes(attributes), outputs)


class _Arrivals:
    """Finds the collective that makes a value of a program, or of a function that it calls once."""

    def __init__(self, program: Function) -> None:
        self.program = program
        self._makers: dict[Function, Mapping[Value, Op]] = {}
        self._places: dict[Op | Function, dict[Value, int]] = {}
        self._numbers: dict[Function, dict[Op, int]] = {}
        self.calls: dict[Function, list[int]] = {}
        for k, op in enumerate(program.ops):
            if op.callee is not None:
                self.calls.setdefault(op.callee, []).append(k)

    def of(self, f: Function, v: Value) -> Begin:
        """The position of the collective that makes a value, or the bundle that it is a member of.

        NO_COLLECTIVE if it is computed, or if a function that is called several times makes or takes it.
        """
        call = None if f is self.program else self._site(f)
        if f is not self.program and call is None:
            return NO_COLLECTIVE
        path: list[int] = []
        """The indices of the member that is traced in nested bundles, the innermost last."""
        makers = self._producers(f)
        while True:
            op = makers.get(v)
            if op is None:
                if call is None:
                    return NO_COLLECTIVE
                v, f, call = self.program.ops[call].inputs[self._place(f, f.inputs, v)], self.program, None
                makers = self._producers(f)
            elif op.callee is not None:
                if f is not self.program:
                    return NO_COLLECTIVE
                f, call, v = op.callee, self._number(f, op), op.callee.outputs[self._place(op, op.outputs, v)]
                makers = self._producers(f)
            elif op.spec.bundle == "pack" and path:
                v = op.inputs[path.pop()]
            elif op.spec.bundle == "unpack":
                path.append(self._place(op, op.outputs, v))
                v = op.inputs[0]
            elif op.spec.comm is not None and op.inputs and (is_idle(op) or op.spec.alias):
                v = op.inputs[0]
            elif op.spec.comm is None or op.spec.accumulates:
                return NO_COLLECTIVE
            else:
                k = self._number(f, op)
                return (k, -1) if call is None else (call, k)

    def _producers(self, f: Function) -> Mapping[Value, Op]:
        found = self._makers.get(f)
        if found is None:
            found = self._makers[f] = producers(f)
        return found

    def _number(self, f: Function, op: Op) -> int:
        """The number of an op of the function."""
        if f not in self._numbers:
            self._numbers[f] = {x: k for k, x in enumerate(f.ops)}
        return self._numbers[f][op]

    def _place(self, of: Op | Function, values: Sequence[Value], v: Value) -> int:
        """The position of a value among the results of an op, or the inputs of a function."""
        if of not in self._places:
            self._places[of] = {x: place for place, x in enumerate(values)}
        return self._places[of][v]

    def _site(self, f: Function) -> int | None:
        found = self.calls.get(f, ())
        return found[0] if len(found) == 1 else None
