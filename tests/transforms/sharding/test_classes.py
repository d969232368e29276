"""Factor classes: they are what a walk finds node by node; when those of one number of devices hold for another."""

from __future__ import annotations

from collections import Counter

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.ir import FunctionMaker
from distir.ir.type import Float64, Shard, Tensor
from distir.transforms.roles import batch_dims
from distir.transforms.sharding.classes import Classes, Node, all_classes, classes_from, components
from distir.transforms.sharding.graph import Graph, distinct_rows
from tests.transforms.programs import small_gpt


@pytest.fixture
def graph() -> Graph:
    return Graph(small_gpt(width=12, heads=6, batch=24).function)


def starts(graph: Graph) -> tuple[tuple[int, Shard], ...]:
    return tuple((graph.index[v], Shard(dim)) for v, dim in batch_dims(graph.function).items())


def test_kept_classes_are_those_found_anew(graph: Graph) -> None:
    for n in (1, 2, 3, 4, 5, 6, 8, 12, 24):
        cached, new = classes_from(graph, n, starts(graph)), Classes(graph, n, starts(graph))
        assert (cached.mappings, cached.at, cached.bad) == (new.mappings, new.at, new.bad), n


def test_degrees_that_divide_the_same_share_classes(graph: Graph) -> None:
    assert all_classes(graph, 2) is not all_classes(graph, 4)  # 6 heads, 12 columns
    one = classes_from(graph, 2, starts(graph))
    assert classes_from(graph, 12, starts(graph)) is one
    assert not one.hold_for(5)
    assert one.inside(2, 5) is None


def test_mappings_inside_another_subdim_have_its_outer(graph: Graph) -> None:
    there = classes_from(graph, 2, starts(graph)).inside(4, 2)
    direct = Classes(graph, 2, [(v, Shard(s.dim, 4)) for v, s in starts(graph)])
    assert there is not None
    mapped = [[there[id(mapping)] for mapping, _ in row] for row in classes_from(graph, 2, starts(graph)).mappings]
    assert mapped == [[mapping for mapping, _ in row] for row in direct.mappings]


def walked(
    graph: Graph, n: int, starts: list[Node]
) -> tuple[set[frozenset[Node]], set[frozenset[Node]], list[set[int]]]:
    """The classes, those of them that are not clean, and by op the ids of its mappings, found node by node."""
    joined = networkx.Graph()
    joined.add_nodes_from(starts)
    todo, seen = list(starts), set(starts)
    refused: set[Node] = set()
    through: list[dict[int, Node]] = [{} for _ in graph.sigs]
    while todo:
        v, split = todo.pop()
        for j, k in graph.uses[v]:
            mapping = graph.sigs[j].mapping(k, split, n)
            if mapping is None:
                refused.add((v, split))
                continue
            through[j][id(mapping)] = v, split
            nodes = [(graph.ins[j][slot] if slot >= 0 else graph.outs[j][~slot], p) for slot, p in mapping.splits()]
            networkx.add_path(joined, nodes)
            todo += set(nodes) - seen
            seen |= set(nodes)
    classes = {frozenset(c) for c in networkx.connected_components(joined)}
    of = {node: c for c in classes for node in c}
    twice = {c for row in through for c, k in Counter([of[node] for node in row.values()]).items() if k > 1}
    return classes, {of[node] for node in refused} | twice, [set(row) for row in through]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("dims", ["all", "batch"])
def test_classes_are_those_that_a_walk_finds(graph: Graph, n: int, dims: str) -> None:
    every = [(v, Shard(d)) for v, shape in enumerate(graph.shapes) for d, size in enumerate(shape) if size % n == 0]
    found = all_classes(graph, n) if dims == "all" else classes_from(graph, n, starts(graph))
    classes, bad, mappings = walked(graph, n, every if dims == "all" else list(starts(graph)))
    members = {c: frozenset(nodes) for c, nodes in found.members().items()}
    assert set(members.values()) == classes
    assert {members[c] for c in found.bad} == bad
    assert [{id(mapping) for mapping, _ in row} for row in found.mappings] == mappings
    for op, (row, ins) in enumerate(zip(found.mappings, graph.ins, strict=True)):
        for mapping, c in row:
            assert all((ins[k], p) in members[c] for k, p in mapping.splits() if k >= 0), op
    assert [found.of(v, split) for v, split in every] == [found.at[v].get(split) for v, split in every]
    assert found.varying == [bool(row) for row in found.at]


def test_a_class_with_two_mappings_of_one_op_is_not_clean() -> None:
    """Rows and columns of what is multiplied with itself are one class."""
    f = FunctionMaker("square")
    x = f.add_input_value("x", Tensor(Float64, (8, 8)))
    f.emit("MatMul", x, x)
    graph = Graph(f.finalize())
    found = all_classes(graph, 2)
    classes, bad, _ = walked(graph, 2, [(v, Shard(dim)) for v in (0, 1) for dim in (0, 1)])
    assert len(classes) == 1
    assert bad == classes
    assert found.bad == {found.of(0, Shard(0))}


def test_of_what_no_start_leads_to_nothing_is_kept() -> None:
    """All values of a shape are asked alike; but only those in classes say for which degrees they hold."""
    f = FunctionMaker("apart")
    x, y = [f.add_input_value(name, Tensor(Float64, (8, 8))) for name in "xy"]
    f.set_outputs([f.emit("Exp", x), f.emit("Softmax", y, axis=1), f.emit("Log", y)])
    graph = Graph(f.finalize())
    for dim in (0, 1):
        found = classes_from(graph, 2, ((0, Shard(dim)),))
        nodes = [(v, split) for v, row in enumerate(found.at) for split in row]
        assert nodes == [(0, Shard(dim)), (2, Shard(dim))]
        assert not found.bad
        reached = {(graph.sigs[j].number, k, split) for v, split in nodes for j, k in graph.uses[v]}
        assert {(i, k, split) for i, asked in enumerate(found._asked) for k, split in asked} == reached


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_components(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    count, edges = drawn
    joined = networkx.Graph(edges)
    joined.add_nodes_from(range(count))
    a, b = np.array(edges, np.int64).reshape(-1, 2).T
    first = {v: min(c) for c in networkx.connected_components(joined) for v in c}
    assert components(count, a, b).tolist() == [first[v] for v in range(count)]


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1)), min_size=1))
def test_distinct_rows(rows: list[tuple[int, int]]) -> None:
    first, kind = distinct_rows(np.array(rows))
    assert [rows[first[k]] for k in kind.tolist()] == rows
    assert first == sorted(first) == sorted({rows.index(row) for row in rows})
