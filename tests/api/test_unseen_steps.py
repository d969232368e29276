"""Published steps that no figure is fitted to: predictions of each source stay as near as `docs/accuracy.md` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from distir.api.accuracy import accuracy
from distir.api.cases import read_rows

UNSEEN = Path(__file__).parents[2] / "benchmarks" / "unseen.csv"
MEAN_ERROR = {
    "nemo-h100": 0.07,
    "nemo-gb200": 0.07,
    "composer-h100": 0.06,
    "composer-a100-80gb": 0.06,
    "composer-a100-40gb": 0.08,
    "torchtitan-128": 0.06,
    "megatron-ci": 0.07,
    "megatron-ci-small": 0.25,
    "nemo-h100-fp8": 0.08,
    "nemo-h100-long": 0.13,
    "nemo-b200-long": 0.07,
    "nemo-gb200-fp8": 0.08,
    "nemo-b200-fp8": 0.08,
    "mlperf-gpt3": 0.09,
    "mlperf-405b": 0.04,
    "mlperf-8b": 0.13,
    "simumax-b200": 0.06,
    "simumax-b200-cp": 0.12,
    "torchtitan-h100": 0.14,
    "torchtitan-h200": 0.1,
    "torchtitan-a100": 0.06,
    "primus-mi300x": 0.09,
}
"""The most that may be."""
MEMORY_ERROR = {
    "torchtitan-128": 0.04,
    "megatron-ci": 0.04,
    "megatron-ci-small": 0.1,
    "simumax-b200": 0.04,
    "simumax-b200-cp": 0.06,
    "torchtitan-h100": 0.07,
    "torchtitan-h200": 0.12,
}
MANY = 24
"""Of sources of more rows only some are predicted here."""


def test_the_file_names_its_sources() -> None:
    rows = read_rows(UNSEEN)
    assert {row.source for row in rows} == MEAN_ERROR.keys()
    assert all(row.reason is None for row in rows)
    assert len({row.id for row in rows}) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("source", MEAN_ERROR)
def test_predictions_of_steps_that_nothing_is_fitted_to(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distir.api.accuracy.host_cores", lambda: 1)  # tests run beside each other, one on each
    rows = [row for row in read_rows(UNSEEN) if row.source == source]
    lines = UNSEEN.read_text().splitlines()
    header = next(line for line in lines if not line.startswith("#"))
    file = tmp_path / "some.csv"
    file.write_text("\n".join([header, *[lines[row.line - 1] for row in rows[:: 1 + len(rows) // MANY]]]))
    found = accuracy(file, [source])
    assert all(scored.predicted is not None for scored in found.rows)
    error = found.sources[source].mean_absolute_error
    assert error is not None
    assert error <= MEAN_ERROR[source]
    memory = found.sources[source].memory_error
    assert (memory is None) == (source not in MEMORY_ERROR)
    assert memory is None or memory <= MEMORY_ERROR[source]
