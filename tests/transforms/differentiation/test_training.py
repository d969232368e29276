"""A training step as IR against PyTorch's autograd and optimizers, on the same model and data."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Role
from distir.ir.errors import UsageError
from distir.ir.type import BFloat16, Float32, Int64, Tensor
from distir.ops.rules import shape_of
from distir.transforms.differentiation.training import (
    SGD,
    AdamW,
    LearningRate,
    Optimizer,
    batch_dim,
    initial_state,
    optimizer_named,
    training_step,
)
from distir.transforms.rewriting.precision import with_dtype
from tests.transforms.reference import BATCH, Pair, labels_for, norms, pair, sound

torch.set_num_threads(1)
MODELS = ("mlp", "gpt2-tiny")
examples = cache(pair)


def target_for(p: Pair, loss: str, ignored: bool) -> np.ndarray:
    if loss == "cross-entropy":
        return labels_for(p.function, ignored)
    return np.random.default_rng(1).standard_normal(shape_of(p.function.outputs[0])).astype(np.float32)


def torch_loss(p: Pair, loss: str, target: np.ndarray) -> torch.Tensor:
    y = p.module(**p.inputs)
    if loss == "mse":
        return torch.nn.functional.mse_loss(y, torch.from_numpy(target))
    return torch.nn.functional.cross_entropy(y.flatten(0, -2), torch.from_numpy(target).flatten())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", ["cross-entropy", "ignored", "mse"])
def test_gradients(name: str, loss: str) -> None:
    ignored, loss = loss == "ignored", "mse" if loss == "mse" else "cross-entropy"
    check_gradients(examples(name), loss, ignored)


def test_gradients_of_a_model_that_is_causal_by_itself(tmp_path: Path) -> None:
    """Its mask is known when it is loaded, and no attention reads it."""
    p = pair("gpt2-tiny", tmp_path / "ids.onnx", ids_only=True)
    attention = [op for op in p.function.ops if op.op_type == "Attention"]
    assert [(len(op.inputs), op.attributes["causal"]) for op in attention] == [(3, True)] * 2
    assert not any(np.prod(shape_of(v)) >= 16 * 16 for v in p.function.inputs if v.kind == "constant")
    check_gradients(p, "cross-entropy", ignored=True)


def check_gradients(p: Pair, loss: str, ignored: bool) -> None:
    step = sound(training_step(p.function, loss, gradients=True))
    target = target_for(p, loss, ignored)
    label = step.inputs[len(p.function.inputs)]
    got = dict(zip(step.outputs, SequentialExecutor().compute(step, {**p.feeds, label: target}), strict=True))

    p.module.zero_grad()
    want = torch_loss(p, loss, target)
    want.backward()
    assert got[step.outputs[0]] == pytest.approx(want.item(), rel=1e-5)
    gradients = {w.name: got[g] for w, g in zip(step.updates.values(), step.outputs[1:], strict=False)}
    reference = {n: w.grad.numpy() for n, w in p.weights().items() if w.grad is not None}
    assert gradients.keys() == reference.keys() == p.weights().keys()
    for n, (error, limit) in norms(gradients, reference).items():
        assert error <= limit, n


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(0.05),
    "momentum and decay": SGD(0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": SGD(0.05, momentum=0.9, nesterov=True),
    "adamw": AdamW(),
    "adamw, settings": AdamW(0.01, (0.8, 0.95), 1e-6, 0.3),
    "sgd, clipped": SGD(0.5, momentum=0.9, clip_norm=0.1),
    "adamw, clipped": AdamW(clip_norm=0.1),
    "sgd, never reaching the norm": SGD(0.05, clip_norm=1e4),
    "sgd, cosine": SGD(0.5, 0.9, 0.1, schedule=LearningRate(2, "cosine", 5, 0.1), decay_vectors=False),
    "adamw, linear": AdamW(0.01, weight_decay=0.5, schedule=LearningRate(1, "linear", 4), decay_vectors=False),
    "adamw, warm-up": AdamW(0.01, schedule=LearningRate(4)),
}


def rate(optimizer: Optimizer, step: int) -> float:
    """The factor of the learning rate in a step, numbered from 1."""
    plan = optimizer.schedule
    if plan is None:
        return 1.0
    if step < plan.warmup or plan.decay == "none":
        return min(1.0, step / max(1, plan.warmup))
    done = min(1.0, (step - plan.warmup) / (plan.steps - plan.warmup))
    left = 1 - done if plan.decay == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
    least = plan.least / optimizer.lr
    return least + (1 - least) * left


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_five_steps(name: str, optimizer: Optimizer) -> None:
    p = pair(name)  # its own: the module is trained
    loss = "mse" if name == "mlp" else "cross-entropy"
    target = target_for(p, loss, ignored=True)
    step = sound(training_step(p.function, loss, optimizer))
    got, last = run(step, {**p.feeds, step.inputs[len(p.function.inputs)]: target}, 5)

    ours = ("clip_norm", "schedule", "decay_vectors", "dropout_seed")
    settings = {k: x for k, x in asdict(optimizer).items() if k not in ours}
    limit = optimizer.clip_norm
    flat = {} if optimizer.decay_vectors else {"weight_decay": 0.0}
    groups = [
        {"params": [w for w in p.module.parameters() if (w.ndim > 1) == matrix], **how}
        for matrix, how in ((True, {}), (False, flat))
    ]
    optim = getattr(torch.optim, type(optimizer).__name__)(groups, **settings)
    rates = torch.optim.lr_scheduler.LambdaLR(optim, lambda k: rate(optimizer, k + 1))
    want: list[float] = []
    for _ in range(5):
        optim.zero_grad()
        value = torch_loss(p, loss, target)
        value.backward()
        if limit is not None:
            norm = torch.nn.utils.clip_grad_norm_(p.module.parameters(), limit)
            assert (norm > limit) == (limit < 1)  # the one is clipped, the other not
        optim.step()
        rates.step()
        want.append(value.item())
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want[-1] < want[0]
    by_name = {v.name: x for v, x in last.items()}
    for n, w in p.weights().items():
        limit = 1e-5 if isinstance(optimizer, SGD) else 0.05 * optimizer.lr * 5
        np.testing.assert_allclose(by_name[n], w.detach().numpy(), rtol=limit, atol=limit)


def run(step: Function, feeds: dict[Any, np.ndarray], steps: int) -> tuple[list[float], dict[Any, np.ndarray]]:
    """The losses of several steps, and the inputs of the next one."""
    values = {**feeds, **initial_state(step)}
    losses: list[float] = []
    for _ in range(steps):
        results = dict(zip(step.outputs, SequentialExecutor().compute(step, values), strict=True))
        losses.append(float(results[step.outputs[0]]))
        values.update({v: results[new] for new, v in step.updates.items()})
    return losses, values


# ---------------------------------------------------------------- form


def linear(rows: int = 4, inside: int = 3, classes: int = 5, dtype: Any = Float32) -> Function:
    f = FunctionMaker("linear")
    x = f.add_input_value("x", Tensor(dtype, (rows, inside)), Role("data", 0))
    w = f.add_input_value("w", Tensor(dtype, (inside, classes)), Role("parameter"))
    b = f.add_input_value("b", Tensor(dtype, (classes,)), Role("parameter"))
    f.add_op("Add", "y", [f.emit("MatMul", x, w), b])
    return f.finalize()


def names(values: Any) -> list[str]:
    return [v.name for v in values]


def test_inputs_outputs_and_updates() -> None:
    f = linear()
    step = training_step(f, "cross-entropy", AdamW())
    assert step.inputs[:3] == f.inputs
    assert names(step.inputs[3:]) == ["labels", "w.m", "w.v", "b.m", "b.v", "step"]
    assert step.inputs[3].role == Role("data", 0)
    assert all(v.role == Role("state") for v in step.inputs[4:])
    assert names(step.outputs) == ["loss", "w.new", "w.m.new", "w.v.new", "b.new", "b.m.new", "b.v.new", "step.new"]
    assert {a.name: b.name for a, b in step.updates.items()} == {f"{n}.new": n for n in names(step.inputs[4:])} | {
        "w.new": "w",
        "b.new": "b",
    }
    assert sum(op.op_type == "AdamW" for op in step.ops) == 2
    assert set(initial_state(step)) == set(step.inputs[4:])


def test_sgd_without_momentum_has_no_state() -> None:
    step = training_step(linear(), "mse", "sgd", gradients=True)
    assert names(step.inputs) == ["x", "w", "b", "target"]
    assert names(step.outputs) == ["loss", "w.grad", "b.grad", "w.new", "b.new"]
    assert initial_state(step) == {}


def test_steps_are_counted_in_integers() -> None:
    """Which stay exact when the program is turned into one of half precision."""
    step = training_step(linear(), "mse", AdamW(lr=0.1))
    assert step.inputs[-1].type is Tensor(Int64, ())
    half = with_dtype(step, BFloat16)
    assert half.inputs[-1].type is Tensor(Int64, ())
    rng = np.random.default_rng(0)
    values = {v: rng.standard_normal(shape_of(v)) for v in half.inputs if v.kind != "state"}
    losses, last = run(half, values, 4)
    assert losses[-1] < losses[0]
    assert last[half.inputs[-1]] == 4


def test_loss_by_name() -> None:
    f = FunctionMaker("own")
    x = f.add_input_value("x", Tensor(Float32, (4, 3)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float32, (3,)), Role("parameter"))
    unused = f.add_input_value("unused", Tensor(Float32, (3,)), Role("parameter"))
    y = f.add_op("Mul", "y", [x, w])
    total = f.add_op("ReduceSum", "total", [y], {"axes": (0, 1), "keepdims": 0})
    f.set_outputs([y, total])
    own = f.finalize()
    step = training_step(own, "total", SGD(0.5), gradients=True)
    assert names(step.inputs) == ["x", "w", "unused"]
    assert names(step.outputs) == ["total", "w.grad", "w.new"]
    assert unused not in step.updates.values()
    data = np.arange(12, dtype=np.float32).reshape(4, 3)
    got = SequentialExecutor().compute(step, [data, np.ones(3), np.ones(3)])
    np.testing.assert_array_equal(got[2], 1 - 0.5 * data.sum(0))
    with pytest.raises(UsageError, match=r"shape \(4, 3\), not one number.*sum"):
        training_step(own, "y")
    with pytest.raises(UsageError, match="no value 'los'"):
        training_step(own, "los")


def test_what_cannot_be_trained() -> None:
    f = FunctionMaker("none")
    f.emit("Relu", f.add_input_value("x", Tensor(Float32, (4, 3)), Role("data", 0)))
    with pytest.raises(UsageError, match="depends on no parameter"):
        training_step(f.finalize(), "mse")
    with pytest.raises(UsageError, match="unknown optimizer 'adam'"):
        training_step(linear(), "mse", "adam")
    with pytest.raises(UsageError, match="no output 'z'"):
        training_step(linear(), "mse", output="z")
    f = FunctionMaker("ints")
    f.emit("Neg", f.add_input_value("x", Tensor(Int64, (4, 3)), Role("data", 0)))
    with pytest.raises(UsageError, match="floating"):
        training_step(f.finalize(), "mse")


def test_optimizer_named() -> None:
    assert optimizer_named("SGD", lr=0.5, momentum=None) == SGD(0.5)
    with pytest.raises(UsageError, match="adamw has no momentum"):
        optimizer_named("adamw", momentum=0.9)


def test_batch_dim_is_followed() -> None:
    """From dim 1 of the input, through a transpose and a flattening, to the dim that still runs over it."""
    f = FunctionMaker("turned")
    x = f.add_input_value("x", Tensor(Float32, (3, 8, 2)), Role("data", 1))
    y = f.emit("Transpose", x, perm=(0, 2, 1))
    z = f.emit("Reshape", f.emit("Transpose", x, perm=(1, 0, 2)), shape=(-1, 2))
    f.set_outputs([y, z])
    function = f.finalize()
    assert batch_dim(function, y) == 2
    assert batch_dim(function, z) == 0
    assert batch_dim(examples("gpt2-tiny").function, examples("gpt2-tiny").function.outputs[0]) == 0


def test_backward_ops_know_their_forward_op() -> None:
    p = examples("gpt2-tiny")
    step = training_step(p.function, "cross-entropy", "adamw")
    place = {op: i for i, op in enumerate(step.ops)}
    backward = [op for op in step.ops if op.of is not None]
    assert len(backward) > 80
    for op in backward:
        assert op.of is not None
        assert op.of.of is None
        assert place[op.of] < place[op]
    made = [v for op in step.ops for v in op.outputs] + list(step.inputs)
    assert len({v.name for v in made}) == len(made)
    assert {f"{n}.new" for n in p.weights()} <= {v.name for v in made}
    assert BATCH in shape_of(step.inputs[0])


def test_a_schedule_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="unknown decay 'square' of the learning rate") as e:
        LearningRate(decay="square", steps=3)
    assert e.value.hint == "choose from none, linear, cosine"
    with pytest.raises(UsageError, match="the learning rate decays from step 3 to step 3"):
        LearningRate(3, "linear", 3)
