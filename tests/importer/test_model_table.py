"""The table of models in `docs/models.md` says what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importer.model_table import EXPORTS, FORWARD, GLOO, GRADIENTS, PAGE, PLANS, measure, read, table, with_table
from tests.importer.published_models import CASES


def test_the_page_shows_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, table(read())) == page


@pytest.mark.parametrize("name", CASES)
def test_every_model_has_a_row_for_each_export(name: str) -> None:
    """It is correct, or it is refused, and the row says why."""
    rows = read()[name]
    assert set(rows) == set(EXPORTS.values())
    for row in rows.values():
        if "refused" in row:
            assert row["refused"]
            continue
        assert row["forward"] < FORWARD
        assert row["gradients"]["error"] < GRADIENTS
        assert row["gradients"]["compared"] > 0
        assert set(row["numpy"]) == set(PLANS)
        assert not any(row["numpy"].values())
        assert set(row.get("gloo", {})) <= set(GLOO)
        assert not any(row.get("gloo", {}).values())


@pytest.mark.parametrize(
    ("name", "optimize"),
    [
        ("MLP", True),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in [("3-D CNN", True), ("GRU", True), ("BERT", True)]],
    ],
)
def test_a_row_measured_again(name: str, optimize: bool, tmp_path: Path) -> None:
    row = measure(name, optimize, False, tmp_path / "m.onnx")
    kept = read()[name][EXPORTS[optimize]]
    assert {k: row[k] for k in ("parameters", "numpy")} == {k: kept[k] for k in ("parameters", "numpy")}
    assert row["gradients"]["compared"] == kept["gradients"]["compared"]
    assert row["forward"] < FORWARD
    assert row["gradients"]["error"] < GRADIENTS
    assert row["tp_flops"] == pytest.approx(kept["tp_flops"], abs=1e-6)
