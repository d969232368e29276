"""Finding tensor parallelism: the set of clean, non-clashing classes of weights whose split costs least.

The algorithm looks at the whole training step, knows no names, and decides alike layers once (on the quotient).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from distir.ir.type import Shard
from distir.transforms.classes import Classes, Groups, Node, all_classes, classes_from
from distir.transforms.graph import Graph
from distir.transforms.place import Placed, View, place_all, view
from distir.transforms.quotient import quotient
from distir.transforms.shares import samples, shares

_BETTER = 1 - 1e-6
_CLEAR = 0.98
"""To what share the price must fall for several groups to come in the place of one: prices leave out much."""
_LATENCY = 3.0
"""In that comparison a collective costs as much more as this many ops of average cost, however little it sends."""
_DIGITS = 12
"""Of a price: what is left of rounding does not decide between prices that are equal."""
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
    graph: Graph, n: int, weights: Sequence[int], batch: tuple[Node, ...] = (), pieces: int = 1, outer: int = 1
) -> Split:
    """The split of the graph over an axis of n devices that costs least, by local search over groups of classes.

    `batch` are the batch dims of the data, which other mesh axes split into `pieces`; what is found depends on neither
    their size nor the pieces. It is kept with the graph, for all pieces that get in the way of the same classes.
    """
    classes = all_classes(graph, n, outer)
    bad = set(classes.bad)
    for m in {pieces, samples(graph, batch)}:
        bad |= classes.clashing(n, classes_from(graph, m, batch), m)
    question = classes, frozenset(bad), tuple(weights), batch
    found = graph.found
    if question not in found:
        found[question] = _problem(graph, classes, bad, weights, batch)
    if (n, question) not in found:
        found[n, question] = _search(found[question], n)
    return found[n, question]


class _Problem(NamedTuple):
    """What may be split, in groups of classes, in all of the graph and in its quotient; it holds for many degrees."""

    classes: Classes
    groups: Groups
    full: View
    small: View


def _problem(
    graph: Graph, classes: Classes, bad: Collection[int], weights: Sequence[int], batch: tuple[Node, ...]
) -> _Problem:
    groups = Groups(classes, weights, bad)
    group = groups.group
    full = view(graph, [[(s, group[c]) for s, c in row if c in group] for row in classes.strands], shares(graph, batch))
    return _Problem(classes, groups, full, quotient(graph, full))


def _search(problem: _Problem, n: int) -> Split:
    """The best groups of classes to split n ways.

    A move takes a group in (and out what clashes with it) or out; when none helps, pairs that clash with the same
    chosen group are tried together. At last the search goes on without one of the chosen groups, in whose place more
    may come.
    """
    classes, groups, full, small = problem
    found: dict[Chosen, tuple[float, float]] = {}
    ops = sum(small.times)

    def known(chosen: Chosen) -> tuple[float, float]:
        if chosen not in found:
            placed = place_all(small, n, chosen)
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
    return Split(place_all(full, n, chosen), classes, split)


def _flip(chosen: Chosen, group: int, clash: Sequence[set[int]]) -> Chosen:
    return chosen - {group} if group in chosen else (chosen - clash[group]) | {group}


def _descend(
    chosen: Chosen, order: Sequence[int], clash: Sequence[set[int]], price: Callable[[Chosen], float]
) -> Chosen:
    """Moves among the groups in `order` for as long as one helps."""
    while True:
        moved = _step(chosen, order, clash, price)
        if price(moved) >= price(chosen) * _BETTER:
            return chosen
        chosen = moved


def _step(chosen: Chosen, order: Sequence[int], clash: Sequence[set[int]], price: Callable[[Chosen], float]) -> Chosen:
    """The best next choice: all improving flips that do not touch each other, the one best flip, or a pair."""
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
