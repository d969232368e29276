"""Every broken or unknown file ends in one error of one line that names the file, and the node where there is one."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from distir.importer import import_from_onnx, parse_tensor_from_file
from distir.ir.errors import ModelError, UsageError
from tests.importer.models import info, node

F, I = TensorProto.FLOAT, TensorProto.INT64


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    outputs: Sequence[onnx.ValueInfoProto] | None = None,
    initializers: Sequence[onnx.TensorProto] = (),
    opset: int = 20,
) -> Path:
    inputs = [info("x", [4, 3])] if inputs is None else inputs
    outputs = [info("y", [4, 3])] if outputs is None else outputs
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def weight(name: str = "w", shape: tuple[int, ...] = (3, 3)) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def external(name: str, shape: Sequence[int], **entries: object) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=F, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def refused(path: Path, *words: str, kind: type[ModelError | UsageError] = ModelError, **options: object) -> None:
    """Importing `path` ends in an error of one line that names the file and holds all `words`."""
    with pytest.raises(kind) as e:
        import_from_onnx(path, **options)  # type: ignore[arg-type]
    text = str(e.value)
    assert "\n" not in text
    for word in (path.name, *words):
        assert word in text


@pytest.fixture
def m(tmp_path: Path) -> Path:
    return tmp_path / "m.onnx"


def test_no_such_file(m: Path) -> None:
    refused(m, "there is no file", kind=UsageError)


def test_a_folder(tmp_path: Path) -> None:
    refused(tmp_path, "no regular file")


@pytest.mark.parametrize("data", [b"", b"hello, this is no model", b"\x00" * 100, b"\x08\x0a"])
def test_not_a_model(m: Path, data: bytes) -> None:
    m.write_bytes(data)
    refused(m, "not ")


@pytest.mark.parametrize("part", range(1, 10))
def test_cut_off(m: Path, part: int) -> None:
    """Wherever a file is cut, it is an error, not a smaller model."""
    save(m, [node("MatMul", "x w", "y", "product")], initializers=[weight()])
    data = m.read_bytes()
    m.write_bytes(data[: len(data) * part // 10])
    refused(m)


def test_unknown_op(m: Path) -> None:
    save(m, [node("Frobnicate", "x", "y", "n7")])
    refused(m, "n7", "Frobnicate", "not supported", "MatMul")


def test_op_of_another_domain(m: Path) -> None:
    save(m, [helper.make_node("Add", ["x", "x"], ["y"], name="n7", domain="com.example")])
    refused(m, "n7", "com.example")


def test_unknown_attribute(m: Path) -> None:
    save(m, [node("Relu", "x", "y", "n7", slope=2.0)])
    refused(m, "n7", "slope")


def test_bad_attribute_value(m: Path) -> None:
    save(m, [node("Transpose", "x", "y", "n7", perm=[0, 0])])
    refused(m, "n7", "perm")
    save(m, [node("Transpose", "x", "y", "n7", perm="a")])
    refused(m, "n7")


def test_undefined_input(m: Path) -> None:
    save(m, [node("Relu", "z", "y", "n7")])
    refused(m, "n7", "'z'")


def test_cycle(m: Path) -> None:
    save(m, [node("Add", "x b", "a", "n7"), node("Relu", "a", "b"), node("Relu", "b", "y")])
    refused(m, "n7", "'b'", "cycle")


@pytest.mark.parametrize("taken", ["x", "w", "a"])
def test_duplicated_name(m: Path, taken: str) -> None:
    save(m, [node("MatMul", "x w", "a"), node("Relu", "a", taken, "n7")], initializers=[weight()])
    refused(m, "n7", f"'{taken}'")


def test_duplicated_input_or_initializer(m: Path) -> None:
    save(m, [node("Relu", "x", "y")], inputs=[info("x", [4, 3]), info("x", [4, 3])])
    refused(m, "'x'", "twice")
    save(m, [node("MatMul", "x w", "y")], initializers=[weight(), weight()])
    refused(m, "'w'", "twice")


def test_output_that_nothing_makes(m: Path) -> None:
    save(m, [node("Relu", "x", "z")])
    refused(m, "'y'")


def test_shapes_and_types_that_do_not_fit(m: Path) -> None:
    save(m, [node("MatMul", "x w", "y", "n7")], initializers=[weight(shape=(5, 3))])
    refused(m, "n7", "expected")
    save(m, [node("Add", "x i", "y", "n7")], inputs=[info("x", [4, 3]), info("i", [4, 3], I)])
    refused(m, "n7", "f32")
    save(m, [node("Reshape", "x s", "y", "n7")], initializers=[numpy_helper.from_array(np.array([5, -1]), "s")])
    refused(m, "n7", "(5, -1)")


def test_declared_output_that_differs(m: Path) -> None:
    save(m, [node("Relu", "x", "y")], outputs=[info("y", [4, 5])])
    refused(m, "'y'", "declared")
    save(m, [node("Relu", "x", "y")], outputs=[info("y", [4, 3], I)])
    refused(m, "'y'", "declared")


def test_element_type(m: Path) -> None:
    save(m, [node("Relu", "x", "y")], inputs=[info("x", [4, 3], TensorProto.COMPLEX64)])
    refused(m, "'x'", "COMPLEX64")


def test_input_that_is_no_tensor(m: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("x", F, [4, 3])
    save(m, [node("Relu", "x", "y")], inputs=[sequence])
    refused(m, "'x'", "not a tensor")


def test_shape_that_depends_on_data(m: Path) -> None:
    save(m, [node("Reshape", "x s", "y", "n7")], inputs=[info("x", [4, 3]), info("s", [2], I)])
    refused(m, "n7", "'s'", "depends on data")


def test_opset(m: Path) -> None:
    save(m, [node("Relu", "x", "y")], opset=6)
    refused(m, "opset 6", "7 to")
    graphs = {k: helper.make_graph([node("Relu", "x", "y")], k, [], [info("y", [4, 3])]) for k in ("a", "b")}
    chosen = node("If", "c", "y", then_branch=graphs["a"], else_branch=graphs["b"])
    save(m, [chosen], initializers=[numpy_helper.from_array(np.array(True), "c")], opset=11)
    refused(m, "opset 11", "If", "opset 13 or later")
    save(m, [node("Scatter", "x", "y")], opset=9)
    refused(m, "opset 9 cannot be converted to 13")


def test_constants_that_cannot_be_computed(m: Path) -> None:
    a, b = (numpy_helper.from_array(np.arange(n), name) for n, name in ((2, "a"), (3, "b")))
    save(m, [node("Add", "a b", "c", "n7"), node("Expand", "x c", "y")], initializers=[a, b])
    refused(m, "n7", "known at import")


# ---------------------------------------------------------------- symbolic dims


def test_dim_not_given(m: Path) -> None:
    save(m, [node("Relu", "x", "y")], inputs=[info("x", ["batch", 3])], outputs=[info("y", ["batch", 3])])
    refused(m, "batch", "--dim batch=8", kind=UsageError)
    refused(m, "'bach'", "batch", kind=UsageError, dims={"batch": 1, "bach": 8})
    with pytest.raises(UsageError, match="at least 1"):
        import_from_onnx(m, dims={"batch": 0})


def test_unnamed_dim_can_be_given(m: Path) -> None:
    save(m, [node("Relu", "x", "y")], inputs=[info("x", [None, 3])], outputs=[info("y", [None, 3])])
    refused(m, "--dim x.0=8", kind=UsageError)
    assert import_from_onnx(m, dims={"x.0": 5})[0].outputs[0].type.shape == (5, 3)  # type: ignore[union-attr]


def test_sizes_that_are_beyond_all_counting(m: Path) -> None:
    """The error names the source of the size: the user's dim, the file, or the node with too large a result."""
    size = np.int64(1) << 52  # numpy's own products would overflow
    save(m, [node("Relu", "x", "y")], inputs=[info("x", ["batch", 3])], outputs=[info("y", ["batch", 3])])
    refused(m, "'x'", "13,510,798,882,111,488 elements, more than 2^53: batch =", kind=UsageError, dims={"batch": size})
    import_from_onnx(m, dims={"batch": (1 << 53) // 3})
    save(m, [node("Relu", "x", "y")], inputs=[info("x", [1 << 60])], outputs=[info("y", [1 << 60])])
    refused(m, "'x'", "more than 2^53")
    to = numpy_helper.from_array(np.array([1 << 50, 3]), "to")
    save(
        m, [node("Expand", "x to", "y", "n7")], inputs=[info("x", [1, 3])], outputs=[info("y", None)], initializers=[to]
    )
    import_from_onnx(m)
    to = numpy_helper.from_array(np.array([1 << 60, 1, 3]), "to")
    save(
        m, [node("Expand", "x to", "y", "n7")], inputs=[info("x", [1, 3])], outputs=[info("y", None)], initializers=[to]
    )
    refused(m, "n7", "Expand: f32[1152921504606846976, 1, 3] has", "more than 2^53")


# ---------------------------------------------------------------- weights


def with_weight(m: Path, tensor: onnx.TensorProto) -> Path:
    return save(m, [node("MatMul", "x w", "y")], initializers=[tensor])


def test_external_data_missing(m: Path) -> None:
    with_weight(m, external("w", [3, 3], location="w.bin"))
    refused(m, "'w'", "w.bin", "does not exist")


@pytest.mark.parametrize("location", ["../w.bin", "a/../../w.bin", "/etc/hostname", ""])
def test_external_data_elsewhere(tmp_path: Path, location: str) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(36))
    (tmp_path / "inside" / "a").mkdir(parents=True)
    m = with_weight(tmp_path / "inside" / "m.onnx", external("w", [3, 3], location=location))
    refused(m, "'w'", "not inside")


def test_external_data_through_a_link_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(36))
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "w.bin").symlink_to(tmp_path / "w.bin")
    m = with_weight(tmp_path / "inside" / "m.onnx", external("w", [3, 3], location="w.bin"))
    refused(m, "'w'", "not inside")


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({"length": 32}, "36 bytes"),
        ({"offset": 8, "length": 36}, "cut off"),
        ({"offset": -4}, "cut off"),
        ({"offset": "x"}, "not a number"),
    ],
)
def test_external_data_of_another_size(m: Path, entries: dict[str, object], word: str) -> None:
    m.with_name("w.bin").write_bytes(bytes(40))
    with_weight(m, external("w", [3, 3], location="w.bin", **entries))
    refused(m, "'w'", word)


def test_data_that_do_not_fit_the_shape(m: Path) -> None:
    raw = weight()
    raw.dims[0] = 4
    with_weight(m, raw)
    refused(m, "'w'", "48 bytes, got 36")
    with_weight(m, TensorProto(name="w", data_type=F, dims=[3, 3], float_data=[1.0]))
    refused(m, "'w'", "9 elements, got 1")
    with_weight(m, TensorProto(name="w", data_type=F, dims=[-3, 3]))
    refused(m, "'w'", "shape")


def test_parse_tensor_from_file(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    file = tmp_path / "t.pb"
    file.write_bytes(numpy_helper.from_array(array, "t").SerializeToString())
    got = parse_tensor_from_file(file)
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)
    for bad in (b"", b"\xff\xff\xff", file.read_bytes()[:-3]):
        file.write_bytes(bad)
        with pytest.raises(ModelError, match=r"t\.pb"):
            parse_tensor_from_file(file)
    with pytest.raises(UsageError, match="there is no file"):
        parse_tensor_from_file(tmp_path / "none.pb")


def test_a_definition_whose_operands_do_not_fit(m: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A past of keys alone. The message does not quote onnx's source."""
    names = ["q", "k", "v", "", "pk"]
    inputs = [info(name, [2, 4, 8, 16]) for name in names if name]
    attention = helper.make_node("Attention", names, ["y"])
    save(m, [attention], inputs, [info("y", [2, 4, 8, 16])], opset=23)
    refused(m, "Expand", "does not expand")
    with pytest.raises(ModelError) as e:
        import_from_onnx(m)
    assert not re.search(r"\.cc|Assertion|inliner", str(e.value))
    assert capfd.readouterr() == ("", "")
