"""Device classes: devices with equal timelines, found before simulating. Each class is simulated once.

Two devices are of one class if they are in the same meshes, have equal specs, and in every collective and transfer have
equal links and partners of equal classes: the coarsest such partition. So all members of a class have exactly the same
clock at all times. On a regular cluster the partition is computed from strides and sizes alone, independently of the
number of devices; else it is refined device by device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import pairwise
from typing import NamedTuple

from distir.ir.device import AxisNames, Device, Mesh
from distir.ir.topology import Group, Link, Regular, Topology, regular_group, spread

Home = Device | Mesh
"""Where a value is: its device or mesh."""
Along = tuple[Mesh, AxisNames]
"""A mesh, and the axis (or axes) of a collective in it."""


class Uses:
    """The homes of a program's values, the axes of its collectives, and the pairs of homes between which it sends."""

    def __init__(self) -> None:
        self.homes: dict[Home, None] = {}
        self.axes: dict[Along, None] = {}
        self.sends: dict[tuple[Home, Home], None] = {}


class Peers(NamedTuple):
    """Classes that meet in one collective, and the group of any of their devices."""

    classes: tuple[int, ...]
    group: Group


class Pair(NamedTuple):
    """A class that sends, the class of the partners, and the link of any of these pairs."""

    source: int
    target: int
    link: Link


class DeviceClasses:
    """The partition. Classes are numbered from 0 in the order of their first devices."""

    def __init__(self, homes: dict[Home, tuple[int, ...]], sizes: list[int], first: list[Device]) -> None:
        self.homes = homes
        self.sizes = sizes
        self.first = first
        self.peers: dict[Along, list[Peers]] = {}
        self.pairs: dict[tuple[Home, Home], list[Pair]] = {}
        self.members: dict[Device, int] = {}
        self.blocks: list[tuple[int, int, int]] = []
        self.kind = ""

    def of(self, device: Device) -> int | None:
        """The class of a device, None if the program does not use it."""
        if (found := self.members.get(device)) is not None:
            return found
        if device.kind == self.kind:
            return next((c for a, b, c in self.blocks if a <= device.index < b), None)
        return None

    def devices(self) -> Iterator[tuple[Device, int]]:
        """Every device of the program, with its class."""
        yield from self.members.items()
        for a, b, c in self.blocks:
            for i in range(a, b):
                yield Device(self.kind, i), c

    def label(self, c: int) -> str:
        """The name of the smallest mesh that holds the class, numbered if it holds several; or the device."""
        inside = [m for m, classes in self.homes.items() if isinstance(m, Mesh) and c in classes]
        if not inside:
            return repr(self.first[c])
        mesh = min(inside, key=lambda m: len(m.devices))
        classes = self.homes[mesh]
        alike = [m for m in self.homes if isinstance(m, Mesh) and m.name == mesh.name and m.devices != mesh.devices]
        name = f"{mesh.name} ({mesh.devices[0]})" if alike else mesh.name
        return name if len(classes) == 1 else f"{name} #{classes.index(c)}"


def classify(uses: Uses, topology: Topology) -> DeviceClasses:
    """The coarsest classes of the devices that a program uses. Raises UsageError for one the topology lacks."""
    regular = topology.uniform
    found = _by_blocks(uses, topology, regular) if regular is not None else None
    return _in_order(found or _by_refinement(uses, topology))


def _in_order(classes: DeviceClasses) -> DeviceClasses:
    """The same, numbered by their first devices."""
    first = classes.first
    order = sorted(range(len(first)), key=lambda c: (first[c].kind, first[c].index))
    new = {c: n for n, c in enumerate(order)}
    classes.homes = {h: tuple([new[c] for c in row]) for h, row in classes.homes.items()}
    classes.sizes, classes.first = [classes.sizes[c] for c in order], [first[c] for c in order]
    classes.members = {d: new[c] for d, c in classes.members.items()}
    classes.blocks = [(a, b, new[c]) for a, b, c in classes.blocks]
    for key, found in classes.peers.items():
        classes.peers[key] = [Peers(tuple([new[c] for c in p.classes]), p.group) for p in found]
    for ends, pairs in classes.pairs.items():
        classes.pairs[ends] = [Pair(new[p.source], new[p.target], p.link) for p in pairs]
    return classes


def members(home: Home) -> tuple[Device, ...]:
    """The devices of a home."""
    return home.devices if isinstance(home, Mesh) else (home,)


def axis_groups(mesh: Mesh, axis: AxisNames) -> Iterator[tuple[Device, ...]]:
    """The groups of devices that differ only along `axis`, or several axes, in their order."""
    at = mesh.positions(axis)
    for k, coord in enumerate(mesh.coords):
        if not any([coord[i] for i in at]):
            yield tuple(mesh.group(axis, k))


def axis_stride(mesh: Mesh, axis: AxisNames) -> tuple[int, int] | None:
    """The stride between neighbours along an axis, or several, in `mesh.devices`, and how many there are; None where it
    is not the same everywhere."""
    by_stride = sorted([(mesh.stride(i), mesh.sizes[i]) for i in mesh.positions(axis)])
    if any([stride * n != further for (stride, n), (further, _) in pairwise(by_stride)]):
        return None
    return by_stride[0][0], mesh.size(axis)


def _by_refinement(uses: Uses, topology: Topology) -> DeviceClasses:
    """Colour refinement: colour devices by specs, homes and links, then refine by partners' colours."""
    traits: dict[Device, list[Hashable]] = {}
    for home in uses.homes:
        for d in members(home):
            traits.setdefault(d, [topology.spec(d)]).append(id(home))
    groups = {key: [(g, topology.group(g)) for g in axis_groups(*key)] for key in uses.axes}
    for found in groups.values():
        for devices, group in found:
            for d in devices:
                traits[d].append(group)
    pairs = {
        key: [(a, b, topology.link(a, b)) for a, b in zip(members(key[0]), members(key[1]), strict=True)]
        for key in uses.sends
    }
    for sent in pairs.values():
        for a, b, link in sent:
            traits[a].append(("to", link))
            traits[b].append(("from", link))
    colour = _numbered({d: tuple(t) for d, t in traits.items()})
    while True:
        seen: dict[Device, list[Hashable]] = {d: [c] for d, c in colour.items()}
        for found in groups.values():
            for devices, _ in found:
                met = frozenset([colour[d] for d in devices])
                for d in devices:
                    seen[d].append(met)
        for sent in pairs.values():
            for a, b, _ in sent:
                seen[a].append(("to", colour[b]))
                seen[b].append(("from", colour[a]))
        finer = _numbered({d: tuple(s) for d, s in seen.items()})
        if max(finer.values(), default=0) == max(colour.values(), default=0):
            break
        colour = finer
    return _collect(uses, colour, groups, pairs)


def _numbered(traits: dict[Device, tuple[Hashable, ...]]) -> dict[Device, int]:
    number: dict[tuple[Hashable, ...], int] = {}
    return {d: number.setdefault(t, len(number)) for d, t in traits.items()}


def _collect(
    uses: Uses,
    colour: dict[Device, int],
    groups: dict[Along, list[tuple[tuple[Device, ...], Group]]],
    pairs: dict[tuple[Home, Home], list[tuple[Device, Device, Link]]],
) -> DeviceClasses:
    homes: dict[Home, tuple[int, ...]] = {}
    for home in uses.homes:
        homes[home] = tuple(dict.fromkeys(colour[d] for d in members(home)))
    sizes = [0] * (max(colour.values(), default=-1) + 1)
    first: list[Device | None] = [None] * len(sizes)
    for d, c in colour.items():
        sizes[c] += 1
        first[c] = first[c] or d
    classes = DeviceClasses(homes, sizes, [d for d in first if d is not None])
    classes.members = colour
    for key, found in groups.items():
        met = {tuple(sorted({colour[d] for d in devices})): group for devices, group in found}
        classes.peers[key] = [Peers(*item) for item in met.items()]
    for ends, sent in pairs.items():
        classes.pairs[ends] = [Pair(*p) for p in dict.fromkeys((colour[a], colour[b], x) for a, b, x in sent)]
    return classes


def _by_blocks(uses: Uses, topology: Topology, r: Regular) -> DeviceClasses | None:
    """The same where meshes are runs of a regular cluster's devices, by arithmetic on their ends; None if it cannot.

    It cannot where links inside a node differ."""
    if r.near:
        return None
    spans: dict[Mesh, tuple[int, int]] = {}
    lone: list[Device] = []
    for home in uses.homes:
        if isinstance(home, Mesh) or home.kind == r.kind:
            run = _run(home, r.kind)
            if run is None:
                return None
            topology.spec(Device(r.kind, run[1] - 1))  # raises for a device that the topology lacks
            if isinstance(home, Mesh):
                spans[home] = run
        if isinstance(home, Device):
            topology.spec(home)
            lone.append(home)
    ends = sorted({e for s in spans.values() for e in s} | {e for d in lone for e in _ends(d, r.kind)})
    where = [(a, b) for a, b in pairwise(ends) if any(s <= a and b <= t for s, t in _all(spans, lone, r.kind))]
    number: dict[tuple[int, int], int] = {}
    homes: dict[Home, tuple[int, ...]] = {}
    members_: dict[Device, int] = {}
    sizes: list[int] = []
    first: list[Device] = []
    for home in uses.homes:
        if isinstance(home, Device) and home.kind != r.kind:
            members_[home] = len(sizes)
            homes[home] = (len(sizes),)
            sizes.append(1)
            first.append(home)
            continue
        s, t = spans[home] if isinstance(home, Mesh) else (home.index, home.index + 1)
        inside: list[int] = []
        for a, b in where:
            if s <= a and b <= t:
                if (a, b) not in number:
                    number[a, b] = len(sizes)
                    sizes.append(b - a)
                    first.append(Device(r.kind, a))
                inside.append(number[a, b])
        homes[home] = tuple(inside)
    classes = DeviceClasses(homes, sizes, first)
    classes.members, classes.kind = members_, r.kind
    classes.blocks = [(a, b, c) for (a, b), c in number.items()]
    return classes if _linked(classes, uses, spans, topology, r) else None


def _run(home: Home, kind: str) -> tuple[int, int] | None:
    """The run of device numbers that a home is, first and end."""
    devices = members(home)
    a = devices[0].index
    if [d.index for d in devices] != list(range(a, a + len(devices))) or any(d.kind != kind for d in devices):
        return None
    return a, a + len(devices)


def _ends(d: Device, kind: str) -> tuple[int, ...]:
    return (d.index, d.index + 1) if d.kind == kind else ()


def _all(spans: dict[Mesh, tuple[int, int]], lone: list[Device], kind: str) -> list[tuple[int, int]]:
    return [*spans.values(), *((d.index, d.index + 1) for d in lone if d.kind == kind)]


def _linked(
    classes: DeviceClasses, uses: Uses, spans: dict[Mesh, tuple[int, int]], topology: Topology, r: Regular
) -> bool:
    """Fill in peers and pairs; False if devices of a block are not all linked alike."""
    block = {c: (a, b) for a, b, c in classes.blocks}
    for mesh, axis in uses.axes:
        strided = axis_stride(mesh, axis)
        if strided is None:
            return False
        stride, size = strided
        start = spans[mesh][0]
        group = _even_group(r, spans[mesh], stride, size)
        here = classes.homes[mesh]
        cuts = [block[c][0] - start for c in here]
        if group is None:
            return False
        if all(cut % (stride * size) == 0 for cut in cuts):  # groups stay in their block
            classes.peers[mesh, axis] = [Peers((c,), group) for c in here]
        elif size == len(here) and cuts == [i * stride for i in range(size)]:  # a block each
            classes.peers[mesh, axis] = [Peers(tuple(sorted(here)), group)]
        else:
            return False
    for a, b in uses.sends:
        found = _even_pairs(classes, block, topology, r, a, b)
        if found is None:
            return False
        classes.pairs[a, b] = found
    return True


def _even_group(r: Regular, span: tuple[int, int], stride: int, size: int) -> Group | None:
    """The group of devices `stride` apart, if it is the same everywhere in the span."""
    start, end = span
    node, reach = r.per_node, stride * size
    if start // node == (end - 1) // node or (start % reach == 0 and node % reach == 0):
        return spread(r, 1, size, size)
    if stride % node == 0:
        return spread(r, size, 1, size)
    if start % node == 0 and node % stride == 0 and reach % node == 0:
        return spread(r, reach // node, node // stride, size)
    if end - start == reach and stride == 1:  # one group in all
        return regular_group(r, range(start, end))
    return None


def _even_pairs(
    classes: DeviceClasses, block: dict[int, tuple[int, int]], topology: Topology, r: Regular, a: Home, b: Home
) -> list[Pair] | None:
    pairs: list[Pair] = []
    source, target = classes.homes[a], classes.homes[b]
    if len(source) != len(target):
        return None
    for c, d in zip(source, target, strict=True):
        if c not in block or d not in block:
            pairs.append(Pair(c, d, topology.link(members(a)[0], members(b)[0])))
            continue
        (i, j), (k, l) = block[c], block[d]
        nodes = {x // r.per_node for x in (i, j - 1)}, {x // r.per_node for x in (k, l - 1)}
        if j - i != l - k:
            return None
        if abs(k - i) >= r.per_node or (len(nodes[0]) == len(nodes[1]) == 1 and nodes[0] != nodes[1]):
            if r.rail_link is not None and (k - i) % r.per_node:
                return None  # some may stay on their rails
            pairs.append(Pair(c, d, r.between((i, k))))
        elif nodes[0] == nodes[1] and len(nodes[0]) == 1:
            pairs.append(Pair(c, d, r.intra))
        else:
            return None
    return pairs
