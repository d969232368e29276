"""distir under torchrun: `distir.run`, with a data iterator that waits for this competitor's turn.

Settings: `model`, the ONNX file; `plan`, keywords of `distir.Plan`; `mkl`: matrix products use torch's default library,
as for the peers, not the one that distir chooses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
from turns import Turns, arguments

import distir
from distir.api.data import Data
from distir.backends.tensors import products
from distir.ir.function import Value
from distir.transforms.differentiation.training import SGD

FOREVER = 1 << 30


class Waiting(Data):
    """The data of a step, when it may run."""

    def __init__(self, turns: Turns, work: Any, *given: Any) -> None:
        super().__init__(*given)
        self.turns, self.work = turns, work

    def step(self, step: int) -> dict[Value, np.ndarray]:
        arrays = self.work.data(self.turns.step())
        varying = [v for v in self.number if v in self.batch]
        return dict(zip(varying, arrays, strict=True))


def main() -> None:
    work, settings = arguments()
    if settings["mkl"]:
        products.prefers_onednn = lambda: False
    loss = "mse" if work.model == "mlp" else "cross-entropy"
    model = distir.load(settings["model"], {"batch": work.batch}, loss=loss, optimizer=SGD(work.lr))
    turns = Turns()
    data = Waiting(turns, work, model.function, model.initial())

    def on_step(step: int, seconds: float, outputs: dict[int, np.ndarray]) -> None:
        turns.report(seconds, float(outputs[0]))

    distir.run(model, distir.Plan(**settings["plan"]), steps=FOREVER, data=data, on_step=on_step, timeout=86_400.0)


if __name__ == "__main__":
    main()
