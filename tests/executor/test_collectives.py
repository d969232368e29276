"""Cutting wholes into pieces, joining them, and moving between placements, are inverse to each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distir.executor.collectives import cut, join, join_digit, lanes, local_outer, move, start_of, take_digit
from distir.ir import Device, Mesh
from distir.ir.errors import DistirError, IRTypeError, MismatchError
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

MESH = Mesh([Device("gpu", i) for i in range(6)], {"a": 2, "b": 3})
SHAPE = (12, 36)
splits = st.builds(Shard, st.integers(0, 1), st.sampled_from([1, 2, 3, 6]))
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
    return [cut(terms[tuple(c[i] for i in partial)], t, c) for c in lanes(t.mesh)]


@given(st.sampled_from([0, 1]), st.sampled_from([1, 2, 3, 4]), st.sampled_from([2, 3]))
def test_digits_taken_and_joined(dim: int, outer: int, n: int) -> None:
    assume(SHAPE[dim] % (outer * n) == 0)
    parts = [take_digit(whole, dim, outer, n, i) for i in range(n)]
    assert all(p.shape[dim] == SHAPE[dim] // n for p in parts)
    assert np.array_equal(join_digit(parts, dim, outer), whole)


def test_a_digit_is_the_middle_one_of_outer_n_rest() -> None:
    x = np.arange(12)
    assert take_digit(x, 0, 1, 2, 1).tolist() == [6, 7, 8, 9, 10, 11]
    assert take_digit(x, 0, 3, 2, 1).tolist() == [2, 3, 6, 7, 10, 11]


@given(placements, placements, st.integers(0, 9))
def test_cut_and_join(p: Placement, q: Placement, seed: int) -> None:
    t = typed(p, q)
    held = pieces(t, seed)
    assert all(x.shape == t.shape for x in held)
    assert np.array_equal(join(dict(zip(lanes(MESH), held, strict=True)), t), whole)


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
            assert np.array_equal(x, cut(whole, after, c))
    assert np.array_equal(join(dict(zip(lanes(MESH), moved, strict=True)), after), whole)


def test_moving_there_and_back() -> None:
    t, other = typed(Shard(0), REPLICATE), typed(Shard(1, 3), REPLICATE)
    held = pieces(t)
    back = move(move(held, t, other, "a", lanes(MESH)), other, t, "a", lanes(MESH))
    assert all(np.array_equal(x, y) for x, y in zip(held, back, strict=True))


def test_a_maximum_is_taken_of_partial_maxima() -> None:
    t, after = typed(Partial("max"), REPLICATE), typed(REPLICATE, REPLICATE)
    held = [whole if c[0] else -whole for c in lanes(MESH)]
    assert np.array_equal(join(dict(zip(lanes(MESH), held, strict=True)), t), np.maximum(whole, -whole))
    for x in move(held, t, after, "a", lanes(MESH)):
        assert np.array_equal(x, np.maximum(whole, -whole))


@pytest.mark.parametrize("dtype", [Float64, Float16, BFloat16], ids=str)
def test_a_mean_is_taken_of_partial_means(dtype: DType) -> None:
    """Along one axis, and along both; the dtype stays."""
    held = [np.full((4,), 2.0 * c[0] + 6 * c[1], dtype.numpy) for c in lanes(MESH)]
    t = Tensor.whole(dtype, (4,), MESH, (MEAN, MEAN))
    whole = join(dict(zip(lanes(MESH), held, strict=True)), t)
    after = t.placed("a", REPLICATE)
    moved = move(held, t, after, "a", lanes(MESH))
    assert [x[0] for x in moved] == [1, 7, 13] * 2
    moved = move(moved, after, after.placed("b", REPLICATE), "b", lanes(MESH))
    for x in (whole, *moved):
        assert x.dtype == dtype.numpy
        assert x.tolist() == [7] * 4


def test_replicas_that_differ_are_an_error() -> None:
    t = typed(Shard(0), REPLICATE)
    held = dict(zip(lanes(MESH), pieces(t), strict=True))
    held[1, 2] = held[1, 2] + 1e-3
    with pytest.raises(MismatchError, match=r"replicas of .* differ by 0.001"):
        join(held, t)
    assert join(held, t, tolerance=1e-3).shape == SHAPE
    held[1, 2] = held[1, 2] * np.nan
    with pytest.raises(MismatchError):
        join(held, t, tolerance=1e-3)


def test_outer_counts_in_what_is_local() -> None:
    """The digit of `b` stands inside the two halves that `a` has split off already."""
    t = typed(Shard(0, 1), Shard(0, 2))
    assert (local_outer(t, 0), local_outer(t, 1)) == (1, 1)
    with pytest.raises(DistirError, match="is not split along mesh axis 1"):
        local_outer(typed(Shard(0), REPLICATE), 1)


@given(st.permutations([0, 1]))
def test_where_a_piece_begins(order: list[int]) -> None:
    sizes = [2, 3]
    outer = {order[0]: 1, order[1]: sizes[order[0]]}
    t = typed(Shard(0, outer[0]), Shard(0, outer[1]))
    for c in lanes(MESH):
        assert start_of(t, 0, c) == cut(whole, t, c)[0, 0] / SHAPE[1]
        assert start_of(t, 1, c) == 0


def test_lanes_of_a_mesh_with_time() -> None:
    mesh = Mesh([Device("gpu", i) for i in range(2)], {"mb": 3, "dp": 2})
    assert lanes(mesh) == [(0, 0), (0, 1)]
    assert lanes(mesh, unrolled=True) == [(i, j) for i in range(3) for j in range(2)]
    assert isinstance(REPLICATE, Replicate)
