"""A survey lists all that is not supported, and agrees with the import."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from distir.importer import import_from_onnx, symbolic_dims
from distir.importer.survey import INITIALIZER, survey
from distir.ir import same
from distir.ir.errors import ModelError, UsageError
from tests.importer.models import info, node

EXAMPLES = Path(__file__).parents[2] / "examples"


def saved(path: Path, nodes: list[onnx.NodeProto], outputs: list[str], opset: int = 20) -> Path:
    weight = numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    inputs = [info("x", ["batch", 8]), info("image", ["batch", 1, 8, 8]), info("grid", ["batch", 8, 8, 2])]
    graph = onnx.helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name=name) for name in outputs], [weight])
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("mine", 1)]
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    return path


def test_all_at_once_with_counts_and_the_first_node(tmp_path):
    nodes = [
        node("MatMul", "x w", "a", "product"),
        node("Odd", "a", "b", "odd.0", domain="mine"),
        node("Odd", "b", "c", "odd.1", domain="mine"),
        node("Relu", "c", "d", "relu"),
        node("GridSample", "image grid", "s", "sample"),
        node("Softmax", "s", "t", "softmax", axis=9),  # tried, as onnx knows the type of GridSample's result
    ]
    path = saved(tmp_path / "m.onnx", nodes, ["d", "t"])
    found = survey(path, {"batch": 4})
    rows = {u.op: u for u in found.unsupported}
    assert (rows["Odd"].count, rows["Odd"].first) == (2, "odd.0")
    assert "domain mine" in rows["Odd"].reason
    assert (rows["GridSample"].count, rows["GridSample"].first) == (1, "sample")
    assert "out of range" in rows["Softmax"].reason
    assert set(rows) == {"Odd", "GridSample", "Softmax"}
    assert found.untried == 1  # Relu, whose operand has no known type
    assert found.program is None
    assert [op.op_type for op in found.ops] == ["MatMul"]
    assert found.weights == [("f32", (8, 8))]
    assert found.assumed == {}


def test_what_can_be_imported_is(tmp_path):
    found = survey(EXAMPLES / "gpt2-tiny.onnx", {"batch": 2})
    assert found.program is not None
    assert not found.unsupported
    assert same(found.program[0], import_from_onnx(EXAMPLES / "gpt2-tiny.onnx", dims={"batch": 2})[0])


def test_dims_that_are_left_out_are_assumed():
    found = survey(EXAMPLES / "mlp.onnx")
    assert list(found.assumed) == symbolic_dims(EXAMPLES / "mlp.onnx")
    assert found.program is not None
    with pytest.raises(UsageError, match="no symbolic dimension 'other'"):
        survey(EXAMPLES / "mlp.onnx", {"other": 2})


def test_data_that_is_missing_is_no_reason_to_stop(tmp_path):
    proto = onnx.load(EXAMPLES / "mlp.onnx")
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    assert survey(tmp_path / "m.onnx").files == ["m.bin"]
    size = (tmp_path / "m.bin").stat().st_size
    (tmp_path / "m.bin").unlink()
    found = survey(tmp_path / "m.onnx")
    assert [(u.op, u.count) for u in found.unsupported] == [(INITIALIZER, 16)]
    assert found.external <= size
    assert len(found.ops) == 15
    assert len(found.weights) == 16


def test_an_opset_that_is_not_supported(tmp_path):
    nodes = [node("Odd", "x", "y", "odd", domain="mine"), node("Relu", "x", "z", "relu")]
    found = survey(saved(tmp_path / "m.onnx", nodes, ["y", "z"], opset=5))
    assert {u.op for u in found.unsupported} == {"file", "Odd"}
    assert found.opset == 5


def test_no_model_at_all(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match="not a serialized ONNX model"):
        survey(tmp_path / "m.onnx")
