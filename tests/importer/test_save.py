"""Models saved with new weights: onnxruntime runs them, and they have the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from distir.importer import import_from_onnx, save
from distir.importer.save import save_onnx
from distir.ir.errors import UsageError
from tests.importer.models import info, model, node

MLP = Path(__file__).parents[2] / "examples" / "mlp.onnx"


def arrays_of(path: Path, dims: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
    dims = {"batch": 2} if dims is None else dims
    return {v.name: np.array(x) for v, x in import_from_onnx(path, dims=dims)[1].items()}


def output(path: Path) -> np.ndarray:
    data = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)
    return np.asarray(onnxruntime.InferenceSession(path).run(None, {"x": data})[0])


@pytest.mark.parametrize("external", [False, True])
def test_new_weights(tmp_path: Path, external: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if external:
        monkeypatch.setattr(save, "EXTERNAL_FROM", 1000)
    old = arrays_of(MLP)
    new = {k: (x * 0.9).astype(np.float64) for k, x in old.items() if "3" not in k}
    (tmp_path / "deep").mkdir()
    out = save_onnx(MLP, new, tmp_path / "deep" / "out.onnx")
    files = {p.name for p in out.parent.iterdir()}
    assert files == ({"out.onnx", "out.onnx.data"} if external else {"out.onnx"})
    got = arrays_of(out)
    assert got.keys() == old.keys()
    for k, x in got.items():
        want = new[k].astype(np.float32) if k in new else old[k]
        np.testing.assert_array_equal(x, want)
    assert not np.allclose(output(out), output(MLP))
    onnx.checker.check_model(str(out))
    back = save_onnx(out, old, tmp_path / "back.onnx")
    np.testing.assert_array_equal(output(back), output(MLP))
    assert (tmp_path / "back.onnx.data").exists() == external


def test_onto_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "EXTERNAL_FROM", 1000)
    path = save_onnx(MLP, {}, tmp_path / "m.onnx")
    _, arrays = import_from_onnx(path, dims={"batch": 2})
    mapped = {v.name: x for v, x in arrays.items()}  # of the file that is replaced
    save_onnx(path, {**mapped, "layers.0.bias": np.ones(32)}, path)
    got = arrays_of(path)
    assert got["layers.0.bias"].tolist() == [1] * 32
    np.testing.assert_array_equal(got["layers.1.weight"], arrays_of(MLP)["layers.1.weight"])


def test_bfloat16_stays(tmp_path: Path) -> None:
    x = np.ones((2, 3), ml_dtypes.bfloat16)
    proto = model([node("Add", "x w", "y")], {"x": x}, ["y"], {"w": x})
    source = tmp_path / "m.onnx"
    source.write_bytes(proto.SerializeToString())
    out = save_onnx(source, {"w": np.full((2, 3), 1.5, np.float32)}, tmp_path / "out.onnx")
    (tensor,) = onnx.load(out).graph.initializer
    assert tensor.data_type == TensorProto.BFLOAT16
    assert numpy_helper.to_array(tensor).astype(np.float32).tolist() == [[1.5] * 3] * 2


def test_weights_inside_functions(tmp_path: Path) -> None:
    """A function, called twice, has a weight in a branch: each call's is trained, and saved, apart."""
    branch = helper.make_graph(
        [node("Mul", "v w", "r")], "g", [], [info("r", None)], [numpy_helper.from_array(np.ones(3, np.float32), "w")]
    )
    inner = [node("Relu", "a", "v"), node("If", "c", "b", then_branch=branch, else_branch=branch)]
    opsets = [helper.make_opsetid("", 20)]
    scale = helper.make_function("here", "Scale", ["a", "c"], ["b"], inner, opsets)
    calls = [node("Scale", "x yes", "h", domain="here"), node("Scale", "h yes", "y", domain="here")]
    data = {"x": np.ones((2, 3), np.float32)}
    proto = model(calls, data, ["y"], {"yes": np.array(True)}, functions=[scale])
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    new = {name: np.full(3, 2.0 + k) for k, name in enumerate(arrays_of(tmp_path / "m.onnx", {}))}
    assert len(new) == 2
    out = save_onnx(tmp_path / "m.onnx", new, tmp_path / "out.onnx")
    got = arrays_of(out, {})
    assert {name: x.tolist() for name, x in got.items()} == {name: x.tolist() for name, x in new.items()}
    assert np.asarray(onnxruntime.InferenceSession(out).run(None, data)[0]).tolist() == [[6] * 3] * 2
    kept = save_onnx(tmp_path / "m.onnx", {}, tmp_path / "kept.onnx")
    assert len(onnx.load(kept).functions) == 1


def test_errors(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    with pytest.raises(UsageError, match="no initializer 'w'"):
        save_onnx(MLP, {"w": np.ones(3)}, out)
    with pytest.raises(UsageError, match=r"expected shape \(32,\), got \(3,\)"):
        save_onnx(MLP, {"layers.0.bias": np.ones(3)}, out)
    with pytest.raises(UsageError, match="there is no file"):
        save_onnx(tmp_path / "none.onnx", {}, out)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        save_onnx(MLP, {}, tmp_path / "file" / "out.onnx")
    assert {p.name for p in tmp_path.iterdir()} == {"file"}
