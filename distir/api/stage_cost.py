"""The cost function that balances pipeline stages: seconds by the cluster's cost model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from distir.executor.cost_model import CostModel
from distir.ir.device import Mesh, names_of
from distir.ir.function import Op
from distir.ir.spec import lookup
from distir.ir.type import Tensor, Type
from distir.transforms.pipeline.stages import PLAIN, StageCost
from distir.transforms.plan import BATCH, Plan


def _as_it_is(t: Type) -> Type:
    return t


def _is_summed(t: Type) -> bool:
    """Whether values of the type are to be summed over microbatches, as gradients of weights are."""
    return isinstance(t, Tensor) and t.over_time.kind is not None


class OpSeconds(NamedTuple):
    """Seconds of an op of a placed program on one device, for one microbatch; as if it were placed on `mesh`.

    Collectives along the axes `beside` cost nothing, nor do reductions of weights' gradients (sums over microbatches)
    along the axes `further`.
    """

    cost: CostModel
    mesh: Mesh | None = None
    sized: Callable[[Type], Type] = _as_it_is
    """Gives the type for which a type of the program stands."""
    beside: AbstractSet[str] = frozenset()
    further: AbstractSet[str] = frozenset()
    version: int = 0
    """That of the topology: it may be changed, and the seconds with it."""

    def __call__(self, op: Op) -> float:
        cost, spec, attrs = self.cost, op.spec, op.attributes
        ins, outs = ([self.sized(v.type) for v in values] for values in (op.inputs, op.outputs))
        mesh = self.mesh or attrs.get("device") or ins[0].device  # type: ignore[union-attr]
        if not isinstance(mesh, Mesh) or cost.free(spec, attrs, ins):
            return 0.0
        if (axis := cost.collective_axis(spec, attrs, ins)) is not None:
            if not self.beside.isdisjoint(names_of(axis)):
                return 0.0
            if not self.further.isdisjoint(names_of(axis)) and _is_summed(ins[0]):
                return 0.0
            return cost.collective(spec, attrs, ins, outs, cost.topology.group(mesh.group(axis)))
        return cost.compute(spec, attrs, ins, outs, mesh.devices[0])


def stage_cost(
    cost: CostModel, plan: Plan, mesh: Mesh | None = None, sized: Callable[[Type], Type] = _as_it_is
) -> StageCost:
    """The stage cost of a plan: seconds on its first device, of the link from the first stage to the second, and, where
    cores do what links do elsewhere (an inline runtime), of a message beside its bytes.

    What replicas send each other takes place beside compute and costs nothing, and what ZeRO sends along further axes
    of the data: so stages do not depend on how many replicas there are, or what these split. `mesh` and `sized` are
    those of `OpSeconds`.
    """
    devices = cost.topology.devices
    if plan.stages.size == 1 or len(devices) < plan.size:  # `distribute` rejects a plan with too many devices
        return PLAIN
    link = cost.topology.link(devices[0], devices[plan.spacing(plan.stages.name)])
    replicas = frozenset([axis.name for axis in plan.sharding.along(BATCH)])
    further = frozenset([split.axis for split in plan.split])
    # each device sends only its own piece of a microbatch
    waits = cost.runtime is not None and cost.runtime.inline
    message = link.latency + cost.issue(lookup("Send")) if waits else 0.0
    op = OpSeconds(cost, mesh, sized, replicas, further, cost.topology.version)
    return StageCost(op, 1 / (link.bandwidth * plan.sharding.pieces), message)
