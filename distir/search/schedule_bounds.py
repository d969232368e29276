"""Lower bounds of a plan from the work of its stages, followed in the order of its schedule.

A rank runs its cells one after another, on two streams: compute, and what replicas gather and reduce. What a cell does
to these, and to what it sends, is a max-plus map of when they are free and of when what it receives is there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

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
    """Bytes of a stage: `held` from begin to end of a step, `saved` of a microbatch, `sums` over microbatches."""

    held: float
    saved: float
    sums: float


_PASSES, _BACKWARD = 5, 2
"""How many passes a `StageWork` has, and the first that is a backward one."""


class Schedule(NamedTuple):
    """The cells of a schedule, in an order in which every cell comes after those that it depends on: of each the rank
    that runs it, the number of its pass (of each stage in turn, as `StageWork` has them), and the number of the cell
    from which it receives a value; -1 for none."""

    ranks: int
    rank: array[int]
    work: array[int]
    source: array[int]

    def cells(self) -> Iterator[tuple[int, int, bool, bool]]:
        """Of each the rank, the stage, whether it is a forward pass, and whether it is over the first microbatch."""
        for r, work in zip(self.rank, self.work, strict=True):
            s, which = divmod(work, _PASSES)
            yield r, s, which < _BACKWARD, which in (0, _BACKWARD)


@lru_cache(64)
def followed(schedule: str, ranks: int, microbatches: int, chunks: int) -> Schedule | None:
    """A schedule; None for one that is too long to follow."""
    if 2 * ranks * chunks * microbatches > _MOST_CELLS:
        return None
    table = make_table(schedule, ranks, microbatches, chunks)
    parts = ranks * chunks
    number: dict[tuple[str, int, int], int] = {}
    found = Schedule(ranks, *[array("i") for _ in range(3)])
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
                found.rank.append(r)
                found.work.append(_PASSES * s + which)
                found.source.append(source)
                k += 1
            moved = moved or k > position[r]
            position[r] = k
    return found


def rank_memory(schedule: Schedule, stages: Sequence[StageMemory], m: int) -> float:
    """The most bytes that a rank has at the begin of a backward pass."""
    used = [sum([x.held for x in stages[r :: schedule.ranks]]) for r in range(schedule.ranks)]
    most = max(used)
    for r, s, forward, first in schedule.cells():
        if forward:
            used[r] += stages[s].saved
            continue
        if used[r] > most:
            most = used[r]
        used[r] -= stages[s].saved
        if m > 1 and first:
            used[r] += stages[s].sums
    return most


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
