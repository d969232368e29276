"""The quotient of a graph: one op for each kind, so that its size is independent of the number of equal layers."""

from __future__ import annotations

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
    neighbours up to `rounds` steps away, are merged (colour refinement). Which addend of a sum a value is does not
    tell it from the others: a norm over all gradients would tell all layers apart.
    """
    import numpy as np

    # a colour is a hash, of 64 bits, of all that two ops, or values, must have in common
    op_colours, value_colours = _of_ops(full), _of_values(graph, full)
    taken, given = graph.edges
    sums = np.array([sig.spec.addends for sig in full.sigs], bool)
    taken = taken._replace(slots=np.where(sums[taken.ops], 0, taken.slots))
    for _ in range(rounds):
        beside = value_colours * _ODD
        for edges, where in ((given, 1), (taken, 2)):
            np.add.at(beside, edges.values, _mixed(op_colours[edges.ops] + edges.slots * _ODD + where))
        value_colours = _mixed(beside)
        beside = op_colours * _ODD
        for edges, where in ((given, 1), (taken, 2)):
            np.add.at(beside, edges.ops, _mixed(value_colours[edges.values] + edges.slots * _ODD + where))
        op_colours = _mixed(beside)
    order = np.array(full.order, np.int64)
    first_ops, of_op, times = _numbered(op_colours[order])
    first_ops, number = order[first_ops].tolist(), dict(zip(full.order, of_op.tolist(), strict=True))
    first_values, of_value, copies = _numbered(value_colours)
    at = of_value.tolist()
    small = View(
        sigs=[full.sigs[j] for j in first_ops],
        kinds=[full.kinds[j] for j in first_ops],
        ins=[[at[v] for v in full.ins[j]] for j in first_ops],
        outs=[[at[v] for v in full.outs[j]] for j in first_ops],
        mappings=[full.mappings[j] for j in first_ops],
        flops=[full.flops[j] for j in first_ops],
        made=[full.made[v] for v in first_values],
        stored=[full.stored[v] for v in first_values],
        users=[sorted({(number[j], k) for j, k in full.users[v]}) for v in first_values],
        times=times.tolist(),
        copies=copies.tolist(),
        inputs={at[v] for v in full.inputs},
        outputs={at[v] for v in full.outputs},
        order=range(len(first_ops)),
        choices=full.choices,
    )
    return Quotient(small, at)


def _of_values(graph: Graph, full: View) -> np.ndarray:
    """Their colours to begin with: values of one role, shape and price are alike, of inputs, of results, of outputs."""
    import numpy as np

    known: dict[str | None, int] = {}
    role = np.full(len(full.made), -1)
    role[: len(full.inputs)] = [known.setdefault(graph.roles[v], len(known)) for v in full.inputs]
    given = np.zeros(len(full.made), np.int64)
    given[list(full.outputs)] = 1
    columns = graph.numbered_shapes[1], np.array(full.made, np.float64).view(np.int64), role, given
    colours = np.zeros(len(full.made), np.int64)
    for column in columns:
        colours = _mixed(colours * _ODD + column)
    return colours


def _of_ops(full: View) -> np.ndarray:
    """Their colours to begin with: ops of one kind and with the same mappings are alike. Attributes of ops on single
    numbers, which cannot be split, do not tell them apart: the stream of a dropout's key would tell all layers."""
    import numpy as np

    known: dict[object, int] = {}
    single = {
        sig.number: -1 - known.setdefault((sig.spec, len(sig.ins), len(sig.outs)), len(known))
        for sig in dict.fromkeys(full.sigs)
        if not any([*sig.ins, *sig.outs])
    }
    kinds = [single.get(sig.number, kind) for sig, kind in zip(full.sigs, full.kinds, strict=True)]
    rows = {
        row: known.setdefault(tuple([(id(s), g) for s, g in mappings]), len(known))
        for row, mappings in dict(zip(map(id, full.mappings), full.mappings, strict=True)).items()
    }
    mappings = np.array([rows[id(row)] for row in full.mappings], np.int64)
    return _mixed(mappings * _ODD + np.array(kinds, np.int64))


def _numbered(colours: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Colours numbered in the order in which they occur: where each does so first, the number of each place's, and how
    often each occurs."""
    import numpy as np

    _, first, number, times = np.unique(colours, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[number], times[order]


def _mixed(x: np.ndarray) -> np.ndarray:
    """A hash of 64 bits of each number (the finaliser of splitmix64; Steele, Lea, Flood 2014)."""
    import numpy as np

    x = x.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)
