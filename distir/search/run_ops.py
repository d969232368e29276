"""The ops of a placed program as the ranks run them, and what they take at least, however it is cut and scheduled.

A runtime runs some ops as part of a kernel with others. Which these are is decided function by function, when the
program is cut into stages and passes. A cut joins no ops that were apart before, as what a function hands on is
written; but there the sum over microbatches of what an op makes is an op that it may be joined to. Kernels of many
tensors also run what once a step would be launched alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fusion import UNFUSED, Fused, fused
from distir.ir.cached import cached
from distir.ir.function import Function, Op
from distir.ir.host_runtime import Runtime
from distir.ir.type import Type
from distir.transforms.pipeline.phases import ends_time
from distir.transforms.rank.recompose import recompose


class RunOp(NamedTuple):
    """An op as the ranks run it, and what it does not move, at most. `product`: the product that runs as one with it;
    under another plan, as where the weight is gathered first, that may run alone, which may be quicker."""

    op: Op
    fused: Fused = UNFUSED
    product: Op | None = None

    @property
    def form(self) -> tuple[object, ...]:
        """Ops of one form take as long as each other."""
        product = () if self.product is None else (self.product.spec, *[v.type for v in self.product.inputs])
        return self.op.spec, self.op.attributes or None, self.fused, *[v.type for v in self.op.inputs], product


@cached
def run_ops(placed: Function, joins: Runtime | None) -> Mapping[Op, RunOp]:
    """Of the ops of a placed program what the ranks run in their place; none of those that become part of another.
    `joins`: what says which ops run as one (`Runtime.joins`)."""
    f = recompose(placed)
    made = {op.outputs[0]: op for op in f.ops if op.outputs}
    products = {op.outputs[0]: op for op in placed.ops if op.spec.kernel == "product"}
    most = most_fused(f, joins)
    found: dict[Op, RunOp] = {}
    for op in placed.ops:
        run = made.get(op.outputs[0]) if op.outputs else None
        if run is not None:
            inside = [products[v] for v in op.inputs if v in products] if run.spec is not op.spec else []
            found[op] = RunOp(run, most.get(run, UNFUSED), inside[0] if inside else None)
    return found


def most_fused(f: Function, joins: Runtime | None) -> dict[Op, Fused]:
    """What the compute ops of a placed, recomposed program do not move, at most."""
    if joins is None:
        return {}
    found, summed = fused(f, joins, True), {op.inputs[0] for op in f.ops if ends_time(op)}
    out: dict[Op, Fused] = {}
    for op in f.ops:
        if op.spec.comm is None and not op.spec.kernel and op.inputs and op.outputs:
            x = found.get(op, UNFUSED)
            out[op] = x._replace(result=x.result or not summed.isdisjoint(op.outputs))
    return out


def with_others(run: RunOp, runtime: Runtime | None, repeated: bool) -> Fused:
    """What an op does not move, at most, where a kernel of many tensors may also run it with others: if it is not
    `repeated`, for each of several microbatches."""
    if repeated or run.op.spec.kernel or runtime is None or not runtime.multi_tensor:
        return run.fused
    return run.fused._replace(launched=True)


def least_seconds(run: RunOp, cost: CostModel, sized: Callable[[Type], Type], repeated: bool) -> float:
    """Seconds that a compute op takes at least, at the types that `sized` gives. `repeated`: as of `with_others`."""

    def seconds(op: Op, fused: Fused) -> float:
        ins, outs = ([sized(v.type) for v in values] for values in (op.inputs, op.outputs))
        return cost.least_compute(op.spec, op.attributes, ins, outs, cost.topology.devices[0], fused)

    found = seconds(run.op, with_others(run, cost.runtime, repeated))
    return found if run.product is None else min(found, seconds(run.product, UNFUSED))
