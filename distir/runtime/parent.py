"""What ties a process to the one that has forked it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with(parent: int, name: str) -> None:
    """Ask the kernel to kill this process when its parent ends, and name the process; Linux only."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, name.encode())
        if os.getppid() != parent:
            os._exit(1)
