"""Cutting a placed program into pipeline stages: a balanced cut of the forward pass, all else following it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from distir.ir.errors import InfeasibleError
from distir.ir.function import Function, Op, Value
from distir.ops.rules import shape_of, tensor
from distir.transforms.canonical import canonical_order
from distir.transforms.lift import lift_sums
from distir.transforms.phases import BACKWARD, FORWARD, FREE, PROLOGUE, UPDATE, ends_time, phases
from distir.transforms.roles import WEIGHTS

if TYPE_CHECKING:
    import numpy as np

FLOP_PER_BYTE = 100.0
"""Of the plain default cost: accelerators do about this many FLOPs in the time they move a byte of memory."""
LINK_PER_MEMORY = 30.0
"""And a link between stages is slower than memory by about this factor."""
_CANDIDATES = 400


class StageCost(NamedTuple):
    """What stages are balanced by: the cost of an op on one device, and of a byte sent to the next stage.

    Ops of one spec, attributes and types cost the same.
    """

    op: Callable[[Op], float]
    sent: float


def plain_cost(op: Op) -> float:
    """FLOPs plus bytes moved, in FLOPs, of the whole op: so that the cut does not depend on how it is spread."""
    moved = sum(math.prod(shape_of(v)) * tensor(v).dtype.size for v in (*op.inputs, *op.outputs))
    flops = op.spec.flops(op.attributes, list(map(shape_of, op.inputs)), list(map(shape_of, op.outputs)))
    return flops + (0.0 if op.spec.alias else FLOP_PER_BYTE * moved)


PLAIN = StageCost(plain_cost, FLOP_PER_BYTE * LINK_PER_MEMORY)


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
        raise InfeasibleError(f"{count} cuttable pieces cannot make {parts} stages", f"use at most --pp {count}")


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


def _balanced(forward: Sequence[Op], costs: Sequence[float], byte: float, parts: int) -> dict[Op, int]:
    """The stages of ops in topological order: the best of all ways to cut them, or, if these are very many, of the
    ways to cut them in that order."""
    import numpy as np

    _check_pieces(len(forward), parts)
    sets = _closed_sets(forward, _CANDIDATES)
    if sets is None:
        cuts = balanced_cut(costs, _crossing(forward, byte), parts)
        return {op: bisect_right(cuts, i) for i, op in enumerate(forward)}
    holds = _members(sets, len(forward))
    inside = holds.astype(np.float32)
    alike = inside @ inside.T  # how many ops two sets share
    size = alike.diagonal()
    within = (alike == size[:, None]) & (size[:, None] < size[None, :])
    chain = _best_chain(_loads(sets, costs), _borders(forward, inside, byte), within, parts)
    return {op: parts - 1 - int(n) for op, n in zip(forward, holds[chain].sum(axis=0), strict=True)}


def _closed_sets(forward: Sequence[Op], most: int) -> list[int] | None:
    """All sets of ops (bit i: op i) that hold what their ops use, smallest first; None if more than `most`.

    Ops are in topological order, so without its last op a closed set is closed: each is found once, from that one.
    """
    place = {v: i for i, op in enumerate(forward) for v in op.outputs}
    needs = [sum(1 << i for i in {place[v] for v in op.inputs if v in place}) for op in forward]
    users: list[list[int]] = [[] for _ in forward]
    for j, op in enumerate(forward):
        for i in {place[v] for v in op.inputs if v in place}:
            users[i].append(j)
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


def _borders(forward: Sequence[Op], inside: np.ndarray, byte: float) -> np.ndarray:
    """Per set, a row of 0 and 1, the cost of sending what is made in it and used outside, and its gradient back."""
    import numpy as np

    users: dict[Value, set[int]] = {}
    for i, op in enumerate(forward):
        for v in op.inputs:
            users.setdefault(v, set()).add(i)
    made = [(i, v) for i, op in enumerate(forward) for v in op.outputs if v in users]
    used = np.zeros((len(forward), len(made)), np.float32)
    for k, (_, v) in enumerate(made):
        used[list(users[v]), k] = 1
    crossing = (inside[:, [i for i, _ in made]] > 0) & (inside @ used < used.sum(axis=0))
    sent = np.array([_sent(v, byte) for _, v in made])
    return (crossing.T * sent[:, None]).sum(axis=0)


def _sent(v: Value, byte: float) -> float:
    """What it costs to send a value to another stage, and its gradient back."""
    return 2 * byte * math.prod(shape_of(v)) * tensor(v).dtype.size


def cut_stages(
    function: Function, parts: int, microbatches: int, cost: StageCost = PLAIN, turn: str = BACKWARD
) -> tuple[Function, dict[Op, int]]:
    """The stage of every op that has a phase. A forward op's backward ops, weights and updates go with it.

    Sums over time of values from several stages are lifted (see `lift`), so the function is returned too.
    Raises InfeasibleError if there are fewer forward ops than stages.
    """
    phase = phases(function, turn)
    if parts == 1:
        return function, {op: 0 for op in function.ops if phase[op] != FREE}
    forward = canonical_order(function, [op for op in function.ops if phase[op] == FORWARD])
    price = _priced(cost.op)
    follow = _following_cost(function, phase, forward, microbatches, price)
    costs = [price(op) + follow.get(op, 0.0) for op in forward]
    stage = _balanced(forward, costs, cost.sent, parts)
    _backward_stages(function, phase, stage, parts)
    function, stage = lift_sums(function, stage)
    _once_stages(function, phases(function, turn), stage)
    return function, stage


def _priced(cost: Callable[[Op], float]) -> Callable[[Op], float]:
    """The same, asked once for ops of one spec, attributes and types."""
    known: dict[tuple[object, ...], float] = {}

    def price(op: Op) -> float:
        key = op.spec, op.attributes, tuple([v.type for v in op.inputs])
        found = known.get(key)
        if found is None:
            found = known[key] = cost(op)
        return found

    return price


def _following_cost(
    function: Function,
    phase: Mapping[Op, str],
    forward: Sequence[Op],
    microbatches: int,
    cost: Callable[[Op], float],
) -> dict[Op, float]:
    """Per forward op the cost of its backward ops, and of the updates of weights it is first to use."""
    follow: dict[Op, float] = {}
    user = _first_users(function, phase, forward)
    touched: dict[Value, list[Op]] = {}
    for op in forward:
        for v in dict.fromkeys((*op.inputs, *op.outputs)):
            touched.setdefault(v, []).append(op)
    for op in function.ops:
        share = 1.0
        if phase[op] == UPDATE:
            owner = next((user[v] for v in op.inputs if v in user), None)
            share = 1.0 / microbatches
        elif phase[op] == BACKWARD:
            owner = op.of or _likely_forward(op, touched)
        else:
            continue
        if owner is not None and phase.get(owner) == FORWARD:
            follow[owner] = follow.get(owner, 0.0) + cost(op) * share
    return follow


def _likely_forward(op: Op, touched: Mapping[Value, Sequence[Op]]) -> Op | None:
    """Of a backward op without `of`: the last forward op of those that make or use most of what it saved."""
    count = Counter(f for v in op.inputs for f in touched.get(v, ()))
    most = max(count.values(), default=0)
    return next((f for f in reversed(count) if count[f] == most), None)


def _first_users(function: Function, phase: Mapping[Op, str], forward: Sequence[Op]) -> dict[Value, Op]:
    """Per input the first of the forward ops that uses it, through free ops."""
    root = {v: v for v in function.inputs}
    for op in function.ops:
        if phase[op] == FREE:
            for v in op.inputs:
                if v in root:
                    root.update(dict.fromkeys(op.outputs, root[v]))
    user: dict[Value, Op] = {}
    for op in forward:
        for v in op.inputs:
            if v in root:
                user.setdefault(root[v], op)
    return user


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


def _backward_stages(function: Function, phase: Mapping[Op, str], stage: dict[Op, int], parts: int) -> None:
    """A backward op goes to its forward op's stage; without one, to the latest where all it saved is at hand.

    Never later than the stage a gradient comes from: gradients flow backward only.
    """
    producer = function.producers()
    available: dict[Value, int] = {}  # bit s: on stage s
    for op in function.ops:
        if phase[op] == FORWARD:
            here = 1 << stage[op]
            for v in (*op.inputs, *op.outputs):
                available[v] = available.get(v, 0) | here
    for op in function.ops:
        if phase[op] != BACKWARD:
            continue
        made = [producer[v] for v in op.inputs if v in producer]
        top = min([stage[p] for p in made if phase[p] == BACKWARD], default=parts - 1)
        if op.of is not None and op.of in stage:
            stage[op] = min(stage[op.of], top)
            continue
        saved = [available[v] for v in op.inputs if v in available]
        at_hand = (1 << top + 1) - 1
        for stages in saved:
            at_hand &= stages
        stage[op] = at_hand.bit_length() - 1 if at_hand else min([top, *[x.bit_length() - 1 for x in saved]])


def _once_stages(function: Function, phase: Mapping[Op, str], stage: dict[Op, int]) -> None:
    """Prologue ops go to their first user's stage, updates to their weight's home, sums to where they accumulate."""
    producer = function.producers()
    users = _users(function)
    updates = [op for op in function.ops if phase[op] == UPDATE]
    home = homes(function, phase, stage)
    for op in updates:
        owned = [home[v] for v in op.inputs if v in home and v.kind in WEIGHTS]
        if ends_time(op):
            stage[op] = stage[producer[op.inputs[0]]]
        elif owned:
            stage[op] = max(owned)
    for op in updates:
        if op not in stage:
            above = {stage[producer[v]] for v in op.inputs if v in producer and producer[v] in stage}
            below = [stage[u] for v in op.outputs for u in users.get(v, ()) if u in stage]
            stage[op] = above.pop() if len(above) == 1 or not below else min(below)
    for op in reversed(function.ops):
        if phase[op] == PROLOGUE:
            below = [s for v in op.outputs for s in _user_stages(v, users, phase, stage)]
            stage[op] = min(below, default=0)


def _users(function: Function) -> dict[Value, list[Op]]:
    users: dict[Value, list[Op]] = {}
    for op in function.ops:
        for v in op.inputs:
            users.setdefault(v, []).append(op)
    return users


def _user_stages(
    v: Value, users: Mapping[Value, Sequence[Op]], phase: Mapping[Op, str], stage: Mapping[Op, int]
) -> list[int]:
    """The stages of the ops that use a value, through free ops."""
    found: list[int] = []
    for op in users.get(v, ()):
        if phase[op] == FREE:
            for w in op.outputs:
                found += _user_stages(w, users, phase, stage)
        elif op in stage:
            found.append(stage[op])
    return found


def homes(function: Function, phase: Mapping[Op, str], stage: Mapping[Op, int]) -> dict[Value, int]:
    """The stage each input lives on: the first that uses it in the forward pass, else in any; state with its weight."""
    roots: dict[Value, tuple[Value, ...]] = {v: (v,) for v in function.inputs}
    found: dict[Value, tuple[int, int]] = {}
    rank = {FORWARD: 0, BACKWARD: 1, PROLOGUE: 2, UPDATE: 3}
    for op in function.ops:
        if phase[op] == FREE:
            above = tuple(dict.fromkeys(r for v in op.inputs for r in roots.get(v, ())))
            for w in op.outputs:
                roots[w] = above
        elif op in stage:
            for v in op.inputs:
                for r in roots.get(v, ()):
                    here = rank[phase[op]], stage[op]
                    found[r] = min(found.get(r, here), here)
    return {v: at for v, (_, at) in found.items()}
