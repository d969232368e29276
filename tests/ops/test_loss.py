"""Losses against PyTorch's, and cross-entropy on a split vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import verify
from distir.ir.device import Device, Mesh
from distir.ir.function import FunctionMaker
from distir.ir.type import SUM, Float64, Int64, Replicate, Shard, Tensor
from distir.transforms.rewriting.decompose import decompose

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(size=(4, 3, 8)) * 20, RNG.integers(0, 8, (4, 3))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [None, 5, -100])
def test_cross_entropy_is_pytorchs(reduction: str, ignored: int | None):
    labels = np.where(RNG.random((4, 3)) < 0.3, 5 if ignored is None else ignored, LABELS)
    maker = FunctionMaker()
    x, y = (
        maker.add_input_value("x", Tensor(Float64, (4, 3, 8))),
        maker.add_input_value("y", Tensor(Int64, (4, 3))),
    )
    maker.emit("SoftmaxCrossEntropyLoss", x, y, reduction=reduction, ignore_index=ignored)
    function = maker.finalize()
    want = torch.nn.functional.cross_entropy(
        torch.tensor(LOGITS).movedim(-1, 1),
        torch.tensor(labels),
        reduction=reduction,
        ignore_index=-1 if ignored is None else ignored,
    )
    for f in (function, decompose(function)):
        (got,) = SequentialExecutor().compute(f, [LOGITS, labels])
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_the_count_depends_on_the_labels_alone():
    maker = FunctionMaker()
    x, y = (
        maker.add_input_value("x", Tensor(Float64, (4, 8))),
        maker.add_input_value("y", Tensor(Int64, (4,))),
    )
    maker.emit("SoftmaxCrossEntropyLoss", x, y, ignore_index=5)
    function = decompose(maker.finalize())
    (division,) = [op for op in function.ops if op.op_type == "Div"]
    producers, todo, leaves = function.producers(), [division.inputs[1]], set()
    while todo:
        v = todo.pop()
        leaves |= {v} if v not in producers else set()
        todo += producers[v].inputs if v in producers else ()
    assert leaves == {y}


def test_cross_entropy_on_a_split_vocabulary():
    """Batch split over dp, vocabulary over tp: three small reductions, of rows; no logits are gathered."""
    mesh = Mesh([Device("cpu", k) for k in range(4)], {"dp": 2, "tp": 2})
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor.whole(Float64, (4, 3, 8), mesh, [Shard(0), Shard(2)]))
    y = f.add_input_value("y", Tensor.whole(Int64, (4, 3), mesh, [Shard(0), Replicate()]))
    top = f.emit("MPIAllreduce", f.emit("ReduceMax", x, axes=(2,), keepdims=0), axis="tp")
    total, picked = (f.emit("MPIAllreduce", v, axis="tp") for v in f.emit("LogitSums", x, y, top))
    lse = f.emit("Add", f.emit("Log", total), top)
    rows = f.emit("Sub", lse, picked)
    loss = f.emit("ReduceSum", rows, axes=(0, 1), keepdims=0)
    assert loss.type.placements == (SUM, Replicate())
    loss = f.emit("MPIAllreduce", loss, axis="dp")
    count = f.emit("Constant", value=(12.0,), shape=(), dtype=Float64, device=mesh)
    dloss = f.emit("Div", f.emit("Constant", value=(1.0,), shape=(), dtype=Float64, device=mesh), count)
    drows = f.emit("Expand", dloss, shape=(4, 3), place=(("dp", Shard(0)),))
    dx = f.emit("CrossEntropyGrad", x, y, lse, drows)
    assert dx.type is x.type
    f.set_outputs([f.emit("Div", loss, count), dx])
    verify(f.finalize())
    got = SequentialExecutor().compute(f.finalize(), [LOGITS, LABELS])
    t = torch.tensor(LOGITS, requires_grad=True)
    want = torch.nn.functional.cross_entropy(t.movedim(-1, 1), torch.tensor(LABELS))
    want.backward()
    assert t.grad is not None
    np.testing.assert_allclose(got[0], want.detach(), rtol=1e-12)
    np.testing.assert_allclose(got[1], t.grad, rtol=1e-10, atol=1e-14)
