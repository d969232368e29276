"""Convolutions and pools: random windows against onnxruntime, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distir.importer import import_from_onnx
from distir.ir.errors import ModelError
from tests.importer.models import computed, equal, expected, model, node


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"])
def test_random_windows(op_type: str, seed: int, tmp_path: Path) -> None:
    """Within what onnxruntime takes: pads less than the kernel, and SAME for windows that leave nothing out."""
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 4))

    def row(low: int, high: int, count: int = rank) -> list[int]:
        return rng.integers(low, high + 1, count).tolist()

    kernel, same = row(1, 3), rng.random() < 0.3
    strides = [int(rng.integers(1, k + 1)) for k in kernel] if same else row(1, 3)
    dilations = [1] * rank if same or rng.random() < 0.5 else row(1, 3)
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
    if same:
        attributes["auto_pad"] = str(rng.choice(["SAME_UPPER", "SAME_LOWER"]))
    elif rng.random() < 0.7:
        attributes["pads"] = [int(rng.integers(0, k)) for k in kernel * 2]
    sizes = [2 + d * (k - 1) + extra for d, k, extra in zip(dilations, kernel, row(0, 3), strict=True)]
    channels, weights, names = 2, {}, "x"
    if op_type.startswith("Conv"):
        groups, c, m = row(1, 3, 3)
        attributes["group"], channels = groups, groups * c
        shape = (groups * m, c, *kernel) if op_type == "Conv" else (groups * c, m, *kernel)
        weights = {"w": rng.standard_normal(shape), "b": rng.standard_normal(groups * m)}
        names = "x w b" if rng.random() < 0.5 else "x w"
        if op_type == "ConvTranspose" and not same:
            attributes["output_padding"] = [int(rng.integers(0, s)) for s in strides]
    else:
        attributes["ceil_mode"] = int(rng.integers(0, 2))
    if op_type == "AveragePool":
        attributes["count_include_pad"] = int(rng.integers(0, 2))
    inputs = {"x": rng.standard_normal((2, channels, *sizes)).astype(np.float32)}
    stored = {k: a.astype(np.float32) for k, a in weights.items() if k in names}
    proto = model([node(op_type, names, "y", **attributes)], inputs, ["y"], stored)
    equal(computed(proto, inputs, tmp_path / "m.onnx")[1], expected(proto, inputs), 1e-5)


X, W = (1, 4, 5, 5), (6, 2, 3, 3)
POOL = {"kernel_shape": [2, 2]}


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes", "words"),
    [
        ("Conv", (X, W), {}, ["operand 1", "4 / 1 channels", "(6, 2, 3, 3)"]),
        ("Conv", (X, W), {"group": 4}, ["operand 1", "4 groups"]),
        ("Conv", (X, (6, 4, 3)), {}, ["operand 1", "2 spatial dims", "(6, 4, 3)"]),
        ("Conv", ((1, 4), (6, 4)), {}, ["operand 0", "1 to 3 spatial dims", "(1, 4)"]),
        ("Conv", (X, (6, 4, 7, 7)), {}, ["operand 0", "at least 7 elements", "spatial dim 0", "got 5"]),
        ("Conv", (X, (6, 4, 3, 3)), {"strides": [1]}, ["strides=(1,)", "2 integers from 1"]),
        ("Conv", (X, (6, 4, 3, 3)), {"dilations": [1, 0]}, ["dilations=(1, 0)", "2 integers from 1"]),
        ("Conv", (X, (6, 4, 3, 3)), {"pads": [1, 1, -1, 1]}, ["pads=(1, 1, -1, 1)", "4 integers from 0"]),
        ("Conv", (X, (6, 4, 3, 3)), {"kernel_shape": [3, 1]}, ["kernel_shape (3, 1)", "(6, 4, 3, 3)"]),
        ("Conv", (X, (6, 4, 3, 3)), {"auto_pad": "SAME"}, ["auto_pad='SAME'", "SAME_UPPER"]),
        ("Conv", (X, (6, 4, 3, 3)), {"auto_pad": "VALID", "pads": [1] * 4}, ["both pads", "auto_pad VALID"]),
        ("Conv", (X, (6, 3, 5, 5)), {"strides": [5, 5]}, ["operand 1", "4 channels", "(6, 3, 5, 5)"]),
        ("Conv", (X, (6, 4, 3, 3), (1,)), {}, ["operand 2", "a bias for 6 channels", "(1,)"]),
        ("Conv", (X, (6, 4, 5, 5), (1,)), {"strides": [5, 5]}, ["operand 2", "a bias for 6 channels", "(1,)"]),
        ("ConvTranspose", (X, (4, 2, 3, 3)), {"output_padding": [0, 1]}, ["spatial dim 1", "less than the stride, 1"]),
        ("ConvTranspose", (X, (4, 2, 1, 1)), {"pads": [3, 0, 3, 0]}, ["spatial dims (-1, 5)"]),
        ("ConvTranspose", (X, (3, 2, 1, 1)), {}, ["operand 0", "(1, 3, 5, 5)"]),
        ("MaxPool", (X,), {}, ["kernel_shape=()", "2 integers from 1"]),
        ("MaxPool", (X,), {**POOL, "pads": [2, 0, 0, 0]}, ["pads", "a window of 2", "(2, 0, 0, 0)"]),
        ("AveragePool", (X,), {**POOL, "mode": 1}, ["attribute mode"]),
        ("LpPool", ((1, 4),), POOL, ["operand 0", "(1, 4)"]),
    ],
    ids=str,
)
def test_refuses(
    op_type: str, operands: tuple[tuple[int, ...], ...], attributes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    """In one line that names the node, what was expected, and what it got."""
    inputs = {name: np.ones(shape, np.float32) for name, shape in zip("xwb", operands, strict=False)}
    path = tmp_path / "m.onnx"
    path.write_bytes(
        model([node(op_type, " ".join(inputs), "y", "n7", **attributes)], inputs, ["y"]).SerializeToString()
    )
    with pytest.raises(ModelError) as e:
        import_from_onnx(path)
    text = str(e.value)
    assert "\n" not in text
    for word in ("m.onnx", f"{op_type} node 'n7'", *words):
        assert word in text


def test_positions_of_maxima_are_refused(tmp_path: Path) -> None:
    inputs = {"x": np.ones(X, np.float32)}
    path = tmp_path / "m.onnx"
    path.write_bytes(model([node("MaxPool", "x", "y z", "n7", **POOL)], inputs, ["y", "z"]).SerializeToString())
    with pytest.raises(ModelError, match="MaxPool node 'n7': its result 'z', the positions of the maxima"):
        import_from_onnx(path)


def test_patches_become_a_product(tmp_path: Path) -> None:
    """Only those that lie side by side, larger than one element."""
    for kernel, strides, product in [((5, 5), [5, 5], True), ((1, 1), [1, 1], False), ((5, 5), [5, 4], False)]:
        inputs = {"x": np.ones(X, np.float32), "w": np.ones((6, 4, *kernel), np.float32)}
        proto = model([node("Conv", "x w", "y", strides=strides)], inputs, ["y"])
        function, got = computed(proto, inputs, tmp_path / "m.onnx")
        equal(got, expected(proto, inputs))
        assert ("MatMul" in [op.op_type for op in function.ops]) is product


def test_a_bias_of_zeros_is_none(tmp_path: Path) -> None:
    """torch's exporter writes one where a module has none, and for 3 spatial dims in the shape (channels, 2)."""
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((1, 4, 5, 5, 5)).astype(np.float32)}
    weights = {"w": rng.standard_normal((6, 4, 3, 3, 3)).astype(np.float32)}
    bare = model([node("Conv", "x w", "y")], inputs, ["y"], weights)
    for shape in ((6, 2), (6,)):
        stored = weights | {"s": np.array(shape)}
        nodes = [node("ConstantOfShape", "s", "b"), node("Conv", "x w b", "y")]
        function, got = computed(model(nodes, inputs, ["y"], stored), inputs, tmp_path / "m.onnx")
        equal(got, expected(bare, inputs), 1e-5)
        assert [op.op_type for op in function.ops] == ["Conv"]
