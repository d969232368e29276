"""The array namespace that ops evaluate against: numpy's, and the few functions numpy spells otherwise.

Names are the array API standard's where it has them; `backends.tensors.torch_namespace` offers the same on torch. Ops
use indexing, operators (arithmetic, comparison, `&`), `.shape`, `.ndim`, `.dtype`, and of the standard abs asarray
broadcast_to ceil clip concat cos cumsum exp expand_dims flip floor log log1p logical_and logical_not logical_or
logical_xor matmul max maximum min minimum moveaxis permute_dims prod reshape round sign sin sqrt sum take_along_axis
tanh where zeros_like. Reductions take axis= and keepdims= and keep the dtype (sum has dtype=); where takes Python
numbers too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distir.ir.type import DType

_erf = np.frompyfunc(math.erf, 1, 1)


def _is_half(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16, whose package is not loaded before an array has that type."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def lowest(dtype: np.dtype[Any]) -> Any:
    """What a maximum begins with: minus infinity, of integers the lowest of them, of booleans False."""
    return np.iinfo(dtype).min if dtype.kind in "iu" else False if dtype.kind == "b" else -math.inf


def highest(dtype: np.dtype[Any]) -> Any:
    """What a minimum begins with."""
    return np.iinfo(dtype).max if dtype.kind in "iu" else True if dtype.kind == "b" else math.inf


class NumpyNamespace:
    """numpy, plus what ops need beyond the array API standard."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    # numpy would widen small integers, and round each partial sum of small floats

    def sum(self, x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Any:
        default = None if x.dtype == bool else x.dtype
        if _is_half(x.dtype) and dtype in (None, x.dtype):
            return np.asarray(np.sum(x, axis=axis, keepdims=keepdims, dtype=np.float32)).astype(x.dtype)
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=dtype or default)

    def cumsum(self, x: Any, axis: int) -> Any:
        if _is_half(x.dtype):
            return np.cumsum(x, axis=axis, dtype=np.float32).astype(x.dtype)
        return np.cumsum(x, axis=axis, dtype=x.dtype)

    # of nothing it is ONNX's: minus infinity, or the lowest number

    def max(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        initial = {} if x.size else {"initial": lowest(x.dtype)}
        return np.max(x, axis=axis, keepdims=keepdims, **initial)

    def min(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        initial = {} if x.size else {"initial": highest(x.dtype)}
        return np.min(x, axis=axis, keepdims=keepdims, **initial)

    def prod(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return np.prod(x, axis=axis, keepdims=keepdims, dtype=x.dtype)

    def argsort(self, x: Any, axis: int) -> Any:
        """Of equal elements the first comes first."""
        return np.argsort(x, axis=axis, kind="stable")

    concat = staticmethod(np.concatenate)
    permute_dims = staticmethod(np.transpose)

    def cast(self, x: Any, dtype: DType) -> Any:
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            return np.asarray(x).astype(dtype.numpy)

    def full(self, shape: tuple[int, ...], value: Any, dtype: DType) -> Any:
        return np.full(shape, value, dtype.numpy)

    def arange(self, start: int, stop: int, dtype: DType) -> Any:
        return np.arange(start, stop, dtype=dtype.numpy)

    def constant(self, values: tuple[Any, ...], shape: tuple[int, ...], dtype: DType) -> Any:
        return np.array(values, dtype.numpy).reshape(shape)

    def erf(self, x: Any) -> Any:
        return np.asarray(_erf(x)).astype(x.dtype)

    def scatter_add(self, rows: int, index: Any, values: Any) -> Any:
        """zeros (rows, ...) with values[i] (n, ...) added to row index[i]; index (n,) of integers."""
        out = np.zeros((rows, *values.shape[1:]), values.dtype)
        np.add.at(out, index, values)
        return out

    def add_rows(self, x: Any, index: Any, values: Any) -> Any:
        """A copy of `x` (rows, ...) with values[i] (n, ...) added to row index[i]; index (n,) of integers."""
        out = np.array(x)
        np.add.at(out, index, values)
        return out

    def add_last(self, x: Any, index: Any, values: Any) -> Any:
        """`x` (..., v), taken over, with values (...) added at index (...) of the last dim."""
        flat = x.reshape(-1, x.shape[-1])
        flat[np.arange(flat.shape[0]), index.reshape(-1)] += values.reshape(-1)
        return flat.reshape(x.shape)


NUMPY = NumpyNamespace()
