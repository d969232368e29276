"""The errors that distir raises on purpose, each with the exit code of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any


class DistirError(Exception):
    """A problem the user can do something about: one clear line, and a hint where there is one."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.result: Any = None
        """What was found before, as JSON: it is printed with the error."""

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class UsageError(DistirError):
    """A bad flag, file name or argument."""

    exit_code = 2


class ModelError(DistirError):
    """A model or program that is malformed or uses what distir does not know."""

    exit_code = 3


class ModelWarning(UserWarning):
    """A warning about a model that is accepted, but may not be what the user expects."""


class IRTypeError(ModelError):
    """Types, placements or devices of an op do not fit: the op, the operand, expected and got."""


class InfeasibleError(DistirError):
    """A plan that cannot be carried out on this program and these devices."""

    exit_code = 4


class MismatchError(DistirError):
    """A result that differs from the one it must equal."""

    exit_code = 5


class CopiesError(MismatchError):
    """Copies of one value that differ."""


class DivergedError(MismatchError):
    """A run whose loss or weights are infinite or nan."""


class WorkerError(DistirError):
    """A rank failed, was killed or did not answer in time."""

    exit_code = 6


def counted(n: int, noun: str, plural: str = "s") -> str:
    """A number with its noun, for messages: "1 rank", "2 ranks", "2 microbatches"."""
    return f"{n:,} {noun}{plural if n != 1 else ''}"


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str | None = None, most: int = 1, cutoff: float = 0.6
) -> str | None:
    """A hint: the known names that are most like a name, at most so many; `otherwise` if none is."""
    import difflib  # slow to load, and only needed for an error

    def likeness(other: str) -> tuple[float, int]:  # of equally like ones that with the same beginning
        return difflib.SequenceMatcher(None, other, name).ratio(), sum(
            1 for _ in takewhile(lambda p: p[0] == p[1], zip(name, other, strict=False))
        )

    near = difflib.get_close_matches(name, list(known), most + 2, cutoff)
    near = sorted(near, key=likeness, reverse=True)[:most]
    return f"did you mean {' or '.join(near)}?" if near else otherwise
