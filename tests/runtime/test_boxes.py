"""The boxes of a piece: together they are the piece, and those of all devices are the whole."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.placement import Placement
from distir.ir.type import REPLICATE, Float32, Shard, Tensor
from distir.runtime.boxes import Box, boxes
from distir.runtime.pieces import is_primary

MESH = Mesh([Device("cpu", k) for k in range(6)], {"mb": 2, "dp": 2, "tp": 3}, "stage0")


@st.composite
def types(draw: st.DrawFn) -> Tensor:
    """Tensors of up to three dims on the mesh, split along dp, tp, both or neither, in any order of sub-dimensions, or
    with halos."""
    rank = draw(st.integers(1, 3))
    shape = [draw(st.sampled_from([6, 12, 36])) for _ in range(rank)]
    options: list[list[Placement]] = [[REPLICATE], [REPLICATE], [REPLICATE]]
    for axis in (1, 2):
        options[axis] += [Shard(dim, outer) for dim in range(rank) for outer in (1, 2, 3, 6)]
        options[axis] += [Shard(dim, halo=(axis, 2 - axis, -math.inf)) for dim in range(rank)]
    while True:
        try:
            return Tensor.whole(Float32, shape, MESH, [draw(st.sampled_from(x)) for x in options])
        except IRTypeError:  # overlapping sub-dimensions, or sizes that do not divide
            options = [[REPLICATE], options[1], [REPLICATE]] if draw(st.booleans()) else [[REPLICATE]] * 3


def take(x: np.ndarray, box: Box) -> np.ndarray:
    return x[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]


@settings(max_examples=150)
@given(types(), st.integers(0, 2))
def test_boxes_are_what_a_device_holds_and_fill_the_whole_once(t: Tensor, padding: int) -> None:
    shape = t.global_shape
    source = (shape[0] - padding, *shape[1:])
    whole = np.arange(float(math.prod(shape))).reshape(shape)
    seen = np.zeros(shape, int)
    for coord in MESH.coords:
        piece = t.cut(whole, coord)
        found = boxes(t, coord, source)
        for box in found:
            np.testing.assert_array_equal(piece[box.inside], take(whole, box))
        inside = whole < math.prod(source)  # padding is at the end
        assert sum(math.prod(box.sizes) for box in found) == t.plain.cut(inside, coord).sum()
        if is_primary(t, coord):
            for box in found:
                seen[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (seen[: source[0]] == 1).all()
    assert (seen[source[0] :] == 0).all()


def test_runs_that_meet_are_one_box() -> None:
    t = Tensor.whole(Float32, (12, 4), MESH, (REPLICATE, Shard(0), Shard(0, 2)))
    assert boxes(t, (0, 1, 2)) == [Box((10, 0), (2, 4), (slice(0, 2), slice(0, 4)))]


def test_a_number_is_a_box_and_nothing_is_none() -> None:
    assert boxes(Tensor(Float32, (), MESH), (0, 0, 0)) == [Box((), (), ())]
    assert boxes(Tensor(Float32, (3, 0)), ()) == []
    split = Tensor.whole(Float32, (6,), MESH, (REPLICATE, REPLICATE, Shard(0)))
    assert boxes(split, (0, 0, 2), (4,)) == []  # all of this piece is padding
