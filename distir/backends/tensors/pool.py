"""A memory pool for large tensors on CPUs.

A block that no tensor uses any more is reused for the next tensor of the same size, which saves page faults and heap
fragmentation. The pool never exceeds the peak of memory in use: before it maps more, it unmaps idle blocks.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch

LARGE = 1 << 20
"""Bytes from which a tensor is allocated from the pool."""


class _Block:
    """Mapped memory, and a weak reference to the memoryview that the current tensor holds.

    The block's reference count would show use too, but since Python 3.14 not all references are counted.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._shown: Callable[[], memoryview | None] = lambda: None

    @property
    def idle(self) -> bool:
        return self._shown() is None

    def take(self) -> memoryview:
        """The memory; the block is idle again when the view is no longer referenced."""
        view = memoryview(self._memory)
        self._shown = weakref.ref(view)
        return view


class Pool:
    """Blocks by size. A block is in use as long as a tensor in it, or a view of that, exists."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}
        self._mapped = self._most = 0
        """Bytes mapped, and the peak of bytes in use."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor on the CPU."""
        n = math.prod(shape)
        return torch.frombuffer(self._block(n * dtype.itemsize).take(), dtype=dtype, count=n).view(shape)

    def _block(self, size: int) -> _Block:
        """An idle block of that size, mapped if there is none."""
        row = self._blocks.setdefault(size, [])
        for block in row:
            if block.idle:
                return block
        used = size + sum(b.size for row in self._blocks.values() for b in row if not b.idle)
        self._most = max(self._most, used)
        self._give_back(self._mapped + size - self._most)
        block = _Block(size)
        self._mapped += size
        row.append(block)
        return block

    def _give_back(self, size: int) -> None:
        """Unmap idle blocks of at least `size` bytes in total, as far as there are any."""
        for row in self._blocks.values():
            for k in reversed(range(len(row))):
                if size <= 0:
                    return
                if row[k].idle:
                    size -= row[k].size
                    self._mapped -= row[k].size
                    del row[k]
