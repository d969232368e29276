"""A small decoder with a mixture of experts under plans: it computes what it computes on one device, with what is
dropped; the experts' tokens are exchanged, not their gradients.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import numpy as np
import pytest

import distir
from distir.api.named_dims import named_dims
from distir.ir import Device
from distir.ir.function import Function, Op
from distir.ir.type import Float64, Shard, Type
from distir.models.decoder import Decoder, decoder
from distir.ops.rules import shape_of, tensor
from distir.transforms import plan as plans_of
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.parallel3d import distribute
from tests.transforms.programs import BATCH, Plan, Program, check, distributed, error, filled

EXPERTS = "*.experts.*.0"


def sizes(choices: int, capacity: float, groups: int = 0) -> Decoder:
    return Decoder(
        layers=2,
        hidden=16,
        heads=2,
        vocab=24,
        seq=8,
        batch=BATCH,
        ffn=32,
        tied=False,
        positions=12,
        experts=4,
        choices=choices,
        capacity=capacity,
        groups=groups,
    )


@functools.cache
def program(choices: int = 1, capacity: float = 0.75, groups: int = 0) -> Program:
    """A training step that also gives gradients."""
    function = decoder(sizes(choices, capacity, groups), Float64)
    step = training_step(function, "cross-entropy", AdamW(0.01, eps=1e-3), gradients=True)
    rng = np.random.default_rng(3)
    ids, labels = rng.integers(0, 24, (2, BATCH, 8))
    return filled(step, {"input_ids": ids, "labels": labels}, rng)


def split(n: int, *more: str) -> tuple[str, ...]:
    """Samples and experts over n devices."""
    return (f"ep={n}:input_ids.0,labels.0,{EXPERTS}", *more)


PLANS = [
    Plan(split=split(2)),
    Plan(split=split(4)),
    Plan(2, split=split(2)),
    Plan(2, split=split(4)),
    Plan(tp=2, split=split(4)),
    Plan(2, 2, split=split(2)),
    Plan(pp=2, microbatches=2, split=split(2)),
    Plan(pp=2, microbatches=2, split=split(4)),
    Plan(1, 2, 2, 2, split=split(2)),
    Plan(2, 1, 2, 2, split=split(2)),
    Plan(microbatches=2, split=split(4), schedule="gpipe"),
    *[Plan(2, split=split(4), zero=zero) for zero in (1, 2, 3)],
    Plan(2, 2, 1, 2, split=split(2), zero=2),
    Plan(1, 1, 2, 2, split=split(2), recompute="full"),
    Plan(split=split(2, "cp=2:input_ids.1,labels.1")),
    Plan(tp=2, split=split(2, "cp=2:input_ids.1,labels.1"), sequence_parallel=True),
    Plan(split=(f"ep=4:{EXPERTS}",)),
    *[Plan(2, 1, 1, m, zero=3, split=("cp=4:input_ids.1,labels.1",), gathered_again="blocks") for m in (1, 2)],
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_equals_sequential(plan: Plan) -> None:
    check(program(), plan)


@pytest.mark.parametrize(
    "plan", [Plan(split=split(4)), Plan(2, 1, 2, 2, split=split(2)), Plan(2, 2, split=split(2))], ids=str
)
def test_two_choices_equal_sequential(plan: Plan) -> None:
    check(program(2), plan)


@pytest.mark.parametrize("plan", [Plan(2, split=split(4)), Plan(2, 1, 2, 2, split=split(2))], ids=str)
def test_groups_of_half_a_sequence(plan: Plan) -> None:
    check(program(1, 0.75, 2 * BATCH), plan)


@pytest.mark.parametrize("choices", [1, 2])
def test_tokens_are_dropped(choices: int) -> None:
    """With slots for all results are others."""
    assert error(program(choices).results(), program(choices, 4.0).results()) > 1e-3


def exchanges(function: Function) -> list[Op]:
    return [op for op in function.ops if op.op_type == "MPIAlltoall"]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("choices", [1, 2])
def test_two_exchanges_a_layer_each_way(n: int, choices: int) -> None:
    """Each of the slots of this device's samples."""
    placed = distributed(program(choices), Plan(split=split(n))).placed
    ops = exchanges(placed)
    assert Counter(op.of is not None for op in ops) == {False: 4, True: 4}
    config = sizes(choices, 0.75)
    slots = config.groups * config.experts * config.slots * config.hidden // n
    assert {math.prod(tensor(op.inputs[0]).shape) for op in ops} == {slots}
    other = [op.op_type for op in placed.ops if op.attributes.get("axis") == "ep" and op.op_type != "MPIAlltoall"]
    assert set(other) == {"MPIAllreduce"}


def test_gradients_of_experts_are_not_reduced_over_their_axis() -> None:
    function = distributed(program(), Plan(2, split=split(2))).placed
    experts = {v for v in function.inputs if ".experts." in v.name}
    assert len(experts) == 24  # with their moments
    assert all(tensor(v).on("ep") is Shard(0) for v in experts)
    shapes = {shape_of(v) for v in experts}
    reduced = [op for op in function.ops if op.op_type == "MPIAllreduce" and shape_of(op.inputs[0]) in shapes]
    assert {op.attributes["axis"] for op in reduced} == {"dp", "mb"}


def test_what_is_published_of_gpt3_with_experts() -> None:
    """Of each layer at full size: two exchanges of 25,165,824 elements each way."""
    model = distir.load("gpt3-moe:layers=2,batch=16")
    plan = plans_of.Plan(split=tuple(map(plans_of.InputSplit.parse, split(16))))
    splits = named_dims(model.function, plan.split)
    placed = distribute(model.function, plan, [Device("gpu", i) for i in range(16)], splits=splits).placed
    assert [math.prod(tensor(op.inputs[0]).shape) for op in exchanges(placed)] == [25_165_824] * 8
    weights = [v for v in placed.inputs if v.name.endswith("experts.in.weight")]
    assert [tensor(v).shape for v in weights] == [(1, 12_288, 3072)] * 2


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dp", [2, 8])
def test_zero_splits_no_products(dp: int, zero: int) -> None:
    """Context parallelism's devices all compute experts; that they own shares of the weights does not change it."""

    def products(zero: int) -> list[Type]:
        placed = distributed(program(), Plan(dp, zero=zero, split=("cp=2:input_ids.1,labels.1",))).placed
        return [op.outputs[0].type for op in placed.ops if op.op_type == "MatMul"]

    assert products(zero) == products(0)
