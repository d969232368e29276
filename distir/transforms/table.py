"""The table of a pipeline schedule: for each pipeline rank the ordered list of what it runs.

A slot is (stage, phase, microbatch) and prints as `0F3`. Prologue and update are implied. A table reads from text and
from CSV, and is checked before it is used: whole, in order, without deadlock, within a limit of microbatches in flight.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

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
IDLE = "."
_IDLE = ("", IDLE)
_DIGITS = 9
"""The most of a stage's or microbatch's number."""
_SHOWN = 24
"""Cells of a row, or characters of a cell, that an error shows."""


def as_table(rows: Any, name: str = "schedule") -> Table:
    """A table of rows of slots; a slot may be a tuple of its three, or text. Raises UsageError for what is no table."""
    if isinstance(rows, str) or not isinstance(rows, Iterable) or not all(isinstance(r, Iterable) for r in rows):
        raise UsageError(f"{name}: expected a row of slots for each pipeline rank, got {rows!r}")
    table: Table = []
    for rank, row in enumerate(rows):
        cells: list[Any] = row.split() if isinstance(row, str) else list(row)
        table.append(
            [_slot(cell, f"{name}, rank {rank}, cell {k}") for k, cell in enumerate(cells) if cell not in _IDLE]
        )
    return table


def _slot(cell: Any, where: str) -> Slot:
    if isinstance(cell, str):
        return parse_table(cell, where)[0][0]
    if isinstance(cell, tuple) and len(cell) == 3:
        stage, phase, microbatch = cell
        if isinstance(stage, int) and phase in (FORWARD, BACKWARD) and isinstance(microbatch, int):
            return Slot(stage, phase, microbatch)
    raise UsageError(f"{where}: expected stage, {FORWARD} or {BACKWARD}, microbatch, got {cell!r}")


def table_size(table: Table) -> tuple[int, int, int]:
    """Pipeline ranks, microbatches, and chunks a rank (rounded up)."""
    stages = 1 + max((slot.stage for row in table for slot in row), default=0)
    microbatches = 1 + max((slot.microbatch for row in table for slot in row), default=0)
    return len(table), microbatches, -(-stages // max(1, len(table)))


def check_table(table: Table, stages: int, microbatches: int, limit: int | None = None, name: str = "schedule") -> None:
    """Raises InfeasibleError, the bad cells marked in the grid: if a slot is missing, stands twice or on another rank,
    if microbatches are out of order on a stage, if the table would deadlock, or if a rank would hold more than `limit`
    microbatches saved."""
    order: dict[tuple[int, str], list[int]] = {}
    at: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for rank, row in enumerate(table):
        for k, slot in enumerate(row):
            order.setdefault((slot.stage, slot.phase), []).append(slot.microbatch)
            at.setdefault((slot.stage, slot.phase), []).append((rank, k))
    wanted = ((s, phase) for s in range(stages) for phase in (FORWARD, BACKWARD))
    for s, phase in itertools.chain(wanted, order):  # the first that lacks ends it, however many are wanted
        got, home = order.get((s, phase), []), s % len(table)
        cells = at.get((s, phase), [])
        where = sorted({rank for rank, _ in cells})
        if s >= stages or len(got) != microbatches or got != list(range(microbatches)) or where != [home]:
            bad = [cell for i, (cell, j) in enumerate(zip(cells, got, strict=True)) if i != j or cell[0] != home]
            shown = str(got[:_SHOWN])[:-1] + (", ...]" if len(got) > _SHOWN else "]")
            raise InfeasibleError(
                f"{name}: stage {s} {phase}: expected microbatches 0 to {microbatches - 1} in order on rank "
                f"{home}, got {shown} on {where}",
                f"the table was{', the cells amiss marked !' if bad else ''}:\n{_marked(table, bad)}",
            )
    cycles(table, name)
    if limit is not None:
        check_memory(table, limit, name=name)


def check_memory(table: Table, limit: float, saved: Sequence[float] | None = None, name: str = "schedule") -> None:
    """Raises InfeasibleError, the cell marked in the grid, if a rank would hold more than `limit` at once.

    What it holds are microbatches whose forward pass is done and backward pass is not, one a stage of the rank; or, if
    `saved[s]` are the bytes that stage s saves for each, bytes.
    """
    for rank, row in enumerate(table):
        held = 0.0
        for k, slot in enumerate(row):
            held += (saved[slot.stage] if saved else 1) * (1 if slot.phase == FORWARD else -1)
            if held > limit:
                unit = "bytes" if saved else "microbatches in flight"
                raise InfeasibleError(
                    f"{name}: rank {rank} holds {held:,.0f} {unit} from {slot} on, more than the limit of {limit:,.0f}",
                    f"run backward passes earlier; the cell is marked !:\n{_marked(table, [(rank, k)])}",
                )


def cycles(table: Table, name: str = "schedule") -> list[list[Slot]]:
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

    interleave(table, needs, lambda slot: steps[-1].append(slot), lambda: steps.append([]), name)
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


def format_grid(table: Table) -> str:
    """A row a pipeline rank, a column a time step in which every slot takes one; idle cells are dots."""
    rows = _by_step(table)
    width = max((len(cell) for row in rows for cell in row), default=1)
    return "\n".join(" ".join((cell or IDLE).ljust(width) for cell in row).rstrip() for row in rows)


def format_csv(table: Table) -> str:
    """A row a pipeline rank, a column a time step, idle cells empty: what torch.distributed.pipelining reads."""
    return "".join(",".join(row) + "\n" for row in _by_step(table))


def _by_step(table: Table) -> list[list[str]]:
    steps = cycles(table)
    at = {slot: t for t, step in enumerate(steps) for slot in step}
    rows: list[list[str]] = []
    for row in table:
        cells = [""] * len(steps)
        for slot in row:
            cells[at[slot]] = str(slot)
        rows.append(cells)
    return rows


def read_table(path: str | os.PathLike[str]) -> Table:
    """The table in a file of text or CSV. Raises UsageError if it cannot be read or is none."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8-sig") as file:
            return parse_table(file.read(), name)
    except OSError as e:
        raise UsageError(f"cannot read {name}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{name} is no text", "a table is a line a pipeline rank, of cells like 0F3 or 1B0") from e


def parse_table(text: str, name: str = "schedule") -> Table:
    """The table of `format_table`'s, `format_grid`'s or `format_csv`'s text.

    Raises UsageError that says the line and the cell, `name` being the file's.
    """
    table: Table = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [c.strip(' "') for c in line.split(",")] if "," in text else line.split()
        row: list[Slot] = []
        for k, cell in enumerate(cells, 1):
            match = re.fullmatch(rf"(\d+)([{FORWARD}{BACKWARD}])(\d+)", cell, re.ASCII)
            if match and max(len(match[1]), len(match[3])) <= _DIGITS:
                row.append(Slot(int(match[1]), match[2], int(match[3])))
            elif cell not in ("", IDLE):
                what = f"{name}, line {number}, cell {k}: expected stage, {FORWARD} or {BACKWARD}, microbatch"
                got = f"{cell[:_SHOWN]!r}{'...' if len(cell) > _SHOWN else ''}"
                hint = f"a number has at most {_DIGITS} digits" if match else _not_known(cell)
                raise UsageError(f"{what}, such as 0F3 or 1B0, got {got}", hint)
        if any(cells):
            table.append(row)
    if not any(table):
        raise UsageError(f"{name} has no slots", "a table is a line a pipeline rank, of cells like 0F3 or 1B0")
    return table


Need = tuple[int, str, int]
"""A slot that another needs, as a plain tuple."""


def _not_known(cell: str) -> str | None:
    """What to say of a cell that torch.distributed.pipelining knows and distir does not."""
    if re.match(r"\d+[IW]\d*|\(", cell):
        return (
            "backward passes in two parts (I and W, of zero-bubble schedules) and slots that overlap are not supported"
        )
    if re.match(r"\d+(SEND|RECV|UNSHARD|RESHARD|REDUCE)", cell):
        return 'communication is implied: dump the schedule with format="compute_only"'
    return "idle cells are empty (or . in text)"


def interleave(
    table: Table,
    needs: Callable[[Slot], Iterable[Need]],
    run: Callable[[Slot], None],
    end: Callable[[], None] = lambda: None,
    name: str = "schedule",
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
    left = [(r, at) for r, at in enumerate(position) if at < len(table[r])]
    if left:
        slots = " and ".join([str(table[r][at]) for r, at in left[:2]]) + (" ..." if len(left) > 2 else "")
        raise InfeasibleError(
            f"{name} deadlocks: {slots} would wait for ever",
            f"a slot waits for that of the stage before (of a backward pass, after) it; these, marked !:\n"
            f"{_marked(table, left)}",
        )


def _marked(table: Table, bad: Collection[tuple[int, int]]) -> str:
    """The grid with a `!` at some cells, (rank, position); of a long row the part around its first."""
    first: dict[int, int] = {}
    for rank, k in bad:
        first.setdefault(rank, k)
    rows: list[str] = []
    for rank, row in enumerate(table):
        start = max(0, min(first.get(rank, 0) - _SHOWN // 2, len(row) - _SHOWN))
        cells = [f"{slot}{'!' if (rank, k) in bad else ''}" for k, slot in enumerate(row)][start : start + _SHOWN]
        rows.append(" ".join([*(["..."] if start else []), *cells, *(["..."] if start + _SHOWN < len(row) else [])]))
    return "\n".join(rows)
