"""Data read ahead: the pieces of the next step while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from distir.backends.torch import TorchRank

Feed = Callable[[int], Mapping[int, Any]]
"""Step number -> what is new in it, by input position."""


class Ahead:
    """Gives an engine what is new in each of `steps` steps, in order; a thread reads one step ahead."""

    def __init__(self, engine: TorchRank, feed: Feed, steps: int) -> None:
        self.engine, self.feed, self.steps = engine, feed, steps
        self.reader = ThreadPoolExecutor(1, "distir-reader")
        self.next: Future[dict[int, torch.Tensor]] | None = None

    def load(self, step: int) -> None:
        """Load what is new in a step, and begin to read what is new in the next one. Raises what `feed` raises."""
        self.engine.values |= self._pieces(step) if self.next is None else self.next.result()
        if step + 1 < self.steps:
            self.next = self.reader.submit(self._pieces, step + 1)

    def _pieces(self, step: int) -> dict[int, torch.Tensor]:
        return self.engine.pieces(self.feed(step))
