"""The piece of an array that a device holds, as boxes in the whole array: the unit of checkpoints.

A dim that reads as (outer, n, rest) with n on a mesh axis gives a device `outer` contiguous runs of indices. Its piece
is the union of the products of these runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distir.ir.type import Tensor


class Box(NamedTuple):
    """A box in the whole array: its offset and size in each dim; `inside`: its slices in the device's piece."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    inside: tuple[slice, ...]


def boxes(t: Tensor, coord: Sequence[int], source: Sequence[int] | None = None) -> list[Box]:
    """The boxes that a device at `coord` holds of a value of type `t`, without padding and halos.

    `source` is the global shape without padding; by default nothing is padded.
    """
    shape = t.global_shape if source is None else source
    before, t = [part.start for part in t.inside], t.plain
    runs = [_runs(t, d, coord, shape[d]) for d in range(len(shape))]
    found: list[Box] = []
    for row in itertools.product(*runs):
        inside = tuple(slice(lo + here, lo + here + size) for lo, (_, here, size) in zip(before, row, strict=True))
        found.append(Box(tuple(start for start, _, _ in row), tuple(size for _, _, size in row), inside))
    return found


def _runs(t: Tensor, dim: int, coord: Sequence[int], limit: int) -> list[tuple[int, int, int]]:
    """(start in the whole, start in the piece, length) of each run of a dim, truncated at `limit`."""
    along = [-1 if d == dim else 1 for d in range(len(t.shape))]
    whole = np.arange(t.global_shape[dim]).reshape(along)
    index = t.cut(whole, {i: coord[i] for _, _, i in t.subdims.get(dim, ())}).reshape(-1)
    ends = [*(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    starts = [0, *ends[:-1]]
    runs = [(int(index[a]), a, min(b - a, limit - int(index[a]))) for a, b in zip(starts, ends) if a < b]
    return [run for run in runs if run[2] > 0]
