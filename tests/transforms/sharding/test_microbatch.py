"""What works on a microbatch and what on the whole batch."""

from __future__ import annotations

import numpy as np
import pytest

from distir.api.model import load
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Device, FunctionMaker, Role, verify
from distir.ir.function import Function
from distir.ir.type import Float64, Tensor
from distir.ir.validate import validate
from distir.ops.rules import shape_of
from distir.transforms.differentiation.training import SGD, training_step
from distir.transforms.parallel3d import distribute
from distir.transforms.plan import Plan
from distir.transforms.sharding import microbatch


def centred(late: bool, twice: bool = False) -> Function:
    """A layer on data less their mean over the batch; or (`late`) less the mean of what a first layer makes.

    `twice`: the mean is used whole (its square), and that beside it.
    """
    maker = FunctionMaker("centred")
    x = maker.add_input_value("x", Tensor(Float64, (8, 4)), Role("data", 0))
    v, w = [maker.add_input_value(n, Tensor(Float64, (4, 4)), Role("parameter")) for n in "vw"]
    h = maker.emit("Tanh", maker.emit("MatMul", x, v)) if late else x
    mean = maker.emit("ReduceMean", h, axes=(0,), keepdims=1)
    h = maker.emit("Sub", h, maker.emit("Add", mean, maker.emit("Mul", mean, mean)) if twice else mean)
    y = maker.emit("Relu", maker.emit("MatMul", h, w))
    maker.set_outputs([maker.add_op("ReduceSum", "loss", [y], {"axes": (0, 1), "keepdims": 0})])
    return training_step(maker.finalize(), "loss", SGD(0.1), gradients=True)


@pytest.mark.parametrize(("late", "twice"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("dp", "pp", "microbatches"), [(1, 1, 2), (2, 1, 4), (1, 2, 2), (2, 2, 2)])
def test_statistics_of_the_batch_are_those_of_the_whole_batch(late, twice, dp, pp, microbatches):
    step = centred(late, twice)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape_of(v)) for v in step.inputs]
    devices = [Device("cpu", i) for i in range(dp * pp)]
    done = distribute(step, Plan(dp, 1, pp, microbatches), devices)
    verify(done.program)
    validate(done.program, done.source)
    for a, b in zip(
        SequentialExecutor().compute(done.program, arrays), SequentialExecutor().compute(step, arrays), strict=True
    ):
        assert np.abs(a - b).max() <= 1e-10 * max(1, np.abs(b).max())


def test_only_the_statistics_are_in_the_prologue():
    done = distribute(centred(False), Plan(microbatches=2), [Device("cpu", 0)])
    before = {f.name: f for f in done.program.callees()}["prologue0"]
    assert not [op for op in before.ops if op.spec.weight is not None]  # the matrix products stay on microbatches
    assert any(op.spec is not None and op.inputs and shape_of(op.outputs[0]) == (1, 4) for op in before.ops)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_sweeps_do_not_grow_with_the_weights_of_a_step_that_is_skipped(optimizer, monkeypatch):
    """With loss scaling each update takes a gradient, scaled, beside what says whether all of them are finite."""
    sweeps = []

    def counted(*args, sweep=microbatch._sweep):
        sweeps[-1] += 1
        return sweep(*args)

    monkeypatch.setattr(microbatch, "_sweep", counted)
    for layers in (1, 4):
        text = f"gpt:layers={layers},hidden=16,heads=2,seq=4,vocab=16,batch=4"
        model = load(text, loss="cross-entropy", optimizer=optimizer, precision="fp16")
        sweeps.append(0)
        distribute(model.function, Plan(microbatches=2), [Device("cpu", 0)])
    assert sweeps[0] == sweeps[1] <= 4
