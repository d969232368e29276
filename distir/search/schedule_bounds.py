"""Lower bounds of a plan from the work of its stages, followed in the order of its schedule.

A rank runs its cells one after another. A cell's result is not ready before its stage's path has followed what it
received; what replicas gather and reduce is one stream more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from distir.transforms.pipeline.phases import BACKWARD, FORWARD
from distir.transforms.pipeline.schedule import make_table

_MOST_CELLS = 400_000
"""The longest schedule that is followed: others keep their bound of time."""


class CellWork(NamedTuple):
    """A stage's pass over a microbatch, in seconds.

    `kept`: of the compute stream; `made`: from its begin until the value that it sends is made; `through`: from the
    value that it receives to the one that it sends, `after`: to the end of compute. `gathered` and `reduced`: of the
    replicas' stream. `sent` are the bytes of what it sends.
    """

    kept: float
    made: float
    through: float
    after: float
    sent: float
    gathered: float
    reduced: float


class StageWork(NamedTuple):
    """A stage, in seconds: its passes, `gathered` of weights once a step, `reduced` of gradients after the last
    microbatch."""

    forward: CellWork
    backward: CellWork
    gathered: float
    reduced: float


class StageMemory(NamedTuple):
    """Bytes of a stage: `held` from begin to end of a step, `saved` of a microbatch, `sums` over microbatches."""

    held: float
    saved: float
    sums: float


Row = Sequence[tuple[str, int, int]]
"""What a rank runs: pass, stage, microbatch."""


@lru_cache(4)  # a long one takes megabytes
def schedule_rows(schedule: str, ranks: int, microbatches: int, chunks: int) -> list[Row] | None:
    """What each rank runs; None for a schedule that is too long to follow."""
    if 2 * ranks * chunks * microbatches > _MOST_CELLS:
        return None
    table = make_table(schedule, ranks, microbatches, chunks)
    return [[(cell.phase, cell.stage, cell.microbatch) for cell in row] for row in table]


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


def row_seconds(
    rows: Sequence[Row], works: Sequence[StageWork], m: int, hop: Callable[[float, int, int], float]
) -> float:
    """When the last rank is ready; `hop` gives the seconds that bytes take from one rank to another."""
    parts, p = len(works), len(rows)
    arrived: dict[tuple[str, int, int], float] = {}
    """When what a cell receives is there."""
    sends = {
        (word, s): hop(work.sent, s % p, (s + step) % p)
        for s in range(parts)
        for word, step, work in ((FORWARD, 1, works[s].forward), (BACKWARD, -1, works[s].backward))
        if 0 <= s + step < parts
    }
    position, clock, replicas = [0] * p, [0.0] * p, [0.0] * p
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            k = position[r]
            while k < len(row):
                cell = word, s, i = row[k]
                step = 1 if word == FORWARD else -1
                received = 0 <= s - step < parts
                if received and cell not in arrived:
                    break
                at = arrived[cell] if received else -math.inf
                work = works[s].forward if word == FORWARD else works[s].backward
                begin = clock[r]
                if word == FORWARD and i == 0:
                    replicas[r] += works[s].gathered
                replicas[r] += work.gathered
                waits = work.gathered or (word == FORWARD and i == 0 and works[s].gathered)
                end = max(begin + work.kept, at + work.after, replicas[r] if waits else 0.0)
                if work.reduced:
                    replicas[r] = max(replicas[r], begin) + work.reduced
                if word == BACKWARD and i == m - 1 and works[s].reduced:
                    replicas[r] = max(replicas[r], begin) + works[s].reduced
                if (word, s) in sends:
                    arrived[word, s + step, i] = max(begin + work.made, at + work.through) + sends[word, s]
                clock[r] = end
                k += 1
            moved = moved or k > position[r]
            position[r] = k
    return max(*clock, *replicas)
