"""Arithmetic of intervals, against counting the points that they cover."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distir.executor.simulator.intervals import NO_INTERVALS, Intervals, clipped, covering, length, merged

ENDS = st.integers(0, 12)
INTERVALS = st.lists(st.tuples(ENDS, ENDS).map(lambda x: (min(x), max(x))), max_size=6)


def array(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """As an array, of floats."""
    return np.array(list(intervals), dtype=np.float64).reshape(-1, 2)


def points(x: Intervals) -> set[float]:
    """The middles of the units that intervals with whole edges cover."""
    return {k + 0.5 for k in range(12) for a, b in x.tolist() if a <= k and k + 1 <= b}


@given(rows=st.lists(INTERVALS, max_size=3))
def test_merged_intervals_cover_the_same_and_are_disjoint_and_in_order(rows: list[list[tuple[int, int]]]) -> None:
    parts = [array(row) for row in rows]
    found = merged(parts)
    assert points(found) == set().union(*[points(x) for x in parts])
    edges = found.ravel().tolist()
    assert edges == sorted(set(edges))  # none is empty, none touches the next
    assert length(found) == len(points(found))


@given(row=INTERVALS, begin=ENDS, end=ENDS)
def test_clipped_intervals_are_what_lies_between(row: list[tuple[int, int]], begin: int, end: int) -> None:
    found = clipped(merged([array(row)]), begin, end)
    assert points(found) == {t for t in points(array(row)) if begin < t < end}
    assert length(found) == len(points(found))


@given(rows=st.lists(INTERVALS, max_size=4))
def test_gaps_between_edges_are_covered_by_the_rows_that_have_them(rows: list[list[tuple[int, int]]]) -> None:
    parts = [merged([array(row)]) for row in rows]
    seconds, active = covering(parts)
    assert active.shape == (len(parts), len(seconds))
    for x, row in zip(parts, active, strict=True):
        assert (row * seconds).sum() == length(x)
    both = [len(set.intersection(*map(points, parts)))] if parts else [0]
    assert (active.all(axis=0) * seconds).sum() == both[0]


def test_there_may_be_no_intervals() -> None:
    assert merged([]).shape == merged([NO_INTERVALS]).shape == (0, 2)
    assert length(NO_INTERVALS) == 0
    assert covering([])[0].shape == (0,)
