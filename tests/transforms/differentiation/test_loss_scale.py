"""Dynamic loss scaling against `torch.amp.GradScaler`, on gradients that are not always finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distir import Plan, distribute
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Role, verify
from distir.ir.function import Value
from distir.ir.type import Float16, Float32, Tensor
from distir.models.decoder import Decoder, decoder
from distir.transforms.differentiation import loss_scale
from distir.transforms.differentiation.loss_scale import EXPONENT, FINITE_STEPS, INITIAL, SKIPPED
from distir.transforms.differentiation.training import (
    SGD,
    AdamW,
    LearningRate,
    Optimizer,
    initial_state,
    training_step,
)
from tests.transforms.reference import sound

STEPS, BATCH, WIDTH = 12, 4, 3
HUGE = {2, 3, 8}
"""The steps in which the data are so large that gradients overflow."""
OPTIMIZERS: list[Optimizer] = [
    SGD(0.01),
    SGD(0.01, momentum=0.9),
    AdamW(0.01),
    AdamW(0.01, clip_norm=0.1, schedule=LearningRate(3, "cosine", 12)),
]


def layer(layers: int = 1) -> Function:
    """Products of the input with weights; the loss is the mean of the last."""
    f = FunctionMaker("layers")
    x = f.add_input_value("x", Tensor(Float32, (BATCH, WIDTH)), Role("data", 0))
    for k in range(layers):
        x = f.emit("MatMul", x, f.add_input_value(f"w{k}", Tensor(Float32, (WIDTH, WIDTH)), Role("parameter")))
    f.set_outputs([f.add_op("ReduceMean", "loss", [x], {"axes": (0, 1)})])
    return f.finalize()


def data() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(BATCH, WIDTH)).astype(np.float32) * (1e4 if k in HUGE else 1) for k in range(STEPS)]


def steps(program: Function, step: Function, values: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """The inputs of a program after each step; `step` names them."""
    seen: list[dict[str, np.ndarray]] = []
    names = [v.name for v in step.inputs]
    given = dict(values)
    for x in data():
        given["x"] = x
        with np.errstate(all="ignore"):
            results = SequentialExecutor().compute(program, [given[n] for n in names])
        outputs = zip(step.outputs, results, strict=True)
        given |= {step.updates[v].name: y for v, y in outputs if v in step.updates}
        seen.append(dict(given))
    return seen


def start(step: Function) -> dict[str, np.ndarray]:
    zeros = {v.name: x for v, x in initial_state(step).items()}
    weights: dict[str, np.ndarray] = {v.name: np.eye(WIDTH, dtype=np.float32) for v in step.inputs if is_weight(v)}
    return zeros | weights


def is_weight(v: Value) -> bool:
    return v.kind == "parameter"


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_step_that_overflows_changes_nothing_and_is_counted(optimizer: Optimizer, monkeypatch: Any) -> None:
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    step = sound(training_step(layer(), "loss", optimizer, precision=Float16))
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    before, skipped = start(step), 0
    weight = torch.nn.Parameter(torch.eye(WIDTH))
    settings = {k: x for k, x in optimizer.attributes.items() if k != "scheduled"}
    optim = getattr(torch.optim, optimizer.op_type)([weight], **settings)
    for k, (x, values) in enumerate(zip(data(), steps(step, step, before), strict=True)):
        with torch.autocast("cpu", torch.float16):
            loss = (torch.from_numpy(x) @ weight).float().mean()
        optim.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        if optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([weight], optimizer.clip_norm)
        if optimizer.schedule is not None:  # of the number of steps taken
            taken = k + 1 - skipped
            rate = min(1.0, taken / 3) if taken < 3 else 0.5 * (1 + np.cos(np.pi * (taken - 3) / 9))
            optim.param_groups[0]["lr"] = optimizer.lr * rate
        scaler.step(optim)
        scaler.update()
        assert 2.0 ** (INITIAL + int(values[EXPONENT])) == scaler.get_scale(), k
        assert int(values[FINITE_STEPS]) == scaler._growth_tracker.item(), k  # type: ignore[union-attr]
        overflow = k in HUGE
        skipped += overflow
        assert int(values[SKIPPED]) == skipped
        changed = [
            n for n in values if n not in ("x", EXPONENT, FINITE_STEPS, SKIPPED) and np.any(values[n] != before[n])
        ]
        assert bool(changed) != overflow, changed
        np.testing.assert_allclose(values["w0"], weight.detach().numpy(), rtol=2e-3, atol=1e-5)
        before = values
    assert skipped == len(HUGE)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, zero=2, microbatches=2),
        Plan(pp=3, dp=2, microbatches=2),
        Plan(dp=4, zero=3),
        Plan(pp=2, microbatches=2),
    ],
    ids=str,
)
def test_an_overflow_on_one_device_skips_the_step_on_all(plan: Plan) -> None:
    """Only one sample overflows, in only one weight's gradient."""
    step = training_step(layer(3), "loss", SGD(0.01, momentum=0.9), precision=Float16)
    program = distribute(step, plan)
    verify(program)
    got, want = (steps(f, step, start(step)) for f in (program, step))
    assert [int(x[SKIPPED]) for x in want][-1] == len(HUGE)
    for a, b in zip(got, want, strict=True):
        for name in (EXPONENT, FINITE_STEPS, SKIPPED):
            assert a[name] == b[name]
        for name in a:  # in 16 bits sums over other pieces are rounded otherwise
            np.testing.assert_allclose(np.asarray(a[name], float), np.asarray(b[name], float), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("optimizer", [SGD(), AdamW(), AdamW(clip_norm=1.0)], ids=repr)
@pytest.mark.parametrize("zero", [0, 2])
def test_the_model_works_on_microbatches(optimizer: Optimizer, zero: int) -> None:
    """What is kept of the whole batch are sums: no matrix product is in the prologue."""
    step = training_step(
        decoder(Decoder(2, 8, 2, vocab=16, seq=4, batch=8)), "cross-entropy", optimizer, precision=Float16
    )
    program = distribute(step, Plan(dp=2, pp=2, microbatches=2, zero=zero))
    once = [f for f in program.callees() if f.name.startswith(("prologue", "update"))]
    assert once
    assert not [op for f in once for op in f.ops if op.spec.weight is not None]
