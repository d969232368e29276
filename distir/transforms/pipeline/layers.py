"""Finds the layers of a sequential program: the parts of its forward pass that repeat, by the weights that they use."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from distir.ir.cached import cached
from distir.ir.function import Function, Value
from distir.ops.rules import shape_of
from distir.transforms.roles import weights

if TYPE_CHECKING:
    import numpy as np

_LEAST = 0.5
"""A layer's least number of elements, relative to the layers of the longest repetition."""
_LAGS = 8
"""How often, at most, a layer uses weights of one kind, for some kind."""


class Layers(NamedTuple):
    """The layers of a program: for each the position of the input that is the first weight it uses; and that of the
    weight that is first used `after` the last of them."""

    first: tuple[int, ...]
    after: int | None


class _Use(NamedTuple):
    """The first use of a weight: its position among the inputs, the number of the op, how it is used (equal for weights
    used in the same way), and how many values that are made before are used from here on; infinite if the op uses
    another weight first."""

    position: int
    op: int
    how: Hashable
    crossing: float


class _Uses(NamedTuple):
    """First uses in order: as numbers of what is equal, their ops, the elements of their weights, what crosses them."""

    kinds: np.ndarray
    ops: np.ndarray
    elements: np.ndarray
    crossing: np.ndarray

    def part(self, start: int, end: int) -> _Uses:
        return _Uses(*[x[start:end] for x in self])


class _Run(NamedTuple):
    """`count` times the same `period` of uses, from `start` on, and so many `more` that would go on with it."""

    start: int
    period: int
    count: int
    more: int = 0

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    def later(self, by: int) -> _Run:
        return self._replace(start=self.start + by)


@cached
def layers(function: Function) -> Layers:
    """The layers of a sequential program, in order.

    Layers are what repeats, one computed from the other: the same ops with weights of the same types, in the same
    order. The longest repetition counts, and what repeats before and after it if its parts are at least half as large:
    an encoder and a decoder have layers each, the projections of one attention are none. It is cut where fewest values
    cross. What is unlike the others, such as an embedding, a head, or a first layer with more weights,
    is no layer; a program in which nothing repeats has none.
    """
    import numpy as np

    uses = _first_uses(function)
    numbers: dict[Hashable, int] = {}
    kinds = np.array([numbers.setdefault(use.how, len(numbers)) for use in uses], dtype=np.int32)
    elements = np.array([math.prod(shape_of(function.inputs[use.position])) for use in uses])
    ops, crossing = np.array([use.op for use in uses]), np.array([use.crossing for use in uses])
    runs = _runs(function, _Uses(kinds, ops, elements, crossing), 0, 0.0)
    first = tuple([uses[run.start + k * run.period].position for run in runs for k in range(run.count)])
    return Layers(first, uses[runs[-1].end].position if runs and runs[-1].end < len(uses) else None)


def even_layers(count: int, stages: int) -> list[int]:
    """The layers of each stage, as near to equal as they can be. Those left over go to the stages from the second on,
    the last of which has the head, too: so does torchtitan (github pytorch/torchtitan 9dec370, pipelining_utils.py)."""
    base, left = divmod(count, stages)
    return [base + (1 <= k <= left) for k in range(stages)]


def _first_uses(function: Function) -> list[_Use]:
    """The weights in the order in which ops first use them with anything that is made of more than weights."""
    parts = set(weights(function))
    roots: dict[Value, tuple[int, ...]] = {
        v: (i,) if v.kind != "state" else () for i, v in enumerate(function.inputs) if v in parts
    }
    found: dict[int, tuple[int, Hashable]] = {}
    made: dict[Value, int] = {}
    """The number of the op that makes each value of the forward pass which is made of more than weights."""
    last: dict[Value, int] = {}
    for n, op in enumerate(function.ops):
        if op.of is not None:  # the backward pass, and what follows it
            continue
        if all([v in roots for v in op.inputs]):  # such as the cast of a weight, or a constant
            roots.update(dict.fromkeys(op.outputs, tuple([i for v in op.inputs for i in roots[v]])))
            continue
        for k, v in enumerate(op.inputs):
            for i in roots.get(v, ()):
                found.setdefault(i, (n, (op.spec, k, function.inputs[i].type)))
        last.update([(v, n) for v in op.inputs if v in made])
        made.update(dict.fromkeys(op.outputs, n))
    crossing = _crossing(len(function.ops), [(made[v], n) for v, n in last.items()])
    before = [-1, *[n for n, _ in found.values()]]
    return [
        _Use(i, n, how, crossing[n] if n != before[k] else math.inf) for k, (i, (n, how)) in enumerate(found.items())
    ]


def _crossing(ops: int, spans: list[tuple[int, int]]) -> list[int]:
    """Before each op the number of values that are made by an earlier one, and used by it or a later one: of spans from
    the op that makes a value to the last that uses it."""
    import numpy as np

    if not spans:
        return [0] * ops
    begin, end = np.array(spans).T
    change = np.bincount(begin + 1, minlength=ops + 1) - np.bincount(end + 1, minlength=ops + 1)
    return np.cumsum(change)[:ops].tolist()


def _runs(function: Function, uses: _Uses, first: int, least: float) -> list[_Run]:
    """The repetitions, in order, of parts of at least so many elements; the first of these uses has number `first`."""
    run = _longest(uses)
    if run is None:
        return []
    own = float(uses.elements[run.start : run.start + run.period].sum())
    layered = own >= least and _follow(function, uses.ops[run.start : run.end : run.period].tolist())
    least = least or own * _LEAST * layered
    before = _runs(function, uses.part(0, run.start), first, least)
    after = _runs(function, uses.part(run.end, len(uses.kinds)), first + run.end, least)
    return [*before, *([run.later(first)] if layered else []), *after]


def _follow(function: Function, numbers: Sequence[int]) -> bool:
    """Whether each of these ops computes with what follows from the one before it: no branches beside each other."""
    for n, m in pairwise(numbers):
        made = set(function.ops[n].outputs)
        for op in function.ops[n + 1 : m]:
            if not made.isdisjoint(op.inputs):
                made.update(op.outputs)
        if made.isdisjoint(function.ops[m].inputs):
            return False
    return True


def _longest(uses: _Uses) -> _Run | None:
    """The run of most uses; of these that of the shortest period, then the first, cut where fewest values cross. None
    if nothing repeats."""
    import numpy as np

    kinds = uses.kinds
    best: _Run | None = None
    for period in _periods(kinds):
        differ = np.flatnonzero(kinds[period:] != kinds[:-period])
        edges = np.concatenate(([-1], differ, [len(kinds) - period]))
        lengths = np.diff(edges) - 1  # of what equals what is a period later
        k = int(lengths.argmax())
        count, more = divmod(int(lengths[k]), period)
        run = _Run(int(edges[k]) + 1, period, count + 1, more)
        if count and (best is None or period * run.count > best.period * best.count):
            best = run
    if best is None:
        return None
    crossing = uses.crossing[best.start + best.period : best.start + best.period + best.more + 1]
    fewest = np.flatnonzero(crossing == crossing.min())
    return best.later(int(fewest[-1]))


def _periods(kinds: np.ndarray) -> list[int]:
    """The periods that may repeat, ascending: distances between uses of one kind."""
    import numpy as np

    order = np.argsort(kinds, kind="stable")
    found: set[int] = set()
    for lag in range(1, min(_LAGS, len(kinds) - 1) + 1):
        same = kinds[order[lag:]] == kinds[order[:-lag]]
        found.update((order[lag:] - order[:-lag])[same].tolist())
    return sorted([period for period in found if 2 * period <= len(kinds)])
