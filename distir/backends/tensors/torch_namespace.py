"""The array namespace of `executor.reference.numpy_namespace` on torch tensors, against which ops are evaluated.

Names and signatures follow the array API standard. Functions that torch has under that name are torch's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from distir.backends.tensors.products import matmul
from distir.ir.spec import lookup
from distir.ir.type import DType

Axis = Any
"""None (all dims), one dim, or a sequence of them."""

_SPELLED = {"f": "float", "i": "int", "u": "uint"}
_DTYPES: dict[str, torch.dtype] = {}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a DType."""
    found = _DTYPES.get(dtype.name)
    if found is None:
        name = dtype.name
        spelled = {"bool": "bool", "bf16": "bfloat16"}.get(name) or _SPELLED[name[0]] + name[1:]
        found = _DTYPES[name] = getattr(torch, spelled)
    return found


class TorchNamespace:
    """torch with the array API's names, and functions that ops need beyond it. New arrays are made on `device`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.inf, self.pi, self.e, self.nan = math.inf, math.pi, math.e, math.nan
        self.newaxis = None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    # --- making arrays

    def cast(self, x: Any, dtype: DType) -> torch.Tensor:
        return self.asarray(x, dtype)

    def full(self, shape: Sequence[int], value: Any, dtype: DType) -> torch.Tensor:
        return torch.full(tuple(shape), value, dtype=torch_dtype(dtype), device=self.device)

    def arange(self, start: int, stop: int, dtype: DType) -> torch.Tensor:
        return torch.arange(start, stop, dtype=torch_dtype(dtype), device=self.device)

    def constant(self, values: Sequence[Any], shape: Sequence[int], dtype: DType) -> torch.Tensor:
        flat = torch.tensor(list(values), dtype=torch_dtype(dtype), device=self.device)
        return flat.reshape(tuple(shape))

    def zeros(self, shape: Sequence[int], dtype: Any = None) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=_any_dtype(dtype), device=self.device)

    def ones(self, shape: Sequence[int], dtype: Any = None) -> torch.Tensor:
        return torch.ones(tuple(shape), dtype=_any_dtype(dtype), device=self.device)

    def asarray(self, x: Any, dtype: Any = None) -> torch.Tensor:
        if isinstance(x, torch.Tensor):  # already on the device: no transfer, which would synchronise
            return x if dtype is None else x.to(_any_dtype(dtype))
        return torch.as_tensor(x, dtype=_any_dtype(dtype), device=self.device)

    array = asarray

    # --- moving elements

    def permute_dims(self, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return x.t() if tuple(axes) == (1, 0) else x.permute(tuple(axes))

    transpose = permute_dims

    def matrix_transpose(self, x: torch.Tensor) -> torch.Tensor:
        return x.mT

    def swapaxes(self, x: torch.Tensor, a: int, b: int) -> torch.Tensor:
        return x.transpose(a, b)

    def reshape(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return x.reshape(tuple(shape))

    def concat(self, arrays: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        return torch.cat(tuple(arrays), axis)

    concatenate = concat

    def stack(self, arrays: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        return torch.stack(tuple(arrays), axis)

    def split(self, x: torch.Tensor, indices: int | Sequence[int], axis: int = 0) -> list[torch.Tensor]:
        """As numpy.split: into that many equal parts, or before each index."""
        return list(torch.tensor_split(x, indices if isinstance(indices, int) else list(indices), axis))

    def expand_dims(self, x: torch.Tensor, axis: int | Sequence[int] = 0) -> torch.Tensor:
        axes = [axis] if isinstance(axis, int) else list(axis)
        rank = x.ndim + len(axes)
        for a in sorted(a % rank for a in axes):
            x = x.unsqueeze(a)
        return x

    def squeeze(self, x: torch.Tensor, axis: Axis = None) -> torch.Tensor:
        return x.squeeze() if axis is None else x.squeeze(axis if isinstance(axis, int) else tuple(axis))

    def broadcast_to(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return x.expand(tuple(shape))

    def take(self, x: torch.Tensor, indices: torch.Tensor, axis: int = 0) -> torch.Tensor:
        axis %= x.ndim
        rows = x.index_select(axis, indices.reshape(-1))
        return rows.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))

    def take_along_axis(self, x: torch.Tensor, indices: torch.Tensor, axis: int = -1) -> torch.Tensor:
        return torch.take_along_dim(x, indices.long(), axis)

    def flip(self, x: torch.Tensor, axis: Axis = None) -> torch.Tensor:
        axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        return x.flip(tuple(axes))

    def roll(self, x: torch.Tensor, shift: Any, axis: Any = None) -> torch.Tensor:
        return torch.roll(x, shift, axis)

    def pad(self, x: torch.Tensor, widths: Sequence[tuple[int, int]], constant_values: Any = 0) -> torch.Tensor:
        flat = [n for before_after in reversed(list(widths)) for n in before_after]
        return torch.nn.functional.pad(x, flat, value=constant_values)

    def scatter_add(self, rows: int, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """zeros (rows, ...) with values[i] (n, ...) added to row index[i]; index (n,) of integers."""
        out = torch.zeros((rows, *values.shape[1:]), dtype=values.dtype, device=values.device)
        return out.index_add_(0, index, values)

    def add_rows(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`x` (rows, ...) with values[i] (n, ...) added to row index[i]; index (n,) of integers."""
        return x.index_add(0, index, values)

    def add_last(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add values (...) to `x` (..., v) in place, at index (...) of the last dim."""
        return x.scatter_add_(-1, index.long().unsqueeze(-1), values.unsqueeze(-1))

    # --- multiplying

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul(a, b)

    # --- reducing

    def sum(self, x: torch.Tensor, axis: Axis = None, keepdims: bool = False, dtype: Any = None) -> torch.Tensor:
        axes = tuple(range(x.ndim)) if axis is None else axis
        if axes == ():
            return x
        if dtype is None and not x.is_floating_point() and x.dtype != torch.bool:
            dtype = x.dtype  # torch would widen all integers to int64
        settings: dict[str, Any] = {"keepdim": True} if keepdims else {}
        if dtype is not None:
            settings["dtype"] = _any_dtype(dtype)
        return torch.sum(x, axes, **settings)

    def mean(self, x: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
        axes = tuple(range(x.ndim)) if axis is None else axis
        return x if axes == () else torch.mean(x, axes, keepdim=bool(keepdims))

    def max(self, x: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
        axes = tuple(range(x.ndim)) if axis is None else axis
        if x.numel() == 0:
            return self._of_nothing(x, axes, keepdims, True)
        return x if axes == () else torch.amax(x, axes, keepdim=bool(keepdims))

    def min(self, x: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
        axes = tuple(range(x.ndim)) if axis is None else axis
        if x.numel() == 0:
            return self._of_nothing(x, axes, keepdims, False)
        return x if axes == () else torch.amin(x, axes, keepdim=bool(keepdims))

    def _of_nothing(self, x: torch.Tensor, axes: Axis, keepdims: bool, largest: bool) -> torch.Tensor:
        """Max or min over no elements, as ONNX defines it: infinity, or the end of the type's range."""
        if x.dtype.is_floating_point:
            ends = math.inf, -math.inf
        else:
            ends = (True, False) if x.dtype == torch.bool else (torch.iinfo(x.dtype).max, torch.iinfo(x.dtype).min)
        return torch.full_like(self.sum(x, axes, keepdims, x.dtype), ends[largest])

    def prod(self, x: torch.Tensor, axis: Axis = None, keepdims: bool = False, dtype: Any = None) -> torch.Tensor:
        axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        for a in sorted((a % x.ndim for a in axes), reverse=True):
            x = torch.prod(x, a, keepdim=bool(keepdims), dtype=_any_dtype(dtype) or x.dtype)
        return x

    def argmax(self, x: torch.Tensor, axis: int | None = None, keepdims: bool = False) -> torch.Tensor:
        return torch.argmax(x, axis, keepdim=bool(keepdims))

    def argmin(self, x: torch.Tensor, axis: int | None = None, keepdims: bool = False) -> torch.Tensor:
        return torch.argmin(x, axis, keepdim=bool(keepdims))

    def argsort(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Of equal elements the first comes first."""
        return torch.argsort(x, dim=axis, stable=True)

    def cumsum(self, x: torch.Tensor, axis: int = 0) -> torch.Tensor:
        return torch.cumsum(x, axis, dtype=x.dtype)

    def cumulative_sum(self, x: torch.Tensor, axis: int = 0) -> torch.Tensor:
        return torch.cumsum(x, axis, dtype=x.dtype)

    def any(self, x: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
        return x.any() if axis is None else torch.any(x, axis, keepdim=bool(keepdims))

    def all(self, x: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
        return x.all() if axis is None else torch.all(x, axis, keepdim=bool(keepdims))

    # --- element by element, where torch does not take Python numbers, or not as it should

    def where(self, condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        """Unlike torch.where, does not copy a Python number from the host to a GPU, which would synchronise."""
        if self.device.type != "cpu" and isinstance(a, torch.Tensor) is not isinstance(b, torch.Tensor):
            return b.masked_fill(condition, a) if isinstance(b, torch.Tensor) else a.masked_fill(~condition, b)
        return torch.where(condition, a, b)

    def maximum(self, a: Any, b: Any) -> torch.Tensor:
        if not isinstance(a, torch.Tensor):
            a, b = b, a
        return torch.maximum(a, b) if isinstance(b, torch.Tensor) else a.clamp(min=b)

    def minimum(self, a: Any, b: Any) -> torch.Tensor:
        if not isinstance(a, torch.Tensor):
            a, b = b, a
        return torch.minimum(a, b) if isinstance(b, torch.Tensor) else a.clamp(max=b)

    def equal(self, a: torch.Tensor, b: Any) -> torch.Tensor:
        return torch.eq(a, b)

    def power(self, a: Any, b: Any) -> torch.Tensor:
        return torch.pow(a, b)

    def clip(self, x: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
        """Bounds that the dtype does not reach, as in a program in another dtype before, are its own."""
        if x.dtype.is_floating_point and x.dtype.itemsize < 4:
            most = torch.finfo(x.dtype).max
            low, high = (b if b is None else min(max(b, -most), most) for b in (low, high))
        return x.clamp(low, high)

    def __repr__(self) -> str:
        return f"<array namespace of torch on {self.device}>"


def _any_dtype(dtype: Any) -> torch.dtype | None:
    return torch_dtype(dtype) if isinstance(dtype, DType) else dtype


def written_out(name: str, like: torch.Tensor) -> Callable[..., Any]:
    """The `eval` of an op on the device of an operand: the fallback for operands that a kernel does not support."""
    return functools.partial(cast(Callable[..., Any], lookup(name).eval), TorchNamespace(like.device))


TORCH = TorchNamespace()
