"""Cuts forward ops into stages so as to minimise the maximum stage cost, communication between stages included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from distir.ir.errors import InfeasibleError
from distir.ir.function import Op, Value
from distir.ops.rules import shape_of, tensor

if TYPE_CHECKING:
    import numpy as np

_CANDIDATES = 400
_SLACK = 1e-6
"""For sums in another order, as a share of the whole."""


class Ways(NamedTuple):
    """The ways in which ops, in topological order, can be cut into stages, at no prices.

    `border` has the bytes that cross a border, and in how many messages: two columns. Bytes are global ones, of values
    and their gradients.

    Every union of the first stages is a closed set of ops: one that contains what its ops depend on. If there are few
    closed sets, `member` has a row for each, a column an op; `subset[i, j]` says whether set i is a proper subset of
    set j; `border` has a row for each. Else these are None and the ops are cut in the order given: `border` has a row
    for what crosses before each op.
    """

    ops: Sequence[Op]
    border: np.ndarray
    sets: Sequence[int] = ()
    member: np.ndarray | None = None
    subset: np.ndarray | None = None


def ways(forward: Sequence[Op]) -> Ways:
    """All ways to cut ops, or, if there are too many, only those that keep the order given."""
    place = {v: i for i, op in enumerate(forward) for v in op.outputs}
    found = _closed(tuple([sum(1 << i for i in {place[v] for v in op.inputs if v in place}) for op in forward]))
    if found is None:
        return Ways(forward, _crossing(forward))
    return Ways(forward, _borders(forward, found.member), found.sets, found.member, found.subset)


class Choices(NamedTuple):
    """Ways to cut ops, at prices. If there are few closed sets, `total` is the cost of each set's ops and `cut_cost`
    that of sending what crosses its border. Else these are None: `costs` is the cost of each op, `crossing` the cut
    cost before each."""

    ways: Ways
    costs: Sequence[float]
    crossing: Sequence[float]
    total: np.ndarray | None = None
    cut_cost: np.ndarray | None = None


def choices(given: Ways, costs: Sequence[float], byte: float, message: float = 0.0) -> Choices:
    """The ways to cut ops of these costs; `byte` is the cost of a byte sent between stages, `message` what a message
    costs beside its bytes."""
    cut_cost = given.border @ (byte, message)
    if given.member is None:
        return Choices(given, costs, cut_cost.tolist())
    return Choices(given, costs, (), _loads(given.sets, costs), cut_cost)


class _ClosedSets(NamedTuple):
    """Closed sets of ops (bit i: op i), smallest first; as rows of 0 and 1, a column an op; which is a subset of
    which."""

    sets: list[int]
    member: np.ndarray
    subset: np.ndarray


@lru_cache(maxsize=32)  # independent of shapes: plans of one model share it
def _closed(needs: tuple[int, ...]) -> _ClosedSets | None:
    """The closed sets of ops with these dependences (bit i: on op i); None if there are more than `_CANDIDATES`."""
    import numpy as np

    sets = _closed_sets(needs, _CANDIDATES)
    if sets is None:
        return None
    member = _members(sets, len(needs))
    inside = member.astype(np.float32)
    common = inside @ inside.T  # how many ops two sets share
    size = common.diagonal()
    return _ClosedSets(sets, member, (common == size[:, None]) & (size[:, None] < size[None, :]))


def balanced(given: Choices, parts: int) -> list[int]:
    """The stage of each op, in their order. Raises InfeasibleError if there are fewer ops than stages."""
    import numpy as np

    ops, _, _, member, subset = given.ways
    _check_pieces(len(ops), parts)
    if member is None or given.total is None or given.cut_cost is None or subset is None:
        sizes = np.diff([0, *balanced_cut(given.costs, given.crossing, parts), len(ops)])
        return np.repeat(np.arange(parts), sizes).tolist()
    chain = _best_chain(_of_sets(given.total, given.cut_cost, subset), parts)
    return (parts - 1 - member[chain].sum(axis=0, dtype=int)).tolist()


def balanced_cut(costs: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """Cut a sequence into `parts` so as to minimise the maximum cost of a part.

    A part costs the sum of its elements' `costs` and the larger of its two cut costs; `crossing[i]` is that of a cut
    before element i. Returns parts - 1 positions (the first index of each later part). In a long sequence only some
    positions are candidates (`_candidates`). Raises InfeasibleError if there are fewer elements than parts.
    """
    _check_pieces(len(costs), parts)
    at, stages = _of_prefixes(costs, crossing, parts)
    return [at[k] for k in _best_chain(stages, parts)]


class _Band(NamedTuple):
    """Stages that end at each of several sets, a row each: the numbers of the sets at which they begin, and what they
    cost; infinite for what is no stage."""

    begin: np.ndarray
    cost: np.ndarray


class _Stages(NamedTuple):
    """All stages between sets, from the first (empty) to the last (all): the cost of the ops of each set, and more than
    any stage costs; and those that cost no more than a limit."""

    total: np.ndarray
    most: float
    within: Callable[[float], _Band]


def _of_sets(total: np.ndarray, cut_cost: np.ndarray, subset: np.ndarray) -> _Stages:
    """The stages between sets of ops that are each a `subset` of the next.

    `total[k]` is the cost of set k's ops, `cut_cost[k]` that of sending what crosses its border. A stage is the
    difference of two sets; it costs its ops and the larger of its two cut costs, for the links to both sides work at
    the same time.
    """
    import numpy as np

    cost = np.where(subset, total[None, :] - total[:, None] + np.maximum(cut_cost[None, :], cut_cost[:, None]), np.inf)

    def within(limit: float) -> _Band:
        kept, columns = cost <= limit, np.arange(len(cost))
        first = np.where(kept.any(axis=0), kept.argmax(axis=0), columns)
        begin = columns[:, None] - np.arange(1, max(2, 1 + int((columns - first).max())))
        here = (begin >= 0) & kept[begin, columns[:, None]]
        return _Band(np.maximum(begin, 0), np.where(here, cost[begin, columns[:, None]], np.inf))

    return _Stages(total, float(cost.max(initial=0.0, where=cost < np.inf)), within)


def _of_prefixes(costs: Sequence[float], crossing: Sequence[float], parts: int) -> tuple[list[int], _Stages]:
    """The positions where a sequence may be cut, its ends among them, and the stages between these."""
    import numpy as np

    n = len(costs)
    each = np.asarray(crossing, float)
    inner = 1 + _candidates(each[1:n], parts)
    at = [0, *inner.tolist(), n]
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])[at]
    cut_cost = np.concatenate([[0.0], each[inner], [0.0]])
    columns = np.arange(len(at))

    def within(limit: float) -> _Band:
        first = np.searchsorted(total, total - limit)  # with those before a stage costs more
        begin = columns[:, None] - np.arange(1, max(2, 1 + int((columns - first).max())))
        inside = np.maximum(begin, 0)
        cost = total[:, None] - total[inside] + np.maximum(cut_cost[:, None], cut_cost[inside])
        return _Band(inside, np.where((begin >= 0) & (cost <= limit), cost, np.inf))

    return at, _Stages(total, float(total[-1] + cut_cost.max()), within)


def _candidates(crossing: np.ndarray, parts: int) -> np.ndarray:
    """Where a sequence may be cut into `parts`: all positions, or in a long sequence the cheapest crossings. Of those
    that cost the same, as between any two layers, there are as many everywhere."""
    import numpy as np

    most = max(_CANDIDATES, parts)
    if len(crossing) <= most:
        return np.arange(len(crossing))
    dearest = np.partition(crossing, most - 1)[most - 1]
    same = np.isclose(crossing, dearest, rtol=_SLACK, atol=0.0)
    cheaper, alike = np.flatnonzero((crossing < dearest) & ~same), np.flatnonzero(same)
    spread = np.linspace(0, len(alike) - 1, most - len(cheaper)).round().astype(int)
    return np.sort(np.concatenate([cheaper, alike[spread]]))


def _check_pieces(count: int, parts: int) -> None:
    if count < parts:
        raise InfeasibleError(
            f"{count} cuttable pieces cannot make {parts} stages", f"use at most --pp {max(count, 1)}"
        )


def _best_chain(stages: _Stages, parts: int) -> list[int]:
    """The sets at the borders of the best chain of `parts` stages: it minimises the maximum stage cost; among such
    chains, the sum of squares."""
    import numpy as np

    worst, (begin, cost) = _worst(stages, parts)
    square = np.where(cost <= worst * (1 + 1e-9), cost**2, np.inf)
    best = [np.full(len(cost), np.inf)]
    best[0][0] = 0.0
    for ends in _ends(stages.total, parts, worst):
        best.append(np.full(len(cost), np.inf))
        best[-1][ends] = (best[-2][begin[ends]] + square[ends]).min(axis=1)
    chain: list[int] = []
    k = len(cost) - 1
    for before in best[-2:0:-1]:
        left = before[begin[k]] + square[k]
        k = int(begin[k][len(left) - 1 - np.argmin(left[::-1])])
        chain.append(k)
    return chain[::-1]


def _worst(stages: _Stages, parts: int) -> tuple[float, _Band]:
    """The least maximum stage cost of a chain of `parts` from the first set to the last, and a band in which it is.

    Costly stages are left out at first: what is found without them is the least, if anything is.
    """
    import numpy as np

    limit = 1.1 * float(stages.total[-1]) / parts
    while True:
        begin, cost = band = stages.within(min(limit, stages.most))
        worst = np.full(len(cost), np.inf)
        worst[0] = 0.0
        for ends in _ends(stages.total, parts, limit):
            before, worst = worst, np.full(len(cost), np.inf)
            worst[ends] = np.maximum(before[begin[ends]], cost[ends]).min(axis=1)
        if worst[-1] < np.inf or limit >= stages.most:
            return float(worst[-1]), band
        limit = 1.2 * limit or stages.most


def _ends(total: np.ndarray, parts: int, limit: float) -> Iterator[np.ndarray]:
    """For each stage in turn the sets at which it may end, where none costs more than `limit`: those before it can do
    what is in the set, and those after it the rest."""
    import numpy as np

    room = float(total[-1]) * _SLACK
    for k in range(1, parts + 1):
        yield np.flatnonzero((total <= k * limit + room) & (total >= total[-1] - (parts - k) * limit - room))


def _closed_sets(needs: Sequence[int], most: int) -> list[int] | None:
    """All closed sets of ops (bit i: op i), smallest first; None if there are more than `most`.

    Ops are in topological order, so a closed set without its last op is closed: each is found once, from that one.
    """
    users: list[list[int]] = [[] for _ in needs]
    for j, need in enumerate(needs):
        while need:
            i = need.bit_length() - 1
            users[i].append(j)
            need ^= 1 << i
    found = [0]
    row = [(0, [j for j, need in enumerate(needs) if not need])]  # sets, and the ops that may be added to them
    while row:
        grown: list[tuple[int, list[int]]] = []
        for s, ready in row:
            for at, i in enumerate(ready):
                t = s | 1 << i
                grown.append((t, sorted(ready[at + 1 :] + [j for j in users[i] if not needs[j] & ~t])))
        found += [s for s, _ in grown]
        if len(found) > most:
            return None
        row = grown
    return sorted(found, key=lambda s: (s.bit_count(), s))


def _members(sets: Sequence[int], count: int) -> np.ndarray:
    """A row a set, a column an op: 1 where the op is in the set."""
    import numpy as np

    width = (count + 7) // 8
    raw = b"".join([s.to_bytes(width, "little") for s in sets])
    rows = np.frombuffer(raw, np.uint8).reshape(len(sets), width)
    return np.unpackbits(rows, axis=1, count=count, bitorder="little")


def _loads(sets: Sequence[int], costs: Sequence[float]) -> np.ndarray:
    """The cost of each closed set, given smallest first: that of the set without its last op, plus that op's."""
    import numpy as np

    load = {0: 0.0}
    for s in sets:
        if s:
            last = s.bit_length() - 1
            load[s] = load[s ^ 1 << last] + costs[last]
    return np.array([load[s] for s in sets])


def _borders(forward: Sequence[Op], member: np.ndarray) -> np.ndarray:
    """The bytes that cross the border of each set (a row of 0 and 1), and in how many messages: values made in it and
    used outside, and their gradients back."""
    import numpy as np

    users: dict[Value, set[int]] = {}
    for i, op in enumerate(forward):
        for v in op.inputs:
            users.setdefault(v, set()).add(i)
    made = [(i, v) for i, op in enumerate(forward) for v in op.outputs if v in users]
    used = np.zeros((len(forward), len(made)), np.float32)
    used[[i for _, v in made for i in users[v]], [k for k, (_, v) in enumerate(made) for _ in users[v]]] = 1
    here = member.astype(np.float32) @ used  # how many of a value's users are in a set
    crossing = (member[:, [i for i, _ in made]] > 0) & (here < used.sum(axis=0))
    sent = np.array([_sent(v) for _, v in made], float).reshape(-1, 2)
    return crossing @ sent


def _sent(v: Value) -> tuple[int, int]:
    """The bytes of a value sent to another stage, and of its gradient sent back, in two messages."""
    return 2 * math.prod(shape_of(v)) * tensor(v).dtype.size, 2


def _crossing(forward: Sequence[Op]) -> np.ndarray:
    """What crosses before each op, as `_borders` has it: values made before it and used from it on, and their
    gradients."""
    import numpy as np

    made = {v: i for i, op in enumerate(forward) for v in op.outputs}
    last = dict(made)
    for i, op in enumerate(forward):  # in topological order: the last use is the one found last
        for v in op.inputs:
            if v in last:
                last[v] = i
    change = np.zeros((len(forward) + 1, 2))
    for v, i in made.items():
        sent = _sent(v)
        change[i + 1] += sent
        change[last[v] + 1] -= sent
    return change.cumsum(axis=0)
