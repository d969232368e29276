"""Finding tensor parallelism: the set of clean, non-clashing classes of weights whose split costs least.

The algorithm looks at the whole training step, knows no names, and decides alike layers once (on the quotient).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distir.ir.type import Shard
from distir.transforms.classes import Classes, Groups, all_starts
from distir.transforms.graph import Graph
from distir.transforms.place import Placed, place_all, shares, view
from distir.transforms.quotient import quotient

_BETTER = 1 - 1e-6
Chosen = frozenset[int]


class Split(NamedTuple):
    """What `tensor_parallel` found: the placements along the axis, and the classes that are split."""

    placed: Placed
    classes: Classes
    chosen: frozenset[int]

    def splits(self, value: int, split: Shard) -> bool:
        """Whether that digit of that value is split."""
        return self.classes.at[value].get(split) in self.chosen


def tensor_parallel(
    graph: Graph, n: int, weights: Sequence[int], taken: tuple[Classes, int] | None = None, outer: int = 1
) -> Split:
    """The split of the graph over an axis of n devices that costs least, by local search over groups of classes.

    `taken` are the classes that an earlier mesh axis splits, and its size. What is found is kept with the graph, for
    all `taken` that get in the way of the same classes.
    """
    found = graph.found
    asked = "classes", n, outer
    if asked not in found:
        found[asked] = Classes(graph, n, all_starts(graph, n, outer))
    classes: Classes = found[asked]
    bad = frozenset(classes.bad.union(classes.clashing(*taken)) if taken else classes.bad)
    key = classes, bad, tuple(weights)
    if key not in found:
        found[key] = _search(graph, classes, bad, weights)
    return found[key]


def _search(graph: Graph, classes: Classes, bad: frozenset[int], weights: Sequence[int]) -> Split:
    """The best groups of classes that are not `bad`.

    A move takes a group in (and out what clashes with it) or out; when none helps, pairs that clash with the same
    chosen group are tried together.
    """
    n = classes.n
    groups = Groups(classes, weights, bad)
    group = groups.group
    full = view(graph, [[(s, group[c]) for s, c in row if c in group] for row in classes.strands])
    small = quotient(graph, full)
    cost = shares(small)
    prices: dict[Chosen, float] = {}

    def price(chosen: Chosen) -> float:
        if chosen not in prices:
            prices[chosen] = place_all(small, n, chosen, cost).price
        return prices[chosen]

    count = len(groups.members)
    order = [g for g in sorted(range(count), key=lambda g: (-groups.weight[g], g)) if g not in groups.clash[g]]
    chosen: Chosen = frozenset()
    while True:
        best = price(chosen)
        moved = _step(chosen, best, order, groups.clash, price)
        if price(moved) >= best * _BETTER:
            break
        chosen = moved
    split = frozenset(c for g in chosen for c in groups.members[g])
    return Split(place_all(full, n, chosen, cost), classes, split)


def _flip(chosen: Chosen, group: int, clash: Sequence[set[int]]) -> Chosen:
    return chosen - {group} if group in chosen else (chosen - clash[group]) | {group}


def _step(
    chosen: Chosen, best: float, order: Sequence[int], clash: Sequence[set[int]], price: Callable[[Chosen], float]
) -> Chosen:
    """The best next choice: all improving flips that do not touch each other, the one best flip, or a pair."""
    ranked = sorted((price(_flip(chosen, g, clash)), i, g) for i, g in enumerate(order))
    together, touched = chosen, set[int]()
    for p, _, g in ranked:
        if p < best * _BETTER and not touched & (clash[g] | {g}):
            together = _flip(together, g, clash)
            touched |= clash[g] | {g}
    moves = [together]
    if ranked:
        moves.append(_flip(chosen, ranked[0][2], clash))
    if min(map(price, moves)) < best * _BETTER:
        return min(moves, key=price)
    pairs = [
        _flip(_flip(chosen, a, clash), b, clash)
        for c in sorted(chosen)
        for i, a in enumerate(order)
        if a in clash[c]
        for b in order[:i]
        if b in clash[c] and b not in clash[a]
    ]
    return min(pairs, key=price, default=chosen)
