"""Groups of classes that are alike: they are split together, or not at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from distir.transforms.sharding.classes import Classes


class Groups:
    """Clean classes that contain a dim of a weight, in groups of equal ones.

    Equal classes have the same multiset of (op signature, mapping). Those that share an op get different colours, in
    program order, so that in a chain of equal layers colours alternate. `clash[g]` are the groups that share an op with
    g.
    """

    def __init__(self, classes: Classes, weights: Sequence[int], bad: Collection[int]) -> None:
        size, first = _in_weights(classes, weights, bad)
        ways = _ways(classes, list(size))
        # independent of names and of the order of independent ops: by longest path to a result
        order = sorted(ways.marks, key=lambda c: (-ways.top[c], first[c]))
        self.members = _colour(order, ways.marks, ways.meets)
        self.group = {c: g for g, cs in enumerate(self.members) for c in cs}
        self.weight = [sum(size[c] for c in cs) for cs in self.members]
        self.clash: list[set[int]] = [set() for _ in self.members]
        for c, others in ways.meets.items():
            self.clash[self.group[c]] |= {self.group[x] for x in others}


def _in_weights(
    classes: Classes, weights: Sequence[int], bad: Collection[int]
) -> tuple[dict[int, int], dict[int, tuple[int, int, int]]]:
    """Of each clean class with nodes in weights the elements of these, and the first node as (value, dim, outer)."""
    size: dict[int, int] = {}
    first: dict[int, tuple[int, int, int]] = {}
    shapes = classes.graph.shapes
    for split, values, found in classes.nodes(weights):
        for value, c in zip(values.tolist(), found.tolist(), strict=True):
            if c not in bad:
                here = value, split.dim, split.outer
                size[c] = size.get(c, 0) + math.prod(shapes[value])
                first[c] = min(first.get(c, here), here)
    return size, first


class _Ways(NamedTuple):
    """How classes run through the program; those that no op has a mapping of do not."""

    marks: dict[int, bytes]
    """By class how often it contains each mapping of each signature."""
    top: dict[int, int]
    """By class the height of its highest op."""
    meets: dict[int, set[int]]
    """By class the others that share an op with it."""


def _ways(classes: Classes, of: Sequence[int]) -> _Ways:
    import numpy as np

    count, kinds = len(of), sum([len(through.mappings) for through in classes.through])
    number = np.full(len(classes.label) + 1, -1)
    number[list(of)] = np.arange(count)
    heights = np.array(classes.graph.heights, np.int64)
    found = [np.empty((3, 0), np.int64)]  # for each op and mapping: the class, the kind of mapping, the op's height
    met = [np.empty(0, np.int64)]
    first = 0
    for rows, (mappings, through) in zip(classes.graph.rows, classes.through, strict=True):
        here = number[through]
        op, k = np.nonzero(here >= 0)
        found.append(np.stack([here[op, k], first + k, heights[rows.ops[op]]]))
        first += len(mappings)
        for apart in range(1, len(mappings)):
            a, b = here[:, apart:], here[:, :-apart]
            met.append((a * count + b)[(a >= 0) & (b >= 0)])
    c, kind, height = np.concatenate(found, axis=1)
    top = np.zeros(count, np.int64)
    np.maximum.at(top, c, height)
    keys, times = np.unique(c * kinds + kind, return_counts=True)
    ends = np.searchsorted(keys, np.arange(count + 1) * kinds).tolist()
    spans = [(x, slice(i, j)) for x, i, j in zip(of, ends, ends[1:], strict=False) if i < j]
    meets: dict[int, set[int]] = {x: set() for x, _ in spans}
    for a, b in [divmod(pair, count) for pair in sorted({*np.concatenate(met).tolist()})]:
        meets[of[a]].add(of[b])
        meets[of[b]].add(of[a])
    marks = {x: (keys[span] % kinds).tobytes() + times[span].tobytes() for x, span in spans}
    return _Ways(marks, dict(zip(of, top.tolist(), strict=True)), meets)


def _colour(order: Sequence[int], marks: Mapping[int, bytes], meets: Mapping[int, set[int]]) -> list[list[int]]:
    alike: dict[bytes, list[int]] = {}
    for c in order:
        alike.setdefault(marks[c], []).append(c)
    groups: list[list[int]] = []
    for cs in alike.values():
        colour: dict[int, int] = {}
        for c in cs:
            used = {colour[x] for x in meets[c] if x in colour}
            colour[c] = next(k for k in range(len(cs)) if k not in used)
        groups += [[c for c in cs if colour[c] == k] for k in range(max(colour.values()) + 1)]
    return groups
