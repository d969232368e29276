"""Lower bounds of a plan from the work of its stages, followed in the order of its schedule.

A rank runs its cells one after another, on two streams: compute, and what replicas gather and reduce. What a cell does
to these, and to what it sends, is a max-plus map of when they are free and of when what it receives is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


Row = Sequence[tuple[str, int, int]]
"""What a rank runs: pass, stage, microbatch."""


class Turn(NamedTuple):
    """A cell of a schedule: the rank that runs it, the number of its pass (five a stage, as `StageWork` has them), and
    the number of the turn from which it receives a value; -1 for none."""

    rank: int
    work: int
    source: int


class Schedule(NamedTuple):
    """What each rank runs, and all of that in an order in which every cell comes after those that it depends on."""

    rows: Sequence[Row]
    turns: Sequence[Turn]


@lru_cache(4)  # a long one takes megabytes
def followed(schedule: str, ranks: int, microbatches: int, chunks: int) -> Schedule | None:
    """A schedule; None for one that is too long to follow."""
    if 2 * ranks * chunks * microbatches > _MOST_CELLS:
        return None
    table = make_table(schedule, ranks, microbatches, chunks)
    rows = [[(cell.phase, cell.stage, cell.microbatch) for cell in row] for row in table]
    return Schedule(rows, _turns(rows, ranks * chunks, microbatches))


def _turns(rows: Sequence[Row], parts: int, m: int) -> list[Turn]:
    number: dict[tuple[str, int, int], int] = {}
    found: list[Turn] = []
    position = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            k = position[r]
            while k < len(row):
                word, s, i = row[k]
                forward = word == FORWARD
                before = s - 1 if forward else s + 1
                source = number.get((word, before, i), -1)
                if source < 0 and 0 <= before < parts:
                    break
                number[word, s, i] = len(found)
                which = int(i > 0) if forward else 4 if i == m - 1 else 2 + int(i > 0)
                found.append(Turn(r, 5 * s + which, source))
                k += 1
            moved = moved or k > position[r]
            position[r] = k
    return found


def row_memory(row: Row, stages: Sequence[StageMemory], m: int) -> float:
    """The most bytes that a rank has at the begin of a backward pass."""
    used = sum([stages[s].held for s in {s for _, s, _ in row}])
    most = used
    for word, s, i in row:
        if word == FORWARD:
            used += stages[s].saved
            continue
        most = max(most, used)
        used -= stages[s].saved
        if i == 0 and m > 1:
            used += stages[s].sums
    return most


def step_seconds(schedule: Schedule, works: Sequence[StageWork], hop: Callable[[float, int, int], float]) -> float:
    """When the last rank is ready; `hop` gives the seconds that bytes take from one rank to another."""
    parts, p = len(works), len(schedule.rows)
    cells: list[tuple[float, ...]] = []
    for s, work in enumerate(works):
        for passes, step in ((work.forward, 1), (work.backward, -1)):
            sent = hop(passes[0].sent, s % p, (s + step) % p) if 0 <= s + step < parts else 0.0
            cells += [(*cell.compute, *cell.replicas, *[x + sent for x in cell.made]) for cell in passes]
    compute, replicas = [0.0] * p, [0.0] * p
    arrived: list[float] = []
    """When what the cell of each turn sends is there."""
    for r, work, source in schedule.turns:
        a, b, c = compute[r], replicas[r], arrived[source] if source >= 0 else -math.inf
        cc, cr, ca, rc, rr, ra, mc, mr, ma = cells[work]
        compute[r] = max(a + cc, b + cr, c + ca)
        replicas[r] = max(a + rc, b + rr, c + ra)
        arrived.append(max(a + mc, b + mr, c + ma))
    return max(*compute, *replicas)
