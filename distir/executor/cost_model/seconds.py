"""Seconds of ops and of communication on the devices and links of a Topology.

Roofline model, at local shapes: an op takes launch overhead + max(F (1 + √(h/F)) / (peak · efficiency),
bytes / (bandwidth · efficiency)). F are the spec's FLOPs, bytes are those of operands and results (or the spec's own
`work`), the peak is that of the dtype that the op computes in; h is the size at which a product reaches half of its
efficiency, 0 for other ops. Views and bundles are free. The root fits measured products as well as h/F does (A100: mean
error 4.5 and 4.6 %), and small ones, of which there are no measurements in 16 bits, do not all take the time of h.
Products in float32 and float64 take whole tiles and waves (`Tiles`) where the device has figures of these. An op whose
speed is measured on the device (`OpSpeed`) takes that instead.

With a `Runtime` the host takes time to issue each op, and chains of pointwise ops may count as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from distir.executor.cost_model import collective_cost as cost
from distir.executor.cost_model.fusion import UNFUSED, Fused
from distir.ir.communication import Wire
from distir.ir.device import AxisNames, Device, Mesh
from distir.ir.errors import ModelError, UsageError
from distir.ir.host_runtime import Runtime
from distir.ir.measured import measured
from distir.ir.spec import Attrs, Spec
from distir.ir.tiles import Product
from distir.ir.topology import CoreSharing, DeviceSpec, FusedAttention, Group, Link, Topology
from distir.ir.type import REPLICATE, DType, Int8, Tensor, Type

_APART_KERNELS, _APART_BYTES = 4, 33
"""Of masked scores that a runtime does not fuse with their softmax, more than of those that it does: a cast to float32,
the scale, the mask, the softmax and a cast back are 5 kernels, which move 36 bytes a score (2 + 4, 8, 8, 8, 4 + 2), not
4; their gradients are 5 that move 40 (2 + 4, 12, 8, 8, 4 + 2), not 6. Both ways 33 more, on average."""
_STREAMS = 2
"""In so many streams Transformer Engine runs the kernels of ring attention (its `cp_stream`)."""
QUANTUM = 2.0**-44
"""Durations are multiples of this (0.06 ps), so that sums and maxima of them are exact below 512 s."""


def quantize(seconds: float) -> float:
    """The nearest multiple of the quantum."""
    return round(seconds / QUANTUM) * QUANTUM


Types = Sequence[Type]


class CostModel:
    """Seconds on a Topology, which may be extended later, under a runtime (None: a host that takes no time).

    With `tf32`, float32 matrix products run at the topology's "tf32" peak, if it has one. `overlap` is the default of a
    Simulator: whether a device's communication overlaps its compute; without it a device does one thing at a time.
    """

    overlap = True

    def __init__(self, topology: Topology, *, tf32: bool = False, runtime: Runtime | None = None) -> None:
        self.topology = topology
        self.tf32 = tf32
        self.runtime = runtime
        self._memo: dict[object, float] = {}
        self._version = topology.version
        if (
            runtime is not None
            and runtime.fp8
            and topology.devices
            and not topology.spec(topology.devices[0]).has(_FP8)
        ):
            of = f" of {topology.regular.name}" if topology.regular is not None else ""
            hint = "peak_tflops.f8 of a cluster's TOML file"
            raise UsageError(f"{runtime.name}: the devices{of} have no peak of 8 bits", hint)

    @staticmethod
    def distir2021(topology: Topology) -> CostModel:
        """The formulas of DistIR (2021) as first published, to reproduce its figures: see `distir2021`."""
        from distir.executor.cost_model.distir2021 import DistIR2021

        return DistIR2021(topology)

    def _cache(self) -> dict[object, float]:
        if self._version != self.topology.version:
            self._memo.clear()
            self._version = self.topology.version
        return self._memo

    def free(self, spec: Spec, attrs: Attrs, ins: Types) -> bool:
        """Whether the op takes no time: a view, a bundle, a constant, a sum over time (its accumulation is counted)."""
        if spec.alias or (not ins and spec.name == "Constant"):
            return True
        return spec.route == "axis" and spec.comm is not None and spec.comm.idle(attrs, ins[0])

    def collective_axis(self, spec: Spec, attrs: Attrs, ins: Types) -> AxisNames | None:
        """The mesh axis, or axes, along which the op communicates; None if it is no collective, or along time."""
        if spec.route != "axis" or not isinstance(mesh := ins[0].device, Mesh):
            return None
        axis = attrs["axis"]
        return None if mesh.is_time(axis) else axis

    def fan(self, spec: Spec) -> bool | None:
        """True if the op sends from a device to a mesh, False from a mesh to a device, None if it does neither."""
        return spec.route == "scatter" if spec.route in ("scatter", "gather") else None

    def compute(
        self,
        spec: Spec,
        attrs: Attrs,
        ins: Types,
        outs: Types,
        device: Device,
        fused: Fused = UNFUSED,
        moved: float = 0.0,
    ) -> float:
        """Seconds an op takes on one device, quantized; `fused` is what it does not move, in a chain, `moved` the bytes
        that other kernels move for it."""
        what = self.topology.spec(device)
        key = (spec, attrs or None, *[_form(t) for t in ins], None, *[_form(t) for t in outs], what, fused, moved)
        memo = self._cache()
        seconds = memo.get(key)
        if seconds is None:
            seconds = self.compute_seconds(spec, attrs, ins, outs, what) + self._gap
            seconds += moved / what.bandwidth
            if fused is not UNFUSED:
                seconds = self._in_chain(seconds, spec, ins, outs, what, fused)
            seconds = memo[key] = quantize(seconds)
        return seconds

    def streamed(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types) -> float:
        """The bytes of an op that go through the memory that all cores of a host share: of what it moves, tensors that
        the cache of a core does not hold (see `CoreSharing`).

        What is written is first read into the cache (write-allocate), unless an operand of its type may be there.
        """
        held = self.sharing.cache if self.sharing is not None else 0.0
        operands = {_form(t) for t in ins}
        beyond = sum([t.bytes for t in (*ins, *outs) if t.bytes > held])
        anew = sum([t.bytes for t in outs if t.bytes > held and _form(t) not in operands])
        return min(beyond, work(spec, attrs, ins, outs)[1]) + anew

    @property
    def sharing(self) -> CoreSharing | None:
        """How ranks share the cores of a host; None if each has a device of its own."""
        r = self.topology.uniform
        return None if r is None else r.sharing

    @property
    def _gap(self) -> float:
        """Seconds that a compute op takes on the device beside its work, under the runtime."""
        return self.runtime.gap if self.runtime is not None else 0.0

    def _in_chain(self, seconds: float, spec: Spec, ins: Types, outs: Types, what: DeviceSpec, fused: Fused) -> float:
        """Seconds that are left of an op that is limited by memory, without what it does not move."""
        saved = sum(ins[k].bytes for k in fused.operands) + (outs[0].bytes if fused.result else 0)
        measured = what.speed(spec.timed_as, computed_in(ins, outs))
        bandwidth = self._bandwidth(ins, outs, what) if measured is None else measured.bandwidth
        launch = what.kernel_launch_overhead if measured is None else measured.launch
        return max(0.0, seconds - saved / bandwidth - (launch + self._gap if fused.launched else 0.0))

    def _bandwidth(self, ins: Types, outs: Types, what: DeviceSpec) -> float:
        """The bytes/s of operands and results that an op limited by memory reaches."""
        narrow = any(isinstance(t, Tensor) and t.dtype.floating and t.dtype.size < 4 for t in (*ins, *outs))
        passes = self.runtime.passes if self.runtime is not None and narrow else 1.0
        return what.bandwidth / passes

    def issue(
        self,
        spec: Spec,
        devices: int = 1,
        fused: Fused = UNFUSED,
        computes: bool = False,
        more: int = 0,
    ) -> float:
        """Seconds that a host takes to issue an op to its device, quantized; `devices` take part in it.

        `computes`: it communicates with no other device, as along the time axis: an accumulation. Only an inline
        runtime issues that as a compute op: the figures of the others are fitted without the distinction. `more`:
        `more_kernels`.
        """
        r = self.runtime
        if r is None or (fused.launched and not more):
            return 0.0
        if spec.route == "send" and r.transfer is not None:
            return quantize(r.transfer)
        if spec.route is None or (computes and r.inline):
            return quantize(r.op * (more + (not fused.launched)))
        return quantize(r.communication + r.member * (devices - 1))

    def more_kernels(self, spec: Spec, ins: Types) -> int:
        """How many kernels an op of masked scores takes more than its chain, as the runtime cannot fuse them.

        Source: Megatron-LM, FusedScaleMaskSoftmax: its kernel takes `score_block` matrices of 16 bits at once.
        """
        if not spec.scores or self.runtime is None or not isinstance(t := ins[0], Tensor) or t.dtype.size > 2:
            return 0
        return _APART_KERNELS if math.prod(t.shape[:-2]) % self.runtime.score_block else 0

    @cached_property
    def in_16_bits(self) -> CostModel:
        """The cost model under whose runtime no product is in 8 bits."""
        if self.runtime is None or not self.runtime.fp8:
            return self
        other = copy(self)
        other.runtime, other._memo = replace(self.runtime, fp8=False), {}
        return other

    def least_compute(
        self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, device: Device, fused: Fused = UNFUSED
    ) -> float:
        """Seconds that an op takes at least, in 8 bits or in 16. `fused`: as of `compute`."""
        given = spec, attrs, ins, outs, device, fused
        return min(self.compute(*given), self.in_16_bits.compute(*given))

    def enter(self) -> float:
        """Seconds that a host takes to call a function, quantized."""
        return quantize(self.runtime.call) if self.runtime is not None else 0.0

    def collective(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, group: Group) -> float:
        """Seconds of a collective among the devices of a group, quantized."""
        key = (spec, attrs or None, *[_form(t) for t in ins], None, *[_form(t) for t in outs], group)
        memo = self._cache()
        seconds = memo.get(key)
        if seconds is None:
            skew = self.runtime.skew if self.runtime is not None else 0.0
            alone = self.collective_seconds(spec, attrs, ins, outs, group)
            seconds = memo[key] = quantize(alone * (1 + skew))
        return seconds

    def exposed(self, seconds: float, pieces: int, compute: float) -> float:
        """Seconds of a collective that are left if it is sent in pieces beside so many seconds of compute, quantized.

        One piece has nothing to run beside.
        """
        return quantize(max(seconds / pieces, seconds - compute * (1 - 1 / pieces)))

    def least(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, group: Group) -> float:
        """Seconds of a collective that are left at least, whatever it is sent beside."""
        r = self.runtime
        if r is not None and r.fp8 and r.fp8_gathers and spec.comm is not None and spec.comm.gathers:
            ins, outs = in_8_bits(ins), in_8_bits(outs)
        alone = self.collective(spec, attrs, ins, outs, group)
        pieces = r is not None and (r.overlaps_products or r.ring_attention)
        sent_so = pieces and spec.comm is not None and (spec.comm.gathers or spec.comm.scatters)
        return alone / group.size if sent_so else alone

    @property
    def slows(self) -> bool:
        """Whether compute may lose seconds beside a collective."""
        r = self.topology.regular
        return r is not None and any([x is not None and x.slows for x in (r.intra, r.inter, r.near_link, r.rail_link)])

    def beside(self, seconds: float, group: Group) -> float:
        """Seconds that compute beside a collective of a group loses, if the collective takes so many, quantized.

        Source: Calculon (Isaev et al., SC'23): a share of the time of the network ("processor_usage"). In a group on
        several nodes the links inside them are in use for a part of it: at the rate of the slower of both. The greater
        share counts.
        """
        if group.inter is None:
            return quantize(seconds * group.intra.slows)
        in_use = cost.bus(group) / group.intra.collective(group.per_node) if group.per_node > 1 else 0.0
        return quantize(seconds * max(group.intra.slows * in_use, group.inter.slows))

    def transfer(self, ins: Types, link: Link) -> float:
        """Seconds of a Send over a link, quantized.

        Under a runtime that scatters, each of the devices that have the same value sends its part of it, and they
        gather the parts inside their node.
        """
        size, sent, regular = float(sum(t.bytes for t in ins)), self.bytes_sent(ins), self.topology.regular
        gathered = (size - sent) / regular.intra.collective() if regular is not None and sent < size else 0.0
        return quantize(self.transfer_seconds(sent, link) + gathered)

    def bytes_sent(self, ins: Types) -> float:
        """The bytes of a Send that a device sends: under a runtime that scatters its part of what others have, too."""
        scatters = self.runtime is not None and self.runtime.scatters and self.topology.regular is not None
        return float(sum([t.bytes / (_copies(t) if scatters else 1) for t in ins]))

    def between(self, spec: Spec, ins: Types, outs: Types, root: Device, mesh: Mesh) -> float:
        """Seconds of a scatter, broadcast, gather or reduction between a device and a mesh, quantized."""
        key = (spec, tuple(ins), tuple(outs), root)
        memo = self._cache()
        seconds = memo.get(key)
        if seconds is None:
            seconds = memo[key] = quantize(self.between_seconds(spec, ins, outs, root, mesh))
        return seconds

    def _moved(self, spec: Spec, ins: Types) -> float | None:
        """The bytes that the runtime's kernels of a loss or a norm read and write, where it has figures of its own."""
        r, x = self.runtime, ins[0] if ins else None
        if r is None or not isinstance(x, Tensor):
            return None
        if spec.logits is not None and (moved := r.bytes_of_logits(split_classes(x))) is not None:
            return moved[spec.logits == "backward"] * math.prod(x.shape)
        if spec.norm is not None and r.norm_bytes is not None and x.dtype.size == 2:
            return r.norm_bytes[spec.norm == "backward"] * math.prod(x.shape)
        return None

    def compute_seconds(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, what: DeviceSpec) -> float:
        """The roofline of one op. A subclass may have its own."""
        if spec.comm is not None and spec.comm.seconds is not None:
            return spec.comm.seconds(attrs)
        flops, size = work(spec, attrs, ins, outs, self.zigzag)
        bandwidth = what.bandwidth if spec.kernel else self._bandwidth(ins, outs, what)
        dtype = computed_in(ins, outs)
        if spec.kernel == "product" and what.unaligned < 1 and not _aligned(dtype, (*ins, *outs)):
            flops /= what.unaligned
        in_fp8 = self.in_fp8(spec, ins, outs, what)
        if not in_fp8 and (measured := what.speed(spec.timed_as, dtype)) is not None:
            return measured.seconds(flops, size)
        if (moved := self._moved(spec, ins)) is not None:
            size, bandwidth = moved, what.bandwidth
        if self.more_kernels(spec, ins) and isinstance(ins[0], Tensor):
            size += _APART_BYTES * math.prod(ins[0].shape)
        seconds = size / bandwidth
        if flops:
            peak = self.peak(spec, ins, outs, what)
            if spec.kernel == "product" and what.wide is not None and _wide(dtype) and not self._in_tf32(spec, dtype):
                limit = what.wide.seconds(product_of(spec, attrs, ins, outs, flops), peak)
            else:
                efficiency, half = what.compute_efficiency, what.half_size if spec.kernel else 0.0
                share = self._kernels(spec, what) * (what.fp8 if in_fp8 else 1.0)
                if spec.kernel == "attention":
                    efficiency, half = what.fused_attention[:2]
                    share /= self._slower_attention(spec, ins, outs, flops, what.fused_attention)
                limit = (flops + math.sqrt(half * flops)) / (peak * efficiency * share)
            seconds = max(seconds, limit)
        if spec.kernel == "attention" and self.runtime is not None and self.runtime.expands_keys:
            seconds += _expanded(ins) / what.bandwidth
        return seconds + what.kernel_launch_overhead

    @property
    def zigzag(self) -> bool:
        """Whether queries of causal attention are split so that it is the same work for all devices: see `work`."""
        return self.runtime is not None and self.runtime.zigzag

    def peak(self, spec: Spec, ins: Types, outs: Types, what: DeviceSpec) -> float:
        """The FLOP/s that a device has at most for an op: of the dtype that it computes in, of tf32, or of 8 bits."""
        if self.in_fp8(spec, ins, outs, what):
            return what.peak(_FP8)
        dtype = computed_in(ins, outs)
        return what.peak("tf32" if self._in_tf32(spec, dtype) else dtype)

    def _in_tf32(self, spec: Spec, dtype: DType | None) -> bool:
        return self.tf32 and dtype is not None and dtype.name == "f32" and spec.weight is not None

    def in_fp8(self, spec: Spec, ins: Types, outs: Types, what: DeviceSpec) -> bool:
        """Whether the runtime runs it in 8 bits: a product of a weight in 16 bits, or a gradient of that, where the
        device has such products."""
        if self.runtime is None or not self.runtime.fp8 or spec.kernel != "product":
            return False
        matrix = any([isinstance(t, Tensor) and len(t.shape) == 2 for t in (*ins, *outs)])
        dtype = computed_in(ins, outs)
        return matrix and dtype is not None and dtype.size == 2 and what.has(_FP8)

    def _slower_attention(self, spec: Spec, ins: Types, outs: Types, flops: float, speed: FusedAttention) -> float:
        """How many times as long as at full efficiency an op of attention takes for its shapes, where it has FLOPs."""
        q, k, r = ins[0], ins[1], self.runtime
        if not isinstance(q, Tensor) or not isinstance(k, Tensor):
            return 1.0
        seen = flops / work(spec, {}, ins, outs)[0]  # the share of scores that the mask leaves
        keys, queries, steps = k.shape[-2] * seen, math.prod(q.shape[:-1]), q.global_shape[-2] // max(1, q.shape[-2])
        if r is not None and r.zigzag and steps > 1:  # a kernel for the keys of each device
            keys /= steps
            queries *= _STREAMS if r.ring_attention else 1
        return speed.slower(keys, queries, max(q.shape[-1], 1))

    def _kernels(self, spec: Spec, what: DeviceSpec) -> float:
        """How many times as quick as the device's figures the runtime's kernels of a product or of attention are."""
        r = self.runtime
        if r is None or not spec.kernel:
            return 1.0
        if spec.kernel == "attention":
            return r.attention * (what.cudnn if r.cudnn else 1.0)
        return what.early if r.early else 1.0

    def collective_seconds(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, group: Group) -> float:
        """As measured, else see `collective_cost`. A subclass may have its own."""
        wire, size = wire_of(spec), self.collective_bytes(spec, attrs, ins, outs, group)
        found = measured(group.measured, wire.collective, group.size)
        if found is None:
            return cost.collective(wire, size, group)
        return found.seconds(size)

    def collective_bytes(self, spec: Spec, attrs: Attrs, ins: Types, outs: Types, group: Group) -> float:
        """The bytes of the whole value that is reduced, gathered or passed on."""
        wire = wire_of(spec)
        return wire.size(ins[0].bytes, outs[0].bytes) * wire.share(attrs, group.size)

    def pattern(self, spec: Spec, size: float, group: Group) -> str:
        """How a collective on so many bytes is done, as `Wire` names patterns; "measured" where its seconds are.

        A subclass with seconds of its own has its own.
        """
        wire = wire_of(spec)
        if measured(group.measured, wire.collective, group.size) is not None:
            return "measured"
        return cost.pattern(wire, size, group)

    def transfer_seconds(self, size: float, link: Link) -> float:
        """As measured between two devices of a node, else the link's latency, and the bytes over its bandwidth. A
        subclass may have its own."""
        r = self.topology.regular
        if r is not None and link == r.intra and (found := measured(r.measured, "send", 2)) is not None:
            return found.seconds(size)
        return link.latency + size / link.bandwidth

    def between_seconds(self, spec: Spec, ins: Types, outs: Types, root: Device, mesh: Mesh) -> float:
        """See `collective_cost`. A gather takes each distinct piece once. A subclass may have its own."""
        t = outs[0] if spec.route == "scatter" else ins[0]
        if "chain" in wire_of(spec).patterns:
            return cost.pipelined(t.bytes, _chain(self.topology, root, mesh))
        first = _pieces(t) if spec.route == "gather" else None
        return cost.serial(t.bytes, _links(self.topology, root, mesh, first))


def in_8_bits(types: Types) -> list[Type]:
    """The types with 8 bits a number in place of 16: of integers, of which there is no mean."""
    return [
        Tensor(Int8, t.shape, t.device, [REPLICATE if p.dim is None else p for p in t.placements])
        if isinstance(t, Tensor) and t.dtype.size == 2
        else t
        for t in types
    ]


def split_classes(logits: Tensor) -> bool:
    """Whether logits are split over devices along the classes."""
    return logits.shape[-1] < logits.global_shape[-1]


def _copies(t: Type) -> int:
    """How many devices have the same value."""
    if not isinstance(t, Tensor) or not isinstance(mesh := t.device, Mesh):
        return 1
    axes = zip(mesh.sizes, t.placements, strict=True)
    return math.prod([n for i, (n, p) in enumerate(axes) if p is REPLICATE and i != mesh.time])


_FP8 = "f8"
"""The peak of products in 8 bits."""


_ROW = 16
"""The bytes of which tensor cores need the rows of operands and results to be a multiple."""


def _aligned(dtype: DType | None, types: Types) -> bool:
    """Whether tensor cores take all matrices of a product as they are; wider than 16 bits it is for other units."""
    if dtype is None or dtype.size != 2:
        return True
    matrices = [t for t in types if isinstance(t, Tensor) and len(t.shape) > 1]
    return all([t.shape[-1] * t.dtype.size % _ROW == 0 for t in matrices])


def _wide(dtype: DType | None) -> bool:
    """Whether products of a dtype run without tensor cores: float32 and float64."""
    return dtype is not None and dtype.floating and dtype.size > 2


def product_of(spec: Spec, attrs: Attrs, ins: Types, outs: Types, flops: float) -> Product:
    """The sizes of a product on one device, whose FLOPs are known.

    What `axes` does not describe counts as one product: with a matrix of weights, of the rows and columns of its
    result; else, such as a convolution, with a square result.
    """
    shapes = [t.shape for t in ins if isinstance(t, Tensor)]
    f = spec.factors(attrs, shapes)
    if f is None or len(f.ins) != 2:
        shape = outs[0].shape if isinstance(outs[0], Tensor) else ()
        weight = None if spec.weight is None else ins[spec.weight]
        matrix = isinstance(weight, Tensor) and len(weight.shape) == 2
        n = max(1, shape[-1] if matrix and shape else round(math.sqrt(math.prod(shape))))
        m = max(1, math.prod(shape) // n)
        return Product(1, m, n, max(1, round(flops / (2 * m * n))))
    of, sizes = [set(names) for names in f.ins], [1, 1, 1, 1]
    for name, size in f.sizes.items():
        inside = (name in of[0], name in of[1])
        sizes[3 if name in f.kinds else {(True, False): 1, (False, True): 2}.get(inside, 0)] *= size
    return Product(*sizes)


def wire_of(spec: Spec) -> Wire:
    """The traffic of an op that communicates along an axis, or between a device and a mesh."""
    if spec.comm is None or spec.comm.wire is None:
        raise ModelError(f"{spec.name} sends nothing")
    return spec.comm.wire


def _form(t: Type) -> object:
    """Cache key of a type: all of it that determines seconds, without its devices and microbatches."""
    if isinstance(t, Tensor):
        mesh = t.device
        return (t.dtype, t.shape, t.placements, mesh.axes, mesh.sizes) if isinstance(mesh, Mesh) else (t.dtype, t.shape)
    return tuple([_form(x) for x in t.types])


def work(spec: Spec, attrs: Attrs, ins: Types, outs: Types, zigzag: bool = False) -> tuple[float, float]:
    """FLOPs and bytes of an op on one device. Raises ModelError, naming the op, if its rule fails.

    `zigzag`: queries of causal attention are split so that it is the same work for all devices.
    """
    size = float(sum(t.bytes for t in ins) + sum(t.bytes for t in outs))
    if spec.comm is not None:
        return 0.0, size
    tensors = [t for t in ins if isinstance(t, Tensor)], [t for t in outs if isinstance(t, Tensor)]
    local = {k: v for k, v in attrs.items() if k not in ("device", "place")}
    if spec.local is not None:
        local.update(spec.local(attrs, *tensors))
    if zigzag and spec.kernel == "attention":
        local["queries"] = tensors[0][0].global_shape[-2]
    shapes = [t.shape for t in tensors[0]], [t.shape for t in tensors[1]]
    try:
        if spec.work is not None:
            flops, moved = spec.work(local, *shapes)
            return float(flops), float(moved) * tensors[1][0].dtype.size or size
        return spec.flops(local, *shapes), size
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise ModelError(f"{spec.name}: its work at local shapes {shapes[0]} cannot be computed: {e}") from e


def _expanded(ins: Types) -> float:
    """The bytes that are moved to write keys and values once for each head of queries that shares them; backward, to
    sum up their gradients."""
    q, *keys = [t for t in ins[:3] if isinstance(t, Tensor)]
    times = math.prod(q.shape[:-2]) / max(1, math.prod(keys[0].shape[:-2]))
    return sum([t.bytes for t in keys]) * (1 + times) if times > 1 else 0.0


def computed_in(ins: Types, outs: Types) -> DType | None:
    """The dtype an op computes in: that of its largest floating operand (the first, if equal), else of its results.

    A statistic in a wider dtype (the log-sum-exp of attention, the mean of a norm) has no more elements than its tensor
    and comes after it; so do masks, indices and the number of a step. None if there is no tensor.
    """
    for types in (ins, outs):
        found = [t for t in types if isinstance(t, Tensor) and t.dtype.floating]
        if found:
            return max(found, key=lambda t: math.prod(t.shape)).dtype
    return ins[0].dtype if ins and isinstance(ins[0], Tensor) else None


def _pieces(t: Type) -> int:
    """The number of distinct pieces of a value over the devices."""
    count = 1
    if isinstance(t, Tensor) and isinstance(t.device, Mesh):
        for i, (p, n) in enumerate(zip(t.placements, t.device.sizes, strict=True)):
            if p is not REPLICATE and i != t.device.time:
                count *= n
    return count


def _links(topology: Topology, root: Device, mesh: Mesh, first: int | None = None) -> list[tuple[int, Link]]:
    """For each kind of link the number of the mesh's (first) devices that the root reaches over it, without itself."""
    count: dict[Link, int] = {}
    for d in mesh.devices[:first]:
        if d is not root:
            link = topology.link(root, d)
            count[link] = count.get(link, 0) + 1
    return [(n, link) for link, n in count.items()]


def _chain(topology: Topology, root: Device, mesh: Mesh) -> list[tuple[int, Link]]:
    """For each kind of link the number of hops over it, of a chain from the root through the mesh's devices."""
    count: dict[Link, int] = {}
    here = root
    for d in mesh.devices:
        if d is not here:
            link = topology.link(here, d)
            count[link] = count.get(link, 0) + 1
            here = d
    return [(n, link) for link, n in count.items()]
