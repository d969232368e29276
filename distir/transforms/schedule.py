"""Pipeline schedules as data: for each pipeline rank the ordered list of what it runs.

A slot is (stage, phase, microbatch) and prints as `0F3`. Prologue and update are implied.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from distir.ir.errors import InfeasibleError, UsageError
from distir.transforms.phases import BACKWARD, FORWARD


class Slot(NamedTuple):
    """One stage's forward or backward pass of one microbatch."""

    stage: int
    phase: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


Table = list[list[Slot]]
Generator = Callable[[int, int, int], Table]
"""(pipeline ranks, microbatches, chunks a rank) -> table; stage s is on rank s modulo the number of ranks."""


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    _one_chunk("gpipe", chunks)
    return [[Slot(s, phase, i) for phase in (FORWARD, BACKWARD) for i in range(microbatches)] for s in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """Once its pipeline is full a stage alternates: one forward, one backward (PipeDream, Narayanan et al. 2019)."""
    _one_chunk("1f1b", chunks)
    return [
        _alternate(
            [Slot(s, FORWARD, i) for i in range(microbatches)],
            [Slot(s, BACKWARD, i) for i in range(microbatches)],
            ranks - s - 1,
        )
        for s in range(ranks)
    ]


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B with several stages a rank, microbatches in groups of as many as ranks (Narayanan et al. 2021).

    Raises InfeasibleError if the microbatches do not divide by the ranks.
    """
    if microbatches % ranks:
        raise InfeasibleError(
            f"interleaved: {microbatches} microbatches do not divide by {ranks} pipeline ranks",
            f"use {ranks * max(1, microbatches // ranks)} or {ranks * (microbatches // ranks + 1)}",
        )
    table: Table = []
    for rank in range(ranks):
        forward: list[Slot] = []
        backward: list[Slot] = []
        for k in range(microbatches * chunks):
            group, within = divmod(k, ranks * chunks)
            chunk, i = within // ranks, group * ranks + within % ranks
            forward.append(Slot(chunk * ranks + rank, FORWARD, i))
            backward.append(Slot((chunks - 1 - chunk) * ranks + rank, BACKWARD, i))
        ahead = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
        table.append(_alternate(forward, backward, ahead))
    return table


def distir2021(ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """The order of DistIR (2021): time steps in which every rank runs what is ready, forward and backward in turn.

    The lowest microbatch first, however many are in flight.
    """
    _one_chunk(DISTIR_2021, chunks)
    done = {FORWARD: [0] * ranks, BACKWARD: [0] * ranks}  # microbatches, in order on each rank
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
                row.append(Slot(s, phase, done[phase][s]))
                done[phase][s] += 1
    return table


def _one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise InfeasibleError(f"{name} has one chunk a rank, got {chunks}", "use the schedule interleaved")


def _alternate(forward: Sequence[Slot], backward: Sequence[Slot], ahead: int) -> list[Slot]:
    """`ahead` forward slots, then one forward and one backward in turn, then what is left."""
    ahead = min(ahead, len(forward))
    row = list(forward[:ahead])
    for i, slot in enumerate(backward):
        row += [*forward[ahead + i : ahead + i + 1], slot]
    return row


class PipeDreamScheduler:
    """1F1B for a number of microbatches; called with the number of stages it gives the table."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches

    def __call__(self, stages: int) -> Table:
        return one_f_one_b(stages, self.num_microbatches)


DISTIR_2021 = "distir2021"
"""Beside its order, the gradient of the loss belongs to the forward pass, and nothing overlaps: see `distribute`."""
SCHEDULES: dict[str, Generator] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    DISTIR_2021: distir2021,
}
Schedule = str | Generator | PipeDreamScheduler | Table


def make_table(schedule: Schedule, ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """The table of a named schedule, a generator, or a table as it is.

    Raises UsageError for an unknown name, InfeasibleError for a table of another size or one that would deadlock; the
    tables of named schedules are right by construction.
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise UsageError(f"unknown schedule {schedule!r}", f"known are {', '.join(sorted(SCHEDULES))}")
        return SCHEDULES[schedule](ranks, microbatches, chunks)
    if isinstance(schedule, PipeDreamScheduler):
        table = schedule(ranks)
    elif callable(schedule):
        table = schedule(ranks, microbatches, chunks)
    else:
        table = schedule
    check_table(table, ranks * chunks, microbatches)
    return table


def check_table(table: Table, stages: int, microbatches: int) -> None:
    """Raises InfeasibleError if a slot is missing, stands twice or on another rank, if microbatches are out of order
    on a stage, or if the table would deadlock."""
    order: dict[tuple[int, str], list[int]] = {}
    ranks: dict[int, set[int]] = {}
    for rank, row in enumerate(table):
        for slot in row:
            order.setdefault((slot.stage, slot.phase), []).append(slot.microbatch)
            ranks.setdefault(slot.stage, set()).add(rank)
    for s, phase in [*itertools.product(range(stages), (FORWARD, BACKWARD)), *order]:
        got, where = order.get((s, phase), []), sorted(ranks.get(s, ()))
        if s >= stages or got != list(range(microbatches)) or where != [s % len(table)]:
            raise InfeasibleError(
                f"schedule: stage {s} {phase}: expected microbatches 0 to {microbatches - 1} in order on rank "
                f"{s % len(table)}, got {got} on {where}",
                "the table was:\n" + format_table(table),
            )
    cycles(table)


def cycles(table: Table) -> list[list[Slot]]:
    """What runs in each time step if every slot takes one and sends are free, by rank.

    Raises InfeasibleError, the waiting cells marked, if the table would deadlock.
    """
    stages = 1 + max((slot.stage for row in table for slot in row), default=0)
    steps: list[list[Slot]] = [[]]

    def needs(slot: Slot) -> list[Need]:
        s, phase, i = slot
        if phase == FORWARD:
            return [(s - 1, FORWARD, i)] if s else []
        return [(s, FORWARD, i), *([(s + 1, BACKWARD, i)] if s < stages - 1 else [])]

    interleave(table, needs, lambda slot: steps[-1].append(slot), lambda: steps.append([]))
    return steps[:-1]


def in_flight(table: Table) -> list[int]:
    """Per rank the most microbatches whose forward pass is done and backward pass is not: what it must hold saved."""
    most: list[int] = []
    for row in table:
        held = peak = 0
        for slot in row:
            held += 1 if slot.phase == FORWARD else -1
            peak = max(peak, held)
        most.append(peak)
    return most


def format_table(table: Table) -> str:
    """A row a pipeline rank, cells aligned."""
    width = max((len(str(slot)) for row in table for slot in row), default=1)
    return "\n".join(" ".join(str(slot).ljust(width) for slot in row).rstrip() for row in table)


def format_csv(table: Table) -> str:
    """A row a pipeline rank, a column a time step, idle cells empty: what torch.distributed.pipelining reads."""
    steps = cycles(table)
    at = {slot: t for t, step in enumerate(steps) for slot in step}
    rows = []
    for row in table:
        cells = [""] * len(steps)
        for slot in row:
            cells[at[slot]] = str(slot)
        rows.append(",".join(cells))
    return "\n".join(rows) + "\n"


def parse_table(text: str) -> Table:
    """The table of `format_table`'s or `format_csv`'s text. Raises UsageError that names the line and the cell."""
    table: Table = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [c.strip() for c in (line.split(",") if "," in text else line.split())]
        row: list[Slot] = []
        for cell in cells:
            match = re.fullmatch(rf"(\d+)([{FORWARD}{BACKWARD}])(\d+)", cell)
            if match:
                row.append(Slot(int(match[1]), match[2], int(match[3])))
            elif cell:
                raise UsageError(f"schedule, line {number}: expected a cell like 0F3 or 1B0, got {cell!r}")
        if cells:
            table.append(row)
    return table


Need = tuple[int, str, int]
"""A slot that another needs, as a plain tuple."""


def interleave(
    table: Table,
    needs: Callable[[Slot], Iterable[Need]],
    run: Callable[[Slot], None],
    end: Callable[[], None] = lambda: None,
) -> None:
    """Run the slots of all rows in time steps, each as soon as all it needs ran in earlier ones.

    `end` is called after each step. Raises InfeasibleError, showing the grid with the waiting cells marked, if the
    table would deadlock.
    """
    position = [0] * len(table)
    done: set[Need] = set()
    waiting: dict[Need, list[int]] = {}  # rows, by the first slot that they wait for
    now: list[int] = []

    def look(r: int) -> None:
        for need in needs(table[r][position[r]]):
            if need not in done:
                waiting.setdefault(need, []).append(r)
                return
        now.append(r)

    rows = [r for r, row in enumerate(table) if row]
    while rows:
        for r in rows:  # that have moved on, or waited for what has run
            look(r)
        if not now:
            break
        step = [(r, table[r][position[r]]) for r in sorted(now)]
        now.clear()
        for _, slot in step:
            run(slot)
        end()
        done.update([slot for _, slot in step])
        rows = [r for _, slot in step for r in waiting.pop(slot, ())]
        for r, _ in step:
            position[r] += 1
            if position[r] < len(table[r]):
                rows.append(r)
    if any(at < len(row) for at, row in zip(position, table, strict=True)):
        raise InfeasibleError(f"the schedule deadlocks; cells marked ! wait for ever:\n{_marked(table, position)}")


def _marked(table: Table, position: Sequence[int]) -> str:
    rows = []
    for row, at in zip(table, position, strict=True):
        rows.append(" ".join(f"{slot}!" if i == at else f"{slot}" for i, slot in enumerate(row)))
    return "\n".join(rows)
