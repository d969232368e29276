"""A dataset as the ranks read it: arrays of samples, and the order in which steps take them.

What a step takes is not copied until it is asked for: a rank then reads its own samples, out of files that are mapped
into memory. Loads no torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.backends.pieces import Coord, Shipped, ship
from distir.executor.collectives import cut
from distir.ir.type import Tensor

_PROBES = 64
"""Samples that stand for all where two ranks ask whether they have the same."""


class Chosen:
    """Those of an array's samples, along `dim`, whose numbers are `rows`: numpy takes it for an array."""

    __slots__ = ("array", "dim", "rows")

    def __init__(self, array: np.ndarray, dim: int, rows: np.ndarray) -> None:
        self.array, self.dim, self.rows = array, dim, rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # it is one
        return _taken(self.array, self.rows, self.dim).astype(dtype, copy=False)

    def piece(self, t: Tensor, coord: Coord) -> np.ndarray:
        """What a device at `coord` holds of it under type `t`: only that is read, if nothing but samples is split."""
        if t.digits.keys() <= {self.dim}:
            along = [len(self.rows) if i == self.dim else 1 for i in range(len(t.shape))]
            mine = cut(self.rows.reshape(along), t, coord).reshape(-1)
            x = _taken(self.array, mine, self.dim)
        else:
            x = cut(np.asarray(self), t, coord)
        return x.astype(t.dtype.numpy, copy=False)


class Samples(NamedTuple):
    """Samples `first` to `first + count - 1` of `arrays` (by input position), which run along `dims`.

    A step takes `batch` of them; what is left over at the end of an epoch is not taken. With a `seed` each epoch has an
    order of its own, the same wherever the seed is the same; without one they come in order.
    """

    arrays: Mapping[int, Any]
    dims: Mapping[int, int]
    batch: int
    first: int
    count: int
    seed: int | None = None

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.count // self.batch

    def step(self, step: int) -> dict[int, Chosen]:
        """What step number `step` takes, epochs counted on."""
        epoch, k = divmod(step, self.steps)
        rows = _order(self.count, self.seed, epoch)[k * self.batch : (k + 1) * self.batch] + self.first
        return {i: Chosen(x, self.dims[i], rows) for i, x in self.arrays.items()}

    def shipped(self, folder: Path, name: str) -> Samples:
        """The same, for other processes on this host; arrays that are in no file are written to `folder`."""
        return self._replace(arrays={i: ship(x, folder / f"{name}{i}") for i, x in self.arrays.items()})

    def received(self) -> Samples:
        """The same, in another process."""
        arrays = {i: x.array() if isinstance(x, Shipped) else x for i, x in self.arrays.items()}
        return self._replace(arrays=arrays)

    def digest(self) -> bytes:
        """32 bytes that two processes agree on if, and most likely only if, they have the same samples."""
        told = hashlib.sha256(str((dict(self.dims), *self[2:])).encode())
        rows = np.unique(np.linspace(self.first, self.first + self.count - 1, _PROBES).astype(int))
        for i, x in sorted(self.arrays.items()):
            told.update(_taken(x, rows, self.dims[i]).tobytes())
        return told.digest()


def _taken(x: np.ndarray, rows: np.ndarray, dim: int) -> np.ndarray:
    """A copy of some rows. Not by `numpy.take`: it copies all of an array that is not aligned, as in .npz files."""
    return np.asarray(x)[(*(slice(None),) * dim, rows)]


@lru_cache(maxsize=2)
def _order(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """The numbers 0 to count - 1 in the order of an epoch."""
    if seed is None:
        return np.arange(count)
    order = np.random.default_rng((seed, epoch)).permutation(count)
    order.flags.writeable = False  # it is shared
    return order


def batches(count: int, batch: int, share: float) -> tuple[int, int]:
    """How `count` samples are parted: those to train with, and, of the end, whole batches of at least that share."""
    held_out = math.ceil(round(count * share / batch, 9)) * batch
    return count - held_out, held_out
