"""What a proxy does in place of compute."""

import time

import pytest

from distir.runtime.emulate import sleeper


@pytest.mark.parametrize("seconds", [3e-5, 2e-3])
def test_communication_progresses_in_the_whole_of_a_sleep(seconds: float) -> None:
    """Also in one that is too short to sleep at all, and in the end of another, which is spent busy."""
    assert any([_progresses_to_the_end(seconds) for _ in range(20)])  # not when the process had to wait for its core


def _progresses_to_the_end(seconds: float) -> bool:
    called: list[float] = []
    begin = time.perf_counter()
    sleeper(seconds, False, lambda: called.append(time.perf_counter()))()
    assert time.perf_counter() - begin >= seconds
    return len([t for t in called if t - begin >= seconds - 6e-5]) > 1


def test_what_is_busy_moves_nothing() -> None:
    called: list[None] = []
    begin = time.perf_counter()
    sleeper(2e-4, True, lambda: called.append(None))()
    assert time.perf_counter() - begin >= 2e-4
    assert called == []
