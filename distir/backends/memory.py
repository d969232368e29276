"""Where tensors stand that a backend sends and receives: in the device's memory or, for gloo on GPUs, the host's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distir.backends.pool import LARGE, Pool


class Memory:
    """The device's own memory: nothing is copied that need not be."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = Pool() if device.type == "cpu" else None

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Room for what is computed."""
        if self._pool is not None and math.prod(shape) * dtype.itemsize >= LARGE:
            return self._pool.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Room for what is received."""
        return self.room(shape, dtype)

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, which is new, or a copy, where what is computed may later take its place."""
        pooled = self._pool is not None and x.nbytes >= LARGE
        return self.room(x.shape, x.dtype).copy_(x) if pooled else x

    def lent(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, contiguous, to be read by the backend; maybe `x` itself."""
        return x if x.is_contiguous() else self.copied(x)

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `x` that the backend may change."""
        return self.room(x.shape, x.dtype).copy_(x)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """What the backend has left in `x`, where it is computed with."""
        return x


class Staged(Memory):
    """Pinned memory of the host, through which all goes that gloo moves between GPUs, which it cannot read.

    For tests in which several ranks share a GPU: every transfer waits for the GPU.
    """

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def lent(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(x.shape, x.dtype).copy_(x)  # which waits until x is computed

    copied = lent

    def back(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, device=self.device).copy_(x, non_blocking=True)


def memory_for(device: torch.device) -> Memory:
    """What the process group that is joined needs on `device`."""
    staged = device.type == "cuda" and dist.is_initialized() and dist.get_backend() == "gloo"
    return Staged(device) if staged else Memory(device)


def agreed_on(device: torch.device) -> torch.device:
    """Where ranks that compute on `device` exchange what is not of a program."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device
