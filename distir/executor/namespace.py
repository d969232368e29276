"""The array namespace that ops evaluate against: numpy's, and the few functions numpy spells otherwise.

Names are the array API standard's where it has them. `backends.namespace` offers the same on torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distir.ir.type import DType


class NumpyNamespace:
    """numpy, plus what ops need beyond the array API standard."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def cast(self, x: Any, dtype: DType) -> Any:
        return np.asarray(x).astype(dtype.numpy)

    def full(self, shape: tuple[int, ...], value: Any, dtype: DType) -> Any:
        return np.full(shape, value, dtype.numpy)

    def arange(self, start: int, stop: int, dtype: DType) -> Any:
        return np.arange(start, stop, dtype=dtype.numpy)

    def constant(self, values: tuple[Any, ...], shape: tuple[int, ...], dtype: DType) -> Any:
        return np.array(values, dtype.numpy).reshape(shape)

    def scatter_add(self, rows: int, index: Any, values: Any) -> Any:
        """zeros (rows, d) with values[i] (n, d) added to row index[i]; index (n,) of integers."""
        out = np.zeros((rows, *values.shape[1:]), values.dtype)
        np.add.at(out, index, values)
        return out


NUMPY = NumpyNamespace()
