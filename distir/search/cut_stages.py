"""A placed program cut into stages, less the sizes of its types: what all plans with this cut share.

Each stage has a program for each pass, in numbers, so that stages whose ops are alike have equal ones; and the types of
what it holds, saves, sums up, gathers and reduces.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from distir.ir.device import AxisNames
from distir.ir.function import Op, Value
from distir.ir.type import Tensor, Type
from distir.search.placed_program import PlacedProgram, of_replicas
from distir.search.segments import axis_of
from distir.search.stage_sums import NumberedCut
from distir.transforms.pipeline.phases import (
    BACKWARD,
    FORWARD,
    FREE,
    PROLOGUE,
    ends_time,
)


class CellOp(NamedTuple):
    """An op of a pass: its kind, whether it is free, whether ops of the pass use its results, the numbers of its
    operands (those that ops before it make count from 0, others down from -1), and how many results it has."""

    kind: int
    free: bool
    used: bool
    operands: tuple[int, ...]
    results: int


class Handed(NamedTuple):
    """A value that a pass hands to the next stage: its type, its number where it is made and where it is used."""

    type: Type
    made: int
    used: int


class Amounts(NamedTuple):
    """Types of which a device has, gathers or reduces values, by the name of the op that does; and how many."""

    counts: Mapping[tuple[str, Type], int]

    def total(self, each: Callable[[str, Type], float]) -> float:
        """The sum of `each` over all values."""
        return sum([n * each(name, t) for (name, t), n in self.counts.items()])


NOTHING = Amounts({})


class Replicas(NamedTuple):
    """By phase and stage what is gathered and reduced among replicas."""

    gathered: Mapping[tuple[str, int], Amounts]
    reduced: Mapping[tuple[str, int], Amounts]


class CutStages:
    """A placed program's stages, as programs of their passes."""

    def __init__(
        self, placed: PlacedProgram, phase: Mapping[Op, str], stage: Mapping[Op, int], cut: NumberedCut
    ) -> None:
        self._placed, self._parts = placed, cut.parts
        self._cells = _Cells(placed, phase, stage, cut)
        self._replicas: dict[AxisNames, Replicas] = {}

    @cached_property
    def _numbered(self) -> dict[tuple[str, int], tuple[tuple[CellOp, ...], dict[Value, int]]]:
        cells = self._cells
        at = [(word, s) for word in (FORWARD, BACKWARD) for s in range(self._parts)]
        return {x: _pass(cells.ops[x], cells.inputs, self._placed) for x in at}

    @cached_property
    def passes(self) -> dict[tuple[str, int], tuple[CellOp, ...]]:
        """The program of each pass of each stage; equal ones are the same object."""
        known: dict[tuple[CellOp, ...], tuple[CellOp, ...]] = {}
        return {at: known.setdefault(rows, rows) for at, (rows, _) in self._numbered.items()}

    @cached_property
    def hands(self) -> dict[tuple[str, int], tuple[Handed, ...]]:
        """What each pass of each stage hands on."""
        numbers = {at: number for at, (_, number) in self._numbered.items()}
        return {(word, s): _handed(self._cells, word, s, numbers) for word, s in numbers}

    def replicas(self, axis: AxisNames) -> Replicas:
        """What goes along the axis, or the axes, of replicas."""
        if axis not in self._replicas:
            self._replicas[axis] = _replicas(self._placed, self._cells, axis)
        return self._replicas[axis]


class _Cells:
    """The ops of each pass and stage, in program order, as the stages run them: without copies that only others use."""

    def __init__(
        self, placed: PlacedProgram, phase: Mapping[Op, str], stage: Mapping[Op, int], cut: NumberedCut
    ) -> None:
        self.phase, self.stage = phase, stage
        self.ops: dict[tuple[str, int], list[Op]] = defaultdict(list)
        self.inputs: dict[Op, Sequence[Value]] = {}
        """Of each of these ops, with originals in place of other stages' copies."""
        copied, maker = placed.copied, placed.maker
        for op, runs in zip(placed.timed, cut.runs.tolist(), strict=True):
            if not runs:
                continue
            here = stage[op]
            ins: Sequence[Value] = op.inputs
            if copied and any([v in copied for v in ins]):
                ins = [copied[v] if v in copied and stage[maker[v]] != here else v for v in ins]
            self.inputs[op] = ins
            self.ops[phase[op], here].append(op)
        self.maker = maker

    def of(self, v: Value) -> tuple[str, int] | None:
        """The pass and stage that make a value; None if neither pass does."""
        op = self.maker.get(v)
        return (self.phase[op], self.stage[op]) if op in self.inputs else None  # type: ignore[index]


def _pass(
    ops: Sequence[Op], inputs: Mapping[Op, Sequence[Value]], placed: PlacedProgram
) -> tuple[tuple[CellOp, ...], dict[Value, int]]:
    """The program of a pass, and the numbers of its values."""
    used = {v for op in ops for v in inputs[op]}
    number: dict[Value, int] = {}
    made = other = 0
    rows: list[CellOp] = []
    for op in ops:
        for v in inputs[op]:
            if v not in number:
                other -= 1
                number[v] = other
        operands = tuple([number[v] for v in inputs[op]])
        rows.append(
            CellOp(placed.kind[op], op in placed.free, not used.isdisjoint(op.outputs), operands, len(op.outputs))
        )
        for v in op.outputs:
            number[v] = made
            made += 1
    return tuple(rows), number


def _handed(
    cells: _Cells, word: str, s: int, numbers: Mapping[tuple[str, int], Mapping[Value, int]]
) -> tuple[Handed, ...]:
    """The values that a pass of a stage gives to that of the next, in the direction of the pass."""
    after = word, s + 1 if word == FORWARD else s - 1
    if after not in numbers:
        return ()
    taken = dict.fromkeys([v for op in cells.ops[after] for v in cells.inputs[op]])
    given = [v for v in taken if cells.of(v) == (word, s) and isinstance(v.type, Tensor) and v.type.moves]
    return tuple([Handed(v.type, numbers[word, s][v], numbers[after][v]) for v in given])


def _replicas(placed: PlacedProgram, cells: _Cells, axis: AxisNames) -> Replicas:
    gathered: dict[tuple[str, int], Counter[tuple[str, Type]]] = defaultdict(Counter)
    reduced: dict[tuple[str, int], Counter[tuple[str, Type]]] = defaultdict(Counter)
    stage: dict[Value, int] = {}  # of gradients and of their sums
    for (word, s), ops in cells.ops.items():
        if word == BACKWARD:
            stage.update({v: s for op in ops for v in op.outputs})
    for op in placed.reducing:
        comm = op.spec.comm
        if comm is None or op.inputs[0] not in stage:
            continue
        s, along = stage[op.inputs[0]], axis_of(op)
        if along == axis and comm.sums:
            reduced[cells.phase[op], s][op.spec.name, op.inputs[0].type] += 1
        if (along is not None and of_replicas(along)) or ends_time(op):
            stage.update(dict.fromkeys(op.outputs, s))
    for (word, s), ops in cells.ops.items() if axis == "dp" else ():
        for gather in {g for op in ops for v in cells.inputs[op] for g in placed.gathers.get(v, ())}:
            if cells.phase[gather] == FREE:
                gathered[word, s][gather.spec.name, gather.outputs[0].type] += 1
            elif word == FORWARD:
                gathered[PROLOGUE, s][gather.spec.name, gather.outputs[0].type] += 1
    return Replicas(*({at: Amounts(x) for at, x in rows.items()} for rows in (gathered, reduced)))
