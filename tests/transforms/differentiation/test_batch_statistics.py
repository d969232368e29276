"""Batch norms of a module exported in training mode: gradients and running statistics are torch's, in every plan."""

from __future__ import annotations

import functools
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import distir
from distir.api.model import load
from distir.api.rewrites import check_origins, rewritten
from distir.cli import main
from distir.executor.reference.sequential import SequentialExecutor
from distir.importer import import_from_onnx
from distir.ir.errors import MismatchError, UsageError
from distir.ir.function import Attributes, Function, FunctionMaker, Op, Role
from distir.ir.spec import lookup
from distir.ir.type import Float64, Tensor
from distir.transforms.differentiation.batch_statistics import with_batch_statistics
from distir.transforms.differentiation.training import SGD, training_step
from distir.transforms.pipeline.evaluation import evaluation
from distir.transforms.rewriting.laws import Origin
from tests.importer.models import model as model_of
from tests.importer.models import node
from tests.transforms.programs import Plan, Program, check, distributed, filled

BATCH, GROUPS = 8, 4


@functools.cache
def network() -> tuple[torch.nn.Module, Path]:
    """A ResNet of transformers, in training mode, and its file."""
    import transformers

    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}
    module = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)).train()
    for m in module.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            assert m.running_mean is not None
            assert m.running_var is not None
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = {"pixel_values": torch.randn(BATCH, 3, 16, 16)}
        shapes = {"pixel_values": {0: torch.export.Dim("batch")}}
        options: Any = {"dynamo": True, "optimize": False, "verbose": False}
        program = torch.onnx.export(module, (), kwargs=x, dynamic_shapes=shapes, **options)
    assert program is not None
    path = Path(tempfile.mkdtemp()) / "resnet.onnx"
    program.save(path)
    module.load_state_dict(before)
    for m in module.modules():
        if isinstance(m, torch.nn.BatchNorm2d):  # in a file numbers are of single precision
            m.momentum, m.eps = 1 - float(np.float32(0.9)), float(np.float32(m.eps))
    return module.double(), path


@functools.cache
def program(groups: int = 1) -> Program:
    function, arrays = import_from_onnx(network()[1], dims={"batch": BATCH, "batchnorm_groups": groups})
    step = training_step(function, "cross-entropy", SGD(0.1, momentum=0.9), gradients=True)
    rng = np.random.default_rng(0)
    given = {v.name: np.asarray(a) for v, a in arrays.items()}
    given |= {"labels": rng.integers(0, 5, BATCH), "pixel_values": rng.standard_normal((BATCH, 3, 16, 16))}
    return filled(step, given, rng)


def given_to(step: Program) -> dict[str, np.ndarray]:
    return {v.name: x for v, x in zip(step.function.inputs, step.arrays, strict=True)}


def statistics(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {k: x.numpy().copy() for k, x in module.named_buffers() if "running" in k}


@pytest.mark.parametrize("groups", [1, GROUPS])
def test_gradients_and_running_statistics_are_those_of_torch(groups: int) -> None:
    """In groups the loss is the mean of what torch gives for each of them, and so are running statistics: as in
    DistributedDataParallel, but for the replica whose buffers are kept."""
    module, step = network()[0], program(groups)
    given, before = given_to(step), {k: v.clone() for k, v in network()[0].state_dict().items()}
    got = dict(zip([v.name for v in step.function.outputs], step.results(), strict=True))
    losses, buffers = [], []
    module.zero_grad()
    rows = zip(*[np.split(given[k], groups) for k in ("pixel_values", "labels")], strict=True)
    for x, labels in rows:
        module.load_state_dict(before)
        logits = module(pixel_values=torch.tensor(x)).logits
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)) / groups
        loss.backward()
        losses.append(loss.item())
        buffers.append(statistics(module))
    module.load_state_dict(before)
    np.testing.assert_allclose(got["loss"], sum(losses), rtol=1e-10)
    for name, w in module.named_parameters():
        assert w.grad is not None
        np.testing.assert_allclose(got[f"{name}.grad"], w.grad, rtol=1e-8, atol=1e-10)
    for name in buffers[0]:
        want = np.mean([row[name] for row in buffers], axis=0)
        np.testing.assert_allclose(got[f"{name}.new"], want, rtol=1e-10)
        assert np.abs(got[f"{name}.new"] - given[name]).max() > 1e-3


WHOLE = [Plan(2), Plan(4), Plan(1, 1, 2), Plan(2, 1, 1, 2), Plan(2, zero=1), Plan(2, zero=3), Plan(1, 1, 2, 2)]
PARTS = [Plan(4), Plan(2, 1, 1, 2), Plan(1, 1, 2, 4), Plan(2, 1, 2, 2), Plan(1, 1, 1, 4), Plan(4, zero=3), Plan(2)]


@pytest.mark.parametrize("plan", WHOLE, ids=str)
def test_of_the_whole_batch_in_every_plan(plan: Plan) -> None:
    check(program(), plan)


@pytest.mark.parametrize("plan", PARTS, ids=str)
def test_of_groups_in_every_plan(plan: Plan) -> None:
    check(program(GROUPS), plan)


def forward() -> tuple[Function, dict[str, np.ndarray]]:
    """The imported network without a loss, and its inputs."""
    function, arrays = import_from_onnx(network()[1], dims={"batch": BATCH})
    given = given_to(program())
    return function, {v.name: np.asarray(arrays[v]) if v in arrays else given[v.name] for v in function.inputs}


def test_without_a_loss_it_computes_what_the_file_says() -> None:
    """With the running statistics: torch's exporter writes inference mode."""
    function, given = forward()
    x = given["pixel_values"].astype(np.float32)
    (want,) = onnxruntime.InferenceSession(network()[1]).run(None, {"pixel_values": x})
    (got,) = SequentialExecutor().compute(function, [x if v.kind == "data" else given[v.name] for v in function.inputs])
    np.testing.assert_allclose(got, np.asarray(want), atol=1e-5)
    assert {v.kind for v in function.inputs if "running" in v.name} == {"state"}


@pytest.mark.parametrize(("groups", "plan"), [(1, None), (1, Plan(2)), (GROUPS, Plan(2, 1, 2, 2))], ids=str)
def test_held_out_samples_are_evaluated_with_the_running_statistics(groups: int, plan: Plan | None) -> None:
    step = program(groups)
    given, module = given_to(step), network()[0].eval()
    whole = step.function if plan is None else distributed(step, plan).program
    (got,) = SequentialExecutor().compute(evaluation(whole), step.arrays)
    with torch.no_grad():
        logits = module(pixel_values=torch.tensor(given["pixel_values"])).logits
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(given["labels"])).item()
    module.train()
    np.testing.assert_allclose(got, want, rtol=1e-10)
    assert abs(float(step.results()[0]) - want) > 1e-3


def normed(path: Path, nodes: list[Any], **arrays: Any) -> Path:
    x = np.zeros((BATCH, 3, 5), np.float32)
    stored = {k: np.asarray(a, np.float32) for k, a in arrays.items()}
    path.write_bytes(model_of(nodes, {"x": x}, ["y"], stored).SerializeToString())
    return path


NORM = {"g": [1.0, 2, 3], "b": [0.0, 1, 2], "m": [0.5, 0, -1], "d": [1.0, 2, 3]}


def test_a_norm_that_is_used_twice_moves_its_statistics_twice(tmp_path: Path) -> None:
    nodes = [
        node("BatchNormalization", "x g b m d", "h", training_mode=1, momentum=0.5),
        node("Exp", "h", "e"),
        node("BatchNormalization", "e g b m d", "y", training_mode=1, momentum=0.5),
    ]
    function, arrays = import_from_onnx(normed(tmp_path / "twice.onnx", nodes, **NORM))
    rng = np.random.default_rng(0)
    step = filled(training_step(function, "mse"), {v.name: np.asarray(a) for v, a in arrays.items()}, rng)
    got = dict(zip([v.name for v in step.function.outputs], step.results(), strict=True))
    x, g, b = (given_to(step)[k] for k in "xgb")
    mean, variance = x.mean((0, 2)), x.var((0, 2))
    row = (slice(None), slice(None), None)
    e = np.exp((x - mean[None][row]) / np.sqrt(variance + 1e-5)[None][row] * g[None][row] + b[None][row])
    for name, first, second in (("m", mean, e.mean((0, 2))), ("d", variance, e.var((0, 2)))):
        want = 0.25 * np.asarray(NORM[name]) + 0.25 * first + 0.5 * second
        np.testing.assert_allclose(got[f"{name}.new"], want, rtol=1e-6)
    check(step, Plan(2))


def test_a_norm_of_one_channel_has_running_statistics(tmp_path: Path) -> None:
    """Which are one number each, but no constants."""
    nodes = [
        node("ReduceSum", "x axes", "s"),
        node("BatchNormalization", "s g b m d", "y", training_mode=1),
    ]
    one = {k: a[:1] for k, a in NORM.items()}
    path = normed(tmp_path / "one.onnx", nodes, **one)
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axes"))
    onnx.save(model, path)
    step = training_step(import_from_onnx(path)[0], "mse")
    assert {"m", "d"} <= {v.name for v in step.updates.values()}


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    training = normed(tmp_path / "a.onnx", [node("BatchNormalization", "x g b m d", "y", training_mode=1)], **NORM)
    with pytest.raises(UsageError, match="its batch of 8 cannot be split into 3 groups"):
        import_from_onnx(training, dims={"batchnorm_groups": 3})
    with pytest.raises(UsageError, match="must be at least 1, got 0"):
        import_from_onnx(training, dims={"batchnorm_groups": 0})
    other = normed(tmp_path / "b.onnx", [node("BatchNormalization", "x g b m d", "y")], **NORM)
    with pytest.raises(UsageError, match="has no batch norm in training mode") as e:
        import_from_onnx(other, dims={"batchnorm_groups": 2})
    assert e.value.hint is not None


def test_a_run_returns_the_running_statistics_and_saves_them(tmp_path: Path) -> None:
    model = load(network()[1], {"batch": BATCH, "batchnorm_groups": 2}, loss="cross-entropy")
    result = distir.run(model, distir.Plan(dp=2), steps=2, backend="numpy", check=True)
    assert result.check is not None
    assert result.check.ok, result.check
    again = load(result.save(tmp_path / "trained.onnx"), {"batch": BATCH})
    running = [v for v in again.function.inputs if "running" in v.name]
    assert len(running) == 12
    for v in running:
        np.testing.assert_array_equal(np.asarray(again.arrays[v]), result.weights[v.name])
        assert not np.array_equal(
            result.weights[v.name], next(x for w, x in model.initial().items() if w.name == v.name)
        )


# ---------------------------------------------------------------- the law


def centred() -> Function:
    """Each column less its running mean, and less the largest of a running one and its own."""
    f = FunctionMaker("centred")
    x = f.add_input_value("x", Tensor(Float64, (4, 6)), Role("data", 0))
    rows = [f.add_input_value(name, Tensor(Float64, (1, 6)), Role("state")) for name in ("mean", "other")]
    of_batch = [f.emit(kind, x, axes=(0,), keepdims=1) for kind in ("ReduceMean", "ReduceMax")]
    used = [f.emit("RunningStatistic", a, b, momentum=0.9, correction=1.0) for a, b in zip(rows, of_batch, strict=True)]
    f.set_outputs([f.emit("Sub", f.emit("Sub", x, used[0]), used[1])])
    return f.finalize()


FAULTS: dict[str, Callable[[Op], Op]] = {
    "of another value": lambda op: Op(op.spec, (op.inputs[0],) * 2, op.attributes, op.outputs),
    "another momentum": lambda op: Op(op.spec, op.inputs, Attributes({**op.attributes, "momentum": 0.5}), op.outputs),
    "another op": lambda op: Op(lookup("Add"), op.inputs, Attributes(), op.outputs),
    "one that is left": lambda op: Op(lookup("RunningStatistic"), op.inputs, op.attributes, op.outputs),
}


def test_what_is_switched_is_reported() -> None:
    made = with_batch_statistics(centred())
    check_origins(made)
    assert rewritten(made) == ["with_batch_statistics: 2 BatchStatistic in place of 2 RunningStatistic"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_rejects(fault: str) -> None:
    source = centred()
    made = with_batch_statistics(source)
    first = next(op for op in made.ops if op.op_type == "BatchStatistic")
    ops = tuple([FAULTS[fault](op) if op is first else op for op in made.ops])
    wrong = Function(made.name, made.inputs, ops, made.outputs)
    wrong.cache[Origin] = made.cache[Origin]
    with pytest.raises(MismatchError):
        check_origins(wrong)


# ---------------------------------------------------------------- the command line


def test_the_flag_reads_the_batch_as_parts_of_replicas_and_microbatches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node("BatchNormalization", "x g b m d", "y", training_mode=1)]
    path = str(normed(tmp_path / "a.onnx", nodes, **NORM))
    flags = ["--loss", "mse", "--dp", "2", "--microbatches", "2", "--after", "training"]
    shapes = []
    for more in ([], ["--local-batchnorm"]):
        assert main(["show", path, *flags, *more]) == 0
        shapes.append("f32[4, 2, 3, 5]" in capsys.readouterr().out)
    assert shapes == [False, True]
    assert main(["show", "gpt:layers=1,hidden=8,heads=2", *flags, "--local-batchnorm"]) == 2
    assert "has no batch norms" in capsys.readouterr().err
