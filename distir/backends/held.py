"""Directories that one run has to itself, known again when all of its processes are gone.

The lock is on the open directory, and is the kernel's: processes that inherit it hold it, and it ends with the last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX, _MARK = "distir-", "held"
_POLL_SECONDS = 0.05


def hold(directory: Path, patience: float = 0.0) -> int | None:
    """The file descriptor by which this process now holds a directory; None if another has it for `patience` seconds.

    Raises OSError if it cannot be opened, or its file system has no locks.
    """
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(number)
                return None
            time.sleep(_POLL_SECONDS)
        except OSError:
            os.close(number)
            raise


def scratch() -> tuple[Path, int | None]:
    """A new temporary folder, and the descriptor by which it is held. Those that nobody holds any more are removed."""
    for mark in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_MARK}"):
        _remove_left(mark.parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        number = hold(folder)
    except OSError:  # without locks nobody can tell: it gets no mark
        return folder, None
    (folder / _MARK).touch()
    return folder, number


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for a while. If this process is killed, the next run removes it."""
    folder, number = scratch()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if number is not None:
            os.close(number)


def _remove_left(folder: Path) -> None:
    try:
        number = hold(folder) if folder.stat().st_uid == os.getuid() else None
    except OSError:
        return  # its owner has just removed it
    if number is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(number)
