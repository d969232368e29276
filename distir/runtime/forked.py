"""Processes that are forked to share out work, and have what this process has."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context

from distir.runtime.parent import die_with


def can_fork() -> bool:
    """Whether this system forks processes."""
    return "fork" in get_all_start_methods()


def forked(count: int, name: str) -> ProcessPoolExecutor:
    """An executor of so many processes of this name: forked with the first tasks, they have what is global then.

    Its owner shuts it down; if this process is killed, so are they.
    """
    return ProcessPoolExecutor(count, get_context("fork"), _begin, (os.getpid(), name))


def _begin(parent: int, name: str) -> None:
    """Ctrl-C goes to all processes of a terminal: the parent ends these; the kernel does if the parent is killed."""
    die_with(parent, name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
