"""The cost model of DistIR (2021) as first published, to reproduce its figures; not for planning.

B bytes of the result, T = the device's FLOP/s, M = its bytes/s of memory, G = a link's gigabits per second:

    elementwise ops                    B / T
    MatMul (m x k, k x n)              2 (mk + kn) / M + 2 mkn / T          2 bytes an element, whatever its dtype
    MatMulGrad (x, w, dy)              MatMul(dy, w^T) + MatMul(x^T, dy)
    MPIAllreduce over n devices        2 B (n-1) / n / 8e9 / G
    Send of elements of e bytes        e B / 8e9 / G                        on both devices
    scatter, broadcast, gather, concat, identity   0

There are no launch costs and no latencies. A gigabit is 1.25e8 bytes, not 8e9, and a Send should not count an element's
bytes twice: communication is 64 and 16 times too cheap here (float32), so the best plans differ from those in correct
units. Ops without a formula in the original use the nearest one: other products that of MatMul with their own FLOPs,
reduce-scatter, all-gather and all-to-all half an all-reduce.
"""

from __future__ import annotations

import math

from distir.executor.cost_model.seconds import CostModel, Types, computed_in, quantize, wire_of, work
from distir.ir.device import Device, Mesh
from distir.ir.spec import Attrs, Spec
from distir.ir.topology import DeviceSpec, Group, Link
from distir.ir.type import Tensor

_PER_GIGABIT = 8e9
"""Bytes per gigabit, as in the original."""
_FREE = frozenset(("Identity", "Concat"))
_PRODUCTS = frozenset(("MatMul", "MatMulGradWeight", "Gemm"))


class DistIR2021(CostModel):
    """Seconds by the formulas above. A device does one thing at a time: `overlap` is off."""

    overlap = False

    @property
    def sharing(self) -> None:
        """None: ranks are on devices of their own."""
        return None

    def compute_seconds(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, what: DeviceSpec) -> float:
        if spec.name in _FREE or spec.route == "axis":  # along the time axis: microbatches are joined, a concat
            return 0.0
        tensors = [t for t in ins if isinstance(t, Tensor)]
        peak = what.peak(computed_in(ins, outs))
        if spec.name == "MatMulGrad":
            x, w, d = (math.prod(t.shape) for t in tensors)
            moved = 2 * (d + w) + 2 * (x + d)
        elif spec.name in _PRODUCTS:
            moved = 2 * sum(math.prod(t.shape) for t in tensors[:2])
        else:
            return sum(t.bytes for t in outs) / peak
        return moved / what.dram_bandwidth + work(spec, attrs, ins, outs)[0] / peak

    def collective_seconds(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, group: Group) -> float:
        n, slowest = group.size, min(x.bandwidth for x in (group.intra, group.inter) if x is not None)
        sent, of = wire_of(spec).sent(n)
        return sent * max(ins[0].bytes, outs[0].bytes) / of / _per_second(slowest)

    def pattern(self, spec: Spec, size: float, group: Group) -> str:
        """Of all collectives a ring's bytes over the slowest link."""
        return "ring"

    def transfer(self, ins: Types, link: Link) -> float:
        return quantize(sum(t.bytes * _element(t) for t in ins) / _per_second(link.bandwidth))

    def between_seconds(self, spec: Spec, ins: Types, outs: Types, root: Device, mesh: Mesh) -> float:
        return 0.0


def _per_second(bandwidth: float) -> float:
    """The original's bytes/s of a link: 8e9 for each gigabit/s. `bandwidth` is in bytes/s."""
    return _PER_GIGABIT * bandwidth * 8 / 1e9


def _element(t: object) -> int:
    return t.dtype.size if isinstance(t, Tensor) else 1
