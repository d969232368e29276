"""A function as arrays of integers, for passes that traverse it many times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.ir.axes import Shape
from distir.ir.cached import cached
from distir.ir.exact_attributes import Form
from distir.ir.function import Function, Op, Value, type_of
from distir.ir.spec import FactorMapping, Spec
from distir.ir.type import Shard, Type
from distir.ops.rules import shape_of

if TYPE_CHECKING:
    import numpy as np


class Signature:
    """What ops of the same spec, attributes and operand shapes share, computed once per signature."""

    __slots__ = ("_alike", "_mappings", "attrs", "flops", "ins", "linear", "number", "outs", "spec")

    def __init__(self, number: int, op: Op) -> None:
        self.number, self.spec, self.attrs = number, op.spec, op.attributes
        self.ins: list[Shape] = [shape_of(v) for v in op.inputs]
        self.outs: list[Shape] = [shape_of(v) for v in op.outputs]
        self.flops = op.spec.flops(op.attributes, self.ins, self.outs)
        self.linear = op.spec.linear_sets(len(self.ins), op.attributes)
        self._mappings: dict[tuple[int, int, Shard, int], FactorMapping | None] = {}
        self._alike: dict[FactorMapping, FactorMapping] = {}

    @property
    def slots(self) -> list[tuple[int, Shape]]:
        """Operands, by their numbers, and results k, as ~k, with their shapes."""
        return [*enumerate(self.ins), *[(~k, shape) for k, shape in enumerate(self.outs)]]

    def shape(self, slot: int) -> Shape:
        return self.ins[slot] if slot >= 0 else self.outs[~slot]

    def mapping(self, slot: int, split: Shard, n: int, outside: int = 1) -> FactorMapping | None:
        """The factor mapping with `split` over n devices at `slot`; equal mappings are the same object, whatever n.

        Earlier axes split the batch into `outside` parts, if the op is split along them.
        """
        key = (n, slot, split, outside)
        if key not in self._mappings:
            found = self.spec.mapping(self.attrs, self.ins, self.outs, slot, split, n)
            if found is not None and self.scattered([(found, n)], outside):
                found = None
            if found is not None:
                found = self._alike.setdefault(found, found)
                for k, p in found.splits():
                    self._mappings.setdefault((n, k, p, outside), found)
            self._mappings[key] = found
        return self._mappings[key]

    def scattered(self, mappings: Sequence[tuple[FactorMapping, int]], outside: int = 1) -> bool:
        """Whether these mappings, each over n devices, split an indexed dim in other than contiguous ranges: one offset
        could not say where a device's part begins. `outside`: into how many parts it is split besides."""
        if self.spec.index is None:
            return False
        outer: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for mapping, n in mappings:
            for slot, p in mapping.splits():
                rank = len(self.shape(slot))
                if self.spec.indexes(self.attrs, slot, p.dim, rank):
                    outer.setdefault((slot, p.dim), []).append((p.outer, n))
        return not all(_is_chain(splits) or _is_chain([(1, outside), *splits]) for splits in outer.values())


def _is_chain(splits: Sequence[tuple[int, int]]) -> bool:
    """Whether each (outer, n) splits the parts that those before it make."""
    inside = 1
    for outer, n in sorted(splits):
        if outer != inside:
            return False
        inside *= n
    return True


class Rows(NamedTuple):
    """The ops of one signature, and the values at their slots: `values[:, k]` are operands k, `values[:, ~k]` results
    k."""

    ops: np.ndarray
    values: np.ndarray


class Edges(NamedTuple):
    """For each operand, or each result, of all ops: the op, its number there, and the value; where each op's begin."""

    ops: np.ndarray
    slots: np.ndarray
    values: np.ndarray
    first: np.ndarray


def _edges(counts: np.ndarray, values: np.ndarray) -> Edges:
    """Those of ops that have so many."""
    import numpy as np

    first = np.cumsum(counts) - counts
    return Edges(
        np.repeat(np.arange(len(counts)), counts), np.arange(len(values)) - np.repeat(first, counts), values, first
    )


class Graph:
    """Values and ops of a function by number. `users[v]` lists the (op, operand) that use value v.

    Costly properties are computed on first access. It must not be changed: see `graph_of`.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.values: list[Value] = list(function.inputs)
        self.index: dict[Value, int] = {v: i for i, v in enumerate(self.values)}
        self.shapes: list[Shape] = [shape_of(v) for v in self.values]
        self.users: list[list[tuple[int, int]]] = [[] for _ in self.values]
        self.sigs: list[Signature] = []
        self.ins: list[list[int]] = []
        self.outs: list[list[int]] = []
        table: dict[tuple[Spec, Form, tuple[Type, ...]], Signature] = {}
        index, values, users, shapes = self.index, self.values, self.users, self.shapes
        sigs, ins, outs = self.sigs, self.ins, self.outs
        for j, op in enumerate(function.ops):
            inputs = op.inputs
            key = (op.spec, op.attributes.form, tuple(map(type_of, inputs)))
            sig = table.get(key)
            if sig is None:
                sig = table[key] = Signature(len(table), op)
            sigs.append(sig)
            row = list(map(index.__getitem__, inputs))
            ins.append(row)
            for k, i in enumerate(row):
                users[i].append((j, k))
            n, made = len(values), op.outputs
            if len(made) == 1:  # as most
                index[made[0]] = n
                outs.append([n])
                users.append([])
            else:
                row = list(range(n, n + len(made)))
                outs.append(row)
                index.update(zip(made, row, strict=True))
                users += [[] for _ in row]
            values += made
            shapes += sig.outs
        self.kinds: list[Signature] = list(table.values())
        self.cache: dict[object, Any] = {}
        """Results of passes, cached with the graph."""
        self.inputs = range(len(function.inputs))
        self.outputs = frozenset(index[v] for v in function.outputs)
        self.roles: list[str | None] = [v.kind for v in function.inputs] + [None] * (len(values) - len(self.inputs))

    @cached_property
    def uses(self) -> list[list[tuple[int, int]]]:
        """Per value the (op, slot) that make it, result k as slot ~k, and that use it."""
        made = [[(j, ~k)] for j, outs in enumerate(self.outs) for k in range(len(outs))]
        first = len(self.inputs)
        return [*self.users[:first], *[[*a, *b] for a, b in zip(made, self.users[first:], strict=True)]]

    @cached_property
    def elements(self) -> list[int]:
        """Per value how many elements it has."""
        size = {shape: math.prod(shape) for shape in set(self.shapes)}
        return [size[shape] for shape in self.shapes]

    @cached_property
    def edges(self) -> tuple[Edges, Edges]:
        """All operands and all results."""
        import numpy as np

        kinds = np.fromiter([sig.number for sig in self.sigs], np.int64, len(self.sigs))
        taken = np.array([len(sig.ins) for sig in self.kinds], np.int64)[kinds]
        given = np.array([len(sig.outs) for sig in self.kinds], np.int64)[kinds]
        results = np.arange(len(self.inputs), len(self.values))
        operands = np.fromiter(itertools.chain.from_iterable(self.ins), np.int64, int(taken.sum()))
        return _edges(taken, operands), _edges(given, results)

    @cached_property
    def rows(self) -> list[Rows]:
        """The ops by signature."""
        import numpy as np

        kinds = np.fromiter([sig.number for sig in self.sigs], np.int64, len(self.sigs))
        operands, results = self.edges
        by_kind = np.argsort(kinds, kind="stable")
        found: list[Rows] = []
        for sig, ops in zip(self.kinds, np.split(by_kind, np.cumsum(np.bincount(kinds))[:-1]), strict=True):
            ins = operands.values[operands.first[ops, None] + np.arange(len(sig.ins))]
            outs = results.values[results.first[ops, None] + np.arange(len(sig.outs))[::-1]]
            found.append(Rows(ops, np.concatenate([ins, outs], axis=1)))
        return found

    @cached_property
    def numbered_shapes(self) -> tuple[dict[Shape, int], np.ndarray]:
        """The shapes that values have, numbered, and the number of each value's."""
        import numpy as np

        numbers = {shape: k for k, shape in enumerate(dict.fromkeys(self.shapes))}
        return numbers, np.fromiter(map(numbers.__getitem__, self.shapes), np.int64, len(self.shapes))

    @cached_property
    def heights(self) -> list[int]:
        """Per op the length of the longest path from it to a result."""
        below = [0] * len(self.values)
        height = [0] * len(self.sigs)
        for j in range(len(height) - 1, -1, -1):
            outs = self.outs[j]
            h = height[j] = 1 + (below[outs[0]] if len(outs) == 1 else max([below[v] for v in outs], default=0))
            for v in self.ins[j]:
                if below[v] < h:
                    below[v] = h
        return height

    @cached_property
    def order(self) -> list[int]:
        """A topological order of the ops that depends neither on names nor on the order of the function's ops.

        By descending height; among equal heights, by operands, kind and attributes.
        """
        import numpy as np

        heights = np.array(self.heights, np.int64)
        ops = np.argsort(-heights, kind="stable").tolist()
        names = [(sig.spec.name, repr(dict(sig.attrs))) for sig in self.kinds]
        ranks = {name: k for k, name in enumerate(sorted(set(names)))}
        kind = [ranks[name] for name in names]
        # rank of values: inputs by number, then results by the position of their op and their number in it
        rank = list(self.inputs) + [0] * (len(self.values) - len(self.inputs))
        first = len(self.inputs)
        ins, outs, sigs = self.ins, self.outs, self.sigs
        order: list[int] = []
        start = 0
        for count in np.bincount(heights)[:0:-1].tolist():
            row = ops[start : start + count]
            start += count
            if count > 1:
                row = [j for *_, j in sorted([([rank[v] for v in ins[j]], kind[sigs[j].number], j) for j in row])]
            for j in row:
                for v in outs[j]:
                    rank[v] = first
                    first += 1
            order += row
        return order


@cached
def graph_of(function: Function) -> Graph:
    """The function's graph, cached with the function."""
    return Graph(function)


def closure(graph: Graph, roots: Sequence[int], forward: bool) -> set[int]:
    """The ops that depend on the given values (forward), or that these depend on."""
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        v = todo.pop()
        for j, k in graph.uses[v]:
            if (k >= 0) == forward and j not in seen:
                seen.add(j)
                todo += graph.outs[j] if forward else graph.ins[j]
    return seen
