"""Admissible lower bounds on memory: no plan's worst rank has less, wherever its stages are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

from distir.search.bounds import ROUNDING
from distir.search.segments import Profile
from distir.search.space import Candidate

_CLOSE = 1e-4
"""How near, relatively, the least memory is looked for: what is found is below it."""


def memory_bound(c: Candidate, batch: int, profile: Profile, saving: float) -> float:
    """Bytes that the rank of a candidate that needs most has at least: the least maximum that any cut reaches.

    A rank holds its parameters and state, from the second microbatch on the sums of gradients, and what it saved of the
    microbatches in flight, at least a share `saving` of what its types say.
    """
    m = c.microbatches(batch)
    gradients = profile.reduced(1, 0).total
    kept = (profile.parameters + profile.state) / (c.owners if c.zero else 1)
    sums = gradients / c.owners_of_sums if m > 1 else 0.0
    saved = saving * profile.saved * (c.microbatch // profile.samples)
    copied = profile.copied(c.dp, c.zero)
    kept += copied
    flights = in_flight(c, m)
    # of several chunks one may have sums when another has nothing saved any more
    both = sums + saved if c.chunks == 1 else max(saved, sums - copied)
    found = max((kept + both) / c.pp, _least_memory(flights, kept, saved))
    if m > 1 and c.chunks == 1:  # at the second backward pass of each rank there are sums, too
        again = tuple([max(1, min(n, m - 1)) for n in flights])
        found = max(found, _least_memory(again, kept + sums, saved))
    return found


def in_flight(c: Candidate, m: int) -> tuple[int, ...]:
    """By rank, how many microbatches it has in flight before its first backward pass, of the stage with the fewest;
    most first."""
    ranks = range(c.pp)
    if c.schedule == "gpipe":
        return tuple([m for _ in ranks])
    if c.schedule == "1f1b":
        return tuple([min(m, c.pp - r) for r in ranks])
    return tuple([min(c.pp, 2 * (c.pp - r) - 1) for r in ranks])


@cache
def _least_memory(flights: Sequence[int], kept: float, saved: float) -> float:
    """The least maximum over ranks of what they keep and of `saved` as often as it is in flight, however both are
    spread."""
    rooms = [0.0, *itertools.accumulate([1 / n for n in reversed(flights)])][::-1]

    def fits(most: float) -> bool:
        if kept > most * len(flights):
            return False
        full = min(int(kept / most), len(flights) - 1)  # what is kept goes where what is saved counts most
        return most * rooms[full] - (kept - most * full) / flights[full] >= saved

    low, high = 0.0, kept + saved * max(flights)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low * ROUNDING
