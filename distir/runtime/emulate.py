"""What a proxy runs in place of compute. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORT = 60e-6
"""Seconds by which a sleep is late at most, as a rule: the rest of a time is spent busy."""


def sleeper(seconds: float, spin: bool) -> Callable[[], None]:
    """A function that returns after so long: of that it sleeps, with `spin` it is busy."""

    def sleep() -> None:
        end = time.perf_counter() + seconds
        if not spin and seconds > _SHORT:
            time.sleep(seconds - _SHORT)
        while time.perf_counter() < end:
            pass

    return sleep if seconds > 0 else _nothing


def _nothing() -> None:
    pass
