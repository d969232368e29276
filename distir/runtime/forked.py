"""Processes that are forked to share out work, and have what this process has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context

from distir.ir.errors import WorkerError
from distir.runtime.parent import die_with


def can_fork() -> bool:
    """Whether this system forks processes."""
    return "fork" in get_all_start_methods()


@contextmanager
def forked(count: int, name: str, work: str) -> Iterator[ProcessPoolExecutor]:
    """Context with an executor of so many processes of this name: forked with the first tasks, they have what is global
    then. They end with the context, after the tasks that they run, at once where it ends by an exception, such as
    Ctrl-C; if this process is killed, so are they.

    Raises WorkerError, which names the `work`, if one of them is ended from outside.
    """
    executor = ProcessPoolExecutor(count, get_context("fork"), _begin, (os.getpid(), name))
    try:
        yield executor
    except BrokenProcessPool:
        hint = "one that is killed without a message may have run out of memory"
        raise WorkerError(f"a process of {work} was ended from outside", hint) from None
    except BaseException:
        for process in [*(executor._processes or {}).values()]:  # Python 3.14 has kill_workers
            process.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(parent: int, name: str) -> None:
    """Ctrl-C goes to all processes of a terminal: the parent ends these; the kernel does if the parent is killed."""
    die_with(parent, name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
