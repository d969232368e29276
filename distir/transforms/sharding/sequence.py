"""Sequence parallelism: between the products that tensor parallelism splits, activations are sharded by sequence.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2. The sequence
is a dim of the data other than the batch. An op that tensor parallelism leaves whole on each device of its axis takes
the factor mapping of the sequence where that costs less. A partial sum is then reduce-scattered where it was
all-reduced, and all-gathered for the next product: the same bytes sent, and each device stores its part of the values
between. Where another axis splits the sequence (context parallelism), each of its parts is split further.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

from distir.ir.spec import FactorMapping
from distir.ir.type import REPLICATE, SUM, Placement
from distir.transforms.sharding.classes import Classes, Node, classes_from
from distir.transforms.sharding.graph import Graph, closure
from distir.transforms.sharding.place import Placed, View, place_all, place_values, view
from distir.transforms.sharding.quotient import quotient
from distir.transforms.sharding.seeds import Split
from distir.transforms.sharding.shares import samples, shares

_SPLIT = 0
"""The group of the mappings that tensor parallelism has chosen."""
_WORTHWHILE = 0.02
"""The share of the total cost below which a region is left unsplit: its collectives would cost more."""
_Row = Sequence[tuple[FactorMapping | None, int]]


def shard_sequence(
    graph: Graph,
    split: Split,
    n: int,
    batch: tuple[Node, ...],
    pieces: int,
    taken: Sequence[tuple[int, tuple[Node, ...]]],
    data: tuple[Node, ...],
) -> Placed | None:
    """The placements of a tensor-parallel split over n devices, with the sequence split over them where that costs
    less.

    `batch`, `pieces` and `taken` are those of `tensor_parallel`. `data` are the dims of the data, each inside what
    further axes split of it. Returns None if nothing costs less.
    """
    outside = max([at.outer for _, at in data], default=1)
    classes = split.classes if outside == 1 else classes_from(graph, n, data, outside)
    sequences = _sequences(graph, classes, n, data, [(pieces, batch), (samples(graph, batch), batch), *taken])
    question = shard_sequence, split.classes, split.chosen, n, batch, classes, tuple(sequences)
    if question not in graph.cache:  # it is asked again for other numbers of replicas and of microbatches
        graph.cache[question] = _shard(graph, split, n, batch, classes, sequences)
    return graph.cache[question]


def _shard(
    graph: Graph, split: Split, n: int, batch: tuple[Node, ...], classes: Classes, sequences: Sequence[int]
) -> Placed | None:
    placed = split.placed
    groups = {c: k for k, c in enumerate(sequences, _SPLIT + 1)}
    learned = closure(graph, graph.weights, forward=True)
    known: dict[tuple[int, int, bool], _Row] = {}  # by ids: ops of one kind have their rows in common
    rows: list[_Row] = []
    for j, (mapping, row) in enumerate(zip(placed.mappings, classes.mappings, strict=True)):
        key = id(mapping), id(row), j in learned  # tables and masks would be gathered for each use
        if key not in known:
            known[key] = _row(mapping, row, groups if key[2] else {})
        rows.append(known[key])
    full = view(graph, rows, shares(graph, batch))
    small = quotient(graph, full)
    whole = {v: REPLICATE for v in graph.inputs if v not in placed.inputs}
    of_one = {small.values[v]: p for v, p in whole.items()}
    chosen, best = frozenset({_SPLIT}), placed.price
    for group in groups.values():
        price = place_all(small.view, n, chosen | {group}, of_one).price
        if price < best:
            chosen, best = chosen | {group}, price
    if len(chosen) == 1:
        return None
    near = small.lifted(place_all(small.view, n, chosen, of_one))
    found, made_as = place_values(full, n, chosen, whole, near)
    taken = [j for j, mapping in enumerate(found.mappings) if mapping is not placed.mappings[j]]
    scattering = {j for j in taken if _scatters(full, found.mappings[j], made_as, j)}
    worth = _worthwhile(full, taken, scattering)
    if not worth or len(worth) == len(taken):
        return found if worth else None
    left = set(taken).difference(worth)
    for j in left:
        rows[j] = []
    inputs = {v: p for v, p in found.inputs.items() if left.isdisjoint([j for j, _ in full.users[v]])}
    return place_all(full, n, chosen, whole, found._replace(inputs=inputs))


def _row(mapping: FactorMapping | None, row: _Row, groups: Mapping[int, int]) -> _Row:
    """The mappings that an op may take: the one of tensor parallelism, else those of the sequence's classes, or none.
    `groups`: of these classes."""
    if mapping is not None:
        return [(mapping, _SPLIT)]
    through = [c for _, c in row]
    free = [(s, groups[c]) for s, c in row if c in groups and through.count(c) == 1]
    return [(None, _SPLIT), *free] if free else []


def _worthwhile(v: View, ops: Collection[int], scattering: Set[int]) -> list[int]:
    """Those of the split ops that stand in regions worth it: an op there scatters what would be all-reduced.

    A region is connected by values. Its cost is what each device of the axis would compute and store redundantly; one
    of little cost, such as what follows the logits of a language model, is not worth collectives of its own.
    """
    regions = _regions(v, ops)
    cost = [sum([v.flops[j] + sum([v.made[i] for i in v.outs[j]]) for j in region]) for region in regions]
    least = _WORTHWHILE * sum(cost)
    return [
        j
        for region, c in zip(regions, cost, strict=True)
        if c >= least and not scattering.isdisjoint(region)
        for j in region
    ]


def _scatters(v: View, mapping: FactorMapping | None, made_as: Sequence[Placement | None], j: int) -> bool:
    """Whether an op takes a part of a sum."""
    wants = zip(v.ins[j], mapping.ins, strict=True) if mapping is not None else ()
    return any([made_as[i] is SUM and want.dim is not None for i, want in wants])


def _regions(v: View, ops: Collection[int]) -> list[list[int]]:
    """The ops in sets that are connected by values."""
    maker = {i: j for j in ops for i in v.outs[j]}
    left = set(ops)
    regions: list[list[int]] = []
    for start in ops:
        todo = [start] if start in left else []
        if todo:
            regions.append([])
        while todo:
            j = todo.pop()
            if j in left:
                left.remove(j)
                regions[-1].append(j)
                todo += [maker[i] for i in v.ins[j] if i in maker]
                todo += [user for i in v.outs[j] for user, _ in v.users[i]]
    return regions


def _sequences(
    graph: Graph, classes: Classes, n: int, data: Sequence[Node], others: Sequence[tuple[int, tuple[Node, ...]]]
) -> list[int]:
    """The classes of dims of the data that are neither split by others nor features, in the order of the data."""
    taken = features(graph, classes)
    for m, starts in others:
        taken |= classes.clashing(n, classes_from(graph, m, starts), m)
    dims = [classes.of(v, split) for v, split in data]
    return list(dict.fromkeys([c for c in dims if c is not None and c not in taken]))


def features(graph: Graph, classes: Classes) -> set[int]:
    """The classes of the dims of weights in products and lookups; what is added to activations may have others."""
    weight_values = set(graph.weights)
    found: set[int] = set()
    for sig, ins, outs in zip(graph.sigs, graph.ins, graph.outs, strict=True):
        if ins and weight_values.issuperset(ins):
            weight_values.update(outs)  # a weight transposed, or cast
        slot = sig.spec.weight
        if slot is not None and slot < len(ins) and ins[slot] in weight_values:
            found.update(classes.at[ins[slot]].values())
    return found
