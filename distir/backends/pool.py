"""Large tensors of a step, in memory that is used again.

A block that no tensor lies in any more is given to the next that needs as much: its pages are there, and no hole in a
heap is left. No more is held than was in use at once: before more is mapped, idle blocks are given back.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch

LARGE = 1 << 20
"""Tensors of so many bytes are worth a block."""


class _Block:
    """Mapped memory, and a weak reference to what shows it to the tensor that lies in it now.

    How often the block itself is referred to would tell the same, but not on every Python alike: since 3.14 not all
    references are counted.
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
        """The memory: the block is idle again when nothing refers to this any more."""
        view = memoryview(self._memory)
        self._shown = weakref.ref(view)
        return view


class Pool:
    """Blocks by size. A tensor, and what is a view of it, keeps its block from being idle."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}
        self._mapped = self._most = 0
        """Bytes there are, and the most that were in use at once."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the CPU, with whatever was there."""
        n = math.prod(shape)
        return torch.frombuffer(self._block(n * dtype.itemsize).take(), dtype=dtype, count=n).view(shape)

    def _block(self, size: int) -> _Block:
        """An idle block."""
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
        """Unmap idle blocks of at least `size` bytes together, if there are so many."""
        for row in self._blocks.values():
            for k in reversed(range(len(row))):
                if size <= 0:
                    return
                if row[k].idle:
                    size -= row[k].size
                    self._mapped -= row[k].size
                    del row[k]
