"""The data of a simulation's figures: bars of a timeline, points of memory curves. Does not need matplotlib.

A row of a timeline is a stream of a device class. Consecutive ops of one kind and one microbatch are merged into one
bar; bars of different microbatches are not merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from distir.executor.simulator import trace
from distir.executor.simulator.maxplus import Call, OpPart
from distir.executor.simulator.memory import Bytes
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.trace import Done, expand, walk
from distir.executor.simulator.work_kinds import BACKWARD, COMPUTE, FORWARD, UPDATE, microbatch_of, pass_of_ops

COLLECTIVE, TRANSFER = "collective", "transfer"
KINDS = (COMPUTE, FORWARD, BACKWARD, UPDATE, COLLECTIVE, TRANSFER)


class Bar(NamedTuple):
    """A bar on one stream: kind of work, microbatch (None: not of a single one), start and duration (s), and the share
    of that time for which the stream is busy."""

    kind: str
    microbatch: int | None
    start: float
    duration: float
    busy: float = 1.0


def bars(simulation: Simulation, compute_only: bool = False) -> list[tuple[str, list[Bar]]]:
    """The rows of a timeline, from the top: a name and its bars in order of time, without idle streams.

    `compute_only`: without streams of communication.
    Rows are in order of device classes, and of each class: compute, collectives by axis, sends, receives.
    """
    program = simulation.program
    kinds = pass_of_ops(program.function)
    found: dict[int, list[Bar]] = {}
    for done in walk(simulation.run):
        microbatch = microbatch_of(done.op)
        for part, end in _parts(done):
            if part.duration:
                kind = _communication(part) if part.communicates else kinds[done.op]
                for s in part.lanes:
                    found.setdefault(s, []).append(Bar(kind, microbatch, end - part.duration, part.duration))
    some = [s for s in found if not compute_only or program.streams[s][1] == COMPUTE]
    order = sorted(some, key=lambda s: _row_order(*program.streams[s]))
    named = [(program.classes.label(program.streams[s][0]), program.streams[s][1], found[s]) for s in order]
    return [(f"{label} {stream}", _joined(row)) for label, stream, row in named]


def coarse(rows: list[tuple[str, list[Bar]]], grain: float) -> list[tuple[str, list[Bar]]]:
    """The rows of a timeline for a drawing in which `grain` seconds cannot be seen: without streams that are busy for
    less. A row of more bars than can be told apart has in each `grain` seconds the kind that takes most of them, and
    how busy it is, in eighths."""
    busy = [(name, row) for name, row in rows if sum([bar.duration for bar in row]) >= grain]
    return [(name, _pixels(row, grain) if len(row) * grain > row[-1].start else row) for name, row in busy]


def _pixels(row: list[Bar], grain: float) -> list[Bar]:
    spent: dict[int, dict[str, float]] = {}
    for bar in row:
        end = bar.start + bar.duration
        for k in range(int(bar.start / grain), int(end / grain) + 1):
            inside = min(end, (k + 1) * grain) - max(bar.start, k * grain)
            kinds = spent.setdefault(k, {})
            kinds[bar.kind] = kinds.get(bar.kind, 0.0) + inside
    runs: list[tuple[str, float, int, int]] = []  # of pixels alike: the first, and the first after them
    for k, kinds in sorted(spent.items()):
        kind, busy = max(kinds, key=kinds.__getitem__), round(8 * sum(kinds.values()) / grain) / 8
        if busy:
            before = runs.pop() if runs and runs[-1][:2] == (kind, busy) and runs[-1][3] == k else (kind, busy, k, k)
            runs.append((kind, busy, before[2], k + 1))
    return [Bar(kind, None, first * grain, (end - first) * grain, busy) for kind, busy, first, end in runs]


def _row_order(c: int, stream: str) -> tuple[int, int, int, str]:
    """The sort key of a stream of class `c`: by kind, then by name, "stage2" before "stage10"."""
    word = stream.split(" ")[0]
    return c, {COMPUTE: 0, "send": 2, "recv": 3}.get(word, 1), len(stream), stream


def _communication(part: OpPart) -> str:
    return COLLECTIVE if part.sources == part.targets else TRANSFER


def _joined(row: list[Bar]) -> list[Bar]:
    """Bars in order of time; adjacent bars of one kind and microbatch are merged."""
    out: list[Bar] = []
    for bar in sorted(row, key=lambda b: b.start):
        if out and out[-1][:2] == bar[:2] and bar.start <= out[-1].start + out[-1].duration:
            out[-1] = out[-1]._replace(duration=bar.start + bar.duration - out[-1].start)
        else:
            out.append(bar)
    return out


def _parts(done: Done) -> Iterator[tuple[OpPart, float]]:
    """The parts of an op, those of a call expanded, and their end times."""
    if isinstance(done.plan, Call):
        for inner in walk(expand(done.plan, done.times, done.run)):
            yield from _parts(inner)
    else:
        yield from zip(done.plan.parts, done.times, strict=False)


def live(simulation: Simulation, classes: Sequence[str] | None = None) -> list[tuple[str, list[tuple[float, Bytes]]]]:
    """Live memory of each device class, or of those named, by name, until the end of the run: see
    `executor.simulator.trace.live`."""
    found, ops = simulation.program.classes, list(walk(simulation.run))
    out: list[tuple[str, list[tuple[float, Bytes]]]] = []
    for c, first in enumerate(found.first):
        if classes is None or found.label(c) in classes:
            points = trace.live(simulation.memory(first), ops, c)
            out.append((found.label(c), [*points, (simulation.seconds, points[-1][1])]))
    return out


def highest(points: list[tuple[float, Bytes]], grain: float) -> list[tuple[float, Bytes]]:
    """Live memory for a drawing in which `grain` seconds cannot be seen: in each of them where it is highest."""
    found: list[tuple[float, Bytes]] = []
    before, end = points[0][1], 0
    for k, inside in groupby(points, lambda point: int(point[0] / grain)):
        here = [size for _, size in inside]
        if end < k:
            found.append((end * grain, before))
        found.append((k * grain, max([before, *here], key=sum)))
        before, end = here[-1], k + 1
    return [*[p for p in found if p[0] < points[-1][0]], points[-1]]
