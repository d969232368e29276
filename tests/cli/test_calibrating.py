"""The command calibrate: its flags and errors, and how its results are printed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from distir.api.calibrate import Calibration
from distir.api.calibration_fit import Figures, Links
from distir.cli import calibrating, main
from distir.ir.topology import OpSpeed

FIGURES = Figures("cpu", 2, 8e9, OpSpeed(1e-6, math.inf, 1e10), {}, {}, Links(0, 1e9, 0, 0, 1e9), 1e-5, 1e-5)
ROWS = [("figure", "value", "mean error", "worst", "measurements"), ("other ops", "1.0 us, 10 GB/s", "3%", "9%", "12")]


def measured(device: str, out: str | None, on_phase: object) -> Calibration:
    return Calibration(FIGURES, list(ROWS), "", out)


def test_prints_figures_and_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(calibrating, "measure", measured)
    assert main(["calibrate", "--out", "mine.toml"]) == 0
    out = capsys.readouterr().out
    assert "other ops  1.0 us, 10 GB/s" in out
    assert out.endswith("written to mine.toml\n")
    assert main(["calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"] == [dict(zip(*ROWS, strict=True))]
    assert found["file"] is None


@pytest.mark.parametrize(
    ("ratios", "noted"), [((0.78, 1.29), False), ((0.78, 1.31), True), ((0.76, 1.2), True), ((1.35, 1.4), True)]
)
def test_steps_far_from_what_is_predicted_are_noted(ratios: tuple[float, ...], noted: bool) -> None:
    found = Calibration(replace(FIGURES, ratios={1: (1.0,), 2: ratios}), list(ROWS), "", "mine.toml")
    text = f"steps on 2 ranks took {min(ratios):.2f} to {max(ratios):.2f} times what these figures predict"
    assert [text in x for x in found.to_json()["notes"]] == [True] * noted
    assert (f"note: {text}" in str(found)) == noted
    assert str(found).endswith("\nwritten to mine.toml")


def test_a_bad_file_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--out", str(tmp_path / "mine.txt")]) == 2
    assert "hint: --out mine.toml" in capsys.readouterr().err
    assert main(["calibrate", "--device", "tpu"]) == 2
