"""The quotient of a graph: one op for each kind, so that its size is independent of the number of equal layers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from distir.transforms.sharding.graph import Graph
from distir.transforms.sharding.place import Placed, View

if TYPE_CHECKING:
    import numpy as np

_ODD = 0x1E3779B97F4A7C15
"""What numbers are multiplied by that are hashed together."""


class Quotient(NamedTuple):
    """A view with one op for each kind; `values`: of the graph's values the numbers that they have in it."""

    view: View
    values: Sequence[int]

    def lifted(self, placed: Placed) -> Placed:
        """Where the view's inputs and sums are placed as in `placed`, those of the graph; without its ops."""
        reduce = {v for v, i in enumerate(self.values) if i in placed.reduce}
        inputs = {v: placed.inputs[i] for v, i in enumerate(self.values) if i in placed.inputs}
        return Placed(placed.price, [], reduce, inputs)


def quotient(graph: Graph, full: View, rounds: int = 2) -> Quotient:
    """The view with one op for each kind, and its count: ops whose kind and mappings are equal, and those of their
    neighbours up to `rounds` steps away, are merged (colour refinement).
    """
    import numpy as np

    # a colour is a hash, of 64 bits, of all that two ops, or values, must have in common
    first: dict[object, int] = {}
    number_of = first.setdefault
    inputs, outputs = len(full.inputs), full.outputs
    of_values = [
        number_of((role, shape, made, v < inputs, v in outputs), len(first))
        for v, (role, shape, made) in enumerate(zip(graph.roles, graph.shapes, full.made, strict=True))
    ]
    of_ops = [
        number_of((kind, *[(id(s), g) for s, g in row]), len(first))
        for kind, row in zip(full.kinds, full.mappings, strict=True)
    ]
    op_colours, value_colours = _mixed(np.array(of_ops)), _mixed(np.array(of_values))
    taken, given = _edges(full.ins), _edges(full.outs)
    for _ in range(rounds):
        beside = value_colours * _ODD
        for edges, where in ((given, 1), (taken, 2)):
            np.add.at(beside, edges.values, _mixed(op_colours[edges.ops] + edges.slots * _ODD + where))
        value_colours = _mixed(beside)
        beside = op_colours * _ODD
        for edges, where in ((given, 1), (taken, 2)):
            np.add.at(beside, edges.ops, _mixed(value_colours[edges.values] + edges.slots * _ODD + where))
        op_colours = _mixed(beside)
    ops, values = op_colours.tolist(), value_colours.tolist()
    number: dict[int, int] = {}
    first_ops: list[int] = []
    for j in full.order:
        if ops[j] not in number:
            number[ops[j]] = len(first_ops)
            first_ops.append(j)
    times = Counter(ops)
    renumber: dict[int, int] = {}
    first_values: list[int] = []
    for v, c in enumerate(values):
        if c not in renumber:
            renumber[c] = len(first_values)
            first_values.append(v)
    copies = Counter(values)
    at = [renumber[c] for c in values]
    small = View(
        sigs=[full.sigs[j] for j in first_ops],
        kinds=[full.kinds[j] for j in first_ops],
        ins=[[at[v] for v in full.ins[j]] for j in first_ops],
        outs=[[at[v] for v in full.outs[j]] for j in first_ops],
        mappings=[full.mappings[j] for j in first_ops],
        flops=[full.flops[j] for j in first_ops],
        made=[full.made[v] for v in first_values],
        stored=[full.stored[v] for v in first_values],
        users=[sorted({(number[ops[j]], k) for j, k in full.users[v]}) for v in first_values],
        times=[times[ops[j]] for j in first_ops],
        copies=[copies[values[v]] for v in first_values],
        inputs={at[v] for v in full.inputs},
        outputs={at[v] for v in full.outputs},
        order=range(len(first_ops)),
    )
    return Quotient(small, at)


class _Edges(NamedTuple):
    """For each operand, or each result, of all ops: the op, its number there, and the value."""

    ops: np.ndarray
    slots: np.ndarray
    values: np.ndarray


def _edges(rows: Sequence[Sequence[int]]) -> _Edges:
    import numpy as np

    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    values = np.fromiter(itertools.chain.from_iterable(rows), np.int64, int(counts.sum()))
    slots = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    return _Edges(np.repeat(np.arange(len(rows)), counts), slots, values)


def _mixed(x: np.ndarray) -> np.ndarray:
    """A hash of 64 bits of each number (the finaliser of splitmix64; Steele, Lea, Flood 2014)."""
    import numpy as np

    x = x.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)
