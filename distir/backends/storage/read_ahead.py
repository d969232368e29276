"""Prefetch data: a thread reads the next step's pieces while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from distir.backends.lowering.engine import TorchRank


class ReadAhead:
    """Loads an engine's data for each of `steps` steps, in order; a thread reads one step ahead.

    `feed(step)` returns the arrays that change in a step, by input position.
    """

    def __init__(self, engine: TorchRank, feed: Callable[[int], Mapping[int, Any]], steps: int) -> None:
        self.engine, self.feed, self.steps = engine, feed, steps
        self.reader = ThreadPoolExecutor(1, "distir-reader")
        self.next: Future[dict[int, torch.Tensor]] | None = None

    def load(self, step: int) -> None:
        """Load the data of a step, and start reading those of the next. Raises what `feed` raises."""
        self.engine.values |= self._pieces(step) if self.next is None else self.next.result()
        if step + 1 < self.steps:
            self.next = self.reader.submit(self._pieces, step + 1)

    def _pieces(self, step: int) -> dict[int, torch.Tensor]:
        return self.engine.pieces(self.feed(step))
