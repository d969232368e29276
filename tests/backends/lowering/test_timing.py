"""Times of one rank's steps and ops, on the CPU, and marked `gpu` on one."""

from __future__ import annotations

import pytest
import torch

import distir
from distir.api.calibration_runs import Training, drawn
from distir.backends.lowering.timing import overheads, time_ops, time_step
from distir.transforms.rank.as_run import as_run

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
TRAINING = Training("gpt:layers=2,hidden=48,heads=4,vocab=600,seq=24", 8, "adamw", 3, "bf16")


@pytest.mark.parametrize("device", DEVICES)
def test_every_op_that_computes_has_a_time(device: str) -> None:
    model = TRAINING.model()
    program = distir.distribute(model, distir.Plan(microbatches=2))
    found = time_ops(program, drawn(model), device)
    function = as_run(program)
    computing = [
        op
        for f in (*function.callees(), function)
        for op in f.ops
        if op.callee is None and op.spec.comm is None and op.inputs and op.spec.bundle is None
    ]
    assert {"Attention", "MatMul", "LayerNorm", "GroupedAdamW"} <= {op.spec.name for op in found}
    assert set(computing) <= set(found)
    assert all(s > 0 for s in found.values())
    total = sum([s * (2 if op not in function.ops else 1) for op, s in found.items()])
    assert total < 5 * time_step(program, drawn(model), 3, device, captures=False).seconds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_peak_is_that_of_the_tensors() -> None:
    """With a graph and without, and near what is predicted."""
    model = Training("gpt:layers=2,hidden=256,heads=4,vocab=4000,seq=128", 16, "adamw", 3).model()
    program = distir.distribute(model)
    peaks = [time_step(program, drawn(model), 2, "cuda", captures).peak for captures in (True, False)]
    predicted = distir.simulate(model, cluster="h200").allocated_memory
    assert peaks == pytest.approx([predicted] * 2, rel=0.3)
    assert overheads().context > 2**26
