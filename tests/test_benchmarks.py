"""Every benchmark runs, once and small, and prints what it measured; how quick it is, is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FLAGS: dict[str, list[str]] = {
    "gpt2_plan": ["--model", str(BENCHMARKS.parent / "examples" / "gpt2-tiny.onnx")],
    "scale": ["--dp", "1", "2", "--microbatches", "16", "--no-plans"],
}
NAMES = sorted(p.stem for p in BENCHMARKS.glob("*.py") if p.stem != "laps")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--runs", "1", *FLAGS.get(name, [])]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    assert any(c.isdigit() for c in text)
    found = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True, timeout=600).stdout
    assert json.loads(found)


@pytest.mark.parametrize("name", NAMES)
def test_runs_at_least_once(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--runs", "0"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "--runs" in done.stderr
    assert "Traceback" not in done.stderr
