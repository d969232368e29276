"""Factor classes: when those found for one number of devices hold for another."""

from __future__ import annotations

import pytest

from distir.ir.type import Shard
from distir.transforms.roles import batch_dims
from distir.transforms.sharding.classes import Classes, all_classes, classes_from
from distir.transforms.sharding.graph import Graph
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
