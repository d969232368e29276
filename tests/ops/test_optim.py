"""The optimizers against torch.optim, over several steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distir.executor.sequential import SequentialExecutor
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker
from distir.ir.type import Float64, Int64, Tensor

STEPS = 5
RNG = np.random.default_rng(0)
WEIGHT, GRADS = RNG.normal(size=(4, 3)), RNG.normal(size=(STEPS, 4, 3))


def expected(make: Any) -> list[np.ndarray]:
    w = torch.nn.Parameter(torch.tensor(WEIGHT))
    optimizer = make([w])
    seen = []
    for g in GRADS:
        w.grad = torch.tensor(g)
        optimizer.step()
        seen.append(w.detach().numpy().copy())
    return seen


def stepped(name: str, states: int, with_step: bool, **attributes: Any) -> list[np.ndarray]:
    maker = FunctionMaker("step")
    operands = [maker.add_input_value(f"x{k}", Tensor(Float64, (4, 3))) for k in range(2 + states)]
    if with_step:
        operands.append(maker.add_input_value("step", Tensor(Int64, ())))
    maker.emit(name, *operands, **attributes)
    function = maker.finalize()
    held, seen = [WEIGHT, *[np.zeros((4, 3))] * states], []
    for k, g in enumerate(GRADS, 1):
        held = SequentialExecutor().compute(function, [held[0], g, *held[1:], *([k] if with_step else [])])
        seen.append(held[0])
    return seen


SGD = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
]


@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd(options: dict[str, Any]):
    states = 1 if "momentum" in options else 0
    got = stepped("SGD", states, "dampening" in options, lr=0.1, **options)
    np.testing.assert_allclose(got, expected(lambda w: torch.optim.SGD(w, lr=0.1, **options)), rtol=1e-13)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3}], ids=str)
def test_adamw(options: dict[str, Any]):
    got = stepped("AdamW", 2, True, lr=0.05, **options)
    np.testing.assert_allclose(got, expected(lambda w: torch.optim.AdamW(w, lr=0.05, **options)), rtol=1e-13)


def test_operands_are_alike():
    maker = FunctionMaker()
    w, g = (maker.add_input_value("x", Tensor(Float64, s)) for s in [(4, 3), (1, 3)])
    with pytest.raises(IRTypeError, match=r"SGD: operand 1: expected shape \(4, 3\), got \(1, 3\)"):
        maker.emit("SGD", w, g, lr=0.1)
    with pytest.raises(IRTypeError, match="dampening needs 4 operands"):
        maker.emit("SGD", w, w, w, lr=0.1, momentum=0.9, dampening=0.1)
