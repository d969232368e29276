"""Processes that share out work end with the context, at once where it ends by an exception."""

from __future__ import annotations

import time
from concurrent.futures import wait
from typing import Any

import pytest

from distir.runtime.forked import can_fork, forked

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are not forked here")
LONG = 300.0


def interrupted(running: list[Any]) -> None:
    """Ends the context while processes work."""
    with forked(2, "test", "a test") as pool:
        futures = [pool.submit(time.sleep, LONG) for _ in range(2)]
        wait(futures, timeout=0.2)
        running += pool._processes.values()
        raise KeyboardInterrupt


def test_an_exception_does_not_wait_for_what_runs() -> None:
    running: list[Any] = []
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted(running)
    assert time.monotonic() - begun < LONG / 3
    assert len(running) == 2
    assert not any(p.is_alive() for p in running)


def test_what_runs_is_waited_for_at_the_end() -> None:
    with forked(1, "test", "a test") as pool:
        future = pool.submit(time.sleep, 0.05)
    assert future.done()
    assert future.exception() is None
