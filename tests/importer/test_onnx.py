"""Imported Functions: results equal onnxruntime's; inputs and their roles; values known at import."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from distir.executor.reference.sequential import SequentialExecutor
from distir.importer import import_from_onnx, tensor_proto
from distir.ir import Function, Role
from distir.ir.errors import ModelError, ModelWarning, UsageError
from distir.ir.type import BFloat16, Float16, Float32
from tests.importer.models import computed, equal, expected, info, model, node

EXAMPLES = Path(__file__).parents[2] / "examples"


def feeds_for(function: Function, arrays: Any, seed: int = 0) -> dict[Any, np.ndarray]:
    """Arrays for the inputs that are not stored: a causal mask, positions, small integers, normal numbers."""
    rng = np.random.default_rng(seed)
    feeds: dict[Any, np.ndarray] = {}
    for v in function.inputs:
        shape = v.type.shape  # type: ignore[union-attr]
        if v in arrays:
            continue
        if v.name == "attention_mask":
            feeds[v] = np.triu(np.full(shape, np.finfo(np.float32).min, np.float32), 1)
        elif v.name == "position_ids":
            feeds[v] = np.arange(shape[-1])[None]
        elif v.type.dtype.floating:  # type: ignore[union-attr]
            feeds[v] = rng.standard_normal(shape).astype(np.float32)
        else:
            feeds[v] = rng.integers(0, 500, shape)
    return feeds


def against_onnxruntime(path: Path, batch: int) -> None:
    function, arrays = import_from_onnx(path, dims={"batch": batch})
    feeds = feeds_for(function, arrays)
    got = SequentialExecutor().compute(function, {**arrays, **feeds})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    want = onnxruntime.InferenceSession(path, options).run(None, {v.name: x for v, x in feeds.items()})
    equal(got, [np.asarray(y) for y in want], 1e-4)


@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny"])
@pytest.mark.parametrize("batch", [1, 8])
def test_examples_equal_onnxruntime(name: str, batch: int) -> None:
    against_onnxruntime(EXAMPLES / f"{name}.onnx", batch)


@pytest.mark.slow
def test_gpt2_equals_onnxruntime(tmp_path: Path) -> None:
    """124M parameters, in external data; importing them reads nothing and takes well under a second."""
    from examples.export import export

    path = export("gpt2", tmp_path / "gpt2.onnx")
    start = time.process_time()
    import_from_onnx(path, dims={"batch": 1})
    assert time.process_time() - start < 1
    against_onnxruntime(path, 1)


# ---------------------------------------------------------------- inputs


def test_inputs_and_roles() -> None:
    function, arrays = import_from_onnx(EXAMPLES / "gpt2-tiny.onnx", dims={"batch": 8})
    first = {v.name: v.role for v in function.inputs[:3]}
    assert first == {
        "input_ids": Role("data", 0),
        "attention_mask": Role("constant"),
        "position_ids": Role("constant"),
    }
    parameters = function.inputs[3:]
    assert all(v.role == Role("parameter") for v in parameters)
    stored = onnx.load(EXAMPLES / "gpt2-tiny.onnx").graph.initializer
    assert [v.name for v in parameters] == [t.name for t in stored if t.data_type == 1 and t.dims]
    assert set(arrays) == set(parameters)
    assert [v.name for v in function.outputs] == ["logits"]
    assert function.outputs[0].type.shape == (8, 16, 509)  # type: ignore[union-attr]
    assert import_from_onnx(EXAMPLES / "mlp.onnx", "mine", {"batch": 2})[0].name == "mine"


def write(path: Path, proto: onnx.ModelProto) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


def x(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_the_batch_dim(tmp_path: Path) -> None:
    """The first symbolic dim, or the one named; without any, dim 0 of every input that is no weight."""
    proto = model([node("Add", "a b", "y")], {"a": x(2, 3), "b": x(3)}, ["y"])
    path = write(tmp_path / "m.onnx", proto)
    assert [v.role for v in import_from_onnx(path)[0].inputs] == [Role("data", 0), Role("data", 0)]
    del proto.graph.input[:]
    proto.graph.input.extend([info("a", ["seq", "n"]), info("b", ["n"])])
    dims = {"seq": 2, "n": 3}
    write(path, proto)
    assert [v.role for v in import_from_onnx(path, dims=dims)[0].inputs] == [Role("data", 0), Role("constant")]
    roles = [v.role for v in import_from_onnx(path, dims=dims, batch="n")[0].inputs]
    assert roles == [Role("data", 1), Role("data", 0)]
    with pytest.raises(UsageError, match="no symbolic dimension 'm'"):
        import_from_onnx(path, dims=dims, batch="m")


def test_what_is_a_parameter(tmp_path: Path) -> None:
    """Floating and of rank 1 or more, running statistics excepted; scalars are constants; `constants`, `parameters`."""
    nodes = [
        node("BatchNormalization", "x scale bias mean variance", "a"),
        node("Mul", "a factor", "b"),
        node("Gather", "b index", "c", axis=1),
        node("Add", "c shift", "y"),
    ]
    weights = {n: np.abs(x(3)) for n in ("scale", "bias", "mean", "variance", "unused")}
    stored = {**weights, "factor": np.float32(2) + x(), "index": np.array([2, 0]), "shift": x(1)}
    path = write(tmp_path / "m.onnx", model(nodes, {"x": x(4, 3)}, ["y"], stored))

    def kinds(**options: Any) -> dict[str, str | None]:
        return {v.name: v.kind for v in import_from_onnx(path, **options)[0].inputs[1:]}

    default = {"scale": "parameter", "bias": "parameter", "mean": "constant", "variance": "constant"}
    assert kinds() == {**default, "shift": "parameter", "c.indices": "constant"}
    assert kinds(constants=["scale", "shift"])["scale"] == "constant"
    assert "shift" not in kinds(constants=["shift"])
    assert kinds(parameters=["factor"])["factor"] == "parameter"
    with pytest.raises(UsageError, match="no initializer 'gain'"):
        kinds(parameters=["gain"])


def mark(proto: onnx.ModelProto, name: str, key: str, value: str) -> None:
    entry = proto.graph.value_info.add(name=name)
    entry.metadata_props.add(key=key, value=value)


def test_what_the_exporter_says_is_no_parameter(tmp_path: Path) -> None:
    """Buffers, and initializers folded from no parameter, are not trained, and known at import if needed."""
    names = ("weight", "table", "turned", "angles", "plain", "factor")
    stored = {n: x(1) if n == "factor" else x(3) for n in names}
    nodes = [node("Mul", "x weight", "y0")]
    nodes += [node("Mul", f"y{k} {n}", f"y{k + 1}") for k, n in enumerate(names[1:])]
    proto = model(nodes, {"x": x(4, 3)}, ["y5"], stored)
    kind, folded = "pkg.torch.export.graph_signature.InputSpec.kind", "pkg.onnxscript.optimizer.folded_from"
    mark(proto, "weight", kind, "PARAMETER")
    mark(proto, "table", kind, "BUFFER")
    mark(proto, "turned", folded, "['val_1', 'b.weight']")
    mark(proto, "angles", folded, "['val_2', 'rotary.inv_freq']")
    mark(proto, "factor", folded, "['val_3']")
    path = tmp_path / "m.onnx"

    def kinds(**options: Any) -> dict[str, str | None]:
        return {v.name: v.kind for v in import_from_onnx(write(path, proto), **options)[0].inputs[1:]}

    # what it was computed from is known by names, of which only the signature knows what they are
    assert kinds() == {n: "constant" if n == "table" else "parameter" for n in names}
    lines = ["p_b_weight: PARAMETER target='b.weight'", "b_inv: BUFFER target='rotary.inv_freq' persistent=False"]
    signature = "\n".join(["", "# inputs", "p_a: PARAMETER target='weight'", *lines, "x: USER_INPUT"])
    proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=signature)
    want = dict.fromkeys(("weight", "turned", "plain"), "parameter") | dict.fromkeys(("table", "angles"), "constant")
    assert kinds() == want
    assert kinds(parameters=["table"]) == want | {"table": "parameter"}


def test_parameters_that_the_exporter_has_merged_are_reported(tmp_path: Path) -> None:
    """No warning for parameters that it has transposed or sliced, nor for a file that it has not changed."""
    stored = {"a.weight": x(3), "turned": x(3)}
    proto = model([node("Mul", "x a.weight", "y0"), node("Mul", "y0 turned", "y")], {"x": x(4, 3)}, ["y"], stored)
    names = ("a.weight", "b.weight", "c.weight", "d.bias")
    lines = [f"p: PARAMETER target='{name}'" for name in names]
    signature = "\n".join(["# inputs", *lines, "x: USER_INPUT"])
    proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=signature)
    path = write(tmp_path / "m.onnx", proto)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_from_onnx(path)
    mark(proto, "turned", "pkg.onnxscript.optimizer.folded_from", "['val_1', 'b.weight']")
    write(path, proto)
    with pytest.warns(ModelWarning, match=r"m\.onnx: 2 of the module's parameters, such as c\.weight, are not in"):
        import_from_onnx(path)


def test_initializers_that_are_also_inputs(tmp_path: Path) -> None:
    """As files of the oldest format have it."""
    proto = model([node("MatMul", "x w", "y")], {"x": x(2, 3), "w": x(3, 3)}, ["y"], {"w": x(3, 3)})
    function, arrays = import_from_onnx(write(tmp_path / "m.onnx", proto))
    assert [v.kind for v in function.inputs] == ["data", "parameter"]
    assert set(arrays) == {function.inputs[1]}


@pytest.mark.parametrize(("dtype", "ours"), [(np.float16, Float16), (ml_dtypes.bfloat16, BFloat16)])
def test_half_precision(dtype: Any, ours: Any, tmp_path: Path) -> None:
    w = x(3, 3).astype(dtype)
    proto = model([node("MatMul", "x w", "y")], {"x": x(2, 3).astype(dtype)}, ["y"], {"w": w})
    function, arrays = import_from_onnx(write(tmp_path / "m.onnx", proto))
    assert all(v.type.dtype is ours for v in (*function.inputs, *function.outputs))  # type: ignore[union-attr]
    got = arrays[function.inputs[1]]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, w)


# ---------------------------------------------------------------- arrays are read when asked for


def test_external_data_is_mapped_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB of weights (a sparse file) are imported immediately; arrays are memory maps of the file."""
    rows = 1 << 20
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(8 << 30)
        file.seek(4096)
        file.write(np.arange(4, dtype=np.float32).tobytes())
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, 2], data_location=TensorProto.EXTERNAL)
    large = TensorProto(name="u", data_type=TensorProto.FLOAT, dims=[rows, 2047], data_location=TensorProto.EXTERNAL)
    for t, offset in ((tensor, 4096), (large, 4096)):
        t.external_data.add(key="location", value="w.bin")
        t.external_data.add(key="offset", value=str(offset))
    proto = model([node("MatMul", "x w", "y"), node("MatMul", "x u", "z")], {"x": x(1, rows)}, ["y", "z"])
    proto.graph.initializer.extend([tensor, large])
    path = write(tmp_path / "m.onnx", proto)
    read: list[Any] = []
    mapped = tensor_proto._mapped  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(tensor_proto, "_mapped", lambda *args: read.append(args[3]) or mapped(*args))
    function, arrays = import_from_onnx(path)
    assert read == []
    w = arrays[function.inputs[1]]
    assert read == [(rows, 2)]
    assert isinstance(w, np.memmap)
    assert w[:3].tolist() == [[0, 1], [2, 3], [0, 0]]
    assert arrays[function.inputs[1]] is w
    assert len(arrays) == 2
    assert "w" in repr(arrays)


def test_arrays_of_a_file_are_read_only() -> None:
    _, arrays = import_from_onnx(EXAMPLES / "mlp.onnx", dims={"batch": 1})
    with pytest.raises(ValueError, match="read-only"):
        next(iter(arrays.values()))[:] = 0


# ---------------------------------------------------------------- what is known at import


def ops_of(function: Function) -> list[str]:
    return [op.op_type for op in function.ops]


def test_shape_arithmetic_is_folded(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "rows", axis=0),
        node("Mul", "rows two", "more"),
        node("Unsqueeze", "more first", "row"),
        node("Concat", "row rest", "target", axis=0),
        node("Reshape", "x target", "y"),
    ]
    stored = {"zero": np.array(0), "two": np.array(2), "first": np.array([0]), "rest": np.array([-1])}
    function, got = computed(model(nodes, {"x": x(4, 6)}, ["y"], stored), {"x": x(4, 6)}, tmp_path / "m.onnx")
    assert ops_of(function) == ["Reshape"]
    assert function.ops[0].attributes == {"shape": (8, 3)}
    assert [v.name for v in function.inputs] == ["x"]
    assert got[0].shape == (8, 3)


def test_a_mask_is_computed_at_import(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "shape"),
        node("ConstantOfShape", "shape", "ones", value=numpy_helper.from_array(np.ones(1, np.float32))),
        node("Trilu", "ones", "low", upper=0),
        node("Add", "x low", "y"),
    ]
    proto = model(nodes, {"x": x(4, 4)}, ["y"])
    function, got = computed(proto, {"x": x(4, 4)}, tmp_path / "m.onnx")
    assert ops_of(function) == ["Add"]
    assert [(v.name, v.kind) for v in function.inputs] == [("x", "data"), ("low", "constant")]
    equal(got, expected(proto, {"x": x(4, 4)}))


def test_scalars_are_constants_and_what_does_nothing_goes(tmp_path: Path) -> None:
    nodes = [
        node("Identity", "x", "a"),
        node("Dropout", "a", "b"),
        node("Cast", "b", "c", to=TensorProto.FLOAT),
        node("Reshape", "c same", "d"),
        node("Mul", "d half", "e"),
        node("Relu", "e", "unused"),
        node("Mul", "half e", "f"),
        node("Identity", "f", "y"),
    ]
    stored = {"half": np.array([[0.5]], np.float32), "same": np.array([2, 3])}
    path = write(tmp_path / "m.onnx", model(nodes, {"x": x(2, 3)}, ["y"], stored))
    function, _ = import_from_onnx(path, constants=["half"])
    assert ops_of(function) == ["Constant", "Mul", "Mul"]
    constant = {"value": (0.5,), "shape": (1, 1), "dtype": Float32}
    assert function.ops[0].attributes == constant
    assert [v.name for v in function.outputs] == ["y"]
    assert [v.name for op in function.ops for v in op.outputs] == ["half", "e", "y"]


def test_dropout_of_a_model_exported_in_training_mode(tmp_path: Path) -> None:
    """It is the identity until a training step draws it; of a model exported for inference nothing stays."""
    nodes = [
        node("Dropout", "x ratio training", "a"),
        node("Dropout", "a half training", "b"),
        node("Dropout", "b ratio inference", "c"),
        node("Mul", "c c", "y"),
    ]
    stored = {
        "ratio": np.float32(0.25),
        "half": np.float32(0.5),
        "training": np.array(True),
        "inference": np.array(False),
    }
    proto = model(nodes, {"x": x(2, 3)}, ["y"], {k: np.asarray(v) for k, v in stored.items()})
    function, got = computed(proto, {"x": x(2, 3)}, tmp_path / "m.onnx")
    assert ops_of(function) == ["Dropout", "Dropout", "Mul"]
    assert [op.attributes["ratio"] for op in function.ops[:2]] == [0.25, 0.5]
    assert np.array_equal(got[0], x(2, 3) ** 2)


def test_a_ratio_of_dropout_is_below_1(tmp_path: Path) -> None:
    stored = {"ratio": np.asarray(np.float32(1)), "training": np.asarray(True)}
    proto = model([node("Dropout", "x ratio training", "y")], {"x": x(2, 3)}, ["y"], stored)
    with pytest.raises(ModelError, match=r"Dropout node 'y': ratio 1 is not in \[0, 1\)"):
        import_from_onnx(write(tmp_path / "m.onnx", proto))


@pytest.mark.parametrize(("dropout", "refused"), [("0.25", True), ("0.0", False)])
def test_attention_in_one_node_has_no_dropout(tmp_path: Path, dropout: str, refused: bool) -> None:
    """torch's exporter leaves it out there."""
    one = node("Attention", "x x x", "y")
    target = "torch.ops.aten.scaled_dot_product_attention.default"
    call = f"%y : [num_users=1] = call_function[target={target}](args = (%q, %q, %q, None, {dropout}), kwargs = {{}})"
    one.metadata_props.add(key="pkg.torch.onnx.fx_node", value=call)
    path = write(tmp_path / "m.onnx", model([one], {"x": x(2, 2, 5, 4)}, ["y"], opset=23))
    if refused:
        with pytest.raises(ModelError, match="Attention node 'y': torch's exporter leaves its dropout out"):
            import_from_onnx(path)
    else:
        assert "Softmax" in ops_of(import_from_onnx(path)[0])


@pytest.mark.parametrize("text", ["(" * 100_000, "%x, [1, ", "1" * 10_000, "-" * 100_000 + "1"])
def test_a_damaged_call_is_no_call(tmp_path: Path, text: str) -> None:
    one = node("Identity", "x", "y")
    call = f"%y : [num_users=1] = call_function[target=torch.ops.aten.detach.default](args = ({text}), kwargs = {{}})"
    one.metadata_props.add(key="pkg.torch.onnx.fx_node", value=call)
    function, _ = import_from_onnx(write(tmp_path / "m.onnx", model([one], {"x": x(2, 3)}, ["y"])))
    assert ops_of(function) == []


def test_outputs_that_are_inputs_or_known(tmp_path: Path) -> None:
    nodes = [node("Identity", "x", "y"), node("Shape", "x", "shape")]
    proto = model(nodes, {"x": x(2, 3)}, ["y", "shape", "y"])
    function, got = computed(proto, {"x": x(2, 3)}, tmp_path / "m.onnx")
    assert function.outputs[0] is function.inputs[0]
    assert got[1].tolist() == [2, 3]


def test_functions_of_the_model_are_inlined(tmp_path: Path) -> None:
    inner = helper.make_function(
        "here", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 20)]
    )
    calls = [helper.make_node("Twice", [a], [b], domain="here") for a, b in (("x", "h"), ("h", "y"))]
    proto = model(calls, {"x": x(2, 3)}, ["y"], functions=[inner])
    function, got = computed(proto, {"x": x(2, 3)}, tmp_path / "m.onnx")
    assert ops_of(function) == ["Add", "Add"]
    equal(got, [4 * x(2, 3)])


def test_names_stay_unique(tmp_path: Path) -> None:
    """Whatever an op that takes several of ours is called, and whatever others are."""
    nodes = [node("LeakyRelu", "x", "y.relu"), node("LeakyRelu", "y.relu", "y"), node("Add", "y y", "y.relu.1")]
    function, _ = computed(model(nodes, {"x": x(2)}, ["y.relu.1", "y"]), {"x": x(2)}, tmp_path / "m.onnx")
    names = [v.name for v in function.inputs] + [v.name for op in function.ops for v in op.outputs]
    assert len(set(names)) == len(names)
