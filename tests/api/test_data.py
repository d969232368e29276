"""Integers that index something are checked once, when data are read: where one is wrong, its sample is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distir
from distir.api import data as api_data
from distir.api.data import Data, IndexRange, index_ranges
from distir.ir import Function, FunctionMaker
from distir.ir.errors import UsageError
from distir.ir.function import Role
from distir.ir.type import Float64, Int64, Tensor
from distir.transforms.differentiation.training import training_step

ROWS, CLASSES = 7, 5


def classifier(ignored: int | None = None, batch: int = 0) -> Function:
    """Ids, 2 a sample, pick rows of a table, of which the classes of labels are learnt; the batch is dim `batch`."""
    f = FunctionMaker("m")
    shape = (4, 2) if batch == 0 else (2, 4)
    ids = f.add_input_value("ids", Tensor(Int64, shape), Role("data", batch))
    labels = f.add_input_value("labels", Tensor(Int64, shape), Role("data", batch))
    table = f.add_input_value("table", Tensor(Float64, (ROWS, CLASSES)), Role("parameter"))
    attributes = {} if ignored is None else {"ignore_index": ignored}
    f.add_op("SoftmaxCrossEntropyLoss", "loss", [f.emit("Gather", table, ids), labels], attributes)
    return f.finalize()


@given(st.data())
def test_the_first_sample_at_fault_is_reported(data: st.DataObject) -> None:
    """However many are looked at at once, and whichever dim is the batch's."""
    count, batch = data.draw(st.integers(4, 12)), data.draw(st.integers(0, 1))
    name, limit = data.draw(st.sampled_from([("ids", ROWS), ("labels", CLASSES)]))
    arrays = {"ids": np.zeros((count, 2), int), "labels": np.ones((count, 2), int)}
    arrays["labels"][1] = -100
    wrong = data.draw(
        st.dictionaries(st.integers(0, count - 1), st.sampled_from([-1, -limit, -99, limit, 10**9]), min_size=1)
    )
    for sample, number in wrong.items():
        arrays[name][sample, data.draw(st.integers(0, 1))] = number
    first = min(wrong)
    given = {k: x if batch == 0 else x.T for k, x in arrays.items()}
    also = ", or -100, which is ignored" if name == "labels" else ""
    said = f"^data: {name} holds {wrong[first]} in sample {first}, expected numbers from 0 to {limit - 1}{also}$"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_data, "_CHUNK", data.draw(st.integers(1, 30)))
        with pytest.raises(UsageError, match=said):
            Data(classifier(-100, batch), source=given)


@pytest.mark.parametrize("number", [-100, -1, 255])
@pytest.mark.parametrize("trained", [False, True])
def test_what_a_loss_ignores_is_no_wrong_label(number: int, trained: bool) -> None:
    """And nothing else: -100 is none where the loss ignores 255, nor in ids."""
    function = training_step(classifier(number), "loss") if trained else classifier(number)
    ids, labels = function.inputs[:2]
    assert index_ranges(function) == {
        ids: IndexRange(ROWS, frozenset()),
        labels: IndexRange(CLASSES, frozenset((number,))),
    }
    good, bad = np.zeros((4, 2), int), np.full((4, 2), number)
    Data(function, source={"ids": good, "labels": bad})
    for arrays in ({"ids": bad, "labels": good}, {"ids": good, "labels": bad - 1}):
        with pytest.raises(UsageError, match="in sample 0, expected numbers from 0 to"):
            Data(function, source=arrays)


def test_what_indexes_two_things_must_fit_both() -> None:
    """A loss ignores -100, a table does not know it."""
    f = FunctionMaker("m")
    ids = f.add_input_value("ids", Tensor(Int64, (4,)), Role("data", 0))
    table = f.add_input_value("table", Tensor(Float64, (ROWS, CLASSES)), Role("parameter"))
    f.emit("SoftmaxCrossEntropyLoss", f.emit("Gather", table, ids), ids, ignore_index=-100)
    assert index_ranges(f.finalize()) == {ids: IndexRange(CLASSES, frozenset())}


def test_an_input_without_samples_has_none_to_tell() -> None:
    f = FunctionMaker("m")
    x = f.add_input_value("x", Tensor(Float64, (4, ROWS)), Role("data", 0))
    columns = f.add_input_value("columns", Tensor(Int64, (3,)), Role("constant"))
    f.set_outputs([f.emit("Gather", x, columns, axis=1)])
    arrays: dict[str, Any] = {"x": np.zeros((4, ROWS)), "columns": np.array([0, 6, -1])}
    with pytest.raises(UsageError, match=r"^data: columns holds -1, expected numbers from 0 to 6$"):
        Data(f.finalize(), source=arrays)


@pytest.mark.parametrize("plan", [distir.Plan(), distir.Plan(dp=2), distir.Plan(tp=5)])
def test_labels_that_another_number_marks_do_not_count(plan: distir.Plan) -> None:
    """The loss is torch's."""
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, ROWS, (4, 2)), rng.integers(0, CLASSES, (4, 2))
    labels[1:3] = 255
    step = training_step(classifier(255), "loss")
    model = distir.Model(step, {step.inputs[2]: rng.standard_normal((ROWS, CLASSES))})
    (loss,) = distir.run(model, plan, data={"ids": ids, "labels": labels}, backend="numpy").losses
    logits = torch.tensor(model.arrays[step.inputs[2]][ids]).reshape(-1, CLASSES)
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(labels).reshape(-1), ignore_index=255)
    assert loss == pytest.approx(float(want), rel=1e-10)
