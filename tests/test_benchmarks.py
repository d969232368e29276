"""Every benchmark runs, once and small, and prints what it measured; how quick it is, is not asked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.backends.mpi import SETTINGS, needs_mpi

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FLAGS: dict[str, list[str]] = {
    "accuracy_folds": ["--small"],
    "first_step": ["--model", str(BENCHMARKS.parent / "examples" / "gpt2-tiny.onnx")],
    "gpu_prediction": ["--small"],
    "gpt2_plan": ["--model", str(BENCHMARKS.parent / "examples" / "gpt2-tiny.onnx")],
    "large_file": ["--model", str(BENCHMARKS.parent / "examples" / "gpt2-tiny.onnx"), "--batch", "128"],
    "plan": ["--small"],
    "plan_regret": ["--small", "--cluster", "cpu-2core", "--vary", "dp,microbatch"],
    "prediction": ["--small"],
    "proxies": ["--only", "dlrm", "plan", "2", "--iterations", "2"],
    "scale": ["--dp", "1", "2", "--microbatches", "16", "--layers", "8", "--no-plans"],
}
NAMES = sorted(p.stem for p in BENCHMARKS.glob("*.py") if p.stem != "laps")


def measured(name: str, *flags: str) -> str:
    """What a benchmark prints."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--runs", "1", *FLAGS.get(name, []), *flags]
    env = {**os.environ, **(SETTINGS if name == "proxies" else {})}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env=env).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_mpi) if n == "proxies" else n for n in NAMES if n != "execution"]
)
def test_runs(name: str, tmp_path: Path) -> None:
    if name == "collective_folds" and not (BENCHMARKS.parents[1] / "shared").exists():
        pytest.skip("no measurements: ../shared is absent")
    file = tmp_path / "found.json"
    text = measured(name, "--json", str(file))
    assert any(c.isdigit() for c in text)
    assert json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("words", [["mlp", "ddp"], ["mlp", "fsdp"], ["mlp", "pipeline"], ["model-parallel"]])
def test_execution(words: list[str], tmp_path: Path) -> None:
    only = ["--small", "--seconds", "0.1", "--only", *words, "--json"]
    if words == ["mlp", "fsdp"]:
        found = json.loads(measured("execution", *only))
    else:
        text = measured("execution", *only, str(tmp_path / "found.json"))
        found = json.loads((tmp_path / "found.json").read_text())
        assert len(text.splitlines()) > len(found["results"])
    for row in found["results"]:
        assert set(words) <= set(row["words"])
        assert row["ratio"] == pytest.approx(row["peer_ms"][0] / row["ours_ms"][0])
    for losses in found["losses"].values():
        for team in losses.values():
            assert team[-1] < team[0]  # it trains


def test_figures_are_fitted_without_what_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row that takes twice as long as predicted with the others' figures."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import accuracy_folds as folds  # pyright: ignore[reportMissingImports]

    given = folds.read_rows(folds.EXAMPLE)[:2]
    rows = folds.Rows([*given, given[1]._replace(measured_seconds=9.0, source="slow")], folds.FIGURES[:1])
    every = rows.fitted(folds.np.ones(3, bool))[0]
    first = rows.fitted(folds.np.array([True, True, False]))[0]
    assert abs(rows.error(1, first)) < abs(rows.error(1, every)) + 1e-9
    held = rows.held_out(lambda k: rows.sources[k])
    assert held[2] == pytest.approx(folds.math.expm1(rows.error(2, first)))
    assert rows.held_out(lambda k: 0) == [None] * 3  # no row is left
    assert folds.mean_and_worst([0.1, None, -0.3]) == pytest.approx((0.2, 0.3))


def test_different_losses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import execution  # pyright: ignore[reportMissingImports]

    def team(name: str, *losses: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, losses=list(losses))

    ours, same, other = team("ours", 2.0, 1.5), team("same", 2.0, 1.50001), team("other", 2.0, 1.51)
    assert execution.same_losses([ours, same]) == {"ours": [2.0, 1.5], "same": [2.0, 1.50001]}
    with pytest.raises(SystemExit, match="step 1: ours has the loss"):
        execution.same_losses([ours, same, other])
    with pytest.raises(SystemExit, match="step 0"):
        execution.same_losses([ours, team("diverged", float("nan"), 1.5)])


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_mpi) if n == "proxies" else n for n in NAMES])
def test_runs_at_least_once(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--runs", "0"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "--runs" in done.stderr
    assert "Traceback" not in done.stderr


def test_pairs_that_runs_measure_in_one_order() -> None:
    """Of three plans the first and the last are measured in the same order twice, and predicted so; of the others one
    pair is, and is predicted the other way."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from prediction import Result, settled  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.remove(str(BENCHMARKS))

    times = {"a": (1.0, [1.0, 1.2]), "b": (4.0, [2.0, 1.1]), "c": (3.0, [3.0, 3.5])}
    results = [Result("m", name, 4, predicted, 0.0, 0.0, measured) for name, (predicted, measured) in times.items()]
    assert settled(results) == (0.0, 2)
    assert settled([results[0], results[2]]) == (1.0, 1)
    assert settled(results[:2]) == (1.0, 0)
