"""What ranks really take of memory is what the simulator says, for plans that split the state in different ways."""

from __future__ import annotations

from pathlib import Path

import pytest

import distir
from distir.api.model import Model
from examples import export

LAYERS, WIDTH, BATCH = 12, 2048, 64
"""192 MiB of weights; AdamW keeps as much twice: 576 MiB."""
WITHIN = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    file: Path = tmp_path_factory.mktemp("memory") / "mlp.onnx"
    export.export("mlp", file, layers=LAYERS, width=WIDTH)
    return distir.load(file, {"batch": BATCH}, loss="mse", optimizer="adamw")


PLANS = [
    distir.Plan(dp=2),
    distir.Plan(dp=2, zero=1),
    distir.Plan(dp=2, zero=2),
    distir.Plan(dp=2, zero=3),
    distir.Plan(dp=2, pp=2, microbatches=4, zero=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_growth_is_as_predicted(model: Model, plan: distir.Plan) -> None:
    result = distir.run(model, plan, steps=3)
    if None in result.memory:
        pytest.skip("this system does not count resident memory as Linux does")
    assert result.prediction is not None
    assert len(result.memory) == plan.size
    measured, predicted = max(n or 0 for n in result.memory), result.prediction.peak_memory
    assert predicted > 200 << 20
    assert abs(measured / predicted - 1) < WITHIN, (measured, predicted)
    assert any("memory of a rank" in line for line in result.lines())
