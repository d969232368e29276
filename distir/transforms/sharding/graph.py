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
from distir.transforms.roles import weights

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
        self.values: list[Value] = [*function.inputs, *[v for op in function.ops for v in op.outputs]]
        self.index: dict[Value, int] = {v: i for i, v in enumerate(self.values)}
        self.sigs: list[Signature] = []
        self.ins: list[list[int]] = []
        self.outs: list[list[int]] = []
        table: dict[tuple[Spec, Form, tuple[Type, ...]], Signature] = {}
        number, sigs, ins, outs = self.index.__getitem__, self.sigs, self.ins, self.outs
        n = len(function.inputs)
        for op in function.ops:
            inputs = op.inputs
            key = (op.spec, op.attributes.form, tuple(map(type_of, inputs)))
            sig = table.get(key)
            if sig is None:
                sig = table[key] = Signature(len(table), op)
            sigs.append(sig)
            ins.append(list(map(number, inputs)))
            made = len(op.outputs)
            outs.append([n] if made == 1 else list(range(n, n + made)))
            n += made
        self.kinds: list[Signature] = list(table.values())
        self.cache: dict[object, Any] = {}
        """Results of passes, cached with the graph."""
        self.inputs = range(len(function.inputs))
        self.outputs = frozenset(map(number, function.outputs))
        self.roles: list[str | None] = [v.kind for v in function.inputs] + [None] * (n - len(self.inputs))

    @cached_property
    def weights(self) -> list[int]:
        """The inputs that are parameters or optimizer state."""
        return [self.index[v] for v in weights(self.function)]

    @cached_property
    def users(self) -> list[list[tuple[int, int]]]:
        """Per value the (op, operand) that use it."""
        import numpy as np

        operands = self.edges[0]
        order = np.argsort(operands.values, kind="stable")
        users = list(zip(operands.ops[order].tolist(), operands.slots[order].tolist(), strict=True))
        ends = np.cumsum(np.bincount(operands.values, minlength=len(self.values))).tolist()
        return [users[i:j] for i, j in zip([0, *ends], ends, strict=False)]

    @cached_property
    def uses(self) -> list[list[tuple[int, int]]]:
        """Per value the (op, slot) that make it, result k as slot ~k, and that use it."""
        made = [[(j, ~k)] for j, outs in enumerate(self.outs) for k in range(len(outs))]
        first = len(self.inputs)
        return [*self.users[:first], *[[*a, *b] for a, b in zip(made, self.users[first:], strict=True)]]

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
        ends = np.cumsum(np.bincount(kinds)).tolist()
        found: list[Rows] = []
        for sig, start, end in zip(self.kinds, [0, *ends], ends, strict=False):
            ops = by_kind[start:end]
            ins = operands.values[operands.first[ops, None] + np.arange(len(sig.ins))]
            outs = results.values[results.first[ops, None] + np.arange(len(sig.outs))[::-1]]
            found.append(Rows(ops, np.concatenate([ins, outs], axis=1)))
        return found

    @cached_property
    def numbered_shapes(self) -> tuple[dict[Shape, int], np.ndarray]:
        """The shapes that values have, numbered, and the number of each value's."""
        import numpy as np

        numbers: dict[Shape, int] = {}
        of_value = np.empty(len(self.values), np.int64)
        of_value[: len(self.inputs)] = [numbers.setdefault(shape_of(v), len(numbers)) for v in self.function.inputs]
        for sig, rows in zip(self.kinds, self.rows, strict=True):
            for k, shape in enumerate(sig.outs):
                of_value[rows.values[:, ~k]] = numbers.setdefault(shape, len(numbers))
        return numbers, of_value

    @cached_property
    def shapes(self) -> list[Shape]:
        """The shape of each value."""
        numbers, of_value = self.numbered_shapes
        shapes = list(numbers)
        return [shapes[k] for k in of_value.tolist()]

    @cached_property
    def elements(self) -> list[int]:
        """How many elements each value has."""
        numbers, of_value = self.numbered_shapes
        sizes = list(map(math.prod, numbers))
        return [sizes[k] for k in of_value.tolist()]

    @cached_property
    def heights(self) -> list[int]:
        """Per op the length of the longest path from it to a result."""
        below = [0] * len(self.values)
        heights: list[int] = []
        for ins, outs in zip(reversed(self.ins), reversed(self.outs), strict=True):
            height = 1 + (below[outs[0]] if len(outs) == 1 else max([below[v] for v in outs], default=0))
            heights.append(height)
            for v in ins:
                if below[v] < height:
                    below[v] = height
        return heights[::-1]

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
                row.sort(key=lambda j: ([rank[v] for v in ins[j]], kind[sigs[j].number]))
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
    made, first = graph.edges[1].ops.tolist(), len(graph.inputs)
    while todo:
        v = todo.pop()
        for j in [j for j, _ in graph.users[v]] if forward else made[v - first : v - first + 1] if v >= first else ():
            if j not in seen:
                seen.add(j)
                todo += graph.outs[j] if forward else graph.ins[j]
    return seen


def distinct_rows(rows: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The first of the rows of each kind, kinds being numbered as they occur, and the kind of each row."""
    import numpy as np

    if (rows == rows[0]).all():  # as most
        return [0], np.zeros(len(rows), np.int64)
    first: dict[bytes, int] = {}
    kinds: dict[bytes, int] = {}
    keys = [row.tobytes() for row in rows]
    for i, key in enumerate(keys):
        if key not in first:
            first[key], kinds[key] = i, len(first)
    return list(first.values()), np.array([kinds[key] for key in keys], np.int64)
