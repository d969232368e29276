"""The result of `simulate`: what a step costs, printed as text or as tables in a notebook."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.api.figures import count, flops, parameters, parameters_line, seconds_at_peak, types_without_peak
from distir.api.results import Summary, aligned, html_table, paragraphs, rates, seconds, size
from distir.executor.simulator.labels import SEND
from distir.executor.simulator.step_parts import StageParts, step_parts
from distir.ir.function import Function

if TYPE_CHECKING:
    from distir.executor.simulator.simulation import Fit, Simulation


class WorstRank(NamedTuple):
    """The rank whose peak of memory leaves the least: its number, its stage, and bytes: of the peak by category, in
    all, and of its device."""

    rank: int
    stage: str
    categories: dict[str, int]
    peak: int
    memory: int

    @property
    def headroom(self) -> int:
        """The bytes that are left; below 0 where the program does not fit."""
        return self.memory - self.peak


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a plan on a cluster. `simulation` has the details, `program` is what was simulated, and
    `source` the program that the plan was applied to."""

    summary: Summary
    cluster: str
    program: Function = field(repr=False)
    simulation: Simulation = field(repr=False)
    source: Function = field(repr=False)

    @cached_property
    def flops(self) -> float:
        """The FLOPs of a step of the model as it was loaded: without what the plan repeats, two for a multiply-add."""
        return flops(self.source)

    @cached_property
    def parts(self) -> list[StageParts]:
        """The parts of the step, for each stage (`distir.executor.simulator.step_parts`)."""
        return step_parts(self.simulation)

    @cached_property
    def utilization(self) -> float:
        """Model FLOPs utilization: the share of the devices' peak FLOP/s that the matrix products, convolutions and
        attention of the model as it was loaded use (`distir.api.figures.seconds_at_peak`), on average; 0 for a
        step that takes no time.
        """
        ideal = seconds_at_peak(self.source, self.simulation.program.cost)
        devices = sum(self.simulation.program.classes.sizes)
        return ideal / (self.step_seconds * devices) if self.step_seconds else 0.0

    @cached_property
    def without_peak(self) -> dict[str, str]:
        """The dtypes of the model's products of which the devices have no peak, such as bf16 on V100, each with the
        dtype at whose speed it is predicted."""
        return types_without_peak(self.source, self.simulation.program.cost)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.simulation.seconds

    @property
    def interval(self) -> tuple[float, float] | None:
        """Seconds between which a step is expected, by the residuals of a calibrated cluster for as many ranks, or the
        next number above, or the last; None on others."""
        program = self.simulation.program
        regular, ranks = program.cost.topology.regular, sum(program.classes.sizes)
        if regular is None or not regular.residuals:
            return None
        near = next((x for x in regular.residuals if x.ranks >= ranks), regular.residuals[-1])
        return near.interval(self.step_seconds)

    def step(self) -> str:
        """The time of a step, with its interval if it has one."""
        text = seconds(self.step_seconds)
        if (found := self.interval) is None:
            return text
        low, high = (seconds(x, self.step_seconds) for x in found)
        return f"{text} ({low} .. {high})"

    @property
    def samples_per_second(self) -> float:
        return self.summary.batch / self.step_seconds if self.step_seconds else float("inf")

    @property
    def tokens_per_second(self) -> float | None:
        """None if samples are not sequences."""
        tokens = self.summary.tokens
        return tokens / self.step_seconds if tokens and self.step_seconds else None

    @property
    def fits(self) -> Fit:
        """Whether the program fits in the devices' memory; if not, the message names stage and bytes."""
        return self.simulation.fits()

    @property
    def peak_memory(self) -> int:
        """The largest peak of bytes in use on any device."""
        return max([memory for memory, _ in self.simulation.memories], default=0)

    @property
    def allocated_memory(self) -> int:
        """Of that what the allocator hands out: tensors, and workspaces of products."""
        return max(self.simulation.allocated_memory.values(), default=0)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace in Chrome's format, which Perfetto opens too. Raises UsageError if it cannot be written."""
        self.simulation.to_chrome(Path(path))

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of communication while a device does not compute, by mesh axis, on average over the devices."""
        names = dict.fromkeys([x for s in self.parts for x in s.exposed])
        pipeline = self.summary.plan.stages.name
        found: dict[str, float] = {}
        for x in names:
            axis = pipeline if x == SEND else x
            found[axis] = found.get(axis, 0.0) + self._mean([s.exposed.get(x, 0.0) for s in self.parts])
        return found

    def _mean(self, of_stages: Sequence[float]) -> float:
        sizes = [s.devices for s in self.parts]
        return sum([x * n for x, n in zip(of_stages, sizes, strict=True)]) / max(1, sum(sizes))

    @cached_property
    def worst(self) -> WorstRank:
        """The rank that has the least memory left."""
        found, classes = self.simulation.program, self.simulation.program.classes
        if classes.first:  # most often the worst; its peak needs no other count then
            self.simulation.memory(classes.first[0])
        spec, peak = found.cost.topology.spec, self.simulation.peak_memory
        left = [spec(first).capacity - peak[first] for first in classes.first]
        c = left.index(min(left))
        first = classes.first[c]
        used = self.simulation.memory_at_peak(first)
        rank = sorted([d for d, _ in classes.devices()], key=lambda d: (d.index, d.kind)).index(first)
        return WorstRank(rank, classes.label(c), used, peak[first], int(spec(first).capacity))

    def table(self) -> list[tuple[str, ...]]:
        """A header and a row per stage; of tensors alone too, where the memory has more than these."""
        memories = self.simulation.memories
        beside = any(tensors < memory for memory, tensors in memories)
        last = ("tensors", "peak memory") if beside else ("peak memory",)
        rows: list[tuple[str, ...]] = [
            ("stage", "devices", "compute", "exposed communication", "bubble", "of step", *last)
        ]
        step = self.step_seconds
        for s, (memory, tensors) in zip(self.parts, memories, strict=True):
            times = [sum(x.values()) for x in (s.compute, s.exposed, s.bubble)]
            share = f"{times[2] / step:.1%}" if step else ""
            sizes = (size(tensors), size(memory)) if beside else (size(memory),)
            rows.append((s.name, str(s.devices), *[seconds(x, step) for x in times], share, *sizes))
        return rows

    def rates(self) -> str:
        """Step time and rates as one line."""
        return f"step {self.step()}, {rates(self.samples_per_second, self.tokens_per_second)}"

    def head(self) -> list[str]:
        """The model and its work, the plan, the cluster, and which dtypes the cluster's devices have no peak of."""
        what = "a step" if self.source.updates else "a forward pass"
        work = f"{parameters_line(self.source)}, {count(self.flops)}FLOPs {what}"
        first, *rest = self.summary.lines()
        without = [
            f"the devices have no peak of {name}: its products are predicted at the speed of {other}"
            for name, other in self.without_peak.items()
        ]
        return [first, work, *rest, f"cluster {self.cluster}", *without]

    def lines(self) -> list[str]:
        """Rates and utilization, communication by axis, memory of the worst rank."""
        out = [f"{self.rates()}, model FLOPs utilization {self.utilization:.1%}"]
        step = self.step_seconds
        if exposed := [f"{axis} {seconds(x, step)} ({x / step:.1%})" for axis, x in self.exposed.items() if step]:
            out.append(f"exposed communication, mean: {', '.join(exposed)}")
        worst = self.worst
        used = [f"{name} {size(n)}" for name, n in worst.categories.items() if n]
        out.append(f"memory at the peak of rank {worst.rank} ({worst.stage}): {', '.join(used) or 'none'}")
        left = f": {size(worst.headroom)} of {size(worst.memory)} left" if self.fits else ""
        return [*out, f"{self.fits.message}{left}"]

    def __str__(self) -> str:
        lines = self.lines()  # first: it counts a rank's memory by category
        return "\n".join([*self.head(), "", *aligned(self.table()), "", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = self.lines()  # first: see `__str__`
        return paragraphs(self.head()) + html_table(self.table()) + paragraphs(lines)

    def to_json(self) -> dict[str, Any]:
        """JSON; times in seconds, memory in bytes."""
        simulation = self.simulation
        classes = simulation.program.classes
        used = [simulation.memory_at_peak(first) for first in classes.first]  # first: peaks need no other count then
        stages = []
        for c, s in enumerate(self.parts):
            compute, exposed, bubble = (sum(x.values()) for x in (s.compute, s.exposed, s.bubble))
            row = {"name": s.name, "devices": s.devices, "compute": compute, "exposed_communication": exposed}
            row |= {"exposed": s.exposed, "bubble": bubble, "peak_memory": simulation.memories[c][0]}
            stages.append({**row, "memory_at_peak": used[c]})
        return {
            **self.summary.to_json(),
            "cluster": self.cluster,
            "parameters": {name: p._asdict() for name, p in parameters(self.source).items()},
            "flops": self.flops,
            "step_seconds": self.step_seconds,
            "interval": self.interval,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "utilization": self.utilization,
            "without_peak": self.without_peak,
            "exposed": self.exposed,
            "fits": self.fits.ok,
            "memory": self.fits.message,
            "worst_rank": {**self.worst._asdict(), "headroom": self.worst.headroom},
            "stages": stages,
        }
