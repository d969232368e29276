"""Constant folding at import: repeated elements are stored once, and arrays that are too large are never computed."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.importer import import_from_onnx
from distir.importer import node as importer_node
from distir.importer.node import distinct_elements
from distir.ir.errors import ModelError
from tests.importer.models import computed, equal, expected, info, model, node

MUCH = 1 << 36


def saved(
    path: Path, nodes: Sequence[onnx.NodeProto], stored: dict[str, Any], shape: Sequence[int | str] = (2, 3)
) -> Path:
    """A model from `x` to `y`."""
    proto = model(nodes, {"x": np.zeros(2, np.float32)}, ["y"], {k: np.asarray(v) for k, v in stored.items()})
    proto.graph.input[0].CopyFrom(info("x", shape))
    path.write_bytes(proto.SerializeToString())
    return path


def after(*nodes: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Nodes that make `e`, whose sum is added to `x`."""
    return [*nodes, node("Cast", "e", "f", to=1), node("ReduceSum", "f", "r"), node("Add", "x r", "y")]


OUTER = [node("Range", "a s o", "i"), node("Unsqueeze", "i o", "j")]
RANGE = {"a": 0, "s": 1 << 21, "o": 1}
REFUSED: dict[str, tuple[list[onnx.NodeProto], dict[str, Any], Sequence[int | str]]] = {
    "Range": (after(node("Range", "a s o", "e")), RANGE | {"s": MUCH}, (2, 3)),
    "ranges": (after(*[node("Range", "a s o", e) for e in "bcdghijkle"]), RANGE | {"s": 1 << 22}, (2, 3)),
    "OneHot": (after(node("OneHot", "c s v", "e")), {"c": [0, 1], "s": MUCH, "v": [0.0, 1.0]}, (2, 3)),
    "HannWindow": (after(node("HannWindow", "s", "e")), {"s": MUCH}, (2, 3)),
    "EyeLike": ([node("EyeLike", "x", "y")], {}, (1 << 20, 1 << 20)),
    "Trilu": ([node("Trilu", "x", "y")], {}, (1 << 20, 1 << 20)),
    "Split": ([node("Split", "x", "y", num_outputs=1 << 40)], {}, (2, 3)),
    "SplitToSequence": (
        [node("SplitToSequence", "x o", "q", axis=0), node("SequenceAt", "q a", "y")],
        RANGE,
        (MUCH, 3),
    ),
}
REPEATED = {"c": [1], "s": [MUCH], "v": [0.0, 1.0]}
"""Operands of nodes that read `g`, which repeats a number 2^36 times and takes no memory."""
NUMBERS: dict[str, list[onnx.NodeProto]] = {
    "Reshape": [node("Reshape", "x g", "y")],
    "Expand": [node("Expand", "x g", "y")],
    "Expand, folded": after(node("Expand", "c g", "e")),
    "Tile": [node("Tile", "x g", "y")],
    "Slice": [node("Slice", "x g g", "y")],
    "Slice, folded": after(node("Slice", "c g g", "e")),
    "Squeeze, folded": after(node("Squeeze", "c g", "e")),
    "Unsqueeze": [node("Unsqueeze", "x g", "y")],
    "ReduceSum": [node("ReduceSum", "x g", "y")],
    "ConstantOfShape": [node("ConstantOfShape", "g", "y")],
    "Split": [node("Split", "x g", "y z")],
    "SplitToSequence": [node("SplitToSequence", "x g", "q", axis=0), node("SequenceAt", "q c", "y")],
    "SequenceAt": [node("SplitToSequence", "x c", "q", axis=0), node("SequenceAt", "q g", "y")],
    "Pad": [node("Pad", "x g", "y")],
    "CumSum": [node("CumSum", "x g", "y")],
    "OneHot": [node("OneHot", "x g v", "y")],
    "GatherND": [node("GatherND", "x g", "y")],
}
REFUSED |= {name: ([node("Expand", "c s", "g"), *nodes], REPEATED, (2, 3)) for name, nodes in NUMBERS.items()}
BITS = [
    node("Range", "a s o", "i"),
    node("Cast", "i", "j", to=9),
    node("Reshape", "j t", "k"),
    node("NonZero", "k", "e"),
]
REFUSED["NonZero"] = (after(*BITS), RANGE | {"t": [1] * 30 + [1 << 21]}, (2, 3))
TEXT = node("Constant", "", "t0", value=onnx.numpy_helper.from_array(np.array(["ab"], object)))
LONGER = [node("StringConcat", f"t{k} t{k}", f"t{k + 1}") for k in range(40)]
REFUSED["texts"] = ([TEXT, *LONGER, node("Relu", "x", "y")], {}, (2, 3))
UNFOLDED: dict[str, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
    "Expand": (after(node("Expand", "c s", "e")), {"c": [[1], [2]], "s": [MUCH, 2, 1]}),
    "Tile": (after(node("Tile", "c s", "e")), {"c": [1, 2], "s": [MUCH]}),
    "Pad": (after(node("Pad", "c s", "e")), {"c": [1, 2], "s": [0, MUCH]}),
    "ConstantOfShape": (after(node("ConstantOfShape", "s", "e")), {"s": [MUCH]}),
    "Resize": (
        after(node("Resize", "c - - s", "e")),
        {"c": np.ones((1, 1, 2, 2), np.int32), "s": [1, 1, 1 << 20, 1 << 20]},
    ),
    "Less": (after(*OUTER, node("Less", "i j", "e")), RANGE),
    "Mod": (after(*OUTER, node("Mod", "i j", "e")), RANGE),
    "Einsum": (after(OUTER[0], node("Einsum", "i i", "e", equation="i,j->ij")), RANGE),
    "MatMul": (after(*OUTER, node("Unsqueeze", "i a", "k"), node("MatMul", "j k", "e")), RANGE),
    "Gather": (after(node("Expand", "c s", "g"), node("Gather", "t g", "e")), {"c": [1], "s": [MUCH], "t": [5, 6]}),
    "CastLike": (
        [
            node("Expand", "c s", "g"),
            node("CastLike", "g x", "f"),
            node("ReduceSum", "f", "r"),
            node("Add", "x r", "y"),
        ],
        {"c": [1], "s": [MUCH]},
    ),
}


def peak(path: Path) -> int:
    """The peak memory of an import, in bytes."""
    tracemalloc.start()
    try:
        import_from_onnx(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_too_large_is_refused_before_it_is_made(name: str, tmp_path: Path) -> None:
    nodes, stored, shape = REFUSED[name]
    path = saved(tmp_path / "m.onnx", nodes, stored, shape)
    import_from_onnx(saved(tmp_path / "small.onnx", after(node("Identity", "c", "e")), {"c": [1, 2]}))  # loads modules
    patch = pytest.MonkeyPatch()
    patch.setattr(importer_node, "KNOWN", 1 << 26)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as e:
            import_from_onnx(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 28
    finally:
        tracemalloc.stop()
        patch.undo()
    assert "\n" not in str(e.value)
    words = {"ranges": "what is computed at import takes", "texts": "StringConcat"}
    assert words.get(name, name.split(",")[0]) in str(e.value)
    assert len(str(e.value)) < 3000
    assert "Unable to allocate" not in str(e.value)


@pytest.mark.parametrize("name", UNFOLDED)
def test_what_would_be_too_large_is_left_to_the_program(name: str, tmp_path: Path) -> None:
    """The error gives the size. No array of that size is allocated."""
    nodes, stored = UNFOLDED[name]
    path = saved(tmp_path / "m.onnx", nodes, stored)
    assert peak(path) < 1 << 27
    function, arrays = import_from_onnx(path)
    assert all(distinct_elements(arrays[v]) <= 1 << 21 for v in arrays)
    assert max(v.type.bytes for op in function.ops for v in op.outputs) >= 1 << 36


@pytest.mark.parametrize("index", [[[1]], [[-1], [0]]], ids=str)
def test_indices_that_repeat(index: list[list[int]], tmp_path: Path) -> None:
    nodes = [node("Expand", "i s", "g"), node("Gather", "w g", "e"), node("Add", "x e", "y")]
    stored = {"i": np.array(index), "s": np.array([2, 5]), "w": np.array([3, 4, 5], np.float32)}
    proto = model(nodes, {"x": np.ones((2, 5), np.float32)}, ["y"], stored)
    inputs = {"x": np.ones((2, 5), np.float32)}
    function, got = computed(proto, inputs, tmp_path / "m.onnx")
    equal(got, expected(proto, inputs))
    assert [op.op_type for op in function.ops][-3:-1] == ["Expand", "Gather"]


def test_a_node_of_many_outputs(tmp_path: Path) -> None:
    """Names are compared with a set of names: 20,000 outputs take a second, not a minute."""
    split = node("Split", "x", " ".join(f"o{k}" for k in range(20_000)), axis=0, num_outputs=20_000)
    path = saved(tmp_path / "m.onnx", [split, node("Relu", "o7", "y")], {}, (20_000, 1))
    begin = time.process_time()
    import_from_onnx(path)
    assert time.process_time() - begin < 8
    split.output[3] = "o0"
    with pytest.raises(ModelError, match="makes 'o0', which is there already"):
        import_from_onnx(saved(path, [split, node("Relu", "o7", "y")], {}, (20_000, 1)))


def test_what_repeats_is_an_operand_once(tmp_path: Path) -> None:
    nodes = [node("ConstantOfShape", "s", "z"), node("Expand", "c s", "d"), node("Where", "d x z", "y")]
    function, arrays = import_from_onnx(saved(tmp_path / "m.onnx", nodes, {"s": [2, 3], "c": [[True], [False]]}))
    assert [op.op_type for op in function.ops] == ["Expand", "Constant", "Expand", "Where"]
    assert [arrays[v].shape for v in arrays] == [(2, 1)]


def mask(batch: int, length: int) -> onnx.ModelProto:
    """A mask as transformers exports it: causal within parts of a sequence, which are separated by jumps of positions.

    Indices into (batch, length) are put side by side from two ranges.
    """
    nodes = [
        node("Expand", "positions shape", "p"),
        node("Slice", "p zero one last", "first"),
        node("Sub", "first one", "before"),
        node("Concat", "before p", "row", axis=-1),
        node("Slice", "row one end last", "later"),
        node("Slice", "row zero minus last", "earlier"),
        node("Sub", "later earlier", "steps"),
        node("Equal", "steps one", "same"),
        node("Not", "same", "jumps"),
        node("Cast", "jumps", "counts", to=7),
        node("CumSum", "counts axis", "parts"),
        node("Range", "first_number batch one_number", "b"),
        node("Unsqueeze", "b three", "samples"),
        node("Max", "samples queries", "all_q"),
        node("Max", "samples keys", "all_k"),
    ]
    for side, shape in (("q", "queries"), ("k", "keys")):
        nodes += [
            node("Shape", f"all_{side}", f"to_{side}"),
            node("Expand", f"samples to_{side}", f"b_{side}"),
            node("Unsqueeze", f"b_{side} last", f"b1_{side}"),
            node("Expand", f"{shape} to_{side}", f"i_{side}"),
            node("Unsqueeze", f"i_{side} last", f"i1_{side}"),
            node("Concat", f"b1_{side} i1_{side}", f"at_{side}", axis=-1),
            node("GatherND", f"parts at_{side}", f"part_{side}"),
            node("GatherND", f"p at_{side}", f"position_{side}"),
        ]
    nodes += [
        node("Equal", "part_q part_k", "alike"),
        node("LessOrEqual", "position_k position_q", "seen"),
        node("And", "alike seen", "mask"),
        node("Where", "mask x low", "y"),
    ]
    positions = np.arange(length) % max(1, length // 2)
    stored = {
        "positions": positions[None],
        "shape": np.array([batch, length]),
        "queries": np.arange(length).reshape(1, 1, -1, 1),
        "keys": np.arange(length).reshape(1, 1, 1, -1),
        "low": np.array(-1e9, np.float32),
        "three": np.array([1, 2, 3]),
        **{k: np.array([v]) for k, v in {"zero": 0, "one": 1, "last": -1, "minus": -1, "end": 2**62}.items()},
        **{k: np.array(v) for k, v in {"axis": -1, "first_number": 0, "batch": batch, "one_number": 1}.items()},
    }
    proto = model(nodes, {"x": np.zeros((1, 1, 1, 1), np.float32)}, ["y"], stored)
    proto.graph.input[0].CopyFrom(info("x", [batch, 1, length, length]))
    return proto


@pytest.mark.parametrize(("batch", "length"), [(1, 4), (3, 4), (2, 7)])
def test_a_mask_is_onnxruntimes(batch: int, length: int, tmp_path: Path) -> None:
    inputs = {"x": np.random.default_rng(0).standard_normal((batch, 1, length, length)).astype(np.float32)}
    proto = mask(batch, length)
    _, got = computed(proto, inputs, tmp_path / "m.onnx")
    equal(got, expected(proto, inputs))


def test_a_mask_of_many_samples_is_that_of_one(tmp_path: Path) -> None:
    """The program stores one sample's. All samples' are never allocated: 256 MiB, and as much for their indices."""
    found: list[np.ndarray] = []
    for batch in (1, 1 << 14):
        path = tmp_path / f"{batch}.onnx"
        path.write_bytes(mask(batch, 128).SerializeToString())
        if batch > 1:
            assert peak(path) < 1 << 27
        function, arrays = import_from_onnx(path)
        assert [op.op_type for op in function.ops][-1] == "Where"
        assert len(function.ops) == (3 if batch > 1 else 2)
        (x,) = [arrays[v] for v in function.inputs if v in arrays]
        assert x.shape == (1, 1, 128, 128)
        found.append(x)
    np.testing.assert_array_equal(found[0], found[1])


@given(data=st.data())
def test_what_repeats_is_computed_as_the_whole(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Operands that repeat along some dims, of elementwise ops and ops along an axis, against onnxruntime."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    stored: dict[str, np.ndarray] = {"shape": np.array(shape)}
    nodes: list[onnx.NodeProto] = []
    for name in "ab":
        part = [1 if data.draw(st.booleans()) else n for n in shape]
        stored[f"{name}0"] = rng.integers(1, 9, part)
        nodes.append(node("Expand", f"{name}0 shape", name))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    stored["axis"] = np.array(axis)
    stored["first"] = rng.integers(0, shape[0], (*data.draw(st.sampled_from([(), (3,), (2, 1)])), 1))
    op_type = data.draw(
        st.sampled_from(["Add", "Less", "Mod", "Max", "Concat", "CumSum", "GatherND", "Transpose", "Where"])
    )
    operands = {"CumSum": "a axis", "GatherND": "a first", "Transpose": "a", "Where": "c a b"}.get(op_type, "a b")
    attributes: dict[str, Any] = {"axis": axis} if op_type == "Concat" else {}
    nodes += [node("Less", "a b", "c"), node(op_type, operands, "y", "", **attributes)]
    inputs = {"x": np.zeros(1, np.float32)}
    proto = model([*nodes, node("Identity", "x", "z")], inputs, ["y", "z"], stored)
    _, got = computed(proto, inputs, tmp_path_factory.mktemp("m") / "m.onnx")
    equal(got, expected(proto, inputs))
