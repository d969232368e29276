"""Seconds of collectives, from bytes, links and the library's algorithms. Sources: NCCL's model (src/graph/tuning.cc).

B is the bandwidth of a group's ring: inside a node the bus bandwidth a device; over several nodes the ring leaves each
node by as many network links as the group has devices there, so B = min(intra, devices per node · inter).
n devices on N nodes, S bytes: the whole that is reduced, gathered or scattered, as one device sees it.

    all-reduce, ring    2 S (n-1) / (n B) + base + 2 (n-N) intra + 2 (N-1) inter
    all-reduce, tree    2 S / B + base + 2 (n/N - 1) intra + 2 log2(N) inter     (over nodes only)
    all-gather, reduce-scatter
                        S (n-1) / (n B) + base + (n-N) intra + (N-1) inter
    all-to-all          each device sends S/n to every other: the slower of the part that stays in the node and
                        the part that leaves it; latencies as of a ring of n-1 steps
    broadcast, reduce   S / B + (n-1) steps: a ring, pipelined in small pieces
    scatter, gather     the root's transfers one after the other, and one latency

`intra` and `inter` are step latencies. The quickest algorithm counts. Where a topology names none, links' latencies do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from distir.ir.topology import Algorithm, Group, Link


def _algorithms(group: Group, kind: str) -> list[Algorithm]:
    found = [a for a in group.algorithms if a.kind == kind]
    if found or kind != "ring":
        return found
    return [Algorithm("ring", 0.0, group.intra.latency, group.inter.latency if group.inter else 0.0)]


def bus(group: Group) -> float:
    """Bytes/s a device moves around the group's ring."""
    if group.inter is None:
        return group.intra.collective
    inside = group.intra.collective if group.per_node > 1 else math.inf
    return min(inside, group.per_node * group.inter.collective)


def _ring_latency(a: Algorithm, group: Group, rounds: int) -> float:
    return a.base + rounds * ((group.size - group.nodes) * a.intra + (group.nodes - 1) * a.inter)


def allreduce(size: float, group: Group) -> float:
    """Seconds to sum `size` bytes over the group, everyone getting the sum."""
    n, b = group.size, bus(group)
    times = [2 * size * (n - 1) / (n * b * a.share) + _ring_latency(a, group, 2) for a in _algorithms(group, "ring")]
    if group.nodes > 1:
        inside, levels = n / group.nodes - 1, math.log2(group.nodes)
        for a in _algorithms(group, "tree"):
            times.append(2 * size / (b * a.share) + a.base + 2 * (inside * a.intra + levels * a.inter))
    return min(times)


def allgather(size: float, group: Group) -> float:
    """Seconds until each of the group has all `size` bytes, of which it had its part; a reduce-scatter is the same."""
    n, b = group.size, bus(group)
    return min(size * (n - 1) / (n * b * a.share) + _ring_latency(a, group, 1) for a in _algorithms(group, "ring"))


def alltoall(size: float, group: Group) -> float:
    """Seconds until each of the group has sent an n-th of its `size` bytes to each other."""
    n, here = group.size, group.per_node
    piece = size / n
    inside = piece * ((here if group.inter else n) - 1) / group.intra.bandwidth
    outside = piece * (n - here) / group.inter.bandwidth if group.inter else 0.0
    return min(max(inside, outside) / a.share + _ring_latency(a, group, 1) for a in _algorithms(group, "ring"))


def pipelined(size: float, links: Iterable[tuple[int, Link]]) -> float:
    """Seconds to pass `size` bytes from a root along a chain: `links` counts the hops over each kind of link."""
    hops = list(links)
    slowest = min((link.bandwidth for _, link in hops), default=math.inf)
    return size / slowest + sum(count * link.latency for count, link in hops)


def serial(size: float, links: Iterable[tuple[int, Link]]) -> float:
    """Seconds of a root that exchanges `size` bytes with each device: `links` counts those over each kind of link."""
    hops = list(links)
    return sum(count * size / link.bandwidth for count, link in hops) + max((x.latency for _, x in hops), default=0.0)
