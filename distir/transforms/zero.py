"""ZeRO: optimizer state, gradients and parameters split over the replicas of data parallelism.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. A stage is a choice of
placements along dp; the collectives follow from them (`shard`):

1. an optimizer op works on a part of its weight, so state lives in parts, a gradient is reduce-scattered once its sum
   over microbatches is complete, and the next weight is all-gathered;
2. a gradient is reduce-scattered in each microbatch, so that sums over microbatches live in parts, too (with one
   microbatch that is the same as 1);
3. a weight lives in parts and is all-gathered for each forward and each backward pass that uses it (`prefetch` says
   when).

What no dim of a weight divides by dp stays whole on every replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.spec import Strand
from distir.ir.type import REPLICATE, Shard
from distir.transforms.graph import Graph
from distir.transforms.place import Placed

STAGES = (0, 1, 2, 3)


def shard_state(graph: Graph, replicas: Placed, n: int, stage: int, others: Sequence[tuple[Placed, int]]) -> Placed:
    """The placements along dp, of n replicas, with what the ZeRO stage splits.

    `others` are the placements along other axes of devices, with their sizes: a dim that one of them splits is taken
    last, and split inside.
    """
    strands, inputs = list(replicas.strands), dict(replicas.inputs)
    scatter: dict[int, Shard] = {}
    for j, slot in _updates(graph):
        if strands[j] is not None:
            continue
        strand = _split(graph, j, slot, n, others)
        if strand is None:
            continue
        strands[j] = strand
        for k, (i, p) in enumerate(zip(graph.ins[j], strand.ins, strict=True)):
            if isinstance(p, Shard) and (graph.roles[i] == "state" or (k == slot and stage == 3)):
                inputs[i] = p
            elif isinstance(p, Shard) and i not in graph.inputs and stage >= 2:
                scatter[i] = p
    if stage == 3:
        for weight in [i for i in graph.inputs if graph.roles[i] == "parameter"]:
            if weight not in inputs and not _is_renewed(graph, weight):
                inputs.update(_split_weight(graph, weight, n, others))
            if weight in inputs:
                _split_casts(graph, strands, weight, inputs[weight], n)
    return replicas._replace(strands=strands, inputs=inputs, scatter=scatter)


def _updates(graph: Graph) -> list[tuple[int, int]]:
    """The ops that make the next value of a parameter that they take, and which operand that is."""
    found: list[tuple[int, int]] = []
    updates, index = graph.function.updates, graph.index
    for j, op in enumerate(graph.function.ops):
        renewed = {index[updates[v]] for v in op.outputs if v in updates}
        slot = next((k for k, i in enumerate(graph.ins[j]) if i in renewed and graph.roles[i] == "parameter"), None)
        if slot is not None:
            found.append((j, slot))
    return found


def _is_renewed(graph: Graph, weight: int) -> bool:
    return graph.function.inputs[weight] in graph.function.updates.values()


def _split(graph: Graph, j: int, slot: int, n: int, others: Sequence[tuple[Placed, int]]) -> Strand | None:
    """How an optimizer op is split along its weight."""
    for split in _splits(graph, graph.ins[j][slot], others):
        strand = graph.sigs[j].strand(slot, split, n)
        if strand is not None:
            return strand
    return None


def _split_weight(graph: Graph, weight: int, n: int, others: Sequence[tuple[Placed, int]]) -> dict[int, Shard]:
    """How a weight that is not updated is split."""
    shape = graph.shapes[weight]
    return next(({weight: p} for p in _splits(graph, weight, others) if shape[p.dim] % (p.outer * n) == 0), {})


def _splits(graph: Graph, weight: int, others: Sequence[tuple[Placed, int]]) -> list[Shard]:
    """The ways to split a weight: along the first dim that no other axis splits, ..., inside those that one does.

    Pieces of the first dim are contiguous, so that nothing need be copied to gather them.
    """
    inside = [1] * len(graph.shapes[weight])  # how often each dim is split already
    for placed, size in others:
        p = placed.inputs.get(weight)
        if p is not None:
            inside[p.dim] = max(inside[p.dim], p.outer * size)
    return [Shard(dim, inside[dim]) for dim in sorted(range(len(inside)), key=lambda d: inside[d] > 1)]


def _split_casts(graph: Graph, strands: list[Strand | None], weight: int, split: Shard, n: int) -> None:
    """What only changes a weight's dtype works on a part: it is the narrower that is then gathered."""
    for j, slot in graph.users[weight]:
        sig = graph.sigs[j]
        pointwise = not sig.spec.alias and sig.ins == sig.outs == [graph.shapes[weight]]
        if pointwise and strands[j] is None:
            strand = sig.strand(slot, split, n)
            if strand is not None and all(p is not REPLICATE for p in strand.outs):
                strands[j] = strand
