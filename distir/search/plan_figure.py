"""The figures of searches: time against memory of the plans, the timeline of the best, memory over time where least is
left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir.api.explain import Explanation
from distir.ir.errors import counted
from distir.viz import Choice
from distir.viz.draw import memory_drawing, timeline_drawing
from distir.viz.drawing import Drawing, one_below_another
from distir.viz.pareto import pareto_drawing

if TYPE_CHECKING:
    from distir.search.plan_table import PlanTable
    from distir.viz.figure import Figure

_GRAIN = 1 / 600
"""The share of time that is a pixel or so wide."""
_STAGES = 4
"""Of more stages the timeline shows compute alone."""


def plan_figure(tables: Sequence[PlanTable]) -> Figure:
    """Of each search: time against memory of the plans that were simulated, with what the numbers of the Pareto front
    stand for; the timeline of the best plan; memory over time on the devices on which it leaves least. Raises
    UsageError without matplotlib."""
    drawings: list[Drawing] = []
    for table in tables:
        explained = table.explain()
        name, devices = least_room(explained)
        drawings += [
            pareto_drawing(table.head(), choices(table), limits(table)),
            best_timeline(explained, f"timeline of {table.rows[0].plan}"),
            worst_memory(explained, name, f"memory of {counted(devices, 'device')} of "),
        ]
    return one_below_another(drawings)


def choices(table: PlanTable) -> list[Choice]:
    """The plans that were simulated."""
    front = table.front()
    return [Choice(str(x.plan), x.seconds, x.memory, x.fits, x in front) for x in table.points]


def limits(table: PlanTable) -> list[float]:
    """The bytes that devices have, less the reserve: one number, if they are alike."""
    return sorted({x.memory - x.over for x in table.points})


def shows_compute_alone(explained: Explanation) -> bool:
    """Whether there are too many stages for a row for each of their streams."""
    return len(explained.prediction.simulation.stages) > _STAGES


def best_timeline(explained: Explanation, title: str = "") -> Drawing:
    """The timeline of a step; of many stages compute alone."""
    return timeline_drawing(explained.prediction.simulation, _GRAIN, shows_compute_alone(explained), title)


def worst_memory(explained: Explanation, name: str, title: str = "") -> Drawing:
    """Memory over time on one kind of devices."""
    return memory_drawing(explained.prediction.simulation, [name], _GRAIN, title)


def least_room(explained: Explanation) -> tuple[str, int]:
    """The kind of devices with least room at their peak, and how many they are."""
    simulation = explained.prediction.simulation
    classes, topology = simulation.program.classes, simulation.program.cost.topology
    worst = max(
        range(len(classes.first)),
        key=lambda k: simulation.peak_memory[classes.first[k]] - topology.spec(classes.first[k]).capacity,
    )
    return classes.label(worst), classes.sizes[worst]
