"""Seconds of compute, and intervals in which streams are busy, of each class of devices.

Compute is the sum of the parts on compute streams. A class is busy while any of its streams is: the union of their
intervals. Labels tell parts apart. Calls of one body, or of bodies that are equal up to their mesh, with equal entry
times, up to a shift, have equal intervals, which are computed once: the cost grows with the number of calls, not with
what they contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from distir.executor.simulator.maxplus import NEVER, Call, Code, OpPart
from distir.executor.simulator.trace import Run, expand_model
from distir.ir.function import Op

Interval = tuple[float, float]
Key = tuple[int, str]
"""A class, and a label."""


class Left(NamedTuple):
    """The result of a run: seconds of compute, and the intervals in which streams were busy, merged."""

    compute: dict[Key, float]
    busy: dict[Key, list[Interval]]


class Labels(NamedTuple):
    """What labels the parts of an op: `stream` the streams' intervals; `compute` divides a part's seconds of compute
    into (label, seconds)."""

    stream: Callable[[Op, OpPart], str]
    compute: Callable[[Op, OpPart], Iterable[tuple[str, float]]]


ONE = Labels(lambda op, part: "", lambda op, part: (("", part.duration),))
"""All compute together, all streams together."""


class _Rows(NamedTuple):
    """What all runs of a function have in common: the (slot, duration) of its parts, its calls, its compute in all."""

    parts: dict[Key, list[tuple[int, float]]]
    calls: list[Call]
    compute: dict[Key, float]


def busy_times(run: Run, classes: int) -> list[tuple[float, float]]:
    """For each of so many classes: seconds of compute, seconds busy."""
    left = count(run)
    return [(left.compute.get((c, ""), 0.0), length(left.busy.get((c, ""), []))) for c in range(classes)]


def count(run: Run, labels: Labels = ONE) -> Left:
    """Compute and busy intervals of a run, by class and label."""
    return _Counter(labels).left(run)


def length(intervals: Iterable[Interval]) -> float:
    """The seconds of disjoint intervals."""
    return sum([b - a for a, b in intervals])


class _Counter:
    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._rows: dict[Code, _Rows] = {}
        self._busy: dict[tuple[Code, tuple[int, ...], tuple[float, ...]], dict[Key, list[Interval]]] = {}
        self._floors: dict[tuple[Code, tuple[int, ...]], list[float]] = {}

    def left(self, run: Run) -> Left:
        """Add up a run."""
        return Left(self._rows_of(run.code).compute, self._busy_in(run))

    def _rows_of(self, code: Code) -> _Rows:
        found = self._rows.get(code)
        if found is None:
            found = self._rows[code] = self._read(code)
        return found

    def _read(self, code: Code) -> _Rows:
        parts: dict[Key, list[tuple[int, float]]] = {}
        calls: list[Call] = []
        compute: dict[Key, float] = {}
        labels, slot = self._labels, len(code.columns)
        for op, plan in zip(code.function.ops, code.plans, strict=True):
            if isinstance(plan, Call):
                calls.append(plan)
                for (c, label), seconds in self._rows_of(plan.model).compute.items() if plan.streams else ():
                    here = plan.classes.get(c, c), label
                    compute[here] = compute.get(here, 0.0) + seconds
                slot += plan.slots
                continue
            for part in plan.parts:
                if part.duration:
                    stream = labels.stream(op, part)
                    shares = () if part.communicates else labels.compute(op, part)
                    for c in part.classes:
                        parts.setdefault((c, stream), []).append((slot, part.duration))
                        for label, seconds in shares:
                            compute[c, label] = compute.get((c, label), 0.0) + seconds
                slot += 1
        return _Rows(parts, calls, compute)

    def _busy_in(self, run: Run) -> dict[Key, list[Interval]]:
        """The intervals in which streams are busy in a run."""
        rows, ready = self._rows_of(run.code), run.ready
        busy = {key: [(ready[j] - d, ready[j]) for j, d in parts] for key, parts in rows.parts.items()}
        for call, enter in zip(rows.calls, run.entries, strict=True):
            if call.streams:
                self._add_call(call, enter, busy)
        return {key: merged(found) for key, found in busy.items()}

    def _add_call(self, call: Call, enter: list[float], busy: dict[Key, list[Interval]]) -> None:
        zero, classes = enter[0], call.classes
        key = (call.model, call.live, self._relative(call, enter))
        inside = self._busy.get(key)
        if inside is None:
            inside = self._busy[key] = self._busy_in(expand_model(call, [t - zero for t in enter]))
        for (c, label), found in inside.items():
            busy.setdefault((classes.get(c, c), label), []).extend([(a + zero, b + zero) for a, b in found])

    def _relative(self, call: Call, enter: Sequence[float]) -> tuple[float, ...]:
        """Entry times relative to the first stream's clock; those too early to matter are raised to the floor."""
        key = (call.model, call.live)
        floors = self._floors.get(key)
        if floors is None:
            floors = self._floors[key] = _floors(call)
        zero = enter[0]
        return tuple([max(t - zero, floor) for t, floor in zip(enter, floors, strict=True)])


def _floors(call: Call) -> list[float]:
    """For each entry the time, relative to the first stream's clock, below which it has no effect."""
    body, n = call.model, len(call.streams)
    columns = [body.column(k) for k in (*range(n), *(n + j for j in call.live))]
    if any(isinstance(plan, Call) for plan in body.plans):
        return [NEVER] * len(columns)
    first = columns[0].ready[len(body.columns) :]
    floors = [0.0]
    for column in columns[1:]:
        here = column.ready[len(body.columns) :]
        floors.append(-max((w - v for v, w in zip(first, here, strict=True) if w != NEVER), default=NEVER))
    return floors


def merged(intervals: list[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same, in order."""
    out: list[Interval] = []
    start = end = NEVER
    for a, b in sorted(intervals):
        if a > end:
            if end > start:
                out.append((start, end))
            start, end = a, b
        elif b > end:
            end = b
    if end > start:
        out.append((start, end))
    return out
