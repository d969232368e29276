"""A dataset: arrays of samples, and the order in which steps take them.

Batches are lazy: a rank reads only its own samples, from memory-mapped files. Loads no torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.ir.type import Tensor
from distir.runtime.pieces import Coord, Shipped, ship

_PROBES = 64
"""Samples that are hashed to check that ranks have the same data."""


class Chosen:
    """A lazy selection of an array: the samples `rows` along `dim`. numpy can convert it to an array."""

    __slots__ = ("array", "dim", "rows")

    def __init__(self, array: np.ndarray, dim: int, rows: np.ndarray) -> None:
        self.array, self.dim, self.rows = array, dim, rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # the result is always a copy
        return _taken(self.array, self.rows, self.dim).astype(dtype, copy=False)

    def piece(self, t: Tensor, coord: Coord) -> np.ndarray:
        """The piece of a device at `coord` under type `t`; only that is read if no other dim is split."""
        if t.subdims.keys() <= {self.dim} and t.plain is t:
            along = [len(self.rows) if i == self.dim else 1 for i in range(len(t.shape))]
            mine = t.cut(self.rows.reshape(along), coord).reshape(-1)
            x = _taken(self.array, mine, self.dim)
        else:
            x = t.cut(np.asarray(self), coord)
        return x.astype(t.dtype.numpy, copy=False)


class Samples(NamedTuple):
    """Samples `first` to `first + count - 1` of `arrays` (by input position), along `dims`.

    A step takes `batch` of them; an incomplete batch at the end of an epoch is dropped. With a `seed` each epoch is
    shuffled, the same way in all processes; without one samples are in order.
    """

    arrays: Mapping[int, Any]
    dims: Mapping[int, int]
    batch: int
    first: int
    count: int
    seed: int | None = None

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return self.count // self.batch

    def step(self, step: int) -> dict[int, Chosen]:
        """The batch of step number `step`, which counts on over epochs."""
        epoch, k = divmod(step, self.steps)
        rows = _order(self.count, self.seed, epoch)[k * self.batch : (k + 1) * self.batch] + self.first
        return {i: Chosen(x, self.dims[i], rows) for i, x in self.arrays.items()}

    def shipped(self, folder: Path, name: str) -> Samples:
        """A copy to pickle for other processes on this host; arrays not mapped from files are written to `folder`."""
        return self._replace(arrays={i: ship(x, folder / f"{name}{i}") for i, x in self.arrays.items()})

    def received(self) -> Samples:
        """The inverse of `shipped`, in the other process."""
        arrays = {i: x.array() if isinstance(x, Shipped) else x for i, x in self.arrays.items()}
        return self._replace(arrays=arrays)

    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of settings and a subset of the samples, to compare between processes."""
        hasher = hashlib.sha256(str((dict(self.dims), *self[2:])).encode())
        rows = np.unique(np.linspace(self.first, self.first + self.count - 1, _PROBES).astype(int))
        for i, x in sorted(self.arrays.items()):
            hasher.update(_taken(x, rows, self.dims[i]).tobytes())
        return hasher.digest()


def _taken(x: np.ndarray, rows: np.ndarray, dim: int) -> np.ndarray:
    """A copy of some rows. `numpy.take` would copy the whole of an unaligned array, as .npz files have them."""
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
    """(training, validation) numbers of samples: validation gets whole batches of at least `share` of `count`."""
    held_out = math.ceil(round(count * share / batch, 9)) * batch
    return count - held_out, held_out
