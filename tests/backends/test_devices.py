"""Programs on a device other than the CPU, as far as that can be tried without one.

Tensors on torch's "meta" device have no data. So whatever a rank makes on the CPU by mistake meets them and is refused,
and so is whatever looks at data, which on a GPU would wait for it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import distir
from distir.api.data import Data
from distir.backends.torch import TorchRank
from distir.transforms.training import Optimizer
from tests.ops.samples import SAMPLES, Sample
from tests.ops.test_matrix import build

pytestmark = pytest.mark.usefixtures("_sgd")


@pytest.fixture
def _sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no fused SGD on its meta device."""
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **settings: None)


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.op}-{i}" for i, s in enumerate(SAMPLES)])
def test_every_op_stays_on_its_device(sample: Sample) -> None:
    rank = TorchRank(build(sample), 0, "meta")
    rank.load({k: np.zeros(o.shape, o.dtype.numpy) for k, o in enumerate(sample.operands)})
    assert {x.device.type for x in rank.step().values()} == {"meta"}


@pytest.mark.parametrize(
    ("name", "loss", "optimizer", "dtype"),
    [("gpt2-tiny", "cross-entropy", "adamw", "bfloat16"), ("mlp", "mse", distir.SGD(momentum=0.9), None)],
)
def test_a_step_never_waits_for_its_device(name: str, loss: str, optimizer: str | Optimizer, dtype: str | None) -> None:
    model = distir.load(EXAMPLES / f"{name}.onnx", {"batch": 8}, loss=loss, optimizer=optimizer, dtype=dtype)
    program = distir.distribute(model, distir.Plan(microbatches=2))
    arrays = model.initial()
    data = Data(model.function, arrays)
    given = arrays | data.fixed() | data.step(0)
    rank = TorchRank(program, 0, "meta")
    rank.load({k: given[v] for k, v in enumerate(model.function.inputs)})
    for _ in range(2):
        assert {x.device.type for x in rank.step().values()} == {"meta"}
