"""Seconds of ops and of communication on the devices and links of a Topology.

An op of local shapes takes max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency)) + launch overhead: a
roofline. FLOPs are the spec's, bytes are those of operands and results (or the spec's own `work`), the peak is that of
the dtype the op computes in. Views and bundles are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from distir.executor import collective_cost as cost
from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.spec import Attrs, Spec
from distir.ir.topology import DeviceSpec, Group, Link, Topology
from distir.ir.type import DType, Replicate, Tensor, Type

QUANTUM = 2.0**-44
"""Durations are multiples of this (0.06 ps), so that sums and maxima of them are exact below 512 s."""


def quantize(seconds: float) -> float:
    """The nearest multiple of the quantum."""
    return round(seconds / QUANTUM) * QUANTUM


Types = Sequence[Type]

_COLLECTIVES: dict[str, Callable[[Types, Types, Group], float]] = {
    "MPIAllreduce": lambda ins, outs, group: cost.allreduce(ins[0].bytes, group),
    "MPIReduceScatter": lambda ins, outs, group: cost.allgather(ins[0].bytes, group),
    "MPIAllgather": lambda ins, outs, group: cost.allgather(outs[0].bytes, group),
    "MPIAlltoall": lambda ins, outs, group: cost.alltoall(ins[0].bytes, group),
}
_FANS = {"MPIScatter": True, "MPIBroadcast": True, "MPIGather": False, "MPIReduce": False}
"""Those between one device and a mesh: whether they go to the mesh."""


class CostModel:
    """Seconds on a Topology, which may still be empty when this is made, and grow.

    `tf32` lets float32 matrix products run at the topology's "tf32" peak, where it has one. `overlap` says whether a
    device's communication runs beside its compute, unless a Simulator is told otherwise; without it a device does one
    thing at a time.
    """

    overlap = True

    def __init__(self, topology: Topology, *, tf32: bool = False) -> None:
        self.topology = topology
        self.tf32 = tf32
        self._memo: dict[object, float] = {}
        self._version = topology.version

    @staticmethod
    def distir2021(topology: Topology) -> CostModel:
        """The formulas of DistIR (2021) as first published, to reproduce its figures: see `distir2021`."""
        from distir.executor.distir2021 import DistIR2021

        return DistIR2021(topology)

    def _cache(self) -> dict[object, float]:
        if self._version != self.topology.version:
            self._memo.clear()
            self._version = self.topology.version
        return self._memo

    def free(self, spec: Spec, attrs: Attrs, ins: Types) -> bool:
        """Whether the op takes no time at all: a view, a bundle, a constant, a sum over time that is already paid."""
        if spec.alias or (not ins and spec.name == "Constant"):
            return True
        if spec.name not in _COLLECTIVES or not isinstance(mesh := ins[0].device, Mesh):
            return False
        axis = attrs["axis"]
        return mesh.size(axis) == 1 or (spec.name == "MPIAllreduce" and mesh.time == mesh.position(axis))

    def collective_axis(self, spec: Spec, attrs: Attrs, ins: Types) -> str | None:
        """The mesh axis along which the op communicates; None if it is no collective among a mesh's devices."""
        if spec.name not in _COLLECTIVES or not isinstance(mesh := ins[0].device, Mesh):
            return None
        axis = attrs["axis"]
        return None if mesh.time == mesh.position(axis) else axis

    def fan(self, spec: Spec) -> bool | None:
        """Whether the op goes from a device to a mesh (True), from a mesh to a device (False), or neither (None)."""
        return _FANS.get(spec.name)

    def compute(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, device: Device) -> float:
        """Seconds an op takes on one device, quantized."""
        what = self.topology.spec(device)
        key = (spec, attrs or None, *[_form(t) for t in ins], None, *[_form(t) for t in outs], what)
        memo = self._cache()
        seconds = memo.get(key)
        if seconds is None:
            seconds = memo[key] = quantize(self.compute_seconds(spec, attrs, ins, outs, what))
        return seconds

    def collective(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, group: Group) -> float:
        """Seconds of a collective among the devices of a group, quantized."""
        key = (spec, attrs or None, *[_form(t) for t in ins], None, *[_form(t) for t in outs], group)
        memo = self._cache()
        seconds = memo.get(key)
        if seconds is None:
            seconds = memo[key] = quantize(self.collective_seconds(spec, attrs, ins, outs, group))
        return seconds

    def transfer(self, ins: Types, link: Link) -> float:
        """Seconds of a Send over a link, quantized."""
        return quantize(self.transfer_seconds(sum(t.bytes for t in ins), link))

    def between(self, spec: Spec, ins: Types, outs: Types, root: Device, mesh: Mesh) -> float:
        """Seconds of a scatter, broadcast, gather or reduction between a device and a mesh, quantized."""
        key = (spec, tuple(ins), tuple(outs), root)
        memo = self._cache()
        seconds = memo.get(key)
        if seconds is None:
            seconds = memo[key] = quantize(self.between_seconds(spec, ins, outs, root, mesh))
        return seconds

    def compute_seconds(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, what: DeviceSpec) -> float:
        """The roofline of one op. A subclass may have its own."""
        flops, size = work(spec, attrs, ins, outs)
        seconds = size / (what.dram_bandwidth * what.memory_efficiency)
        if flops:
            dtype = computed_in(ins, outs)
            peak = what.peak(dtype)
            if self.tf32 and dtype is not None and dtype.name == "f32" and spec.weight is not None:
                peak = what.peak("tf32")
            seconds = max(seconds, flops / (peak * what.compute_efficiency))
        return seconds + what.kernel_launch_overhead

    def collective_seconds(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, group: Group) -> float:
        """See `collective_cost`. A subclass may have its own."""
        return _COLLECTIVES[spec.name](ins, outs, group)

    def transfer_seconds(self, size: float, link: Link) -> float:
        """The link's latency, and the bytes over its bandwidth. A subclass may have its own."""
        return link.latency + size / link.bandwidth

    def between_seconds(self, spec: Spec, ins: Types, outs: Types, root: Device, mesh: Mesh) -> float:
        """See `collective_cost`. A gather takes each distinct piece once. A subclass may have its own."""
        near = _links(self.topology, root, mesh)
        if spec.name == "MPIScatter":
            return cost.serial(outs[0].bytes, near)
        if spec.name == "MPIGather":
            pieces = _pieces(ins[0])
            near = near if pieces == len(mesh.devices) else _links(self.topology, root, mesh, pieces)
            return cost.serial(ins[0].bytes, near)
        return cost.pipelined(ins[0].bytes, _chain(self.topology, root, mesh))


def _form(t: Type) -> object:
    """What of a type decides seconds: all but which devices and microbatches it is of."""
    if isinstance(t, Tensor):
        mesh = t.device
        return (t.dtype, t.shape, t.placements, mesh.axes, mesh.sizes) if isinstance(mesh, Mesh) else (t.dtype, t.shape)
    return tuple([_form(x) for x in t.types])


def work(spec: Spec, attrs: Attrs, ins: Types, outs: Types) -> tuple[float, float]:
    """FLOPs and bytes of an op on one device. Raises ModelError, naming the op, where its rule fails."""
    size = float(sum(t.bytes for t in ins) + sum(t.bytes for t in outs))
    if spec.comm is not None:
        return 0.0, size
    tensors = [t for t in ins if isinstance(t, Tensor)], [t for t in outs if isinstance(t, Tensor)]
    local = {k: v for k, v in attrs.items() if k not in ("device", "place")}
    if spec.local is not None:
        local.update(spec.local(attrs, *tensors))
    shapes = [t.shape for t in tensors[0]], [t.shape for t in tensors[1]]
    try:
        if spec.work is not None:
            flops, moved = spec.work(local, *shapes)
            return float(flops), float(moved) * tensors[1][0].dtype.size or size
        return spec.flops(local, *shapes), size
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise ModelError(f"{spec.name}: its work at local shapes {shapes[0]} cannot be told: {e}") from e


def computed_in(ins: Types, outs: Types) -> DType | None:
    """The dtype an op computes in: that of its largest floating operand (the first, if equal), else of its results.

    A statistic in a wider dtype (the log-sum-exp of attention, the mean of a norm) has no more elements than what it is
    of, and stands after it; so do a mask, indices and the number of a step. None if there is no tensor.
    """
    for types in (ins, outs):
        found = [t for t in types if isinstance(t, Tensor) and t.dtype.floating]
        if found:
            return max(found, key=lambda t: math.prod(t.shape)).dtype
    return ins[0].dtype if ins and isinstance(ins[0], Tensor) else None


def _pieces(t: Type) -> int:
    """How many devices hold different pieces of a value."""
    count = 1
    if isinstance(t, Tensor) and isinstance(t.device, Mesh):
        for i, (p, n) in enumerate(zip(t.placements, t.device.sizes, strict=True)):
            if not isinstance(p, Replicate) and i != t.device.time:
                count *= n
    return count


def _links(topology: Topology, root: Device, mesh: Mesh, first: int | None = None) -> list[tuple[int, Link]]:
    """How many of a mesh's (first) devices the root reaches over each kind of link, itself left out."""
    count: dict[Link, int] = {}
    for d in mesh.devices[:first]:
        if d is not root:
            link = topology.link(root, d)
            count[link] = count.get(link, 0) + 1
    return [(n, link) for link, n in count.items()]


def _chain(topology: Topology, root: Device, mesh: Mesh) -> list[tuple[int, Link]]:
    """How many hops over each kind of link a chain from the root through the mesh's devices has."""
    count: dict[Link, int] = {}
    here = root
    for d in mesh.devices:
        if d is not here:
            link = topology.link(here, d)
            count[link] = count.get(link, 0) + 1
            here = d
    return [(n, link) for link, n in count.items()]
