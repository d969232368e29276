"""The tables of rotary positions (Su et al. 2021), also of models whose positions were extended after training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distir.ir.errors import UsageError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Scaling:
    """How the rates of a model trained on `positions` positions are changed for `factor` times as many.

    `kind` is a key of `SCALINGS`. `low` and `high`: turns within `positions`; rates that make fewer than `low` are
    divided by `factor`, those that make more than `high` stay, others lie between (of "llama3" and "yarn"). `short` and
    `long`: a divisor of each rate, for sequences of up to `positions` and for longer ones (of "longrope").
    `amplitude`: what cosines and sines are multiplied by.

    Raises UsageError for an unknown kind, numbers not above 0, or `high` not above `low`.
    """

    kind: str
    factor: float
    positions: int
    low: float = 1.0
    high: float = 4.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise UsageError(f"unknown scaling of positions {self.kind!r}", f"choose from {', '.join(SCALINGS)}")
        if not (self.factor > 0 and self.positions > 0 and 0 < self.low < self.high):
            got = f"factor {self.factor:g}, positions {self.positions}, low {self.low:g}, high {self.high:g}"
            raise UsageError(f"scaling of positions: expected numbers above 0, and low below high, got {got}")


def turns(size: int, base: float, scaling: Scaling | None, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines of the angles by which pairs of `size` numbers are turned, (seq, size) each.

    The angle of pair k at position p is p base^(-2 k / size), and is in columns k and k + size / 2.
    """
    import numpy as np

    rates = _plain(size, base)
    amplitude = 1.0
    if scaling is not None:
        rates, amplitude = SCALINGS[scaling.kind](rates, base, scaling, seq), scaling.amplitude
    angles = np.tile(np.outer(np.arange(seq), rates), 2)
    return amplitude * np.cos(angles), amplitude * np.sin(angles)


def _plain(size: int, base: float) -> np.ndarray:
    import numpy as np

    return base ** (-np.arange(0, size, 2) / size)


def _linear(rates: np.ndarray, base: float, scaling: Scaling, seq: int) -> np.ndarray:
    return rates / scaling.factor


def _dynamic(rates: np.ndarray, base: float, scaling: Scaling, seq: int) -> np.ndarray:
    """A larger base for sequences of more positions than those of training."""
    longer = max(seq / scaling.positions, 1.0)
    size = 2 * len(rates)
    return _plain(size, base * (scaling.factor * longer - (scaling.factor - 1)) ** (size / (size - 2)))


def _llama3(rates: np.ndarray, base: float, scaling: Scaling, seq: int) -> np.ndarray:
    """Between by the number of turns (Llama 3.1, Dubey et al. 2024)."""
    import numpy as np

    made = scaling.positions * rates / (2 * math.pi)
    kept = np.clip((made - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return rates * (kept + (1 - kept) / scaling.factor)


def _yarn(rates: np.ndarray, base: float, scaling: Scaling, seq: int) -> np.ndarray:
    """Between by the number of the pair (Peng et al. 2023)."""
    import numpy as np

    size = 2 * len(rates)

    def pair(made: float) -> float:
        """The pair, not whole, that makes so many turns."""
        return size * math.log(scaling.positions / (made * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair(scaling.high)), 0), min(math.ceil(pair(scaling.low)), size - 1)
    divided = np.clip((np.arange(len(rates)) - first) / max(last - first, 1e-3), 0, 1)
    return rates * (1 - divided + divided / scaling.factor)


def _longrope(rates: np.ndarray, base: float, scaling: Scaling, seq: int) -> np.ndarray:
    """Ding et al. 2024."""
    import numpy as np

    return rates / np.asarray(scaling.long if seq > scaling.positions else scaling.short)


SCALINGS: dict[str, Callable[[np.ndarray, float, Scaling, int], np.ndarray]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""The rates, from those of training, by the kind of scaling."""
