"""The forward pass extracted from a distributed step gives the step's loss, with little more than the forward ops."""

from __future__ import annotations

import numpy as np
import pytest

from distir.api.batches import evaluating
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, parse, pformat, same, verify
from distir.transforms.pipeline.evaluation import evaluation, paths
from distir.transforms.rank.order import check_order
from distir.transforms.rank.project import project_all
from tests.transforms.programs import Plan, Program, distributed, gpt2_tiny, imported_mlp, small_gpt

PLANS = [
    Plan(),
    Plan(dp=2),
    Plan(dp=2, bucket_mb=0),
    Plan(tp=2, microbatches=2),
    Plan(pp=2, microbatches=4, schedule="gpipe"),
    Plan(dp=2, tp=2, pp=2, microbatches=2),
    Plan(dp=2, pp=2, microbatches=2, host=True),
    Plan(pp=2, microbatches=4, schedule="interleaved", chunks=2),
    Plan(dp=2, pp=2, microbatches=2, overlap=False),
    Plan(dp=2, zero=1),
    Plan(dp=2, tp=2, zero=2),
    Plan(dp=2, pp=2, microbatches=2, zero=3),
]


def size(program: Function) -> int:
    return sum(len(f.ops) for f in (program, *program.callees()))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("make", [small_gpt, imported_mlp])
def test_the_loss_is_the_step_s(make, plan: Plan):
    program: Program = make()
    main = distributed(program, plan).program
    found = evaluating(main, program.function)  # verified, validated
    check_order(project_all(found))
    assert found.inputs == main.inputs
    assert not found.updates
    assert size(found) < size(main) / 2
    (loss,) = SequentialExecutor().compute(found, program.arrays)
    assert loss == pytest.approx(program.results()[0], rel=1e-10)
    assert same(parse(pformat(found)), found)


def test_padding_stays():
    program = gpt2_tiny()
    main = distributed(program, Plan(tp=2)).program  # a vocabulary of 509
    assert any(v.role and v.role.source for v in main.inputs)
    (loss,) = SequentialExecutor().compute(evaluating(main, program.function), program.arrays)
    assert loss == pytest.approx(program.results()[0], rel=1e-10)


def test_any_outputs_may_be_asked_for():
    program = small_gpt()
    main = distributed(program, Plan(dp=2, pp=2, microbatches=2)).program
    some = [5, 2, 0]
    found = evaluation(main, some)
    verify(found)
    want = program.results()
    for k, x in zip(some, SequentialExecutor().compute(found, program.arrays), strict=True):
        np.testing.assert_allclose(x, want[k], rtol=1e-10, atol=1e-10)


def test_bundles_of_bundles():
    from distir.ir.function import FunctionMaker
    from distir.ir.type import Float64, Tensor

    f = FunctionMaker("main")
    x, y = (f.add_input_value(n, Tensor(Float64, (2,))) for n in "xy")
    outer = f.emit("Pack", f.emit("Pack", x, y), f.emit("Neg", x))
    inner, negative = f.emit("Unpack", outer)
    again = f.emit("Unpack", inner)[1]
    f.set_outputs([again, negative])
    assert sorted(paths(outer.type)) == [(0, 0), (0, 1), (1,)]
    assert evaluation(f.finalize()).outputs == (y,)
    assert not evaluation(f.finalize()).ops
