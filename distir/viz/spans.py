"""The data of a simulation's figures: bars of a timeline, points of memory curves. Does not need matplotlib.

A row of a timeline is a stream of a device class. Consecutive ops of one kind and one microbatch are merged into one
bar; bars of different microbatches are not merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from distir.executor.simulator import trace
from distir.executor.simulator.categories import leaves
from distir.executor.simulator.maxplus import Call, OpPart
from distir.executor.simulator.memory import Bytes
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.trace import Done, Span, expand, walk, widen
from distir.ir.device import TIME, Device, Mesh
from distir.ir.function import Function, Op, Value

FORWARD, BACKWARD, UPDATE, COMPUTE = "forward", "backward", "update", "compute"
COLLECTIVE, TRANSFER = "collective", "transfer"
KINDS = (COMPUTE, FORWARD, BACKWARD, UPDATE, COLLECTIVE, TRANSFER)


class Bar(NamedTuple):
    """A bar on one stream: kind of work, microbatch (None: not of a single one), start and duration (s)."""

    kind: str
    microbatch: int | None
    start: float
    duration: float


def bars(simulation: Simulation) -> list[tuple[str, list[Bar]]]:
    """The rows of a timeline, from the top: a name and its bars in order of time, without idle streams.

    Rows are in order of device classes, and of each class: compute, collectives by axis, sends, receives.
    """
    program = simulation.program
    kinds = _kinds(program.function)
    found: dict[int, list[Bar]] = {}
    for done in walk(simulation.run):
        microbatch = _microbatch(done.op)
        for part, end in _parts(done):
            if part.duration:
                kind = _communication(part) if part.communicates else kinds[done.op]
                for s in part.streams:
                    found.setdefault(s, []).append(Bar(kind, microbatch, end - part.duration, part.duration))
    order = sorted(found, key=lambda s: _row_order(*program.streams[s]))
    named = [(program.classes.label(program.streams[s][0]), program.streams[s][1], found[s]) for s in order]
    return [(f"{label} {stream}", _joined(row)) for label, stream, row in named]


def _row_order(c: int, stream: str) -> tuple[int, int, int, str]:
    """The sort key of a stream of class `c`: by kind, then by name, "stage2" before "stage10"."""
    word = stream.split(" ")[0]
    return c, {COMPUTE: 0, "send": 2, "recv": 3}.get(word, 1), len(stream), stream


def _microbatch(op: Op) -> int | None:
    """The microbatch of an op: of a call its attribute, else that of its operands; None if not a single one."""
    if op.callee is not None:
        return op.attributes.get("mb")
    pieces = {t.piece for v in op.inputs for t in leaves(v.type)}
    piece = pieces.pop() if len(pieces) == 1 else None
    return piece[0] if piece is not None and piece[1] == piece[0] + 1 else None


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


def _kinds(main: Function) -> dict[Op, str]:
    """The kind of each op of a program. An op is of the backward pass if it records its forward op (`of`); a call, if
    it uses a result of another call of the same stage and microbatch, that is, a saved value. An update depends on
    gradients and is not of a microbatch; ops that only join microbatches are not updates. Without any backward op all
    ops are compute.
    """
    makers: dict[Value, Op] = {}
    late: set[Value] = set()
    kinds: dict[Op, str] = {}
    for op in main.ops:
        if op.of is not None or _uses_saved(op, makers):
            kinds[op] = BACKWARD
        elif any(v in late for v in op.inputs):
            kinds[op] = UPDATE if _microbatch(op) is None and not _joins(op) else BACKWARD
        else:
            kinds[op] = FORWARD
        if kinds[op] != FORWARD:
            late.update(op.outputs)
        makers |= dict.fromkeys(op.outputs, op)
    return kinds if late else dict.fromkeys(kinds, COMPUTE)


def _joins(op: Op) -> bool:
    """Whether the op joins a device's pieces of all microbatches (it is along the time axis)."""
    return op.attributes.get("axis") == TIME


def _uses_saved(op: Op, makers: Mapping[Value, Op]) -> bool:
    if op.callee is None or op.attributes.get("mb") is None:
        return False
    saved = [made for v in op.inputs if (made := makers.get(v)) is not None and made.callee is not None]
    return any(made.attributes.get("mb") == op.attributes["mb"] and _stage(made) is _stage(op) for made in saved)


def _stage(call: Op) -> Device | Mesh | None:
    """The device or mesh of a call's results."""
    return next((t.device for v in call.outputs for t in leaves(v.type)), None)


def _parts(done: Done) -> Iterator[tuple[OpPart, float]]:
    """The parts of an op, those of a call expanded, and their end times."""
    if isinstance(done.plan, Call):
        for inner in walk(expand(done.plan, done.times, done.run)):
            yield from _parts(inner)
    else:
        yield from zip(done.plan.parts, done.times, strict=False)


def live(simulation: Simulation) -> list[tuple[str, list[tuple[float, Bytes]]]]:
    """Live memory of each device class, by name, until the end of the run: see `executor.simulator.trace.live`."""
    classes = simulation.program.classes
    spans = [_computing(done) for done in walk(simulation.run)]
    out: list[tuple[str, list[tuple[float, Bytes]]]] = []
    for c, first in enumerate(classes.first):
        points = trace.live(simulation.memory(first), spans, c)
        out.append((classes.label(c), [*points, (simulation.seconds, points[-1][1])]))
    return out


def _computing(done: Done) -> Span:
    """The span of an op's compute on each device class that takes part in it."""
    span: Span = {}
    for part, end in _parts(done):
        if not part.communicates:
            widen(span, part, end)
    return span
