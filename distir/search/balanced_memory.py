"""Lower bounds on the memory of pipeline stages from how they are balanced, before a plan is placed.

Stages are cut so that the most that one costs is least (`partition`). With T an upper bound on that, and `parts`
stages, the first q of them cost at least what all do less (parts - q) T, and at most q T: so they have at least, or at
most, so much of the weights and of what is saved. What is known of costs is that of the placed program without
replicas; the least that these add is nothing, the most what follows from the bytes of the gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from distir.api.stage_cost import OpSeconds
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.collective_cost import collective
from distir.executor.cost_model.seconds import wire_of
from distir.ir.function import Function, Value
from distir.ir.spec import lookup
from distir.ir.type import Tensor
from distir.search.bounds import ROUNDING, groups_along, scaled
from distir.search.memory_bounds import in_flight
from distir.search.schedule_bounds import followed
from distir.search.segments import made_once
from distir.search.space import Candidate
from distir.transforms.passes import stage_meshes
from distir.transforms.pipeline.copies import copies
from distir.transforms.pipeline.partition import Ways, balanced, choices, maximum
from distir.transforms.pipeline.phases import BACKWARD, UPDATE, PhaseRules, ends_time, phases
from distir.transforms.pipeline.stages import ToPrice, stage_ways, to_price

_SLACK = 1 + 1e-9
"""For sums in another order."""
_REDUCED = {0: (0.0, 1.0), 1: (0.0, 2.0), 2: (1.0, 1.0), 3: (2.0, 1.0)}
"""By stage of ZeRO how often an all-reduce of the gradients takes at least as long as all that replicas send: in each
microbatch, and once a step."""


class Stageable(NamedTuple):
    """The forward ops of a program that is placed without replicas, as they can be cut into stages.

    Bytes on one device by forward op, in the order of `ways`: of a microbatch `saved` until the backward pass, of the
    parameters and their state `held`, of what is `made` once a step and kept, and of `sums` over microbatches.
    """

    ways: Ways
    price: ToPrice
    saved: np.ndarray
    held: np.ndarray
    made: np.ndarray
    sums: np.ndarray


def stageable(placed: Function) -> Stageable:
    """What is known of a program's stages before it is cut."""
    rules = PhaseRules(BACKWARD, False)
    ways, phase = stage_ways(placed, rules), phases(placed, rules)
    place = {op: i for i, op in enumerate(ways.ops)}
    maker = {v: op for op in placed.ops for v in op.outputs}
    touched: dict[Value, int] = {}
    for op, i in place.items():
        for v in (*op.inputs, *op.outputs):
            touched[v] = max(i, touched.get(v, 0))
    first: dict[Value, int] = {}
    for op, i in place.items():
        for v in op.inputs:
            _, source = made_once(v, maker, phase) if maker.get(v) not in place else (None, None)
            if source is not None and source.kind == "parameter":
                first[source] = min(i, first.get(source, i))
    copied = copies(placed)
    saved, held, made, sums = np.zeros((4, len(place)))
    kept: dict[Value, int] = {}
    once: dict[Value, int] = {}
    """What is used by backward ops, and the last of their forward ops."""
    for op in placed.ops:
        if phase[op] != BACKWARD:
            continue
        again = bool(op.outputs) and op.outputs[0] in copied  # not run where only other stages use what it makes
        for v in op.inputs:
            at = place.get(op.of, -1) if op.of is not None else -1
            if not again and (root := made_once(v, maker, phase)[0]) is not None:
                once[root] = max(at if at >= 0 else len(place) - 1, once.get(root, -1))
            while (by := maker.get(v)) in place and by.spec.alias and by.inputs:  # type: ignore[union-attr]
                v = by.inputs[0]  # type: ignore[union-attr]
            if maker.get(v) in place and isinstance(v.type, Tensor) and v.type.moves:
                kept[v] = max(at if at >= 0 else touched[v], kept.get(v, -1))
    for found, into in ((kept, saved), (once, made)):
        for v, at in found.items():
            into[at] += v.type.bytes  # type: ignore[union-attr]
    counted: set[Value] = set()
    for v, at in first.items():
        held[at] += v.type.bytes
    for op in placed.ops:
        if phase[op] == UPDATE and (at := max([first[v] for v in op.inputs if v in first], default=-1)) >= 0:
            state = {v for v in op.inputs if v.kind == "state"} - counted
            held[at] += sum([v.type.bytes for v in state])
            counted |= state
        part = maker.get(op.inputs[0]) if op.spec.comm is not None and ends_time(op) else None
        if part is not None and phase[part] == BACKWARD and part.of in place:
            sums[place[part.of]] += op.outputs[0].type.bytes  # type: ignore[index, union-attr]
    return Stageable(ways, to_price(placed, rules), saved, held, made, sums)


def op_seconds(c: Candidate, batch: int, given: Stageable, cost: CostModel) -> np.ndarray:
    """The seconds of each kind of op at a candidate's size of microbatch, on the groups of devices that it has."""
    plan = c.plan(batch)
    mesh = stage_meshes(plan, cost.topology.devices[: plan.size]).meshes[0]
    seconds = OpSeconds(cost, mesh, lambda t: scaled(t, c.microbatch))
    return np.array([seconds(op) for op in given.price.kinds])


class FirstStages(NamedTuple):
    """By number of stages what the first of them hold, and save of a microbatch, at least and at most, and what sums
    they have at least: bytes on a device."""

    low_held: Sequence[float]
    high_held: Sequence[float]
    low_saved: Sequence[float]
    high_saved: Sequence[float]
    low_sums: Sequence[float]


def balance(given: Stageable, each: np.ndarray, sent: float, parts: int) -> list[int]:
    """The stages of ops, balanced without what replicas reduce; `each` are `op_seconds`, `sent` is the cost of a byte
    that is sent. Raises InfeasibleError if there are fewer ops than stages."""
    return balanced(choices(given.ways, _alone(given, each).tolist(), sent), parts)


def first_stages(
    c: Candidate, batch: int, given: Stageable, each: np.ndarray, sent: float, stages: Sequence[int], cost: CostModel
) -> FirstStages:
    """What the first stages of a candidate have, as they are balanced: no stage costs more than some of `stages`, which
    are others that it could have. The candidate has no further axes; `each` and `sent` are as `balance` takes them."""
    parts = c.pp * c.chunks
    least, most = _costs(c, batch, given, each, cost)
    worst = maximum(choices(given.ways, most.tolist(), sent), stages) * _SLACK
    reach = _by_set(given.ways, least)
    turn = np.argsort(reach, kind="stable")
    q = np.arange(parts + 1)
    at_least = np.searchsorted(reach[turn], (reach[-1] - (parts - q) * worst) / _SLACK)
    at_most = np.searchsorted(reach[turn], q * worst * _SLACK, "right") - 1
    split = c.dp if c.zero else 1
    held = _by_set(given.ways, given.held / split + (0.0 if c.zero == 3 else given.made))[turn]
    saved = _by_set(given.ways, given.saved * c.microbatch)[turn]
    sums = _by_set(given.ways, given.sums / (c.dp if c.zero > 1 else 1))[turn]
    low_held, low_saved, low_sums = (
        np.minimum.accumulate(x[::-1])[::-1][at_least].tolist() for x in (held, saved, sums)
    )
    high_held, high_saved = (np.maximum.accumulate(x)[at_most].tolist() for x in (held, saved))
    return FirstStages(low_held, high_held, low_saved, high_saved, low_sums)


def balanced_memory(c: Candidate, batch: int, first: FirstStages) -> float:
    """Bytes that the rank of a candidate that needs most has at least, given its `first_stages`; 0 where its schedule
    is too long to follow."""
    m = c.microbatches(batch)
    low_held, high_held, low_saved, high_saved, low_sums = first
    if c.chunks > 1:
        rows = _chunks_in_flight(c.schedule, c.pp, m, c.chunks)
        if not rows:
            return 0.0
        found = _of_stages([row[j] for j in range(c.chunks) for row in rows], low_held, low_saved) / c.pp
        for k in range(1, c.pp):
            used = 0.0
            for j in range(c.chunks):
                q, n = j * c.pp, min([row[j] for row in rows[:k]])
                used += max(0.0, low_held[q + k] - high_held[q]) + n * max(0.0, low_saved[q + k] - high_saved[q])
            found = max(found, used / k)
        return found * ROUNDING
    flights = in_flight(c, m)
    found = max([_of_stages(flights[:k], low_held, low_saved) / k for k in range(1, c.pp + 1)])
    if m > 1:  # at the second backward pass of each rank there are sums, too
        again = [max(1, min(n, m - 1)) for n in flights]
        both = np.add(low_held, low_sums).tolist()
        found = max(found, *[_of_stages(again[:k], both, low_saved) / k for k in range(1, c.pp + 1)])
    return found * ROUNDING


def _of_stages(flights: Sequence[int], held: Sequence[float], saved: Sequence[float]) -> float:
    """The least that the first stages have together, by the microbatches that each has in flight, given what the first
    1, 2, ... stages hold, and save of a microbatch, at least.

    Where later stages have more in flight than earlier ones, they are taken to have as many as these: then all is least
    if as much as possible is done by the last.
    """
    fewest = list(itertools.accumulate(flights, min))
    steps = zip(fewest, [*fewest[1:], 0], saved[1:], strict=False)
    return held[len(fewest)] + sum([(n - later) * x for n, later, x in steps])


@lru_cache(1024)
def _chunks_in_flight(schedule: str, pp: int, m: int, chunks: int) -> list[list[int]]:
    """By rank how many microbatches it has in flight of each of its chunks, when it has most; none of a schedule that
    is too long to follow."""
    known = followed(schedule, pp, m, chunks)
    if known is None:
        return []
    now, most = [[0] * chunks for _ in range(pp)], [[0] * chunks for _ in range(pp)]
    for r, s, forward, _ in known.cells():
        now[r][s // pp] += 1 if forward else -1
        if sum(now[r]) > sum(most[r]):
            most[r] = list(now[r])
    return most


def _by_set(ways: Ways, x: np.ndarray) -> np.ndarray:
    """The sums over each set of ops that may be the first stages."""
    if ways.member is not None:
        return ways.member @ x
    return np.concatenate([[0.0], np.cumsum(x)])


def _costs(
    c: Candidate, batch: int, given: Stageable, each: np.ndarray, cost: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """By forward op the least and the most that it costs its stage."""
    m = c.microbatches(batch)
    _, own, kind, owner, update = given.price
    alone = _alone(given, each)
    updates = np.bincount(owner[update], each[kind[update]], len(own)) / m
    often, once = _REDUCED[c.zero]
    reduced = _all_reduce(c, given.sums, cost) * (often + once / m)
    return alone + (0.0 if c.zero else updates), alone + updates + reduced


def _alone(given: Stageable, each: np.ndarray) -> np.ndarray:
    """By forward op what it costs its stage in a microbatch, with its backward ops."""
    _, own, kind, owner, update = given.price
    return each[own] + np.bincount(owner[~update], each[kind[~update]], len(own))


def _all_reduce(c: Candidate, sizes: np.ndarray, cost: CostModel) -> np.ndarray:
    """The most seconds of an all-reduce of each of these bytes among the replicas."""
    if c.dp == 1:
        return np.zeros(len(sizes))
    wire, groups = wire_of(lookup("MPIAllreduce")), groups_along(c, cost, "dp")
    slower = 1.0 if cost.runtime is None else 1.0 + cost.runtime.skew
    launch = cost.topology.spec(cost.topology.devices[0]).kernel_launch_overhead
    found, place = np.unique(sizes, return_inverse=True)
    most = [max([collective(wire, x, group) for group in groups]) + launch if x else 0.0 for x in found.tolist()]
    return slower * np.array(most)[place]
