"""Factor classes: which digits of which values must be split together.

A node is (value, split): one digit of one dim. An op's strand joins the nodes it runs through, both ways, so a class
is a connected component over the whole program. A class is *clean* if every op that meets it has a strand for it and
no op has two: splitting a clean class costs reductions and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from distir.ir.spec import Strand
from distir.ir.type import Placement, Shard
from distir.transforms.graph import Graph, strand_slots

Node = tuple[int, Shard]


class _Answer(NamedTuple):
    """What a signature says of a digit at one of its slots: its strand, with a number (a bit) within the signature."""

    bit: int
    strand: Strand
    slots: list[tuple[int, Shard]]
    rank: list[tuple[int, int, int]]
    """Sorts the strands through an op, in an order that does not depend on that of the ops."""


class Classes:
    """The classes of a graph for an axis of n devices, grown from `starts`.

    `strands[j]` lists the strands through op j with their class; `bad` are the classes that are not clean; `at[v]`
    maps each digit of value v that is in a class to it.
    """

    def __init__(self, graph: Graph, n: int, starts: Iterable[Node]) -> None:
        self.graph, self.n = graph, n
        self.at: list[dict[Shard, int]] = [{} for _ in graph.values]
        self._asked: list[dict[tuple[int, Shard], _Answer | None]] = [{} for _ in graph.kinds]
        parent, found, refused = self._walk(starts)
        root = _roots(parent)
        self.bad = {root[i] for i in refused}
        self.strands: list[list[tuple[Strand, int]]] = []
        for row in found:
            if len(row) > 1:
                row.sort(key=itemgetter(0))
            through = [(strand, root[i]) for _, strand, i in row]
            self.strands.append(through)
            if len(through) > 1 and len({c for _, c in through}) < len(through):
                self.bad |= {c for c, k in Counter([c for _, c in through]).items() if k > 1}
        for row in self.at:
            for split, i in row.items():
                row[split] = root[i]

    def _walk(
        self, starts: Iterable[Node]
    ) -> tuple[list[int], list[list[tuple[list[tuple[int, int, int]], Strand, int]]], set[int]]:
        """Number the nodes that are reached (in `at`) and join those on one strand.

        Gives the parent of each in a forest of classes; for each op its strands, with a node; the nodes refused.
        Large programs spend long here, hence no function is called for a node.
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
        seen = [0] * len(graph.sigs)  # per op the bits of the strands met
        found: list[list[tuple[list[tuple[int, int, int]], Strand, int]]] = [[] for _ in graph.sigs]
        ins, outs, uses = graph.ins, graph.outs, graph.uses
        asked = [self._asked[sig.number] for sig in graph.sigs]
        unasked = _Answer(0, Strand((), ()), [], [])
        while todo:
            value, split, me = todo.pop()
            for j, k in uses[value]:
                answer = asked[j].get((k, split), unasked)
                if answer is unasked:
                    answer = self._ask(j, k, split)
                if answer is None:
                    refused.add(me)
                    continue
                bit, strand, slots, rank = answer
                if seen[j] & bit:
                    continue
                seen[j] |= bit
                found[j].append((rank, strand, me))
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
        strand = sig.strand(k, split, self.n)
        answer = next((a for a in asked.values() if a is not None and a.strand is strand), None)
        if answer is None and strand is not None:
            slots = strand_slots(strand)
            bits = {a.bit for a in asked.values() if a is not None}
            answer = _Answer(1 << len(bits), strand, slots, [(slot, p.dim, p.outer) for slot, p in slots])
        asked[k, split] = answer
        return answer

    def hold_for(self, n: int) -> bool:
        """Whether they are the classes for an axis of n devices too: every signature says then what it said."""
        return all(
            sig.strand(k, split, n) is (None if answer is None else answer.strand)
            for sig, asked in zip(self.graph.kinds, self._asked, strict=True)
            for (k, split), answer in asked.items()
        )

    def inside(self, outer: int, n: int) -> dict[int, Strand] | None:
        """What the classes' strands are for an axis of n devices that takes the digit inside `outer` more.

        Maps the ids of the strands here to those there; None if some signature does not answer there as it does here.
        """
        there: dict[int, Strand] = {}
        for sig, asked in zip(self.graph.kinds, self._asked, strict=True):
            for (k, split), answer in asked.items():
                moved = sig.strand(k, Shard(split.dim, split.outer * outer), n)
                if answer is not None:
                    if moved is None or moved != inside(answer.strand, outer):
                        return None
                    there[id(answer.strand)] = moved
                elif moved is not None:
                    return None
        return there

    def clashing(self, n: int, taken: Classes, m: int) -> set[int]:
        """The classes, split n ways, that cross a digit which an earlier mesh axis of m devices has `taken`."""
        found: set[int] = set()
        for mine, theirs in zip(self.at, taken.at, strict=True):
            for other in theirs if mine else ():
                for split, c in mine.items():
                    if other.dim == split.dim and split.outer < other.outer * m and other.outer < split.outer * n:
                        found.add(c)
        return found

    def members(self) -> dict[int, list[Node]]:
        """The nodes of each class."""
        result: dict[int, list[Node]] = {}
        for v, row in enumerate(self.at):
            for split, c in row.items():
                result.setdefault(c, []).append((v, split))
        return result


def inside(strand: Strand, outer: int) -> Strand:
    """The strand of the digit that is inside `outer` more."""
    return Strand(*[tuple([_inside(p, outer) for p in row]) for row in strand])


def _inside(p: Placement, outer: int) -> Placement:
    return Shard(p.dim, p.outer * outer) if isinstance(p, Shard) else p


def classes_from(graph: Graph, n: int, starts: tuple[Node, ...]) -> Classes:
    """As `Classes(graph, n, starts)`, kept with the graph for passes that ask again: they hold for many an n."""
    return _known(graph, n, starts) or _keep(graph, starts, Classes(graph, n, starts))


def all_classes(graph: Graph, n: int, outer: int = 1) -> Classes:
    """The classes of all digits inside `outer`, kept with the graph; those of weights alone would not split heads."""
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
    return next((c for c in graph.found.get((Classes, key), ()) if c.hold_for(n)), None)


def _keep(graph: Graph, key: object, classes: Classes) -> Classes:
    graph.found.setdefault((Classes, key), []).append(classes)
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
"""How often a class runs along a strand: (number of the signature, id of the strand) -> times."""


class Groups:
    """Clean classes that hold a dim of a weight, those that are alike put together.

    Alike classes have the same multiset of (op signature, strand); those that meet in an op are coloured apart, in the
    order in which the program needs them, so that a chain of equal layers alternates. `clash[g]` are the groups that
    meet g in some op.
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
        for sig, height, row in zip(graph.sigs, graph.heights, classes.strands, strict=True):
            here = [c for _, c in row if c in size]
            for strand, c in row if here else ():
                if c in size:
                    mark = sig.number, id(strand)  # a signature has a strand once
                    marks[c][mark] = marks[c].get(mark, 0) + 1
                    if top[c] < height:
                        top[c] = height
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
