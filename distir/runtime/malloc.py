"""Tune glibc's malloc to keep freed memory.

All memory of a step is free when the step ends. By default glibc returns it to the system, and the next step allocates
it again page by page, each with a page fault: 7 to 14 ms of the 95 ms of a step of eight layers of 1,024 x 1,024, and
32 ms of the 236 ms of one of GPT-2 with 33 MB of logits.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_ON_HEAP = 256 << 20
"""Larger blocks are mapped, and unmapped when freed: on the heap they would leave gaps as large. By itself glibc raises
this threshold to 32 MiB at most."""


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
