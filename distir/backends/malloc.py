"""The C library's allocator, told to keep what it is given back.

All that a step has allocated is free when it is over. By default glibc then returns it to the system, and the next step
gets it back page by page, each with a fault: 7 to 14 ms of the 95 that a step of eight layers of 1,024 x 1,024 took.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_ON_HEAP = 32 << 20
"""What is larger is mapped, and unmapped when it is free: glibc takes no larger threshold, and gets to it by itself."""


def give_back() -> None:
    """Return to the system what is free now, wherever it is in a heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed() -> bool:
    """Keep freed memory for what comes next, in this process; whether the C library can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
