"""Seconds of compute, and seconds busy, of each class of devices, and in which its communication is exposed.

Compute is the sum of the parts on compute streams. A class is busy while any of its streams is: the union of their
intervals. Communication is exposed while nothing computes; where that of several axes is at a time, the first in the
order tp, other axes, pp counts, so that compute, what is exposed and the rest add up. Calls of one body, or of bodies
that are equal up to their mesh, with equal entry times, up to a shift, have equal intervals, which are computed once:
the cost grows with the number of calls, not with what they contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distir.executor.simulator.labels import COMPUTE, HOST, RECV, SEND
from distir.executor.simulator.maxplus import NEVER, Call, Code
from distir.executor.simulator.trace import Run, expand_model, walk

Interval = tuple[float, float]
ALL = ""
"""The kind of every stream, where kinds are not told apart."""
STAGES_AXIS = "pp"
"""The kind of the streams on which pipeline stages send and receive."""


class Left(NamedTuple):
    """The result of a run by class: seconds of compute, and, by class and kind of streams, the intervals in which it
    was busy, merged."""

    compute: dict[int, float]
    busy: dict[tuple[int, str], list[Interval]]


class Exposed(NamedTuple):
    """Of a class of devices: seconds of compute, and those of communication that nothing computes beside, by axis."""

    compute: float
    exposed: dict[str, float]


def busy_times(run: Run, classes: int) -> list[tuple[float, float]]:
    """For each of so many classes: seconds of compute, seconds busy."""
    left = _Counter(lambda stream: ALL).left(run)
    return [(left.compute.get(c, 0.0), _length(left.busy.get((c, ALL), []))) for c in range(classes)]


def exposed_times(run: Run, streams: Sequence[tuple[int, str]]) -> list[Exposed]:
    """The exposed communication of each class of a program whose streams are these (class, name)."""
    kinds = [_kind(name) for _, name in streams]
    left = _Counter(kinds.__getitem__).left(run)
    found: list[Exposed] = []
    for c in range(1 + max([c for c, _ in streams], default=-1)):
        covered = left.busy.get((c, COMPUTE), [])
        seconds, parts = _length(covered), dict[str, float]()
        mine = [kind for k, kind in left.busy if k == c and kind != COMPUTE]
        for kind in sorted(mine, key=lambda kind: (kind != "tp", kind == STAGES_AXIS, kind)):
            covered = merged(covered + left.busy[c, kind])
            parts[kind] = _length(covered) - seconds
            seconds += parts[kind]
        found.append(Exposed(left.compute.get(c, 0.0), parts))
    return found


def _kind(name: str) -> str:
    """The kind of a stream: compute, the axis of its collectives, or that of pipeline stages."""
    first = name.partition(" ")[0]
    return COMPUTE if first in (COMPUTE, HOST) else STAGES_AXIS if first in (SEND, RECV) else name


def _length(intervals: Sequence[Interval]) -> float:
    return sum([b - a for a, b in intervals])


class _Counter:
    def __init__(self, kind: Callable[[int], str]) -> None:
        self._kind = kind
        self._memo: dict[tuple[Code, tuple[int, ...], tuple[float, ...]], Left] = {}
        self._floors: dict[tuple[Code, tuple[int, ...]], list[float]] = {}

    def left(self, run: Run) -> Left:
        """Add up a run."""
        compute: dict[int, float] = {}
        busy: dict[tuple[int, str], list[Interval]] = {}
        for done in walk(run):
            if isinstance(done.plan, Call):
                self._add_call(done.plan, done.times, compute, busy)
                continue
            for part, end in zip(done.plan.parts, done.times, strict=False):
                if part.duration:
                    interval = (end - part.duration, end)
                    for c, stream in zip(part.classes, part.streams, strict=True):
                        busy.setdefault((c, self._kind(stream)), []).append(interval)
                        if not part.communicates:
                            compute[c] = compute.get(c, 0.0) + part.duration
        return Left(compute, {key: merged(found) for key, found in busy.items()})

    def _add_call(
        self, call: Call, enter: list[float], compute: dict[int, float], busy: dict[tuple[int, str], list[Interval]]
    ) -> None:
        if not call.streams:
            return
        zero, classes = enter[0], call.classes
        key = (call.model, call.live, self._relative(call, enter))
        left = self._memo.get(key)
        if left is None:
            left = self.left(expand_model(call, [t - zero for t in enter]))
            self._memo[key] = left
        for c, seconds in left.compute.items():
            here = classes.get(c, c)
            compute[here] = compute.get(here, 0.0) + seconds
        for (c, kind), found in left.busy.items():
            busy.setdefault((classes.get(c, c), kind), []).extend([(a + zero, b + zero) for a, b in found])

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
