"""The best cut of forward ops into stages: the dearest is cheapest, what crosses their borders included."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from distir.ir.errors import InfeasibleError
from distir.ir.function import Op, Value
from distir.ops.rules import shape_of, tensor

if TYPE_CHECKING:
    import numpy as np

_CANDIDATES = 400


class Choices(NamedTuple):
    """The ways in which ops, in topological order, can be cut into stages.

    Where there are not very many, the sets that stages up to one can make up: a row of `holds` a set, a column an op;
    `total` is the cost of each, `toll` of what crosses its border, `within` says which is part of which. Else None:
    they are cut in that order, `costs` each, and `crossing` is what it costs to cut before each.
    """

    ops: Sequence[Op]
    costs: Sequence[float]
    crossing: Sequence[float]
    holds: np.ndarray | None
    total: np.ndarray | None = None
    toll: np.ndarray | None = None
    within: np.ndarray | None = None


def choices(forward: Sequence[Op], costs: Sequence[float], byte: float) -> Choices:
    """All ways to cut ops in topological order, or, if these are very many, those that keep the order."""
    place = {v: i for i, op in enumerate(forward) for v in op.outputs}
    ways = _ways(tuple([sum(1 << i for i in {place[v] for v in op.inputs if v in place}) for op in forward]))
    if ways is None:
        return Choices(forward, costs, _crossing(forward, byte), None)
    toll = _borders(forward, ways.holds, byte)
    return Choices(forward, costs, (), ways.holds, _loads(ways.sets, costs), toll, ways.within)


class _Ways(NamedTuple):
    """Closed sets of ops, smallest first; as rows of 0 and 1, a column an op; and which is part of which."""

    sets: list[int]
    holds: np.ndarray
    within: np.ndarray


@lru_cache(maxsize=32)  # it says nothing of sizes: plans of one model share it
def _ways(needs: tuple[int, ...]) -> _Ways | None:
    """The closed sets, if they are not very many, of ops that need these others (bit i: op i)."""
    import numpy as np

    sets = _closed_sets(needs, _CANDIDATES)
    if sets is None:
        return None
    holds = _members(sets, len(needs))
    inside = holds.astype(np.float32)
    alike = inside @ inside.T  # how many ops two sets share
    size = alike.diagonal()
    return _Ways(sets, holds, (alike == size[:, None]) & (size[:, None] < size[None, :]))


def balanced(given: Choices, parts: int) -> dict[Op, int]:
    """The stage of each op. Raises InfeasibleError if there are fewer ops than stages."""
    _check_pieces(len(given.ops), parts)
    _, _, _, holds, total, toll, within = given
    if holds is None or total is None or toll is None or within is None:
        cuts = balanced_cut(given.costs, given.crossing, parts)
        return {op: bisect_right(cuts, i) for i, op in enumerate(given.ops)}
    chain = _best_chain(total, toll, within, parts)
    later = (parts - 1 - holds[chain].sum(axis=0, dtype=int)).tolist()
    return dict(zip(given.ops, later, strict=True))


def balanced_cut(costs: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """Where to cut a sequence into `parts` so that the dearest part is cheapest.

    `crossing[i]` is paid by both sides; a part with two ends pays the dearer of them.
    Returns parts - 1 positions (the first index of each later part). Of a long sequence only the cheapest crossings
    are considered. Raises InfeasibleError if there are fewer elements than parts.
    """
    import numpy as np

    n = len(costs)
    _check_pieces(n, parts)
    inner = list(range(1, n))
    if len(inner) > _CANDIDATES:
        keep = max(_CANDIDATES, parts)
        inner = sorted(sorted(inner, key=lambda i: (crossing[i], i))[:keep])
    at = [0, *inner, n]
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])[at]
    toll = np.array([0.0, *[crossing[i] for i in inner], 0.0])
    return [at[k] for k in _best_chain(total, toll, np.triu(np.ones((len(at), len(at)), bool), 1), parts)]


def _check_pieces(count: int, parts: int) -> None:
    if count < parts:
        raise InfeasibleError(
            f"{count} cuttable pieces cannot make {parts} stages", f"use at most --pp {max(count, 1)}"
        )


def _best_chain(total: np.ndarray, toll: np.ndarray, within: np.ndarray, parts: int) -> list[int]:
    """Of growing sets, the first empty and the last all, parts - 1 of which each is `within` the next.

    `total[k]` is the cost of all in set k, `toll[k]` of what crosses its border; a difference costs what is in it and
    the dearer of its borders, for the links to both sides work at the same time. The dearest difference is cheapest,
    and of the chains of which that holds the one whose differences are most alike.
    """
    import numpy as np

    part = np.where(within, total[None, :] - total[:, None] + np.maximum(toll[None, :], toll[:, None]), np.inf)
    both = np.empty_like(part)
    dearest = part[0]
    for _ in range(parts - 1):
        dearest = np.maximum(dearest[:, None], part, out=both).min(axis=0)
    square = np.where(part <= dearest[-1] * (1 + 1e-9), part**2, np.inf)
    best = [square[0]]
    for _ in range(parts - 1):
        best.append(np.add(best[-1][:, None], square, out=both).min(axis=0))
    chain: list[int] = []
    k = len(total) - 1
    for before in reversed(best[:-1]):
        k = int(np.argmin(before + square[:, k]))
        chain.append(k)
    return chain[::-1]


def _closed_sets(needs: Sequence[int], most: int) -> list[int] | None:
    """All sets of ops (bit i: op i) that hold what their ops need, smallest first; None if more than `most`.

    Ops are in topological order, so without its last op a closed set is closed: each is found once, from that one.
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
    """A row a set, a column an op: 1 where the set holds it."""
    import numpy as np

    width = (count + 7) // 8
    raw = b"".join([s.to_bytes(width, "little") for s in sets])
    rows = np.frombuffer(raw, np.uint8).reshape(len(sets), width)
    return np.unpackbits(rows, axis=1, count=count, bitorder="little")


def _loads(sets: Sequence[int], costs: Sequence[float]) -> np.ndarray:
    """The cost of each closed set, smallest first: of the set without its last op, and of that op."""
    import numpy as np

    load = {0: 0.0}
    for s in sets:
        if s:
            last = s.bit_length() - 1
            load[s] = load[s ^ 1 << last] + costs[last]
    return np.array([load[s] for s in sets])


def _borders(forward: Sequence[Op], holds: np.ndarray, byte: float) -> np.ndarray:
    """Per set, a row of 0 and 1, the cost of sending what is made in it and used outside, and its gradient back."""
    import numpy as np

    users: dict[Value, set[int]] = {}
    for i, op in enumerate(forward):
        for v in op.inputs:
            users.setdefault(v, set()).add(i)
    made = [(i, v) for i, op in enumerate(forward) for v in op.outputs if v in users]
    used = np.zeros((len(forward), len(made)), np.float32)
    used[[i for _, v in made for i in users[v]], [k for k, (_, v) in enumerate(made) for _ in users[v]]] = 1
    here = holds.astype(np.float32) @ used  # how many of its users a set holds
    crossing = (holds[:, [i for i, _ in made]] > 0) & (here < used.sum(axis=0))
    sent = np.array([_sent(v, byte) for _, v in made])
    return (crossing.T * sent[:, None]).sum(axis=0)


def _sent(v: Value, byte: float) -> float:
    """What it costs to send a value to another stage, and its gradient back."""
    return 2 * byte * math.prod(shape_of(v)) * tensor(v).dtype.size


def _crossing(forward: Sequence[Op], byte: float) -> list[float]:
    """Per position the cost of sending what was made before it and is used from it on (and its gradient back)."""
    place = {op: i for i, op in enumerate(forward)}
    made = {v: i for op, i in place.items() for v in op.outputs}
    last = dict(made)
    for op, i in place.items():
        for v in op.inputs:
            if v in last:
                last[v] = max(last[v], i)
    change = [0.0] * (len(forward) + 1)
    for v, i in made.items():
        change[i + 1] += _sent(v, byte)
        change[last[v] + 1] -= _sent(v, byte)
    total, result = 0.0, []
    for x in change:
        total += x
        result.append(max(total, 0.0))
    return result
