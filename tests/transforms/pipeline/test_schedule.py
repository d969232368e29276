"""Schedules are tables: complete, in order, without deadlock; each gives the same results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.ir import verify
from distir.ir.errors import InfeasibleError, UsageError
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.passes import stage_meshes
from distir.transforms.pipeline.bodies import cut_bodies
from distir.transforms.pipeline.emission import pipeline
from distir.transforms.pipeline.phases import BACKWARD, FORWARD
from distir.transforms.pipeline.schedule import (
    SCHEDULES,
    PipeDreamScheduler,
    gpipe,
    interleaved,
    make_table,
    one_f_one_b,
)
from distir.transforms.pipeline.schedule_table import (
    Cell,
    check_table,
    cycles,
    format_csv,
    format_table,
    in_flight,
    interleave,
    parse_table,
)
from distir.transforms.pipeline.stages import cut_stages
from tests.transforms.programs import TOLERANCE, Plan, distributed, error, run, written_mlp

ranks, microbatches = st.integers(1, 6), st.integers(1, 8)


def test_tables_as_they_are_known() -> None:
    assert format_table(gpipe(2, 2)) == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"
    assert format_table(one_f_one_b(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


@given(ranks, microbatches)
def test_every_generator_gives_a_whole_table(ranks: int, microbatches: int) -> None:
    for generator in (gpipe, one_f_one_b):
        check_table(generator(ranks, microbatches), ranks, microbatches)
    if microbatches % ranks == 0:
        for chunks in (1, 2, 3):
            check_table(interleaved(ranks, microbatches, chunks), ranks * chunks, microbatches)


@given(ranks, microbatches)
def test_1f1b_holds_no_more_than_its_distance_from_the_end(ranks: int, microbatches: int) -> None:
    assert in_flight(one_f_one_b(ranks, microbatches)) == [min(microbatches, ranks - s) for s in range(ranks)]
    assert in_flight(gpipe(ranks, microbatches)) == [microbatches] * ranks


@given(ranks, microbatches)
def test_both_take_as_long_where_forward_and_backward_do(ranks: int, microbatches: int) -> None:
    for generator in (gpipe, one_f_one_b):
        assert len(cycles(generator(ranks, microbatches))) == 2 * (microbatches + ranks - 1)


@given(ranks, microbatches)
def test_text_and_back(ranks: int, microbatches: int) -> None:
    for table in (gpipe(ranks, microbatches), one_f_one_b(ranks, microbatches)):
        assert parse_table(format_table(table)) == table
        assert parse_table(format_csv(table)) == table


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0F1 0B0\n1F0 1F1 1B0 1B1", "stage 0 B: expected microbatches 0 to 1 in order"),
        ("0F0 0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1", "stage 0 F: expected microbatches 0 to 1"),
        ("0F1 0F0 0B0 0B1\n1F0 1F1 1B0 1B1", r"got \[1, 0\]"),
        ("0F0 0F1 1B0 1B1\n1F0 1F1 0B0 0B1", "in order on rank 0, got"),
    ],
)
def test_a_table_with_a_slot_amiss_is_refused(text: str, said: str) -> None:
    with pytest.raises(InfeasibleError, match=said):
        check_table(parse_table(text), 2, 2)


def test_a_deadlock_shows_the_waiting_cells() -> None:
    """Stage 0 waits for a gradient that stage 1 makes after a forward pass that stage 0 has not run."""
    table = parse_table("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(InfeasibleError, match="deadlocks") as e:
        check_table(table, 2, 2)
    assert "0B0!" in str(e.value)
    assert "1F1!" in str(e.value)


def test_interleave_runs_all_in_an_order_that_was_ready() -> None:
    ran: list[Cell] = []
    table = one_f_one_b(3, 3)

    def needs(cell: Cell) -> list[Cell]:
        if cell.phase == FORWARD:
            return [cell._replace(stage=cell.stage - 1)] if cell.stage else []
        return [cell._replace(stage=cell.stage + 1)] if cell.stage < 2 else []

    def run(cell: Cell) -> None:
        assert all(need in ran for need in needs(cell))
        ran.append(cell)

    interleave(table, needs, run)
    assert sorted(ran) == sorted(cell for row in table for cell in row)
    for row in table:
        assert [cell for cell in ran if cell in row] == row


def test_names_generators_tables_and_schedulers() -> None:
    want = one_f_one_b(2, 3)
    for schedule in ("1f1b", one_f_one_b, want, PipeDreamScheduler(3)):
        assert make_table(schedule, 2, 3) == want
    with pytest.raises(UsageError, match="unknown schedule 'zigzag'"):
        make_table("zigzag", 2, 3)
    with pytest.raises(InfeasibleError, match="made for 3 microbatches, the plan has 4"):
        make_table(PipeDreamScheduler(3), 2, 4)
    for microbatches, hint in ((3, "use 2 or 4"), (1, "use 2")):
        said = f"{microbatches} microbatches do not divide by 2 pipeline ranks"
        with pytest.raises(InfeasibleError, match=said) as raised:
            make_table("interleaved", 2, microbatches, 2)
        assert raised.value.hint == hint


def test_schedules_of_one_cut_share_their_bodies() -> None:
    program, plan = written_mlp(), Plan(1, 1, 2, 4)
    stages = stage_meshes(plan.plan, plan.devices)
    placed = distributed(program, plan).placed
    cut = cut_bodies(*cut_stages(placed, 2, 4))
    one, other = (pipeline(cut, stages, generator(2, 4)) for generator in (gpipe, one_f_one_b))
    assert set(one.callees()) == set(other.callees())
    for function in (one, other):
        verify(function)
        assert error(run(function, program), program.results()) <= TOLERANCE


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
        "0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3",
    ],
)
def test_any_table_that_does_not_deadlock_gives_the_same_results(text: str) -> None:
    program, plan = written_mlp(), Plan(2, 1, 2, 4)
    function = parallel_transform_3d(program.function, 2, 1, 2, plan.devices, 4, parse_table(text))
    assert error(run(function, program), program.results()) <= TOLERANCE
    calls = [op for op in function.ops if op.callee is not None and op.attributes.get("mb") is not None]
    for stage, row in enumerate(text.splitlines()):
        names = {f"fwd{stage}": FORWARD, f"bwd{stage}": BACKWARD}
        called = [
            f"{stage}{names[op.callee.name.split('.')[0]]}{op.attributes['mb']}"
            for op in calls
            if op.callee is not None and op.callee.name.split(".")[0] in names
        ]
        assert called == row.split()


def test_a_table_of_tuples_or_of_text() -> None:
    want = [[Cell(0, "F", 0), Cell(0, "F", 1), Cell(0, "B", 0), Cell(0, "B", 1)]]
    for rows in (
        [[(0, "F", 0), (0, "F", 1), (0, "B", 0), (0, "B", 1)]],
        [["0F0", "0F1", "", "0B0", "0B1"]],
        ["0F0 0F1 . 0B0 0B1"],
    ):
        assert make_table(rows, 1, 2) == want  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rows",
    [3, None, [3], [[1]], [[(0.0, "F", 0)]], [[(0, "X", 0)]], [[(0, "F")]], [["0G0"]], lambda ranks, mb, chunks: None],
    ids=lambda rows: "function" if callable(rows) else str(rows),
)
def test_what_is_no_table(rows: Any) -> None:
    with pytest.raises(UsageError, match="schedule"):
        make_table(rows, 1, 1)


@pytest.mark.parametrize("size", [(0, 4, 1), (-1, 2, 1), (4, 0, 1), (2, -1, 1), (2, 2, 0)], ids=str)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_nothing_is_no_schedule(name: str, size: tuple[int, int, int]) -> None:
    with pytest.raises(InfeasibleError, match="at least one of each"):
        make_table(name, *size)
