"""Models of opsets 7 to 12, which are converted, against onnxruntime, which runs them as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.importer.models import computed, equal, expected, model, node

rng = np.random.default_rng(0)


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


ROI = np.zeros(0, np.float32)
STATISTICS = {"g": x(3), "b": x(3), "m": x(3), "v": np.abs(x(3)) + 1}
CASES: list[tuple[int, str, str, np.ndarray, dict[str, np.ndarray], dict[str, Any]]] = [
    *[(k, t, "x", x(2, 3, 4), {}, {}) for k in (7, 11) for t in ("Softmax", "LogSoftmax")],
    (8, "Softmax", "x", x(2, 3, 4), {}, {"axis": 2}),
    (7, "Clip", "x", x(3, 4), {}, {"min": -0.5, "max": 0.3}),
    (10, "Clip", "x", x(3, 4), {}, {"max": 0.3}),
    (7, "Pad", "x", x(3, 4), {}, {"pads": [1, 0, 2, 1], "value": 3.0}),
    (10, "Pad", "x", x(3, 4), {}, {"pads": [1, 0, 2, 1], "mode": "reflect"}),
    (9, "Slice", "x", x(5, 6), {}, {"starts": [1, -3], "ends": [4, 6], "axes": [0, 1]}),
    (7, "Upsample", "x", x(1, 2, 3, 4), {}, {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "nearest"}),
    (9, "Upsample", "x s", x(1, 2, 3, 4), {"s": np.array([1, 1, 2, 2], np.float32)}, {"mode": "linear"}),
    (10, "Resize", "x s", x(1, 2, 3, 4), {"s": np.array([1, 1, 2, 1.5], np.float32)}, {"mode": "nearest"}),
    (10, "Resize", "x s", x(1, 2, 3, 4), {"s": np.array([1, 1, 2, 1.5], np.float32)}, {"mode": "linear"}),
    (10, "Resize", "x s", x(1, 2, 6, 5), {"s": np.array([1, 1, 0.6, 0.5], np.float32)}, {"mode": "linear"}),
    (11, "Resize", "x r s", x(1, 2, 3, 4), {"r": ROI, "s": np.array([1, 1, 2, 1.5], np.float32)}, {"mode": "linear"}),
    (9, "TopK", "x", x(3, 6), {}, {"k": 2, "axis": 1}),
    (10, "TopK", "x k", x(3, 6), {"k": np.array([2])}, {}),
    (7, "Dropout", "x", x(3, 4), {}, {"ratio": 0.3}),
    (11, "Dropout", "x", x(3, 4), {}, {}),
    *[(k, "BatchNormalization", "x g b m v", x(2, 3, 4), STATISTICS, {"epsilon": 0.1}) for k in (7, 9)],
    (8, "Squeeze", "x", x(3, 1, 4), {}, {"axes": [1]}),
    (12, "Unsqueeze", "x", x(3, 4), {}, {"axes": [0, 2]}),
    (11, "Split", "x", x(6, 2), {}, {"split": [2, 4]}),
    (12, "ReduceSum", "x", x(2, 3, 4), {}, {"axes": [0, 2], "keepdims": 0}),
    (7, "Gemm", "x w b", x(3, 4), {"w": x(4, 5), "b": x(5)}, {"alpha": 0.5}),
    (9, "Scatter", "x i u", x(3, 4), {"i": np.array([[0, 2]]), "u": x(1, 2)}, {"axis": 1}),
    (11, "ArgMax", "x", x(3, 4), {}, {"axis": 1}),
    (7, "LSTM", "x w r", x(4, 2, 3), {"w": x(1, 20, 3), "r": x(1, 20, 5)}, {"hidden_size": 5}),
    (8, "Expand", "x s", x(3, 1), {"s": np.array([2, 3, 4])}, {}),
    (9, "OneHot", "i d o", np.array([1, 0, 2]), {"d": np.array(3), "o": np.array([0, 2], np.float32)}, {}),
    (12, "SoftmaxCrossEntropyLoss", "x i", x(3, 4), {"i": np.array([1, 0, 2])}, {}),
]


@pytest.mark.parametrize(
    ("opset", "op_type", "operands", "array", "stored", "attributes"),
    CASES,
    ids=lambda v: v if isinstance(v, int | str) else "",
)
def test_converted(
    opset: int, op_type: str, operands: str, array: Any, stored: Any, attributes: Any, tmp_path: Path
) -> None:
    outputs = "y z" if op_type in ("TopK", "Split") else "y"
    inputs = {operands.split()[0]: array}
    proto = model([node(op_type, operands, outputs, **attributes)], inputs, outputs.split(), stored, opset)
    proto.ir_version = 6
    equal(computed(proto, inputs, tmp_path / "m.onnx")[1], expected(proto, inputs), 1e-5)
