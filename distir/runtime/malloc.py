"""Tune glibc's malloc to keep freed memory.

All memory of a step is free when the step ends. By default glibc returns it to the system, and the next step allocates
it again page by page, each with a page fault: 7 to 14 ms of the 95 ms of a step of eight layers of 1,024 x 1,024.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_ON_HEAP = 32 << 20
"""Larger blocks are mapped, and unmapped when freed: this is glibc's largest threshold, which it reaches by itself."""


def give_back() -> None:
    """Return all free heap memory to the system (malloc_trim)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed() -> bool:
    """Keep freed memory in this process (mallopt). Returns whether the C library supports it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
