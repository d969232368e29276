"""A convolutional network: gradients are torch's, and every plan computes what one device does."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.api.model import load
from distir.executor.reference.sequential import SequentialExecutor
from distir.importer import import_from_onnx
from distir.ir import Function, verify
from distir.ir.type import BFloat16, Float16, Shard, Tensor
from distir.transforms.differentiation.training import SGD, training_step, with_loss
from distir.transforms.rewriting.mixed_precision import check_mixed_precision, mixed_precision
from tests.importer.models import model as model_of
from tests.importer.models import node
from tests.importer.test_exported import exported
from tests.transforms.programs import Plan, Program, check, distributed, filled

pytestmark = pytest.mark.usefixtures("preloaded")

BATCH = 8


class Net(torch.nn.Module):
    """Groups, strides, pads and dilations of all kinds; two of the pads differ at the two ends of a dim."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.grouped = nn.Conv2d(8, 16, (3, 2), stride=(2, 1), dilation=(1, 2), groups=2)
        self.up = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.point = nn.Conv2d(8, 4, 1)
        self.last = nn.Linear(16, 6)

    def forward(self, x: Any) -> Any:
        f = torch.nn.functional
        h = f.max_pool2d(torch.relu(self.first(x)), 3, 2, 1)
        h = torch.relu(self.depthwise(h))
        h = torch.tanh(self.grouped(f.pad(h, (0, 1, 1, 0))))
        h = f.avg_pool2d(torch.tanh(self.up(h)), 2, 2, ceil_mode=True, count_include_pad=False)
        h = f.max_pool2d(self.point(h), (1, 2), ceil_mode=True)
        return self.last(h.flatten(1))


@functools.cache
def network() -> tuple[torch.nn.Module, Path]:
    """The module, and a file of it."""
    torch.manual_seed(0)
    module = Net()
    folder = Path(tempfile.mkdtemp())
    return module, exported(module, {"x": torch.randn(BATCH, 3, 8, 8)}, folder / "net.onnx", optimize=False)


@functools.cache
def program() -> tuple[Function, Program]:
    """The network, and its training step on random images."""
    function, arrays = import_from_onnx(network()[1], dims={"batch": BATCH})
    step = training_step(function, "cross-entropy", SGD(0.1), gradients=True)
    rng = np.random.default_rng(0)
    given = {v.name: np.asarray(a) for v, a in arrays.items()}
    given |= {"labels": rng.integers(0, 6, BATCH), "x": rng.standard_normal((BATCH, 3, 8, 8))}
    return function, filled(step, given, rng)


def test_gradients_are_those_of_torch() -> None:
    module, step = network()[0], program()[1]
    given = {v.name: x for v, x in zip(step.function.inputs, step.arrays, strict=True)}
    weights = {name: torch.tensor(given[name], requires_grad=True) for name, _ in module.named_parameters()}
    y = torch.func.functional_call(module, weights, torch.tensor(given["x"]))
    loss = torch.nn.functional.cross_entropy(y, torch.tensor(given["labels"]))
    loss.backward()
    got = dict(zip([v.name for v in step.function.outputs], step.results(), strict=True))
    np.testing.assert_allclose(got["loss"], loss.item(), rtol=1e-13)
    for name, w in weights.items():
        assert w.grad is not None
        scale = float(w.grad.abs().max())
        np.testing.assert_allclose(got[f"{name}.grad"], w.grad, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, 1, 1, 1),
        Plan(1, 2, 1, 1),
        Plan(1, 1, 2, 2),
        Plan(1, 4, 1, 2),
        Plan(2, 2, 2, 2),
        Plan(2, 2, 1, 2, zero=3),
        Plan(1, 2, 2, 4, recompute="full"),
        Plan(4, 1, 2, 2, "gpipe", host=True),
    ],
    ids=str,
)
def test_equals_sequential(plan: Plan) -> None:
    check(program()[1], plan)


def test_channels_are_split() -> None:
    """Of alternating convolutions the results' and the operands': of grouped ones whole groups."""
    function = distributed(program()[1], Plan(1, 2, 1, 1)).program
    found: dict[str, Any] = {}
    for v in function.inputs:
        assert isinstance(v.type, Tensor)
        found[v.name] = [p for p in v.type.placements if isinstance(p, Shard)]
    assert found["first.weight"] == found["depthwise.weight"] == [Shard(0)]
    assert found["grouped.weight"] == [Shard(0)]
    assert found["x"] == []


@pytest.mark.parametrize("low", [BFloat16, Float16], ids=repr)
def test_mixed_precision(low: Any) -> None:
    """Convolutions are computed as products are; so are their gradients."""
    function = program()[0]
    loss = with_loss(function, "cross-entropy")
    mixed = mixed_precision(loss, low)
    check_mixed_precision(loss, mixed, low)
    step = training_step(function, "cross-entropy", SGD(0.1))
    narrow = [op for op in mixed.ops if op.op_type in ("Conv", "ConvGradInput", "MaxPool", "AveragePool")]
    assert len(narrow) == 8
    for op in narrow:
        for v in (*op.inputs, *op.outputs):
            assert isinstance(v.type, Tensor)
            assert v.type.dtype is low
    assert {"ConvGradWeight", "MaxPoolGrad", "AveragePoolGrad"} <= {op.op_type for op in step.ops}


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        (distir.Plan(), {"dtype": "float64"}),
        (distir.Plan(tp=2, microbatches=2), {"dtype": "float64"}),
        (distir.Plan(dp=2), {"precision": "bf16"}),
    ],
    ids=str,
)
def test_runs_on_torch(plan: distir.Plan, how: dict[str, Any]) -> None:
    """In processes, with torch's kernels: the weights are the sequential program's on numpy."""
    model = load(network()[1], {"batch": BATCH}, loss="cross-entropy", optimizer=SGD(0.1), **how)
    done = distir.run(model, plan, steps=2, check=True)
    assert done.check is not None
    assert done.check.ok


def test_results_are_those_of_torch() -> None:
    module, (function, step) = network()[0], program()
    verify(function)
    given = {v.name: x for v, x in zip(step.function.inputs, step.arrays, strict=True)}
    (got,) = SequentialExecutor().compute(function, [given[v.name].astype(np.float32) for v in function.inputs])
    want = module(torch.tensor(given["x"], dtype=torch.float32)).detach()
    np.testing.assert_allclose(got, want, atol=1e-5)


# ---------------------------------------------------------------- norms by the statistics of the batch


@functools.cache
def normed() -> Program:
    """The training step of two convolutions with batch norms, in training mode."""
    rng = np.random.default_rng(1)
    shapes = {"v": (4, 3, 3, 3), "w": (6, 4, 3, 3), **{f"{a}{k}": (n,) for k, n in ((1, 4), (2, 6)) for a in "sbmd"}}
    stored = {name: rng.random(shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        node("Conv", "x v", "h", strides=[2, 2]),
        node("BatchNormalization", "h s1 b1 m1 d1", "g mean variance", training_mode=1),
        node("Relu", "g", "r"),
        node("Conv", "r w", "i"),
        node("BatchNormalization", "i s2 b2 m2 d2", "j", training_mode=1, epsilon=0.1),
        node("GlobalMaxPool", "j", "p"),
        node("Flatten", "p", "y"),
    ]
    images = {"x": np.zeros((BATCH, 3, 9, 9), np.float32)}
    path = Path(tempfile.mkdtemp()) / "normed.onnx"
    path.write_bytes(model_of(nodes, images, ["y"], stored).SerializeToString())
    function, arrays = import_from_onnx(path)
    step = training_step(function, "cross-entropy", SGD(0.1), gradients=True)
    return filled(step, {v.name: np.asarray(a) for v, a in arrays.items()} | {"labels": rng.integers(0, 6, BATCH)}, rng)


def test_batch_norms_have_the_gradients_of_torch() -> None:
    step, f = normed(), torch.nn.functional
    given = {v.name: x for v, x in zip(step.function.inputs, step.arrays, strict=True)}
    w = {k: torch.tensor(x, requires_grad=k not in ("x", "labels")) for k, x in given.items()}
    h = f.batch_norm(f.conv2d(w["x"], w["v"], None, 2), None, None, w["s1"], w["b1"], True)
    h = f.batch_norm(f.conv2d(torch.relu(h), w["w"]), None, None, w["s2"], w["b2"], True, eps=0.1)
    loss = f.cross_entropy(h.amax((2, 3)), w["labels"])
    loss.backward()
    got = dict(zip([v.name for v in step.function.outputs], step.results(), strict=True))
    np.testing.assert_allclose(got["loss"], loss.item(), rtol=1e-6)  # epsilon is float32's in the file
    for name in ("v", "w", "s1", "b1", "s2", "b2"):
        want = w[name].grad
        assert want is not None
        np.testing.assert_allclose(got[f"{name}.grad"], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("plan", [Plan(2), Plan(1, 2), Plan(2, 2), Plan(1, 1, 2), Plan(4, zero=3)], ids=str)
def test_batch_norms_are_of_the_whole_batch(plan: Plan) -> None:
    check(normed(), plan)


# ---------------------------------------------------------------- norms of each sample


@functools.cache
def normed_by_sample() -> Program:
    """The training step of convolutions with norms over the space of each sample, and over groups of its channels."""
    rng = np.random.default_rng(2)
    shapes = {"v": (8, 3, 3, 3), "w": (8, 8, 3, 3), "s1": (8,), "b1": (8,), "s2": (8,), "b2": (8,), "u": (8, 6)}
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        node("Conv", "x v", "h", pads=[1, 1, 1, 1]),
        node("InstanceNormalization", "h s1 b1", "g"),
        node("Tanh", "g", "r"),
        node("Conv", "r w", "i", pads=[1, 1, 1, 1]),
        node("GroupNormalization", "i s2 b2", "j", num_groups=4, epsilon=0.1),
        node("Tanh", "j", "k"),
        node("GlobalAveragePool", "k", "p"),
        node("Flatten", "p", "q"),
        node("MatMul", "q u", "y"),
    ]
    path = Path(tempfile.mkdtemp()) / "normed.onnx"
    images = {"x": np.zeros((BATCH, 3, 8, 8), np.float32)}
    path.write_bytes(model_of(nodes, images, ["y"], stored, opset=21).SerializeToString())
    function, arrays = import_from_onnx(path)
    step = training_step(function, "cross-entropy", SGD(0.1), gradients=True)
    return filled(step, {v.name: np.asarray(a) for v, a in arrays.items()} | {"labels": rng.integers(0, 6, BATCH)}, rng)


def test_norms_of_each_sample_have_the_gradients_of_torch() -> None:
    step, f = normed_by_sample(), torch.nn.functional
    given = {v.name: x for v, x in zip(step.function.inputs, step.arrays, strict=True)}
    w = {k: torch.tensor(x, requires_grad=k not in ("x", "labels")) for k, x in given.items()}
    h = torch.tanh(f.instance_norm(f.conv2d(w["x"], w["v"], None, 1, 1), None, None, w["s1"], w["b1"]))
    h = torch.tanh(f.group_norm(f.conv2d(h, w["w"], None, 1, 1), 4, w["s2"], w["b2"], 0.1))
    loss = f.cross_entropy(h.mean((2, 3)) @ w["u"], w["labels"])
    loss.backward()
    got = dict(zip([v.name for v in step.function.outputs], step.results(), strict=True))
    np.testing.assert_allclose(got["loss"], loss.item(), rtol=1e-6)  # epsilon is float32's in the file
    for name in ("v", "w", "s1", "b1", "s2", "b2", "u"):
        want = w[name].grad
        assert want is not None
        np.testing.assert_allclose(got[f"{name}.grad"], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, 1, 1, 2),
        Plan(1, 2),
        Plan(1, 1, 2, 2),
        Plan(1, split=("h=2:x.2",)),
        Plan(2, split=("h=2:x.2", "w=2:x.3")),
        Plan(2, 2, zero=3),
    ],
    ids=str,
)
def test_norms_of_each_sample_are_split_by_batch_channels_and_space(plan: Plan) -> None:
    check(normed_by_sample(), plan)
