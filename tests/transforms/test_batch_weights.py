"""Weights with the batch as a dim: replicas hold them whole; values that mix samples are gathered where necessary."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.ir import FunctionMaker, Value
from distir.ir.errors import InfeasibleError
from distir.ir.function import Role
from distir.ir.type import Float64, Replicate, Tensor
from distir.ops.rules import tensor
from distir.transforms.differentiation.training import SGD, AdamW, training_step
from tests.transforms.programs import ADAMW, BATCH, MOMENTUM, PLAIN, Plan, Program, check, distributed

KINDS = ("mixes", "mixes, first", "mixes back", "rows", "columns", "square", "scale", "none")


def layer(f: FunctionMaker, h: Value, kind: str, width: int) -> Value:
    """A layer (batch, width) -> (batch, width) with a weight of that kind."""

    def weight(*shape: int) -> Value:
        return f.add_input_value("w", Tensor(Float64, shape), Role("parameter"))

    if kind == "mixes":  # samples: (width, batch) x (batch, batch)
        h = f.emit("Transpose", h, perm=(1, 0))
        h = f.emit("Transpose", f.emit("MatMul", h, weight(BATCH, BATCH)), perm=(1, 0))
    elif kind == "mixes, first":  # (batch, batch) x (batch, width)
        h = f.emit("MatMul", weight(BATCH, BATCH), h)
    elif kind == "mixes back":  # down to other samples and back
        h = f.emit("MatMul", weight(BATCH, 2 * BATCH), f.emit("MatMul", weight(2 * BATCH, BATCH), h))
    elif kind == "rows":  # one row of the weight a sample
        h = f.emit("Add", h, weight(BATCH, width))
    elif kind == "columns":
        h = f.emit(
            "Add", f.emit("MatMul", h, weight(width, width)), f.emit("Transpose", weight(width, BATCH), perm=(1, 0))
        )
    elif kind == "square":  # twice the same weight
        w = weight(BATCH, BATCH)
        h = f.emit("MatMul", w, f.emit("MatMul", f.emit("Transpose", w, perm=(1, 0)), h))
    elif kind == "scale":
        h = f.emit("Mul", h, weight(BATCH, 1))
    else:
        h = f.emit("MatMul", h, weight(width, width))
    return f.emit("Tanh", h)


@cache
def program(kinds: tuple[str, ...], width: int, optimizer: SGD | AdamW) -> Program:
    f = FunctionMaker("m")
    h = f.add_input_value("x", Tensor(Float64, (BATCH, width)), Role("data", 0))
    for kind in kinds:
        h = layer(f, h, kind, width)
    loss = f.emit("MSELoss", h, f.add_input_value("t", Tensor(Float64, (BATCH, width)), Role("data", 0)))
    f.set_outputs([loss])
    step = training_step(f.finalize(), loss.name, optimizer)
    rng = np.random.default_rng(0)
    arrays = [
        np.zeros(v.type.shape, v.type.dtype.numpy) if v.kind == "state" else rng.normal(size=v.type.shape) / 2
        for v in step.inputs
        if isinstance(v.type, Tensor)
    ]
    return Program(step, arrays)


@pytest.mark.parametrize("optimizer", [PLAIN, MOMENTUM, ADAMW], ids=["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_hold_it_whole(kind: str, optimizer: SGD | AdamW) -> None:
    made = program(("none", kind), 4, optimizer)
    check(made, Plan(2))
    placed = distributed(made, Plan(2)).placed
    assert all(isinstance(tensor(v).on("dp"), Replicate) for v in placed.inputs if v.kind == "parameter")


@st.composite
def plans(draw: Any) -> Plan:
    dp, pp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    tp = draw(st.sampled_from((1, 2))) if dp * pp <= 4 else 1
    microbatches = draw(st.sampled_from((1, 2)))
    schedule = draw(st.sampled_from(("1f1b", "gpipe")))
    zero = draw(st.sampled_from((0, 1, 2, 3))) if dp > 1 else 0
    return Plan(dp, tp, pp, microbatches, schedule, host=draw(st.booleans()), zero=zero)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    st.sampled_from((4, BATCH)),
    st.sampled_from((PLAIN, MOMENTUM, ADAMW)),
    plans(),
)
def test_equals_sequential_or_says_why_not(kinds: list[str], width: int, optimizer: SGD | AdamW, plan: Plan) -> None:
    made = program((*kinds, "none"), width, optimizer)
    refused: InfeasibleError | None = None
    try:
        check(made, plan)
    except InfeasibleError as e:
        refused = e
    assert refused is None or refused.hint
    assert refused is None or plan.tp > 1 or (plan.pp > 1 and plan.microbatches > 1), refused
