"""Finds the layers of a sequential program: the parts of its forward pass that repeat, by the weights that they use."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from distir.ir.cached import cached
from distir.ir.function import Function, Value
from distir.ops.rules import shape_of
from distir.transforms.roles import weights

if TYPE_CHECKING:
    import numpy as np


_LEAST = 0.5
"""A layer's least number of elements, relative to the layers of the longest repetition."""


class _Use(NamedTuple):
    """The position of a weight among the inputs, and how it is used first: equal for weights used in the same way."""

    position: int
    how: Hashable


class _Run(NamedTuple):
    """`count` times the same `period` of uses, from `start` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


class Layers(NamedTuple):
    """The layers of a program: for each the position of the input that is the first weight it uses; and that of the
    weight that is first used `after` the last of them."""

    first: tuple[int, ...]
    after: int | None


@cached
def layers(function: Function) -> Layers:
    """The layers of a sequential program, in order.

    Layers are what repeats: the same ops with weights of the same types, in the same order. The longest repetition
    counts, and what repeats before and after it if its parts are at least half as large: an encoder and a decoder have
    layers each, the projections of one attention are none. A part that stands alone, such as an embedding or a head, is
    no layer; a program in which nothing repeats has none.
    """
    import numpy as np

    uses = _first_uses(function)
    kinds: dict[Hashable, int] = {}
    numbers = np.array([kinds.setdefault(use.how, len(kinds)) for use in uses], dtype=np.int32)
    elements = np.array([math.prod(shape_of(function.inputs[use.position])) for use in uses])
    runs = _runs(numbers, elements, 0, 0.0)
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
        v: (i,) if v in parts and v.kind != "state" else () for i, v in enumerate(function.inputs) if v in parts
    }
    found: dict[int, _Use] = {}
    for op in function.ops:
        if all([v in roots for v in op.inputs]):  # such as the cast of a weight, or a constant
            roots.update(dict.fromkeys(op.outputs, tuple([i for v in op.inputs for i in roots[v]])))
            continue
        for k, v in enumerate(op.inputs):
            for i in roots.get(v, ()):
                found.setdefault(i, _Use(i, (op.spec, k, function.inputs[i].type)))
    return list(found.values())


def _runs(numbers: np.ndarray, elements: np.ndarray, first: int, least: float) -> list[_Run]:
    """The repetitions, in order, of parts of at least so many elements, in kinds of uses of which the first has number
    `first`."""
    run = _longest(numbers)
    if run is None:
        return []
    own = float(elements[run.start : run.start + run.period].sum())
    least = least or own * _LEAST
    before = _runs(numbers[: run.start], elements[: run.start], first, least)
    after = _runs(numbers[run.end :], elements[run.end :], first + run.end, least)
    return [*before, *([run._replace(start=first + run.start)] if own >= least else []), *after]


def _longest(numbers: np.ndarray) -> _Run | None:
    """The run of most uses; of these that of the shortest period, then the first. None if nothing repeats."""
    import numpy as np

    best: _Run | None = None
    for period in range(1, len(numbers) // 2 + 1):
        differ = np.flatnonzero(numbers[period:] != numbers[:-period])
        edges = np.concatenate(([-1], differ, [len(numbers) - period]))
        lengths = np.diff(edges) - 1  # of what equals what is a period later
        k = int(lengths.argmax())
        run = _Run(int(edges[k]) + 1, period, int(lengths[k]) // period + 1)
        if run.count > 1 and (best is None or run.period * run.count > best.period * best.count):
            best = run
    return best
