"""Pipeline schedules as data: for each pipeline rank the ordered list of what it runs.

A slot is (stage, phase, microbatch) and prints as `0F3`. Prologue and update are implied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
Generator = Callable[[int, int], Table]
"""(stages, microbatches) -> table"""


def gpipe(stages: int, microbatches: int) -> Table:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    return [
        [Slot(s, phase, i) for phase in (FORWARD, BACKWARD) for i in range(microbatches)] for s in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """Once its pipeline is full a stage alternates: one forward, one backward (PipeDream, Narayanan et al. 2019)."""
    table: Table = []
    for s in range(stages):
        ahead = min(stages - s - 1, microbatches)
        row = [Slot(s, FORWARD, i) for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                row.append(Slot(s, FORWARD, ahead + i))
            row.append(Slot(s, BACKWARD, i))
        table.append(row)
    return table


class PipeDreamScheduler:
    """1F1B for a number of microbatches; called with the number of stages it gives the table."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches

    def __call__(self, stages: int) -> Table:
        return one_f_one_b(stages, self.num_microbatches)


SCHEDULES: dict[str, Generator] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def make_table(schedule: str | Generator | PipeDreamScheduler | Table, stages: int, microbatches: int) -> Table:
    """The table of a named schedule, a generator, or a table as it is.

    Raises UsageError for an unknown name, InfeasibleError for a table of another size.
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise UsageError(f"unknown schedule {schedule!r}", f"known are {', '.join(sorted(SCHEDULES))}")
        return SCHEDULES[schedule](stages, microbatches)
    if isinstance(schedule, PipeDreamScheduler):
        table = schedule(stages)
    elif callable(schedule):
        table = schedule(stages, microbatches)
    else:
        table = schedule
    check_table(table, stages, microbatches)
    return table


def check_table(table: Table, stages: int, microbatches: int) -> None:
    """Raises InfeasibleError if a slot is missing, stands twice, or microbatches are out of order on a stage."""
    for phase in (FORWARD, BACKWARD):
        for s in range(stages):
            got = [slot.microbatch for row in table for slot in row if (slot.stage, slot.phase) == (s, phase)]
            if got != list(range(microbatches)):
                raise InfeasibleError(
                    f"schedule: stage {s} {phase}: expected microbatches 0 to {microbatches - 1} in order, got {got}",
                    "the table was:\n" + format_table(table),
                )


def format_table(table: Table) -> str:
    """A row a pipeline rank, cells aligned."""
    width = max((len(str(slot)) for row in table for slot in row), default=1)
    return "\n".join(" ".join(str(slot).ljust(width) for slot in row).rstrip() for row in table)


def interleave(table: Table, ready: Callable[[Slot], bool], run: Callable[[Slot], None]) -> None:
    """Run the slots of all rows in time steps, each as soon as it is ready.

    Raises InfeasibleError, showing the grid with the waiting cells marked, if the table would deadlock.
    """
    position = [0] * len(table)
    while any(at < len(row) for at, row in zip(position, table, strict=True)):
        now = [r for r, row in enumerate(table) if position[r] < len(row) and ready(row[position[r]])]
        if not now:
            raise InfeasibleError(f"the schedule deadlocks; cells marked ! wait for ever:\n{_marked(table, position)}")
        for r in now:
            run(table[r][position[r]])
            position[r] += 1


def _marked(table: Table, position: Sequence[int]) -> str:
    rows = []
    for row, at in zip(table, position, strict=True):
        rows.append(" ".join(f"{slot}!" if i == at else f"{slot}" for i, slot in enumerate(row)))
    return "\n".join(rows)
