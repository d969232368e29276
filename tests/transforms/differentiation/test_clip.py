"""Clipping by the global norm: equal to torch's (test_training), under every plan, and without collectives but one."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

from distir.executor.reference.sequential import SequentialExecutor
from distir.importer import import_from_onnx
from distir.ir import Function, FunctionMaker, Role
from distir.ir.errors import UsageError
from distir.ir.type import DType, Float16, Float32, Float64, Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.clip import clip_factor, sum_of_squares
from distir.transforms.differentiation.training import SGD, AdamW, training_step
from distir.transforms.parallel3d import distribute
from tests.transforms.programs import BATCH, EXAMPLES, Plan, check, collectives, gpt2_tiny, imported_mlp, small_gpt

CLIPPED = AdamW(0.01, clip_norm=0.1)
PLANS = [
    Plan(2, 1, 1, 2),
    *[Plan(2, 1, 1, 4, zero=zero) for zero in (1, 2, 3)],
    Plan(1, 2),
    Plan(1, 4, sequence_parallel=True),
    Plan(1, 1, 4, 4),
    Plan(2, 2, 2, 2, zero=3, recompute="full", sequence_parallel=True),
    Plan(2, 1, 2, 4, "interleaved", chunks=2, zero=1, overlap=False),
    Plan(2, 2, 2, 4, "gpipe", zero=2, host=True, recompute="selective"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gpt", "mlp"])
def test_equals_sequential(name: str, plan: Plan) -> None:
    """Also where rows of the padded vocabulary hold what does not count."""
    programs = {
        "gpt2": lambda: gpt2_tiny(CLIPPED),
        "gpt": lambda: small_gpt(layers=4, optimizer=CLIPPED),
        "mlp": lambda: imported_mlp(SGD(0.1, momentum=0.9, clip_norm=0.5)),
    }
    check(programs[name](), plan._replace(sequence_parallel=plan.sequence_parallel and name != "mlp"))


@cache
def step(clipped: bool) -> Function:
    """A training step of GPT-2, 28 weights, whose gradients are no results."""
    function, _ = import_from_onnx(EXAMPLES / "gpt2-tiny.onnx", dims={"batch": BATCH})
    return training_step(function, "cross-entropy", CLIPPED if clipped else AdamW(0.01))


@pytest.mark.parametrize("plan", [*PLANS, Plan(2, 1, 1, 1, zero=1)], ids=str)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_one_number_is_reduced_more(plan: Plan, axis: str) -> None:
    """Along an axis where gradients lie in parts, one all-reduce; scatters stay scatters, and none moves."""
    counts: list[Counter[str]] = []
    for clipped in (False, True):
        plan = plan._replace(bucket_mb=0.0)  # each gradient by itself
        counts.append(collectives(distribute(step(clipped), plan.plan, plan.devices).program, axis))
    more = counts[1] - counts[0]
    del more["LocalTerm"]
    in_parts = plan.tp > 1 if axis == "tp" else plan.dp > 1 and plan.zero > 0
    assert (more, counts[0] - counts[1]) == (Counter({"MPIAllreduce": 1} if in_parts else {}), Counter())


def test_scatters_run_beside_the_backward_pass() -> None:
    plan = Plan(2, 1, 1, 4, zero=1, bucket_mb=0.0)
    bodies = {f.name: f for f in distribute(step(True), plan.plan, plan.devices).program.callees()}
    assert collectives(bodies["bwd0.last"], "dp")["MPIReduceScatter"] == 28
    reduced = [op for op in bodies["update0"].ops if op.op_type == "MPIAllreduce" and op.attributes["axis"] == "dp"]
    assert [shape_of(op.inputs[0]) for op in reduced] == [()]


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_send_a_number_each(pp: int) -> None:
    """One to the stage that adds them up, and one back."""
    plan = Plan(1, 1, pp, 4)
    sent: list[list[tuple[int, ...]]] = []
    for clipped in (False, True):
        program = distribute(step(clipped), plan.plan, plan.devices).program
        sent.append([shape_of(op.inputs[0]) for op in program.ops if op.op_type == "Send"])
    assert Counter(sent[1]) - Counter(sent[0]) == Counter({(): 2 * (pp - 1)})


@pytest.mark.parametrize("zero", range(4))
def test_weights_stay_on_their_stages(zero: int) -> None:
    plan = Plan(2, 1, 4, 4, zero=zero)
    programs = [distribute(step(clipped), plan.plan, plan.devices).program for clipped in (False, True)]
    homes = [[v.type.device for v in program.inputs] for program in programs]
    assert homes[0] == homes[1]


def clipped(dtype: DType, gradients: list[np.ndarray], norm: float) -> list[np.ndarray]:
    f = FunctionMaker("clipped")
    values = [f.add_input_value(f"g{k}", Tensor(dtype, g.shape), Role("parameter")) for k, g in enumerate(gradients)]
    factor = clip_factor(f, sum_of_squares(f, values), norm)
    results = [f.emit("Scale", g, factor) for g in values]
    assert [tensor(v).dtype for v in results] == [dtype] * len(results)
    f.set_outputs(results)
    return SequentialExecutor().compute(f.finalize(), gradients)


@pytest.mark.parametrize("dtype", [Float64, Float32, Float16])
def test_norms_that_leave_the_range_of_the_squares(dtype: DType) -> None:
    """A gradient of 300 squares to more than float16 holds, one of 1e-3 to a subnormal number."""
    for size in (300.0, 1e-3):
        gradients = [np.full((40,), size, dtype.numpy), np.full((3, 8), -size, dtype.numpy)]
        found = clipped(dtype, gradients, size)
        want = 1 / (8 + 1e-6 / size)  # 64 elements of that size
        for g, x in zip(gradients, found, strict=True):
            np.testing.assert_allclose(x.astype(np.float64), g.astype(np.float64) * want, rtol=2e-3)


@pytest.mark.parametrize("size", [1e-6, 1e-5, 0.0])
def test_norms_as_small_as_what_is_added_to_them(size: float) -> None:
    """torch adds 1e-6 to the norm: there the factor is less than the limit by the norm."""
    g = np.array([0.6, -0.8]) * size
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    w.grad = torch.tensor(g)
    torch.nn.utils.clip_grad_norm_([w], 1e-6)
    (found,) = clipped(Float64, [g], 1e-6)
    np.testing.assert_allclose(found, w.grad.numpy(), rtol=1e-12)


def test_what_is_not_finite_stays_so() -> None:
    (found,) = clipped(Float64, [np.array([1.0, np.nan])], 1.0)
    assert np.isnan(found).all()


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_is_positive(norm: float) -> None:
    with pytest.raises(UsageError, match="is a positive number"):
        clipped(Float64, [np.ones(3)], norm)
