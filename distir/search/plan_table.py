"""The result of a search: the quickest plans, the best of each family, what binds them, and what is certain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.api.explanation import Explanation, explain
from distir.api.figures import parameters_line
from distir.api.interop.plan_settings import CONTEXT, EXPERTS
from distir.api.metrics import finite
from distir.api.results import aligned, html_table, paragraphs, seconds, size
from distir.ir.errors import UsageError, counted
from distir.search.best_first import Simulated
from distir.search.exact import Detail, Setting
from distir.transforms.plan import Plan

if TYPE_CHECKING:
    from distir.viz.figure import Figure

_LAST = ("bubble", "memory", "headroom")
_AXES = ("tp", CONTEXT, EXPERTS, "dp", "pp")
"""The axes that have a column: those of context and experts only where a plan has them."""
_SLIGHT = 0.1
"""The share of a step from which a loss is what binds it."""


class Binding(NamedTuple):
    """What may bind a plan: its name, what to change that is no setting of a plan, and the settings that may help."""

    name: str
    change: str
    settings: tuple[str, ...] = ()


BINDINGS = {
    "tp": Binding(
        "tensor-parallel communication",
        "quicker links, or a larger batch, which may need less of it",
        ("dp", "tp", "pp", "zero", "recompute", "sequence_parallel"),
    ),
    CONTEXT: Binding(
        "context-parallel communication",
        "quicker links, or a larger batch or shorter sequences",
        ("dp", "tp", "pp", CONTEXT),
    ),
    EXPERTS: Binding(
        "the exchange of tokens between experts", "quicker links between the devices of ep", ("tp", EXPERTS)
    ),
    "dp": Binding("data-parallel communication", "a larger batch, or quicker links", ("dp", "tp", "pp", "zero")),
    "pp": Binding("communication between stages", "a larger batch, or quicker links", ("pp", "microbatch")),
    "bubble": Binding(
        "the pipeline's bubble", "a larger batch, of more microbatches", ("pp", "microbatch", "schedule", "chunks")
    ),
    "host": Binding("waiting for the host", "larger microbatches: the host launches fewer kernels", ("microbatch",)),
    "memory": Binding(
        "memory", "more GPUs: quicker plans of these do not fit", ("tp", "pp", "microbatch", "zero", "recompute")
    ),
    "compute": Binding("compute", "more GPUs, or quicker ones"),
}
"""By the key of what binds a plan."""


def columns(plans: Sequence[Plan]) -> list[str]:
    """The axes that have a column in a table of these plans."""
    sizes = {a.name for plan in plans for a in plan.axes if a.size > 1}
    return [name for name in _AXES if name in sizes or name not in (CONTEXT, EXPERTS)]


def column_of(axis: str) -> str:
    """The axis to which communication counts: if it is along several, such as "dp+cp", or none of the known, to dp."""
    return axis if axis in _AXES else "dp"


class StepWork(NamedTuple):
    """Of a step, for rates: samples, tokens, model FLOPs and the seconds that one device needs for them at its peak."""

    samples: int
    tokens: int | None
    flops: float
    ideal: float


@dataclass(frozen=True)
class PlanRow:
    """A plan and its step. Seconds, bytes; `detail` has shares of the step, `binds` is a key of `BINDINGS`.

    Both are None, and the plan's program is not verified, if Ctrl-C came before that. `held`: the settings that did not
    vary.

    `mfu`: model FLOPs utilisation, the FLOPs of the model's products and attention in a step, without what is
    recomputed, over those that all devices could do in that time at the peak of their dtype. `family`: of what it is
    the quickest that was found; `certain`: whether none can be quicker.
    """

    plan: Plan
    seconds: float
    bound: float
    memory: int
    headroom: float
    detail: Detail | None
    work: StepWork
    binds: str | None
    family: str | None = None
    certain: bool = True
    held: tuple[str, ...] = ()

    @property
    def limit(self) -> tuple[str, str] | None:
        """What binds the plan ("is limited by compute"), and the next thing to change: the search has tried the
        settings that varied."""
        if self.binds is None:
            return None
        what = BINDINGS[self.binds]
        held = [name for name in what.settings if name in self.held]
        change = f"let {', '.join(held)} vary; {what.change}" if held else what.change
        lost = losses(self.detail, self.plan).get(self.binds) if self.detail is not None else None
        if lost is None:
            return f"is limited by {what.name}", change
        return f"loses most to {what.name}, {lost:.1%} of its step", change

    @property
    def mfu(self) -> float:
        return self.work.ideal / (self.seconds * self.plan.size)

    @property
    def flops_per_device(self) -> float:
        """Model FLOP/s of a device."""
        return self.work.flops / (self.seconds * self.plan.size)

    @property
    def tokens_per_second(self) -> float:
        """Samples a second, if samples are not sequences."""
        return (self.work.tokens or self.work.samples) / self.seconds

    def exposed(self, axis: str) -> float:
        """The share of the step in which communication along an axis is exposed; see `column_of`. It is 0 where
        nothing is known."""
        return losses(self.detail, self.plan).get(axis, 0.0) if self.detail is not None else 0.0

    def cells(self, axes: Sequence[str]) -> tuple[str, ...]:
        """A row of the table, with a column for the communication along each of these axes."""
        rate, detail = self.tokens_per_second, self.detail
        shares = ["?"] * (len(axes) + 2)
        if detail is not None:
            shares = [f"{x:.1%}" for x in (detail.compute, *[self.exposed(axis) for axis in axes], detail.bubble)]
        return (
            str(self.plan),
            seconds(self.seconds),
            f"{rate:,.0f}",
            f"{rate / self.plan.size:,.0f}",
            f"{self.mfu:.1%}",
            _tera(self.flops_per_device),
            *shares,
            size(self.memory),
            size(self.headroom),
        )

    def to_json(self) -> dict[str, Any]:
        """Seconds, bytes, FLOP/s; shares of the step, None where they are not known."""
        detail = self.detail
        return {
            "plan": self.plan.to_json(),
            "family": self.family,
            "certain": self.certain,
            "step_seconds": self.seconds,
            "bound_seconds": self.bound,
            "tokens_per_second": self.work.tokens and self.tokens_per_second,
            "samples_per_second": self.work.samples / self.seconds,
            "mfu": self.mfu,
            "flops_per_second_per_device": self.flops_per_device,
            "compute": detail and detail.compute,
            "exposed": detail and {axis: self.exposed(axis) for axis in columns([self.plan])},
            "bubble": detail and detail.bubble,
            "peak_memory": self.memory,
            "memory_at_peak": detail and detail.memory,
            "headroom": self.headroom,
            "binds": self.binds,
            "next": self.limit and self.limit[1],
        }


def _tera(x: float) -> str:
    x /= 1e12
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


class Short(NamedTuple):
    """A plan that does not fit: seconds of its step, on which rank, by how many bytes, and that rank's bytes by
    category."""

    plan: Plan
    seconds: float
    rank: str
    over: float
    memory: dict[str, int]

    def __str__(self) -> str:
        most = max(self.memory, key=self.memory.__getitem__)
        parts = ", ".join([f"{name} {size(n)}" for name, n in self.memory.items() if n])
        return f"{self.plan}: short by {size(self.over)} on {self.rank}, most of it {most} ({parts})"


class PlanPoint(NamedTuple):
    """A plan that was simulated: seconds of a step, bytes of the rank that needs most, and by how many bytes that is
    more than its device has, less the reserve (negative if it fits)."""

    plan: Plan
    seconds: float
    memory: int
    over: float

    @property
    def fits(self) -> bool:
        return self.over <= 0


@dataclass(frozen=True, repr=False)
class PlanTable:
    """The plans for a model on so many devices of a cluster, quickest first; prints as a table.

    `bound`: no plan that was not simulated takes less time, in seconds. `plans`: how many there were, `simulated` how
    many of them were simulated; `excluded`: by a bound of memory. `left_out`: how many a rule left out, by its reason.
    `points`: what was simulated, but plans that cannot be applied. `setting`: what was planned for.
    """

    model: str
    cluster: str
    gpus: int
    reserve: float
    rows: list[PlanRow]
    families: list[PlanRow]
    plans: int
    simulated: int
    excluded: int
    bound: float
    elapsed: float
    first: float | None
    left_out: dict[str, int] = field(default_factory=dict)
    short: Short | None = None
    interrupted: bool = False
    points: list[PlanPoint] = field(default_factory=list)
    setting: Setting | None = None
    _explained: dict[int, Explanation] = field(default_factory=dict, init=False, compare=False)

    def front(self) -> list[PlanPoint]:
        """The Pareto front of time and memory, quickest first: the simulated plans that fit, but those that another is
        at least as good as in both. A search simulates what may be quick, so plans of less memory may be missing."""
        found: list[PlanPoint] = []
        for x in sorted([x for x in self.points if x.fits], key=lambda x: (x.seconds, x.memory)):
            if not found or x.memory < found[-1].memory:
                found.append(x)
        return found

    def figure(self) -> Figure:
        """Time against memory of the plans that were simulated, with the Pareto front; the timeline of the best plan;
        memory over time on the devices on which it leaves least (needs the extra `viz`)."""
        from distir.search.plan_report import plan_figure

        return plan_figure([self])

    def explain(self, rank: int = 1) -> Explanation:
        """Where the time of a step of the plan in a row goes; rank 1 is the quickest. Raises UsageError without it."""
        if self.setting is None or not 1 <= rank <= len(self.rows):
            raise UsageError(f"the table has no plan of rank {rank}", f"it has {counted(len(self.rows), 'plan')}")
        if rank not in self._explained:
            self._explained[rank] = explain(self.setting.model, self.rows[rank - 1].plan, self.setting.cost)
        return self._explained[rank]

    def save_report(self, path: str | os.PathLike[str]) -> None:
        """Write a report as one HTML file, which refers to no other (needs the extra `viz`). Raises UsageError if it
        cannot be written."""
        from distir.search.plan_report import save_report

        save_report([self], path)

    def table(self) -> list[tuple[str, ...]]:
        """A header and a row a plan."""
        axes = columns([row.plan for row in self.rows])
        rate = "tokens/s" if self.rows[0].work.tokens else "samples/s"
        head = ("plan", "step", rate, "a GPU", "MFU", "TFLOP/s", "compute", *axes, *_LAST)
        return [head, *[row.cells(axes) for row in self.rows]]

    def family_table(self) -> list[tuple[str, ...]]:
        """A header and the best of each family, with what it costs."""
        best = self.rows[0].seconds
        rows = [("best with", "step", "slower by", "memory", "plan")]
        for row in self.families:
            slower = f"{row.seconds / best - 1:.1%}"
            text = seconds(row.seconds) if row.certain else f"at most {seconds(row.seconds)}"
            rows.append((row.family or "", text, slower, size(row.memory), str(row.plan)))
        return rows

    def head(self) -> str:
        """What was planned for."""
        return (
            f"{self.model} on {counted(self.gpus, 'device')} of {self.cluster}, {size(self.reserve)} of each reserved"
        )

    def step(self) -> str:
        """The step that was planned: its samples and tokens, the model's parameters and their types."""
        work = self.rows[0].work
        parts = [f"a step of {counted(work.samples, 'sample')}"]
        if work.tokens:
            parts.append(f"{work.tokens:,} tokens")
        if self.setting is not None:
            parts.append(parameters_line(self.setting.model.function))
        return ", ".join(parts)

    def lines(self) -> list[str]:
        """What binds the best plan, what is certain, and how the search went."""
        found: list[str] = []
        if self.rows and (limit := self.rows[0].limit) is not None:
            binds, change = limit
            found.append(f"the best plan {binds}; next: {change}")
        if self.short is not None:
            found.append(f"quickest that does not fit, {seconds(self.short.seconds)}: {self.short}")
        certain = f"no plan left out is quicker than {seconds(self.bound)}" if self.bound else "others may be quicker"
        if self.bound == float("inf"):
            certain = "every plan was simulated"
        found.append(
            f"{counted(self.plans, 'plan')}: {self.simulated:,} simulated, {self.excluded:,} cannot fit; {certain}"
        )
        if self.interrupted:
            missing = sum([row.detail is None for row in (*self.rows, *self.families)])
            unverified = f"the programs of {counted(missing, 'row')} are not verified"
            found.append(f"interrupted: {unverified if missing else 'the search had not ended'}")
        return found

    def __str__(self) -> str:
        parts = [self.head(), self.step(), "", *aligned(self.table()), ""]
        if self.families:
            parts += [*_left(self.family_table()), ""]
        return "\n".join([*parts, *self.lines()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        families = html_table(self.family_table()) if self.families else ""
        return paragraphs([self.head(), self.step()]) + html_table(self.table()) + families + paragraphs(self.lines())

    def to_json(self) -> dict[str, Any]:
        """Seconds, bytes, FLOP/s; shares of the step."""
        return finite(
            {
                "model": self.model,
                "cluster": self.cluster,
                "devices": self.gpus,
                "batch": self.rows[0].work.samples,
                "tokens": self.rows[0].work.tokens,
                "memory_reserve": self.reserve,
                "plans": [row.to_json() for row in self.rows],
                "families": [row.to_json() for row in self.families],
                "counts": {"plans": self.plans, "simulated": self.simulated, "excluded_by_memory": self.excluded},
                "bound_seconds": self.bound,
                "left_out": self.left_out,
                "does_not_fit": self.short and {**self.short._asdict(), "plan": self.short.plan.to_json()},
                "search_seconds": self.elapsed,
                "first_plan_seconds": self.first,
                "interrupted": self.interrupted,
                "simulated_plans": [
                    {"plan": str(x.plan), "step_seconds": x.seconds, "peak_memory": x.memory, "fits": x.fits}
                    for x in self.points
                ],
            }
        )


def _left(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first and last columns are text, the others numbers."""
    body = aligned([row[:-1] for row in rows])
    return [f"{line}  {row[-1]}" for line, row in zip(body, rows, strict=True)]


def losses(detail: Detail, plan: Plan) -> dict[str, float]:
    """The shares of a step that are lost: while devices wait, in a pipeline to its bubble, else to the host; and to
    communication by the axis to which it counts."""
    found = {"bubble" if plan.stages.size > 1 else "host": detail.bubble}
    for axis, x in detail.exposed.items():
        name = column_of(axis)
        found[name] = found.get(name, 0.0) + x
    return found


def what_binds(detail: Detail, plan: Plan, memory: bool) -> str:
    """What limits a plan: `memory` if quicker ones do not fit; else the largest loss of its step, or compute."""
    if memory:
        return "memory"
    lost = losses(detail, plan)
    most = max(lost, key=lost.__getitem__)
    return most if lost[most] >= _SLIGHT else "compute"


def short_of(found: Simulated, detail: Detail, batch: int) -> Short:
    """A plan that does not fit, in words."""
    outcome = found.outcome
    return Short(found.candidate.plan(batch), outcome.seconds, outcome.rank, outcome.over, detail.memory)
