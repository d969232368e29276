"""What placements and collectives mean on arrays: cutting a whole into pieces, joining pieces, moving between devices.

A value on a mesh is a list with one array a lane; a lane is a device, or, in a program that is not yet scheduled, a
device at a microbatch. Nothing here looks across lanes but the collectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distir.ir.device import Mesh
from distir.ir.errors import CopiesError, DistirError
from distir.ir.type import MEAN, Partial, Replicate, Shard, Tensor

Coord = tuple[int, ...]
Array = Any


def lanes(mesh: Mesh, unrolled: bool = False) -> list[Coord]:
    """The coordinates of each lane along every mesh axis; `unrolled` makes each microbatch a lane of its own."""
    if not unrolled:
        return list(mesh.coords)
    return list(itertools.product(*[range(n) for n in mesh.sizes]))


def take_digit(x: Array, dim: int, outer: int, n: int, index: int) -> Array:
    """Of `x`, whose `dim` reads as (outer, n, rest), the part with the middle digit at `index`."""
    shape = x.shape
    y = x.reshape(*shape[:dim], outer, n, -1, *shape[dim + 1 :])[(slice(None),) * (dim + 1) + (index,)]
    return y.reshape(*shape[:dim], shape[dim] // n, *shape[dim + 1 :])


def join_digit(parts: Sequence[Array], dim: int, outer: int) -> Array:
    """The inverse of `take_digit`: the parts in order of their digit."""
    shape = parts[0].shape
    split = [p.reshape(*shape[:dim], outer, 1, -1, *shape[dim + 1 :]) for p in parts]
    joined = np.concatenate(split, dim + 1)
    return joined.reshape(*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])


def local_outer(t: Tensor, axis: int) -> int:
    """The `outer` of the split along mesh axis number `axis`, measured in the local dim (other axes' digits gone)."""
    p = t.placements[axis]
    if not isinstance(p, Shard):
        raise DistirError(f"{t} is not split along mesh axis {axis}")
    inside = [n for outer, n, i in t.digits[p.dim] if i != axis and outer < p.outer]
    return p.outer // math.prod(inside)


def cut(x: Array, t: Tensor, coord: Mapping[int, int] | Coord) -> Array:
    """The piece of the whole array `x` that a device at `coord` (mesh axis position -> index) holds under type `t`.

    Axes that a mapping leaves out are kept whole.
    """
    at = coord if isinstance(coord, Mapping) else dict(enumerate(coord))
    for dim, digits in t.digits.items():
        gone = 1
        for outer, n, axis in digits:
            if axis in at:
                x = take_digit(x, dim, outer // gone, n, at[axis])
                gone *= n
    return x


def start_of(t: Tensor, dim: int, coord: Coord) -> int:
    """The global index at which the piece at `coord` begins in `dim`; the piece must be contiguous (see `infer`)."""
    start, size = 0, t.global_shape[dim]
    for _, n, axis in t.digits.get(dim, ()):
        size //= n
        start += coord[axis] * size
    return start


def join(pieces: Mapping[Coord, Array], t: Tensor, tolerance: float = 1e-9) -> Array:
    """The whole, from the piece at each coordinate. Raises CopiesError if replicas differ by more than `tolerance`.

    `tolerance` is relative to the largest element; partial pieces are summed (or their maximum or mean taken).
    """
    count = math.prod(t.mesh.sizes[i] for i, p in enumerate(t.placements) if p is MEAN)
    index = np.arange(math.prod(t.global_shape)).reshape(t.global_shape)
    copies: dict[Coord, Array] = {}
    for coord, piece in pieces.items():
        # devices that differ only along replicated axes hold copies of one whole
        copy = tuple(c if isinstance(p, Replicate) else -1 for c, p in zip(coord, t.placements, strict=True))
        whole = copies.get(copy)
        if whole is None:
            whole = copies[copy] = np.full(index.size, _nothing(t, piece.dtype), piece.dtype)
        where = cut(index, t, coord).reshape(-1)
        flat = np.asarray(piece).reshape(-1)
        if any(isinstance(p, Partial) and p.kind == "max" for p in t.placements):
            whole[where] = np.maximum(whole[where], flat)
        elif any(isinstance(p, Partial) for p in t.placements):
            whole[where] += flat
        else:
            whole[where] = flat
    wholes = [x if count == 1 else (x / count).astype(x.dtype) for x in copies.values()]
    for other in wholes[1:]:
        _check_copies(wholes[0], other, t, tolerance)
    return wholes[0].reshape(t.global_shape)


def _nothing(t: Tensor, dtype: Any) -> Any:
    """What joining begins with: 0, or below a maximum the least number of the dtype."""
    if not any(isinstance(p, Partial) and p.kind == "max" for p in t.placements):
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


def combine(parts: Sequence[Array], kind: str) -> Array:
    """The sum, maximum or mean of arrays, in order."""
    total = parts[0]
    for p in parts[1:]:
        total = np.maximum(total, p) if kind == "max" else total + p
    return (total / len(parts)).astype(total.dtype) if kind == "mean" else total


def accumulate(total: Array, x: Array, kind: str) -> Array:
    """A running sum (or maximum) over microbatches, and the next one."""
    return combine([total, x], kind)


def move(xs: Sequence[Array], before: Tensor, after: Tensor, axis: str, where: Sequence[Coord]) -> list[Array]:
    """A collective along `axis`: each lane's array under `after`, from all lanes' arrays under `before`."""
    a = before.mesh.position(axis)
    n = before.mesh.sizes[a]
    p, q = before.placements[a], after.placements[a]
    groups: dict[Coord, list[int]] = {}
    for k, coord in enumerate(where):
        groups.setdefault(coord[:a] + (-1,) + coord[a + 1 :], []).append(k)
    wholes: dict[Coord, Array] = {}
    if not isinstance(p, Replicate):
        for key, members in groups.items():
            parts = [xs[k] for k in members]
            if isinstance(p, Partial):
                wholes[key] = combine(parts, p.kind)
            elif isinstance(p, Shard):
                wholes[key] = join_digit(parts, p.dim, local_outer(before, a))
    out: list[Array] = []
    for k, coord in enumerate(where):
        x = xs[k] if isinstance(p, Replicate) else wholes[coord[:a] + (-1,) + coord[a + 1 :]]
        if isinstance(q, Shard):
            x = take_digit(x, q.dim, local_outer(after, a), n, coord[a])
        out.append(x)
    return out
