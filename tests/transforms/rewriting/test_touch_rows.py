"""SGD of tables on the rows used: where it is, and where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import verify
from distir.ir.type import DType, Float32, Float64
from distir.models.recommender import Recommender, recommender
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.training import SGD, AdamW, LearningRate, training_step
from distir.transforms.rewriting.laws import origins

SIZES = Recommender(3, 40, 4, dense=5, bottom="6-4", top="8-1", batch=9)


def ops(
    optimizer: SGD | AdamW, sizes: Recommender = SIZES, gradients: bool = False, precision: DType = Float32
) -> set[str]:
    """The ops on tables and their gradients in a training step."""
    step = training_step(recommender(sizes), "loss", optimizer, gradients=gradients, precision=precision)
    verify(step)
    return {op.op_type for op in step.ops if op.op_type.startswith("Lookup")} - {"Lookup"}


@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), SGD(0.1, schedule=LearningRate(2)), SGD(0.1, weight_decay=0.0, nesterov=False)], ids=repr
)
def test_plain_sgd_is_on_the_rows_used(optimizer: SGD) -> None:
    assert ops(optimizer) == {"LookupSGD"}


@pytest.mark.parametrize(
    "optimizer", [SGD(0.1, momentum=0.9), SGD(0.1, weight_decay=0.1), SGD(0.1, clip_norm=1.0), AdamW()], ids=repr
)
def test_what_reads_all_rows_is_not(optimizer: SGD | AdamW) -> None:
    assert ops(optimizer) == {"LookupGrad"}


def test_a_gradient_with_another_use_stays() -> None:
    assert ops(SGD(0.1), gradients=True) == {"LookupGrad"}


@pytest.mark.parametrize(("rows", "found"), [(10, "LookupSGD"), (9, "LookupGrad")])
def test_fewer_indices_than_rows(rows: int, found: str) -> None:
    assert ops(SGD(0.1), Recommender(3, rows, 4, dense=5, bottom="6-4", top="8-1", batch=9)) == {found}


@pytest.mark.parametrize("schedule", [None, LearningRate(4)])
@pytest.mark.parametrize("pooling", [0, 2])
def test_it_gives_the_same_and_other_rows_stay(schedule: LearningRate | None, pooling: int) -> None:
    """To 1e-12, from the program before the rewrite; with rows that are picked several times."""
    sizes = Recommender(3, 40, 4, dense=5, bottom="6-4", top="8-1", batch=9, pooling=pooling)
    after = training_step(recommender(sizes, Float64), "loss", SGD(0.1, schedule=schedule))
    origin = next(origin for origin, _ in origins(after) if origin.rewrite == "touch_rows")
    rng = np.random.default_rng(0)
    arrays: list[Any] = []
    for v in after.inputs:
        integers = rng.integers(-5, 5, shape_of(v)) if v.name == "indices" else np.ones(shape_of(v), np.int64)
        arrays.append(rng.standard_normal(shape_of(v)) if tensor(v).dtype.floating else integers)
    want, got = [SequentialExecutor().compute(f, arrays) for f in (origin.before, after)]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
    k = next(k for k, v in enumerate(after.inputs) if v.name == "tables")
    new = got[next(k for k, v in enumerate(after.outputs) if v.name == "tables.new")]
    assert np.array_equal(new[:, 5:35], arrays[k][:, 5:35])
    assert not np.array_equal(new, arrays[k])
