"""Seconds of collectives, from the bytes they send (`Wire`), the links and the algorithms of the library.

Source: NCCL's model (src/graph/tuning.cc).

B is the bandwidth of a group's ring in bytes/s: in one node the bus bandwidth per device; over several nodes the ring
leaves each node by as many network links as the group has devices there, so B = min(intra, devices per node · inter).
The group has n devices on N nodes; S is the size in bytes of the whole value that is reduced, gathered or scattered.

    all-reduce, ring    2 S (n-1) / (n B) + base + 2 (n-N) intra + 2 (N-1) inter
    all-reduce, tree    2 S / B + base + 2 (n/N - 1) intra + 2 log2(N) inter     (over nodes only)
    all-reduce, in-network
                        S / B + base                                            (inside a node only)
    all-gather, reduce-scatter
                        S (n-1) / (n B) + base + (n-N) intra + (N-1) inter
    to one other        S / bandwidth + latency, of the slowest link
    all-to-all          each device sends S/n to every other: the slower of the part that stays in the node and
                        the part that leaves it; latencies as of a ring of n-1 steps; in a full mesh the links to
                        all others are used at once
    broadcast, reduce   S / B + (n-1) steps: a ring, pipelined in small pieces
    scatter, gather     the root's transfers one after the other, and one latency

What goes around a group takes at least what it takes among the group's devices of one node, which have as much to send
each other. `intra` and `inter` are step latencies; an algorithm that saturates hides its latency (`Algorithm.seconds`).
The fastest algorithm counts. If a topology has none, a ring with the latencies of the links is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from distir.ir.communication import Wire
from distir.ir.topology import Algorithm, Group, Link


def _algorithms(group: Group, kind: str) -> list[Algorithm]:
    found = [a for a in group.algorithms if a.kind == kind]
    if found or kind != "ring":
        return found
    return [Algorithm("ring", 0.0, group.intra.latency, group.inter.latency if group.inter else 0.0)]


def bus(group: Group) -> float:
    """The bandwidth of the group's ring, in bytes/s per device."""
    inside = group.intra.collective(group.per_node)
    if group.inter is None:
        return inside
    return min(inside if group.per_node > 1 else math.inf, group.per_node * group.inter.collective(group.per_node))


def _ring_latency(a: Algorithm, group: Group, rounds: int) -> float:
    return a.base + rounds * ((group.size - group.nodes) * a.intra + (group.nodes - 1) * a.inter)


def collective(wire: Wire, size: float, group: Group) -> float:
    """Seconds of a collective on a whole value of `size` bytes: the minimum over its patterns."""
    seconds, _ = _fastest(wire, size, group)
    if group.nodes > 1 and group.per_node > 1 and _AROUND.issuperset(wire.patterns):
        n = group.per_node
        seconds = max(seconds, collective(wire, size, Group(n, 1, n, group.intra, None, group.inside)))
    return seconds


def pattern(wire: Wire, size: float, group: Group) -> str:
    """The pattern that takes the fewest seconds, as `Wire` names them."""
    return _fastest(wire, size, group)[1]


def _fastest(wire: Wire, size: float, group: Group) -> tuple[float, str]:
    return min([(s, name) for name in wire.patterns for s in _PATTERNS[name](wire, size, group)])


def _ring(wire: Wire, size: float, group: Group) -> list[float]:
    """Around the ring: one round is n-1 steps."""
    (a, n), b = wire.sent(group.size), bus(group)
    rounds = wire.steps(group.size) // max(1, group.size - 1)
    transfer = a * size / (n * b)
    return [x.seconds(_ring_latency(x, group, rounds), transfer / x.share) for x in _algorithms(group, "ring")]


def _in_network(wire: Wire, size: float, group: Group) -> list[float]:
    """Reduced and spread by switches inside a node: each device sends and receives the value once."""
    if group.nodes > 1:
        return []
    transfer = size / group.intra.collective(group.size)
    return [x.seconds(x.base, transfer / x.share) for x in _algorithms(group, "in-network")]


def _tree(wire: Wire, size: float, group: Group) -> list[float]:
    """Reduced up a tree of nodes, and down again."""
    if group.nodes == 1:
        return []
    inside, levels, b = group.size / group.nodes - 1, math.log2(group.nodes), bus(group)
    return [
        x.seconds(x.base + 2 * (inside * x.intra + levels * x.inter), 2 * size / (b * x.share))
        for x in _algorithms(group, "tree")
    ]


def _pairs(wire: Wire, size: float, group: Group) -> list[float]:
    """All pairs: each device sends an n-th to every other."""
    n, here = group.size, group.per_node
    piece, near = size / n, here if group.inter else n
    inside = piece * (near - 1) / (group.intra.collective(near) if group.intra.full_mesh else group.intra.bandwidth)
    outside = piece * (n - here) / group.inter.bandwidth if group.inter else 0.0
    return [max(inside, outside) / x.share + _ring_latency(x, group, 1) for x in _algorithms(group, "ring")]


def _next(wire: Wire, size: float, group: Group) -> list[float]:
    """Each device sends to one other, all at once: the slowest link counts in each step."""
    a, n = wire.sent(group.size)
    links = [link for link in (group.intra, group.inter) if link is not None]
    slowest = max([x.latency * wire.steps(group.size) + a * size / (n * x.bandwidth) for x in links])
    return [slowest + min(x.base for x in _algorithms(group, "ring"))]


_PATTERNS = {"ring": _ring, "tree": _tree, "in-network": _in_network, "pairs": _pairs, "next": _next}


_AROUND = frozenset(["ring", "tree", "in-network"])
"""Patterns by which devices of a node have as much to send each other if the group has more nodes."""


def pipelined(size: float, links: Iterable[tuple[int, Link]]) -> float:
    """Seconds to pass `size` bytes from a root along a chain: `links` counts the hops over each kind of link."""
    hops = list(links)
    slowest = min((link.bandwidth for _, link in hops), default=math.inf)
    return size / slowest + sum(count * link.latency for count, link in hops)


def serial(size: float, links: Iterable[tuple[int, Link]]) -> float:
    """Seconds of a root that exchanges `size` bytes with each device: `links` counts those over each kind of link."""
    hops = list(links)
    return sum(count * size / link.bandwidth for count, link in hops) + max((x.latency for _, x in hops), default=0.0)
