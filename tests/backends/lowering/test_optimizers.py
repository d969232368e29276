"""Updates in float64 where kernels read a learning rate in float32, as on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distir.backends.lowering import optimizers
from distir.backends.lowering.engine import TorchRank, to_numpy
from distir.executor.reference.sequential import evaluate
from distir.ir.type import Float64
from tests.ops.samples import SAMPLES, Sample
from tests.ops.test_matrix import build, narrow

FUSED = {"SGD", "AdamW", "GroupedSGD", "GroupedAdamW"}
SCHEDULED = [(k, s) for k, s in enumerate(SAMPLES) if s.op in FUSED and s.attributes.get("scheduled")]


@pytest.mark.parametrize("sample", [s for _, s in SCHEDULED], ids=[f"{s.op}-{k}" for k, s in SCHEDULED])
def test_a_rate_in_float32_does_not_round_updates(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = optimizers._numbers
    rounded: list[bool] = []

    def as_on_a_gpu(settings: dict[str, Any], lr: float) -> dict[str, Any]:
        found = numbers(settings, lr)
        rounded.append(isinstance(found["lr"], torch.Tensor))
        return found | {"lr": found["lr"].float()} if rounded[-1] else found

    monkeypatch.setattr(optimizers, "_numbers", as_on_a_gpu)
    monkeypatch.setattr(optimizers, "_loses_rate", lambda rate, weights: isinstance(rate, torch.Tensor))
    narrowed = narrow(sample, Float64)
    function = build(narrowed)
    rank = TorchRank(function, 0, torch.device("cpu"))
    rank.load(dict(enumerate(narrowed.arrays())))
    (op,) = function.ops
    operands = [np.asarray(x, v.type.dtype.numpy) for x, v in zip(narrowed.arrays(), op.inputs, strict=True)]  # type: ignore[union-attr]
    want = evaluate(op, operands, None)
    got = rank.step()
    for k, x in enumerate(want if isinstance(want, tuple) else (want,)):
        np.testing.assert_allclose(to_numpy(got[k], Float64), x, rtol=1e-13, atol=1e-14)
    assert rounded
    assert not any(rounded)
