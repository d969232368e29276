"""Predicted and measured side by side: of made-up traces, of a prediction with itself, of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distir
from distir.api.comparison import Comparison, Row, compare, line_up
from distir.api.timings import PREDICTED, Process, Slice, TraceFile, aligned, read_trace
from distir.ir.errors import UsageError

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).parents[2]
PLANS = [
    distir.Plan(),
    distir.Plan(dp=2, microbatches=2),
    distir.Plan(tp=2, overlap=False),
    distir.Plan(dp=2, pp=2, microbatches=4),
    distir.Plan(pp=2, chunks=2, schedule="interleaved", microbatches=4),
]


def predicted(plan: distir.Plan, folder: Path) -> tuple[distir.Prediction, TraceFile]:
    model = distir.load(ROOT / "examples" / "gpt2-tiny.onnx", {"batch": 8}, loss="cross-entropy")
    prediction = distir.simulate(model, plan, "cpu-2core")
    prediction.save_trace(folder / PREDICTED)
    return prediction, read_trace(folder / PREDICTED)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_with_itself_all_is_equal(plan: distir.Plan, tmp_path: Path) -> None:
    _, trace = predicted(plan, tmp_path)
    c = line_up(trace, trace)
    rows = [*c.compute, *c.communication, *c.stages, *c.functions]
    assert {r.ratio for r in rows} == {1.0}
    assert {r.error for r in rows} == {0.0}
    assert c.predicted_step == c.measured_step
    assert [(s.name, s.compute) for s in c.predicted] == [(s.name, s.compute) for s in c.measured]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_shares_are_the_simulator_s_and_make_the_step(plan: distir.Plan, tmp_path: Path) -> None:
    prediction, trace = predicted(plan, tmp_path)
    c = line_up(trace, trace)
    stages = prediction.simulation.stages
    assert len(c.predicted) == len(stages)
    for share, stage in zip(c.predicted, stages, strict=True):
        want = (stage.compute, 0.0, stage.communication, stage.bubble)
        assert share[1:5] == pytest.approx(want, abs=2e-6)  # a trace has whole nanoseconds, and many slices
        assert sum(share[1:5]) == pytest.approx(share.step)
    devices = sum(s.devices for s in stages)
    mean = sum(s.compute * s.devices for s in stages) / devices
    assert sum(r.predicted for r in c.compute) == pytest.approx(mean, abs=2e-6)


def made(slices: list[Slice], ranks: int = 2, hosts: tuple[str, ...] = ("a", "a")) -> TraceFile:
    return TraceFile(slices, {k: Process(f"rank {k}", 1, hosts[k]) for k in range(ranks)})


def op(rank: int, begin: float, end: float, name: str = "MatMul", category: str = "compute", **args: Any) -> Slice:
    about = {"function": "f", "stage": "stage0", "result": "%y", "step": 1, **args}
    return Slice(rank, "dp" if category == "communication" else "compute", category, name, begin, end, about)


def step(rank: int, begin: float, end: float) -> Slice:
    return Slice(rank, "step", "step", "step 1", begin, end, {"step": 1})


def test_the_worst_comes_first_and_the_parts_make_the_step() -> None:
    want = made([op(r, 0, 1) for r in (0, 1)] + [op(r, 1, 3, "Add") for r in (0, 1)])
    got = made(
        [step(0, 10, 20), step(1, 10, 18)]
        + [op(0, 10, 15), op(0, 15, 16, "MPIAllreduce", "issue"), op(0, 16, 18, "Add"), op(0, 18, 19, "x", "wait")]
        + [op(1, 10, 12), op(1, 12, 15, "Add")]
    )
    c = line_up(want, got)
    assert c.compute == [Row("MatMul", 1, 1, 3.5), Row("Add", 1, 2, 2.5)]
    assert (c.predicted_step, c.measured_step) == (3, 9)
    (share,) = c.measured
    assert share[1:] == (6, 0.5, 0.5, 2, 9)
    assert c.functions == c.stages[:0] + [Row("f compute", 2, 3, 6)]
    assert c.stages == [Row("stage0 compute", 2, 3, 6)]
    text = str(c)
    assert text.index("MatMul") < text.index("Add")
    assert "predicted 3.000 s, measured 9.000 s (3.00 times as long)" in text
    found = c.to_json()
    assert found["compute"][0] == {
        "name": "MatMul", "count": 1, "predicted": 1, "measured": 3.5, "ratio": 3.5, "error": 2.5,
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == found
    assert "<table>" in c._repr_html_()


def test_the_quicker_half_of_the_steps_is_averaged() -> None:
    want = made([op(0, 0, 1)], 1)
    spans = [(1, 0, 3), (2, 10, 15), (3, 20, 30), (4, 40, 90)]
    whole = [step(0, a, b)._replace(args={"step": k}) for k, a, b in spans]
    c = line_up(want, made([*whole, *[op(0, a, b - 1, step=k) for k, a, b in spans]], 1))
    assert (c.recorded, c.steps, c.measured_step) == (4, 2, 4)
    assert c.compute == [Row("MatMul", 1, 1, 3)]
    assert "the 2 fastest of 4 recorded steps" in str(c)


def reduced(rank: int, issued: float, end: float, k: int = 0) -> Slice:
    about = {"ranks": [0, 1], "axis": "dp", "issued": issued * 1e6, "result": f"%r{k}"}
    return op(rank, issued, end, "MPIAllreduce", "communication", **about)


def test_communication_begins_when_all_have_issued_it() -> None:
    slices = [reduced(0, 1, 6), reduced(1, 4, 6.5), reduced(0, 5, 8, 1), reduced(1, 5, 8, 1)]
    want = [(0, 4, 6), (0, 6, 8), (1, 4, 6.5), (1, 6.5, 8)]
    assert sorted((s.process, s.begin, s.end) for s in aligned(made(slices)).slices) == want
    alone = [(0, 1, 6), (0, 6, 8), (1, 4, 6.5), (1, 6.5, 8)]  # the clocks of two hosts differ
    assert sorted((s.process, s.begin, s.end) for s in aligned(made(slices, hosts=("a", "b"))).slices) == alone


def test_transfers_begin_when_both_are_there_and_count_where_they_arrive() -> None:
    def end(rank: int, side: str, issued: float, done: float) -> Slice:
        about = {"side": side, "peer": 1 - rank, "message": 7, "issued": issued * 1e6}
        return op(rank, issued, done, "Send", "communication", **about)

    slices = [end(0, "send", 3, 3.1), end(1, "recv", 1, 5)]
    got = aligned(made(slices)).slices
    assert [(s.process, s.begin, s.end) for s in got] == [(1, 3, 5)]
    late = slices[1]._replace(begin=5, end=5.5, args={**slices[1].args, "late": True})
    got = aligned(made([*slices, late]))  # of a bundle, another member that came with the first
    assert [(s.process, s.begin, s.end) for s in got.slices] == [(1, 3, 5)]
    assert got.known == {slices[1].key: 1.0}
    assert aligned(made([slices[0], late])) == ([], {late.key: 0.0})


def test_only_what_is_known_of_communication_is_compared() -> None:
    want = made(
        [reduced(0, 0, 2)._replace(args={"result": "%r0", "function": "f", "stage": "stage0", "axis": "dp"})], 1
    )
    slices = [reduced(0, k, k + 3, 0) for k in (10, 20)]
    slices[1] = slices[1]._replace(args={**slices[1].args, "late": True})
    c = line_up(want, made([step(0, 9, 29), *slices], 1))
    assert c.communication == [Row("MPIAllreduce dp", 1, 1, 3)]
    assert "50% of communication is left out" in str(c)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*predicted\.json"):
        compare(tmp_path)
    predicted(distir.Plan(dp=2), tmp_path)
    with pytest.raises(UsageError, match=r"no trace of 2 ranks of 2, such as rank0\.json"):
        compare(tmp_path)
    for k in range(2):
        (tmp_path / f"rank{k}.json").write_text("[]")
    with pytest.raises(UsageError, match=r"rank0\.json is not a trace"):
        compare(tmp_path)
    with pytest.raises(UsageError, match="no step"):
        line_up(made([]), made([]))
    with pytest.raises(UsageError, match="is for 2 devices, the run was of 1 rank"):
        line_up(made([op(0, 0, 1)]), made([step(0, 0, 1)], 1))


# ---- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[distir.RunResult, Path]:
    folder = tmp_path_factory.mktemp("profile") / "new"
    model = distir.load(ROOT / "examples" / "gpt2-tiny.onnx", {"batch": 8}, loss="cross-entropy", optimizer="adamw")
    plan = distir.Plan(dp=2, pp=2, microbatches=2)
    return distir.run(model, plan, steps=3, profile=folder, timeout=300), folder


def test_a_run_and_its_prediction_are_lined_up(run: tuple[distir.RunResult, Path]) -> None:
    result, folder = run
    c = compare(folder)
    assert (c.ranks, c.recorded, c.steps) == (4, 2, 1)
    assert result.prediction is not None
    assert c.predicted_step == pytest.approx(result.prediction.step_seconds, abs=1e-8)
    assert 0 < c.measured_step <= 1.05 * min(result.seconds[1:])  # a mean over ranks; those are of the slowest
    for share in (*c.predicted, *c.measured):
        assert sum(share[1:5]) == pytest.approx(share.step)
        assert all(x >= 0 for x in share[1:])
    assert [s.name for s in c.measured] == ["stage0 (2 devices)", "stage1 (2 devices)"]
    assert {r.name for r in c.communication} == {"MPIAllreduce dp", "Send"}
    assert isinstance(distir.compare(folder), Comparison)


def test_every_op_that_is_predicted_is_measured_on_its_ranks(run: tuple[distir.RunResult, Path]) -> None:
    """As often, in the same function and stage; what is measured beyond that takes no time by the prediction."""
    _, folder = run
    want = read_trace(folder / PREDICTED)
    for rank in range(4):
        got = read_trace(folder / f"rank{rank}.json").slices
        (mine,) = {p for p in want.processes if want.processes[p].name.startswith(f"stage{rank // 2}")}
        predicted_ops = [s.key for s in want.slices if s.process == mine]
        counts = {key: predicted_ops.count(key) for key in set(predicted_ops)}
        ran = [s for s in got if s.category in ("compute", "communication") and s.args["step"] == 1]
        measured_ops = [s.key for s in ran]
        assert {key: measured_ops.count(key) for key in counts if key[0] != "Send"} == {
            key: n for key, n in counts.items() if key[0] != "Send"
        }
        assert {key for key in counts if key[0] == "Send"} <= set(measured_ops)  # a bundle: several tensors


def test_the_step_and_the_threads_of_a_rank(run: tuple[distir.RunResult, Path]) -> None:
    _, folder = run
    streams = {s.stream for s in read_trace(folder / "rank0.json").slices}
    assert streams == {"step", "compute", "dp", "send stage1", "recv stage1"}


def test_a_run_computes_the_same_bits_with_and_without_a_profile(tmp_path: Path) -> None:
    """Communication takes the same ways."""
    model = distir.load(ROOT / "examples" / "mlp.onnx", {"batch": 8}, loss="mse")
    plan = distir.Plan(dp=2, zero=3)
    plain, profiled = (distir.run(model, plan, steps=2, profile=p, timeout=300) for p in (None, tmp_path))
    assert plain.losses == profiled.losses
    assert all(np.array_equal(x, profiled.weights[name]) for name, x in plain.weights.items())
    assert {r.name for r in compare(tmp_path).communication} <= {
        f"{x} dp" for x in ("MPIAllgather", "MPIReduceScatter", "MPIAllreduce")
    }
