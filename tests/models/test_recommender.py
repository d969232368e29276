"""A recommender against the same in PyTorch: its loss and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import parse, pformat, same, verify
from distir.ir.type import Float64
from distir.models.recommender import Recommender, recommender
from distir.ops.rules import shape_of
from distir.transforms.differentiation.training import training_step


@pytest.mark.parametrize("pooling", [0, 3])
def test_loss_and_gradients_are_those_of_torch(pooling: int) -> None:
    sizes = Recommender(3, 7, 4, dense=5, bottom="6-4", top="8-6-1", batch=9, pooling=pooling)
    step = training_step(recommender(sizes, Float64), "loss", "sgd", gradients=True)
    verify(step)
    assert same(parse(pformat(step)), step)
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {v.name: rng.standard_normal(shape_of(v)) for v in step.inputs}
    given["indices"] = rng.integers(0, 7, given["indices"].shape)
    given["labels"] = rng.integers(0, 2, 9)
    loss, *rest = SequentialExecutor().compute(step, [given[v.name] for v in step.inputs])

    names = [v.name for v in step.inputs if v.kind == "parameter"]
    w = {name: torch.tensor(given[name], requires_grad=True) for name in names}
    index = torch.tensor(given["indices"])
    x = mlp(w, "bottom", 2, torch.tensor(given["dense"])).relu()
    features = torch.stack([w["tables"][t][index[:, t]] for t in range(3)], 1)
    rows = [x, *(features.sum(2) if pooling else features).unbind(1)]
    pairs = [(a * b).sum(-1, keepdim=True) for i, a in enumerate(rows) for b in rows[:i]]
    logits = mlp(w, "top", 3, torch.cat([x, *pairs], 1))[:, 0]
    want = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(given["labels"]).double())
    np.testing.assert_allclose(loss, want.detach().numpy(), rtol=1e-12)
    gradients = torch.autograd.grad(want, list(w.values()))
    for name, a, b in zip(names, itertools.islice(rest, len(names)), gradients, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-10, atol=1e-12, err_msg=name)


def mlp(w: dict[str, torch.Tensor], name: str, layers: int, x: torch.Tensor) -> torch.Tensor:
    for k in range(layers):
        x = (x.relu() if k else x) @ w[f"{name}.{k}.weight"] + w[f"{name}.{k}.bias"]
    return x
