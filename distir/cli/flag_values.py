"""The values of flags: text parsed and checked. Each raises ArgumentTypeError for a value that does not fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from distir.ir.errors import UsageError
from distir.transforms.plan import InputSplit

SCHEDULE = "NAME|FILE.csv"


def factors(text: str) -> dict[str, float]:
    """Factors of figures, such as "link=2x,latency=0"."""
    found: dict[str, float] = {}
    for item in text.split(","):
        name, _, factor = (x.strip() for x in item.partition("="))
        try:
            value = float(factor.removesuffix("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected FIGURE=FACTOR, such as link=2x, got {item!r}") from None
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        found[name] = value
    return found


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return number


def finite_number(text: str, above: bool = False) -> float:
    """A finite number of at least 0, or above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not 0 <= value < float("inf") or (above and value == 0):
        raise argparse.ArgumentTypeError(f"expected a number {'above' if above else 'of at least'} 0, got {text}")
    return value


def size_or_inf(text: str) -> float:
    return float("inf") if text == "inf" else finite_number(text)


def share_below_one(text: str) -> float:
    value = finite_number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a share below 1, got {text}")
    return value


def positive(text: str) -> float:
    return finite_number(text, above=True)


def numbers(text: str) -> list[int]:
    return [at_least(1)(x) for x in text.split(",")]


def named_size(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME=N, such as batch=8, got {text!r}")
    return name, at_least(1)(size)


def names(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if "" in found:
        raise argparse.ArgumentTypeError(f"expected names, such as A,B, got {text!r}")
    return found


def input_split(text: str) -> InputSplit:
    try:
        return InputSplit.parse(text)
    except UsageError as e:
        raise argparse.ArgumentTypeError(e.message.partition(": ")[2]) from None


KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (at_least(1), "N"),
    "float": (size_or_inf, "X"),
    "str": (str, "NAME"),
    "schedule": (str, SCHEDULE),
    "tuple": (names, "A,B,C"),
    "names": (names, "W,W,..."),
    "split": (input_split, "AXIS=N:INPUT.DIM,..."),
}
"""By the type of a field's default: the function that parses its flag, and the flag's metavar."""
