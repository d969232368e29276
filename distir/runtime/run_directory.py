"""Directories locked by one run, so that leftovers of dead runs can be recognised and removed.

The lock is an flock on the open directory: processes that inherit the descriptor share it, and the kernel releases it
when the last of them ends.
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


def lock_directory(directory: Path, patience: float = 0.0) -> int | None:
    """Lock a directory; returns the file descriptor, or None if another process holds the lock for `patience` seconds.

    Raises OSError if the directory cannot be opened, or its file system does not support locks.
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
    """A new temporary folder and its lock. Removes folders of dead runs, which are no longer locked."""
    for mark in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_MARK}"):
        _remove_left(mark.parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        number = lock_directory(folder)
    except OSError:  # without locks a dead run cannot be recognised: the folder gets no mark
        return folder, None
    (folder / _MARK).touch()
    return folder, number


def job_file(folder: Path) -> Path:
    """The file with the job of a run's ranks, in its temporary folder."""
    return folder / "job.pickle"


def request_file(folder: Path) -> Path:
    """The file with how a run's supervisor is to be forked, in its temporary folder."""
    return folder / "request.pickle"


def log_file(folder: Path, rank: int) -> Path:
    """The file with a rank's stdout and stderr."""
    return folder / f"rank{rank}.log"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Context with a temporary folder. If this process is killed, the next run removes the folder."""
    folder, number = scratch()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if number is not None:
            os.close(number)


def _remove_left(folder: Path) -> None:
    try:
        number = lock_directory(folder) if folder.stat().st_uid == os.getuid() else None
    except OSError:
        return  # its owner has just removed it
    if number is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(number)
