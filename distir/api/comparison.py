"""Compare predicted with measured seconds by op, stage and function, largest error first.

All seconds are means over devices and steps: those of one step on one device.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.api.prediction import Prediction
from distir.api.results import aligned as aligned_rows
from distir.api.results import html_table, paragraphs, seconds
from distir.api.timings import PREDICTED, Key, Slice, TraceFile, aligned, quicker_half, read_folder, steps
from distir.executor.simulator.intervals import length, merged
from distir.executor.simulator.labels import COMMUNICATION, COMPUTE, ISSUE, STEP, WAIT
from distir.ir.errors import UsageError, counted
from distir.runtime.launcher import this_rank


class Row(NamedTuple):
    """One kind of work: its count, and its predicted and measured seconds, in one step on one device."""

    name: str
    count: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.measured - self.predicted

    @property
    def ratio(self) -> float | None:
        """Measured / predicted; None if the prediction is 0."""
        return self.measured / self.predicted if self.predicted else None


class StepShare(NamedTuple):
    """How the step time of a stage's devices divides (s); the four parts add up to `step`.

    Predicted: `compute`; `wait`, exposed communication; `rest`, idle. Measured: `compute`; `issue`, the time to start
    communication; `wait`, for communication and for other ranks; `rest`, between ops.
    """

    name: str
    compute: float
    issue: float
    wait: float
    rest: float
    step: float


@dataclass(frozen=True)
class Comparison:
    """A prediction compared with a run. Rows are in order of error, largest first; shares in order of stages."""

    ranks: int
    recorded: int
    """Number of steps recorded."""
    steps: int
    """Number of steps compared: the faster half of those recorded."""
    predicted_step: float
    measured_step: float
    predicted: list[StepShare]
    measured: list[StepShare]
    compute: list[Row]
    communication: list[Row]
    stages: list[Row]
    functions: list[Row]
    known: float = 1.0
    """The share of communication whose completion time is available; only this is compared."""

    def tables(self) -> list[list[tuple[str, ...]]]:
        """Headers and rows as text: the division of a step, then times by op, stage and function."""
        shares: list[tuple[str, ...]] = [("a step of", "", "compute", "issue", "exposed, wait", "rest", "sum")]
        for predicted, measured in zip(self.predicted, self.measured, strict=True):
            shares.append((predicted.name, "predicted", *[seconds(x, predicted.step) for x in predicted[1:]]))
            shares.append(("", "measured", *[seconds(x, measured.step) for x in measured[1:]]))
        kinds = {"compute": self.compute, "communication": self.communication}
        kinds |= {"stage": self.stages, "function": self.functions}
        return [shares, *[_table(name, rows) for name, rows in kinds.items() if rows]]

    def head(self) -> list[str]:
        """The step times, and what is compared."""
        times = f"predicted {seconds(self.predicted_step)}, measured {seconds(self.measured_step)}"
        some = f"the {self.steps} fastest of {counted(self.recorded, 'recorded step')}"
        return [
            f"step {times} ({self.measured_step / self.predicted_step:.2f} times as long)",
            f"{counted(self.ranks, 'rank')}, {some}; all times are of a step on a rank",
        ]

    def __str__(self) -> str:
        shares, *others = [aligned_rows(table) for table in self.tables()]
        lines = [*self.head(), "", *shares, *_EXPLAINED, *self._left_out()]
        for table in others:
            lines += ["", *table]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return (
            paragraphs(self.head())
            + "".join(map(html_table, self.tables()))
            + paragraphs([*_EXPLAINED, *self._left_out()])
        )

    def _left_out(self) -> list[str]:
        left = f"{1 - self.known:.0%} of communication is left out, its completion time unavailable"
        return [] if self.known == 1 else [f"{left}: it was complete before it was waited for"]

    def to_json(self) -> dict[str, Any]:
        """JSON: seconds."""
        found: dict[str, Any] = dict(vars(self))
        for name in ("predicted", "measured"):
            found[name] = [s._asdict() for s in found[name]]
        for name in ("compute", "communication", "stages", "functions"):
            found[name] = [{**r._asdict(), "ratio": r.ratio, "error": r.error} for r in found[name]]
        return found


_EXPLAINED = (
    "exposed: communication not overlapped by compute; wait: idle until communication or another rank is done;",
    "issue: time to start communication; rest: predicted, idle; measured, between ops (Python, memory, profiling)",
)


def _table(name: str, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    head = (name, "count", "predicted", "measured", "ratio", "error")
    body: list[tuple[str, ...]] = []
    for r in rows:
        error = f"{'-' if r.error < 0 else '+'}{seconds(abs(r.error))}"
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        body.append((r.name, f"{r.count:.3g}", seconds(r.predicted, r.measured), seconds(r.measured), ratio, error))
    return [head, *body]


def start_profile(folder: Path, backend: str, prediction: Prediction) -> Path:
    """Make the folder for traces and write the predicted trace (under torchrun or mpirun on rank 0). Returns the
    folder.

    Raises UsageError if that fails, or for backend numpy.
    """
    if backend == "numpy":
        raise UsageError("backend numpy runs all ranks in one process and cannot be profiled", "--backend gloo")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot make the folder {folder}: {e.strerror}") from None
    if this_rank() == 0:
        prediction.save_trace(folder / PREDICTED)
    return folder


def compare(folder: str | os.PathLike[str]) -> Comparison:
    """Compare the traces that `run(..., profile=folder)` has written. Raises UsageError if one is missing."""
    return line_up(*read_folder(Path(folder)))


def line_up(predicted: TraceFile, measured: TraceFile) -> Comparison:
    """Compare a prediction with a run. Raises UsageError if their numbers of devices differ, or one has no step."""
    recorded = len({s.args["step"] for s in measured.slices if s.category == STEP})
    got = _Side(quicker_half(measured))
    want = _Side(predicted, got.known)
    if not want.steps or not got.steps:
        raise UsageError("there is no step to compare")
    if want.devices != got.devices:
        many = counted(want.devices, "device")
        raise UsageError(f"the prediction is for {many}, the run was of {counted(got.devices, 'rank')}")
    stages = _stages(want, got)
    return Comparison(
        ranks=got.devices,
        recorded=max(recorded, 1),
        steps=max(got.recorded.values()),
        predicted_step=max(s.seconds for s in want.steps),
        measured_step=sum(map(got.spent, got.steps)) / got.devices,
        predicted=[_predicted_share(want, classes) for classes, _ in stages],
        measured=[_measured_share(got, want.name(classes), ranks) for classes, ranks in stages],
        compute=_rows(want, got, lambda s: s.name if s.category == COMPUTE else None),
        communication=_rows(want, got, lambda s: _communication(s) if s.category == COMMUNICATION else None),
        stages=_rows(want, got, lambda s: _of("stage", s), each=True),
        functions=_rows(want, got, lambda s: _of("function", s), each=True),
        known=sum(got.known.values()) / len(got.known) if got.known else 1.0,
    )


class _Side:
    """A prediction or a run: its slices with their weights in a step; `shares` scales the weights of some ops."""

    def __init__(self, trace: TraceFile, shares: Mapping[Key, float] | None = None) -> None:
        self.processes = trace.processes
        self.all = trace.slices
        self.slices, self.known = aligned(trace)
        self.shares = shares or {}
        self.steps = steps(trace)
        self.recorded = Counter(s.process for s in self.steps)
        self.devices = self.count(trace.processes)

    def weight(self, s: Slice) -> float:
        """The number of slices per step, over all devices, that a slice represents."""
        return self.processes[s.process].devices / self.recorded[s.process] * self.shares.get(s.key, 1.0)

    def spent(self, s: Slice) -> float:
        """The seconds per step, over all devices, that a slice represents."""
        return s.seconds * self.weight(s)

    def count(self, processes: Iterable[int]) -> int:
        """The number of devices that processes represent."""
        return sum(self.processes[p].devices for p in processes)

    def name(self, processes: Iterable[int]) -> str:
        return ", ".join(self.processes[p].name for p in sorted(processes))


def _communication(s: Slice) -> str:
    return f"{s.name} {s.args['axis']}" if "axis" in s.args else s.name


def _of(what: str, s: Slice) -> str | None:
    return f"{s.args[what]} {s.category}" if s.category in (COMPUTE, COMMUNICATION) and what in s.args else None


def _rows(want: _Side, got: _Side, group: Callable[[Slice], str | None], each: bool = False) -> list[Row]:
    """A row for each name that `group` gives: means over all devices, or, with `each`, over those with such slices."""
    sums: dict[str, list[float]] = {}
    for k, side in enumerate((want, got)):
        found: dict[str, list[Slice]] = {}
        for s in side.slices:
            if (name := group(s)) is not None:
                found.setdefault(name, []).append(s)
        for name, slices in found.items():
            devices = side.count({s.process for s in slices}) if each else side.devices
            row = sums.setdefault(name, [0.0, 0.0, 0.0, 0.0])
            row[k] = sum(map(side.weight, slices)) / devices
            row[2 + k] = sum(map(side.spent, slices)) / devices
    rows = [Row(name, measured or predicted, p, m) for name, (predicted, measured, p, m) in sums.items()]
    return sorted(rows, key=lambda r: -abs(r.error))


def _stages(want: _Side, got: _Side) -> list[tuple[frozenset[int], list[int]]]:
    """Match ranks of the run with processes of the prediction (device classes), by the ops that they compute."""
    processes_of: dict[Any, set[int]] = {}
    for s in want.slices:
        processes_of.setdefault(s.key, set()).add(s.process)
    mine: dict[int, set[int]] = {}
    for s in got.slices:
        if s.category == COMPUTE and s.key in processes_of:
            mine[s.process] = mine[s.process] & processes_of[s.key] if s.process in mine else set(processes_of[s.key])
    found: dict[frozenset[int], list[int]] = {}
    for rank in got.processes:
        found.setdefault(frozenset(mine.get(rank) or want.processes), []).append(rank)
    return sorted(found.items(), key=lambda item: item[1])


def _predicted_share(side: _Side, processes: Iterable[int]) -> StepShare:
    compute = busy = 0.0
    step = max(s.seconds for s in side.steps)
    for p in processes:
        mine = [s for s in side.all if s.process == p]
        compute += sum(side.spent(s) for s in mine if s.category == COMPUTE)
        busy += length(merged([np.reshape([(s.begin, s.end) for s in mine], (-1, 2))])) * side.count([p])
    n = side.count(processes)
    return StepShare(side.name(processes), compute / n, 0.0, (busy - compute) / n, step - busy / n, step)


def _measured_share(side: _Side, name: str, ranks: Sequence[int]) -> StepShare:
    mine, n = set(ranks), side.count(ranks)
    step = sum(side.spent(s) for s in side.steps if s.process in mine) / n
    compute, issue, wait = (
        sum(side.spent(s) for s in side.slices if s.process in mine and s.category == category) / n
        for category in (COMPUTE, ISSUE, WAIT)
    )
    return StepShare(name, compute, issue, wait, step - compute - issue - wait, step)
