"""If, Loop and Scan with what they depend on known at import, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from distir.importer import import_from_onnx
from distir.importer.save import save_onnx
from distir.ir.errors import ModelError
from distir.transforms.differentiation.training import training_step
from tests.importer.models import FLOAT, INT64, computed, equal, expected, info, model, node
from tests.transforms.programs import Plan, filled
from tests.transforms.programs import check as distributed_equals_sequential

rng = np.random.default_rng(0)
BOOL = onnx.TensorProto.BOOL


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def graph(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, int],
    outputs: dict[str, int],
    stored: dict[str, Any] | None = None,
) -> onnx.GraphProto:
    """A graph inside a node; its floating inputs and outputs have no shapes."""
    rows = [[info(k, None if dtype == FLOAT else [], dtype) for k, dtype in row.items()] for row in (inputs, outputs)]
    ins, outs = rows
    return helper.make_graph(
        nodes, "g", ins, outs, [numpy_helper.from_array(np.asarray(v), k) for k, v in (stored or {}).items()]
    )


def check(proto: onnx.ModelProto, inputs: dict[str, np.ndarray], tmp_path: Path) -> None:
    equal(computed(proto, inputs, tmp_path / "m.onnx")[1], expected(proto, inputs), 1e-6)


@pytest.mark.parametrize("rank", [2, 3])
def test_if(rank: int, tmp_path: Path) -> None:
    """Both branches use the same names inside, and read outer ones; the condition follows from a shape."""
    branches = {
        "then_branch": graph(
            [node("Mul", "x two", "t"), node("Add", "t x", "r")], {}, {"r": FLOAT}, {"two": np.float32(2)}
        ),
        "else_branch": graph([node("Neg", "x", "t"), node("Add", "t shared", "r")], {}, {"r": FLOAT}),
    }
    nodes = [node("Shape", "x", "s"), node("Size", "s", "rank"), node("Equal", "rank three", "c")]
    nodes += [node("If", "c", f"y{k}", "", **branches) for k in range(2)]
    nodes.append(node("Add", "y0 y1", "y"))
    inputs = {"x": x(*range(2, 2 + rank))}
    check(model(nodes, inputs, ["y"], {"three": np.array(3), "shared": x(1)}), inputs, tmp_path)


def test_loop(tmp_path: Path) -> None:
    """Counted, with what each iteration adds, and the number of the iteration; then until a condition is false."""
    body = graph(
        [
            node("Cast", "i", "f", to=FLOAT),
            node("Add", "v f", "w"),
            node("Mul", "w x", "each"),
            node("Identity", "go", "on"),
        ],
        {"i": INT64, "go": BOOL, "v": FLOAT},
        {"on": BOOL, "w": FLOAT, "each": FLOAT},
    )
    body.node[3].CopyFrom(node("Not", "go", "on"))  # ends it after the first
    until = graph(
        [node("Add", "v v", "w"), node("Add", "n one", "m"), node("Less", "m most", "on")],
        {"i": INT64, "go": BOOL, "v": FLOAT, "n": INT64},
        {"on": BOOL, "w": FLOAT, "m": INT64},
        {"one": np.array(1)},
    )
    nodes = [node("Loop", "times - x", "v1 rows", body=body), node("Loop", "- yes v1 zero", "v2 n", body=until)]
    inputs = {"x": x(2, 3)}
    stored = {"times": np.array(3), "yes": np.array(True), "zero": np.array(0), "most": np.array(4)}
    check(model(nodes, inputs, ["v1", "rows", "v2", "n"], stored), inputs, tmp_path)


@pytest.mark.parametrize("back", [0, 1])
def test_scan(back: int, tmp_path: Path) -> None:
    body = graph(
        [node("Add", "s a", "t"), node("Mul", "t b", "u"), node("Neg", "u", "each")],
        {"s": FLOAT, "a": FLOAT, "b": FLOAT},
        {"t": FLOAT, "each": FLOAT},
    )
    how: dict[str, Any] = {"scan_input_axes": [1, 0], "scan_output_axes": [1], "scan_output_directions": [back]}
    scan = node("Scan", "s a b", "y z", body=body, num_scan_inputs=2, scan_input_directions=[0, back], **how)
    inputs = {"s": x(2), "a": x(2, 4), "b": x(4, 2)}
    check(model([scan], inputs, ["y", "z"]), inputs, tmp_path)


def test_nested(tmp_path: Path) -> None:
    """An If whose condition is the number of the iteration, in a loop."""
    branches = {
        "then_branch": graph([node("Relu", "v", "r")], {}, {"r": FLOAT}),
        "else_branch": graph([node("Mul", "v x", "r")], {}, {"r": FLOAT}),
    }
    body = graph(
        [node("Less", "i one", "c"), node("If", "c", "w", "", **branches), node("Identity", "go", "on")],
        {"i": INT64, "go": BOOL, "v": FLOAT},
        {"on": BOOL, "w": FLOAT},
        {"one": np.array(1)},
    )
    inputs = {"x": x(2, 3)}
    check(model([node("Loop", "times - x", "y", body=body)], inputs, ["y"], {"times": np.array(3)}), inputs, tmp_path)


def test_what_depends_on_data_is_refused(tmp_path: Path) -> None:
    path, inputs = tmp_path / "m.onnx", {"x": x(2), "c": np.array(True), "n": np.array(3)}
    branch = graph([node("Relu", "x", "r")], {}, {"r": FLOAT})
    step = [node("Add", "v v", "w"), node("Identity", "go", "on")]
    body = graph(step, {"i": INT64, "go": BOOL, "v": FLOAT}, {"on": BOOL, "w": FLOAT})
    for one, words in (
        (
            node("If", "c", "y", then_branch=branch, else_branch=branch),
            "If node 'y': its condition 'c' depends on data",
        ),
        (node("Loop", "n - x", "y", body=body), "the number of iterations .* depends on data"),
        (node("Loop", "many - x", "y", body=body), "iterations of 2 nodes are too many"),
    ):
        stored = {"many": np.array(1 << 40)}
        path.write_bytes(model([one], inputs, ["y"], stored).SerializeToString())
        with pytest.raises(ModelError, match=words) as e:
            import_from_onnx(path)
        assert "\n" not in str(e.value)


# ---------------------------------------------------------------- weights in graphs inside nodes


def weighing(tmp_path: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray], Path]:
    """Two nodes If whose branches have weights of one name, and a loop of three iterations whose body has one."""

    def branches(k: float) -> dict[str, onnx.GraphProto]:
        then = graph([node("Mul", "h w", "r")], {}, {"r": FLOAT}, {"w": np.full(4, k, np.float32)})
        other = graph([node("Add", "h u", "r")], {}, {"r": FLOAT}, {"u": np.zeros(4, np.float32)})
        return {"then_branch": then, "else_branch": other}

    body = graph(
        [node("Mul", "v l", "m"), node("Tanh", "m", "t"), node("Identity", "go", "on")],
        {"i": INT64, "go": BOOL, "v": FLOAT},
        {"on": BOOL, "t": FLOAT},
        {"l": np.full(4, 0.5, np.float32)},
    )
    nodes = [
        node("Identity", "x", "h"),
        node("If", "c", "a", "", **branches(2.0)),
        node("If", "c", "b", "", **branches(3.0)),
        node("Add", "a b", "s"),
        node("Loop", "n c s", "y", body=body),
    ]
    inputs = {"x": x(8, 4)}
    proto = model(nodes, inputs, ["y"], {"c": np.array(True), "n": np.array(3)})
    path = tmp_path / "weights.onnx"
    path.write_bytes(proto.SerializeToString())
    return proto, inputs, path


def test_weights_of_graphs_inside_are_trained(tmp_path: Path) -> None:
    """Those of the branch that is taken, and once that of a loop: gradients are torch's."""
    torch = pytest.importorskip("torch")
    proto, inputs, path = weighing(tmp_path)
    check(proto, inputs, tmp_path)
    function, arrays = import_from_onnx(path)
    assert [v.name for v in function.inputs if v.kind == "parameter"] == ["w", "w'", "l"]
    given = {v.name: np.asarray(a) for v, a in arrays.items()} | inputs
    step = filled(training_step(function, "mse", gradients=True), given, np.random.default_rng(0))
    held = {v.name: torch.tensor(a) for v, a in zip(step.function.inputs, step.arrays, strict=True)}
    first, second, looped = weights = [held[name].requires_grad_() for name in ("w", "w'", "l")]
    y = held["x"] * first + held["x"] * second
    for _ in range(3):
        y = torch.tanh(y * looped)
    torch.nn.functional.mse_loss(y, held["target"]).backward()
    got = dict(zip([v.name for v in step.function.outputs], step.results(), strict=True))
    for name, w in zip(("w", "w'", "l"), weights, strict=True):
        np.testing.assert_allclose(got[f"{name}.grad"], w.grad, rtol=1e-10)
    for plan in (Plan(2), Plan(1, 2), Plan(1, 1, 2, 2)):
        distributed_equals_sequential(step, plan)


def test_weights_of_graphs_inside_are_saved(tmp_path: Path) -> None:
    _, _, path = weighing(tmp_path)
    new = {name: x(4) for name in ("w", "w'", "l")}
    function, arrays = import_from_onnx(save_onnx(path, new, tmp_path / "new.onnx"))
    for v in function.inputs:
        if v.kind == "parameter":
            np.testing.assert_array_equal(np.asarray(arrays[v]), new[v.name])
