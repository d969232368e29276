"""Timestamps on a device: on CPUs the host's clock, on CUDA events on the compute stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """`now()` is a timestamp: nanoseconds on a CPU; on CUDA an event on the stream.

    The time between two timestamps is available once the device has completed both.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_host = device.type != "cuda"
        self.now: Callable[[], Any] = time.perf_counter_ns if self.on_host else _event

    def between(self, begin: Any, end: Any) -> int:
        """Nanoseconds between two timestamps."""
        return end - begin if self.on_host else round(begin.elapsed_time(end) * 1e6)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
