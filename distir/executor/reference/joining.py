"""Whole arrays from the pieces of all devices, replicas compared.

A value on a mesh is a list with one array a lane; a lane is a device, or, in a program that is not yet scheduled, a
device at a microbatch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from distir.ir.device import Mesh
from distir.ir.errors import CopiesError
from distir.ir.placement import MEAN, REPLICATE, reductions
from distir.ir.type import Tensor

Coord = tuple[int, ...]
Array = Any


def lanes(mesh: Mesh, unrolled: bool = False) -> list[Coord]:
    """The coordinates of each lane along every mesh axis; `unrolled` makes each microbatch a lane of its own."""
    if not unrolled:
        return list(mesh.coords)
    return list(itertools.product(*[range(n) for n in mesh.sizes]))


def join(pieces: Mapping[Coord, Array], t: Tensor, tolerance: float = 1e-9) -> Array:
    """The whole, from the piece at each coordinate. Raises CopiesError if replicas differ by more than `tolerance`.

    `tolerance` is relative to the largest element; partial pieces are summed (or their maximum or mean taken). What a
    device has in a halo is left to its neighbours.
    """
    inside, t = t.inside, t.plain
    count = math.prod(t.mesh.sizes[i] for i, p in enumerate(t.placements) if p is MEAN)
    kinds = reductions(t.placements).values()
    index = np.arange(math.prod(t.global_shape)).reshape(t.global_shape)
    copies: dict[Coord, Array] = {}
    for coord, piece in pieces.items():
        # devices that differ only along replicated axes hold copies of one whole
        copy = tuple(c if p is REPLICATE else -1 for c, p in zip(coord, t.placements, strict=True))
        whole = copies.get(copy)
        if whole is None:
            whole = copies[copy] = np.full(index.size, _nothing(t, piece.dtype), piece.dtype)
        where = t.cut(index, coord).reshape(-1)
        flat = np.asarray(piece)[inside].reshape(-1)
        if "max" in kinds:
            whole[where] = np.maximum(whole[where], flat)
        elif kinds:
            whole[where] += flat
        else:
            whole[where] = flat
    wholes = [x if count == 1 else (x / count).astype(x.dtype) for x in copies.values()]
    for other in wholes[1:]:
        _check_copies(wholes[0], other, t, tolerance)
    return wholes[0].reshape(t.global_shape)


def _nothing(t: Tensor, dtype: Any) -> Any:
    """The neutral element of joining: 0, or for a maximum the least number of the dtype."""
    if "max" not in reductions(t.placements).values():
        return 0
    return np.iinfo(dtype).min if dtype.kind in "iu" else False if dtype.kind == "b" else -np.inf


def _check_copies(a: Array, b: Array, t: Tensor, tolerance: float) -> None:
    if a.dtype.kind not in "fc" or np.array_equal(a, b, equal_nan=True):
        if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            raise CopiesError(f"replicas of {t} differ")
        return
    error = np.max(np.abs(a - b), initial=0.0)
    if not error <= tolerance * max(1.0, float(np.max(np.abs(b), initial=0.0))):
        raise CopiesError(f"replicas of {t} differ by {error}")
