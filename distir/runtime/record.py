"""Record every value that a rank computes in a file, to find the op at fault after a failed check."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class RecordKey(NamedTuple):
    """A value that a rank computed in a step: its function, name and microbatch (None outside microbatches)."""

    function: str
    name: str
    microbatch: int | None


class Recorder:
    """Writes a rank's values to a file in `folder` as they are computed; `array` copies a value to a numpy array."""

    def __init__(self, folder: Path, rank: int, array: Callable[[Any], np.ndarray]) -> None:
        self.file = open(_file(folder, rank), "wb")  # noqa: SIM115  (open as long as the rank runs)
        self.array = array

    def __call__(self, function: str, name: str, x: Any, microbatch: int | None) -> None:
        pickle.dump((RecordKey(function, name, microbatch), self.array(x)), self.file)

    def end_step(self) -> None:
        """Mark the end of a step's values."""
        pickle.dump(None, self.file)
        self.file.flush()


def recorded(folder: Path, rank: int) -> Iterator[dict[RecordKey, np.ndarray]]:
    """The values of each step that a rank completed."""
    step: dict[RecordKey, np.ndarray] = {}
    with open(_file(folder, rank), "rb") as file:
        while file.peek(1):
            entry = pickle.load(file)
            if entry is None:
                yield step
                step = {}
            else:
                step[entry[0]] = entry[1]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"values{rank}.pickle"
