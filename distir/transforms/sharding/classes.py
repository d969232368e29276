"""Factor classes: which sub-dimensions of which values must be split together.

A node is (value, split): one sub-dimension of one dim. A factor mapping of an op joins the nodes in it, operands and
results alike, so a class is a connected component over the whole program. A class is *clean* if every op with one of
its nodes has exactly one mapping for it: the only collectives that splitting it takes are reductions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from distir.ir.spec import FactorMapping
from distir.ir.type import Shard
from distir.transforms.sharding.graph import Graph, Signature

Node = tuple[int, Shard]


class _Answer(NamedTuple):
    """A signature's factor mapping for a split at one of its slots, with its number (a bit) in the signature."""

    bit: int
    mapping: FactorMapping
    slots: list[tuple[int, Shard]]
    rank: list[tuple[int, int, int]]
    """Sort key for the mappings of an op, independent of the order of the ops."""


_RANK = itemgetter(0)
_Asked = list[dict[Shard, _Answer | None]]
"""The answers of a signature, by slot: operands from the first, results (~k) from the last."""


class Classes:
    """The classes of a graph for an axis of n devices, grown from `starts`, which earlier axes split `outside` ways.

    `mappings[j]` lists the mappings of op j with their class; `bad` are the classes that are not clean; `at[v]` maps
    each sub-dimension of value v that is in a class to that class.
    """

    def __init__(self, graph: Graph, n: int, starts: Iterable[Node], outside: int = 1) -> None:
        self.graph, self.n, self.outside = graph, n, outside
        self.at: list[dict[Shard, int]] = [{} for _ in graph.values]
        self._asked: list[_Asked] = [[{} for _ in (*sig.ins, *sig.outs)] for sig in graph.kinds]
        parent, found, refused = self._walk(starts)
        root = _roots(parent)
        self.bad = {root[i] for i in refused}
        self.mappings: list[list[tuple[FactorMapping, int]]] = []
        for row in found:
            if len(row) > 1:
                row.sort(key=_RANK)
            through = [(mapping, root[i]) for _, mapping, i in row]
            self.mappings.append(through)
            if len(through) > 1 and len({c for _, c in through}) < len(through):
                self.bad |= {c for c, k in Counter([c for _, c in through]).items() if k > 1}
        for row in self.at:
            for split, i in row.items():
                row[split] = root[i]

    def _walk(
        self, starts: Iterable[Node]
    ) -> tuple[list[int], list[list[tuple[list[tuple[int, int, int]], FactorMapping, int]]], set[int]]:
        """Number the nodes that are reached (in `at`) and join those of one mapping (union-find).

        Returns the parent of each node in a forest of classes; for each op its mappings, each with one of its nodes;
        and the nodes that some op has no mapping for. A hot loop in large programs, so no function is called per node.
        """
        graph, at = self.graph, self.at
        parent: list[int] = []
        todo: list[tuple[int, Shard, int]] = []
        for value, split in starts:
            if split not in at[value]:
                at[value][split] = len(parent)
                todo.append((value, split, len(parent)))
                parent.append(len(parent))
        refused: set[int] = set()
        seen = [0] * len(graph.sigs)  # per op the bits of the mappings met
        found: list[list[tuple[list[tuple[int, int, int]], FactorMapping, int]]] = [[] for _ in graph.sigs]
        ins, outs, uses = graph.ins, graph.outs, graph.uses
        asked = [self._asked[sig.number] for sig in graph.sigs]
        unasked = _Answer(0, FactorMapping((), ()), [], [])
        while todo:
            value, split, me = todo.pop()
            for j, k in uses[value]:
                answer = asked[j][k].get(split, unasked)
                if answer is unasked:
                    answer = self._ask(j, k, split)
                if answer is None:
                    refused.add(me)
                    continue
                bit, mapping, slots, rank = answer
                if seen[j] & bit:
                    continue
                seen[j] |= bit
                found[j].append((rank, mapping, me))
                mine = me
                while parent[mine] != mine:
                    parent[mine] = mine = parent[parent[mine]]
                for slot, p in slots:
                    v = ins[j][slot] if slot >= 0 else outs[j][~slot]
                    other = at[v].get(p)
                    if other is None:
                        at[v][p] = len(parent)
                        todo.append((v, p, len(parent)))
                        parent.append(mine)
                        continue
                    while parent[other] != other:
                        parent[other] = other = parent[parent[other]]
                    parent[other] = mine
        return parent, found, refused

    def _ask(self, j: int, k: int, split: Shard) -> _Answer | None:
        sig = self.graph.sigs[j]
        asked = self._asked[sig.number]
        mapping = self.mapping(sig, k, split)
        known = {a.bit: a for row in asked for a in row.values() if a is not None}
        answer = next((a for a in known.values() if a.mapping is mapping), None)
        if answer is None and mapping is not None:
            slots = mapping.splits()
            answer = _Answer(1 << len(known), mapping, slots, [(slot, p.dim, p.outer) for slot, p in slots])
        asked[k][split] = answer
        return answer

    def mapping(self, sig: Signature, k: int, split: Shard) -> FactorMapping | None:
        """The factor mapping of ops of a signature with a split at one of its slots."""
        return sig.mapping(k, split, self.n, self.outside)

    def _answers(self) -> Iterator[tuple[Signature, int, Shard, _Answer | None]]:
        """All answers, with their signatures, slots and splits."""
        for sig, asked in zip(self.graph.kinds, self._asked, strict=True):
            for k, row in zip((*range(len(sig.ins)), *range(-len(sig.outs), 0)), asked, strict=True):
                for split, answer in row.items():
                    yield sig, k, split, answer

    def hold_for(self, n: int) -> bool:
        """Whether the classes are the same for an axis of n devices: every signature has the same mappings then."""
        return all(
            sig.mapping(k, split, n, self.outside) is (None if answer is None else answer.mapping)
            for sig, k, split, answer in self._answers()
        )

    def inside(self, outer: int, n: int) -> dict[int, FactorMapping] | None:
        """The classes' mappings for an axis of n devices that splits inside `outer` outer parts.

        Maps the ids of the mappings here to the mappings there; None if some signature has other mappings there.
        """
        there: dict[int, FactorMapping] = {}
        for sig, k, split, answer in self._answers():
            moved = sig.mapping(k, split.nested(outer), n, outer)
            if answer is not None:
                if moved is None or moved != answer.mapping.nested(outer):
                    return None
                there[id(answer.mapping)] = moved
            elif moved is not None:
                return None
        return there

    def clashing(self, n: int, taken: Classes, m: int) -> set[int]:
        """The classes, split n ways, that overlap a sub-dimension `taken` by an earlier mesh axis of m devices, or that
        have halos of a dim of it."""
        mine_wide, theirs_wide = self.with_halos, taken.with_halos
        found: set[int] = set()
        for mine, theirs in zip(self.at, taken.at, strict=True):
            for other in theirs if mine else ():
                for split, c in mine.items():
                    if split.dim != other.dim or c in found:
                        continue
                    if c in mine_wide or theirs[other] in theirs_wide or split.overlaps(n, other, m):
                        found.add(c)
        return found

    @cached_property
    def with_halos(self) -> frozenset[int]:
        """The classes of which some op takes an operand with a halo."""
        wide = {id(a.mapping) for *_, a in self._answers() if a is not None and a.mapping.has_halo}
        return frozenset({c for row in self.mappings for mapping, c in row if id(mapping) in wide} if wide else ())

    def members(self) -> dict[int, list[Node]]:
        """The nodes of each class."""
        result: dict[int, list[Node]] = {}
        for v, row in enumerate(self.at):
            for split, c in row.items():
                result.setdefault(c, []).append((v, split))
        return result


def classes_from(graph: Graph, n: int, starts: tuple[Node, ...]) -> Classes:
    """As `Classes(graph, n, starts)`, cached with the graph: the same classes often hold for several n."""
    return _known(graph, n, starts) or _keep(graph, starts, Classes(graph, n, starts))


def all_classes(graph: Graph, n: int, outer: int = 1) -> Classes:
    """The classes of all dims, split inside `outer` parts, cached with the graph. Weights alone would miss heads."""
    splits = {
        shape: tuple([Shard(dim, outer) for dim, size in enumerate(shape) if size % (outer * n) == 0])
        for shape in dict.fromkeys(graph.shapes)
    }
    key = "all", *splits.values()
    known = _known(graph, n, key)
    if known is not None:
        return known
    starts = [(v, split) for v, shape in enumerate(graph.shapes) for split in splits[shape]]
    return _keep(graph, key, Classes(graph, n, starts))


def _known(graph: Graph, n: int, key: object) -> Classes | None:
    return next((c for c in graph.cache.get((Classes, key), ()) if c.hold_for(n)), None)


def _keep(graph: Graph, key: object, classes: Classes) -> Classes:
    graph.cache.setdefault((Classes, key), []).append(classes)
    return classes


def _roots(parent: list[int]) -> list[int]:
    """The root of each node of a forest."""
    for i in range(len(parent)):
        r = i
        while parent[r] != r:
            parent[r] = r = parent[parent[r]]
        parent[i] = r
    return parent


_Marks = dict[tuple[int, int], int]
"""How often a class contains a mapping: (number of the signature, id of the mapping) -> count."""


class Groups:
    """Clean classes that contain a dim of a weight, in groups of equal ones.

    Equal classes have the same multiset of (op signature, mapping). Those that share an op get different colours, in
    program order, so that in a chain of equal layers colours alternate. `clash[g]` are the groups that share an op with
    g.
    """

    def __init__(self, classes: Classes, weights: Sequence[int], bad: Collection[int]) -> None:
        graph = classes.graph
        size: dict[int, int] = {}
        first: dict[int, tuple[int, int, int]] = {}
        for value in weights:
            for split, c in classes.at[value].items():
                if c not in bad:
                    size[c] = size.get(c, 0) + math.prod(graph.shapes[value])
                    here = value, split.dim, split.outer
                    first[c] = min(first.get(c, here), here)
        marks: dict[int, _Marks] = {c: {} for c in size}
        meets: dict[int, set[int]] = {c: set() for c in size}
        top = dict.fromkeys(size, 0)
        for sig, height, row in zip(graph.sigs, graph.heights, classes.mappings, strict=True):
            here = [c for _, c in row if c in size]
            for mapping, c in row if here else ():
                if c in size:
                    mark = sig.number, id(mapping)  # a signature has a mapping once
                    marks[c][mark] = marks[c].get(mark, 0) + 1
                    if top[c] < height:
                        top[c] = height
            for c in here if len(here) > 1 else ():
                meets[c].update(here)
        # independent of names and of the order of independent ops: by longest path to a result
        self.members = _colour(sorted(filter(marks.get, size), key=lambda c: (-top[c], first[c])), marks, meets)
        self.group = {c: g for g, cs in enumerate(self.members) for c in cs}
        self.weight = [sum(size[c] for c in cs) for cs in self.members]
        self.clash: list[set[int]] = [set() for _ in self.members]
        for c, others in meets.items():
            if c in self.group:
                self.clash[self.group[c]] |= {self.group[x] for x in others if x != c}


def _colour(order: Sequence[int], marks: Mapping[int, _Marks], meets: Mapping[int, set[int]]) -> list[list[int]]:
    alike: dict[frozenset[tuple[tuple[int, int], int]], list[int]] = {}
    for c in order:
        alike.setdefault(frozenset(marks[c].items()), []).append(c)
    groups: list[list[int]] = []
    for cs in alike.values():
        colour: dict[int, int] = {}
        for c in cs:
            used = {colour[x] for x in meets[c] if x in colour and x != c}
            colour[c] = next(k for k in range(len(cs)) if k not in used)
        groups += [[c for c in cs if colour[c] == k] for k in range(max(colour.values()) + 1)]
    return groups
