"""Small ONNX models for tests, run by onnxruntime and by distir."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from distir.executor.reference.sequential import SequentialExecutor
from distir.importer import import_from_onnx
from distir.ir import Function, parse, pformat, same, verify

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def info(name: str, shape: Sequence[int | str | None] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def node(op_type: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    """Names of inputs and outputs are separated by blanks; "-" is one left out."""
    row = ["" if i == "-" else i for i in inputs.split()]
    return helper.make_node(op_type, row, outputs.split(), name=name, **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    initializers: Mapping[str, np.ndarray] | None = None,
    opset: int = 20,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """A model with inputs like these arrays; outputs are declared without type."""
    declared = [info(k, x.shape, helper.np_dtype_to_tensor_dtype(x.dtype)) for k, x in inputs.items()]
    weights = [numpy_helper.from_array(x, k) for k, x in (initializers or {}).items()]
    results = [onnx.ValueInfoProto(name=k) for k in outputs]
    graph = helper.make_graph(nodes, "g", declared, results, weights)
    opsets = [
        helper.make_opsetid("", opset),
        *[helper.make_opsetid(d, 1) for d in {f.domain for f in functions}],
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def expected(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], reference: bool = False) -> list[np.ndarray]:
    """onnxruntime's results, or those of onnx's reference evaluator for ops that onnxruntime does not have."""
    if reference:
        from onnx.reference import ReferenceEvaluator

        return [np.asarray(y) for y in ReferenceEvaluator(proto).run(None, dict(inputs))]  # type: ignore[union-attr]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return [np.asarray(y) for y in session.run(None, dict(inputs))]


def computed(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], path: Path) -> tuple[Function, list[np.ndarray]]:
    """distir's results, from a file at `path`. The function is verified, printed and parsed back."""
    path.write_bytes(proto.SerializeToString())
    function, arrays = import_from_onnx(path)
    verify(function)
    assert same(parse(pformat(function)), function)
    feeds = {v: arrays[v] if v in arrays else inputs[v.name] for v in function.inputs}
    return function, SequentialExecutor().compute(function, feeds)


def equal(got: Sequence[np.ndarray], want: Sequence[np.ndarray], tolerance: float = 1e-4) -> None:
    """Assert equal shapes and types, and numbers within the tolerance, relative to the largest."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        size = float(np.max(np.abs(w[np.isfinite(w)]), initial=1)) if w.dtype.kind == "f" else 1
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * size)
