"""A cluster with some of its figures changed: how a step would run on hardware that there is not, or not yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distir.ir.errors import UsageError
from distir.ir.host_runtime import Runtime
from distir.ir.measured import Measured
from distir.ir.topology import Algorithm, DeviceSpec, Link, OpSpeed, Topology

RATES = {
    "compute": "FLOP/s of the devices",
    "memory_bandwidth": "bytes/s of the devices' memory, and of what the ranks of a host share",
    "link": "bytes/s of the links inside a node",
    "network": "bytes/s of the links between nodes",
}
SECONDS = {
    "latency": "latency of links, and of the steps of collectives",
    "launch": "launch overhead of a kernel",
    "host": "what the host spends to issue ops",
}
FIGURES = {**RATES, **SECONDS}
"""What may be changed."""
MOST = 1e9
"""The largest factor, and one over the least but 0."""
_SOONEST = 1e-12
"""The least seconds of a collective that was measured: between its points they are powers of the size."""
Factors = Mapping[str, float]
"""By figure, a factor: of a rate 2 is twice as fast, of seconds 2 is twice as long and 0 is none."""


def changed(topology: Topology, factors: Factors) -> Topology:
    """The topology with its figures multiplied; links that were added by hand change with "link".

    Raises UsageError for an unknown figure, or a factor out of range.
    """
    check(factors)

    def spec(old: DeviceSpec) -> DeviceSpec:
        return _spec(old, factors)

    def link(old: Link) -> Link:
        return _link(old, factors.get("link", 1.0), factors)

    r = topology.regular
    if r is None:
        return topology.altered(None, spec, link)
    regular = replace(
        r,
        spec=spec(r.spec),
        host=r.host and spec(r.host),
        intra=link(r.intra),
        inter=_link(r.inter, factors.get("network", 1.0), factors),
        host_link=r.host_link and link(r.host_link),
        near_link=r.near_link and link(r.near_link),
        rail_link=r.rail_link and _link(r.rail_link, factors.get("network", 1.0), factors),
        algorithms=tuple([_algorithm(a, factors) for a in r.algorithms]),
        over_nodes=tuple([_algorithm(a, factors) for a in r.over_nodes]),
        runtime=r.runtime and changed_runtime(r.runtime, factors),
        measured=tuple([_measured(m, factors) for m in r.measured]),
        sharing=r.sharing and r.sharing._replace(bandwidth=r.sharing.bandwidth * factors.get("memory_bandwidth", 1.0)),
    )
    return topology.altered(regular, spec, link)


def changed_runtime(runtime: Runtime, factors: Factors) -> Runtime:
    """The runtime with its seconds multiplied by the factor of "host"."""
    x = factors.get("host", 1.0)
    transfer = None if runtime.transfer is None else runtime.transfer * x
    transfer_by = tuple([(ranks, seconds * x) for ranks, seconds in runtime.transfer_by])
    figures = {name: getattr(runtime, name) * x for name in ("op", "communication", "member", "call", "gap")}
    return replace(runtime, **figures, transfer=transfer, transfer_by=transfer_by)


def check(factors: Factors) -> None:
    """Raise UsageError for an unknown figure, or a factor out of range."""
    for name, x in factors.items():
        if name not in FIGURES:
            raise UsageError(f"unknown figure {name!r}", f"known: {', '.join(FIGURES)}")
        if not (1 / MOST <= x <= MOST or (x == 0 and name in SECONDS)):
            least = f"from {1 / MOST:g} to {MOST:g}" + (", or 0" if name in SECONDS else "")
            raise UsageError(f"{name}: expected a factor {least}, got {x:g}", "such as 2")


def _spec(old: DeviceSpec, factors: Factors) -> DeviceSpec:
    compute, memory, launch = (factors.get(name, 1.0) for name in ("compute", "memory_bandwidth", "launch"))
    return replace(
        old,
        throughput=tuple([(name, flops * compute) for name, flops in old.throughput]),
        dram_bandwidth=old.dram_bandwidth * memory,
        kernel_launch_overhead=old.kernel_launch_overhead * launch,
        ops=tuple([(key, OpSpeed(s.launch * launch, s.flops * compute, s.bandwidth * memory)) for key, s in old.ops]),
    )


def _link(old: Link, faster: float, factors: Factors) -> Link:
    return old._replace(
        bandwidth=old.bandwidth * faster,
        latency=old.latency * factors.get("latency", 1.0),
        bus=None if old.bus is None else old.bus * faster,
        bus_by=tuple([(size, x * faster) for size, x in old.bus_by]),
    )


def _measured(old: Measured, factors: Factors) -> Measured:
    """What the least bytes take is latency, the rest the link's."""
    least, latency, faster = old.points[0][1], factors.get("latency", 1.0), factors.get("link", 1.0)
    points = [(n, least * latency + (x - least) / faster) for n, x in old.points]
    return old._replace(points=tuple([(n, max(x, _SOONEST)) for n, x in points]))


def _algorithm(old: Algorithm, factors: Factors) -> Algorithm:
    x = factors.get("latency", 1.0)
    return old._replace(base=old.base * x, intra=old.intra * x, inter=old.inter * x)
