"""The lifetimes of values on each class of devices, in the order in which it runs the ops: what live memory is counted
by, whatever the sizes and categories."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.equal_callees import shapes_of
from distir.ir.function import Function, Op, Value


class Step(NamedTuple):
    """An op on one class: its operands and results there, the values that die with it, whether it is a view, the
    numbers of a call's results that are not needed, and the values freed after it because a reduction in flight used
    them."""

    number: int
    op: Op
    uses: tuple[Value, ...]
    makes: tuple[Value, ...]
    dies: tuple[Value, ...]
    view: bool
    unneeded: frozenset[int] = frozenset()
    released: tuple[Value, ...] = ()


Order = Callable[[Sequence[Op], Sequence[bool]], Sequence[int]]
"""(the program's ops that a device has a part in, which of them it receives by) -> the order in which it comes to them,
as numbers of these ops."""


class Lifetimes:
    """When values are made and die in a program and its callees, class by class; each found on first access.

    The ops are in the order of the program, or in the one that `order` gives.
    """

    def __init__(self, program: CompiledProgram, order: Order | None = None) -> None:
        self.program, self.order = program, order
        self.shapes = shapes_of(program.function)
        self._unwritten = program.unwritten
        self._first: dict[object, Function] = {}
        self._models: dict[Function, tuple[Function, int]] = {}
        self._found: dict[tuple[Function, int, frozenset[int]], tuple[list[Step], list[int]]] = {}
        self._in_flight: dict[Function, dict[Op, set[Value]]] = {}
        self._touching: dict[Function, dict[int, list[tuple[int, bool]]]] = {}

    def touching(self, f: Function) -> dict[int, list[tuple[int, bool]]]:
        """For each class the numbers of the ops of `f` that it has a part in, and whether it holds all their values."""
        if f not in self._touching:
            found: dict[int, list[tuple[int, bool]]] = {}
            if f in self.shapes:  # all on one mesh
                rows = [(n, True) for n in range(len(f.ops))]
                found = self._touching[f] = dict.fromkeys(self.program.classes.homes[self.shapes[f][1]], rows)
                return found
            classes_of, homes_of = self.program.classes_of, self.program.classes.homes
            for n, op in enumerate(f.ops):
                if op.callee in self.shapes:  # all its operands and results are on one mesh
                    for c in homes_of[self.shapes[op.callee][1]]:
                        found.setdefault(c, []).append((n, True))
                    continue
                makes = {classes_of(t) for t in {v.type for v in op.outputs}}
                homes = makes.union([classes_of(t) for t in {v.type for v in op.inputs}])
                if len(homes) > 1 and op.inputs and op.spec.alias:
                    homes = makes  # a part of a larger mesh
                for c in {c for classes in homes for c in classes}:
                    found.setdefault(c, []).append((n, len(homes) == 1))
            self._touching[f] = found
        return self._touching[f]

    def _ordered(self, f: Function, c: int, rows: list[tuple[int, bool]], order: Order) -> list[tuple[int, bool]]:
        classes_of, ops = self.program.classes_of, [f.ops[n] for n, _ in rows]
        receives = [
            not whole and not any(c in classes_of(v.type) for v in op.inputs)
            for op, (_, whole) in zip(ops, rows, strict=True)
        ]
        return [rows[k] for k in order(ops, receives)]

    def equal(self, callee: Function, c: int) -> tuple[Function, int]:
        """The first callee that is equal to a callee on class c up to its mesh, and its class."""
        found = self._models.get(callee)
        if found is None:
            shape = self.shapes.get(callee)
            if shape is None:
                return callee, c
            form, mesh = shape
            first = self._first.setdefault((form, mesh.like), callee)
            found = self._models[callee] = first, self.program.classes.homes[self.shapes[first][1]][0]
        return found

    def steps(self, f: Function, c: int, unneeded: frozenset[int]) -> list[Step]:
        """The ops of `f` on class c, given the numbers of its outputs that are not needed."""
        return self._of(f, c, unneeded)[0]

    def used(self, f: Function, c: int, unneeded: frozenset[int]) -> list[int]:
        """The numbers of the inputs that a body uses on class c, or hands on."""
        return self._of(f, c, unneeded)[1]

    def _of(self, f: Function, c: int, unneeded: frozenset[int]) -> tuple[list[Step], list[int]]:
        key = (f, c, unneeded)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._lifetimes(f, c, unneeded)
        return found

    def _lifetimes(self, f: Function, c: int, unneeded: frozenset[int]) -> tuple[list[Step], list[int]]:
        classes_of = self.program.classes_of
        later = {v for k, v in enumerate(f.outputs) if k not in unneeded}
        steps: list[Step] = []
        rows = self.touching(f).get(c, [])
        if self.order is not None and f is self.program.function:
            rows = self._ordered(f, c, rows, self.order)
        for n, whole in reversed(rows):
            op = f.ops[n]
            makes = op.outputs if whole else tuple([v for v in op.outputs if c in classes_of(v.type)])
            if (callee := op.callee) is not None:
                spare = frozenset([k for k, v in enumerate(op.outputs) if v not in later])
                needed = self.used(*self.equal(callee, c), spare)
                uses = tuple([op.inputs[i] for i in needed])
                dies = tuple([v for v in dict.fromkeys(uses) if v not in later])
                steps.append(Step(n, op, uses, makes, dies, False, spare))
            else:
                uses = op.inputs if whole else tuple([v for v in op.inputs if c in classes_of(v.type)])
                dies = tuple([v for v in uses + makes if v not in later])
                if len(dies) > 1:
                    dies = tuple(dict.fromkeys(dies))
                steps.append(Step(n, op, uses, makes, dies, self.is_view(op)))
            later.update(uses)
        steps.reverse()
        self._hold(f, steps)
        used = [i for i, v in enumerate(f.inputs) if v in later and c in classes_of(v.type)]
        return steps, used

    def _hold(self, f: Function, steps: list[Step]) -> None:
        """Extend the lives of operands of reductions in flight until the next one starts, or the body ends."""
        in_flight = self.in_flight(f)
        if not in_flight:
            return
        begins = [k for k, step in enumerate(steps) if step.op in in_flight]
        for begin, end in itertools.pairwise([*begins, len(steps)]):
            step = steps[begin]
            operands = tuple([v for v in step.dies if v in in_flight[step.op]])
            if operands and end - 1 > begin:
                steps[begin] = step._replace(dies=tuple([v for v in step.dies if v not in operands]))
                steps[end - 1] = steps[end - 1]._replace(released=operands)

    def in_flight(self, f: Function) -> dict[Op, set[Value]]:
        """The reduce-scatters whose results a body only returns, so that they overlap later ops, each with the operands
        that nothing uses after it.
        """
        if f not in self._in_flight and not any([_scatters(op) for op in f.ops]):  # as in most
            self._in_flight[f] = {}
        if f not in self._in_flight:
            reduced: dict[Value, Op] = {}
            used: set[Op] = set()
            last: dict[Value, Op | None] = {}
            for op in f.ops:
                last.update(dict.fromkeys(op.inputs, op))
                if _scatters(op):
                    reduced.update(dict.fromkeys(op.outputs, op))
                handed = [reduced[v] for v in op.inputs if v in reduced]
                if handed and self.is_view(op):
                    reduced.update({y: x for x in handed for y in op.outputs})
                else:
                    used.update(handed)
            last.update(dict.fromkeys(f.outputs))
            found = [op for op in dict.fromkeys(reduced.values()) if op not in used]
            self._in_flight[f] = {op: {v for v in op.inputs if last[v] is op} for op in found}
        return self._in_flight[f]

    def is_view(self, op: Op) -> bool:
        """Whether its results share its operands' buffers."""
        return op in self._unwritten or (
            bool(op.inputs) and self.program.cost.free(op.spec, op.attributes, [v.type for v in op.inputs])
        )


def _scatters(op: Op) -> bool:
    """Whether it is a reduce-scatter."""
    return op.spec.comm is not None and op.spec.comm.scatters
