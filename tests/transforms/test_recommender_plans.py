"""A recommender whose tables are spread over devices: what is looked up is exchanged, the tables' gradients are not."""

from __future__ import annotations

import functools
import math
from collections import Counter

import numpy as np
import pytest

import distir
from distir.api.compilation import distribute
from distir.ir.function import Function
from distir.ir.type import Float64, Tensor, Tuple
from distir.models.recommender import Recommender, recommender
from distir.ops.rules import tensor
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.plan import InputSplit
from tests.transforms.programs import BATCH, PLAIN, Plan, Program, check, error, filled

SPLIT = "dense.0,labels.0,tables.0,indices.1"


@functools.cache
def program(pooling: int = 0, adam: bool = False, gradients: bool = True) -> Program:
    """A training step, that also gives `gradients`: if not, SGD is on the rows used."""
    sizes = Recommender(4, 24, 8, dense=6, bottom="16-8", top="16-8-1", batch=BATCH, pooling=pooling)
    optimizer = AdamW(0.01, eps=1e-3) if adam else PLAIN
    step = training_step(recommender(sizes, Float64), "loss", optimizer, gradients=gradients)
    rng = np.random.default_rng(5)
    shape = (BATCH, 4, pooling) if pooling else (BATCH, 4)
    return filled(step, {"indices": rng.integers(-24, 24, shape), "labels": rng.integers(0, 2, BATCH)}, rng)


def split(n: int) -> tuple[str, ...]:
    return (f"ep={n}:{SPLIT}",)


PLANS = [
    Plan(split=split(2)),
    Plan(split=split(4)),
    Plan(2, split=split(2)),
    Plan(2, split=split(4)),
    Plan(tp=2, split=split(2)),
    Plan(microbatches=2, split=split(4)),
    Plan(pp=2, microbatches=2, split=split(2)),
    Plan(2, 1, 2, 2, split=split(2)),
    *[Plan(2, split=split(4), zero=zero) for zero in (1, 2, 3)],
    Plan(split=("ep=4:dense.0,labels.0,indices.0,tables.1",)),
    Plan(split=("ep=4:dense.0,labels.0,indices.0,tables.2",)),
    Plan(tp=4),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_equals_sequential(plan: Plan) -> None:
    check(program(), plan)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("pooling", [0, 2])
def test_sgd_on_the_rows_used_equals_sequential(plan: Plan, pooling: int) -> None:
    touching = program(pooling, gradients=False)
    assert Counter(op.op_type for op in touching.function.ops)["LookupSGD"] == 1
    function = check(touching, plan)
    found = Counter(op.op_type for f in (function, *function.callees()) for op in f.ops)
    assert found["LookupSGD"] == 1
    assert found["LookupGrad"] == 0


def test_sgd_on_the_rows_used_gives_what_the_whole_tables_gradient_does() -> None:
    whole, touching = program(), program(gradients=False)
    count = sum(v.kind == "parameter" for v in whole.function.inputs)
    loss, *rest = whole.results()
    assert error([loss, *rest[count:]], touching.results()) < 1e-12


@pytest.mark.parametrize("plan", [Plan(split=split(4)), Plan(2, split=split(2), zero=1)], ids=str)
def test_pooling_and_adam_equal_sequential(plan: Plan) -> None:
    check(program(3), plan)
    check(program(0, True), plan)


def sent(function: Function, name: str) -> list[int]:
    """The elements that a device gives to each collective of that name along ep, in order."""
    found = []
    for f in (*function.callees(), function):
        for op in f.ops:
            if op.op_type == name and op.attributes["axis"] == "ep":
                t = op.inputs[0].type
                members = t.types if isinstance(t, Tuple) else (t,)
                found.append(sum(math.prod(m.shape) for m in members if isinstance(m, Tensor)))
    return found


def test_what_is_published_of_it() -> None:
    """At full size: 262,144 elements exchanged each way; gradients of 728,065 and 49,536 reduced."""
    plan = distir.Plan(split=(InputSplit.parse(f"ep=4:{SPLIT}"),), bucket_mb=2.7)
    made = distribute(distir.load("dlrm"), plan)
    assert sent(made, "MPIAlltoall") == [262_144, 262_144]
    assert sorted(sent(made, "MPIAllreduce")) == [1, 49_536, 728_065]
    tables = next(v for v in made.inputs if v.name == "tables")
    assert tensor(tables).shape == (1, 80_000, 128)
