"""The FLOPs of a model's products, convolutions and attention, and how long devices take for them at their peak."""

from __future__ import annotations

from collections.abc import Iterable

from distir.executor.cost_model.seconds import CostModel, work
from distir.ir.device import Mesh
from distir.ir.function import Function, Op, type_of
from distir.ir.topology import DeviceSpec
from distir.ir.type import Tensor

_Work = tuple[float, float]
"""FLOPs; seconds at the peak."""


def model_flops(function: Function, cost: CostModel) -> tuple[float, float]:
    """Those of a step of a sequential program, and the seconds that one device, the cluster's first, needs for them at
    the peak of their dtype; the score matrix of causal attention counts by half.

    Divided by the seconds of a step and the number of devices the latter is model FLOPs utilization (Chowdhery et al.,
    "PaLM", 2022, appendix B): what a plan repeats, recomputes or pads counts nothing. A program that is distributed
    already has what all its devices compute.
    """
    what = cost.topology.spec(cost.topology.devices[0])
    return _summed(function.ops, cost, what, {}, {})


def _summed(
    ops: Iterable[Op], cost: CostModel, what: DeviceSpec, done: dict[Function, _Work], known: dict[object, _Work]
) -> _Work:
    """`known`: by kind of op, as layers are alike."""
    flops = ideal = 0.0
    for op in ops:
        callee = op.callee
        if callee is not None:
            if callee not in done:
                done[callee] = _summed(callee.ops, cost, what, done, known)
            n, seconds = done[callee]
        elif op.spec.kernel and op.spec.comm is None:
            key = op.spec, op.attributes.form, *map(type_of, op.inputs)
            if key not in known:
                known[key] = _of(op, cost, what)
            n, seconds = known[key]
        else:
            continue
        flops, ideal = flops + n, ideal + seconds
    return flops, ideal


def _of(op: Op, cost: CostModel, what: DeviceSpec) -> _Work:
    ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
    homes = [t.device for t in outs if isinstance(t, Tensor)]
    devices = max([len(home.devices) for home in homes if isinstance(home, Mesh)], default=1)
    n = work(op.spec, op.attributes, ins, outs, cost.zigzag)[0] * devices
    return n, n / cost.peak(op.spec, ins, outs, what)
