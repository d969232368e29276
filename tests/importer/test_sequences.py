"""Sequences of tensors, and torch's EmbeddingBag, which its exporter writes as a loop that makes one."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distir.importer import import_from_onnx
from distir.ir import Function
from distir.ir.errors import ModelError
from distir.transforms.differentiation.training import SGD, training_step
from tests.importer.models import computed, equal, expected, model, node
from tests.transforms.programs import Plan, Program, check, filled

BATCH, BAG, ROWS = 8, 3, 12


class Bags(torch.nn.Module):
    """Bags of embeddings, and a layer."""

    def __init__(self, mode: str, offsets: list[int] | None) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(ROWS, 4, mode=mode)
        self.last = torch.nn.Linear(4, 5)
        self.register_buffer("offsets", None if offsets is None else torch.tensor(offsets))

    def forward(self, ids: Any) -> Any:
        return self.last(self.bag(ids, self.offsets))


class GivenOffsets(Bags):
    def forward(self, ids: Any, offsets: Any) -> Any:  # pyright: ignore
        return self.last(self.bag(ids, offsets))


def exported(module: torch.nn.Module, path: Path, optimize: bool, dynamic: bool, **inputs: torch.Tensor) -> Path:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: Any = {"dynamic_shapes": {"ids": {0: torch.export.Dim("batch")}}} if dynamic else {}
        options |= {"dynamo": True, "optimize": optimize, "verbose": False}
        program = torch.onnx.export(module, (), kwargs=inputs, **options)
    assert program is not None
    program.save(path)
    return path


def trained(path: Path, dims: dict[str, int]) -> tuple[Function, Program]:
    """The imported module, and its training step on random numbers."""
    function, arrays = import_from_onnx(path, dims=dims)
    rng = np.random.default_rng(0)
    shape = next(v.type.global_shape for v in function.inputs if v.name == "ids")  # type: ignore[union-attr]
    given = {v.name: np.asarray(a) for v, a in arrays.items()} | {"ids": rng.integers(0, ROWS, shape)}
    step = training_step(function, "cross-entropy", SGD(0.1), gradients=True)
    labels = next(v.type.global_shape for v in step.inputs if v.name == "labels")  # type: ignore[union-attr]
    return function, filled(step, given | {"labels": rng.integers(0, 5, labels)}, rng)


def check_gradients(module: torch.nn.Module, step: Program) -> None:
    """The loss and all gradients are torch's, in double precision."""
    given = {v.name: x for v, x in zip(step.function.inputs, step.arrays, strict=True)}
    assert {v.name for v in step.function.inputs if v.kind == "parameter"} == {k for k, _ in module.named_parameters()}
    module = module.double()
    loss = torch.nn.functional.cross_entropy(module(torch.tensor(given["ids"])), torch.tensor(given["labels"]))
    loss.backward()
    got = dict(zip([v.name for v in step.function.outputs], step.results(), strict=True))
    np.testing.assert_allclose(got["loss"], loss.item(), rtol=1e-10)
    for name, w in module.named_parameters():
        assert w.grad is not None
        np.testing.assert_allclose(got[f"{name}.grad"], w.grad, rtol=1e-10, atol=1e-12)


EQUAL = [BAG * k for k in range(BATCH)]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "offsets", "optimize"),
    [
        ("sum", None, True),
        ("mean", None, False),
        pytest.param("mean", None, True, marks=slow),
        pytest.param("sum", None, False, marks=slow),
        pytest.param("max", None, True, marks=slow),
        pytest.param("mean", EQUAL, True, marks=slow),
        pytest.param("sum", EQUAL, False, marks=slow),
    ],
)
def test_bags_of_one_size_are_one_reduction(
    mode: str, offsets: list[int] | None, optimize: bool, tmp_path: Path
) -> None:
    """Which every plan splits as other reductions."""
    torch.manual_seed(0)
    module = Bags(mode, offsets)
    ids = torch.randint(ROWS, (BATCH, BAG) if offsets is None else (BATCH * BAG,))
    dynamic = offsets is None
    path = exported(module, tmp_path / "bags.onnx", optimize, dynamic, ids=ids)
    function, step = trained(path, {"batch": BATCH} if dynamic else {})
    kinds = [op.op_type for op in function.ops]
    assert [k for k in kinds if k in ("ReduceSum", "ReduceMean", "ReduceMax")] == [f"Reduce{mode.capitalize()}"]
    assert not {"Slice", "Concat"} & set(kinds)
    check_gradients(module, step)
    if dynamic:
        for plan in (Plan(2), Plan(2, 2), Plan(1, 1, 2, 2), Plan(4, zero=3)):
            check(step, plan)


@pytest.mark.parametrize(("mode", "optimize"), [("mean", True), pytest.param("sum", False, marks=slow)])
def test_bags_of_known_sizes(mode: str, optimize: bool, tmp_path: Path) -> None:
    """Some of them are empty. There are as many as numbers, so that these have one batch dim with the labels."""
    torch.manual_seed(0)
    module = Bags(mode, [0, 2, 2, 3, 3, 6, 6, 7])
    path = exported(module, tmp_path / "bags.onnx", optimize, False, ids=torch.randint(ROWS, (BATCH,)))
    _, step = trained(path, {})
    check_gradients(module, step)
    for plan in (Plan(2), Plan(1, 1, 2), Plan(1, 2)):
        check(step, plan)


@slow
def test_sizes_of_bags_that_depend_on_data_are_refused(tmp_path: Path) -> None:
    inputs = {"ids": torch.randint(ROWS, (9,)), "offsets": torch.tensor([0, 4])}
    path = exported(GivenOffsets("sum", None), tmp_path / "bags.onnx", True, False, **inputs)
    with pytest.raises(ModelError, match=r"its condition .* depends on data"):
        import_from_onnx(path)


# ---------------------------------------------------------------- the ops


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def at(k: int, name: str) -> Any:
    return node("Constant", "", name, value_int=k)


CONSTRUCT = node("SequenceConstruct", "x y x", "s")
SEQUENCES: dict[str, list[Any]] = {
    "stacked": [CONSTRUCT, node("ConcatFromSequence", "s", "out", axis=-1, new_axis=1)],
    "concatenated": [CONSTRUCT, node("ConcatFromSequence", "s", "out", axis=1)],
    "inserted": [
        at(-1, "k"),
        CONSTRUCT,
        node("Neg", "y", "z"),
        node("SequenceInsert", "s z k", "t"),
        node("ConcatFromSequence", "t", "out", axis=0),
    ],
    "erased": [
        at(1, "k"),
        CONSTRUCT,
        node("SequenceErase", "s k", "t"),
        node("SequenceErase", "t", "u"),
        node("ConcatFromSequence", "u", "out", axis=0),
    ],
    "of another": [
        node("SequenceEmpty", "", "e"),
        node("SequenceInsert", "e x", "s"),
        node("Identity", "s", "t"),
        node("SequenceInsert", "t y", "u"),
        node("ConcatFromSequence", "u", "out", axis=0),
    ],
    "its length": [
        CONSTRUCT,
        node("SequenceLength", "s", "n"),
        node("Cast", "n", "f", to=1),
        node("Add", "x f", "out"),
    ],
    "unbound": [
        at(1, "k"),
        node("SplitToSequence", "x", "s", axis=1, keepdims=0),
        node("SequenceAt", "s k", "out"),
    ],
    "in rows": [
        at(-1, "k"),
        node("SplitToSequence", "x", "s"),
        node("SequenceAt", "s k", "out"),
    ],
    "its last": [at(-2, "k"), CONSTRUCT, node("SequenceAt", "s k", "out")],
    "sums of rows out of order": [
        *[node("Slice", f"x a{2 * k} a{2 * k + 2}", f"x{k}") for k in range(2)],
        *[node("ReduceSum", f"x{k} a0", f"r{k}") for k in range(2)],
        node("SequenceConstruct", "r1 r0", "s"),
        node("ConcatFromSequence", "s", "out", axis=0),
    ],
    "sums of some rows": [
        *[node("Slice", f"x a{k} a{k + 1}", f"x{k}") for k in range(1)],
        *[node("ReduceSum", f"x{k} a0", f"r{k}") for k in range(1)],
        node("SequenceConstruct", "r0", "s"),
        node("ConcatFromSequence", "s", "out", axis=0),
    ],
    "unequal sums of rows": [
        node("Slice", "x a0 a1", "x0"),
        node("Slice", "x a1 a3", "x1"),
        *[node("ReduceSum", f"x{k} a0", f"r{k}") for k in range(2)],
        node("SequenceConstruct", "r0 r1", "s"),
        node("ConcatFromSequence", "s", "out", axis=0),
    ],
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_ops_on_sequences(case: str, tmp_path: Path) -> None:
    inputs = {"x": numbers(4, 3), "y": numbers(4, 3) + 1}
    stored = {f"a{k}": np.array([k]) for k in range(5)}
    proto = model(SEQUENCES[case], inputs, ["out"], stored)
    equal(computed(proto, inputs, tmp_path / "m.onnx")[1], expected(proto, inputs, reference=True))


def test_a_position_that_is_not_there_is_refused(tmp_path: Path) -> None:
    nodes = [at(3, "k"), CONSTRUCT, node("SequenceAt", "s k", "out")]
    inputs = {"x": numbers(2, 3), "y": numbers(2, 3)}
    with pytest.raises(ModelError, match="position 3 is not one of 3"):
        computed(model(nodes, inputs, ["out"]), inputs, tmp_path / "m.onnx")
