"""Splits with a halo: what they are, what a device holds of the whole, how they are written, and what has none."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest

from distir.executor.reference.joining import join
from distir.ir import FunctionMaker, parse, pformat, same
from distir.ir.device import Device, Mesh
from distir.ir.errors import DistirError, IRTypeError, ModelError
from distir.ir.notation import format_type
from distir.ir.type import REPLICATE, SUM, Float32, Int64, Placement, Shard, Tensor

MESH = Mesh([Device("cpu", k) for k in range(8)], {"h": 4, "w": 2}, "grid")
WHOLE = np.arange(1.0, 97.0, dtype=np.float32).reshape(8, 12)
HALOS = [(1, 0, 0.0), (0, 2, 0.0), (2, 1, -1.0), (1, 2, -math.inf), (2, 2, 0.5)]


def held(x: np.ndarray, dim: int, i: int, n: int, halo: tuple[int, int, float]) -> np.ndarray:
    """By the definition: elements [i s - lo, (i + 1) s + hi) of the dim, extended on both sides."""
    lo, hi, fill = halo
    pads = [(0, 0)] * x.ndim
    pads[dim] = (lo, hi)
    s = x.shape[dim] // n
    return np.take(np.pad(x, pads, constant_values=fill), np.arange(i * s, (i + 1) * s + lo + hi), axis=dim)


def on_grid(h: Placement, w: Placement) -> Tensor:
    return Tensor.whole(Float32, WHOLE.shape, MESH, (h, w))


@pytest.mark.parametrize("halo", HALOS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_cut_and_join(halo: tuple[int, int, float], n: int, dim: int) -> None:
    p = Shard(dim, halo=halo)
    pieces = [p.cut(WHOLE, i, n) for i in range(n)]
    size = WHOLE.shape[dim]
    for i, piece in enumerate(pieces):
        np.testing.assert_array_equal(piece, held(WHOLE, dim, i, n, halo))
        assert piece.shape[dim] == p.local_size(size, n)
        assert p.start(i, n, size) == i * size // n - halo[0]
    assert p.global_size(pieces[0].shape[dim], n) == size
    np.testing.assert_array_equal(p.join(pieces, np), WHOLE)


def test_a_piece_is_no_view_of_the_whole() -> None:
    whole = WHOLE.copy()
    Shard(0, halo=(1, 1, 0.0)).cut(whole, 1, 4)[:] = -1
    np.testing.assert_array_equal(whole, WHOLE)


@pytest.mark.parametrize(("a", "b"), [*itertools.pairwise(HALOS)], ids=str)
def test_corners_of_two_axes(a: tuple[int, int, float], b: tuple[int, int, float]) -> None:
    """A device has the corners, too; outside of both dims that of the dim that is cut last, where fills differ."""
    for first in (a, (*a[:2], b[2])):
        t = on_grid(Shard(0, halo=first), Shard(1, halo=b))
        assert t.shape == (8 // 4 + sum(a[:2]), 12 // 2 + sum(b[:2]))
        assert t.global_shape == (8, 12)
        pieces: dict[tuple[int, ...], Any] = {c: t.cut(WHOLE, c) for c in MESH.coords}
        for (i, j), piece in pieces.items():
            np.testing.assert_array_equal(piece, held(held(WHOLE, 0, i, 4, first), 1, j, 2, b))
            assert (t.start(0, (i, j)), t.start(1, (i, j))) == (2 * i - a[0], 6 * j - b[0])
        np.testing.assert_array_equal(join(pieces, t), WHOLE)


def test_beside_other_placements() -> None:
    """The whole is the same; a sum keeps its halo, and an axis of one device has one of fill alone."""
    for p in (REPLICATE, SUM, Shard(1)):
        t = on_grid(Shard(0, halo=(1, 1, 0.0)), p)
        assert t.shape == (4, 6 if p.dim == 1 else 12)
        assert t.placed("h", Shard(0)) is on_grid(Shard(0), p)
        assert t.placed("h", REPLICATE).global_shape == (8, 12)
    alone = Mesh(MESH.devices[:1], {"h": 1})
    assert Tensor.whole(Float32, (3,), alone, (Shard(0, halo=(3, 1, 0.0)),)).shape == (7,)


def test_equal_ones_are_one() -> None:
    p = Shard(2, halo=(1, 0, 0))
    assert p is Shard(2, halo=(1, 0, 0.0)) is Shard(2, halo=(1, 0, -0.0)) is Shard(2).with_halo(1, 0)
    assert p is not Shard(2, halo=(0, 1, 0.0))
    assert p is not Shard(2, halo=(1, 0, 1.0))
    assert p.plain is Shard(2).plain is Shard(2).with_halo(0, 0)
    assert p.shifted(0) is p
    assert (p.widths, Shard(2).widths) == ((1, 0), (0, 0))
    assert repr(p) == "Shard(2, 1, 0, (1, 0, 0.0))"


def test_what_covers_what() -> None:
    """From the whole a device cuts a slice, not a halo: outside of it there is the fill."""
    p = Shard(0, halo=(1, 1, 0.0))
    assert REPLICATE.covers(Shard(0))
    assert p.covers(p)
    assert not REPLICATE.covers(p)
    assert not Shard(0).covers(p)
    assert not p.covers(Shard(0, halo=(1, 2, 0.0)))


@pytest.mark.parametrize("halo", HALOS, ids=str)
def test_pickled(halo: tuple[int, int, float]) -> None:
    p = Shard(1, halo=halo)
    assert pickle.loads(pickle.dumps(p)) is p
    t = on_grid(Shard(0), p)
    loaded = pickle.loads(pickle.dumps(t))
    assert loaded.placements[1] is p
    assert (loaded.shape, loaded.global_shape) == (t.shape, t.global_shape)


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("h", "w", "text"),
    [
        (Shard(0, halo=(1, 1, 0.0)), REPLICATE, "f32[4{h~1:1}, 12] @ grid"),
        (Shard(0, halo=(1, 1, -math.inf)), Shard(1), "f32[4{h~1:1:-inf}, 6{w}] @ grid"),
        (Shard(0, halo=(2, 0, 0.5)), Shard(1, halo=(0, 1, -1.0)), "f32[4{h~2:0:0.5}, 7{w~0:1:-1.0}] @ grid"),
        (Shard(1, halo=(0, 3, 1e-30)), SUM, "f32[8, 6{h~0:3:1e-30}]+w @ grid"),
        (Shard(1, halo=(3, 3, math.inf)), Shard(0), "f32[4{w}, 9{h~3:3:inf}] @ grid"),
    ],
    ids=str,
)
def test_text(h: Placement, w: Placement, text: str) -> None:
    t = on_grid(h, w)
    assert format_type(t) == text
    f = FunctionMaker("f")
    f.set_outputs([f.add_input_value("x", t)])
    made = f.finalize()
    read = parse(pformat(made))
    assert same(read, made)
    assert read.inputs[0].type.placements == t.placements  # type: ignore[union-attr]


@pytest.mark.parametrize("halo", ["~1", "~:1", "~1:1:", "~1:1:x", "~1:1:nan", "~0:0", "~5:0", "+1~1:1", "~-1:1"])
def test_text_that_is_none(halo: str) -> None:
    f = FunctionMaker("f")
    f.set_outputs([f.add_input_value("x", on_grid(Shard(0, halo=(1, 1, 0.0)), REPLICATE))])
    text = pformat(f.finalize())
    assert "{h~1:1}" in text
    with pytest.raises((ModelError, IRTypeError)) as e:
        parse(text.replace("{h~1:1}", "{h" + halo + "}"))
    assert "\n" not in e.value.message


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("halo", "words"),
    [
        ((0, 0, 0.0), "widths are integers from 0, one above it, got 0 and 0"),
        ((-1, 2, 0.0), "got -1 and 2"),
        ((1, -2, 0.0), "got 1 and -2"),
        ((1.0, 2, 0.0), "got 1.0 and 2"),
        ((True, 2, 0.0), "got True and 2"),
        ((1, 2, math.nan), "filled with a number, got nan"),
        ((1, 2, "0"), "filled with a number, got '0'"),
        ((1, 2, True), "filled with a number, got True"),
        ((1, 2, 10**400), "filled with a number up to 2^53"),
    ],
    ids=range(9),
)
def test_no_halo(halo: Any, words: str) -> None:
    with pytest.raises(IRTypeError) as e:
        Shard(0, halo=halo)
    assert words in e.value.message


@pytest.mark.parametrize(("outer", "shift"), [(2, 0), (1, 1), (2, 3)])
def test_a_split_that_has_none(outer: int, shift: int) -> None:
    with pytest.raises(IRTypeError, match=f"an outer of 1 and no shift, got outer={outer}, shift={shift}"):
        Shard(0, outer, shift, (1, 1, 0.0))
    if shift:
        with pytest.raises(IRTypeError, match="no shift"):
            Shard(0, halo=(1, 1, 0.0)).shifted(shift)
    else:
        with pytest.raises(IRTypeError, match="an outer of 1"):
            Shard(0, outer).with_halo(1, 1)


@pytest.mark.parametrize("halo", [(3, 0, 0.0), (0, 3, 0.0), (1, 9, 0.0)], ids=str)
def test_a_halo_is_no_wider_than_a_slice(halo: tuple[int, int, float]) -> None:
    with pytest.raises(IRTypeError, match="a halo is at most as wide as a slice, 2 of 8 on mesh axis 'h'"):
        on_grid(Shard(0, halo=halo), REPLICATE)
    with pytest.raises(IRTypeError, match="at most as wide as a slice, 2 of 8"):
        Tensor(Float32, (2 + sum(halo[:2]), 12), MESH, (Shard(0, halo=halo), REPLICATE))


def test_no_other_axis_splits_the_dim() -> None:
    for other in (Shard(0), Shard(0, 4), Shard(0, halo=(1, 1, 0.0))):
        with pytest.raises(IRTypeError, match=r"dim 0 .* is split with a halo, so no other axis may split it"):
            on_grid(Shard(0, halo=(1, 1, 0.0)), other)


def test_microbatches_have_none() -> None:
    timed = Mesh(MESH.devices[:1], {"mb": 2})
    with pytest.raises(IRTypeError, match="microbatches have no halo"):
        Tensor.whole(Float32, (8,), timed, (Shard(0, halo=(1, 1, 0.0)),))


def test_slices_are_equal() -> None:
    with pytest.raises(IRTypeError, match=r"dim 0 \(size 6\) .* cannot be split 4 ways"):
        Tensor.whole(Float32, (6,), MESH, (Shard(0, halo=(1, 0, 0.0)), REPLICATE))
    with pytest.raises(DistirError, match="dim 2"):
        Tensor.whole(Float32, (8, 8), MESH, (Shard(2, halo=(1, 0, 0.0)), REPLICATE))


def test_integers_are_filled_with_integers() -> None:
    t = Tensor.whole(Int64, (8,), MESH, (Shard(0, halo=(1, 1, -7)), REPLICATE))
    np.testing.assert_array_equal(t.cut(np.arange(8), (0, 0)), [-7, 0, 1, 2])
    for fill in (0.5, -math.inf):
        with pytest.raises(IRTypeError, match="is filled with an integer"):
            Tensor.whole(Int64, (8,), MESH, (Shard(0, halo=(1, 1, fill)), REPLICATE))
