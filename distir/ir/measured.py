"""Seconds of collectives as they were measured, in place of a model of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple


class Measured(NamedTuple):
    """A collective among `ranks` devices of one node, as `distir bench collectives` names it: points (bytes, seconds),
    ascending. Bytes are those of `Wire`: the whole that is reduced, gathered or passed on.
    """

    collective: str
    ranks: int
    points: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """Between points a power of the size; below the first its seconds, beyond the last in proportion."""
        (first, least), (last, most) = self.points[0], self.points[-1]
        if size <= first:
            return least
        for (a, x), (b, y) in pairwise(self.points):
            if size <= b:
                return x * (y / x) ** (math.log(size / a) / math.log(b / a))
        return most * size / last

    def rising(self) -> Measured:
        """The greatest seconds that are at most these, and that no more bytes take less than."""
        least = list(accumulate([x for _, x in reversed(self.points)], min))[::-1]
        return self._replace(points=tuple([(n, x) for (n, _), x in zip(self.points, least, strict=True)]))


def measured(found: Iterable[Measured], collective: str | None, ranks: int) -> Measured | None:
    """That of a collective among so many ranks, if it was measured."""
    return next((m for m in found if (m.collective, m.ranks) == (collective, ranks)), None)
