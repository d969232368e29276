"""Intervals of time: arrays of shape (n, 2), the begins and ends, in seconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.float64]
NO_INTERVALS: Intervals = np.empty((0, 2))


def merged(parts: Sequence[Intervals]) -> Intervals:
    """Disjoint intervals that cover what the parts cover, in order; empty ones are left out."""
    x = np.concatenate(parts) if parts else NO_INTERVALS
    if len(x) > 1:
        x = x[np.argsort(x[:, 0])]
        ends = np.maximum.accumulate(x[:, 1])
        first = np.flatnonzero(np.append(True, x[1:, 0] > ends[:-1]))
        last = np.append(first[1:], len(x)) - 1
        x = np.column_stack((x[first, 0], ends[last]))
    return x[x[:, 1] > x[:, 0]]


def length(x: Intervals) -> float:
    """The seconds of disjoint intervals."""
    return float((x[:, 1] - x[:, 0]).sum())


def clipped(x: Intervals, begin: float, end: float) -> Intervals:
    """What lies of disjoint intervals between two times."""
    inside = x[(x[:, 1] > begin) & (x[:, 0] < end)]
    return np.clip(inside, begin, end)


def covering(rows: Sequence[Intervals]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The gaps between the edges of rows of disjoint intervals, in seconds, and whether each row covers each gap.

    Arrays of shapes (gaps,) and (rows, gaps).
    """
    times = np.concatenate([x.ravel() for x in rows]) if rows else np.empty(0)
    row = np.repeat(np.arange(len(rows)), [x.size for x in rows])
    step = np.tile([1, -1], len(times) // 2)
    order = np.argsort(times)
    edges = (row[order] == np.arange(len(rows))[:, None]) * step[order]
    return np.diff(times[order]), np.cumsum(edges, axis=1)[:, :-1] > 0
