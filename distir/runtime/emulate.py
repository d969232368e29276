"""What a proxy runs in place of compute. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_SECONDS = 50e-6
_SHORT = 60e-6
"""Seconds by which a sleep is late at most, as a rule: the rest of a time is spent busy."""


class Beside:
    """Communication that moves beside the sleeps of a process, but only while `progress` is called.

    A call of it may sum megabytes, and so end after the sleep. A device that computes would not wait for that: a sleep
    that follows another begins when that one was to end, unless the process has `waited` for communication in between.
    """

    __slots__ = ("free", "progress")

    def __init__(self, progress: Callable[[], object]) -> None:
        self.progress = progress
        self.free: float | None = None
        """When the device is done with what it was given last."""

    def waited(self) -> None:
        """What comes next may need what was waited for: it begins now."""
        self.free = None


def sleeper(seconds: float, spin: bool, beside: Beside | None = None) -> Callable[[], None]:
    """A function that returns after so long: of that it sleeps, and moves communication; with `spin` it is busy."""

    def sleep() -> None:
        end = time.perf_counter() + seconds
        if seconds > _SHORT:
            time.sleep(seconds - _SHORT)
        _busy(end)

    def spend() -> None:
        _busy(time.perf_counter() + seconds)

    def move(beside: Beside) -> None:
        begin, progress = beside.free, beside.progress
        end = beside.free = (time.perf_counter() if begin is None else begin) + seconds
        while (left := end - _SHORT - time.perf_counter()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
            progress()
        while time.perf_counter() < end:
            progress()

    if seconds <= 0:
        return _nothing
    if spin:
        return spend
    return sleep if beside is None else lambda: move(beside)


def _busy(end: float) -> None:
    while time.perf_counter() < end:
        pass


def _nothing() -> None:
    pass
