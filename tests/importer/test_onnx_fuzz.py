"""A file with damaged bytes imports or raises one of distir's errors, in one line: never a traceback."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.importer import import_from_onnx, parse_tensor_from_file
from distir.ir.errors import DistirError
from tests.importer.models import model, node
from tests.importer.mutations import MEMORY, failures

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def bodies() -> list[bytes]:
    """The graph of gpt2-tiny with its large weights outside (so that damage hits the graph), and a small one."""
    proto = onnx.load(EXAMPLES / "gpt2-tiny.onnx")
    for t in proto.graph.initializer:
        if len(t.raw_data) > 64:
            t.ClearField("raw_data")
            t.data_location = onnx.TensorProto.EXTERNAL
            t.external_data.add(key="location", value="w.bin")
    nodes = [
        node("Split", "x", "a b", axis=1, num_outputs=2),
        node("Softmax", "a", "c", axis=0),
        node("Concat", "b c", "d", axis=0),
        node("Slice", "d one two", "e"),
        node("Gather", "e one", "f"),
        node("Reshape", "f shape", "g"),
        node("ReduceSum", "g one", "h"),
        node("Pad", "h pads", "y"),
    ]
    stored = {"one": np.array([1]), "two": np.array([2]), "shape": np.array([-1, 2]), "pads": np.array([0, 1, 0, 0])}
    small = model(nodes, {"x": np.zeros((2, 4), np.float32)}, ["y"], stored)
    return [proto.SerializeToString(), small.SerializeToString()]


Damage = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3)


@settings(max_examples=300)
@given(st.integers(0, 1), Damage)
def test_damaged_bytes(which: int, damage: list[tuple[float, int]]) -> None:
    data = bytearray(bodies()[which])
    for where, byte in damage:
        data[int(where * len(data))] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.onnx")
        path.write_bytes(data)
        with open(Path(folder, "w.bin"), "wb") as file:
            file.truncate(1 << 20)
        try:
            import_from_onnx(path, dims={"batch": 2} if which == 0 else {})
        except DistirError as e:
            assert "\n" not in str(e)  # noqa: PT017
            assert "m.onnx" in str(e) or "batch" in str(e)  # noqa: PT017


@given(st.binary(max_size=60))
def test_random_tensor_files(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.pb")
        path.write_bytes(data)
        try:
            parse_tensor_from_file(path)
        except DistirError as e:
            assert "t.pb" in str(e)  # noqa: PT017


@pytest.mark.slow
def test_mutated_models():
    """`python -m tests.importer.mutations 600` does so for ten minutes."""
    *found, end = failures(25)
    assert not found, found
    assert end["models"] > 0
    assert end["grown"] < MEMORY
