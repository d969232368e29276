"""What every rank computed, value by value, kept in files: to find the op at fault after a run that went wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Key(NamedTuple):
    """A value that one rank made in a step: its function, its name, and the microbatch (None: of all)."""

    function: str
    name: str
    moment: int | None


class Recorder:
    """Writes a rank's values to a file in `folder` as they are made; `array` turns one into an array of its own."""

    def __init__(self, folder: Path, rank: int, array: Callable[[Any], np.ndarray]) -> None:
        self.file = open(_file(folder, rank), "wb")  # noqa: SIM115  (open as long as the rank runs)
        self.array = array

    def __call__(self, function: str, name: str, x: Any, moment: int | None) -> None:
        pickle.dump((Key(function, name, moment), self.array(x)), self.file)

    def end_step(self) -> None:
        """Say that the values of one step are complete."""
        pickle.dump(None, self.file)
        self.file.flush()


def recorded(folder: Path, rank: int) -> Iterator[dict[Key, np.ndarray]]:
    """For each step that a rank completed, what it made in it."""
    step: dict[Key, np.ndarray] = {}
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
