"""Scores of predictions against measurements: errors of seconds and bytes, ranks, and the regret of a choice."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

_FEWEST_RANKED = 3
"""Rows of a model below which a rank correlation says nothing."""


class Case(NamedTuple):
    """A measured and predicted step, in seconds; peaks of memory in one unit, `measured_peak` if it is known.

    `model`: equal for runs of one model, which are ranked together. `choice`: equal for runs between which one would
    choose, those of one model, number of devices and batch.
    """

    measured: float
    predicted: float
    model: Hashable
    choice: Hashable
    measured_peak: float | None = None
    predicted_peak: float = 0.0


class Scores(NamedTuple):
    """The scores of the predicted rows of a source. The error of a row is predicted / measured - 1; None where there
    is no row to say.

    `rows`: how many are predicted. `mean_absolute_error`, `p50`, `p90` and `worst`: mean, median, 90th percentile
    (linear between rows) and largest of the errors' magnitudes. `bias`: the mean error: above 0 predictions are slow.
    `spearman`: the rank correlation of predicted with measured seconds (see `spearman`) over the rows of each model of
    at least 3 rows, averaged by rows. `regret`: among the rows of one model, number of devices and batch (at least 2),
    the measured seconds of the one predicted quickest, over the least measured, minus 1; the mean over such groups.
    `memory_error`: the mean of |predicted / measured - 1| of peaks, over the rows in which it was measured.
    """

    rows: int
    mean_absolute_error: float | None
    p50: float | None
    p90: float | None
    worst: float | None
    bias: float | None
    spearman: float | None
    regret: float | None
    memory_error: float | None


def scores(cases: Sequence[Case]) -> Scores:
    """The scores of these cases, see `Scores`."""
    errors = [c.predicted / c.measured - 1 for c in cases]
    sizes = np.abs(errors)
    peaks = [abs(c.predicted_peak / c.measured_peak - 1) for c in cases if c.measured_peak is not None]
    half, most = (float(np.percentile(sizes, q)) if errors else None for q in (50, 90))
    return Scores(
        len(cases),
        _mean(sizes.tolist()),
        half,
        most,
        float(sizes.max()) if errors else None,
        _mean(errors),
        _ranked(cases),
        _regret(cases),
        _mean(peaks),
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, where equal numbers share the mean of theirs.

    None if either has fewer than two different numbers.
    """
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else None


def ranks(numbers: Sequence[float]) -> np.ndarray:
    """The rank of each number, from 1; equal ones share the mean of their ranks."""
    _, group, count = np.unique(np.asarray(numbers, float), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[group]


def _ranked(cases: Sequence[Case]) -> float | None:
    total, rows = 0.0, 0
    for group in _groups(cases, [c.model for c in cases]):
        if len(group) < _FEWEST_RANKED:
            continue
        found = spearman([c.measured for c in group], [c.predicted for c in group])
        if found is not None:
            total, rows = total + found * len(group), rows + len(group)
    return total / rows if rows else None


def _regret(cases: Sequence[Case]) -> float | None:
    """The mean regret; of rows predicted equally quick, the first is chosen."""
    found: list[float] = []
    for group in _groups(cases, [c.choice for c in cases]):
        if len(group) > 1:
            chosen = min(group, key=lambda c: c.predicted)
            found.append(chosen.measured / min(c.measured for c in group) - 1)
    return _mean(found)


def _groups(cases: Sequence[Case], keys: Sequence[Hashable]) -> list[list[Case]]:
    found: dict[Hashable, list[Case]] = {}
    for key, case in zip(keys, cases, strict=True):
        found.setdefault(key, []).append(case)
    return list(found.values())


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if len(numbers) else None
