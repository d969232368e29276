"""What the simulator says of a plan: what plans are ranked by, and for those that are shown where the time goes."""

from __future__ import annotations

from typing import NamedTuple

from distir.api.compilation import distribute, simulated
from distir.api.model import Model
from distir.api.stage_cost import stage_cost
from distir.executor.cost_model import CostModel
from distir.executor.simulator.labels import SEND
from distir.executor.simulator.overheads import least_overheads
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.step_parts import step_parts
from distir.ir.errors import DistirError
from distir.ir.pause import no_collection
from distir.search.space import Candidate
from distir.transforms.plan import Plan


class PlanOutcome(NamedTuple):
    """A simulated step: seconds, and the bytes of the rank that needs most; or why there is none."""

    seconds: float
    memory: int
    rank: str
    """The kind of devices that needs most, as the simulator names it."""
    over: float
    """By how many bytes that is more than the device has, less the reserve; negative if it fits."""
    reason: str | None = None
    hint: str | None = None
    """Of the reason."""

    @property
    def fits(self) -> bool:
        return self.reason is None and self.over <= 0


class Detail(NamedTuple):
    """Where a step's time and memory go. Shares of the seconds of the step, on average over devices."""

    compute: float
    exposed: dict[str, float]
    """By axis; `pp` is what pipeline stages send each other."""
    bubble: float
    memory: dict[str, int]
    """By category, on the rank that needs most."""


class Setting(NamedTuple):
    """What all plans of a search share. `reserve` are bytes of a device that the plan may not use."""

    model: Model
    batch: int
    cost: CostModel
    reserve: float

    @property
    def room(self) -> float:
        """The bytes of tensors that the device with most memory has room for: bounds are of tensors alone."""
        topology = self.cost.topology
        kinds = {topology.spec(d): d for d in topology.devices}
        return max([x.capacity - least_overheads(self.cost, d).total for x, d in kinds.items()]) - self.reserve


@no_collection()
def evaluate(setting: Setting, c: Candidate) -> PlanOutcome:
    """The simulation of a candidate; of one that cannot be applied the reason."""
    try:
        plan = c.plan(setting.batch)
        simulation = _simulated(setting, plan, check=False)
    except DistirError as e:
        return PlanOutcome(float("inf"), 0, "", 0.0, e.message, e.hint)
    outcome = _outcome(setting, simulation)
    _forget(simulation)
    return outcome


@no_collection()
def examine(setting: Setting, c: Candidate) -> Detail:
    """Where the time and memory of a candidate go; its program is verified and validated.

    Raises MismatchError for a program that is not equivalent to the model.
    """
    plan = c.plan(setting.batch)
    simulation = _simulated(setting, plan, check=True)
    classes = simulation.program.classes
    worst = max(range(len(classes.sizes)), key=lambda k: _excess(setting, simulation, k))
    total = sum(classes.sizes)
    seconds = simulation.seconds or 1.0
    compute = bubble = 0.0
    parts: dict[str, float] = {}
    for row in step_parts(simulation):
        weight = row.devices / total / seconds
        compute += weight * sum(row.compute.values())
        bubble += weight * sum(row.bubble.values())
        for axis, x in row.exposed.items():
            name = plan.stages.name if axis == SEND else axis
            parts[name] = parts.get(name, 0.0) + weight * x
    detail = Detail(compute, parts, bubble, simulation.memory_at_peak(classes.first[worst]))
    _forget(simulation)
    return detail


def _forget(simulation: Simulation) -> None:
    """Give back what is cached with a simulated program: its compiled form refers to it, so both would live until the
    next collection, which takes seconds in a search."""
    simulation.program.function.cache.clear()


def _simulated(setting: Setting, plan: Plan, check: bool) -> Simulation:
    model, cost = setting.model, setting.cost
    devices = cost.topology.devices[: plan.size]
    program = distribute(model, plan, devices, check=check, cost=stage_cost(cost, plan))
    return simulated(program, plan, cost, model.batch, model.tokens)


def _outcome(setting: Setting, simulation: Simulation) -> PlanOutcome:
    classes = simulation.program.classes
    worst = max(range(len(classes.sizes)), key=lambda k: _excess(setting, simulation, k))
    need = simulation.peak_memory[classes.first[worst]]
    return PlanOutcome(simulation.seconds, need, classes.label(worst), _excess(setting, simulation, worst))


def _excess(setting: Setting, simulation: Simulation, k: int) -> float:
    first = simulation.program.classes.first[k]
    return simulation.peak_memory[first] - (setting.cost.topology.spec(first).capacity - setting.reserve)
