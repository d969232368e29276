"""Explain a predicted step: where its time goes, what other hardware would change, how two plans differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distir.api.compilation import ONE, Cluster, cost_model, distribute, plan_in_effect, predict
from distir.api.model import Model, loads
from distir.api.prediction import Prediction
from distir.api.results import aligned, html_table, paragraphs, seconds, size
from distir.api.stage_cost import stage_cost
from distir.executor.cost_model import CostModel
from distir.executor.simulator.labels import SEND
from distir.executor.simulator.step_parts import BUBBLES, COMPUTE_PARTS, StageParts
from distir.executor.simulator.traffic import TRANSFER, Traffic, traffic
from distir.hardware.what_if import changed, changed_runtime
from distir.hardware.what_if import check as check_factors
from distir.ir import Function
from distir.ir.errors import UsageError
from distir.transforms.plan import Plan

if TYPE_CHECKING:
    from distir.viz.figure import Figure


_LEAST_RATE = 1e6
"""Bytes/s that are shown: what takes longest below is the latency."""


@dataclass(frozen=True)
class Effect:
    """A step on changed hardware: what was changed, and the seconds of the step."""

    change: str
    step_seconds: float


@dataclass(frozen=True)
class Explanation:
    """Where the time of a predicted step goes. The parts of each stage add up to the step.

    `effects`: the same program on changed hardware.
    """

    prediction: Prediction
    effects: list[Effect] = field(default_factory=list)

    @property
    def stages(self) -> list[StageParts]:
        """The seconds of each part, by stage (`distir.executor.simulator.step_parts`)."""
        return self.prediction.parts

    @property
    def step_seconds(self) -> float:
        """Seconds of the step."""
        return self.prediction.step_seconds

    @property
    def parts(self) -> list[str]:
        """The parts that take time on any stage: compute, communication by axis, bubbles."""
        names = dict.fromkeys(COMPUTE_PARTS)
        for stage in self.stages:
            names |= dict.fromkeys(stage.exposed)
        names |= dict.fromkeys(BUBBLES)
        return [x for x in names if any(stage.parts.get(x) for stage in self.stages)]

    @property
    def mean(self) -> dict[str, float]:
        """Seconds by part, the mean over all devices."""
        devices = sum(s.devices for s in self.stages)
        return {x: sum(s.parts.get(x, 0.0) * s.devices for s in self.stages) / devices for x in self.parts}

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization; see `Prediction.utilization`."""
        return self.prediction.utilization

    def table(self) -> list[tuple[str, ...]]:
        """A header, a row per stage, their mean, and its share of the step."""
        names, step = self.parts, self.step_seconds
        axis = self.prediction.summary.plan.stages.name
        rows = [("stage", "devices", *[axis if x == SEND else x for x in names])]
        for s in self.stages:
            rows.append((s.name, str(s.devices), *[seconds(s.parts.get(x, 0.0), step) for x in names]))
        mean = self.mean
        rows.append(("mean", "", *[seconds(mean[x], step) for x in names]))
        rows.append(("share", "", *[f"{mean[x] / step:.1%}" if step else "" for x in names]))
        return rows

    @property
    def memory(self) -> list[dict[str, int]]:
        """For each stage the bytes of a device by category when most are in use."""
        simulation = self.prediction.simulation
        return [simulation.memory_at_peak(device) for device in simulation.program.classes.first]

    def memory_table(self) -> list[tuple[str, ...]]:
        """A header, and a row per stage: what its memory holds at the peak."""
        memory = self.memory
        names = [x for x in memory[0] if any(row[x] for row in memory)] if memory else []
        rows = [("memory", *names, "peak")]
        for s, row in zip(self.stages, memory, strict=True):
            rows.append((s.name, *[size(row[x]) for x in names], size(sum(row.values()))))
        return rows

    @cached_property
    def traffic(self) -> list[Traffic]:
        """What a device communicates in the step, by kind of collective."""
        return traffic(self.prediction.simulation.program)

    def communication_table(self) -> list[tuple[str, ...]]:
        """A header, and a row per kind of communication: how often, how many bytes, in how many seconds; empty without
        any."""
        axis = self.prediction.summary.plan.stages.name
        rows = [
            ("communication", "axis", "devices", "nodes", "algorithm", "times", "bytes", "seconds", "bus bandwidth")
        ]
        for kind, times, least, most, total, rate in self.traffic:
            where = (axis if kind.collective == TRANSFER else kind.axis, str(kind.devices), str(kind.nodes or "-"))
            sizes = size(most) if least == most else f"{size(least)} to {size(most)}"
            figures = (
                f"{times:,}",
                sizes,
                seconds(total, self.step_seconds),
                f"{rate / 1e9:.3g} GB/s" if rate >= _LEAST_RATE else "-",
            )
            rows.append((kind.collective, *where, kind.algorithm or "-", *figures))
        return rows if self.traffic else []

    def what_if(self) -> list[tuple[str, ...]]:
        """A header, and a row per change of the hardware; empty without one."""
        if not self.effects:
            return []
        step = self.step_seconds
        rows = [("what if", "step", "change")]
        for e in self.effects:
            share = f"{e.step_seconds / step - 1:+.1%}" if step else ""
            rows.append((e.change, seconds(e.step_seconds, step), share))
        return rows

    def lines(self) -> list[str]:
        """The step, and the utilization."""
        used = f"model FLOPs utilization {self.utilization:.1%}"
        return [f"{self.prediction.rates()}, {used}", self.prediction.fits.message]

    def figure(self) -> Figure:
        """Bars of the stages, stacked by part (needs the extra `viz`)."""
        from distir.viz.draw import stacked

        axis = self.prediction.summary.plan.stages.name
        rows = {s.name: {axis if x == SEND else x: s.parts.get(x, 0.0) for x in self.parts} for s in self.stages}
        return stacked(rows)

    def __str__(self) -> str:
        head = self.prediction.head()
        effects = ["", *aligned(self.what_if())] if self.effects else []
        tables = [*aligned(self.table()), "", *aligned(self.memory_table())]
        if rows := self.communication_table():
            tables += ["", *aligned(rows)]
        return "\n".join([*head, "", *tables, "", *self.lines(), *effects])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = self.prediction.head()
        effects = html_table(self.what_if()) if self.effects else ""
        tables = [self.table(), self.memory_table(), self.communication_table()]
        shown = "".join([html_table(rows) for rows in tables if rows])
        return paragraphs(head) + shown + paragraphs(self.lines()) + effects

    def to_json(self) -> dict[str, Any]:
        """JSON; times in seconds, memory in bytes."""
        rows = [
            {
                "name": s.name,
                "devices": s.devices,
                "compute": s.compute,
                "exposed": s.exposed,
                "bubble": s.bubble,
                "memory_at_peak": memory,
            }
            for s, memory in zip(self.stages, self.memory, strict=True)
        ]
        return {
            **self.prediction.summary.to_json(),
            "cluster": self.prediction.cluster,
            "step_seconds": self.step_seconds,
            "utilization": self.utilization,
            "without_peak": self.prediction.without_peak,
            "parts": rows,
            "mean": self.mean,
            "communication": [x.to_json() for x in self.traffic],
            "what_if": [{"change": e.change, "step_seconds": e.step_seconds} for e in self.effects],
        }


@loads
def explain(
    model: Model,
    plan: Plan = ONE,
    cluster: Cluster = "cpu-2core",
    *,
    nodes: int | None = None,
    runtime: str | None = None,
    what_if: Mapping[str, float] | None = None,
) -> Explanation:
    """Where the time of a step goes, as `simulate` predicts it.

    `what_if` are factors of the cluster's figures (`distir.hardware.what_if.FIGURES`), such as `{"link": 2, "latency":
    0}`: the same program is also predicted with each of them, and with all together.
    Raises UsageError for an unknown figure or a factor out of range, and as `simulate`.
    """
    factors = dict(what_if or {})
    check_factors(factors)
    plan = plan_in_effect(model, plan)
    cost = cost_model(cluster, plan, nodes, runtime)
    if factors and type(cost) is not CostModel:
        raise UsageError(f"what_if changes the figures of a CostModel, not of a {type(cost).__name__}")
    program = distribute(model, plan, cost.topology.devices[: plan.size], cost=stage_cost(cost, plan))
    prediction = predict(model, plan, program, cost)
    changes = [{name: x} for name, x in factors.items()] + ([factors] if len(factors) > 1 else [])
    effects = [
        Effect(", ".join([f"{name}={x:g}x" for name, x in c.items()]), _seconds(model, plan, program, _other(cost, c)))
        for c in changes
    ]
    return Explanation(prediction, effects)


def _seconds(model: Model, plan: Plan, program: Function, cost: CostModel) -> float:
    return predict(model, plan, program, cost).step_seconds


def _other(cost: CostModel, factors: Mapping[str, float]) -> CostModel:
    """The cost model of changed hardware."""
    runtime = cost.runtime and changed_runtime(cost.runtime, factors)
    return CostModel(changed(cost.topology, factors), tf32=cost.tf32, runtime=runtime)


@dataclass(frozen=True)
class PlanDifference:
    """How the predicted steps of two plans of one model differ, by part, on average over the devices."""

    before: Explanation
    after: Explanation

    @property
    def settings(self) -> dict[str, tuple[Any, Any]]:
        """The fields of the plans that differ."""
        a, b = (x.prediction.summary.plan.to_json() for x in (self.before, self.after))
        return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}

    def table(self) -> list[tuple[str, ...]]:
        """A header, a row per part, and their sum: the step."""
        before, after = self.before, self.after
        scale = max(before.step_seconds, after.step_seconds)
        axis = before.prediction.summary.plan.stages.name
        rows = [("part", "before", "after", "difference")]
        means = before.mean, after.mean
        parts = [(axis if x == SEND else x, means[0].get(x, 0.0), means[1].get(x, 0.0)) for x in self._parts()]
        for name, x, y in [*parts, ("step", before.step_seconds, after.step_seconds)]:
            a, b = seconds(x, scale), seconds(y, scale)
            rows.append((name, a, b, "" if a == b else f"{'+' if y > x else '-'}{seconds(abs(y - x), scale)}"))
        return rows

    def _parts(self) -> Sequence[str]:
        """The parts of either, in order."""
        names = [*self.before.parts, *self.after.parts]
        bubbles = [x for x in BUBBLES if x in names]
        compute = [x for x in COMPUTE_PARTS if x in names]
        return [*compute, *sorted(set(names) - set(bubbles) - set(compute)), *bubbles]

    def __str__(self) -> str:
        lines = [f"{name}: {a} -> {b}" for name, (a, b) in self.settings.items()] or ["the plans are equal"]
        both = ("before", self.before), ("after", self.after)
        memory = [f"{name}: {x.prediction.fits.message}" for name, x in both]
        head = [self.before.prediction.summary.model, f"cluster {self.before.prediction.cluster}"]
        return "\n".join([*head, "", *lines, "", *aligned(self.table()), "", *memory])

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """JSON; times in seconds."""
        settings = {name: {"before": a, "after": b} for name, (a, b) in self.settings.items()}
        return {"settings": settings, "before": self.before.to_json(), "after": self.after.to_json()}


@loads
def diff(
    model: Model,
    before: Plan,
    after: Plan,
    cluster: Cluster = "cpu-2core",
    *,
    nodes: int | None = None,
    runtime: str | None = None,
) -> PlanDifference:
    """How the predicted steps of two plans differ. Raises as `simulate`."""
    a, b = (explain(model, plan, cluster, nodes=nodes, runtime=runtime) for plan in (before, after))
    return PlanDifference(a, b)
