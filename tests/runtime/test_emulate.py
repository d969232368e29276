"""What a proxy does in place of compute."""

import time

import pytest

from distir.runtime.emulate import Beside, sleeper


@pytest.mark.parametrize("seconds", [3e-5, 2e-3])
def test_communication_progresses_in_the_whole_of_a_sleep(seconds: float) -> None:
    """Also in one that is too short to sleep at all, and in the end of another, which is spent busy."""
    assert any([_progresses_to_the_end(seconds) for _ in range(20)])  # not when the process had to wait for its core


def _progresses_to_the_end(seconds: float) -> bool:
    called: list[float] = []
    begin = time.perf_counter()
    sleeper(seconds, False, Beside(lambda: called.append(time.perf_counter())))()
    assert time.perf_counter() - begin >= seconds
    return len([t for t in called if t - begin >= seconds - 6e-5]) > 1


def test_what_is_busy_moves_nothing() -> None:
    called: list[None] = []
    begin = time.perf_counter()
    sleeper(2e-4, True, Beside(lambda: called.append(None)))()
    assert time.perf_counter() - begin >= 2e-4
    assert called == []


@pytest.mark.parametrize("waits", [False, True])
def test_a_device_does_not_wait_for_what_its_process_moves(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of `progress` takes 0.7 s on a clock that only such calls move: sleeps of 1 s end at 1.4 and 2.1 s, as
    the second was to end at 2 s; if something was waited for after the first, it begins at 1.4 s."""
    now = [5.0]

    def progress() -> None:
        now[0] += 0.7

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    beside = Beside(progress)
    sleep = sleeper(1.0, False, beside)
    sleep()
    assert now[0] == pytest.approx(6.4)
    if waits:
        beside.waited()
    sleep()
    assert now[0] == pytest.approx(7.8 if waits else 7.1)
