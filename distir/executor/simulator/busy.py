"""Seconds of compute, and intervals in which streams are busy, of each class of devices.

Compute is the sum of the parts on compute streams. A class is busy while any of its streams is: the union of their
intervals. Labels tell parts apart. Calls of one body, or of bodies that are equal up to their mesh, with equal entry
times, up to a shift, have equal intervals, which are computed once: the cost grows with the number of calls, not with
what they contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distir.executor.simulator.intervals import NO_INTERVALS, Intervals, length, merged
from distir.executor.simulator.maxplus import NEVER, Call, Code, OpPart, OpPlan, Slots
from distir.executor.simulator.trace import Run, expand_model
from distir.ir.function import Op

Key = tuple[int, str]
"""A class, and a label."""


class Left(NamedTuple):
    """The result of a run: seconds of compute, and the intervals in which streams were busy, merged."""

    compute: dict[Key, float]
    busy: dict[Key, Intervals]


class Labels(NamedTuple):
    """What labels the parts of an op: `stream` the streams' intervals; `compute` divides a part's seconds of compute
    into (label, seconds). Both are the same for ops of equal `kind` that are planned alike."""

    kind: Callable[[Op], object]
    stream: Callable[[Op, OpPart], str]
    compute: Callable[[Op, OpPart], Iterable[tuple[str, float]]]


ONE = Labels(lambda op: None, lambda op, part: "", lambda op, part: (("", part.duration),))
"""All compute together, all streams together."""


class _Labelled(NamedTuple):
    """The parts of an op that take time, each with its number, and its seconds of compute."""

    parts: list[tuple[Key, int, float]]
    compute: list[tuple[Key, float]]


class _Alike(NamedTuple):
    """Calls that are busy alike: the intervals, the classes that they are of, and the latest entries of the calls."""

    inside: dict[Key, Intervals]
    classes: Mapping[int, int]
    zeros: list[float]


class _Rows(NamedTuple):
    """What all runs of a function have in common: slots and durations of its parts, its calls, its compute in all."""

    parts: dict[Key, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]
    calls: list[Call]
    compute: dict[Key, float]


def busy_times(run: Run, classes: int) -> list[tuple[float, float]]:
    """For each of so many classes: seconds of compute, seconds busy."""
    left = count(run)
    return [(left.compute.get((c, ""), 0.0), length(left.busy.get((c, ""), NO_INTERVALS))) for c in range(classes)]


def count(run: Run, labels: Labels = ONE) -> Left:
    """Compute and busy intervals of a run, by class and label."""
    return _Counter(labels).left(run)


class _Counter:
    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._rows: dict[Code, _Rows] = {}
        self._labelled: dict[tuple[int, object], _Labelled] = {}
        """By the identity of a plan, which all ops of a kind share."""
        self._busy: dict[tuple[Code, Slots, tuple[float, ...]], dict[Key, Intervals]] = {}
        self._floors: dict[tuple[Code, Slots, int], list[float]] = {}

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
        slot = len(code.columns)
        for op, plan in zip(code.function.ops, code.plans, strict=True):
            if isinstance(plan, Call):
                calls.append(plan)
                slot += plan.slots
            elif plan.parts:
                found = self._label(op, plan)
                for key, k, seconds in found.parts:
                    parts.setdefault(key, []).append((slot + k, seconds))
                for key, seconds in found.compute:
                    compute[key] = compute.get(key, 0.0) + seconds
                slot += len(plan.parts)
        alike: dict[tuple[Code, int], list[Call]] = {}
        for call in calls:
            if call.streams:
                alike.setdefault((call.model, id(call.classes)), []).append(call)
        for (model, _), same in alike.items():
            classes = same[0].classes
            for (c, label), seconds in self._rows_of(model).compute.items():
                here = classes.get(c, c), label
                compute[here] = compute.get(here, 0.0) + seconds * len(same)
        return _Rows({key: _arrays(found) for key, found in parts.items()}, calls, compute)

    def _label(self, op: Op, plan: OpPlan) -> _Labelled:
        labels = self._labels
        key = id(plan), labels.kind(op)
        found = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = _Labelled([], [])
            for k, part in enumerate(plan.parts):
                if part.duration:
                    stream = labels.stream(op, part)
                    shares = () if part.communicates else labels.compute(op, part)
                    found.parts.extend([((c, stream), k, part.duration) for c in part.classes])
                    found.compute.extend([((c, label), x) for c in part.classes for label, x in shares])
        return found

    def _busy_in(self, run: Run) -> dict[Key, Intervals]:
        """The intervals in which streams are busy in a run."""
        rows, ready = self._rows_of(run.code), np.array(run.ready)
        busy: dict[Key, list[Intervals]] = {}
        for key, (slots, seconds) in rows.parts.items():
            ends = ready[slots]
            busy[key] = [np.column_stack((ends - seconds, ends))]
        alike: dict[tuple[int, int], _Alike] = {}
        for call, enter in zip(rows.calls, run.entries, strict=True):
            if call.streams:
                latest, classes = max(enter), call.classes
                inside = self._inside(call, enter, latest)
                key = id(inside), id(classes)
                if key not in alike:
                    alike[key] = _Alike(inside, classes, [])
                alike[key].zeros.append(latest)
        for inside, classes, zeros in alike.values():
            begins = np.array(zeros)[:, None, None]
            for (c, label), found in inside.items():
                busy.setdefault((classes.get(c, c), label), []).append((found + begins).reshape(-1, 2))
        return {key: merged(found) for key, found in busy.items()}

    def _inside(self, call: Call, enter: list[float], latest: float) -> dict[Key, Intervals]:
        """The intervals in which streams are busy in a call, relative to its latest entry."""
        key = (call.model, call.live, self._relative(call, enter, latest))
        inside = self._busy.get(key)
        if inside is None:
            inside = self._busy[key] = self._busy_in(expand_model(call, [t - latest for t in enter]))
        return inside

    def _relative(self, call: Call, enter: list[float], latest: float) -> tuple[float, ...]:
        """Entry times relative to the latest; those too early to matter are raised to the floor.

        The latest, as it leaves the others no effect most often: hosts run ahead of devices, or fall behind them, a
        little further with each call.
        """
        key = (call.model, call.live, enter.index(latest))
        floors = self._floors.get(key)
        if floors is None:
            floors = self._floors[key] = _floors(*key)
        return tuple([x if (x := t - latest) > floor else floor for t, floor in zip(enter, floors, strict=True)])


def _arrays(parts: list[tuple[int, float]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    return np.array([slot for slot, _ in parts]), np.array([seconds for _, seconds in parts])


def _floors(body: Code, live: Slots, latest: int) -> list[float]:
    """For each entry the time, relative to that of entry `latest`, below which it has no effect."""
    n = len(body.streams)
    columns = [body.column(k) for k in (*range(n), *(n + j for j in live))]
    if any(isinstance(plan, Call) for plan in body.plans):
        return [NEVER] * len(columns)
    parts = [column.ready[len(body.columns) :] for column in columns]
    floors = [-max([w - v for v, w in zip(parts[latest], x, strict=True) if w != NEVER], default=NEVER) for x in parts]
    floors[latest] = 0.0
    return floors
