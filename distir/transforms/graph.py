"""A function as arrays of integers, for the passes that look at it many times."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distir.ir.axes import Shape
from distir.ir.function import Attributes, Function, Op, Value
from distir.ir.spec import Spec, Strand
from distir.ir.type import Placement, Shard, Type
from distir.ops.rules import shape_of


class Signature:
    """What ops of the same spec, attributes and operand shapes share; each thing is computed once a signature."""

    __slots__ = ("_strands", "attrs", "elements", "flops", "ins", "linear", "number", "outs", "spec")

    def __init__(self, number: int, op: Op) -> None:
        self.number, self.spec, self.attrs = number, op.spec, op.attributes
        self.ins: list[Shape] = [shape_of(v) for v in op.inputs]
        self.outs: list[Shape] = [shape_of(v) for v in op.outputs]
        self.flops = op.spec.flops(op.attributes, self.ins, self.outs)
        self.elements = sum(math.prod(s) for s in self.outs)
        self.linear = op.spec.linear_sets(len(self.ins), op.attributes)
        self._strands: dict[tuple[int, int, Shard], Strand | None] = {}

    def strand(self, slot: int, split: Shard, n: int) -> Strand | None:
        """The strand that has `split` over n devices at `slot`; the same object for every slot it runs through."""
        key = (n, slot, split)
        if key not in self._strands:
            found = self.spec.strand(self.attrs, self.ins, self.outs, slot, split, n)
            if found is not None and self._scatters(found):
                found = None
            self._strands[key] = found
            if found is not None:
                for k, p in strand_slots(found):
                    self._strands.setdefault((n, k, p), found)
                found = self._strands[key] = self._same(found, n)
        return self._strands[key]

    def _scatters(self, strand: Strand) -> bool:
        """True if an indexed dim would not be split in ranges, so that no one offset says which part is held."""
        indexed = self.spec.indexed(self.attrs)
        if indexed is None:
            return False
        slot, dim = indexed
        p, shape = (strand.ins[slot], self.ins[slot]) if slot >= 0 else (strand.outs[~slot], self.outs[~slot])
        return isinstance(p, Shard) and p.dim == dim % len(shape) and p.outer != 1

    def _same(self, strand: Strand, n: int) -> Strand:
        """The object already kept for an equal strand, if one of its slots has it."""
        for k, p in strand_slots(strand):
            other = self._strands[n, k, p]
            if other == strand and other is not None:
                return other
        return strand


def strand_slots(strand: Strand) -> list[tuple[int, Shard]]:
    """The slots that hold the strand's digit (operand k as k, result k as ~k), with their split."""
    ins = [(k, p) for k, p in enumerate(strand.ins) if isinstance(p, Shard)]
    return ins + [(~k, p) for k, p in enumerate(strand.outs) if isinstance(p, Shard)]


class Graph:
    """Values and ops of a function by number. `uses[v]` lists (op, slot), results as slot ~k."""

    __slots__ = ("function", "index", "inputs", "ins", "outputs", "outs", "roles", "shapes", "sigs", "uses", "values")

    def __init__(self, function: Function) -> None:
        self.function = function
        self.values: list[Value] = list(function.inputs)
        self.index: dict[Value, int] = {v: i for i, v in enumerate(self.values)}
        self.sigs: list[Signature] = []
        self.ins: list[list[int]] = []
        self.outs: list[list[int]] = []
        table: dict[tuple[Spec, Attributes, tuple[Type, ...]], Signature] = {}
        index = self.index
        for op in function.ops:
            key = (op.spec, op.attributes, tuple([v.type for v in op.inputs]))
            sig = table.get(key)
            if sig is None:
                sig = table[key] = Signature(len(table), op)
            self.sigs.append(sig)
            self.ins.append([index[v] for v in op.inputs])
            for v in op.outputs:
                index[v] = len(self.values)
                self.values.append(v)
            self.outs.append([index[v] for v in op.outputs])
        self.shapes: list[Shape] = [shape_of(v) for v in self.values]
        self.uses: list[list[tuple[int, int]]] = [[] for _ in self.values]
        for j, (ins, outs) in enumerate(zip(self.ins, self.outs, strict=True)):
            for k, v in enumerate(ins):
                self.uses[v].append((j, k))
            for k, v in enumerate(outs):
                self.uses[v].append((j, ~k))
        self.inputs = range(len(function.inputs))
        self.outputs = frozenset(index[v] for v in function.outputs)
        self.roles: list[str | None] = [v.kind for v in self.values]


def shard_or_none(p: Placement) -> Shard | None:
    return p if isinstance(p, Shard) else None


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


def heights(graph: Graph) -> list[int]:
    """Per op the length of the longest way from it to a result."""
    below = [0] * len(graph.values)
    height = [0] * len(graph.sigs)
    for j in range(len(height) - 1, -1, -1):
        height[j] = 1 + max([below[v] for v in graph.outs[j]], default=0)
        for v in graph.ins[j]:
            below[v] = max(below[v], height[j])
    return height


def canonical_order(graph: Graph) -> list[int]:
    """The ops in an order in which operands come first, that depends neither on names nor on the order of the ops.

    The more comes after, the earlier; of ops alike in that, by what they take, kind and attributes.
    """
    height = heights(graph)
    rank = {v: (0, v, 0) for v in graph.inputs}  # of values: (made by an op, number of input or op, result)
    levels: dict[int, list[int]] = {}
    for j, h in enumerate(height):
        levels.setdefault(-h, []).append(j)
    order: list[int] = []
    for level in sorted(levels):
        row = [
            ([rank[v] for v in graph.ins[j]], graph.sigs[j].spec.name, repr(dict(graph.sigs[j].attrs)), j)
            for j in levels[level]
        ]
        for *_, j in sorted(row):
            for k, v in enumerate(graph.outs[j]):
                rank[v] = 1, len(order), k
            order.append(j)
    return order
