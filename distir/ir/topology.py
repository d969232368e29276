"""Hardware topology: devices' compute and memory figures, and their links; a graph, or a cluster of equal nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.ir.device import Device
from distir.ir.errors import UsageError, counted
from distir.ir.host_runtime import Runtime
from distir.ir.measured import Measured
from distir.ir.tiles import Tiles
from distir.ir.type import DType

if TYPE_CHECKING:
    import networkx as nx

GIGABIT = 1.25e8
"""Bytes in a gigabit."""


class FusedAttention(NamedTuple):
    """The speed of fused attention: the share of the peak that large ones with long sequences and wide heads reach, and
    what halves it: FLOP of an op, keys that a query sees on average, queries of all heads, the width of a head.

    A kernel's blocks of queries begin and end beside their keys, the last wave of blocks leaves multiprocessors idle,
    and exponentials are as many for narrow heads as for wide ones (Shah et al. 2024, FlashAttention-3, section 3.2).
    """

    efficiency: float = 1.0
    half_size: float = 0.0
    keys: float = 0.0
    queries: float = 0.0
    width: float = 0.0

    def slower(self, keys: float, queries: float, width: float) -> float:
        """How many times as long as at full efficiency an op takes in which so many queries see so many keys each."""
        return (1 + self.keys / keys) * (1 + self.queries / queries) * (1 + self.width / width)


class OpSpeed(NamedTuple):
    """The measured speed of one op in one dtype: seconds = launch + FLOPs / flops + bytes / bandwidth.

    Seconds, FLOP/s and bytes/s; an infinite rate does not limit.
    """

    launch: float = 0.0
    flops: float = math.inf
    bandwidth: float = math.inf

    def seconds(self, flops: float, size: float) -> float:
        """Of an op of so many FLOPs that reads and writes `size` bytes."""
        return self.launch + flops / self.flops + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The figures of one device. Devices with equal specs behave alike.

    `throughput` is in FLOP/s, one figure or one per dtype name ("f32", "tf32", "bf16" ...); `dram_bandwidth` in
    bytes/s; `kernel_launch_overhead` in seconds an op; `memory` in bytes. The efficiencies are the share of the peak
    figures that large kernels reach; a matrix product of `half_size` FLOP reaches half of that (its launch, and tiles
    that do not fill the device). Where they differ: `wide` for products in float32 and float64, by their tiles,
    `attention` for fused attention, that of FlashAttention-2, to which cuDNN's is `cudnn` times as quick. `early` is
    the share of their speed that products reached with the libraries of the device's first year (of H100 CUDA 11).
    `ops` are measured speeds by op and dtype, such as ("Gelu", "f32"): they replace the other figures for these. Of
    the memory the driver and the kernels take `context` bytes, and matrix products `workspace` bytes for each thread
    that issues them; `usable` is what there is in all, if `memory` is but its name.
    `unaligned` is the share of their speed that products of 16 bits reach where rows are no multiple of 16 bytes, as
    tensor cores need them (NVIDIA, Matrix Multiplication Background User's Guide). `fp8` is the share of their
    efficiency that products of 8 bits reach, of the peak of 8.
    """

    throughput: tuple[tuple[str, float], ...]
    dram_bandwidth: float = 9e11
    kernel_launch_overhead: float = 1e-5
    memory: float = math.inf
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    half_size: float = 0.0
    wide: Tiles | None = None
    attention: FusedAttention | None = None
    ops: tuple[tuple[tuple[str, str], OpSpeed], ...] = ()
    context: float = 0.0
    workspace: float = 0.0
    usable: float = 0.0
    unaligned: float = 1.0
    cudnn: float = 1.0
    early: float = 1.0
    fp8: float = 1.0

    @property
    def bandwidth(self) -> float:
        """The bytes/s of its memory that large kernels reach."""
        return self.dram_bandwidth * self.memory_efficiency

    @property
    def capacity(self) -> float:
        """The bytes that a program, with all that it needs, may use."""
        return self.usable or self.memory

    def speed(self, op: str, dtype: DType | None) -> OpSpeed | None:
        """The measured speed of an op in a dtype, if there is one."""
        return dict(self.ops).get((op, dtype.name)) if self.ops and dtype is not None else None

    def peak(self, dtype: DType | str | None) -> float:
        """FLOP/s of a dtype; one that has no figure of its own runs at the speed of another (`runs_as`)."""
        return dict(self.throughput)[self.runs_as(dtype.name if isinstance(dtype, DType) else dtype or "f32")]

    def runs_as(self, dtype: str) -> str:
        """The dtype at whose FLOP/s one runs: its own, else f32's, else the first that has a figure."""
        peaks = dict(self.throughput)
        return next((name for name in (dtype, "f32") if name in peaks), self.throughput[0][0])

    def has(self, dtype: str) -> bool:
        """Whether a dtype has a figure of its own."""
        return dtype in dict(self.throughput)

    @property
    def fused_attention(self) -> FusedAttention:
        """The speed of fused attention: that of matrix products, if it has no figures of its own."""
        return self.attention or FusedAttention(self.compute_efficiency, self.half_size)


class Link(NamedTuple):
    """A link between two devices: `bandwidth` in bytes/s one way, `latency` in seconds a message.

    `bus` is the bandwidth a device reaches in collectives over such links, where it differs from `bandwidth`; `bus_by`
    that in groups of some sizes, where the links between devices are not all alike. `slows`: a collective takes that
    share of its seconds from the compute that runs beside it on the device. `full_mesh`: a device has such a link to
    each other one, and uses all of them at once.
    """

    bandwidth: float
    latency: float = 0.0
    bus: float | None = None
    bus_by: tuple[tuple[int, float], ...] = ()
    slows: float = 0.0
    full_mesh: bool = False

    def collective(self, size: int = 0) -> float:
        """Bytes/s a device moves in a ring of such links, in a group of that size."""
        return dict(self.bus_by).get(size) or (self.bandwidth if self.bus is None else self.bus)


_LEAST = 1e-30
"""Smaller figures are rejected as mistakes: dividing by them may overflow."""
SELF = Link(math.inf)
"""A device's link to itself."""


class Algorithm(NamedTuple):
    """One way the communication library runs a collective: seconds = base + steps · step latency + bytes / (share · B).

    What a library does by several protocols, as NCCL by LL, LL128 and Simple, is an algorithm for each: the quicker one
    begins, the less of the bandwidth it has. `kind` is "ring", "tree", or "in-network": reduced by switches inside a
    node, where each device sends and receives the value once. `intra` and `inter` are the seconds of a step inside a
    node and between nodes. With `saturation`, in √s, the links fill up gradually and latency is hidden behind the
    transfer: where x is the seconds of the transfer and l those of all latencies,
    seconds = (l^4 + (x + saturation · √x)^4)^(1/4).
    """

    kind: str
    base: float
    intra: float
    inter: float
    share: float = 1.0
    saturation: float = 0.0

    def seconds(self, latency: float, transfer: float) -> float:
        """Of all its latencies and of its transfer."""
        if not self.saturation:
            return latency + transfer
        return (latency**4 + (transfer + self.saturation * math.sqrt(transfer)) ** 4) ** 0.25


class Group(NamedTuple):
    """The devices of one collective: how many, on how many nodes, at least how many on each, and their slowest links.

    `algorithms` are the library's; without any, a ring whose steps take the links' latencies. What is `measured` counts
    instead.
    """

    size: int
    nodes: int
    per_node: int
    intra: Link
    inter: Link | None = None
    algorithms: tuple[Algorithm, ...] = ()
    measured: tuple[Measured, ...] = ()
    inside: tuple[Algorithm, ...] = ()
    """Of a group on several nodes, the algorithms inside one of them."""


class Residuals(NamedTuple):
    """How far predictions were from measurements when a cluster's figures were fitted to it.

    `low` and `high` are the least and the greatest of measured / predicted step time among the `steps` programs that
    were measured on so many ranks.
    """

    ranks: int
    low: float
    high: float
    steps: int

    def interval(self, seconds: float) -> tuple[float, float]:
        """Where a step that is predicted to take `seconds` is expected. It contains the prediction, though all steps on
        so many ranks may have been quicker, or slower, than the figures say that fit those on other numbers best."""
        return seconds * min(1.0, self.low), seconds * max(1.0, self.high)


_BURST = 1e-3
"""Seconds: b of `CoreSharing`."""


def cores_of(rank: int, ranks: int, cores: int) -> range:
    """The cores of a host that one of its ranks is bound to: equal shares in a row; if there are more ranks than cores,
    each core in turn, if that gives all cores the same number, else all of them."""
    if ranks <= cores:
        return range(rank * cores // ranks, (rank + 1) * cores // ranks)
    return range(cores) if ranks % cores else range(rank % cores, rank % cores + 1)


class CoreSharing(NamedTuple):
    """How the ranks of a host share its cores.

    While more ranks are busy than the cores, of `cores`, that they are bound to (`cores_of`), compute takes longer in
    proportion. A rank is busy while it computes; while it is in a collective, or receives what it then copies, it takes
    `communication` of a core, and so much of that takes longer, too.

    What the cache of a core, of `cache` bytes, does not hold goes through memory that all cores share: all together get
    `bandwidth` bytes/s of it, those who want less than an equal share what they want, the others equal shares of the
    rest (max-min fairness).

    What else runs interrupts ranks, for about a slice of the scheduler: so the last rank of a collective is late, in
    proportion to the seconds since they last communicated if these are few, and to their root if many, as sums of
    random delays are: sqrt(b^2 + `jitter` * seconds) - b seconds, with b of 1 ms, a third of a slice of Linux
    (`base_slice_ns`, 3 ms on some cores). `jitter` is in seconds. Those that wait for it are not busy.

    What a rank does meanwhile drives the code and data of communication from its caches: a collective or message takes
    up to `cold` seconds more, `cold` * (1 - e^(-t/b)), t the seconds since that of its ranks last communicated which
    has not for longest.

    Beside each rank of a step another thread computes for `feeding` seconds from its begin: one of the rank reads the
    next data, which the process that started the ranks draws and sends to each, as it receives what each reports.
    """

    cores: int
    bandwidth: float = math.inf
    communication: float = 1.0
    jitter: float = 0.0
    feeding: float = 0.0
    cache: float = 0.0
    cold: float = 0.0

    def share(self, demands: Iterable[tuple[float, int]]) -> float:
        """The bytes/s that each rank gets at most; infinite if all get what they want. `demands`: bytes/s that each of
        so many ranks wants.

        One alone gets what it wants, which may be more than `bandwidth`: it has the last level of cache to itself.
        """
        wanted = sorted(demands)
        left, ranks = self.bandwidth, sum([n for _, n in wanted])
        if ranks < 2:
            return math.inf
        for demand, n in wanted:
            equal = left / ranks
            if demand > equal:
                return equal
            left -= demand * n
            ranks -= n
        return math.inf

    def late(self, seconds: float) -> float:
        """How many seconds the last of the ranks of a collective is late, after so many without communication."""
        return math.sqrt(_BURST**2 + self.jitter * seconds) - _BURST

    def resumed(self, seconds: float) -> float:
        """How many seconds more communication takes after so many without."""
        return -self.cold * math.expm1(-seconds / _BURST)


@dataclass(frozen=True, slots=True)
class Regular:
    """A cluster of equal nodes: device number i of `kind` stands in node i // per_node.

    `near` are sets of devices of each node, by their numbers in it, with a link of their own among them, such as those
    of one PCIe switch or NVLink bridge: `near_link`, if there are any.

    Where each port of a node leads to a switch of its own, a rail, that it shares with the same port of all nodes,
    `rails` is the number of ports, and `rail_link` the link of what stays on its rails; `inter` is then that of what
    crosses the spine above them.
    """

    name: str
    kind: str
    spec: DeviceSpec
    nodes: int
    per_node: int
    intra: Link
    inter: Link
    host: DeviceSpec | None = None
    host_link: Link | None = None
    algorithms: tuple[Algorithm, ...] = ()
    over_nodes: tuple[Algorithm, ...] = ()
    """The library's algorithms inside a node, and over several, if these are others."""
    runtime: Runtime | None = None
    """The runtime that the figures were measured with; None if they are of no runtime."""
    residuals: tuple[Residuals, ...] = ()
    """Of figures that were fitted to this cluster, by numbers of ranks, ascending."""
    sharing: CoreSharing | None = None
    """Of a host whose ranks share its cores."""
    near: tuple[frozenset[int], ...] = ()
    near_link: Link | None = None
    rails: int = 1
    rail_link: Link | None = None
    communicator: float = 0.0
    """Bytes of each device that a communicator of the communication library takes."""
    measured: tuple[Measured, ...] = ()
    """Of collectives in a node: these count instead of the links."""
    in_turn: bool = False
    """Whether one thread of the host moves all that a device sends and receives, one after the other."""

    def inside(self, devices: Iterable[int]) -> Link:
        """The link among devices of one node, by their numbers in the cluster."""
        numbers = {i % self.per_node for i in devices}
        return self.near_link if self.near_link and any(numbers <= near for near in self.near) else self.intra

    def between(self, devices: Iterable[int]) -> Link:
        """The network link among devices of several nodes, by their numbers in the cluster.

        They stay on their rails if those of each node have the same ones: a collective, and an all-to-all too, passes
        what is for another rail inside a node (NCCL: rings that do not cross NICs, PXN).
        """
        if self.rail_link is None:
            return self.inter
        on: dict[int, set[int]] = {}
        for i in devices:
            on.setdefault(i // self.per_node, set()).add(i % self.per_node * self.rails // self.per_node)
        first, *others = on.values()
        return self.rail_link if all(rails == first for rails in others) else self.inter


class Topology:
    """Devices and their links.

    Built by hand with `add_device`, `add_switch`, `set_bandwidth` and `set_link`, or as a `Regular` cluster, which
    holds no edges however many devices it has. `version` counts changes, so that derived results can be cached.
    """

    def __init__(self, regular: Regular | None = None) -> None:
        self.regular = regular
        self.version = 0
        self._specs: dict[Device, DeviceSpec] = {}
        self._count: dict[str, int] = {}
        self._links: dict[Device, dict[Device, Link]] = {}
        self._routes: dict[tuple[Device, Device], Link] = {}
        self._switched: dict[Device, tuple[dict[Device, float], dict[Device, list[Device]]]] | None = None
        self._regular_devices: list[Device] | None = None

    def __repr__(self) -> str:
        if (r := self.regular) is not None:
            return f"Topology({r.name}: {counted(r.nodes, 'node')} of {r.per_node} {r.kind})"
        n = len(self.devices)
        return f"Topology({counted(n, 'device')})"

    def add_device(
        self,
        kind: str,
        throughput: float | Mapping[str, float] = 1.4e13,
        dram_bandwidth: float = 9e11,
        kernel_launch_overhead: float = 1e-5,
        memory: float = math.inf,
        *,
        compute_efficiency: float = 1.0,
        memory_efficiency: float = 1.0,
    ) -> Device:
        """A new device. FLOP/s (one figure, or one per dtype name), bytes/s, seconds an op, bytes.

        Raises UsageError for a figure that is not positive; only `kernel_launch_overhead` may be 0.
        """
        peaks = dict(throughput) if isinstance(throughput, Mapping) else {"f32": float(throughput)}
        figures = {**peaks, "dram_bandwidth": dram_bandwidth, "memory": memory}
        figures |= {"compute_efficiency": compute_efficiency, "memory_efficiency": memory_efficiency}
        wrong = {k: x for k, x in figures.items() if not _LEAST <= x < math.inf and (k, x) != ("memory", math.inf)}
        if not 0 <= kernel_launch_overhead < math.inf:
            wrong["kernel_launch_overhead"] = kernel_launch_overhead
        if wrong or not peaks:
            got = ", ".join(f"{k} {x}" for k, x in wrong.items()) or "no throughput"
            raise UsageError(f"a {kind} device needs positive figures, got {got}")
        device = self._new(kind)
        self._specs[device] = DeviceSpec(
            tuple(sorted(peaks.items())),
            dram_bandwidth,
            kernel_launch_overhead,
            memory,
            compute_efficiency,
            memory_efficiency,
        )
        return device

    def add_switch(self) -> Device:
        """A new switch: links may lead to it, programs may not run on it."""
        return self._new("switch")

    def _new(self, kind: str) -> Device:
        if self.regular is not None and kind == self.regular.kind:
            raise UsageError(f"the {self.regular.name} cluster has its own {kind} devices: add another kind, or nodes")
        index = self._count.get(kind, 0)
        self._count[kind] = index + 1
        self.version += 1
        return Device(kind, index)

    @property
    def devices(self) -> list[Device]:
        """All devices, in order, without switches and the cluster's host."""
        if self._regular_devices is None:
            r = self.regular
            self._regular_devices = [Device(r.kind, i) for i in range(r.nodes * r.per_node)] if r else []
        return self._regular_devices + list(self._specs)

    @property
    def host(self) -> Device:
        """A cluster's host, which may hold the inputs. Raises UsageError if it has none."""
        if self.regular is None or self.regular.host is None:
            raise UsageError(f"{self} has no host", "add a device for it")
        return Device("host", 0)

    def spec(self, device: Device) -> DeviceSpec:
        """The figures of a device. Raises UsageError for a device that is not in the topology."""
        found = self._specs.get(device)
        if found is not None:
            return found
        r = self.regular
        if r is not None and device.kind == r.kind and device.index < r.nodes * r.per_node:
            return r.spec
        if r is not None and r.host is not None and device.kind == "host" and device.index == 0:
            return r.host
        raise UsageError(f"{device} is not a device of {self}")

    def set_bandwidth(self, a: Device, b: Device, gbps: float) -> None:
        """Link two devices, both ways, with `gbps` gigabits (1.25e8 bytes) per second. The latency stays, or is 0."""
        old = self._links.get(a, {}).get(b)
        if old is None and self.regular is not None:
            old = _regular_link(self.regular, a, b)
        self.set_link(a, b, gbps * GIGABIT, old.latency if old else 0.0)

    def set_link(self, a: Device, b: Device, bandwidth: float, latency: float = 0.0) -> None:
        """Link two devices or switches, both ways: bytes/s and seconds. Raises UsageError for a figure out of range."""
        if a is b or not bandwidth >= _LEAST or not 0 <= latency < math.inf:
            raise UsageError(f"a link from {a} to {b} of {bandwidth} bytes/s and {latency} s is out of range")
        link = Link(float(bandwidth), float(latency))
        self._links.setdefault(a, {})[b] = link
        self._links.setdefault(b, {})[a] = link
        self._routes.clear()
        self._switched = None
        self.version += 1

    def get_bandwidth(self, a: Device, b: Device) -> float:
        """Gigabits per second from a to b, infinite to itself. Raises UsageError if they are not linked."""
        return self.link(a, b).bandwidth / GIGABIT

    def get_latency(self, a: Device, b: Device) -> float:
        """Seconds of a message from a to b, 0 to itself. Raises UsageError if they are not linked."""
        return self.link(a, b).latency

    def link(self, a: Device, b: Device) -> Link:
        """The link, or the quickest route through switches. Raises UsageError if there is none."""
        if a is b:
            return SELF
        near = self._links.get(a)
        if near is not None and (found := near.get(b)) is not None:
            return found
        if (r := self.regular) is not None and (found := _regular_link(r, a, b)) is not None:
            return found
        if (a, b) not in self._routes:
            self._routes[a, b] = self._route(a, b)
        return self._routes[a, b]

    def _route(self, a: Device, b: Device) -> Link:
        """Through switches, by least latency, then fewest hops: the slowest link's bandwidth, the sum of latencies."""
        between = self._between_switches()
        routes: list[tuple[float, list[Device]]] = []
        for first, start in self._to_switches(a):
            seconds, paths = between[first]
            routes += [
                (start + seconds[last] + end, [a, *paths[last], b])
                for last, end in self._to_switches(b)
                if last in paths
            ]
        if not routes:
            hint = f"call set_bandwidth({a}, {b}, gbps)"
            raise UsageError(f"no bandwidth is set between {a} and {b}", hint)
        hops = [self._links[u][v] for u, v in pairwise(min(routes, key=lambda route: route[0])[1])]
        return Link(min(h.bandwidth for h in hops), sum(h.latency for h in hops))

    def _to_switches(self, a: Device) -> list[tuple[Device, float]]:
        """The switches a device is linked to, and the weight of the link."""
        return [(b, _weight(link)) for b, link in self._links.get(a, {}).items() if b.kind == "switch"]

    def _between_switches(self) -> dict[Device, tuple[dict[Device, float], dict[Device, list[Device]]]]:
        """Per switch the weight of the best route to each other that it can reach, and the route."""
        if self._switched is None:
            import networkx as nx

            graph: nx.Graph[Device] = nx.Graph()
            for a in self._links:
                if a.kind == "switch":
                    graph.add_node(a)
                    graph.add_weighted_edges_from((a, b, w) for b, w in self._to_switches(a))
            self._switched = dict(nx.all_pairs_dijkstra(graph))
        return self._switched

    @property
    def graph(self) -> nx.Graph[Any]:
        """The networkx graph: devices and switches, links with `bandwidth` (bytes/s) and `latency` (s).

        A regular cluster is drawn with a switch a node ("node", i) and one between them ("network", 0); near devices
        of a node have links of their own.
        """
        import networkx as nx

        graph: nx.Graph[Any] = nx.Graph()
        graph.add_nodes_from(self.devices)
        for a, near in self._links.items():
            for b, link in near.items():
                graph.add_edge(a, b, bandwidth=link.bandwidth, latency=link.latency)
        if (r := self.regular) is not None:
            for node in range(r.nodes):
                graph.add_edge(("node", node), ("network", 0), bandwidth=r.inter.bandwidth, latency=r.inter.latency)
                for i in range(node * r.per_node, (node + 1) * r.per_node):
                    device = Device(r.kind, i)
                    graph.add_edge(device, ("node", node), bandwidth=r.intra.bandwidth, latency=r.intra.latency)
                for near, link in [(near, r.near_link) for near in r.near if r.near_link]:
                    for a, b in combinations([Device(r.kind, node * r.per_node + i) for i in sorted(near)], 2):
                        graph.add_edge(a, b, bandwidth=link.bandwidth, latency=link.latency)
        return graph

    def altered(
        self, regular: Regular | None, spec: Callable[[DeviceSpec], DeviceSpec], link: Callable[[Link], Link]
    ) -> Topology:
        """The same devices and links with other figures: another `regular` of as many devices, and `spec` and `link` of
        what was added to it.
        """
        new = Topology(regular)
        new._specs = {device: spec(x) for device, x in self._specs.items()}
        new._count = dict(self._count)
        new._links = {a: {b: link(x) for b, x in near.items()} for a, near in self._links.items()}
        return new

    @property
    def uniform(self) -> Regular | None:
        """The regular cluster, where no link or device was added to it."""
        return self.regular if not self._links and not self._specs else None

    def group(self, devices: Sequence[Device]) -> Group:
        """The devices of a collective, in ring order. Raises UsageError if neighbours are not linked."""
        r = self.uniform
        if r is not None and all(d.kind == r.kind for d in devices):
            return regular_group(r, [d.index for d in devices])
        ring = [*devices, devices[0]] if len(devices) > 1 else []
        return Group(len(devices), 1, len(devices), slowest(self.link(a, b) for a, b in pairwise(ring)))


def slowest(links: Iterable[Link]) -> Link:
    """The least bandwidth and the greatest latency among links."""
    links = list(links) or [SELF]
    return Link(min(x.bandwidth for x in links), max(x.latency for x in links), min(x.collective() for x in links))


def regular_group(r: Regular, devices: Sequence[int]) -> Group:
    """A group on a regular cluster, given the numbers of its devices."""
    group = spread(r, *_on_nodes(r.per_node, devices), len(devices))
    if group.inter is None:
        return group._replace(intra=r.inside(devices))
    return group._replace(inter=r.between(devices))


def _on_nodes(per_node: int, devices: Sequence[int]) -> tuple[int, int]:
    """On how many nodes devices are, by their numbers, and at least how many on each."""
    if not isinstance(devices, range):
        count = Counter([i // per_node for i in devices])
        return len(count), min(count.values())
    if devices.step >= per_node:
        return len(devices), 1
    first, last = devices[0] // per_node, devices[-1] // per_node
    inner = range(first + 1, last)[: devices.step]  # the numbers on the nodes between repeat after so many
    return last - first + 1, min(
        [_below(devices, (n + 1) * per_node) - _below(devices, n * per_node) for n in (first, *inner, last)]
    )


def _below(devices: range, end: int) -> int:
    """How many of these numbers are below another."""
    return len(range(devices.start, min(devices.stop, end), devices.step))


def spread(r: Regular, nodes: int, per_node: int, size: int) -> Group:
    """A group of `size` devices on `nodes` nodes, at least `per_node` on each, at the same places in all nodes."""
    algorithms = r.over_nodes if nodes > 1 and r.over_nodes else r.algorithms
    measured = r.measured if nodes == 1 else ()
    between = (r.rail_link or r.inter) if nodes > 1 else None
    inside = r.algorithms if nodes > 1 and per_node > 1 else ()
    return Group(size, nodes, per_node, r.intra, between, algorithms, measured, inside)


def _regular_link(r: Regular, a: Device, b: Device) -> Link | None:
    total = r.nodes * r.per_node
    a_in, b_in = (d.kind == r.kind and d.index < total for d in (a, b))
    if a_in and b_in:
        ends = a.index, b.index
        return r.inside(ends) if a.index // r.per_node == b.index // r.per_node else r.between(ends)
    if r.host_link is not None and (a_in or b_in):
        device, other = (a, b) if a_in else (b, a)
        if other.kind == "host":
            return r.host_link if device.index < r.per_node else slowest((r.host_link, r.inter))
    return None


def _weight(link: Link) -> float:
    """By least latency, then fewest hops."""
    return link.latency + 1e-12
