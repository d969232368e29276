"""Functions of a model are inlined, within a limit of size, which is computed before."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, inliner

from distir.importer import functions, import_from_onnx
from distir.ir.errors import ModelError
from tests.importer.models import info, model

OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("here", 1)]


def row(calls: Sequence[int]) -> list[onnx.NodeProto]:
    """Nodes from `a` to `b`, one after the other: calls of the functions of these numbers, or, for -1, Neg."""
    names = ["a", *[f"t{j}" for j in range(len(calls) - 1)], "b"]
    return [
        helper.make_node("Neg" if k < 0 else f"F{k}", [names[j]], [names[j + 1]], domain="" if k < 0 else "here")
        for j, k in enumerate(calls)
    ]


def in_a_branch(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The same nodes inside a subgraph of a node."""
    graph = helper.make_graph(nodes, "branch", [], [info("b", [3])])
    true = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", onnx.TensorProto.BOOL, [], [1]))
    return [true, helper.make_node("If", ["c"], ["b"], then_branch=graph, else_branch=graph)]


def written(bodies: Sequence[Sequence[onnx.NodeProto]], path: Path) -> Path:
    """A model that calls F0, where function k has the k-th body."""
    made = [helper.make_function("here", f"F{k}", ["a"], ["b"], nodes, OPSETS) for k, nodes in enumerate(bodies)]
    call = helper.make_node("F0", ["x"], ["y"], domain="here")
    path.write_bytes(model([call], {"x": np.ones(3, np.float32)}, ["y"], functions=made).SerializeToString())
    return path


def levels(*counts: int) -> list[list[onnx.NodeProto]]:
    """Function k calls the next one counts[k] times; the last has counts[-1] nodes."""
    return [row([k + 1 if k + 1 < len(counts) else -1] * count) for k, count in enumerate(counts)]


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelError) as e:
        import_from_onnx(path)
    assert "\n" not in str(e.value)
    for word in (path.name, *words):
        assert word in str(e.value)


@pytest.mark.parametrize("nested", [False, True])
def test_more_nodes_than_can_be(nested: bool, tmp_path: Path) -> None:
    """40 levels of two calls each would be 2^40 nodes."""
    bodies = [in_a_branch(nodes) if nested else nodes for nodes in levels(*[2] * 40)]
    refused(written(bodies, tmp_path / "m.onnx"), "functions expand to", "" if nested else f"{2**40:,} nodes")


def test_more_bytes_than_can_be(tmp_path: Path) -> None:
    bodies = levels(40, 40, 40)
    bodies[2][0].doc_string = "x" * 2**20
    refused(written(bodies, tmp_path / "m.onnx"), "functions expand to", "64,000 nodes")


@pytest.mark.parametrize("bodies", [[[0]], [[1, 1], [0, 0]], [[1, -1], [2], [1, 2]]], ids=str)
def test_functions_that_call_themselves(bodies: list[list[int]], tmp_path: Path) -> None:
    refused(written([row(b) for b in bodies], tmp_path / "m.onnx"), "one of them calls itself?")


def test_calls_as_deep_as_they_may_be(tmp_path: Path) -> None:
    function, _ = import_from_onnx(written(levels(*[1] * 100), tmp_path / "m.onnx"))
    assert [op.op_type for op in function.ops] == ["Neg"]
    refused(written(levels(*[1] * 101), tmp_path / "m.onnx"), "call each other 100 deep")


@given(st.data())
def test_they_are_counted_as_they_are_inlined(data: st.DataObject) -> None:
    """A function called from several is counted for each call, one that nothing calls is not counted."""
    count = data.draw(st.integers(1, 5))
    calls = [
        data.draw(st.lists(st.sampled_from([-1, *range(k + 1, count)]), min_size=1, max_size=4)) for k in range(count)
    ]
    made = [helper.make_function("here", f"F{k}", ["a"], ["b"], row(c), OPSETS) for k, c in enumerate(calls)]
    proto = model(row([0, -1, count - 1]), {"a": np.ones(3, np.float32)}, ["b"], functions=made)
    nodes = len(inliner.inline_local_functions(proto).graph.node)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "NODES", nodes)
        assert len(functions.inlined(proto, "m").graph.node) == nodes
        patch.setattr(functions, "NODES", nodes - 1)
        with pytest.raises(ModelError, match=f"expand to {nodes:,} nodes"):
            functions.inlined(proto, "m")
