"""Cutting wholes into pieces, joining them, and moving between placements, are inverse to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distir.executor.reference.joining import join, lanes
from distir.executor.reference.numpy_namespace import NUMPY
from distir.ir import Device, Mesh
from distir.ir.errors import IRTypeError, MismatchError
from distir.ir.type import (
    MEAN,
    REPLICATE,
    SUM,
    BFloat16,
    DType,
    Float16,
    Float64,
    Partial,
    Placement,
    Replicate,
    Shard,
    Tensor,
)
from distir.ops.collectives import rearranged


def move(xs: Sequence[Any], before: Tensor, after: Tensor, axis: str, where: Sequence[tuple[int, ...]]) -> list[Any]:
    return rearranged({"axis": axis}, xs, before, after, where, NUMPY)


MESH = Mesh([Device("gpu", i) for i in range(6)], {"a": 2, "b": 3})
SHAPE = (12, 36)
splits = st.builds(Shard, st.integers(0, 1), st.sampled_from([1, 2, 3, 6]), st.integers(0, 2))
placements: st.SearchStrategy[Placement] = st.just(REPLICATE) | st.just(SUM) | splits
whole = np.arange(float(math.prod(SHAPE))).reshape(SHAPE)


def typed(*placements: Placement) -> Tensor:
    try:
        return Tensor.whole(Float64, SHAPE, MESH, placements)
    except IRTypeError:
        assume(False)
        raise


def pieces(t: Tensor, seed: int = 0) -> list[np.ndarray]:
    """Random pieces that make up `whole` under `t`: partial ones add up to it, replicas are alike."""
    rng = np.random.default_rng(seed)
    partial = [i for i, p in enumerate(t.placements) if isinstance(p, Partial)]
    terms: dict[tuple[int, ...], np.ndarray] = {}
    total = np.zeros(SHAPE)
    keys = list(np.ndindex(*(t.mesh.sizes[i] for i in partial)))
    for k in keys[:-1]:
        terms[k] = rng.integers(-9, 9, SHAPE).astype(float)
        total = total + terms[k]
    terms[keys[-1]] = whole - total
    return [t.cut(terms[tuple(c[i] for i in partial)], c) for c in lanes(t.mesh)]


@given(st.sampled_from([0, 1]), st.sampled_from([1, 2, 3, 4]), st.sampled_from([2, 3]))
def test_subdims_cut_and_joined(dim: int, outer: int, n: int) -> None:
    assume(SHAPE[dim] % (outer * n) == 0)
    p = Shard(dim, outer)
    parts = [p.cut(whole, i, n) for i in range(n)]
    assert all(p.shape[dim] == SHAPE[dim] // n for p in parts)
    assert np.array_equal(p.join(parts, NUMPY), whole)


def test_a_subdim_is_the_middle_one_of_outer_n_rest() -> None:
    x = np.arange(12)
    assert Shard(0, 1).cut(x, 1, 2).tolist() == [6, 7, 8, 9, 10, 11]
    assert Shard(0, 3).cut(x, 1, 2).tolist() == [2, 3, 6, 7, 10, 11]


def test_subdims_may_be_shifted() -> None:
    """Device i holds slice i - shift, around the axis."""
    x = np.arange(12)
    parts = [Shard(0, 1, 1).cut(x, i, 3).tolist() for i in range(3)]
    assert parts == [[8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert [Shard(0, 1, 1).start(i, 3, 12) for i in range(3)] == [8, 0, 4]
    assert [Shard(0, 1, 2).device(d, 3) for d in range(3)] == [2, 0, 1]
    with pytest.raises(IRTypeError, match=r"Shard.0, 1, 2. cannot be shifted by 2 on mesh axis 'a' of size 2"):
        Tensor.whole(Float64, SHAPE, MESH, (Shard(0, 1, 2), REPLICATE))
    timed = Mesh([Device("gpu", 0)], {"mb": 2})
    with pytest.raises(IRTypeError, match="cannot be shifted"):
        Tensor.whole(Float64, SHAPE, timed, (Shard(0, 1, 1),))


@given(placements, placements, st.integers(0, 9))
def test_cut_and_join(p: Placement, q: Placement, seed: int) -> None:
    t = typed(p, q)
    parts = pieces(t, seed)
    assert all(x.shape == t.shape for x in parts)
    assert np.array_equal(join(dict(zip(lanes(MESH), parts, strict=True)), t), whole)


@given(placements, placements, placements, st.sampled_from(["a", "b"]), st.integers(0, 9))
def test_moving_keeps_the_whole(p: Placement, q: Placement, to: Placement, axis: str, seed: int) -> None:
    """Whatever placement a value goes to along an axis (but a partial sum), it stays the same whole."""
    assume(not isinstance(to, Partial))
    before = typed(p, q)
    after = typed(to, q) if axis == "a" else typed(p, to)
    moved = move(pieces(before, seed), before, after, axis, lanes(MESH))
    for x, c in zip(moved, lanes(MESH), strict=True):
        assert x.shape == after.shape
        if not any(isinstance(r, Partial) for r in after.placements):
            assert np.array_equal(x, after.cut(whole, c))
    assert np.array_equal(join(dict(zip(lanes(MESH), moved, strict=True)), after), whole)


def test_moving_there_and_back() -> None:
    t, other = typed(Shard(0), REPLICATE), typed(Shard(1, 3), REPLICATE)
    parts = pieces(t)
    back = move(move(parts, t, other, "a", lanes(MESH)), other, t, "a", lanes(MESH))
    assert all(np.array_equal(x, y) for x, y in zip(parts, back, strict=True))


def test_a_maximum_is_taken_of_partial_maxima() -> None:
    t, after = typed(Partial("max"), REPLICATE), typed(REPLICATE, REPLICATE)
    parts = [whole if c[0] else -whole for c in lanes(MESH)]
    assert np.array_equal(join(dict(zip(lanes(MESH), parts, strict=True)), t), np.maximum(whole, -whole))
    for x in move(parts, t, after, "a", lanes(MESH)):
        assert np.array_equal(x, np.maximum(whole, -whole))


@pytest.mark.parametrize("dtype", [Float64, Float16, BFloat16], ids=str)
def test_a_mean_is_taken_of_partial_means(dtype: DType) -> None:
    """Along one axis, and along both; the dtype stays."""
    parts = [np.full((4,), 2.0 * c[0] + 6 * c[1], dtype.numpy) for c in lanes(MESH)]
    t = Tensor.whole(dtype, (4,), MESH, (MEAN, MEAN))
    whole = join(dict(zip(lanes(MESH), parts, strict=True)), t)
    after = t.placed("a", REPLICATE)
    moved = move(parts, t, after, "a", lanes(MESH))
    assert [x[0] for x in moved] == [1, 7, 13] * 2
    moved = move(moved, after, after.placed("b", REPLICATE), "b", lanes(MESH))
    for x in (whole, *moved):
        assert x.dtype == dtype.numpy
        assert x.tolist() == [7] * 4


def test_replicas_that_differ_are_an_error() -> None:
    t = typed(Shard(0), REPLICATE)
    parts = dict(zip(lanes(MESH), pieces(t), strict=True))
    parts[1, 2] = parts[1, 2] + 1e-3
    with pytest.raises(MismatchError, match=r"replicas of .* differ by 0.001"):
        join(parts, t)
    assert join(parts, t, tolerance=1e-3).shape == SHAPE
    parts[1, 2] = parts[1, 2] * np.nan
    with pytest.raises(MismatchError):
        join(parts, t, tolerance=1e-3)


def test_outer_counts_in_what_is_local() -> None:
    """The sub-dimension of `b` lies inside the two halves that `a` has split off already."""
    t = typed(Shard(0, 1), Shard(0, 2))
    assert (t.local(0), t.local(1)) == (Shard(0), Shard(0))
    assert typed(Shard(0), REPLICATE).local(1) is REPLICATE


@given(st.permutations([0, 1]), st.integers(0, 1), st.integers(0, 2))
def test_where_a_piece_begins(order: list[int], first: int, second: int) -> None:
    sizes = [2, 3]
    outer = {order[0]: 1, order[1]: sizes[order[0]]}
    t = typed(Shard(0, outer[0], first), Shard(0, outer[1], second))
    for c in lanes(MESH):
        assert t.start(0, c) == t.cut(whole, c)[0, 0] / SHAPE[1]
        assert t.start(1, c) == 0


def test_lanes_of_a_mesh_with_time() -> None:
    mesh = Mesh([Device("gpu", i) for i in range(2)], {"mb": 3, "dp": 2})
    assert lanes(mesh) == [(0, 0), (0, 1)]
    assert lanes(mesh, unrolled=True) == [(i, j) for i in range(3) for j in range(2)]
    assert isinstance(REPLICATE, Replicate)
