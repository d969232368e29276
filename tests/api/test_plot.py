"""The two figures of training runs show what their metrics say, predicted beside measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import distir
from distir.api.metrics import Metrics, read_metrics
from distir.api.plot import plot, training_figure
from distir.api.scaling import efficiency, rows, to_json, weak_scaling
from distir.ir.errors import UsageError
from tests.api.test_batches import epoch, small


@pytest.fixture
def runs() -> list[Metrics]:
    """1 rank with batch 8, 2 with batch 16, 16 steps an epoch; 64 tokens a batch of 8."""
    found = []
    for ranks, times in ((1, [2.0]), (2, [2.0, 3.0])):
        prediction = distir.simulate(small(8 * ranks), distir.Plan(dp=ranks), "cpu-2core")
        metrics = Metrics(prediction, 16)
        metrics.add(epoch(0, [9.0] * ranks, [1.0] * ranks, 16), [2.0])
        metrics.add(epoch(1, times, [1.0] * ranks, 16), [1.0])
        found.append(metrics)
    return found


def test_both_panels(runs: list[Metrics]):
    time, rate = training_figure([run.to_json() for run in runs]).numbers()
    assert time["y"] == "s, mean over ranks and epochs"
    assert time["bars"]["measured"] == pytest.approx([2.0, 2.5])
    assert time["bars"]["predicted"] == pytest.approx([run.prediction.step_seconds * 16 for run in runs])
    assert rate["y"] == "tokens/s, sum over ranks"
    assert rate["bars"]["measured"] == pytest.approx([16 * 64 / 2.0, 16 * 64 / 2.0 + 16 * 64 / 3.0])
    assert rate["bars"]["predicted"] == pytest.approx([run.prediction.tokens_per_second for run in runs])


def test_labels_tell_runs_apart(runs: list[Metrics]):
    a, b = (run.to_json() for run in runs)
    piped = {**b, "plan": {**b["plan"], "dp": 1, "pp": 2, "microbatches": 4}}

    def labels(*found: dict) -> list[str]:
        return [x.get_text().replace("\n", ", ") for x in training_figure(found).axes[0].get_xticklabels()]

    assert labels(a, b) == ["1 rank, batch 8", "2 ranks, batch 16"]
    alike = ["2 ranks, batch 16, dp 2 tp 1 pp 1 mb 1", "2 ranks, batch 16, dp 1 tp 1 pp 2 mb 4"]
    assert labels(a, b, piped) == ["1 rank, batch 8", *alike]
    assert labels(b, {**b, "model": "other"})[1].endswith("mb 1, other")


def test_efficiency_is_a_share_of_the_first(runs: list[Metrics]):
    (_, first), (_, second) = [(r.measured, r) for r in runs]
    measured = efficiency([first, second], lambda r: r.measured.tokens_per_second)  # type: ignore[union-attr,arg-type]
    assert measured == pytest.approx([1.0, (1 + 2 / 3) / 2])
    found = to_json(runs)["runs"]
    assert [run["efficiency"] for run in found] == pytest.approx([1.0, 5 / 6])
    assert found[0]["predicted_efficiency"] == 1.0
    table = rows(runs)
    assert [row[:3] for row in table] == [("1 rank", "8", "2.000 s"), ("2 ranks", "16", "2.500 s")]
    assert [row[6] for row in table] == ["100%", "83%"]
    assert to_json([]) == {"runs": []}


@pytest.mark.parametrize("kind", ["pdf", "png", "svg"])
def test_files(runs: list[Metrics], tmp_path: Path, kind: str):
    for k, run in enumerate(runs):
        run.save(tmp_path / f"{k}.json")
    out = tmp_path / f"figure.{kind}"
    plot([tmp_path / "0.json", tmp_path / "1.json"], out)
    start = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}[kind]
    assert out.read_bytes().startswith(start)


def test_what_cannot_be_drawn(runs: list[Metrics], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "m.json"
    runs[0].save(file)
    for name, words in (
        ("figure.jpg", r"\.pdf, \.png, \.svg"),
        ("figure", r"\.pdf"),
        ("no/figure.pdf", "cannot write"),
    ):
        with pytest.raises(UsageError, match=words):
            plot([file], tmp_path / name)
    with pytest.raises(UsageError, match="cannot read"):
        plot([tmp_path / "missing.json"], tmp_path / "figure.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "distir.viz.figure", raising=False)
    with pytest.raises(UsageError, match=r"matplotlib.*pip install 'distir\[viz\]'"):
        plot([file], tmp_path / "figure.pdf")
    assert not (tmp_path / "figure.pdf").exists()


def test_weak_scaling_grows_the_batch(tmp_path: Path):
    seen: list[tuple[int, int]] = []

    def on_run(runs: list[Metrics]) -> None:
        seen.append((len(runs), runs[-1].prediction.summary.batch))

    file = tmp_path / "scaling.json"
    runs = weak_scaling(small, [1, 2, 4], 4, metrics=file, on_run=on_run, epochs=2, steps=2, backend="numpy")
    assert seen == [(1, 4), (2, 8), (3, 16)]
    assert [run.prediction.summary.plan.dp for run in runs] == [1, 2, 4]
    assert [run["batch"] for run in read_metrics(file)] == [4, 8, 16]


@pytest.mark.parametrize("ranks", [[], [0], [1, 1]])
def test_ranks_that_are_none(ranks: list[int]):
    with pytest.raises(UsageError, match="distinct numbers of ranks"):
        weak_scaling(small, ranks, 4)


def test_scaling_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without torchrun"):
        weak_scaling(small, [1, 2], 4)
