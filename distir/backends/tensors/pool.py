"""A memory pool for large tensors on CPUs.

A block that no tensor uses any more is reused for the next tensor that it holds and that fills two thirds of it, which
saves page faults and heap fragmentation. The pool never exceeds the peak of memory in use, what is left over in blocks
counted: before it maps more, it unmaps idle blocks. Were blocks for tensors of one size only, programs of several sizes
would unmap and map some in each step, which takes 3 to 5 % of that of a small decoder.
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

_LARGER = 1.5
"""How many times as large as a tensor its block may be."""


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
        """The smallest idle block of that size or up to half as much again; one is mapped if there is none."""
        for known in sorted([known for known in self._blocks if size <= known <= _LARGER * size]):
            for block in self._blocks[known]:
                if block.idle:
                    return block
        used = size + sum(b.size for row in self._blocks.values() for b in row if not b.idle)
        self._most = max(self._most, used)
        self._give_back(self._mapped + size - self._most)
        block = _Block(size)
        self._mapped += size
        self._blocks.setdefault(size, []).append(block)
        return block

    def _give_back(self, size: int) -> None:
        """Unmap idle blocks of at least `size` bytes in total, as far as there are any."""
        for known, row in list(self._blocks.items()):
            for k in reversed(range(len(row))):
                if size <= 0:
                    return
                if row[k].idle:
                    size -= row[k].size
                    self._mapped -= row[k].size
                    del row[k]
            if not row:
                del self._blocks[known]
