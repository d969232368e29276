"""Pipeline schedules: makes their tables (see `schedule_table`), by a built-in or custom generator, or from a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from distir.ir.errors import InfeasibleError, UsageError, counted
from distir.transforms.pipeline.phases import BACKWARD, FORWARD
from distir.transforms.pipeline.schedule_table import (
    Cell,
    Table,
    as_table,
    check_memory,
    check_table,
    read_table,
    stage_count,
    table_size,
)

Generator = Callable[[int, int, int], Table]
"""(pipeline ranks, microbatches, chunks per rank) -> table; a stage runs on the rank whose row has its cells."""


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    _one_chunk("gpipe", chunks)
    return [[Cell(s, phase, i) for phase in (FORWARD, BACKWARD) for i in range(microbatches)] for s in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """Once the pipeline is full, a stage alternates one forward and one backward (PipeDream, Narayanan et al. 2019)."""
    _one_chunk("1f1b", chunks)
    return [
        _alternate(
            [Cell(s, FORWARD, i) for i in range(microbatches)],
            [Cell(s, BACKWARD, i) for i in range(microbatches)],
            ranks - s - 1,
        )
        for s in range(ranks)
    ]


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B with several stages per rank, in groups of as many microbatches as ranks (Narayanan et al. 2021).

    Raises InfeasibleError if the microbatches do not divide by the ranks.
    """
    if microbatches % ranks:
        below, above = (ranks * (microbatches // ranks + more) for more in (0, 1))
        raise InfeasibleError(
            f"interleaved: {microbatches} microbatches do not divide by {ranks} pipeline ranks",
            f"use {below} or {above}" if below else f"use {above}",
        )
    table: Table = []
    for rank in range(ranks):
        forward: list[Cell] = []
        backward: list[Cell] = []
        for k in range(microbatches * chunks):
            group, within = divmod(k, ranks * chunks)
            chunk, i = within // ranks, group * ranks + within % ranks
            forward.append(Cell(chunk * ranks + rank, FORWARD, i))
            backward.append(Cell((chunks - 1 - chunk) * ranks + rank, BACKWARD, i))
        ahead = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
        table.append(_alternate(forward, backward, ahead))
    return table


def distir2021(ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """The order of DistIR (2021): in each time step every rank runs a cell that is ready, forward and backward in turn.

    The lowest microbatch comes first; the number of microbatches in flight is not limited.
    """
    _one_chunk(DISTIR_2021, chunks)
    done = {FORWARD: [0] * ranks, BACKWARD: [0] * ranks}  # number of microbatches, per rank
    table: Table = [[] for _ in range(ranks)]
    while min(done[BACKWARD]) < microbatches:
        forward, backward = ([*done[phase]] for phase in (FORWARD, BACKWARD))  # at the end of the step before
        for s, row in enumerate(table):
            ready = {
                FORWARD: forward[s] < (forward[s - 1] if s else microbatches),
                BACKWARD: backward[s] < (backward[s + 1] if s < ranks - 1 else forward[s]),
            }
            turn = FORWARD if row and row[-1].phase == BACKWARD else BACKWARD
            other = BACKWARD if turn == FORWARD else FORWARD
            if ready[turn] or ready[other]:
                phase = turn if ready[turn] else other
                row.append(Cell(s, phase, done[phase][s]))
                done[phase][s] += 1
    return table


def _one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise InfeasibleError(f"{name} has one chunk a rank, got {chunks}", "use the schedule interleaved")


def _alternate(forward: Sequence[Cell], backward: Sequence[Cell], ahead: int) -> list[Cell]:
    """`ahead` forward cells, then one forward and one backward in turn, then what is left."""
    ahead = min(ahead, len(forward))
    row = list(forward[:ahead])
    for i, cell in enumerate(backward):
        row += [*forward[ahead + i : ahead + i + 1], cell]
    return row


class PipeDreamScheduler:
    """1F1B for a number of microbatches; call it with the number of stages for the table."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches

    def __call__(self, stages: int) -> Table:
        return one_f_one_b(stages, self.num_microbatches)


DISTIR_2021 = "distir2021"
"""DistIR (2021) also had no overlap, and took the gradient of the loss in the forward pass: options of `Plan`."""
SCHEDULES: dict[str, Generator] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    DISTIR_2021: distir2021,
}
MOST_CELLS = 1 << 24
"""The longest schedule that is generated: so many cells take over a gigabyte."""
Schedule = str | os.PathLike[str] | Generator | PipeDreamScheduler | Table
"""A name, the path of a table's file, a generator, or a table."""


def make_table(schedule: Schedule, ranks: int, microbatches: int, chunks: int = 1, limit: int | None = None) -> Table:
    """The table of a schedule, checked; `limit` is the maximum number of microbatches in flight on a rank.

    Raises UsageError for an unknown name or a file that is no table, InfeasibleError for a table of another size, one
    that would deadlock or that exceeds the limit. Tables of named schedules are valid by construction.
    """
    if min(ranks, microbatches, chunks) < 1:
        what = f"{ranks} pipeline ranks, {microbatches} microbatches, {chunks} chunks"
        raise InfeasibleError(f"a schedule has at least one of each, got {what}")
    name, stages = "schedule", ranks * chunks
    if isinstance(schedule, os.PathLike):
        schedule = os.fspath(schedule)
    if isinstance(schedule, str):
        if schedule in SCHEDULES:
            if (cells := 2 * ranks * microbatches * chunks) > MOST_CELLS:
                raise InfeasibleError(f"a schedule of {cells:,} cells is longer than the {MOST_CELLS:,} distir plans")
            table = SCHEDULES[schedule](ranks, microbatches, chunks)
            if limit is not None:
                check_memory(table, limit)
            return table
        check_name(schedule)
        name = schedule
        schedule = read_table(schedule)
    if isinstance(schedule, PipeDreamScheduler):
        if schedule.num_microbatches != microbatches:
            made = f"PipeDreamScheduler was made for {counted(schedule.num_microbatches, 'microbatch', 'es')}"
            raise InfeasibleError(f"{made}, the plan has {microbatches}")
        table = schedule(ranks)
    elif callable(schedule):
        table = as_table(schedule(ranks, microbatches, chunks))
    else:
        table = as_table(schedule, name)
        _check_size(table, ranks, microbatches, chunks, name)
        stages = max(ranks, stage_count(table))  # ranks need not have as many as each other
    check_table(table, stages, microbatches, limit, name)
    return table


def check_name(name: str, where: str = "") -> None:
    """Raises UsageError, beginning with `where`, for what is neither a schedule's name nor a file, nor looks like one's
    path."""
    if name not in SCHEDULES and not (os.path.exists(name) or os.sep in name or "." in name):
        known = ", ".join(sorted(SCHEDULES))
        raise UsageError(f"{where}unknown schedule {name!r}", f"known are {known}, or the path of a table: FILE.csv")


def _check_size(table: Table, ranks: int, microbatches: int, chunks: int, name: str) -> None:
    found, planned = table_size(table), (ranks, microbatches, chunks)
    if found != planned:
        words = "pp {}, microbatches {}, chunks {}"
        raise InfeasibleError(
            f"{name} is a table for {words.format(*found)}; the plan has {words.format(*planned)}",
            "plan for what the table is: --pp {} --microbatches {} --chunks {}".format(*found),
        )
