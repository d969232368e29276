"""A placed program cut into stages, less the sizes of its types: what all plans with this cut share.

Each stage has a program for each pass, in numbers, so that stages whose ops are alike have equal ones; and the types of
what it holds, saves, sums up, gathers and reduces.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from distir.ir.device import AxisNames
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor, Type
from distir.search.bounds import adds_sums
from distir.search.segments import axis_of, is_free, made_once
from distir.transforms.pipeline.copies import copies
from distir.transforms.pipeline.phases import (
    BACKWARD,
    FORWARD,
    FREE,
    PROLOGUE,
    UPDATE,
    PhaseRules,
    ends_time,
    phases,
)
from distir.transforms.rank.recompose import recompose


class PlacedProgram(NamedTuple):
    """A placed program. `timed` are the ops of both passes; `kind` numbers these by what they take as the ranks run
    them; `kinds` has one of each, and None for what takes nothing of its own; `free` are views. `copied` maps what is
    recomputed to the original. Of each value that no pass makes, but uses: `once` is what `made_once` finds, `gathers`
    are the gathers among replicas that it comes from. `updates` are the parameters and the optimizer state that ops of
    the update use; `sums` complete sums over microbatches; `reducing` are all that communicate after the forward pass.
    """

    function: Function
    rules: PhaseRules
    timed: Sequence[Op]
    free: Collection[Op]
    updates: Sequence[tuple[Sequence[Value], Collection[Value]]]
    sums: Sequence[Op]
    reducing: Sequence[Op]
    kind: Mapping[Op, int]
    kinds: Sequence[Op | None]
    copied: Mapping[Value, Value]
    maker: Mapping[Value, Op]
    once: Mapping[Value, tuple[Value | None, Value | None]]
    gathers: Mapping[Value, Sequence[Op]]
    axes: tuple[AxisNames, ...]
    """Along which its ops communicate, but replicas and those that are reduced with these."""
    sent: Mapping[AxisNames, Mapping[Type, int]]
    """What its ops make along axes of replicas: how many values of each type."""


def placed_program(function: Function, rules: PhaseRules) -> PlacedProgram:
    """A program that is placed, but not cut."""
    maker = {v: op for op in function.ops for v in op.outputs}
    phase = phases(function, rules)
    timed = [op for op in function.ops if phase[op] in (FORWARD, BACKWARD)]
    made = {v for op in timed for v in op.outputs}
    given = dict.fromkeys([v for op in timed for v in op.inputs if v not in made])
    once = {v: made_once(v, maker, phase) for v in given}
    gathers = {v: found for v in given if (found := _gathers(v, maker, phase))}
    axes: dict[AxisNames, None] = {}
    sent: dict[AxisNames, Counter[Type]] = {"dp": Counter()}
    for op in function.ops:
        axis = axis_of(op)
        if axis is not None and of_replicas(axis):
            sent.setdefault(axis, Counter())[op.outputs[0].type] += 1
        elif axis is not None:
            axes[axis] = None
    updates = [
        ([v for v in op.inputs if v.kind == "parameter"], {v for v in op.inputs if v.kind == "state"})
        for op in function.ops
        if phase[op] == UPDATE
    ]
    reducing = [op for op in function.ops if op.spec.comm is not None and op.inputs and phase[op] in (BACKWARD, UPDATE)]
    return PlacedProgram(
        function,
        rules,
        timed,
        {op for op in timed if is_free(op)},
        [(owned, state) for owned, state in updates if owned and state],
        [op for op in reducing if ends_time(op) and op.inputs[0] in made and not adds_sums(maker[op.inputs[0]])],
        reducing,
        *_kinds(function, timed),
        copies(function),
        maker,
        once,
        gathers,
        tuple(axes),
        sent,
    )


def of_replicas(axis: AxisNames) -> bool:
    """Whether replicas communicate along an axis, or along several."""
    return "dp" in ((axis,) if isinstance(axis, str) else axis)


def _kinds(function: Function, timed: Sequence[Op]) -> tuple[dict[Op, int], list[Op | None]]:
    as_run = {op.outputs[0]: op for op in recompose(function).ops if op.outputs}
    kinds: list[Op | None] = [None]
    known: dict[tuple[object, ...], int] = {}
    number: dict[Op, int] = {}
    for op in timed:
        run = as_run.get(op.outputs[0])
        if run is None or is_free(op) or adds_sums(op):
            number[op] = 0  # becomes part of another op, or costs nothing
            continue
        key = run.spec, run.attributes or None, *[v.type for v in run.inputs]
        if key not in known:
            known[key] = len(kinds)
            kinds.append(run)
        number[op] = known[key]
    return number, kinds


def _gathers(v: Value, maker: Mapping[Value, Op], phase: Mapping[Op, str]) -> list[Op]:
    """The gathers among replicas that a weight comes from."""
    found: list[Op] = []
    todo = [v]
    while todo:
        op = maker.get(todo.pop())
        if op is None or phase[op] not in (FREE, PROLOGUE):
            continue
        if op.spec.comm is not None and op.spec.comm.gathers and axis_of(op) == "dp":
            found.append(op)
        elif len(op.inputs) == 1:
            todo += op.inputs
    return found


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

    def __init__(self, placed: PlacedProgram, phase: Mapping[Op, str], stage: Mapping[Op, int], parts: int) -> None:
        self._placed, self._parts = placed, parts
        self._cells = _Cells(placed, phase, stage)
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

    def __init__(self, placed: PlacedProgram, phase: Mapping[Op, str], stage: Mapping[Op, int]) -> None:
        self.phase, self.stage = phase, stage
        self.ops: dict[tuple[str, int], list[Op]] = defaultdict(list)
        self.inputs: dict[Op, Sequence[Value]] = {}
        """Of each of these ops, with originals in place of other stages' copies."""
        copied, maker = placed.copied, placed.maker
        used: set[Value] = set()  # of what is recomputed
        for op in reversed(placed.timed):
            if op.outputs[0] in copied and used.isdisjoint(op.outputs):
                continue
            here = stage.get(op)
            ins: Sequence[Value] = op.inputs
            if copied and any([v in copied for v in ins]):
                ins = [copied[v] if v in copied and stage.get(maker[v]) != here else v for v in ins]
                used.update(ins)
            if here is not None:
                self.inputs[op] = ins
                self.ops[phase[op], here].append(op)
        for ops in self.ops.values():
            ops.reverse()
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
