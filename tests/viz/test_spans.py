"""The bars and points of a simulation's figures agree with its times and bytes."""

import json
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.api import Plan, load, simulate
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir import FunctionMaker
from distir.ir.type import Float32, Tensor
from distir.models import mlp
from distir.transforms import parallel_transform_3d
from distir.viz.spans import BACKWARD, COLLECTIVE, COMPUTE, FORWARD, TRANSFER, UPDATE, Bar, bars, coarse, highest, live
from tests.executor.random_schedules import random_program

GPT = Path(__file__).parent.parent.parent / "examples" / "gpt2-tiny.onnx"
PLANS = [
    Plan(),
    Plan(dp=2),
    Plan(tp=2),
    Plan(dp=2, microbatches=4),
    Plan(dp=2, tp=2, pp=2, microbatches=4),
    Plan(pp=2, microbatches=4, schedule="gpipe"),
    Plan(pp=2, microbatches=4, schedule="interleaved", chunks=2),
]


@pytest.fixture(scope="module")
def model():
    return load(GPT, {"batch": 8}, loss="cross-entropy")


def check(simulation):
    """What must hold of any simulation's bars and points."""
    rows = dict(bars(simulation))
    for row in rows.values():
        assert all(b.duration > 0 for b in row)
        assert all(a.start + a.duration <= b.start for a, b in pairwise(row))
    ends = [b.start + b.duration for row in rows.values() for b in row]
    assert max(ends, default=0.0) == simulation.seconds
    curves = live(simulation)
    for stage, (_, points) in zip(simulation.stages, curves, strict=True):
        assert max(sum(size) for _, size in points) == stage.tensors
        assert all(a[0] <= b[0] for a, b in pairwise(points))
        assert points[0][0] == 0.0
        assert points[-1][0] == simulation.seconds
    return rows


@given(st.integers(0, 1 << 32))
def test_bars_and_points_of_random_programs(seed):
    function, topology = random_program(seed)
    simulation = Simulator(CostModel(topology)).interpret(function)
    rows = check(simulation)
    for stage in simulation.stages:
        row = rows.get(f"{stage.name} {COMPUTE}", [])  # with what is lost beside collectives
        computed = sum(b.duration for b in row if b.kind not in (COLLECTIVE, TRANSFER))
        assert computed == pytest.approx(stage.compute, rel=1e-12)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_kinds_of_a_training_step(model, plan):
    """Every microbatch goes forward and backward once on every stage; the update is of all of them."""
    rows = check(simulate(model, plan, "cpu-2core").simulation)
    kinds = {b.kind for row in rows.values() for b in row if b.kind not in (COLLECTIVE, TRANSFER)}
    assert kinds == {FORWARD, BACKWARD, UPDATE}
    for name, row in rows.items():
        assert all((b.kind in (COLLECTIVE, TRANSFER)) == (not name.endswith(COMPUTE)) for b in row)
        if not name.endswith(COMPUTE):
            continue
        assert {b.microbatch for b in row if b.kind == UPDATE} <= {None}
        if plan.microbatches > 1:
            for kind in (FORWARD, BACKWARD):
                assert {b.microbatch for b in row if b.kind == kind} - {None} == set(range(plan.microbatches))
        first = {(b.kind, b.microbatch): b.start for b in reversed(row)}
        for k in range(plan.microbatches if plan.microbatches > 1 else 0):
            assert first[FORWARD, k] < first[BACKWARD, k]
    assert any(b.kind == TRANSFER for row in rows.values() for b in row) == (plan.pp > 1)
    assert any(b.kind == COLLECTIVE for row in rows.values() for b in row) == (plan.dp * plan.tp > 1)


def test_what_runs_back_to_back_is_one_bar(model):
    """GPipe on a pipeline without tensor parallelism: one bar a microbatch and pass."""
    rows = check(simulate(model, PLANS[5], "cpu-2core").simulation)
    for stage in ("stage0", "stage1"):
        counts = Counter((b.kind, b.microbatch) for b in rows[f"{stage} compute"] if b.microbatch is not None)
        assert counts == {(kind, k): 1 for kind in (FORWARD, BACKWARD) for k in range(4)}


def test_transfers_of_two_microbatches_are_two_bars():
    """On a slow link they follow each other without a gap."""
    topology = load_cluster("cpu-2core", devices=8)
    program = parallel_transform_3d(mlp(8, 256, 64), 1, 1, 8, topology.devices[:8], 8, schedule="gpipe")
    rows = check(Simulator(CostModel(topology)).interpret(program))
    touching = 0
    for s in range(8):
        for stream in [f"send stage{n}" for n in (s - 1, s + 1)]:
            row = [b for b in rows.get(f"stage{s} {stream}", []) if b.microbatch is not None]
            assert [b.microbatch for b in row] == (list(range(8)) if row else [])
            touching += sum(a.start + a.duration == b.start for a, b in pairwise(row))
    assert touching


def test_rows_are_in_one_order_for_every_stage(model):
    plan = Plan(dp=2, tp=2, pp=2, microbatches=4)
    names = [name for name, _ in bars(simulate(model, plan, "dgx-a100").simulation)]
    streams = ["compute", "dp", "tp", "send stage{}", "recv stage{}"]
    assert names == [f"stage{s} {stream.format(1 - s)}" for s in range(2) for stream in streams]


def test_joining_microbatches_is_no_update():
    """The gradient of the data, of each microbatch, is put together at the end; no weights are updated here."""
    maker = FunctionMaker("layer")
    x, z, w = (maker.add_input_value(name, Tensor(Float32, (64, 64))) for name in "xzw")
    a = maker.add_op("MatMul", "a", [x, w])
    maker.add_op("Loss", "l", [a, z], {"N": 64})
    d = maker.add_op("LossGrad", "d", [a, z], {"N": 64})
    maker.add_op("MatMulGrad", "dx", [x, w, d])
    topology = load_cluster("dgx-a100", devices=2)
    program = parallel_transform_3d(maker.finalize(), 2, 1, 1, topology.devices[:2], 4)
    assert [op.op_type for op in program.ops].count("MPIAllgather") == 2
    rows = check(Simulator(CostModel(topology)).interpret(program))
    assert {b.kind for b in rows["stage0 compute"]} == {FORWARD, BACKWARD}
    assert {(b.kind, b.microbatch) for b in rows["stage0 compute"][-2:]} == {(FORWARD, None), (BACKWARD, None)}


def test_a_program_without_a_backward_pass_is_compute():
    rows = check(simulate(load(GPT, {"batch": 8}), Plan(tp=2), "cpu-2core").simulation)
    assert {b.kind for b in rows["stage0 compute"]} == {COMPUTE}
    assert {b.kind for name, row in rows.items() if not name.endswith("compute") for b in row} == {COLLECTIVE}


def test_a_backward_pass_written_by_hand_is_recognised_by_what_it_saves():
    topology = load_cluster("dgx-a100", devices=2)
    program = parallel_transform_3d(mlp(4, 32, 32), 1, 1, 2, topology.devices[:2], 4)
    rows = check(Simulator(CostModel(topology)).interpret(program))
    for stage in ("stage0", "stage1"):
        assert {b.kind for b in rows[f"{stage} compute"]} == {FORWARD, BACKWARD}


def test_a_trace_shows_the_same_memory(tmp_path: Path) -> None:
    """With collectives on streams of their own, which do not stretch the time of what computes."""
    model = load(Path(__file__).parents[2] / "examples" / "gpt2-tiny.onnx", {"batch": 8}, loss="cross-entropy")
    simulation = simulate(model, Plan(dp=2, tp=2, pp=2, microbatches=2), "dgx-a100").simulation
    simulation.to_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [(e["pid"], e["ts"], tuple(e["args"].values())) for e in events if e["ph"] == "C"]
    drawn = [
        (pid, pytest.approx(t * 1e6, abs=1e-3), tuple(size))
        for pid, (_, points) in zip(sorted({pid for pid, _, _ in shown}), live(simulation), strict=True)
        for t, size in points[:-1]  # the last one only ends the curve
    ]
    assert shown == drawn


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from([FORWARD, BACKWARD])), min_size=1))
def test_a_coarse_row_shows_what_takes_most_of_each_pixel(found: list[tuple[int, int, str]]) -> None:
    """Against brute force, on times that are whole numbers and pixels of 5."""
    row, end = [], 0
    for gap, duration, kind in found:
        row.append(Bar(kind, 0, float(end + gap), float(duration)))
        end += gap + duration
    ((_, drawn),) = coarse([("stage0 compute", row)], 0.5)
    assert drawn == row or len(row) * 0.5 > row[-1].start
    kinds: list[str | None] = [None] * (end + 5)
    for bar in row:
        kinds[int(bar.start) : int(bar.start + bar.duration)] = [bar.kind] * int(bar.duration)
    shown = coarse([("stage0 compute", row)], 5.0)
    if sum(bar.duration for bar in row) < 5:
        assert shown == []
        return
    if len(row) * 5 <= row[-1].start:
        assert shown == [("stage0 compute", row)]
        return
    assert all(a.start + a.duration <= b.start + 1e-9 for a, b in pairwise(shown[0][1]))
    for k in range(0, end, 5):
        inside = Counter(x for x in kinds[k : k + 5] if x is not None)
        here = [b for b in shown[0][1] if b.start <= k < b.start + b.duration]
        if inside.total() == 0:
            assert here == []
        else:
            (bar,) = here
            assert inside[bar.kind] == max(inside.values())
            assert bar.busy == round(8 * inside.total() / 5) / 8


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_highest_memory_of_each_pixel(found: list[tuple[int, int, int]]) -> None:
    """Against brute force, on times that are whole numbers and pixels of 5."""
    times = list(accumulate(gap for gap, _, _ in found))
    points = [(0.0, (1, 1)), *[(float(t), (a, b)) for t, (_, a, b) in zip(times, found, strict=True)]]
    drawn = highest(points, 5.0)
    assert drawn[-1] == points[-1]
    assert all(a < b for (a, _), (b, _) in pairwise(drawn))
    assert {size for _, size in drawn} <= {size for _, size in points}

    def at(curve: list[tuple[float, tuple[int, ...]]], t: float) -> tuple[int, ...]:
        return [size for begin, size in curve if begin <= t][-1]

    for k in range(0, times[-1], 5):
        inside = [size for t, size in points if k <= t < k + 5]
        most = max(sum(size) for size in [at([points[0], *[p for p in points if p[0] < k]], k), *inside])
        for t in range(k, min(k + 5, times[-1])):
            assert sum(at(drawn, t)) == most


def test_a_timeline_of_compute_alone(model) -> None:
    simulation = simulate(model, Plan(tp=2, pp=2, microbatches=2), "cpu-2core").simulation
    all_rows = bars(simulation)
    assert bars(simulation, compute_only=True) == [(name, row) for name, row in all_rows if name.endswith(" compute")]
    assert coarse(all_rows, 1e-15) == all_rows
