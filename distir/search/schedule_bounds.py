"""Lower bounds of a plan from the work of its stages, followed in the order of its schedule.

A rank runs its cells one after another, on two streams: compute, and what replicas gather and reduce. What a cell does
to these, and to what it sends, is a max-plus map of when they are free and of when what it receives is there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from distir.transforms.pipeline.phases import FORWARD
from distir.transforms.pipeline.schedule import make_table

_MOST_CELLS = 400_000
"""The longest schedule that is followed: others keep their bound of time."""


class Reach(NamedTuple):
    """Seconds to an event: from when compute may begin, from when the stream of the replicas is free, and from when
    what a pass receives is there; -inf from what it does not wait for."""

    compute: float
    replicas: float
    received: float


class CellWork(NamedTuple):
    """A stage's pass over a microbatch: until its compute has ended, until the stream of the replicas is free again,
    and until the value that it sends, of so many bytes, is made."""

    compute: Reach
    replicas: Reach
    made: Reach
    sent: float


class StageWork(NamedTuple):
    """A stage's passes: `forward` over the first microbatch, with what is gathered once a step, and over others;
    `backward` over the first, over others, and over the last, with what is reduced once a step."""

    forward: tuple[CellWork, CellWork]
    backward: tuple[CellWork, CellWork, CellWork]


class StageMemory(NamedTuple):
    """Bytes of a stage: `held` from begin to end of a step, `made` of weights until its last backward pass, `saved` of
    a microbatch, `sums` over microbatches."""

    held: float
    made: float
    saved: float
    sums: float


_PASSES, _BACKWARD = 5, 2
"""How many passes a `StageWork` has, and the first that is a backward one."""


class Kept(NamedTuple):
    """What ranks may have at the begin of a backward pass, a row each: the rank; and of each of its stages, how many
    microbatches are saved, whether there are sums over microbatches, and whether these are complete."""

    rank: np.ndarray
    saved: np.ndarray
    sums: np.ndarray
    complete: np.ndarray


class Schedule(NamedTuple):
    """The cells of a schedule, in an order in which every cell comes after those that it depends on: of each the rank
    that runs it, the number of its pass (of each stage in turn, as `StageWork` has them), and the number of the cell
    from which it receives a value; -1 for none. And what ranks have at the begin of backward passes."""

    ranks: int
    rank: array[int]
    work: array[int]
    source: array[int]
    kept: Kept


@lru_cache(256)
def followed(schedule: str, ranks: int, microbatches: int, chunks: int) -> Schedule | None:
    """A schedule; None for one that is too long to follow."""
    if 2 * ranks * chunks * microbatches > _MOST_CELLS:
        return None
    table = make_table(schedule, ranks, microbatches, chunks)
    parts = ranks * chunks
    number: dict[tuple[str, int, int], int] = {}
    rank, works, sources = [array("i") for _ in range(3)]
    now = [[0] * (3 * chunks) for _ in range(ranks)]  # saved by stage, then sums, then which of these are complete
    kept: dict[tuple[int, ...], None] = {}
    position = [0] * ranks
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(table):
            k = position[r]
            while k < len(row):
                s, word, i = row[k]
                forward = word == FORWARD
                before = s - 1 if forward else s + 1
                source = number.get((word, before, i), -1)
                if source < 0 and 0 <= before < parts:
                    break
                number[word, s, i] = len(number)
                which = int(i > 0) if forward else _BACKWARD + (2 if i == microbatches - 1 else int(i > 0))
                rank.append(r)
                works.append(_PASSES * s + which)
                sources.append(source)
                mine, j = now[r], s // ranks
                if not forward:
                    kept[r, *mine] = None
                    mine[chunks + j] = 1
                    mine[2 * chunks + j] = int(i == microbatches - 1)
                mine[j] += 1 if forward else -1
                k += 1
            moved = moved or k > position[r]
            position[r] = k
    first, *columns = np.split(np.array(list(kept)), [1, chunks + 1, 2 * chunks + 1], axis=1)
    return Schedule(ranks, rank, works, sources, Kept(first[:, 0], *columns))


def rank_memory(schedule: Schedule, stages: Sequence[StageMemory], split: bool = False) -> float:
    """The most bytes that a rank has at the begin of a backward pass. `split`: of sums that are complete replicas have
    their shares alone, which do not count."""
    held, made, saved, sums = np.array(stages).T.reshape(4, -1, schedule.ranks)
    rank, in_flight, summed, complete = schedule.kept
    summed = summed - complete if split else summed
    rows = (in_flight, saved), (summed, sums), (1 - complete, made)
    used = held.sum(axis=0)[rank] + sum([(count * each.T[rank]).sum(axis=1) for count, each in rows])
    return float(used.max())


def step_seconds(schedule: Schedule, works: Sequence[StageWork], hop: Callable[[float, int, int], float]) -> float:
    """When the last rank is ready; `hop` gives the seconds that bytes take from one rank to another."""
    parts, p = len(works), schedule.ranks
    cells: list[tuple[float, ...]] = []
    for s, work in enumerate(works):
        for passes, step in ((work.forward, 1), (work.backward, -1)):
            sent = hop(passes[0].sent, s % p, (s + step) % p) if 0 <= s + step < parts else 0.0
            cells += [(*cell.compute, *cell.replicas, *[x + sent for x in cell.made]) for cell in passes]
    compute, replicas = [0.0] * p, [0.0] * p
    arrived: list[float] = []
    """When what each cell sends is there."""
    for r, work, source in zip(schedule.rank, schedule.work, schedule.source, strict=True):
        a, b, c = compute[r], replicas[r], arrived[source] if source >= 0 else -math.inf
        cc, cr, ca, rc, rr, ra, mc, mr, ma = cells[work]
        compute[r] = max(a + cc, b + cr, c + ca)
        replicas[r] = max(a + rc, b + rr, c + ra)
        arrived.append(max(a + mc, b + mr, c + ma))
    return max(*compute, *replicas)
