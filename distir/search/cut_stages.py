"""A placed program cut into stages, less the sizes of its types: what all plans with this cut share.

Each stage has a program for each pass, in numbers, so that stages whose ops are alike have equal ones; and what it
hands on, gathers and reduces. What does not depend on the cut is kept in arrays, a row an op, value or use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from distir.ir.device import AxisNames
from distir.ir.function import Op, Value
from distir.ir.type import Tensor, Type
from distir.search.placed_program import PlacedProgram, of_replicas
from distir.search.segments import axis_of
from distir.search.shared_buckets import may_share
from distir.search.stage_sums import NumberedCut, Numbers, columns
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, FREE, PROLOGUE, UPDATE, ends_time

_PASSES = FORWARD, BACKWARD
_NONE = -1


class CellOp(NamedTuple):
    """An op of a pass: its kind, whether it is free, whether ops before it run as parts of it, whether ops of the pass
    use its results, the numbers of its operands (those that ops before it make count from 0, others down from -1), and
    how many results it has."""

    kind: int
    free: bool
    fused: bool
    used: bool
    operands: tuple[int, ...]
    results: int


class Handed(NamedTuple):
    """A value that a pass hands to the next stage: its type, its number where it is made and where it is used."""

    type: Type
    made: int
    used: int


Cell = tuple[str, int]
"""A phase and a stage."""


AMove = TypeVar("AMove")
"""What is known of a gather or a reduction."""
Moves = tuple[tuple[int, AMove], ...]
"""What ops of a pass gather first, or make that is reduced: their places in the pass, ascending, and what of each."""


class Replicas(NamedTuple, Generic[AMove]):
    """Gathers and reductions among replicas, by phase and stage. What is gathered in the prologue has its places in the
    forward pass, what is reduced in the update has them in the backward pass."""

    gathered: Mapping[Cell, Moves[AMove]]
    reduced: Mapping[Cell, Moves[AMove]]


class _Moved(NamedTuple):
    """What is gathered or reduced: rows of an op, by its number, and what it is of, whose `phase`, and kind are known;
    `kinds` are the names of the collectives, the types of what they move, and whether sums are made of the results."""

    op: np.ndarray
    what: np.ndarray
    kind: np.ndarray
    phase: np.ndarray
    kinds: Sequence[tuple[str, Type, bool]]


class StagePrograms:
    """The ops of both passes of a placed program, in numbers: the same for all cuts."""

    def __init__(self, placed: PlacedProgram, phase: Mapping[Op, str]) -> None:
        number = {op: i for i, op in enumerate(placed.timed)}
        timed = self.timed = placed.timed
        self.bucketed = placed.bucketed
        self.is_backward = np.array([phase[op] == BACKWARD for op in timed], bool)
        self.free = np.array([op in placed.free for op in timed], bool)
        wholes = set(placed.parts.values())
        self.fused = np.array([op in wholes for op in timed], bool)
        self.results = np.array([len(op.outputs) for op in timed], int)
        self.inputs = np.array([len(op.inputs) for op in timed], int)
        values = Numbers()
        self.types = Numbers()
        made = [(number[op], k, values(v)) for op in timed for k, v in enumerate(op.outputs)]
        uses = [(number[op], values(v)) for op in timed for v in op.inputs]
        self.use_op, self.use_value = columns(uses, 2)
        self.maker = np.full(len(values.of), _NONE)
        self.output = np.zeros(len(values.of), int)
        ops, outputs, which = columns(made, 3)
        self.maker[which], self.output[which] = ops, outputs
        self.original = np.full(len(values.of), _NONE)
        """Of what is recomputed."""
        for v, first in placed.copied.items():
            if v in values.of and first in values.of:
                self.original[values.of[v]] = values.of[first]
        self.type = np.array([self._handable(v) for v in values.of], int)  # type: ignore[arg-type]
        self.reducing = _reducing(placed, number, phase)
        self.gathering = _gathering(placed, number, phase)
        self.known: dict[tuple[bytes, ...], tuple[CellOp, ...]] = {}
        """Programs of passes: equal ones are the same object."""

    def _handable(self, v: Value) -> int:
        return self.types(v.type) if isinstance(v.type, Tensor) and v.type.moves else _NONE


def _reducing(placed: PlacedProgram, number: Mapping[Op, int], phase: Mapping[Op, str]) -> dict[AxisNames, _Moved]:
    """By axis of replicas what is reduced, with the backward op that makes it, or what it is the sum of."""
    origin = {v: i for op, i in number.items() if phase[op] == BACKWARD for v in op.outputs}
    rows: dict[AxisNames, list[tuple[int, int, int, int]]] = {}
    kinds: dict[AxisNames, Numbers] = {}
    summed = {op.inputs[0] for op in placed.reducing if ends_time(op)}
    for op in placed.reducing:
        comm, axis = op.spec.comm, axis_of(op)
        if comm is None or op.inputs[0] not in origin:
            continue
        at = origin[op.inputs[0]]
        if comm.sums and axis is not None:
            kind = kinds.setdefault(axis, Numbers())((op.spec.name, op.inputs[0].type, op.outputs[0] in summed))
            rows.setdefault(axis, []).append((at, 0, kind, int(phase[op] == UPDATE)))
        if (axis is not None and of_replicas(axis)) or ends_time(op):
            origin.update(dict.fromkeys(op.outputs, at))
    return {axis: _Moved(*columns(x, 4), list(kinds[axis].of)) for axis, x in rows.items()}  # type: ignore[arg-type]


def _gathering(placed: PlacedProgram, number: Mapping[Op, int], phase: Mapping[Op, str]) -> _Moved:
    """Which gathers of weights ops use; the `phase` of one that is not made again for each pass is 1."""
    gathers, kinds = Numbers(), Numbers()
    rows: list[tuple[int, int, int, int]] = []
    for op, i in number.items():
        for g in dict.fromkeys([g for v in op.inputs for g in placed.gathers.get(v, ())]):
            kind = kinds((g.spec.name, g.outputs[0].type, False))
            rows.append((i, gathers(g), kind, int(phase[g] != FREE)))
    return _Moved(*columns(rows, 4), list(kinds.of))  # type: ignore[arg-type]


class CutStages:
    """A cut's stages, as programs of their passes."""

    def __init__(self, programs: StagePrograms, cut: NumberedCut) -> None:
        self._all, self.parts = programs, cut.parts
        p, parts = programs, cut.parts
        cell = np.where(cut.runs, p.is_backward * parts + cut.stage, _NONE)
        here = np.flatnonzero(cut.runs)
        self._ops = here[np.argsort(cell[here], kind="stable")]
        """In the order of passes, stages and program."""
        bounds = np.arange(2 * parts + 1)
        self._first = np.searchsorted(cell[self._ops], bounds)
        self._stage, self._kind = cut.stage, cut.kind
        self._place = np.full(len(cell), _NONE)
        """Of each op in its pass."""
        self._place[self._ops] = np.arange(len(self._ops)) - self._first[cell[self._ops]]
        count = p.results[self._ops]
        before = np.cumsum(count) - count
        base = np.zeros(len(cell), int)
        base[self._ops] = before - np.append(before, 0)[self._first[cell[self._ops]]]
        value, copied = p.use_value, p.original[p.use_value]
        elsewhere = (copied != _NONE) & (cut.stage[p.maker[value]] != cut.stage[p.use_op])
        value = np.where(elsewhere, copied, value)  # with originals in place of other stages' copies
        uses = np.flatnonzero(cut.runs[p.use_op])
        uses = uses[np.argsort(cell[p.use_op[uses]], kind="stable")]
        self._first_use = np.searchsorted(cell[p.use_op[uses]], bounds)
        value, user = value[uses], cell[p.use_op[uses]]
        maker = p.maker[value]
        makes = np.where(maker == _NONE, _NONE, cell[maker])
        inside = makes == user
        number = np.where(inside, base[maker] + p.output[value], 0)
        outside = np.flatnonzero(~inside)
        key = user[outside] * len(p.maker) + value[outside]
        _, first, same = np.unique(key, return_index=True, return_inverse=True)
        turn = np.empty(len(first), int)
        in_turn = np.argsort(first)
        turn[in_turn] = np.arange(len(first))
        passes = user[outside[first[in_turn]]]
        from_here = np.searchsorted(passes, bounds)
        number[outside] = -(turn[same] - from_here[user[outside]] + 1)
        self._operands = number
        self._used = np.zeros(len(cell), bool)
        self._used[maker[inside]] = True
        taken = outside[first[in_turn]]  # what passes take of others, each once, in order
        handed = (makes[taken] >= 0) & (p.type[value[taken]] != _NONE)
        self._taken = taken[handed]
        self._taken_value, self._taken_by = value[self._taken], user[self._taken]
        self._taken_of, self._made = makes[self._taken], base[maker[self._taken]] + p.output[self._taken_value]

    def replicas(self, axis: AxisNames, move: Callable[[str, Type, bool], AMove]) -> Replicas[AMove]:
        """What goes along the axis, or the axes, of replicas; `move` is given the name of a collective, the type of
        what it moves, and whether the result of each microbatch is added to a sum."""
        p, moved = self._all, self._all.reducing.get(axis)
        reduced = {} if moved is None else self._by_cell(moved, move, (BACKWARD, UPDATE))
        if axis != "dp":
            return Replicas({}, reduced)
        rows = p.gathering
        runs = np.flatnonzero(self._place[rows.op] != _NONE)
        backward = p.is_backward[rows.op]
        once_in_a_pass = (self._stage[rows.op] * 2 + backward) * (1 + rows.what.max(initial=0)) + rows.what
        here = runs[np.unique(once_in_a_pass[runs], return_index=True)[1]]
        here = here[(rows.phase[here] == 0) | ~backward[here]]
        phase = np.where(rows.phase[here] == 0, backward[here], 2)
        once = _Moved(rows.op[here], rows.what[here], rows.kind[here], phase, rows.kinds)
        return Replicas(self._by_cell(once, move, (FORWARD, BACKWARD, PROLOGUE)), reduced)

    def _by_cell(
        self, rows: _Moved, move: Callable[[str, Type, bool], AMove], phases: Sequence[str]
    ) -> dict[Cell, Moves[AMove]]:
        each = [move(*kind) for kind in rows.kinds]
        runs = np.flatnonzero(self._place[rows.op] != _NONE)
        cell, place = rows.phase[runs] * self.parts + self._stage[rows.op[runs]], self._place[rows.op[runs]]
        in_turn = np.lexsort((place, cell))
        kinds = rows.kind[runs[in_turn]].tolist()
        moves = list(zip(place[in_turn].tolist(), [each[k] for k in kinds], strict=True))
        bounds = np.searchsorted(cell[in_turn], np.arange(len(phases) * self.parts + 1)).tolist()
        spans = enumerate(itertools.pairwise(bounds))
        return {(phases[k // self.parts], k % self.parts): tuple(moves[a:b]) for k, (a, b) in spans if a < b}

    @cached_property
    def passes(self) -> dict[Cell, tuple[CellOp, ...]]:
        """The program of each pass of each stage; equal ones are the same object."""
        p, known = self._all, self._all.known
        columns = self._kind, p.free, p.fused, self._used, p.results, p.inputs
        each = [x[self._ops] for x in columns]
        found: dict[Cell, tuple[CellOp, ...]] = {}
        for k in range(2 * self.parts):
            ops, uses = slice(*self._first[k : k + 2]), slice(*self._first_use[k : k + 2])
            parts = *[x[ops] for x in each], self._operands[uses]
            key = tuple([x.tobytes() for x in parts])
            if key not in known:
                here = [p.timed[i] for i in self._ops[ops].tolist()]
                shared = may_share(here, p.bucketed, True)
                known[key] = _rows([op in shared for op in here], *[x.tolist() for x in parts])
            found[_PASSES[k // self.parts], k % self.parts] = known[key]
        return found

    @cached_property
    def hands(self) -> dict[Cell, tuple[Handed, ...]]:
        """What each pass of each stage hands on, to the next stage in the direction of the pass."""
        types: list[Type] = list(self._all.types.of)  # type: ignore[arg-type]
        found: dict[Cell, list[Handed]] = {(word, s): [] for word in _PASSES for s in range(self.parts)}
        rows = zip(
            self._taken_by.tolist(),
            self._taken_of.tolist(),
            self._all.type[self._taken_value].tolist(),
            self._made.tolist(),
            self._operands[self._taken].tolist(),
            strict=True,
        )
        for by, of, t, made, used in rows:
            word, s = divmod(of, self.parts)
            if by == of + (1 if not word else -1) and by // self.parts == word:
                found[_PASSES[word], s].append(Handed(types[t], made, used))
        return {at: tuple(x) for at, x in found.items()}


def _rows(
    shared: Sequence[bool],
    kinds: Sequence[int],
    free: Sequence[bool],
    fused: Sequence[bool],
    used: Sequence[bool],
    results: Sequence[int],
    inputs: Sequence[int],
    operands: Sequence[int],
) -> tuple[CellOp, ...]:
    rows: list[CellOp] = []
    at = 0
    columns = shared, kinds, free, fused, used, results, inputs
    for later, kind, is_free, is_fused, is_used, count, n in zip(*columns, strict=True):
        takes = 0 if later else kind  # as part of a later op
        rows.append(CellOp(takes, is_free or later, is_fused, is_used, tuple(operands[at : at + n]), count))
        at += n
    return tuple(rows)
