"""Which part of a whole array a device holds, as boxes: what checkpoints are made of.

A dim that reads as (outer, n, rest) with n on a mesh axis gives a device `outer` runs of it. So its piece of an array
is a union of boxes, one for each choice of a run in every dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distir.executor.collectives import take_digit
from distir.ir.type import Digit, Tensor


class Box(NamedTuple):
    """A part of the whole: where it begins and how long it is, in each dim; `inside`: where it is in the piece."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    inside: tuple[slice, ...]


def boxes(t: Tensor, coord: Sequence[int], source: Sequence[int] | None = None) -> list[Box]:
    """What a device at `coord` holds of a value of type `t`; padding, which `source` lacks, left out.

    `source` is the shape of the whole without padding.
    """
    shape = t.global_shape if source is None else source
    runs = [_runs(n, t.digits.get(d, ()), coord, shape[d]) for d, n in enumerate(t.global_shape)]
    found: list[Box] = []
    for row in itertools.product(*runs):
        inside = tuple(slice(here, here + size) for _, here, size in row)
        found.append(Box(tuple(start for start, _, _ in row), tuple(size for _, _, size in row), inside))
    return found


def _runs(size: int, digits: Sequence[Digit], coord: Sequence[int], limit: int) -> list[tuple[int, int, int]]:
    """(start in the whole, start in the piece, length) of each run of a dim, cut off at `limit`."""
    index, gone = np.arange(size), 1
    for outer, n, axis in digits:
        index = take_digit(index, 0, outer // gone, n, coord[axis])
        gone *= n
    ends = [*(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    starts = [0, *ends[:-1]]
    runs = [(int(index[a]), a, min(b - a, limit - int(index[a]))) for a, b in zip(starts, ends) if a < b]
    return [run for run in runs if run[2] > 0]
