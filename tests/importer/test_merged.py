"""Parameters that torch's exporter has merged, because they were equal when they were new, are parted again."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import distir
from distir.api.model import Model, load
from distir.importer.marks import lost
from distir.importer.save import save_onnx
from distir.ir.errors import ModelWarning
from tests.importer.model_table import forward_error, gradients_error
from tests.importer.published_models import Case, exported

WIDTH, WORDS = 16, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Blocks between an embedding and a head with the same weight; norms and biases are new: ones and zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        for block in self.blocks:
            nn.init.zeros_(block.up.bias)  # type: ignore[arg-type, union-attr]
            nn.init.zeros_(block.down.bias)  # type: ignore[arg-type, union-attr]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    return Case(Tied(), {"input_ids": torch.randint(WORDS, (4, 6))})


@pytest.fixture(scope="module")
def path(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(case.module, case.inputs, tmp_path_factory.mktemp("merged") / "m.onnx")


def opened(path: Path, **options: str) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        return load(path, {"batch": 4}, **options)  # type: ignore[arg-type]


def test_every_layer_has_its_own(case: Case, path: Path) -> None:
    """What the exporter merged is parted, under its names; what the module ties stays tied. Results equal
    onnxruntime's, gradients autograd's."""
    names = {name for name, _ in case.module.named_parameters()}
    assert len(lost(onnx.load(path).graph)) > 6
    model = opened(path)
    trained = {v.name for v in model.function.inputs if v.kind == "parameter"}
    assert len(trained) == len(names)
    assert {n for n, p in case.module.named_parameters() if p.ndim == 1} <= trained
    ids = {name: x.numpy() for name, x in case.inputs.items()}
    data = {**ids, "labels": np.random.default_rng(0).integers(0, WORDS, (4, 6))}
    assert forward_error(case, model, path, data) < 1e-5
    found = gradients_error(case, opened(path, dtype="float64"), data)
    assert found.compared == found.of == len(names)
    assert found.error < 1e-6


def test_layers_are_split(path: Path) -> None:
    done = distir.run(
        opened(path, loss="cross-entropy", dtype="float64"), distir.Plan(tp=2), steps=1, backend="numpy", check=True
    )
    assert done.prediction is not None
    split = done.prediction.summary.split
    assert split is not None
    assert split.flops > 0.95


def test_trained_weights_are_saved(case: Case, path: Path, tmp_path: Path) -> None:
    """The file that is written has the parameters apart: onnxruntime sees each one's new numbers."""
    names = [n for n, p in case.module.named_parameters() if p.ndim == 1]
    rng = np.random.default_rng(0)
    new = {n: rng.standard_normal(p.shape).astype(np.float32) for n, p in case.module.named_parameters() if n in names}
    out = save_onnx(path, new, tmp_path / "new.onnx")
    with torch.no_grad():
        for n, x in new.items():
            case.module.get_parameter(n).copy_(torch.as_tensor(x))
        want = case.module.float()(**case.inputs).numpy()
    got = onnxruntime.InferenceSession(out).run(None, {k: x.numpy() for k, x in case.inputs.items()})[0]
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-4)
    assert not set(names) & set(lost(onnx.load(out).graph))
