"""Constants that several layers share have a copy for each, so that tensor parallelism splits the layers."""

from __future__ import annotations

import numpy as np

import distir
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, parse, pformat, same, verify
from distir.ir.function import Role
from distir.ir.type import Float64, Tensor
from distir.transforms.rewriting.part_constants import part_constants


def sharing() -> Function:
    """Three layers of width 8 that add the same zeros, which the output has, too."""
    f = FunctionMaker("sharing")
    h = f.add_input_value("x", Tensor(Float64, (4, 8)), Role("data", 0))
    zeros = f.emit("Expand", f.emit("Constant", value=(0.0,), shape=(1,), dtype=Float64), shape=(8,))
    row = f.emit("Reshape", zeros, shape=(1, 8))
    for k in range(3):
        w = f.add_input_value(f"w{k}", Tensor(Float64, (8, 8)), Role("parameter"))
        h = f.emit("Tanh", f.emit("Add", f.emit("MatMul", h, w), row))
    f.set_outputs([h, zeros])
    return f.finalize()


def test_each_use_has_its_own() -> None:
    before = sharing()
    after = part_constants(before)
    verify(after)
    assert same(parse(pformat(after)), after)
    added = [op.inputs[1] for op in after.ops if op.op_type == "Add"]
    assert len(set(added)) == 3
    assert after.outputs == before.outputs
    assert part_constants(after) is after
    given = [np.random.default_rng(0).standard_normal(v.type.global_shape) for v in before.inputs]  # type: ignore[union-attr]
    for a, b in zip(*[SequentialExecutor().compute(f, given) for f in (before, after)], strict=True):
        assert np.array_equal(a, b)


def test_layers_that_share_one_are_split() -> None:
    """With the zeros in common a split of one layer's result would split that of the next: none could be split."""
    step = distir.Model(sharing()).training("mse")
    done = distir.run(step, distir.Plan(dp=2, tp=2), steps=1, backend="numpy", check=True)
    assert done.check is not None
    assert done.check.ok
    assert done.prediction is not None
    split = done.prediction.summary.split
    assert split is not None
    assert split.flops > 0.9
