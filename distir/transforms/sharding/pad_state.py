"""Padding what is stored alone, so that ZeRO can split it: a weight of 4096 rows over 24 replicas is stored as 4104.

With it grow its optimizer's state and the gradient that the optimizer takes. All else stays as it is: what uses the
weight takes a slice of it, a view once it is gathered, and the gradient is extended with zeros. (PyTorch's FSDP2 pads
the first dim of a weight's shards likewise: github pytorch/pytorch, torch/distributed/fsdp/_fully_shard.) Roles of
inputs remember the shape that is used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from distir.ir.cached import cached
from distir.ir.function import Function, Op, Role, Value
from distir.ir.placement import Shard, splits
from distir.ir.spec import FactorMapping, lookup
from distir.ops.rules import shape_of
from distir.transforms.rewriting.laws import Law, rewrites
from distir.transforms.sharding.graph import Graph, graph_of
from distir.transforms.sharding.pad import WORTH, Padder, Sizes
from distir.transforms.sharding.place import Placed
from distir.transforms.sharding.zero import (
    frozen_weights,
    is_pointwise,
    scattered_gradient,
    split_outside,
    updates_of,
    weight_split_outside,
)

_MOST = 0.5
"""A dim is padded only if that makes it longer by less than this share of it."""
_CUT, _EXTEND = lookup("CutTo"), lookup("PadTo")


class Share(NamedTuple):
    """A weight, by its number, and the size to which one of its dims is padded."""

    weight: int
    dim: int
    size: int


class StateAxis(NamedTuple):
    """An axis along which ZeRO splits what is stored: its size, the placements along it, and those without ZeRO, None
    if these leave all weights whole."""

    size: int
    placed: Placed
    without: Placed | None = None

    def splits_update(self, op: int) -> bool:
        """Whether the axis splits an optimizer's op without ZeRO, as its weight is."""
        return self.without is not None and self.without.mappings[op] is not None

    def splits_weight(self, weight: int) -> bool:
        """Whether the axis splits the weight without ZeRO."""
        return self.without is not None and weight in self.without.inputs


@cached
def divides_evenly(function: Function, devices: int) -> bool:
    """Whether each weight has a dim that so many devices divide: then no axes of these need padding to split it."""
    shapes = {shape_of(v) for v in function.inputs if v.kind == "parameter"}
    return all([any([n % devices == 0 for n in shape]) for shape in shapes if math.prod(shape) > 1])


def unsplit_shares(
    graph: Graph, axes: Sequence[StateAxis], others: Sequence[tuple[Placed, int]], stage: int
) -> list[Share]:
    """The weights that some axis leaves whole though the ZeRO stage splits them, padded so that all axes split them.

    `others` are the placements along all other axes, with their sizes.
    """
    found: list[Share | None] = []
    for j, slot in updates_of(graph):
        splitting = [a for a in axes if not a.splits_update(j)]
        if any([a.placed.mappings[j] is None for a in splitting]):
            taken = [*others, *[(a.without, a.size) for a in axes if a.without and a.splits_update(j)]]
            ways = math.prod([a.size for a in splitting])
            found.append(_share(graph, graph.ins[j][slot], ways, split_outside(graph, j, slot, taken)))
    for weight in frozen_weights(graph) if stage == 3 else ():
        splitting = [a for a in axes if not a.splits_weight(weight)]
        if any([weight not in a.placed.inputs for a in splitting]):
            taken = [*others, *[(a.without, a.size) for a in axes if a.without and a.splits_weight(weight)]]
            ways = math.prod([a.size for a in splitting])
            found.append(_share(graph, weight, ways, weight_split_outside(graph, weight, taken)))
    return [share for share in found if share is not None]


def _share(graph: Graph, weight: int, ways: int, inside: Sequence[int]) -> Share | None:
    """The weight padded along the first dim that no other axis splits and that grows by little, else along the one that
    grows least. `inside`: how often other axes split each dim."""
    shape = graph.shapes[weight]
    sizes = {d: -(-n // ways) * ways for d, n in enumerate(shape) if inside[d] == 1}
    growth = {d: size / shape[d] - 1 for d, size in sizes.items()}
    dim = min(growth, key=lambda d: 0.0 if growth[d] < 1 / WORTH else growth[d], default=None)
    return Share(weight, dim, sizes[dim]) if dim is not None and 0 < growth[dim] < _MOST else None


@rewrites(Law.PADDED)
def pad_state(function: Function, shares: Sequence[Share]) -> Function:
    """The function with these weights padded where they are stored; inputs and outputs remember their source shapes."""
    return _StatePadder(function, shares).build() if shares else function


def stored(function: Function, padded: Function) -> list[Share]:
    """How weights of the function's padded form are padded further than the program uses them."""
    return [
        Share(i, dim, larger)
        for i, (v, w) in enumerate(zip(function.inputs, padded.inputs, strict=False))
        if w.role and w.role.used and w.kind == "parameter"
        for dim, (size, larger) in enumerate(zip(shape_of(v), shape_of(w), strict=True))
        if size < larger
    ]


def extended(graph: Graph) -> list[int]:
    """The gradients that are extended because the weight's stored shape is padded, before that."""
    found: list[int] = []
    if not any([v.role and v.role.used for v in graph.function.inputs]):  # as most
        return found
    for j, slot in updates_of(graph):
        weight = graph.values[graph.ins[j][slot]]
        todo = [i for i in graph.ins[j] if weight.role and weight.role.used]
        while todo:
            i = todo.pop()
            if i in graph.inputs or graph.shapes[i] != shape_of(weight):
                continue
            maker = graph.uses[i][0][0]
            if graph.sigs[maker].spec is _EXTEND:
                found += graph.ins[maker]
            else:
                todo += graph.ins[maker]
    return found


class _StatePadder(Padder):
    """Pads the ops that update weights; others take slices of their results, and of the weights."""

    def __init__(self, function: Function, shares: Sequence[Share]) -> None:
        graph = graph_of(function)
        updates = {graph.ins[j][slot]: (j, slot) for j, slot in updates_of(graph)}
        sizes: Sizes = {}
        rows: list[list[FactorMapping]] = [[] for _ in function.ops]
        for weight, dim, size in shares:
            sizes[weight, dim] = size
            for j, mapping in _update(graph, weight, Shard(dim), updates.get(weight)).items():
                rows[j].append(mapping)
                values = (*graph.ins[j], *graph.outs[j])
                placements = zip(values, (*mapping.ins, *mapping.outs), strict=True)
                sizes.update([((i, p.dim), size) for i, p in placements if p.dim is not None])
        super().__init__(function, sizes, rows)
        self.padded = frozenset([graph.values[i] for i, _ in sizes])
        self.part: dict[Value, Value] = {}
        """Of values that are padded here, by those of the source, what other ops take."""

    def _op(self, j: int, op: Op, ops: dict[Op, Op]) -> None:
        if self.mappings[j]:
            super()._op(j, op, ops)
            return
        padded = {v: self._now(v) for v in op.inputs if v in self.padded}
        self.env.update([(v, self._used(v)) for v in padded])
        super()._op(j, op, ops)
        self.env.update(padded)
        for v in op.outputs:
            if v in self.padded:
                self._extend(v, op.of and ops.get(op.of, op.of))

    def _output(self, v: Value) -> Value:
        if v in self.function.updates or v not in self.padded:
            return super()._output(v)
        w = self._used(v)  # a gradient
        if v in self.function.sources:
            self.maker.sources[w] = self.function.sources[v]
        return w

    def _used(self, v: Value) -> Value:
        """The part of a padded value that ops take."""
        if v not in self.part:
            part = self._now(v)
            for dim in self._padded_dims(v):
                part = self.maker.add_op(_CUT, v.name, [part], {"dim": dim, "size": shape_of(v)[dim]})
            self.part[v] = part
        return self.part[v]

    def _extend(self, v: Value, of: Op | None) -> None:
        """Extend a value with zeros, for the ops that are padded."""
        self.part[v] = self._now(v)
        dims = self._padded_dims(v)
        for dim in dims:
            attributes = {"dim": dim, "size": self.type(v).shape[dim]}
            self.env[v] = self.maker.add_op(_EXTEND, v.name, [self._now(v)], attributes, of=of)
        self.tail.update([((self.env[v], dim), 0.0) for dim in dims])

    def _padded_dims(self, v: Value) -> list[int]:
        return [dim for dim, (n, m) in enumerate(zip(shape_of(v), self.type(v).shape, strict=True)) if n != m]

    def _role(self, v: Value, role: Role | None) -> Role:
        made = super()._role(v, role)
        return Role(made.kind, made.batch, made.source, shape_of(v))


def _update(graph: Graph, weight: int, split: Shard, update: tuple[int, int] | None) -> dict[int, FactorMapping]:
    """The ops that work on the padded weight, with their mappings for one device: its update, casts, and what the
    update's gradient goes through last, such as clipping."""
    found = defaultdict[int, FactorMapping | None](lambda: None)
    if update is not None:
        j, slot = update
        found[j] = mapping = graph.sigs[j].mapping(slot, split, 1)
        for k, p in splits(mapping.ins) if mapping is not None else ():
            if graph.ins[j][k] not in graph.inputs:
                scattered_gradient(graph, found, graph.ins[j][k], p, 1)
    for j, slot in graph.users[weight]:
        if found[j] is None and is_pointwise(graph, j, weight):
            found[j] = graph.sigs[j].mapping(slot, split, 1)
    return {j: mapping for j, mapping in found.items() if mapping is not None}
