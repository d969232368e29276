"""ZeRO: optimizer state, gradients and parameters split over the replicas of data parallelism.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. A stage is a choice of
placements along dp; the collectives follow from them (`shard`):

1. an optimizer op works on a shard of its weight, so its state is sharded, a gradient is reduce-scattered once its sum
   over microbatches is complete, and the next weight is all-gathered;
2. a gradient is reduce-scattered in each microbatch, so that sums over microbatches are sharded, too (with one
   microbatch that is the same as 1);
3. a weight is sharded and is all-gathered for each forward and each backward pass that uses it (`prefetch` says
   when).

Along further axes of devices that leave weights whole, as those of context parallelism do, each share is split once
more (`strategies.state_along_inputs`). A weight of which no dim divides by dp stays replicated. In mixed precision,
where a weight is used only in a narrower type, it is sharded at every stage, cast, and gathered as that: at 1 and 2
once a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from distir.ir.placement import REPLICATE, Placement, Shard, splits
from distir.ir.spec import FactorMapping
from distir.ops.rules import tensor
from distir.transforms.sharding.graph import Graph
from distir.transforms.sharding.input_split import beside
from distir.transforms.sharding.place import Placed

STAGES = (0, 1, 2, 3)


def shard_state(
    graph: Graph,
    replicas: Placed,
    n: int,
    stage: int,
    others: Sequence[tuple[Placed, int]],
    inside: Sequence[Placed] = (),
) -> Placed:
    """The placements along dp, of n replicas, with what the ZeRO stage splits; or along another axis that leaves
    weights whole.

    `others` are the placements along other axes of devices, with their sizes: a dim that one of them splits is used
    last, and split inside that. Only what all axes in `inside` split is split, and their dims first: collectives along
    both are joined.
    """
    mappings, inputs, reduce = list(replicas.mappings), dict(replicas.inputs), set(replicas.reduce)
    scatter: dict[int, Shard] = {}
    for j, slot in updates_of(graph):
        if mappings[j] is not None or any([placed.mappings[j] is None for placed in inside]):
            continue  # what replicas do not scatter is reduced along all axes at once
        mapping = _split(graph, j, slot, n, others, inside)
        if mapping is None:
            continue
        mappings[j] = mapping
        for k, p in splits(mapping.ins):
            i = graph.ins[j][k]
            if graph.roles[i] == "state" or (k == slot and (stage == 3 or _is_narrowed(graph, i, j))):
                inputs[i] = p
            elif i not in graph.inputs:
                made, part = scattered_gradient(graph, mappings, i, p, n)
                reduce -= _passing(graph, mappings, made)
                if stage >= 2:
                    scatter[made] = part
    for weight in frozen_weights(graph) if stage == 3 else ():
        if weight not in inputs:
            inputs.update(_split_weight(graph, weight, n, others, inside))
    for weight in [i for i in graph.inputs if graph.roles[i] == "parameter"]:
        if weight in inputs:
            _split_casts(graph, mappings, weight, inputs[weight], n, others)
    return replicas._replace(mappings=mappings, inputs=inputs, reduce=reduce, scatter=scatter)


def updates_of(graph: Graph) -> list[tuple[int, int]]:
    """The ops that compute the next value of one of their operands, a parameter, with the number of that operand."""
    found: list[tuple[int, int]] = []
    updates, index = graph.function.updates, graph.index
    for j, op in enumerate(graph.function.ops):
        renewed = {index[updates[v]] for v in op.outputs if v in updates}
        slot = next((k for k, i in enumerate(graph.ins[j]) if i in renewed and graph.roles[i] == "parameter"), None)
        if slot is not None:
            found.append((j, slot))
    return found


def scattered_gradient(
    graph: Graph,
    mappings: list[FactorMapping | None] | defaultdict[int, FactorMapping | None],
    value: int,
    split: Shard,
    n: int,
) -> tuple[int, Shard]:
    """The value to reduce-scatter for an optimizer that takes its gradient split so, and how it is split.

    That is the gradient itself, unless it is computed pointwise from a value that other ops use too, as the global norm
    does: then that value is scattered, and those ops work on the shard.
    """
    path: list[tuple[int, FactorMapping, int, Shard]] = []
    i, p = value, split
    while i not in graph.inputs:
        j, slot = graph.uses[i][0]
        others = [s for s in graph.sigs[j].ins if s != graph.shapes[i]]
        free = mappings[j] is None and all([math.prod(s) == 1 for s in others])  # no product, whose operands are data
        mapping = graph.sigs[j].mapping(slot, p, n) if free else None
        if mapping is None:
            break
        parts = [(graph.ins[j][k], q) for k, q in splits(mapping.ins)]
        if len(parts) != 1 or parts[0][0] in graph.inputs:
            break
        i, p = parts[0]
        path.append((j, mapping, i, p))
    while path and len(graph.users[path[-1][2]]) == 1:
        path.pop()
    for j, mapping, i, p in path:
        mappings[j] = mapping
        for user, slot in graph.users[i]:
            if mappings[user] is None:
                mappings[user] = graph.sigs[user].mapping(slot, p, n)
    return path[-1][2:] if path else (value, split)


def _passing(graph: Graph, mappings: Sequence[FactorMapping | None], value: int) -> set[int]:
    """The values whose Partial may pass to `value`: itself, and what unsplit ops compute it from and no others use."""
    found: set[int] = set()
    todo = [value]
    while todo:
        i = todo.pop()
        if i not in found and i not in graph.inputs:
            found.add(i)
            j = graph.uses[i][0][0]
            todo += [x for x in graph.ins[j] if len(graph.users[x]) == 1] if mappings[j] is None else []
    return found


def frozen_weights(graph: Graph) -> list[int]:
    """The weights that are not updated."""
    renewed = {graph.index[v] for v in graph.function.updates.values()}
    return [i for i in graph.inputs if graph.roles[i] == "parameter" and i not in renewed]


def _split(
    graph: Graph, j: int, slot: int, n: int, others: Sequence[tuple[Placed, int]], inside: Sequence[Placed]
) -> FactorMapping | None:
    """The mapping of an optimizer op split along its weight, inside what other axes split of its operands."""
    first = [m.ins[slot] for placed in inside if (m := placed.mappings[j]) is not None]
    for split in _splits(split_outside(graph, j, slot, others), first):
        mapping = graph.sigs[j].mapping(slot, split, n)
        if mapping is not None:
            return mapping
    return None


def split_outside(graph: Graph, j: int, slot: int, others: Sequence[tuple[Placed, int]]) -> list[int]:
    """How often other axes split each dim of the weight of an optimizer op, or of what goes with it."""
    shape = graph.shapes[graph.ins[j][slot]]
    alike = [i for i in graph.ins[j] if graph.shapes[i] == shape]
    for i in alike:  # what a gradient is made of pointwise, as where it is clipped, is split with it
        alike += [x for x in _operands(graph, i) if graph.shapes[x] == shape and x not in alike]
    taken: list[tuple[Placement, int]] = []
    for placed, size in others:
        if (mapping := placed.mappings[j]) is not None:
            taken.append((mapping.ins[slot], size))
        taken += [(p, size) for i in alike for p in _placements(graph, placed, i)]
    return _split_already(len(shape), taken)


def _split_already(rank: int, taken: Sequence[tuple[Placement, int]]) -> list[int]:
    """How often each dim of values of `rank` dims is split. `taken`: placements, with the sizes of their axes."""
    inside = [1] * rank
    for p, size in taken:
        if p.dim is not None:
            inside[p.dim] = max(inside[p.dim], p.outer * size)
    return inside


def _split_weight(
    graph: Graph, weight: int, n: int, others: Sequence[tuple[Placed, int]], inside: Sequence[Placed]
) -> dict[int, Shard]:
    """How a weight that is not updated is split."""
    first = [placed.inputs.get(weight, REPLICATE) for placed in inside]
    candidates = _splits(weight_split_outside(graph, weight, others), first)
    return next(({weight: p} for p in candidates if graph.shapes[weight][p.dim] % (p.outer * n) == 0), {})


def weight_split_outside(graph: Graph, weight: int, others: Sequence[tuple[Placed, int]]) -> list[int]:
    """How often other axes split each dim of a weight that is not updated."""
    return _split_already(
        len(graph.shapes[weight]), [(placed.inputs.get(weight, REPLICATE), size) for placed, size in others]
    )


def _splits(inside: Sequence[int], first: Sequence[Placement]) -> list[Shard]:
    """The candidate splits of values whose dims are split so often already: of the dims of `first`, then of dims that
    no other axis splits, then inside those that one does.

    Slices of the first dim are contiguous, so gathering them needs no copy.
    """
    dims = {p.dim for p in first}
    ordered = sorted(range(len(inside)), key=lambda d: (d not in dims, inside[d] > 1))
    return [Shard(dim, inside[dim]) for dim in ordered]


def _placements(graph: Graph, placed: Placed, value: int) -> list[Placement]:
    """How a value is placed where it is made, or held as an input; a gradient that several ops take, also by these."""
    if value in graph.inputs:
        return [placed.inputs.get(value, REPLICATE)]
    uses = graph.uses[value] if len(graph.users[value]) > 1 else graph.uses[value][:1]
    rows = [(placed.mappings[j], slot) for j, slot in uses]
    return [m.ins[slot] if slot >= 0 else m.outs[~slot] for m, slot in rows if m is not None]


def _operands(graph: Graph, value: int) -> list[int]:
    """The operands of the op that makes a value, if several ops take one of them."""
    ins = [] if value in graph.inputs else graph.ins[graph.uses[value][0][0]]
    return ins if any([len(graph.users[x]) > 1 for x in ins]) else []


def _is_narrowed(graph: Graph, weight: int, update: int) -> bool:
    """Whether all uses of a weight but its update take it in a narrower dtype."""
    size, ops = tensor(graph.values[weight]).dtype.size, graph.function.ops
    uses = [j for j, _ in graph.users[weight] if j != update]
    return all([is_pointwise(graph, j, weight) and tensor(ops[j].outputs[0]).dtype.size < size for j in uses])


def is_pointwise(graph: Graph, op: int, value: int) -> bool:
    """Whether an op computes its one result point by point from that value alone."""
    sig = graph.sigs[op]
    return not sig.spec.alias and sig.ins == sig.outs == [graph.shapes[value]]


def _split_casts(
    graph: Graph,
    mappings: list[FactorMapping | None],
    weight: int,
    split: Shard,
    n: int,
    others: Sequence[tuple[Placed, int]],
) -> None:
    """Casts of a weight work on the shard, so that the narrower dtype is gathered; not where another axis splits them
    otherwise."""
    for j, slot in graph.users[weight]:
        if is_pointwise(graph, j, weight) and mappings[j] is None:
            mapping = graph.sigs[j].mapping(slot, split, n)
            if mapping is None or any([p is REPLICATE for p in mapping.outs]):
                continue
            if all([beside([mapping], n, placed.mappings[j], m) for placed, m in others]):
                mappings[j] = mapping
