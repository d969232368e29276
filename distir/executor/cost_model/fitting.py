"""Fits of measured seconds: the speeds of ops (`OpSpeed`), of links, and of steps.

All fits minimise the sum of squared relative errors, so that short and long measurements count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from distir.ir.topology import OpSpeed

_ROUNDS = 5
"""Of `fit_robust`: each leaves out more of what is far from the fit."""
_FAR = 3.0
"""Deviations, as multiples of their median, from which a measurement is taken for one that was disturbed."""
_STEPS = 20
"""Of `nearest`, at most. The others are of logarithms: the difference for derivatives, the longest step, and one too
short to go on."""
_DIFFERENCE, _LONGEST, _SHORTEST = 0.1, 2.0, 0.01
_DAMPING = 0.1


class Sample(NamedTuple):
    """The measured seconds of an op: its name, dtype and kind of kernel ("product", "attention" or ""), its work."""

    op: str
    dtype: str
    kernel: str
    flops: float
    bytes: float
    seconds: float


def by_size(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each op, dtype and size, with the median of their seconds: layers that are alike count once."""
    seconds: dict[Sample, list[float]] = {}
    for s in samples:
        seconds.setdefault(s._replace(seconds=0.0), []).append(s.seconds)
    return [s._replace(seconds=median(times)) for s, times in seconds.items()]


class Error(NamedTuple):
    """Relative errors of a fit: mean and worst magnitude, among so many measurements."""

    mean: float
    worst: float
    count: int


def nonnegative(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], least: Sequence[float] = ()
) -> list[float]:
    """The coefficients, none negative, or below those of `least`, of the combination of columns that is nearest to
    `seconds` (all above 0).

    Exact, by trying every set of columns: for a few columns only. A column of zeros gets the least.
    """
    scaled = [np.asarray(c, float) / np.asarray(seconds, float) for c in columns]
    least = list(least) or [0.0] * len(columns)
    y = np.ones(len(seconds)) - sum([a * c for a, c in zip(least, scaled, strict=True)])
    sizes = [float(np.abs(c).max(initial=0.0)) for c in scaled]
    used = [k for k, size in enumerate(sizes) if size > 0]
    best, found = float((y**2).sum()), [0.0] * len(columns)
    for n in range(1, len(used) + 1):
        for chosen in combinations(used, n):
            matrix = np.stack([scaled[k] / sizes[k] for k in chosen], axis=1)
            solution = np.linalg.lstsq(matrix, y, rcond=None)[0]
            error = float(((matrix @ solution - y) ** 2).sum())
            if (solution >= 0).all() and error < best - 1e-12:
                best, found = error, [0.0] * len(columns)
                for k, x in zip(chosen, solution, strict=True):
                    found[k] = float(x) / sizes[k]
    return [a + x for a, x in zip(least, found, strict=True)]


def fit_robust(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], least: Sequence[float] = ()
) -> list[float]:
    """`nonnegative`, without the measurements that are far from what the others say: those that were disturbed."""
    used = list(range(len(seconds)))
    found: list[float] = []
    for _ in range(_ROUNDS):
        found = nonnegative([[c[k] for k in used] for c in columns], [seconds[k] for k in used], least)
        off = [abs(_sum(found, columns, k) / seconds[k] - 1) for k in range(len(seconds))]
        limit = _FAR * max(float(np.median([off[k] for k in used])), 1e-9)
        new = [k for k, x in enumerate(off) if x <= limit]
        if new == used or len(new) <= len(columns):
            break
        used = new
    return found


def _sum(coefficients: Sequence[float], columns: Sequence[Sequence[float]], k: int) -> float:
    return sum(a * c[k] for a, c in zip(coefficients, columns, strict=True))


class Regression(Protocol):
    """`fit_robust`, or for devices that nothing disturbs `nonnegative`."""

    def __call__(
        self, columns: Sequence[Sequence[float]], seconds: Sequence[float], least: Sequence[float] = ()
    ) -> list[float]: ...


def fit_speed(samples: Sequence[Sample], fit: Regression = fit_robust, fastest: float = math.inf) -> OpSpeed:
    """The speed of one op, from its samples: launch, and the rates of FLOPs (of kernels of products) and of bytes.

    No kernel of products has more FLOP/s than the `fastest`: as far as few sizes tell, its seconds may all be due to
    bytes, and the prediction of a larger one would be many times too quick.
    """
    kernel = any([s.kernel for s in samples])
    columns = [1.0] * len(samples), [s.flops if kernel else 0.0 for s in samples], [s.bytes for s in samples]
    launch, flop, byte = fit(columns, [s.seconds for s in samples], (0.0, 1 / fastest if kernel else 0.0, 0.0))
    return OpSpeed(launch, 1 / flop if flop else math.inf, 1 / byte if byte else math.inf)


def fit_speeds(
    samples: Sequence[Sample], fit: Regression = fit_robust, least: int = 2, fastest: Mapping[str, float] | None = None
) -> dict[tuple[str, str], OpSpeed]:
    """The speed of each op and dtype that has samples of at least `least` sizes. `fastest`: the most FLOP/s of
    products, by dtype."""
    by: dict[tuple[str, str], list[Sample]] = {}
    for s in samples:
        by.setdefault((s.op, s.dtype), []).append(s)
    return {
        (op, dtype): fit_speed(found, fit, (fastest or {}).get(dtype, math.inf))
        for (op, dtype), found in sorted(by.items())
        if len({(s.flops, s.bytes) for s in found}) >= least
    }


class ProductFit(NamedTuple):
    """Products of one dtype: seconds = launch + F (1 + √(half / F)) / flops, of F FLOPs."""

    launch: float
    flops: float
    half: float

    def seconds(self, flops: float) -> float:
        return self.launch + (flops + math.sqrt(self.half * flops)) / self.flops


def fit_products(samples: Sequence[Sample], fit: Regression = fit_robust) -> ProductFit:
    """The launch, rate and half size of products, as a DeviceSpec has them; the rate is infinite if none is seen."""
    flops, ones = [s.flops for s in samples], [1.0] * len(samples)
    launch, a, b = fit([ones, flops, [math.sqrt(x) for x in flops]], [s.seconds for s in samples])
    return ProductFit(launch, 1 / a, (b / a) ** 2) if a else ProductFit(launch, math.inf, 0.0)


def fit_transfer(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(seconds of latency, bytes/s) of transfers of these sizes in bytes.

    Where the seconds do not grow with the bytes, as of small sizes on a busy machine, the rate is the highest seen.
    """
    latency, byte = fit_robust([[1.0] * len(sizes), sizes], seconds)
    return latency, 1 / byte if byte else max(n / t for n, t in zip(sizes, seconds, strict=True))


def errors(predicted: Iterable[float], measured: Iterable[float]) -> Error:
    """The relative errors of predictions, predicted / measured - 1."""
    off = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return Error(sum(off) / len(off), max(off), len(off)) if off else Error(0.0, 0.0, 0)


def huber(x: float, near: float) -> float:
    """A number whose square is twice Huber's loss of x: the square of x up to `near` of 0, in proportion to x beyond,
    so that single numbers far off do not decide a fit."""
    return x if abs(x) <= near else math.copysign(math.sqrt(near * (2 * abs(x) - near)), x)


def nearest(
    f: Callable[[Sequence[float]], Sequence[float]],
    start: Sequence[float],
    limits: Sequence[tuple[float, float]],
    little: float = 0.0,
) -> list[float]:
    """Positive numbers within limits at which the sum of the squares of what f returns is least, searched from `start`.

    By the method of Levenberg and Marquardt in the numbers' logarithms, with differences for derivatives. A step that
    lowers the sum by less than the share `little` is the last.
    """
    low, high = np.log(np.asarray(limits, float)).T

    def value(x: np.ndarray) -> np.ndarray:
        return np.asarray(f(np.exp(x).tolist()), float)

    here = np.clip(np.log(np.asarray(start, float)), low, high)
    off, damping = value(here), _DAMPING
    for _ in range(_STEPS):
        ahead = np.where(here + _DIFFERENCE <= high, _DIFFERENCE, -_DIFFERENCE)
        slopes = np.stack([(value(here + step) - off) / step.sum() for step in np.diag(ahead)], axis=1)
        normal = slopes.T @ slopes
        while True:
            damped = normal + np.diag(damping * np.diag(normal) + 1e-12)
            step = np.clip(-np.linalg.solve(damped, slopes.T @ off), -_LONGEST, _LONGEST)
            there = np.clip(here + step, low, high)
            moved = float(np.abs(there - here).max())
            if moved < _SHORTEST:
                return np.exp(here).tolist()
            new = value(there)
            before, after = (off**2).sum(), (new**2).sum()
            if after < before:
                here, off, damping = there, new, damping / 10
                if after > before * (1 - little):
                    return np.exp(here).tolist()
                break
            damping *= 10
    return np.exp(here).tolist()
