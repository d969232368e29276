"""Times of one rank's steps and ops. On a GPU they are taken by tests/api/test_calibrate.py."""

from __future__ import annotations

import distir
from distir.api.calibration_runs import Training, drawn
from distir.backends.lowering.timing import time_ops, time_step
from distir.transforms.rank.as_run import as_run

TRAINING = Training("gpt:layers=2,hidden=48,heads=4,vocab=600,seq=24", 8, "adamw", 3, "bf16")


def test_every_op_that_computes_has_a_time() -> None:
    model = TRAINING.model()
    program = distir.distribute(model, distir.Plan(microbatches=2))
    found = time_ops(program, drawn(model), "cpu")
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
    assert total < 5 * time_step(program, drawn(model), 3, "cpu", captures=False).seconds
