"""What ops of a placed program do not move, at most, as a runtime runs them as part of a kernel with others.

Which ops these are is decided function by function, when the program is cut into stages and passes. A cut joins no ops
that were apart before, as what a function hands on is written; but there the sum over microbatches of what an op makes
is an op that it may be joined to. Kernels of many tensors also run what once a step would be launched alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from distir.executor.cost_model.fusion import UNFUSED, Fused, fused
from distir.ir.cached import cached
from distir.ir.function import Function, Op
from distir.ir.host_runtime import Runtime
from distir.transforms.pipeline.phases import ends_time
from distir.transforms.rank.recompose import recompose


@cached
def most_fused(placed: Function, runtime: Runtime | None) -> Mapping[Op, Fused]:
    """Of the ops of a placed program as the ranks run them (`recompose`); none under no runtime. `runtime`: what says
    which ops run as one (`Runtime.joins`)."""
    if runtime is None:
        return {}
    f = recompose(placed)
    found, summed = fused(f, runtime, True), {op.inputs[0] for op in f.ops if ends_time(op)}
    out: dict[Op, Fused] = {}
    for op in f.ops:
        if op.spec.comm is not None or op.spec.kernel or not (op.inputs and op.outputs):
            continue
        x = found.get(op, UNFUSED)
        out[op] = Fused(x.operands, x.result or not summed.isdisjoint(op.outputs), x.launched)
    return out


def with_others(op: Op, x: Fused, runtime: Runtime | None, repeated: bool) -> Fused:
    """The same, where a kernel of many tensors may also run an op with others: if it is not `repeated`, for each of
    several microbatches."""
    if repeated or op.spec.kernel or runtime is None or not runtime.multi_tensor:
        return x
    return x._replace(launched=True)
