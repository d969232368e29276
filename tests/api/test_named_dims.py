"""Names of inputs whose dims a plan splits: what they stand for, and the hints for those that stand for nothing."""

from __future__ import annotations

import functools

import pytest

from distir.api.named_dims import named_dims
from distir.ir import Function, FunctionMaker
from distir.ir.errors import UsageError
from distir.ir.function import Role
from distir.ir.type import Float32, Int64, Tensor
from distir.transforms.differentiation.training import SGD, training_step
from distir.transforms.plan import InputSplit


@functools.cache
def function() -> Function:
    """The training step of a bag of words with positions, with momentum."""
    f = FunctionMaker("m")
    ids = f.add_input_value("input_ids", Tensor(Int64, (4, 6)), Role("data", 0))
    positions = f.add_input_value("position_ids", Tensor(Int64, (1, 6)), Role("constant"))
    labels = f.add_input_value("labels", Tensor(Int64, (4, 6)), Role("data", 0))
    scale = f.add_input_value("scale", Tensor(Float32, ()), Role("constant"))
    wte = f.add_input_value("wte.weight", Tensor(Float32, (10, 8)), Role("parameter"))
    wpe = f.add_input_value("wpe.weight", Tensor(Float32, (6, 8)), Role("parameter"))
    head = f.add_input_value("head[0].weight", Tensor(Float32, (8, 10)), Role("parameter"))
    x = f.emit("Add", f.emit("Gather", wte, ids), f.emit("Gather", wpe, positions))
    x = f.emit("Mul", f.emit("MatMul", x, head), scale)
    f.add_op("SoftmaxCrossEntropyLoss", "loss", [x, labels], {"reduction": "mean"})
    return training_step(f.finalize(), "loss", SGD(0.1, momentum=0.9))


def found(*texts: str) -> dict[str, list[tuple[str, int]]]:
    """By axis the names and dims."""
    made = named_dims(function(), [InputSplit.parse(text) for text in texts])
    return {axis: [(function().inputs[i].name, dim) for i, dim in pairs] for axis, pairs in made.items()}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a=2:input_ids.1", [("input_ids", 1)]),
        ("a=2:labels.1, input_ids.0", [("labels", 1), ("input_ids", 0)]),
        ("a=2:wte.weight.0", [("wte.weight", 0)]),
        ("a=2:head[0].weight.1", [("head[0].weight", 1)]),
        ("a=2:position_ids.1", [("position_ids", 1)]),
        ("a=2:*.1", [("input_ids", 1), ("labels", 1)]),  # data before all others, weights only by their names
        ("a=2:*_ids.1", [("input_ids", 1)]),
        ("a=2:*.0", [("input_ids", 0), ("labels", 0)]),
        ("a=2:w?e.*.0,w*.0", [("wte.weight", 0), ("wpe.weight", 0)]),
        ("a=2:w*.1", [("wte.weight", 1), ("wpe.weight", 1)]),
        ("a=2:pos*.1", [("position_ids", 1)]),
        ("a=2:*.1,labels.1", [("input_ids", 1), ("labels", 1)]),
    ],
)
def test_names(text: str, want: list[tuple[str, int]]) -> None:
    assert found(text) == {"a": want}


def test_several_axes() -> None:
    assert found() == {}
    assert found("a=2:labels.0", "b=2:*.1") == {"a": [("labels", 0)], "b": [("input_ids", 1), ("labels", 1)]}
    assert found("a=2:labels.1", "b=2:labels.1") == {"a": [("labels", 1)], "b": [("labels", 1)]}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("a=2:label.1", "split: a names label.1: no input is called 'label'", "did you mean labels?"),
        ("a=2:Input_IDs.1", "no input is called 'Input_IDs'", "did you mean input_ids?"),
        ("a=2:zzz.0", "no input is called 'zzz'", "data inputs are input_ids (4, 6), labels (4, 6)"),
        ("a=2:labels.2", "split: a names labels.2: the shape of %labels is (4, 6)", "its dims are 0 to 1"),
        ("a=2:scale.0", "the shape of %scale is ()", "it has no dims"),
        ("a=2:*.2", "split: a names *.2: no input matches and has a dim 2", "data inputs are input_ids (4, 6)"),
        ("a=2:z*.0", "split: a names z*.0: no input matches and has a dim 0", "data inputs are"),
        ("a=2:*momentum*.0", "no input matches", "data inputs are"),
        ("a=2:labels.1,labels.0", "split: a splits dims 1 and 0 of %labels", "another dim takes another axis"),
        ("a=2:*.1,labels.0", "split: a splits dims 1 and 0 of %labels", "another dim takes another axis"),
    ],
)
def test_names_of_nothing(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as e:
        found(text)
    assert message in e.value.message
    assert hint in (e.value.hint or "")
    assert "\n" not in f"{e.value.message}{e.value.hint}"


def test_many_data_are_not_all_listed() -> None:
    f = FunctionMaker("m")
    xs = [f.add_input_value(f"x{k}", Tensor(Float32, (4,)), Role("data", 0)) for k in range(10)]
    f.set_outputs(xs[:1])
    with pytest.raises(UsageError) as e:
        named_dims(f.finalize(), [InputSplit.parse("a=2:other.0")])
    assert e.value.hint == f"data inputs are {', '.join(f'x{k} (4,)' for k in range(8))}, ..."
