"""Placement along an axis that splits dims of inputs: the batch over replicas, or dims that a user names.

Named dims give context parallelism (the length of a sequence), expert parallelism (the experts of weights), spatial
parallelism (height and width). The named inputs stay split so. All classes that begin at one of them are open to every
op, which takes the mapping of least cost; where two of them meet a value is converted: by `MPIAlltoall` where it is
split before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from distir.ir.spec import FactorMapping
from distir.ir.type import REPLICATE, Placement, Shard
from distir.transforms.sharding.classes import Classes, Node
from distir.transforms.sharding.graph import Graph
from distir.transforms.sharding.place import Placed, place_all, view
from distir.transforms.sharding.shares import shares

Taken = Sequence[tuple[Placed, int]]
"""The placements along other axes, with their sizes."""


class BatchSplit(NamedTuple):
    """The classes of the batch, and the number of pieces into which it is split."""

    classes: Classes
    pieces: int

    def overlaps(self, value: int, split: Shard, n: int) -> bool:
        """Whether splitting a value so over n devices is at odds with how the batch is split."""
        return any([split.overlaps(n, p, self.pieces) for p in self.classes.at[value]])


class Named(NamedTuple):
    """What is said of inputs along an axis: those that are split so, and those of which another axis splits such a dim:
    they are replicated unless this axis names them, too."""

    split: Collection[Node] = ()
    kept: Collection[int] = ()


NOTHING = Named()


def split_inputs(
    graph: Graph,
    classes: Classes,
    n: int,
    named: Named = NOTHING,
    taken: Taken = (),
    batch: BatchSplit | None = None,
) -> Placed:
    """The placements along an axis of n devices that splits the classes.

    Inputs are placed as `named` says. Other weights, and the state of their optimizer, are replicated, also those with
    a dim of a class. No op splits a sub-dimension that another axis in `taken` splits there, or the batch.
    """
    pinned = dict(named.split)
    follows = {classes.of(v, split) for v, split in named.split if graph.roles[v] == "parameter"}
    fixed: dict[int, Placement] = {
        i: REPLICATE
        for i in graph.weights
        if graph.roles[i] != "state" or not follows or follows.isdisjoint(classes.at[i].values())
    }
    fixed |= dict.fromkeys(named.kept, REPLICATE) | pinned
    parameters = {v: p for v, p in pinned.items() if graph.roles[v] in ("parameter", "constant")}
    mappings = classes.mappings
    if pinned or taken or batch is not None:
        rows = [[mapping for mapping, _ in row] for row in mappings]
        if pinned:
            rows = [_leaving(row, ins, parameters) for row, ins in zip(rows, graph.ins, strict=True)]
        if batch is not None:
            operands = zip(rows, graph.ins, graph.outs, strict=True)
            rows = [[m for m in row if not _splits_batch(m, ins, outs, n, batch)] for row, ins, outs in operands]
        for placed, m in taken:
            rows = [beside(row, n, mapping, m) for row, mapping in zip(rows, placed.mappings, strict=True)]
        mappings = [[(mapping, 0) for mapping in row] for row in rows]
    full = view(graph, mappings, shares(graph))
    groups = {group for row in mappings for _, group in row}
    placed = place_all(full, n, groups, fixed)
    data = {v: p for v, p in pinned.items() if v not in parameters}
    return placed._replace(inputs={**placed.inputs, **_given_with_halo(graph, placed, data)})


def _given_with_halo(graph: Graph, placed: Placed, data: Mapping[int, Shard]) -> dict[int, Shard]:
    """The data that are given with a halo, as one is cut from the whole for nothing: where their uses take the same."""
    found: dict[int, Shard] = {}
    for v, split in data.items():
        wants = [mapping.ins[k] for j, k in graph.users[v] if (mapping := placed.mappings[j]) is not None]
        halos = {p for p in wants if p.dim is not None and p.halo is not None and p.plain is split}
        if len(halos) == 1:
            found[v] = halos.pop()
    return found


def _leaving(row: list[FactorMapping], ins: Sequence[int], pinned: Mapping[int, Shard]) -> list[FactorMapping]:
    """The mappings that leave pinned operands as they are, if there are any."""
    at = [(k, pinned[i]) for k, i in enumerate(ins) if i in pinned]
    return [m for m in row if all([m.ins[k] is p for k, p in at])] or row if at else row


def _splits_batch(mapping: FactorMapping, ins: Sequence[int], outs: Sequence[int], n: int, batch: BatchSplit) -> bool:
    return any([batch.overlaps(ins[k] if k >= 0 else outs[~k], p, n) for k, p in mapping.splits()])


def beside(row: list[FactorMapping], n: int, other: FactorMapping | None, m: int) -> list[FactorMapping]:
    """The mappings over n devices that split no sub-dimension that the `other`, over m devices, splits; nor a dim of
    which one of them takes a halo."""
    if other is None or not row:
        return row
    there = dict(other.splits())
    return [
        mapping
        for mapping in row
        if not any([k in there and p.overlaps(n, there[k], m) for k, p in mapping.splits()])
        and not any([_reaches(a, b) or _reaches(b, a) for a, b in zip(mapping.ins, other.ins, strict=True)])
    ]


def _reaches(a: Placement, b: Placement) -> bool:
    """Whether one has a halo of the dim that the other splits."""
    return a.halo is not None and a.dim == b.dim
