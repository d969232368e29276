"""Large tensors of a step, in memory that is used again.

A block that no tensor lies in any more is given to the next that needs as much: its pages are there, and no hole in a
heap is left. No more is held than was in use at once: before more is mapped, idle blocks are given back.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch

LARGE = 1 << 20
"""Tensors of so many bytes are worth a block."""
_IDLE = 3
"""References to a block in which no tensor lies, as seen here: those of a row, a variable and a call."""


class Pool:
    """Blocks by size. A tensor, and what is a view of it, refers to its block, and so keeps it from being idle."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[mmap.mmap]] = {}
        self._mapped = self._most = 0
        """Bytes there are, and the most that were in use at once."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the CPU, with whatever was there."""
        n = math.prod(shape)
        return torch.frombuffer(self._block(n * dtype.itemsize), dtype=dtype, count=n).view(shape)

    def _block(self, size: int) -> mmap.mmap:
        row = self._blocks.setdefault(size, [])
        for block in row:
            if sys.getrefcount(block) == _IDLE:
                return block
        used = size + sum(len(b) for row in self._blocks.values() for b in row if sys.getrefcount(b) > _IDLE)
        self._most = max(self._most, used)
        self._give_back(self._mapped + size - self._most)
        block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        self._mapped += size
        row.append(block)
        return block

    def _give_back(self, size: int) -> None:
        """Unmap idle blocks of at least `size` bytes together, if there are so many."""
        for row in self._blocks.values():
            for k in reversed(range(len(row))):
                if size <= 0:
                    return
                if sys.getrefcount(row[k]) == _IDLE - 1:
                    size -= len(row[k])
                    self._mapped -= len(row[k])
                    del row[k]
