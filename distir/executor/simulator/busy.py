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
from distir.executor.simulator.trace import Done, Run, expand_model, walk

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

    stream: Callable[[Done, OpPart], str]
    compute: Callable[[Done, OpPart], Iterable[tuple[str, float]]]


ONE = Labels(lambda done, part: "", lambda done, part: (("", part.duration),))
"""All compute together, all streams together."""


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
        self._memo: dict[tuple[Code, tuple[int, ...], tuple[float, ...]], Left] = {}
        self._floors: dict[tuple[Code, tuple[int, ...]], list[float]] = {}

    def left(self, run: Run) -> Left:
        """Add up a run."""
        compute: dict[Key, float] = {}
        busy: dict[Key, list[Interval]] = {}
        labels = self._labels
        for done in walk(run):
            if isinstance(done.plan, Call):
                self._add_call(done.plan, done.times, compute, busy)
                continue
            for part, end in zip(done.plan.parts, done.times, strict=False):
                if part.duration:
                    interval = (end - part.duration, end)
                    stream = labels.stream(done, part)
                    shares = () if part.communicates else labels.compute(done, part)
                    for c in part.classes:
                        busy.setdefault((c, stream), []).append(interval)
                        for label, seconds in shares:
                            compute[c, label] = compute.get((c, label), 0.0) + seconds
        return Left(compute, {key: merged(found) for key, found in busy.items()})

    def _add_call(
        self, call: Call, enter: list[float], compute: dict[Key, float], busy: dict[Key, list[Interval]]
    ) -> None:
        if not call.streams:
            return
        zero, classes = enter[0], call.classes
        key = (call.model, call.live, self._relative(call, enter))
        left = self._memo.get(key)
        if left is None:
            left = self.left(expand_model(call, [t - zero for t in enter]))
            self._memo[key] = left
        for (c, label), seconds in left.compute.items():
            here = classes.get(c, c), label
            compute[here] = compute.get(here, 0.0) + seconds
        for (c, label), found in left.busy.items():
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
