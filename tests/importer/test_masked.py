"""Assignments by a mask, as torch's exporter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import distir
from distir.executor.reference.sequential import SequentialExecutor
from distir.importer.masked import INSTEAD
from distir.importer.onnx import import_from_onnx
from distir.ir.errors import ModelError

ROWS, WIDTH = 4, 6


class Assigns(nn.Module):
    """Assigns to what a linear layer makes."""

    def __init__(self, assign: Callable[[Assigns, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.a, self.row, self.assign = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH)), assign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).clone()
        self.assign(self, h, x)
        return h


def number(m: Assigns, h: torch.Tensor, x: torch.Tensor) -> None:
    h[x > 0.5] = 3.0


def row(m: Assigns, h: torch.Tensor, x: torch.Tensor) -> None:
    h[x[:, 0] > 0] = m.row


def row_of_one(m: Assigns, h: torch.Tensor, x: torch.Tensor) -> None:
    h[(x > 0).all(-1)] = x[:1]


def of_two_dims(m: Assigns, h: torch.Tensor, x: torch.Tensor) -> None:
    h.view(2, 2, WIDTH)[x[:, 0].view(2, 2) > 0] = m.row


def twice(m: Assigns, h: torch.Tensor, x: torch.Tensor) -> None:
    number(m, h, x)
    row(m, h, x)


@pytest.mark.filterwarnings("ignore::distir.ir.errors.ModelWarning")
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("assign", [number, row, row_of_one, of_two_dims, twice])
def test_results_are_those_of_onnxruntime(assign, optimize: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    file = tmp_path / "assigns.onnx"
    torch.onnx.export(Assigns(assign).eval(), (x,), file, dynamo=True, optimize=optimize, verbose=False)
    assert "NonZero" in {n.op_type for n in onnx.load(file).graph.node}
    function, arrays = import_from_onnx(file)
    assert {"Where"} <= {op.spec.name for op in function.ops}
    session = onnxruntime.InferenceSession(file)
    for seed in range(3):
        data = np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)
        inputs = [arrays.get(v, data) for v in function.inputs]
        (got,) = SequentialExecutor().compute(function, inputs)
        (want,) = session.run(None, {session.get_inputs()[0].name: data})
        assert np.allclose(got, np.asarray(want), rtol=1e-5, atol=1e-6)


def as_many(m: Assigns, h: torch.Tensor, x: torch.Tensor) -> None:
    h[x > 10] = m.row[:0]


def of_what_it_selects(m: Assigns, h: torch.Tensor, x: torch.Tensor) -> None:
    h[x > 0] *= 2


@pytest.mark.parametrize(
    ("assign", "message"),
    [
        (as_many, r"a tensor of shape \(0,\) is assigned to what a mask selects of shape \(4, 6\)"),
        (of_what_it_selects, "NonZero node .*: op NonZero is not supported"),
    ],
)
def test_what_depends_on_how_many_it_selects_is_refused(assign, message: str) -> None:
    with pytest.raises(ModelError, match=message) as e:
        distir.load(Assigns(assign), (torch.randn(ROWS, WIDTH),))
    assert e.value.hint == INSTEAD["NonZero"]


def scatter(change: Callable[[dict[str, onnx.NodeProto]], None]) -> onnx.ModelProto:
    """`h[mask] = x` as the exporter writes it, changed."""
    nodes = {
        "expand": helper.make_node("Expand", ["mask", "shape"], ["whole"]),
        "nonzero": helper.make_node("NonZero", ["whole"], ["where"]),
        "transpose": helper.make_node("Transpose", ["where"], ["positions"], perm=[1, 0]),
        "cast": helper.make_node("Cast", ["mask"], ["ones"], to=TensorProto.INT64),
        "sum": helper.make_node("ReduceSum", ["ones"], ["count"], keepdims=0),
        "row": helper.make_node("Reshape", ["count", "one"], ["counts"]),
        "sizes": helper.make_node("Concat", ["counts", "rest"], ["sizes"], axis=0),
        "written": helper.make_node("Expand", ["x", "sizes"], ["spread"]),
        "flat": helper.make_node("Reshape", ["spread", "one"], ["updates"]),
        "scatter": helper.make_node("ScatterND", ["h", "positions", "updates"], ["y"]),
    }
    change(nodes)
    numbers = {"shape": [ROWS, WIDTH], "one": [-1], "rest": [WIDTH], "column": [ROWS, 1]}
    given = [helper.make_tensor(k, TensorProto.INT64, [len(v)], v) for k, v in numbers.items()]
    inputs = [
        helper.make_tensor_value_info("h", TensorProto.FLOAT, [ROWS, WIDTH]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, [ROWS, 1]),
        helper.make_tensor_value_info("other", TensorProto.BOOL, [ROWS, 1]),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [WIDTH]),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, WIDTH])
    graph = helper.make_graph(list(nodes.values()), "g", inputs, [output], given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "scatter.onnx")
    return folder / "scatter.onnx"


def plain(nodes: dict[str, onnx.NodeProto]) -> None:
    nodes["scatter"].attribute.append(helper.make_attribute("reduction", "none"))


@pytest.mark.parametrize("change", [lambda nodes: None, plain], ids=["", "reduction"])
def test_the_form_is_that_of_the_exporter(change, tmp_path: Path) -> None:
    file = saved(scatter(change), tmp_path)
    function, _ = import_from_onnx(file)
    assert [op.spec.name for op in function.ops] == ["Where"]
    rng = np.random.default_rng(0)
    h, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((ROWS, WIDTH), WIDTH))
    mask = np.array([True, False, True, False])[:, None]
    (want,) = onnxruntime.InferenceSession(file).run(None, {"h": h, "mask": mask, "other": mask, "x": x})
    assert np.array_equal(SequentialExecutor().compute(function, [h, mask, mask, x])[0], np.asarray(want))


def of_another_mask(nodes: dict[str, onnx.NodeProto]) -> None:
    nodes["cast"].input[0] = "other"


def of_columns(nodes: dict[str, onnx.NodeProto]) -> None:
    del nodes["transpose"].attribute[:]
    nodes["transpose"].attribute.append(helper.make_attribute("perm", [0, 1]))


def of_a_part(nodes: dict[str, onnx.NodeProto]) -> None:
    nodes["sum"].attribute.append(helper.make_attribute("noop_with_empty_axes", 1))


def added(nodes: dict[str, onnx.NodeProto]) -> None:
    nodes["scatter"].attribute.append(helper.make_attribute("reduction", "add"))


@pytest.mark.parametrize("change", [of_another_mask, of_columns, of_a_part, added])
def test_what_is_not_quite_an_assignment_is_refused(change, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="NonZero node"):
        import_from_onnx(saved(scatter(change), tmp_path))


def of_no_rows(nodes: dict[str, onnx.NodeProto]) -> None:
    nodes["sizes"].input[1] = "shape"


def of_less_than_rows(nodes: dict[str, onnx.NodeProto]) -> None:
    nodes["expand"].input[1] = "column"


@pytest.mark.parametrize("change", [of_no_rows, of_less_than_rows])
def test_a_mask_that_does_not_fit_is_refused(change, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a mask of shape \(4, 1\) does not fit data of shape \(4, 6\)"):
        import_from_onnx(saved(scatter(change), tmp_path))


def test_what_is_larger_than_what_is_selected_is_refused(tmp_path: Path) -> None:
    model = scatter(lambda nodes: None)
    model.graph.input[3].type.tensor_type.shape.dim[0].dim_value = 2 * WIDTH
    with pytest.raises(ModelError, match=r"a tensor of shape \(12,\) does not fit what is selected, of shape \(6,\)"):
        import_from_onnx(saved(model, tmp_path))


def test_positions_that_are_needed_elsewhere_stay(tmp_path: Path) -> None:
    model = scatter(lambda nodes: None)
    model.graph.output.append(helper.make_tensor_value_info("where", TensorProto.INT64, [2, None]))
    with pytest.raises(ModelError, match="NonZero node"):
        import_from_onnx(saved(model, tmp_path))
