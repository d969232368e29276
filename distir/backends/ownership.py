"""When a running sum may be added to in place: when nothing else can see the tensor.

That is decided in two halves. Statically: the sum is used once, here, and came to this function from a caller
that handed it over, having no other use for it. And as it runs: only a tensor that an `Accumulate` has made
itself (it is then `running`) is changed; the first, which may be a view of anything, is not.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from distir.ir.function import Function, Op, Value

Handed = dict[Function, frozenset[int]]
"""For each function, the inputs that every call of it hands over."""


class Accumulation(NamedTuple):
    """`take`: the total may be changed, if it is running. `give`: the result is running: its one use is the
    next's.
    """

    take: bool
    give: bool


def uses(function: Function) -> Counter[Value]:
    """How often ops and outputs use each value."""
    return Counter([v for op in function.ops for v in op.inputs] + list(function.outputs))


def handed_over(program: Function) -> Handed:
    """What the program's calls hand over: results of calls, used by no other. Calls in callees hand over
    nothing.
    """
    used = uses(program)
    made = {v for op in program.ops if op.callee is not None for v in op.outputs}
    handed: dict[Function, set[int]] = {}
    for op in program.ops:
        if op.callee is not None:
            over = {k for k, v in enumerate(op.inputs) if v in made and used[v] == 1}
            handed.setdefault(op.callee, over).intersection_update(over)
    for callee in program.callees():
        for op in callee.ops:
            if op.callee is not None:
                handed[op.callee] = set()
    return {f: frozenset(over) for f, over in handed.items()}


class Ownership:
    """Which sums of a function are its own, given the positions of inputs that are handed over to it."""

    def __init__(self, function: Function, handed: frozenset[int]) -> None:
        self.used = uses(function)
        own = {v for k, v in enumerate(function.inputs) if k in handed}
        for op in function.ops:
            if op.spec.name == "Accumulate" or (op.spec.name == "Unpack" and self._mine(op.inputs[0], own)):
                own.update(op.outputs)
        self.own = own

    def _mine(self, v: Value, own: set[Value]) -> bool:
        return v in own and self.used[v] == 1

    def accumulation(self, op: Op) -> Accumulation:
        """How an `Accumulate` may be done."""
        total, _ = op.inputs
        return Accumulation(take=self._mine(total, self.own), give=self.used[op.outputs[0]] == 1)
