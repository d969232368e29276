"""The table of a pipeline schedule: for each pipeline rank the ordered list of its cells.

A cell is (stage, phase, microbatch) and prints as `0F3`; the dependences of each phase are in `phases.PHASES`. Prologue
and update are implied. A stage runs on the rank whose row has its cells. A table is parsed from text or CSV, and is
checked before it is used: complete, in order, without deadlock, within a limit of microbatches in flight.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from distir.ir.errors import InfeasibleError, UsageError
from distir.transforms.pipeline.phases import CELLS, PHASES


class Cell(NamedTuple):
    """One phase of one stage, for one microbatch."""

    stage: int
    phase: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


Table = list[list[Cell]]
IDLE = "."
_LETTERS = " or ".join(CELLS)
_IDLE = ("", IDLE)
_DIGITS = 9
"""The maximum number of digits of a stage or microbatch."""
_SHOWN = 24
"""Cells of a row, or characters of a cell, that an error shows."""


def as_table(rows: Any, name: str = "schedule") -> Table:
    """A table from rows of cells, each a tuple (stage, phase, microbatch) or text. Raises UsageError otherwise."""
    if isinstance(rows, str) or not isinstance(rows, Iterable) or not all(isinstance(r, Iterable) for r in rows):
        raise UsageError(f"{name}: expected a row of cells for each pipeline rank, got {rows!r}")
    table: Table = []
    for rank, row in enumerate(rows):
        cells: list[Any] = row.split() if isinstance(row, str) else list(row)
        table.append(
            [_cell(cell, f"{name}, rank {rank}, cell {k}") for k, cell in enumerate(cells) if cell not in _IDLE]
        )
    return table


def _cell(cell: Any, where: str) -> Cell:
    if isinstance(cell, str):
        return parse_table(cell, where)[0][0]
    if isinstance(cell, tuple) and len(cell) == 3:
        stage, phase, microbatch = cell
        if isinstance(stage, int) and phase in CELLS and isinstance(microbatch, int):
            return Cell(stage, phase, microbatch)
    raise UsageError(f"{where}: expected stage, {_LETTERS}, microbatch, got {cell!r}")


def stage_count(table: Table) -> int:
    """The number of stages."""
    return 1 + max((cell.stage for row in table for cell in row), default=0)


def table_size(table: Table) -> tuple[int, int, int]:
    """The number of pipeline ranks, of microbatches, and of chunks per rank (rounded up)."""
    stages = stage_count(table)
    microbatches = 1 + max((cell.microbatch for row in table for cell in row), default=0)
    return len(table), microbatches, -(-stages // max(1, len(table)))


def rank_of_stage(table: Table) -> dict[int, int]:
    """The pipeline rank that each stage runs on: the first whose row has one of its cells."""
    found: dict[int, int] = {}
    for rank, row in enumerate(table):
        for stage in dict.fromkeys([cell.stage for cell in row]):
            found.setdefault(stage, rank)
    return found


def check_table(table: Table, stages: int, microbatches: int, limit: int | None = None, name: str = "schedule") -> None:
    """Raises InfeasibleError, the bad cells marked in the grid: if a cell is missing or repeated, if a stage has cells
    on two ranks or a rank has no stage, if microbatches are out of order on a stage, if the table would deadlock, or if
    a rank would have more than `limit` microbatches in flight."""
    order: dict[tuple[int, str], list[int]] = {}
    at: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for rank, row in enumerate(table):
        for k, cell in enumerate(row):
            order.setdefault((cell.stage, cell.phase), []).append(cell.microbatch)
            at.setdefault((cell.stage, cell.phase), []).append((rank, k))
    expected = ((s, phase) for s in range(stages) for phase in CELLS)
    homes = rank_of_stage(table)
    for s, phase in itertools.chain(expected, order):  # stops at the first incomplete one: `expected` may be very long
        got, home = order.get((s, phase), []), homes.get(s)
        cells = at.get((s, phase), [])
        where = sorted({rank for rank, _ in cells})
        if s >= stages or len(got) != microbatches or got != list(range(microbatches)) or where != [home]:
            bad = [cell for i, (cell, j) in enumerate(zip(cells, got, strict=True)) if i != j or cell[0] != home]
            shown = str(got[:_SHOWN])[:-1] + (", ...]" if len(got) > _SHOWN else "]")
            raise InfeasibleError(
                f"{name}: stage {s} {phase}: expected microbatches 0 to {microbatches - 1} in order on "
                f"{'one rank' if home is None else f'rank {home}'}, got {shown} on {where}",
                f"the table was{', the wrong cells marked !' if bad else ''}:\n{_marked(table, bad)}",
            )
    if idle := sorted({*range(len(table))}.difference(homes.values())):
        raise InfeasibleError(f"{name}: rank {idle[0]} has no stage", f"the table was:\n{_marked(table, [])}")
    cycles(table, name)
    if limit is not None:
        check_memory(table, limit, name=name)


def check_memory(table: Table, limit: float, saved: Sequence[float] | None = None, name: str = "schedule") -> None:
    """Raises InfeasibleError, the cell marked in the grid, if a rank would exceed `limit`.

    The limit is on microbatches in flight (forward pass done, backward pass not), counted per stage of the rank; or, if
    `saved[s]` is the number of bytes that stage s saves for each of them, on bytes.
    """
    for rank, row in enumerate(table):
        used = 0.0
        for k, cell in enumerate(row):
            used += (saved[cell.stage] if saved else 1) * PHASES[cell.phase].in_flight
            if used > limit:
                unit = "bytes" if saved else "microbatches in flight"
                raise InfeasibleError(
                    f"{name}: rank {rank} holds {used:,.0f} {unit} from {cell} on, more than the limit of {limit:,.0f}",
                    f"run backward passes earlier; the cell is marked !:\n{_marked(table, [(rank, k)])}",
                )


def cycles(table: Table, name: str = "schedule") -> list[list[Cell]]:
    """The cells that run in each time step, by rank, if every cell takes one step and sends take none.

    Raises InfeasibleError, the waiting cells marked, if the table would deadlock.
    """
    stages = stage_count(table)
    steps: list[list[Cell]] = [[]]

    def needs(cell: Cell) -> list[Need]:
        s, phase, i = cell
        return [(s + far, other, i) for far, other in PHASES[phase].needs if 0 <= s + far < stages]

    interleave(table, needs, lambda cell: steps[-1].append(cell), lambda: steps.append([]), name)
    return steps[:-1]


def in_flight(table: Table) -> list[int]:
    """Per rank the maximum number of microbatches in flight (forward pass done, backward pass not), per stage."""
    most: list[int] = []
    for row in table:
        current = peak = 0
        for cell in row:
            current += PHASES[cell.phase].in_flight
            peak = max(peak, current)
        most.append(peak)
    return most


def format_table(table: Table) -> str:
    """One row per pipeline rank, cells aligned."""
    width = max((len(str(cell)) for row in table for cell in row), default=1)
    return "\n".join(" ".join(str(cell).ljust(width) for cell in row).rstrip() for row in table)


def format_grid(table: Table) -> str:
    """One row per pipeline rank, one column per time step (every cell takes one); idle cells are dots."""
    rows = _by_step(table)
    width = max((len(cell) for row in rows for cell in row), default=1)
    return "\n".join(" ".join((cell or IDLE).ljust(width) for cell in row).rstrip() for row in rows)


def format_csv(table: Table) -> str:
    """One row per pipeline rank, one column per time step, idle cells empty: torch.distributed.pipelining reads it."""
    return "".join(",".join(row) + "\n" for row in _by_step(table))


def _by_step(table: Table) -> list[list[str]]:
    steps = cycles(table)
    at = {cell: t for t, step in enumerate(steps) for cell in step}
    rows: list[list[str]] = []
    for row in table:
        cells = [""] * len(steps)
        for cell in row:
            cells[at[cell]] = str(cell)
        rows.append(cells)
    return rows


def read_table(path: str | os.PathLike[str]) -> Table:
    """The table in a text or CSV file. Raises UsageError if it cannot be read or has no table."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8-sig") as file:
            return parse_table(file.read(), name)
    except OSError as e:
        raise UsageError(f"cannot read {name}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{name} is no text", "a table is a line a pipeline rank, of cells like 0F3 or 1B0") from e


def parse_table(text: str, name: str = "schedule") -> Table:
    """Parses the text of `format_table`, `format_grid` or `format_csv`.

    Raises UsageError with the line and the cell; `name` is the file's name in it.
    """
    table: Table = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [c.strip(' "') for c in line.split(",")] if "," in text else line.split()
        row: list[Cell] = []
        for k, cell in enumerate(cells, 1):
            match = re.fullmatch(rf"(\d+)([{''.join(CELLS)}])(\d+)", cell, re.ASCII)
            if match and max(len(match[1]), len(match[3])) <= _DIGITS:
                row.append(Cell(int(match[1]), match[2], int(match[3])))
            elif cell not in ("", IDLE):
                what = f"{name}, line {number}, cell {k}: expected stage, {_LETTERS}, microbatch"
                got = f"{cell[:_SHOWN]!r}{'...' if len(cell) > _SHOWN else ''}"
                hint = f"a number has at most {_DIGITS} digits" if match else _not_known(cell)
                raise UsageError(f"{what}, such as 0F3 or 1B0, got {got}", hint)
        if any(cells):
            table.append(row)
    if not any(table):
        raise UsageError(f"{name} has no cells", "a table is a line a pipeline rank, of cells like 0F3 or 1B0")
    return table


Need = tuple[int, str, int]
"""A cell that another depends on, as a plain tuple."""


def _not_known(cell: str) -> str | None:
    """The hint for a cell that distir cannot parse, such as those that only torch.distributed.pipelining has."""
    if re.match(r"\d+[IW]\d*|\(", cell):
        return (
            "backward passes in two parts (I and W, of zero-bubble schedules) and cells that overlap are not supported"
        )
    if re.match(r"\d+(SEND|RECV|UNSHARD|RESHARD|REDUCE)", cell):
        return 'communication is implied: dump the schedule with format="compute_only"'
    return "idle cells are empty (or . in text)"


def interleave(
    table: Table,
    needs: Callable[[Cell], Iterable[Need]],
    run: Callable[[Cell], None],
    end: Callable[[], None] = lambda: None,
    name: str = "schedule",
) -> None:
    """Run the cells of all rows in time steps, each as soon as all its dependences ran in earlier steps.

    `end` is called after each step. Raises InfeasibleError, showing the grid with the waiting cells marked, if the
    table would deadlock.
    """
    position = [0] * len(table)
    done: set[Need] = set()
    waiting: dict[Need, list[int]] = {}  # row numbers, by the cell that they wait for
    now: list[int] = []

    def look(r: int) -> None:
        for need in needs(table[r][position[r]]):
            if need not in done:
                waiting.setdefault(need, []).append(r)
                return
        now.append(r)

    rows = [r for r, row in enumerate(table) if row]
    while rows:
        for r in rows:  # those that advanced in the last step, or waited for a cell that ran in it
            look(r)
        if not now:
            break
        step = [(r, table[r][position[r]]) for r in sorted(now)]
        now.clear()
        for _, cell in step:
            run(cell)
        end()
        done.update([cell for _, cell in step])
        rows = [r for _, cell in step for r in waiting.pop(cell, ())]
        for r, _ in step:
            position[r] += 1
            if position[r] < len(table[r]):
                rows.append(r)
    left = [(r, at) for r, at in enumerate(position) if at < len(table[r])]
    if left:
        cells = " and ".join([str(table[r][at]) for r, at in left[:2]]) + (" ..." if len(left) > 2 else "")
        raise InfeasibleError(
            f"{name} deadlocks: {cells} would wait for ever",
            f"a forward cell waits for that of the previous stage, a backward cell for that of the next; marked !:\n"
            f"{_marked(table, left)}",
        )


def _marked(table: Table, bad: Collection[tuple[int, int]]) -> str:
    """The table with a `!` at the `bad` cells (rank, position); a long row is cut to the part around the first."""
    first: dict[int, int] = {}
    for rank, k in bad:
        first.setdefault(rank, k)
    rows: list[str] = []
    for rank, row in enumerate(table):
        start = max(0, min(first.get(rank, 0) - _SHOWN // 2, len(row) - _SHOWN))
        cells = [f"{cell}{'!' if (rank, k) in bad else ''}" for k, cell in enumerate(row)][start : start + _SHOWN]
        rows.append(" ".join([*(["..."] if start else []), *cells, *(["..."] if start + _SHOWN < len(row) else [])]))
    return "\n".join(rows)
