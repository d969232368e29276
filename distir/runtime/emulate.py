"""What a proxy runs in place of compute. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_SECONDS = 50e-6
_SHORT = 60e-6
"""Seconds by which a sleep is late at most, as a rule: the rest of a time is spent busy."""


def sleeper(seconds: float, spin: bool, progress: Callable[[], object] | None = None) -> Callable[[], None]:
    """A function that returns after so long: of that it sleeps, with `spin` it is busy.

    `progress` is called between short sleeps: it moves communication that only progresses when it is called for.
    """

    def sleep() -> None:
        end = time.perf_counter() + seconds
        if spin:
            _busy(end)
        elif progress is None:
            if seconds > _SHORT:
                time.sleep(seconds - _SHORT)
            _busy(end)
        else:
            while (left := end - _SHORT - time.perf_counter()) > 0:
                time.sleep(min(left, _POLL_SECONDS))
                progress()
            while time.perf_counter() < end:
                progress()

    return sleep if seconds > 0 else _nothing


def _busy(end: float) -> None:
    while time.perf_counter() < end:
        pass


def _nothing() -> None:
    pass
