"""Weights of a module of torch, as numpy arrays: read from it, and handed back to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from distir.backends.lowering.engine import to_numpy, to_torch
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.ir.errors import ModelError, UsageError
from distir.ir.type import DType

_HOST = torch.device("cpu")


class Counter(NamedTuple):
    """A buffer that grows by `each` in every step; `loaded`: what it was when the module was loaded."""

    buffer: torch.Tensor
    each: int
    loaded: torch.Tensor

    def advance(self, first: int, steps: int) -> None:
        """Count the steps of a run that began with step `first`; that of a run that was resumed, from its beginning."""
        before = self.loaded + first * self.each if first else self.buffer
        self.buffer.copy_(before + steps * self.each)


def dtype_of_tensor(x: torch.Tensor, where: str) -> DType:
    """The DType of a tensor. Raises ModelError, beginning with `where`, if there is none."""
    found = next((d for d in DType.all.values() if torch_dtype(d) is x.dtype), None)
    if found is None:
        raise ModelError(f"{where}: element type {x.dtype} is not supported")
    return found


def reader_of(x: torch.Tensor, name: str) -> Callable[[], np.ndarray]:
    """A function that reads a tensor as it then is; on the host without a copy, and not to be written to.

    The function raises UsageError if the tensor's type or shape has changed.
    """
    dtype, shape = dtype_of_tensor(x, name), tuple(x.shape)

    def read() -> np.ndarray:
        if tuple(x.shape) != shape or x.dtype != torch_dtype(dtype):
            was = f"{torch_dtype(dtype)}{list(shape)}"
            raise UsageError(f"{name} is {x.dtype}{list(x.shape)}, and was {was} when loaded", "load the module again")
        array = to_numpy(x, dtype).view()
        array.flags.writeable = False
        return array

    return read


def hand_back(stored: Mapping[str, torch.Tensor], weights: Mapping[str, np.ndarray]) -> None:
    """Write trained weights into the module's parameters, in place, cast to their type."""
    with torch.no_grad():
        for name, array in weights.items():
            x = stored[name]
            x.copy_(to_torch(array, dtype_of_tensor(x, name), _HOST))
