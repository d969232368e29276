"""Search for tensor parallelism: the set of clean, non-clashing classes of weights whose split costs least.

The search covers the whole training step, uses no names, and decides equal layers once (on the quotient graph).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from distir.ir.type import Shard
from distir.transforms.sharding.classes import Classes, Node, all_classes, classes_from
from distir.transforms.sharding.graph import Graph
from distir.transforms.sharding.groups import Groups
from distir.transforms.sharding.place import Placed, View, place_all, view
from distir.transforms.sharding.quotient import Quotient, quotient
from distir.transforms.sharding.shares import samples, shares

_BETTER = 1 - 1e-6
_CLEAR = 0.98
"""Several groups replace one only if the price falls below this share of it: the price is an approximation."""
_LATENCY = 3.0
"""In that comparison every collective also costs as much as this many ops of average cost: its latency."""
_DIGITS = 12
"""Decimal places to which prices are rounded, so that rounding errors do not decide between equal prices."""
Chosen = frozenset[int]


class Split(NamedTuple):
    """What `tensor_parallel` found: the placements along the axis, and the classes that are split."""

    placed: Placed
    classes: Classes
    chosen: frozenset[int]

    def splits(self, value: int, split: Shard) -> bool:
        """Whether that sub-dimension of that value is split."""
        return self.classes.of(value, split) in self.chosen


def tensor_parallel(
    graph: Graph,
    n: int,
    weights: Sequence[int],
    batch: tuple[Node, ...] = (),
    pieces: int = 1,
    outer: int = 1,
    taken: Sequence[tuple[int, tuple[Node, ...]]] = (),
) -> Split:
    """The split of the graph over an axis of n devices that costs least, by local search over groups of classes.

    `batch` are the batch dims of the data, which other mesh axes split into `pieces`; the result depends on neither
    their size nor the pieces. `taken` are the dims that further axes split, each with the size of its axis. It is
    cached with the graph, once for all `pieces` that exclude the same classes.
    """
    classes = all_classes(graph, n, outer)
    bad = set(classes.bad)
    for m in {pieces, samples(graph, batch)}:
        bad |= classes.clashing(n, classes_from(graph, m, batch), m)
    for m, starts in taken:
        bad |= classes.clashing(n, classes_from(graph, m, starts), m)
    question = classes, frozenset(bad), tuple(weights), batch
    found = graph.cache
    if question not in found:
        found[question] = _problem(graph, classes, bad, weights, batch)
    if (n, question) not in found:
        found[n, question] = _search(found[question], n)
    return found[n, question]


class _Problem(NamedTuple):
    """The search space: groups of classes, with a view of the graph and its quotient; the same for many degrees."""

    classes: Classes
    groups: Groups
    full: View
    small: Quotient


def _problem(
    graph: Graph, classes: Classes, bad: Collection[int], weights: Sequence[int], batch: tuple[Node, ...]
) -> _Problem:
    groups = Groups(classes, weights, bad)
    full = view(graph, classes.grouped(groups.group), shares(graph, batch))
    return _Problem(classes, groups, full, quotient(graph, full))


def _search(problem: _Problem, n: int) -> Split:
    """The best groups of classes to split n ways.

    A move adds a group (and removes those that clash with it) or removes one; when no move helps, pairs that clash with
    the same chosen group are tried together. At a local optimum the search restarts without one chosen group, which
    several others may replace.
    """
    classes, groups, full, small = problem
    found: dict[Chosen, tuple[float, float]] = {}
    ops = max(1, len(full.sigs))

    def known(chosen: Chosen) -> tuple[float, float]:
        if chosen not in found:
            placed = place_all(small.view, n, chosen)
            found[chosen] = (
                round(placed.price, _DIGITS),
                round(placed.price + _LATENCY * placed.collectives / ops, _DIGITS),
            )
        return found[chosen]

    def price(chosen: Chosen) -> float:
        return known(chosen)[0]

    def dearer(chosen: Chosen) -> float:
        return known(chosen)[1]

    clash = groups.clash
    count = len(groups.members)
    order = [g for g in sorted(range(count), key=lambda g: (-groups.weight[g], g)) if g not in clash[g]]
    chosen = _descend(frozenset(), order, clash, price)
    while True:
        others = [
            _descend(chosen - {c}, [g for g in order if g != c], clash, price)
            for c in sorted(chosen)
            if any(b not in clash[a] for a in clash[c] for b in clash[c] if a < b)
        ]
        moved = min(others, key=dearer, default=chosen)
        if dearer(moved) >= dearer(chosen) * _CLEAR:
            break
        chosen = moved
    split = frozenset(c for g in chosen for c in groups.members[g])
    near = small.lifted(place_all(small.view, n, chosen))
    return Split(place_all(full, n, chosen, near=near), classes, split)


def _flip(chosen: Chosen, group: int, clash: Sequence[set[int]]) -> Chosen:
    return chosen - {group} if group in chosen else (chosen - clash[group]) | {group}


def _descend(
    chosen: Chosen, order: Sequence[int], clash: Sequence[set[int]], price: Callable[[Chosen], float]
) -> Chosen:
    """Local search: moves among the groups in `order` until none lowers the price."""
    while True:
        moved = _step(chosen, order, clash, price)
        if price(moved) >= price(chosen) * _BETTER:
            return chosen
        chosen = moved


def _step(chosen: Chosen, order: Sequence[int], clash: Sequence[set[int]], price: Callable[[Chosen], float]) -> Chosen:
    """The best next choice: all improving flips that are independent of each other, the best single flip, or a pair."""
    best = price(chosen)
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
