"""Schedule tables in files: text, the CSV format of torch.distributed.pipelining, and errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Identity

from distir.ir.errors import InfeasibleError, UsageError
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.pipeline.schedule import gpipe, interleaved, make_table, one_f_one_b
from distir.transforms.pipeline.schedule_table import (
    Table,
    check_memory,
    check_table,
    cycles,
    format_csv,
    format_grid,
    format_table,
    parse_table,
    read_table,
    table_size,
)
from tests.transforms.programs import TOLERANCE, error, run, written_mlp
from tests.transforms.programs import Plan as Degrees


def test_the_forward_clock_cycles_of_gpipe() -> None:
    """Cycle k holds all (microbatch i, stage j) with i + j = k."""

    def forward(ranks: int, microbatches: int) -> list[list[tuple[int, int]]]:
        steps = cycles(gpipe(ranks, microbatches))
        return [found for step in steps if (found := [(i, s) for s, phase, i in step if phase == "F"])]

    assert [sorted(step, reverse=True) for step in forward(3, 3)] == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(2, 1), (1, 2)],
        [(2, 2)],
    ]
    for p in range(1, 6):
        for m in range(1, 6):
            want = [{(i, k - i) for i in range(m) if 0 <= k - i < p} for k in range(m + p - 1)]
            assert [set(step) for step in forward(p, m)] == want


def test_a_grid_has_a_row_a_rank_and_a_column_a_step() -> None:
    assert format_grid(one_f_one_b(2, 3)) == ("0F0 0F1 .   0B0 0F2 0B1 .   0B2\n.   1F0 1B0 1F1 1B1 1F2 1B2 .")
    assert format_csv(one_f_one_b(2, 2)) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


def tables() -> st.SearchStrategy[Table]:
    def make(ranks: int, groups: int, chunks: int, kind: str) -> Table:
        if kind == "interleaved":
            return interleaved(ranks, ranks * groups, chunks)
        return (gpipe if kind == "gpipe" else one_f_one_b)(ranks, groups)

    return st.builds(
        make, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["gpipe", "1f1b", "interleaved"])
    )


@given(tables())
def test_every_form_reads_back(table: Table) -> None:
    for form in (format_table, format_grid, format_csv):
        assert parse_table(form(table)) == table
        assert parse_table(form(table).replace("\n", "\r\n") + "\n\n") == table


# ---- torch.distributed.pipelining


def _runtime(kind: Any, rank: int, ranks: int, stages: int, microbatches: int) -> Any:
    """A schedule of torch's, of stages that are never run."""
    mine = [
        SimpleNamespace(
            num_stages=stages,
            group_size=ranks,
            group_rank=rank,
            stage_index=s,
            is_last=s == stages - 1,
            submod=Identity(),
        )
        for s in range(rank, stages, ranks)
    ]
    return kind(mine, microbatches)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "name"),
    [(2, 4, 1, "gpipe"), (4, 8, 1, "1f1b"), (1, 3, 1, "1f1b"), (2, 4, 2, "interleaved"), (4, 8, 3, "interleaved")],
)
def test_torch_reads_what_is_written(ranks: int, microbatches: int, chunks: int, name: str, tmp_path: Path) -> None:
    table = make_table(name, ranks, microbatches, chunks)
    path = tmp_path / "table.csv"
    path.write_text(format_csv(table))
    runtime = _runtime(torch_schedules._PipelineScheduleRuntime, 0, ranks, ranks * chunks, microbatches)
    runtime._load_csv(str(path))  # validates it, too, and adds what is sent and received
    read = [[str(a) for a in runtime.pipeline_order[r] if a is not None] for r in range(ranks)]
    assert read == [[str(slot) for slot in row] for row in table]
    runtime._dump_csv(str(tmp_path / "again.csv"), format="compute_only")
    assert read_table(tmp_path / "again.csv") == table


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (2, 2, 1), (4, 8, 2), (3, 6, 3)])
def test_what_torch_writes_is_read(ranks: int, microbatches: int, chunks: int, tmp_path: Path) -> None:
    """Torch's interleaved schedule equals distir's."""
    kind = torch_schedules.ScheduleInterleaved1F1B
    path = tmp_path / "torch.csv"
    _runtime(kind, 0, ranks, ranks * chunks, microbatches)._dump_csv(str(path), format="compute_only")
    table = make_table(path, ranks, microbatches, chunks)
    assert table_size(table) == (ranks, microbatches, chunks)
    if chunks > 1:
        assert table == interleaved(ranks, microbatches, chunks)
    check_table(table, ranks * chunks, microbatches)


@pytest.mark.parametrize("kind", ["ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble"])
def test_zero_bubble_tables_of_torch_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "zero.csv"
    _runtime(getattr(torch_schedules, kind), 0, 2, 4, 4)._dump_csv(str(path), format="compute_only")
    with pytest.raises(UsageError, match=r"zero\.csv, line \d, cell \d+: .*got '\dI\d'.*zero-bubble.*not supported"):
        read_table(path)


def test_tables_of_torch_with_communication_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "comms.csv"
    _runtime(torch_schedules.ScheduleInterleaved1F1B, 0, 2, 4, 4)._dump_csv(str(path))
    with pytest.raises(
        UsageError, match=r"comms\.csv, line 1, cell 1: .*dump the schedule with format=\"compute_only\""
    ):
        read_table(path)


# ---- what is wrong with a file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "0F0,0B0\n1F0,1C0\n",
            r"t\.csv, line 2, cell 2: expected stage, F or B, microbatch, .* got '1C0' \(hint: idle",
        ),
        ("0F0 0B0\n\n1F0 B0\n", r"t\.csv, line 3, cell 2: .* got 'B0'"),
        ("0F0,(0F1;0B0)OVERLAP_F_B\n", r"line 1, cell 2: .*overlap are not supported"),
        ("0F0,0W0\n", r"line 1, cell 2: .*got '0W0' \(hint: backward passes in two parts"),
        ("0F0;0B0\n", r"line 1, cell 1: .* got '0F0;0B0'"),
        ("0F0,-1F0\n", r"line 1, cell 2: .*got '-1F0'"),
        ("", r"t\.csv has no cells \(hint: a table is"),
        (",,\n,\n", r"t\.csv has no cells"),
    ],
)
def test_a_file_that_is_no_table(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_table(tmp_path / "t.csv")


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.csv: No such file"):
        make_table(tmp_path / "none.csv", 2, 2)
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        make_table(str(tmp_path), 2, 2)
    (tmp_path / "t.csv").write_bytes(b"0F0,\xff\xfe")
    with pytest.raises(UsageError, match="is no text"):
        read_table(tmp_path / "t.csv")
    with pytest.raises(UsageError, match=r"unknown schedule 'zigzag'.*1f1b, .*gpipe, interleaved.*FILE\.csv"):
        make_table("zigzag", 2, 2)


def test_a_byte_order_mark_is_no_cell(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert format_table(read_table(tmp_path / "t.csv")) == "0F0 0B0"


def test_a_table_for_another_plan_says_which(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(format_csv(interleaved(2, 4, 2)))
    said = r"t\.csv is a table for pp 2, microbatches 4, chunks 2; the plan has pp 4, microbatches 4, chunks 1"
    with pytest.raises(InfeasibleError, match=said + r" \(hint: .*--pp 2 --microbatches 4 --chunks 2\)"):
        make_table(path, 4, 4)
    assert make_table(path, 2, 4, 2) == interleaved(2, 4, 2)


@pytest.mark.parametrize(
    ("text", "said", "marked"),
    [
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "deadlocks: 0B0 and 1F1 would wait", ["0B0!", "1F1!"]),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1", r"stage 0 B: expected .* got \[1, 0\]", ["0B1!", "0B0!"]),
        ("0F0 0F1 1B0 0B1\n1F0 1F1 0B0 1B1", "stage 0 B: expected .* on rank 0", ["0B1!", "0B0!"]),
        ("0B0 0F0 0F1 0B1\n1F0 1F1 1B0 1B1", "deadlocks: 0B0 and 1F0", ["0B0!", "1F0!"]),
    ],
)
def test_a_bad_table_names_its_file_and_marks_its_cells(
    text: str, said: str, marked: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.txt"
    path.write_text(text)
    with pytest.raises(InfeasibleError, match=said) as e:
        make_table(path, 2, 2)
    assert e.value.message.startswith(str(path))
    assert "\n" not in e.value.message
    assert e.value.hint is not None
    assert [cell for cell in e.value.hint.split() if cell.endswith("!") and cell[0].isdigit()] == marked


def test_long_rows_are_shown_about_the_bad_cell() -> None:
    with pytest.raises(InfeasibleError, match="rank 0 holds 101 microbatches in flight from 0F100 on") as e:
        check_memory(gpipe(2, 500), 100)
    grid = str(e.value.hint).splitlines()[1:]
    assert "0F99 0F100! 0F101" in grid[0]
    assert all(len(row) < 200 for row in grid)


# ---- memory


@given(tables())
def test_a_limit_of_microbatches_in_flight(table: Table) -> None:
    ranks, microbatches, chunks = table_size(table)
    most = max(_most_in_flight(row, {}) for row in table)
    check_table(table, ranks * chunks, microbatches, limit=most)
    with pytest.raises(
        InfeasibleError, match=f"holds {most} microbatches in flight from .* the limit of {most - 1}"
    ) as e:
        check_table(table, ranks * chunks, microbatches, limit=most - 1)
    assert str(e.value).count("!:") == 1
    assert sum(cell.endswith("!") for cell in str(e.value.hint).split()) == 1


@given(tables(), st.lists(st.integers(1, 1 << 34), min_size=15, max_size=15))
def test_a_limit_of_bytes(table: Table, saved: list[int]) -> None:
    most = max(_most_in_flight(row, dict(enumerate(saved))) for row in table)
    check_memory(table, most, saved)
    with pytest.raises(InfeasibleError, match=f"holds [0-9,]+ bytes from .* the limit of {most - 1:,}"):
        check_memory(table, most - 1, saved)


def _most_in_flight(row: list, saved: dict[int, int]) -> int:
    """Added up anew at every slot."""
    return max(
        sum(saved.get(a.stage, 1) for a in row[: k + 1] if a.phase == "F" and a._replace(phase="B") not in row[: k + 1])
        for k in range(len(row))
    )


def test_1f1b_fits_where_gpipe_does_not() -> None:
    assert make_table("1f1b", 4, 16, limit=4) == one_f_one_b(4, 16)
    with pytest.raises(InfeasibleError, match="rank 0 holds 5 microbatches in flight from 0F4 on"):
        make_table("gpipe", 4, 16, limit=4)


# ---- what a table from a file gives


def test_a_table_from_a_file_gives_the_same_results(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    program, plan = written_mlp(), Degrees(2, 1, 2, 4)
    function = parallel_transform_3d(program.function, 2, 1, 2, plan.devices, 4, path)
    assert error(run(function, program), program.results()) <= TOLERANCE
    by_name = parallel_transform_3d(program.function, 2, 1, 2, plan.devices, 4, "1f1b")
    assert [op.spec.name for op in function.ops] != [op.spec.name for op in by_name.ops]


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("0F99999999999", UsageError, "cell 1: expected stage, F or B, microbatch, .* at most 9 digits"),
        ("99999999999B0", UsageError, "at most 9 digits"),
        ("9" * 5000 + "F0", UsageError, "at most 9 digits"),
        ("0F999999999", InfeasibleError, "expected microbatches 0 to 999999999 in order on rank 0"),
        ("999999999F0", InfeasibleError, "stage 0 F: expected microbatches 0 to 0 in order on one rank"),
    ],
    ids=range(5),
)
def test_numbers_of_any_size_in_a_table(text: str, kind: type[Exception], said: str, tmp_path: Path) -> None:
    """Nothing as large as they are is made."""
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(kind, match=said) as found:
        make_table(path, *table_size(read_table(path)))
    assert len(str(found.value)) < 400


@pytest.mark.parametrize(
    ("name", "size"), [("1f1b", (4, 10**11, 1)), ("gpipe", (10**10, 1, 1)), ("interleaved", (4, 4, 10**9))]
)
def test_a_schedule_too_long_to_be_made(name: str, size: tuple[int, int, int]) -> None:
    with pytest.raises(InfeasibleError, match="cells is longer than the 16,777,216"):
        make_table(name, *size)
