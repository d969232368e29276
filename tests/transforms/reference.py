"""The same model in PyTorch and as an imported Function, with the same weights and data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from distir.api.model import load
from distir.ir import Function, Value, parse, pformat, same, verify
from distir.ops.rules import shape_of
from examples.export import build, export

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 4


class Pair(NamedTuple):
    """`feeds` has an array for every input of `function`; `inputs` are the module's, by name."""

    function: Function
    feeds: dict[Value, np.ndarray]
    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]

    def weights(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.module.named_parameters())


def pair(name: str, path: Path | None = None, ids_only: bool = False, **sizes: int) -> Pair:
    """An example model as it is loaded, exported to `path` (default: the file in examples/)."""
    file = EXAMPLES / f"{name}.onnx" if path is None else export(name, path, ids_only, **sizes)
    module, inputs = build(name, batch=BATCH, ids_only=ids_only, **sizes)
    model = load(file, {"batch": BATCH})
    function, arrays = model.function, model.arrays
    feeds = {v: arrays[v] if v in arrays else inputs[v.name].numpy() for v in function.inputs}
    return Pair(function, feeds, module, inputs)


def sound(function: Function) -> Function:
    """The function, verified, and its text read back."""
    verify(function)
    assert same(parse(pformat(function)), function)
    return function


def labels_for(function: Function, ignored: bool) -> np.ndarray:
    """Random labels for the first output; with `ignored` many are -100, the more the later in the batch."""
    rng = np.random.default_rng(0)
    *shape, classes = shape_of(function.outputs[0])
    labels = rng.integers(0, classes, shape)
    if ignored:
        share = np.linspace(0.2, 0.7, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        labels[rng.random(shape) < share] = -100
    return labels


def norms(got: Mapping[str, Any], want: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """For each name the norm of the difference, in float64, and its maximum."""
    largest = max(float(np.linalg.norm(w)) for w in want.values())
    rows: dict[str, tuple[float, float]] = {}
    for name, w in want.items():
        w = np.asarray(w, np.float64)
        error = float(np.linalg.norm(np.asarray(got[name], np.float64) - w))
        rows[name] = error, 1e-5 * float(np.linalg.norm(w)) + 1e-7 * largest
    return rows
