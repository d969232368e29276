"""Finding tensor parallelism: the set of clean, non-clashing classes of weights whose split costs least.

The algorithm looks at the whole training step, knows no names, and decides alike layers once (on the quotient).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from distir.ir.type import Shard
from distir.transforms.classes import Classes, Groups, all_classes
from distir.transforms.graph import Graph
from distir.transforms.place import Cost, Placed, View, place_all, shares, view
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
    classes = all_classes(graph, n, outer)
    bad = frozenset(classes.bad.union(classes.clashing(n, *taken)) if taken else classes.bad)
    question = classes, bad, tuple(weights)
    found = graph.found
    if question not in found:
        found[question] = _problem(graph, classes, bad, weights)
    if (n, question) not in found:
        found[n, question] = _search(found[question], n)
    return found[n, question]


class _Problem(NamedTuple):
    """What may be split, in groups of classes, in all of the graph and in its quotient; it holds for many degrees."""

    classes: Classes
    groups: Groups
    full: View
    small: View
    cost: Cost


def _problem(graph: Graph, classes: Classes, bad: Collection[int], weights: Sequence[int]) -> _Problem:
    groups = Groups(classes, weights, bad)
    group = groups.group
    full = view(graph, [[(s, group[c]) for s, c in row if c in group] for row in classes.strands])
    small = quotient(graph, full)
    return _Problem(classes, groups, full, small, shares(small))


def _search(problem: _Problem, n: int) -> Split:
    """The best groups of classes to split n ways.

    A move takes a group in (and out what clashes with it) or out; when none helps, pairs that clash with the same
    chosen group are tried together.
    """
    classes, groups, full, small, cost = problem
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
