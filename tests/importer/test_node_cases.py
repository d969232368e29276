"""The cases of ONNX's backend test: those that are listed pass, all others are refused in one line, for a reason."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.importer.node_cases import (
    CRASHED,
    PASSED,
    RANDOM,
    REASONS,
    REFUSED,
    cases_of,
    listed,
    modules,
    outcome,
    reason,
)

VERSION, LISTED = listed()
LEAST = 1250
"""The number of cases that have to pass."""
LONG = ("attention", "averagepool", "lppool", "maxpool")
"""Modules of many cases, or of numbers that ONNX computes in loops over elements."""


def test_there_are_enough() -> None:
    assert sum(map(len, LISTED.values())) >= LEAST


@pytest.mark.parametrize("module", [pytest.param(m, marks=pytest.mark.slow) if m in LONG else m for m in modules()])
def test_cases(module: str, tmp_path: Path) -> None:
    passing, cases = LISTED.get(module, {}), {case.name: case for case in cases_of(module)}
    if onnx.__version__ == VERSION:
        assert passing.keys() <= cases.keys()
    for name, case in cases.items():
        ways = [passing[name]] if name in passing else [False, True]
        for constants in ways:
            found = outcome(case, constants, tmp_path)
            if name in passing:
                assert found.kind == PASSED, f"{name}: {found.message}"
            else:
                assert found.kind != CRASHED, f"{name}: {found.message}"
                assert name in RANDOM or found.kind in (PASSED, REFUSED), f"{name}: {found.message}"
                assert "\n" not in found.message
            if name not in passing and constants and found.kind == REFUSED and onnx.__version__ == VERSION:
                assert reason(found.message) in REASONS.values(), f"{name}: {found.message}"
