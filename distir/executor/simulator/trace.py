"""The events of a simulated program, computed on access, and the Chrome trace.

A run records only the end of each part and the entry times of each call. A call is expanded by running its body's loop
again from its entry times.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple, overload

from distir.executor.simulator.categories import CATEGORIES
from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.device_classes import members
from distir.executor.simulator.labels import COMMUNICATION, COMPUTE, RECV, SEND, labels
from distir.executor.simulator.maxplus import NEVER, Call, Code, OpPart, OpPlan
from distir.executor.simulator.memory import Bytes, MemoryUse, Point
from distir.ir.device import Device
from distir.ir.files import written
from distir.ir.function import Function, Op

VIEW = "view"
"""The thread of ops that take no time; they are on no stream."""


@dataclass(frozen=True, slots=True)
class Event:
    """One op on one device: name of the op, start and duration in seconds, device and stream.

    Fields can be read as items, too: `event["dur"]`.
    """

    name: str
    ts: float
    dur: float
    pid: str
    tid: str
    op: Op

    def __getitem__(self, key: str) -> Any:
        if key not in self.__slots__:
            raise KeyError(key)
        return getattr(self, key)


class Run(NamedTuple):
    """One run of a function's loop: when its slots were ready, and the entry times of its calls."""

    code: Code
    ready: list[float]
    entries: list[list[float]]


class Done(NamedTuple):
    """An op in a run: its plan, and the ends of its parts, the times of its views, or the entry times of the call."""

    op: Op
    plan: OpPlan | Call
    times: list[float]
    run: Run


def walk(run: Run) -> Iterator[Done]:
    """The ops of a run, in program order."""
    code, ready = run.code, run.ready
    entries, views = iter(run.entries), iter(code.views)
    slot = len(code.columns)
    for op, plan in zip(code.function.ops, code.plans, strict=True):
        if isinstance(plan, Call):
            yield Done(op, plan, next(entries), run)
            slot += plan.slots
        elif plan.parts:
            end = slot + len(plan.parts)
            yield Done(op, plan, ready[slot:end], run)
            slot = end
        else:
            times = [max([ready[j] for j in slots], default=NEVER) for slots in next(views)]
            yield Done(op, plan, times, run)


def expand(call: Call, enter: Sequence[float], caller: Run) -> Run:
    """The run of a call's body, from its entry times."""
    body = call.body
    clock = [NEVER] * len(body.program_streams)
    for s, t in zip(call.streams, enter, strict=False):
        clock[s] = t
    ready = [max([caller.ready[j] for j in slots], default=NEVER) for slots in call.given]
    return Run(body, ready, body.run(clock, ready))


def expand_model(call: Call, enter: Sequence[float]) -> Run:
    """The run of the model of a call's body, from the call's entry times.

    Inputs that are not live have no time: parts are exact, views may not be.
    """
    body, n = call.model, len(call.streams)
    clock = [NEVER] * len(body.program_streams)
    for s, t in zip(body.streams, enter, strict=False):
        clock[s] = t
    ready = [NEVER] * len(body.columns)
    for j, t in zip(call.live, enter[n:], strict=True):
        ready[j] = t
    return Run(body, ready, body.run(clock, ready))


class Trace(Sequence[Event]):
    """One event per op and device, calls expanded, in program order. Computed on access; `len` computes none."""

    def __init__(self, program: CompiledProgram, run: Run) -> None:
        self.program = program
        self._run = run
        self._done: list[Done] | None = None
        self._before: list[int] | None = None
        self._counts: dict[Code, int] = {}
        self._latest: tuple[int, list[Event]] = (-1, [])

    def __len__(self) -> int:
        return self._count(self._run.code)

    def __repr__(self) -> str:
        return f"Trace of {len(self)} events"

    def __iter__(self) -> Iterator[Event]:
        return self._events(self._run)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1 and start == 0:
                return list(islice(self, stop))
            return [self[i] for i in range(start, stop, step)]
        i = index + len(self) if index < 0 else index
        if not 0 <= i < len(self):
            raise IndexError(f"event {index} of {len(self)}")
        if self._done is None or self._before is None:
            self._done = list(walk(self._run))
            self._before = [0, *accumulate(self._width(d.op, d.plan) for d in self._done)]
        n = bisect_right(self._before, i) - 1
        if self._latest[0] != n:
            self._latest = (n, list(self._of(self._done[n])))
        return self._latest[1][i - self._before[n]]

    def _count(self, code: Code) -> int:
        if code not in self._counts:
            ops = zip(code.function.ops, code.plans, strict=True)
            self._counts[code] = sum(self._width(op, plan) for op, plan in ops)
        return self._counts[code]

    def _width(self, op: Op, plan: OpPlan | Call) -> int:
        return self._count(plan.body) if isinstance(plan, Call) else sum(len(g) for g in self._where(op, plan))

    def _where(self, op: Op, plan: OpPlan) -> list[tuple[Device, ...]]:
        """The devices that take part, by home."""
        values = (*op.inputs, *op.outputs) if plan.parts else op.outputs
        homes = dict.fromkeys(h for v in values if (h := self.program.home(v.type)) is not None)
        if len(homes) == 1:
            return [members(h) for h in homes]
        return [tuple(dict.fromkeys(d for h in homes for d in members(h)))]

    def _events(self, run: Run) -> Iterator[Event]:
        for done in walk(run):
            yield from self._of(done)

    def _of(self, done: Done) -> Iterator[Event]:
        op, plan, times, _ = done
        if isinstance(plan, Call):
            yield from self._events(expand(plan, times, done.run))
            return
        name, classes = op.spec.name, self.program.classes
        streams = self.program.streams
        if plan.parts:
            part_of = {}
            for part, end in zip(plan.parts, times, strict=True):
                for s in part.lanes if part.sources else ():  # no event of compute that is lost beside it
                    part_of[streams[s][0]] = (max(end - part.duration, 0.0), part.duration, streams[s][1])
        else:
            result_classes = [c for group in plan.classes for c in group]
            part_of = {c: (max(t, 0.0), 0.0, VIEW) for c, t in zip(result_classes, times, strict=True)}
        for group in self._where(op, plan):
            for device in group:
                start, duration, stream = part_of[classes.of(device)]  # type: ignore[index]
                yield Event(name, start, duration, repr(device), stream, op)


def write_chrome(path: str | Path, program: CompiledProgram, run: Run, memory: dict[int, MemoryUse]) -> None:
    """Write a trace that Chrome and Perfetto open: a process a device class, a thread a stream, an arrow a transfer, a
    counter of live memory by category. Times are in microseconds, whole nanoseconds: viewers round to these, and drop a
    slice that then seems to begin before the last one ended.
    """
    with written(path) as new, open(new, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for i, event in enumerate(_chrome(program, run, memory)):
            file.write(",\n" if i else "\n")
            file.write(json.dumps(event))
        file.write("\n]}\n")


def _pid(c: int) -> int:
    """The number of a class's process: 0 is that of an idle machine."""
    return c + 1


def _thread(program: CompiledProgram, s: int) -> dict[str, int]:
    """The process and thread of a stream. No thread has the number of a process: that would be its main thread."""
    return {"pid": _pid(program.streams[s][0]), "tid": 1 + len(program.classes.sizes) + s}


def _us(seconds: float) -> float:
    return round(seconds * 1e9) / 1e3


def _length(start: float, end: float) -> float:
    """The microseconds between two times as they are written."""
    return (round(end * 1e9) - round(start * 1e9)) / 1e3


_FIRST = (COMPUTE, SEND, RECV)


def _chrome(program: CompiledProgram, run: Run, memory: dict[int, MemoryUse]) -> Iterator[dict[str, Any]]:
    classes = program.classes
    for c, size in enumerate(classes.sizes):
        name = classes.label(c) + (f" ({size} devices)" if size > 1 else "")
        yield {"name": "process_name", "ph": "M", "pid": _pid(c), "args": {"name": name, "devices": size}}
        yield {"name": "process_sort_index", "ph": "M", "pid": _pid(c), "args": {"sort_index": c}}
    for s, (_, name) in enumerate(program.streams):
        yield {"name": "thread_name", "ph": "M", **_thread(program, s), "args": {"name": name}}
        first = name.split(" ")[0]
        order = _FIRST.index(first) if first in _FIRST else len(_FIRST)
        yield {"name": "thread_sort_index", "ph": "M", **_thread(program, s), "args": {"sort_index": order}}
    arrows = iter(range(1 << 62))
    ops = list(walk(run))
    for done in ops:
        yield from _slices(program, run.code.function, None, done, arrows)
    yield from _counters(memory, ops)


def _slices(
    program: CompiledProgram, function: Function, microbatch: int | None, done: Done, arrows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """The slices of an op, once a class."""
    op, plan, times, _ = done
    if isinstance(plan, Call):
        for inner in walk(expand(plan, times, done.run)):
            yield from _slices(program, plan.body.function, op.attributes.get("mb"), inner, arrows)
        return
    for part, end in zip(plan.parts, times, strict=False):
        if not part.sources:  # compute that is lost beside it
            continue
        start = end - part.duration
        transfers = part.sources != part.targets
        for s in part.lanes:
            side = (SEND if program.streams[s][0] in part.sources else RECV) if transfers else None
            yield {
                **_thread(program, s),
                "cat": COMMUNICATION if part.communicates else COMPUTE,
                "name": op.spec.name,
                "ph": "X",
                "ts": _us(start),
                "dur": _length(start, end),
                "args": labels(op, function, microbatch, side),
            }
        if transfers:
            yield from _arrows(program, op.spec.name, part, start, arrows)


def _arrows(
    program: CompiledProgram, name: str, part: OpPart, start: float, number: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """An arrow from each class that sends to each that receives. It ends in the middle of the slice that receives: at
    its end it would be taken for the next slice's, where that follows at once.
    """
    stream = {program.streams[s][0]: s for s in part.streams}
    for a in part.sources:
        for b in part.targets:
            if stream.get(a) == stream.get(b):  # the root's own share, or one stream without overlap
                continue
            arrow = {"name": name, "cat": "transfer", "id": next(number)}
            yield {**arrow, "ph": "s", "ts": _us(start), **_thread(program, stream[a])}
            middle = start + part.duration / 2
            yield {**arrow, "ph": "f", "bp": "e", "ts": _us(middle), **_thread(program, stream[b])}


def live(use: MemoryUse, ops: Sequence[Done], c: int) -> list[tuple[float, Bytes]]:
    """A class's live memory in order of time: (s, bytes by category), until the next point, which differs. `ops`:
    of the program's run.

    Memory is counted in program order, so the clock is that of what the class computes: while an op runs its highest
    point counts; what happens beside it or in no time at all stands at the end of the op before.
    """
    points = [(0.0, use.start)]
    _follow(use.curve, ops, c, (0,) * len(use.start), use.start, 0.0, points)
    return points


def _follow(
    curve: Sequence[Point],
    ops: Sequence[Done],
    c: int,
    base: Bytes,
    before: Bytes,
    now: float,
    points: list[tuple[float, Bytes]],
) -> float:
    """Add the points of a run of a function, which are above `base`. `before` is live when it begins; `now`, which is
    also returned, is when what the class computed last has ended."""
    for point in curve:  # a device may come to ops in another order than the program's
        done, after = ops[point.op], _sum(base, point.after)
        if isinstance(done.plan, Call):
            now = _follow(
                point.inside, list(walk(expand(done.plan, done.times, done.run))), c, before, before, now, points
            )
        else:
            begin, now = _computing(done.plan, done.times, c) or (now, now)
            _add(points, begin, _sum(base, point.highest))
        _add(points, now, after)
        before = after
    return now


def _add(points: list[tuple[float, Bytes]], t: float, size: Bytes) -> None:
    if size != points[-1][1]:
        points.append((t, size))


def _sum(base: Bytes, more: Bytes) -> Bytes:
    return tuple([a + b for a, b in zip(base, more, strict=True)])


def _computing(plan: OpPlan, times: Sequence[float], c: int) -> tuple[float, float] | None:
    """When a class began and ended to compute in an op, None if it does not."""
    spans = [
        (end - part.duration, end)
        for part, end in zip(plan.parts, times, strict=False)
        if not part.communicates and c in part.classes
    ]
    return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None


def _counters(memory: dict[int, MemoryUse], ops: Sequence[Done]) -> Iterator[dict[str, Any]]:
    for c, use in memory.items():
        for t, size in live(use, ops, c):
            args = dict(zip(CATEGORIES, size, strict=True))
            yield {"name": "live memory (bytes)", "ph": "C", "pid": _pid(c), "ts": _us(t), "args": args}
