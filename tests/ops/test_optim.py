"""The optimizers against torch.optim, over several steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distir.backends.lowering import optimizers
from distir.backends.lowering.engine import to_numpy, to_torch
from distir.backends.tensors.torch_namespace import TorchNamespace
from distir.executor.reference.numpy_namespace import NUMPY
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.errors import IRTypeError
from distir.ir.function import FunctionMaker
from distir.ir.spec import lookup
from distir.ir.type import BFloat16, DType, Float16, Float64, Int64, Tensor

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
    values, seen = [WEIGHT, *[np.zeros((4, 3))] * states], []
    for k, g in enumerate(GRADS, 1):
        values = SequentialExecutor().compute(function, [values[0], g, *values[1:], *([k] if with_step else [])])
        seen.append(values[0])
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


def in_float64(name: str, w: Any, g: Any, states: list[Any], step: int, settings: dict[str, Any]) -> list[np.ndarray]:
    """A step as the papers have it, in float64: the next weight and states."""
    w, g, *states = (np.asarray(x).astype(np.float64) for x in (w, g, *states))
    lr, decay = settings["lr"], settings.get("weight_decay", 0.0)
    if name == "AdamW":
        b1, b2, eps = 0.9, 0.999, 1e-8
        m, v = b1 * states[0] + (1 - b1) * g, b2 * states[1] + (1 - b2) * g**2
        return [w * (1 - lr * decay) - lr * m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + eps), m, v]
    g = g + decay * w
    if not states:
        return [w - lr * g]
    m = settings["momentum"] * states[0] + g
    return [w - lr * (g + settings["momentum"] * m if settings.get("nesterov") else m), m]


HALVES = [
    ("SGD", 0, {"lr": 3e-3, "weight_decay": 0.1}),
    ("SGD", 1, {"lr": 3e-3, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", 1, {"lr": 3e-3, "momentum": 0.9, "nesterov": True}),
    ("AdamW", 2, {"lr": 3e-3, "weight_decay": 0.1}),
]


def steps_by(how: str, name: str, settings: dict[str, Any], dtype: DType, operands: list[np.ndarray], step: int) -> Any:
    """The next weight and states, by numpy, by torch, or by torch's fused kernels."""
    counted = name == "AdamW"
    if how == "numpy":
        got = lookup(name).eval(NUMPY, *operands, *([np.int64(step)] if counted else []), **settings)  # type: ignore[misc]
        return list(got) if isinstance(got, tuple) else [got]
    tensors = [to_torch(x, dtype, torch.device("cpu")) for x in operands]
    number = torch.tensor(step)
    if how == "torch":
        got = lookup(name).eval(TorchNamespace(), *tensors, *([number] if counted else []), **settings)  # type: ignore[misc]
        got = list(got) if isinstance(got, tuple) else [got]
    else:
        w, g, *states = tensors
        kernel = optimizers.adamw if counted else optimizers.sgd
        kernel([g], [w], *[[x] for x in states], **settings, **({"step": number} if counted else {}))
        got = [w, *states]
    assert all(x.dtype == tensors[0].dtype for x in got)
    return [to_numpy(x, dtype) for x in got]


@pytest.mark.parametrize("how", ["numpy", "torch", "fused"])
@pytest.mark.parametrize("dtype", [Float16, BFloat16], ids=str)
@pytest.mark.parametrize(("name", "states", "settings"), HALVES, ids=str)
def test_in_16_bits_a_step_is_rounded_once(name: str, states: int, settings: Any, dtype: DType, how: str) -> None:
    """Each element of each step is within half a unit in the last place of the step in float64."""
    rng = np.random.default_rng(1)
    half = dtype.numpy
    eps, least = (2.0**-11, 2.0**-25) if dtype is Float16 else (2.0**-8, 2.0**-133)  # half of one, and of the least
    values = [x.astype(half) for x in [rng.normal(size=(64, 5)), *[np.zeros((64, 5))] * states]]
    for step in range(1, 6):
        g = (rng.normal(size=(64, 5)) * 10.0 ** rng.uniform(-4, 1, (64, 5))).astype(half)
        g[0] = 0
        got = steps_by(how, name, settings, dtype, [values[0], g, *values[1:]], step)
        want = in_float64(name, values[0], g, values[1:], step, settings)
        for x, y in zip(got, want, strict=True):
            assert x.dtype == half
            error = np.abs(np.asarray(x).astype(np.float64) - y)
            assert np.all(error <= 1.01 * eps * np.abs(y) + least + 1e-6 * np.abs(np.asarray(values[0], np.float64)))
        values = [np.asarray(x) for x in got]


def test_float16_trains_under_adamw_where_gradients_vanish() -> None:
    """Where a gradient is 0 the step is 0 / eps, not 0 / 0."""
    zero = np.zeros(4, np.float16)
    w, m, v = steps_by("numpy", "AdamW", {"lr": 1e-3, "weight_decay": 0.0}, Float16, [zero + 1, zero, zero, zero], 1)
    assert (w.tolist(), m.tolist(), v.tolist()) == ([1.0] * 4, [0.0] * 4, [0.0] * 4)
