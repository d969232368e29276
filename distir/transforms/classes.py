"""Factor classes: which digits of which values must be split together.

A node is (value, split): one digit of one dim. An op's strand joins the nodes it runs through, both ways, so a class
is a connected component over the whole program. A class is *clean* if every op that meets it has a strand for it and
no op has two: splitting a clean class costs reductions and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from distir.ir.spec import Strand
from distir.ir.type import Shard
from distir.transforms.graph import Graph, heights, strand_slots

Node = tuple[int, Shard]
Taken = Mapping[int, Sequence[tuple[Shard, int]]]
"""Per value the digits (split, n) that an earlier mesh axis has taken."""


class Classes:
    """The classes of a graph for an axis of n devices, grown from `starts`.

    `strands[j]` lists the strands through op j with their class; `bad` are the classes that are not clean; `nodes`
    maps each node to its class.
    """

    def __init__(self, graph: Graph, n: int, starts: Iterable[Node], taken: Taken | None = None) -> None:
        self.graph, self.n = graph, n
        ids: dict[Node, int] = {}
        parent: list[int] = []
        todo: list[Node] = []

        def number(node: Node) -> int:
            i = ids.get(node)
            if i is None:
                i = ids[node] = len(parent)
                parent.append(i)
                todo.append(node)
            return i

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        for node in starts:
            number(node)
        refused: set[int] = set()
        seen: set[tuple[int, Strand]] = set()
        found: list[list[tuple[Strand, int]]] = [[] for _ in graph.sigs]
        ins, outs, sigs, uses = graph.ins, graph.outs, graph.sigs, graph.uses
        while todo:
            value, split = todo.pop()
            me = ids[value, split]
            for j, k in uses[value]:
                strand = sigs[j].strand(k, split, n)
                if strand is None:
                    refused.add(me)
                    continue
                if (j, strand) in seen:
                    continue
                seen.add((j, strand))
                found[j].append((strand, me))
                mine = root(me)
                for slot, p in strand_slots(strand):
                    other = root(number((ins[j][slot] if slot >= 0 else outs[j][~slot], p)))
                    if other != mine:
                        parent[other] = mine
        for row in found:
            if len(row) > 1:  # in an order that does not depend on that of the ops
                row.sort(key=lambda entry: [(k, p.dim, p.outer) for k, p in strand_slots(entry[0])])
        self.strands = [[(strand, root(i)) for strand, i in row] for row in found]
        self.nodes = {node: root(i) for node, i in ids.items()}
        self.bad = {root(i) for i in refused}
        self._clash_with_taken(taken or {})
        for row in self.strands:
            if len(row) > 1:
                self.bad |= {c for c, k in Counter(c for _, c in row).items() if k > 1}

    def _clash_with_taken(self, taken: Taken) -> None:
        for (value, split), c in self.nodes.items():
            for other, n in taken.get(value, ()):
                if other.dim == split.dim and split.outer < other.outer * n and other.outer < split.outer * self.n:
                    self.bad.add(c)

    def members(self) -> dict[int, list[Node]]:
        """The nodes of each class."""
        result: dict[int, list[Node]] = {}
        for node, c in self.nodes.items():
            result.setdefault(c, []).append(node)
        return result


def all_starts(graph: Graph, n: int, outer: int = 1) -> list[Node]:
    """The node of every dim of every value that divides."""
    return [
        (v, Shard(dim, outer))
        for v, shape in enumerate(graph.shapes)
        for dim, size in enumerate(shape)
        if size % (outer * n) == 0
    ]


class Groups:
    """Clean classes that hold a dim of a weight, those that are alike put together.

    Alike classes have the same multiset of (op signature, strand); those that meet in an op are coloured apart, in the
    order in which the program needs them, so that a chain of equal layers alternates. `clash[g]` are the groups that
    meet g in some op.
    """

    def __init__(self, classes: Classes, weights: Sequence[int]) -> None:
        graph = classes.graph
        self.classes = classes
        wanted = set(weights)
        size: dict[int, int] = {}
        first: dict[int, tuple[int, int, int]] = {}
        for (value, split), c in classes.nodes.items():
            if value in wanted and c not in classes.bad:
                size[c] = size.get(c, 0) + math.prod(graph.shapes[value])
                here = value, split.dim, split.outer
                first[c] = min(first.get(c, here), here)
        marks: dict[int, Counter[tuple[int, Strand]]] = {c: Counter() for c in size}
        meets: dict[int, set[int]] = {c: set() for c in size}
        height = heights(graph)
        top = dict.fromkeys(size, 0)
        for j, row in enumerate(classes.strands):
            here = [c for _, c in row if c in size]
            for strand, c in row:
                if c in size:
                    marks[c][graph.sigs[j].number, strand] += 1
                    top[c] = max(top[c], height[j])
            for c in here if len(here) > 1 else ():
                meets[c].update(here)
        # neither names nor the order of independent ops count: the more comes after, the earlier
        self.members = _colour(sorted(filter(marks.get, size), key=lambda c: (-top[c], first[c])), marks, meets)
        self.group = {c: g for g, cs in enumerate(self.members) for c in cs}
        self.weight = [sum(size[c] for c in cs) for cs in self.members]
        self.clash: list[set[int]] = [set() for _ in self.members]
        for c, others in meets.items():
            if c in self.group:
                self.clash[self.group[c]] |= {self.group[x] for x in others if x != c}


def _colour(
    order: Sequence[int], marks: Mapping[int, Counter[tuple[int, Strand]]], meets: Mapping[int, set[int]]
) -> list[list[int]]:
    alike: dict[frozenset[tuple[tuple[int, Strand], int]], list[int]] = {}
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
