"""Writes what all ranks of a distributed model do in a step, with the cost model's times, for other simulators."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from distir.api.compilation import Cluster, cost_model, distribute, plan_in_effect
from distir.api.model import Model, loads
from distir.api.stage_cost import stage_cost
from distir.executor.cost_model import CostModel
from distir.executor.simulator.compile import CompiledProgram
from distir.export import chakra, goal
from distir.export.rank_steps import Partners, steps
from distir.ir.errors import UsageError, counted
from distir.ir.files import written
from distir.ir.pause import no_collection
from distir.transforms.plan import Plan
from distir.transforms.rank.as_run import as_run

FORMATS = {"chakra": (chakra.write, "groups.json"), "goal": (goal.write, "goal")}
"""By name how a format is written, and how the name of its one file for all ranks ends."""


class Exported(NamedTuple):
    """What was written: the numbers of ranks and of their steps, the files, or the first and last, and their bytes."""

    format: str
    ranks: int
    steps: int
    bytes: int
    files: tuple[str, ...]

    def __str__(self) -> str:
        sizes = counted(self.ranks, "rank"), counted(self.steps, "step"), counted(self.bytes, "byte")
        return f"{', '.join(sizes)}: {', '.join(self.files)}"


@loads
@no_collection()
def export(
    model: Model,
    plan: Plan,
    prefix: str | os.PathLike[str],
    format: str,
    cluster: Cluster,
    nodes: int | None = None,
    on_rank: Callable[[int, int], None] = lambda rank, ranks: None,
) -> Exported:
    """Write the steps of all ranks, in format "chakra" or "goal", to files whose names begin with `prefix`.

    Times are those of the cluster's devices and links; its host takes none. `on_rank` is called with the number of each
    rank that is written, and how many there are. Raises UsageError for another format, a prefix that is no name, or
    files that cannot be written.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown format {format!r}", f"known are {' and '.join(FORMATS)}")
    if not os.path.basename(prefix):
        raise UsageError(f"files cannot have names that begin with {os.fspath(prefix)!r}", "add a name to the folder")
    plan = plan_in_effect(model, plan)
    given = cost_model(cluster, plan, nodes)
    cost = CostModel(given.topology, tf32=given.tf32) if given.runtime is not None else given
    program = distribute(model, plan, cost.topology.devices[: plan.size], cost=stage_cost(cost, plan))
    compiled = CompiledProgram(as_run(program), cost, cost.overlap and plan.overlap)
    found, partners = steps(compiled), Partners(compiled)
    ranks, name = len(partners.devices), Path(prefix).name
    write, ending = FORMATS[format]
    path = Path(f"{os.fspath(prefix)}.{ending}")
    with written(path) as own:
        write(own, name, found, partners, lambda rank: on_rank(rank, ranks))
        size = sum(file.stat().st_size for file in own.parent.iterdir())
    each = [f"{name}.{rank}.et" for rank in dict.fromkeys((0, ranks - 1))] if format == "chakra" else []
    total = sum(len(found[c]) for _, c in partners.devices)
    return Exported(format, ranks, total, size, tuple([str(path.parent / file) for file in (*each, path.name)]))
