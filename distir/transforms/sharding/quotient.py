"""The quotient of a graph: one op for each kind, so that its size is independent of the number of equal layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from distir.transforms.sharding.graph import Graph
from distir.transforms.sharding.place import Placed, View


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
    table: dict[Any, int] = {}
    number_of = table.setdefault
    # a colour is the number of a key; keys are written out in the loops, which are long
    values = [
        number_of(("value", graph.roles[v] if v in full.inputs else "", shape, made, v in full.outputs), len(table))
        for v, (shape, made) in enumerate(zip(graph.shapes, full.made, strict=True))
    ]
    ops = [
        number_of(("op", kind, *sorted([(id(s), g) for s, g in row])), len(table))
        for kind, row in zip(full.kinds, full.mappings, strict=True)
    ]
    made: list[Any] = [None] * len(values)
    for _ in range(rounds):
        for op, outs in zip(ops, full.outs, strict=True):
            for k, v in enumerate(outs):
                made[v] = op, k
        values = [
            number_of((c, maker, frozenset([(ops[j], k) for j, k in users]) if users else None), len(table))
            for c, maker, users in zip(values, made, full.users, strict=True)
        ]
        ops = [
            number_of((c, tuple([values[v] for v in ins]), tuple([values[v] for v in outs])), len(table))
            for c, ins, outs in zip(ops, full.ins, full.outs, strict=True)
        ]
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
