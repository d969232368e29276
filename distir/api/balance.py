"""Stages balanced by what a cost model says of a cluster, in seconds."""

from __future__ import annotations

import math
from typing import NamedTuple

from distir.api.plan import Plan
from distir.executor.cost_model import CostModel
from distir.ir.device import Mesh
from distir.ir.function import Op
from distir.transforms.stages import PLAIN, StageCost


class OpSeconds(NamedTuple):
    """Seconds of an op of a placed program on one device, for one microbatch."""

    cost: CostModel

    def __call__(self, op: Op) -> float:
        cost, spec, attrs = self.cost, op.spec, op.attributes
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        mesh = attrs.get("device") or ins[0].device  # type: ignore[union-attr]
        if not isinstance(mesh, Mesh) or cost.free(spec, attrs, ins):
            return 0.0
        if (axis := cost.collective_axis(spec, attrs, ins)) is not None:
            return cost.collective(spec, attrs, ins, outs, cost.topology.group(mesh.group(axis)))
        return cost.compute(spec, attrs, ins, outs, mesh.devices[0])


def stage_cost(cost: CostModel, plan: Plan) -> StageCost:
    """What the plan's stages are to be balanced by: that of its first device, and of the link to the second stage."""
    devices = cost.topology.devices
    if plan.pp == 1 or len(devices) < plan.size:  # the second cannot be carried out: `distribute` says so
        return PLAIN
    size = {"dp": plan.dp, "tp": plan.tp}
    apart = math.prod(size[axis] for axis in plan.order[: plan.order.index("pp")])
    link = cost.topology.link(devices[0], devices[apart])
    # a device sends its replica's part of a microbatch
    return StageCost(OpSeconds(cost), 1 / (link.bandwidth * plan.dp * plan.microbatches))
