"""What each stage of a placed program's cut computes, saves and holds, added up in arrays: one row an op, value or use.

`CutStages` has the same stages as programs, which takes much longer: it is for plans that these sums do not exclude.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distir.ir.function import Op, Value
from distir.ir.type import Tensor, Type
from distir.search.placed_program import PlacedProgram
from distir.search.schedule_bounds import StageMemory
from distir.transforms.pipeline.phases import BACKWARD, FORWARD

_NOT_AN_ALIAS, _OF_ANOTHER = -1, -2
"""Instead of the value that a forward value shows a view of: it is no view; the value is not made in the forward
pass."""


@dataclass(frozen=True, slots=True, eq=False)
class NumberedCut:
    """A cut into so many parts: by number of op its stage, whether that runs it (no copies that only other stages use),
    and its kind; 0, which takes nothing, where parts of it are on another stage."""

    parts: int
    stage: np.ndarray
    runs: np.ndarray
    kind: np.ndarray


class _Uses(NamedTuple):
    """Which op, by its number, uses or makes what, by its number."""

    op: np.ndarray
    what: np.ndarray


class _Made(NamedTuple):
    """Values of the forward pass: the op that makes each, its type, and the value that it is a view of."""

    maker: np.ndarray
    type: np.ndarray
    base: np.ndarray


class _Saving(NamedTuple):
    """Uses of values by backward ops, each with what it uses instead of a copy of another stage: `copy` is the op that
    makes the copy, or -1; `value` the original, of the forward pass."""

    op: np.ndarray
    copy: np.ndarray
    value: np.ndarray


class HeldShares(NamedTuple):
    """What share a device has of weights and their state, of what is made of them once a step, of sums over
    microbatches, and of what is saved of a microbatch."""

    weights: float = 1.0
    made: float = 1.0
    sums: float = 1.0
    saved: float = 1.0


WHOLE = HeldShares()


class Numbers:
    """Numbers things in the order in which they are asked for."""

    def __init__(self) -> None:
        self.of: dict[object, int] = {}

    def __call__(self, x: object) -> int:
        return self.of.setdefault(x, len(self.of))


class StageSums:
    """The arrays of a placed program; the same for all cuts."""

    def __init__(self, placed: PlacedProgram, phase: Mapping[Op, str]) -> None:
        number = {op: i for i, op in enumerate(placed.timed)}
        self._kind = np.array([placed.kind[op] for op in placed.timed], np.int32)
        self._parts = _Uses(*columns([(number[op], number[whole]) for op, whole in placed.parts.items()], 2))
        self._is_forward = np.array([phase[op] == FORWARD for op in placed.timed], bool)
        self._types = Numbers()
        self._made, self._forward_uses, self._saving = self._values(placed, number)
        self._copies = self._again(placed, number)
        self._once, self._root_types = self._roots(placed)
        self._sources, self._source_types, self._owners, self._state = self._weights(placed)
        self._updates = len(placed.updates)
        rows = [(placed.maker[op.inputs[0]], op.outputs[0].type) for op in placed.sums]
        summed = [(number[op], self._types(t)) for op, t in rows if phase[op] == BACKWARD]
        self._sums = _Uses(*columns(summed, 2))

    def cut(self, at: Sequence[int], parts: int) -> NumberedCut:
        """The cut that has the timed ops on these stages."""
        dead: set[int] = set()
        for i, users in self._copies:
            if not any([at[j] == at[i] and j not in dead for j in users]):
                dead.add(i)
        runs = np.ones(len(at), bool)
        runs[list(dead)] = False
        stage, kind = np.array(at, np.int32), self._kind.copy()
        part, whole = self._parts
        kind[whole[(stage[part] != stage[whole]) | (runs[part] != runs[whole])]] = 0
        return NumberedCut(parts, stage, runs, kind)

    def memory(self, cut: NumberedCut, size: Callable[[Type], float], shares: HeldShares = WHOLE) -> list[StageMemory]:
        """What a device of each stage has; `size` gives the bytes of a type, of which it has these shares."""
        sizes = np.array([size(t) for t in self._types.of], float)  # type: ignore[arg-type]
        op, t = self._sums
        here = cut.runs[op]
        sums = np.bincount(cut.stage[op[here]], sizes[t[here]], cut.parts)
        held, made = shares.weights * self._owned(cut, sizes), shares.made * self._made_once(cut, sizes)
        rows = held, made, shares.saved * self._saved(cut, sizes), shares.sums * sums
        return [StageMemory(*row) for row in zip(*[row.tolist() for row in rows], strict=True)]

    def compute(self, cut: NumberedCut, seconds: np.ndarray) -> np.ndarray:
        """By stage the seconds of compute of a microbatch, given those of each kind of op."""
        return np.bincount(cut.stage, seconds[cut.kind] * cut.runs, cut.parts)

    # ---- what there is

    def _values(self, placed: PlacedProgram, number: Mapping[Op, int]) -> tuple[_Made, _Uses, _Saving]:
        types, values = self._types, Numbers()
        made: list[tuple[int, int, int]] = []
        uses: list[tuple[int, int]] = []
        for i, op in enumerate(placed.timed):
            if not self._is_forward[i]:
                continue
            for v in op.inputs:
                if v in values.of:
                    uses.append((i, values.of[v]))
            base = _NOT_AN_ALIAS if not op.spec.alias else values.of.get(op.inputs[0], _OF_ANOTHER)
            for v in op.outputs:
                values(v)
                made.append((i, types(v.type) if isinstance(v.type, Tensor) and v.type.moves else -1, base))
        saving: list[tuple[int, int, int]] = []
        for i, op in enumerate(placed.timed):
            if self._is_forward[i]:
                continue
            for v in dict.fromkeys(op.inputs):
                first = placed.copied.get(v, v)
                if first in values.of:
                    saving.append((i, number[placed.maker[v]] if v in placed.copied else -1, values.of[first]))
        return _Made(*columns(made, 3)), _Uses(*columns(uses, 2)), _Saving(*columns(saving, 3))

    def _again(self, placed: PlacedProgram, number: Mapping[Op, int]) -> list[tuple[int, list[int]]]:
        """The ops that recompute, last first, and the backward ops that use what each makes."""
        users: dict[int, list[int]] = {}
        for i, op in enumerate(placed.timed):
            if not self._is_forward[i]:
                for v in op.inputs:
                    if v in placed.copied:
                        users.setdefault(number[placed.maker[v]], []).append(i)
        again = [i for i, op in enumerate(placed.timed) if op.outputs[0] in placed.copied]
        return [(i, users.get(i, [])) for i in reversed(again)]

    def _roots(self, placed: PlacedProgram) -> tuple[_Uses, np.ndarray]:
        """Which backward ops use what is made of weights once a step; and the types of that."""
        roots = Numbers()
        rows: list[tuple[int, int]] = []
        for i, op in enumerate(placed.timed):
            if not self._is_forward[i]:
                for v in op.inputs:
                    root, _ = placed.once.get(v, (None, None))
                    if root is not None:
                        rows.append((i, roots(root)))
        types = np.array([self._types(v.type) for v in roots.of], int)  # type: ignore[union-attr]
        return _Uses(*columns(rows, 2)), types

    def _weights(self, placed: PlacedProgram) -> tuple[_Uses, np.ndarray, _Uses, _Uses]:
        """Which forward ops use which weights; the types of the parameters among these; by update, which of them it
        changes, and the types of the state that it updates first."""
        sources = Numbers()
        rows: list[tuple[int, int]] = []
        for i, op in enumerate(placed.timed):
            if self._is_forward[i]:
                for v in op.inputs:
                    _, source = placed.once.get(v, (None, None))
                    if source is not None:
                        rows.append((i, sources(source)))
        of = sources.of
        types = np.array(
            [self._types(v.type) if v.kind == "parameter" else -1 for v in of],  # type: ignore[union-attr]
            int,
        )
        owners: list[tuple[int, int]] = []
        state: list[tuple[int, int]] = []
        counted: set[Value] = set()
        for k, (owned, rest) in enumerate(placed.updates):
            mine = [of[v] for v in owned if v in of]
            if mine:
                owners += [(k, source) for source in mine]
                state += [(k, self._types(v.type)) for v in rest if v not in counted]
                counted.update(rest)
        uses, owns, updates = (_Uses(*columns(x, 2)) for x in (rows, owners, state))
        return uses, types, owns, updates

    # ---- of a cut

    def _saved(self, cut: NumberedCut, sizes: np.ndarray) -> np.ndarray:
        parts, stage, runs = cut.parts, cut.stage, cut.runs
        made, (op, copy, value) = self._made, self._saving
        here = stage[op]
        uses = runs[op] & ((copy < 0) | (stage[copy] != here))
        here, value = here[uses], value[uses]
        while True:  # a view on the stage that makes it: what it shows is saved
            base = made.base[value]
            through = (base != _NOT_AN_ALIAS) & (stage[made.maker[value]] == here)
            if not through.any():
                break
            value = np.where(through, base, value)
            inside = value >= 0
            here, value = here[inside], value[inside]
        there = np.zeros((len(made.maker), parts), bool)
        there[np.arange(len(made.maker)), stage[made.maker]] = True
        there[self._forward_uses.what, stage[self._forward_uses.op]] = True
        kept = np.zeros_like(there)
        kept[value, here] = True
        kept &= there
        return np.where(made.type >= 0, sizes[made.type], 0.0) @ kept

    def _made_once(self, cut: NumberedCut, sizes: np.ndarray) -> np.ndarray:
        parts, stage, runs = cut.parts, cut.stage, cut.runs
        op, root = self._once
        kept = np.zeros((len(self._root_types), parts), bool)
        kept[root[runs[op]], stage[op[runs[op]]]] = True
        return sizes[self._root_types] @ kept

    def _owned(self, cut: NumberedCut, sizes: np.ndarray) -> np.ndarray:
        parts, stage = cut.parts, cut.stage
        home = np.full(len(self._source_types), parts)
        np.minimum.at(home, self._sources.what, stage[self._sources.op])
        own = self._source_types >= 0
        held = np.bincount(home[own], sizes[self._source_types[own]], parts)
        last = np.zeros(self._updates, int)
        np.maximum.at(last, self._owners.op, home[self._owners.what])
        return held + np.bincount(last[self._state.op], sizes[self._state.what], parts)


def columns(rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    """Rows of numbers as arrays, one a column."""
    return np.array(rows, int).reshape(-1, width).T
