"""Losses that are not a mean or sum over samples need the whole batch, so a pipeline has one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

import distir
from distir import distribute
from distir.ir import Function, FunctionMaker, Value
from distir.ir.errors import InfeasibleError
from distir.ir.function import Role
from distir.ir.type import BFloat16, Float64, Tensor
from distir.models.decoder import Decoder, decoder
from distir.ops.rules import shape_of
from distir.transforms.differentiation.training import SGD, AdamW, training_step
from tests.transforms.programs import ADAMW, BATCH, MOMENTUM, PLAIN, Plan, Program, check, distributed

WIDTH, LAYERS, WIDE = 8, 4, 1024
Loss = Callable[[FunctionMaker, Value, Value], Value]


def rmse(f: FunctionMaker, h: Value, t: Value) -> Value:
    return f.emit("Sqrt", f.emit("MSELoss", h, t))


def perplexity(f: FunctionMaker, h: Value, t: Value) -> Value:
    return f.emit("Exp", f.emit("MSELoss", h, t))


def contrastive(f: FunctionMaker, h: Value, t: Value) -> Value:
    """Each sample is classified against the targets of the whole batch."""
    scores = f.emit("MatMul", f.emit("Mul", h, t), f.emit("Transpose", h, perm=(1, 0)))
    scores = f.emit("LogSoftmax", scores, axis=1)
    eye = f.emit("Constant", value=tuple(np.eye(BATCH).ravel().tolist()), shape=(BATCH, BATCH), dtype=Float64)
    total = f.emit("ReduceSum", f.emit("Mul", scores, eye), axes=(0, 1), keepdims=0)
    return f.emit("Neg", total)


def dice(f: FunctionMaker, h: Value, t: Value) -> Value:
    """A quotient of two sums over samples."""

    def total(v: Value) -> Value:
        return f.emit("ReduceSum", v, axes=(0, 1), keepdims=0)

    squares = f.emit("Add", total(f.emit("Mul", h, h)), total(f.emit("Mul", t, t)))
    return f.emit("Neg", f.emit("Div", total(f.emit("Mul", h, t)), squares))


def centred(f: FunctionMaker, h: Value, t: Value) -> Value:
    """Subtracts the mean over the batch within the forward pass, as batch norm does."""
    h = f.emit("Sub", h, f.emit("ReduceMean", h, axes=(0,), keepdims=1))
    w = f.add_input_value("last", Tensor(Float64, (shape_of(h)[1],) * 2), Role("parameter"))
    return f.emit("MSELoss", f.emit("Tanh", f.emit("MatMul", h, w)), t)


LOSSES = [rmse, perplexity, contrastive, dice, centred]


def forward(loss: Loss, width: int = WIDTH) -> tuple[Function, str]:
    f = FunctionMaker("m")
    h = f.add_input_value("x", Tensor(Float64, (BATCH, width)), Role("data", 0))
    for _ in range(LAYERS):
        w = f.add_input_value("w", Tensor(Float64, (width, width)), Role("parameter"))
        h = f.emit("Tanh", f.emit("MatMul", h, w))
    made = loss(f, h, f.add_input_value("t", Tensor(Float64, (BATCH, width)), Role("data", 0)))
    f.set_outputs([made])
    return f.finalize(), made.name


@cache
def program(loss: Loss, optimizer: SGD | AdamW) -> Program:
    function, name = forward(loss)
    step = training_step(function, name, optimizer)
    rng = np.random.default_rng(0)
    arrays = [
        np.zeros(v.type.shape, v.type.dtype.numpy) if v.kind == "state" else rng.normal(size=v.type.shape)
        for v in step.inputs
        if isinstance(v.type, Tensor)
    ]
    return Program(step, arrays)


PLANS = [
    Plan(1, 1, 1),
    Plan(2, 2, 1),
    Plan(1, 1, 2),
    Plan(1, 1, 4),
    Plan(1, 1, 2, 1, "gpipe"),
    Plan(1, 1, 2, 1, "distir2021", host=True),
    Plan(2, 1, 2),
    Plan(2, 1, 2, bucket_mb=0.0),
    Plan(1, 2, 2),
    Plan(2, 2, 2, host=True),
    Plan(2, 2, 2, overlap=False),
    *[Plan(2, 1, 2, zero=stage) for stage in (1, 2, 3)],
    Plan(2, 2, 2, zero=3),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_one_microbatch_equals_sequential(loss: Loss, plan: Plan) -> None:
    for optimizer in (PLAIN, MOMENTUM, ADAMW):
        check(program(loss, optimizer), plan)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_stages_share_the_work(loss: Loss) -> None:
    """Each has a forward, a backward and an update body of its own."""
    wide = Program(training_step(*forward(loss, WIDE), ADAMW), [])
    names = {f.name for f in distributed(wide, Plan(1, 1, 2)).program.callees()}
    assert {"fwd0", "bwd0", "update0", "fwd1", "bwd1", "update1"} <= names


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("loss", [rmse, perplexity, dice], ids=lambda f: f.__name__)
def test_several_microbatches_are_refused_with_the_reason(loss: Loss, schedule: str) -> None:
    made = program(loss, PLAIN)
    with pytest.raises(InfeasibleError, match="needs the whole batch") as e:
        distributed(made, Plan(1, 1, 2, 2, schedule))
    assert e.value.hint == "use --microbatches 1, or --pp 1"
    check(made, Plan(1, 1, 2, 1, schedule))
    check(made, Plan(1, 1, 1, 2, schedule))


@pytest.mark.parametrize("loss", [contrastive, centred], ids=lambda f: f.__name__)
def test_what_comes_after_the_whole_batch_is_still_in_microbatches(loss: Loss) -> None:
    check(program(loss, PLAIN), Plan(1, 1, 2, 2))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_what_is_not_trained_is_in_stages_too(loss: Loss) -> None:
    function, _ = forward(loss)
    rng = np.random.default_rng(0)
    made = Program(function, [rng.normal(size=v.type.shape) for v in function.inputs if isinstance(v.type, Tensor)])
    for plan in (Plan(1, 1, 2), Plan(2, 2, 2)):
        check(made, plan)


def test_no_hint_proposes_a_degree_of_0() -> None:
    f = FunctionMaker("nothing")
    x = f.add_input_value("x", Tensor(Float64, (8, 4)), Role("data", 0))
    f.set_outputs([f.emit("Reshape", x, shape=(8, 2, 2))])
    made = Program(f.finalize(), [np.zeros((8, 4))])
    with pytest.raises(InfeasibleError) as e:
        distributed(made, Plan(1, 1, 3))
    assert e.value.hint == "use at most --pp 1"


def test_casts_of_weights_do_not_need_the_batch() -> None:
    """In mixed precision they are made before the first microbatch; what lacks are ops to cut between."""
    model = decoder(Decoder(1, 8, 2, vocab=16, seq=4, batch=4))
    step = training_step(model, "cross-entropy", precision=BFloat16)
    with pytest.raises(InfeasibleError, match="cuttable pieces cannot make 64 stages"):
        distribute(step, distir.Plan(pp=64, microbatches=2))
