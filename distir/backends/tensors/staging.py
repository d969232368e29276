"""Buffers for communication: in the device's memory or, for gloo on GPUs, staged in host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distir.backends.tensors.pool import LARGE, Pool


class DeviceMemory:
    """Buffers in the device's own memory, without copies where possible."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = Pool() if device.type == "cpu" else None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor for computation."""
        if self._pool is not None and math.prod(shape) * dtype.itemsize >= LARGE:
            return self._pool.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised buffer for receiving."""
        return self.allocate(shape, dtype)

    def to_backend(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as a contiguous tensor that the backend can read; `x` itself if possible."""
        return x if x.is_contiguous() else self.copy(x)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `x` that the backend may overwrite."""
        return self.allocate(x.shape, x.dtype).copy_(x)

    def from_backend(self, x: torch.Tensor) -> torch.Tensor:
        """The contents of the backend's buffer `x` on the compute device."""
        return x


class Staged(DeviceMemory):
    """Pinned host memory for transfers between GPUs over gloo, which cannot access GPU memory.

    For tests in which several ranks share a GPU: every transfer waits for the GPU.
    """

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def to_backend(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(x.shape, x.dtype).copy_(x)  # waits until x is computed

    copy = to_backend

    def from_backend(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, device=self.device).copy_(x, non_blocking=True)


def memory_for(device: torch.device) -> DeviceMemory:
    """The buffers that the backend of the current process group needs on `device`."""
    staged = device.type == "cuda" and dist.is_initialized() and dist.get_backend() == "gloo"
    return Staged(device) if staged else DeviceMemory(device)


def control_device(device: torch.device) -> torch.device:
    """The device for control messages of ranks that compute on `device`."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device
