"""Splitting the batch over time: which ops work on a microbatch, and which on the whole batch.

Along the time axis nothing can be paid for but a sum: a value summed over microbatches is whole only after the last of
them. An op that needs such a sum comes after (the update); if another op then wants the result while microbatches
still run (the count of a mean loss), the sum and all it depends on are computed before, on the whole batch (the
prologue).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from distir.ir.spec import Strand
from distir.ir.type import REPLICATE, SUM, Partial, Placement, Shard
from distir.transforms.classes import Classes, classes_from
from distir.transforms.graph import Graph, Signature, closure
from distir.transforms.place import Placed
from distir.transforms.roles import weights


def place_in_time(graph: Graph, microbatches: int, batch: Mapping[int, int]) -> Placed:
    """Place every op along the time axis; `batch` maps each data input to its batch dim.

    A single microbatch is not cut out of the batch where the forward pass would have to be computed before: it is then
    the whole batch to every op.
    """
    classes = classes_from(graph, microbatches, tuple([(v, Shard(dim)) for v, dim in batch.items()]))
    key = "in time", classes
    if key not in graph.found:
        graph.found[key] = _place(graph, classes)
    placed, before = graph.found[key]
    if microbatches == 1 and not before.isdisjoint(closure(graph, _weights(graph), forward=True)):
        return placed._replace(strands=[None] * len(placed.strands))
    return placed


def _weights(graph: Graph) -> list[int]:
    return [graph.index[v] for v in weights(graph.function)]


def _place(graph: Graph, classes: Classes) -> tuple[Placed, set[int]]:
    """The placements, and the ops that are computed before."""
    options = [[strand for strand, _ in row] for row in classes.strands]
    before: set[int] = set()
    while True:
        strands, conflict = _sweep(graph, graph.order, options, before)
        if conflict is None:
            return Placed(0.0, strands, set(), {}), before
        before |= closure(graph, conflict, forward=False)


def _sweep(
    graph: Graph, order: Sequence[int], options: Sequence[Sequence[Strand]], before: Collection[int]
) -> tuple[list[Strand | None], list[int] | None]:
    """Each op's strand, the ops `before` unsplit; or the values that are whole too late for an op that needs them."""
    state: list[Placement] = [REPLICATE] * len(graph.values)
    after: set[int] = set()  # values that are whole only once all microbatches are done
    strands: list[Strand | None] = [None] * len(graph.sigs)
    # ops alike in signature and options do alike; what is done is found once for each way operands are placed
    known: dict[tuple[int | Placement, ...], tuple[Strand | None, Sequence[Placement], bool]] = {}
    for j in order:
        sig, ins, outs = graph.sigs[j], graph.ins[j], graph.outs[j]
        have = tuple([state[v] for v in ins])
        late = not after.isdisjoint(ins)
        if late and any(p is not REPLICATE for p in have):
            return strands, [v for v in ins if v in after]
        free = () if late or j in before else options[j]
        key = (sig.number, *map(id, free), *have)
        found = known.get(key)
        if found is None:
            found = known[key] = _work(sig, have, free)
        strand, placements, whole = found
        if late or not whole:
            sums = [v for v in ins if v in after or state[v] is SUM]
            if j not in before and _splits_but_for(sums, ins, have, options[j]):
                return strands, sums
            after.update(outs)
        strands[j] = strand
        for v, p in zip(outs, placements, strict=True):
            state[v] = p
    return strands, None


def _work(
    sig: Signature, have: Sequence[Placement], options: Sequence[Strand]
) -> tuple[Strand | None, Sequence[Placement], bool]:
    """An op's strand, its results' placements, and whether it takes its operands as they are, not made whole first."""
    strand = _possible(options, have)
    if strand is not None:
        return strand, strand.outs, True
    if _passes(sig.linear, have):
        return None, [SUM] * len(sig.outs), True
    return None, [REPLICATE] * len(sig.outs), all(p is REPLICATE for p in have)


def _splits_but_for(
    sums: Sequence[int], ins: Sequence[int], have: Sequence[Placement], options: Sequence[Strand]
) -> bool:
    """True if the op could work on microbatches, were the sums whole: others are there already or free to cut."""
    return any(
        any(isinstance(p, Shard) for p in s.ins)
        and all(
            want is REPLICATE if v in sums else h is want or (h is REPLICATE and isinstance(want, Shard))
            for v, h, want in zip(ins, have, s.ins, strict=True)
        )
        for s in options
    )


def _possible(options: Sequence[Strand], have: Sequence[Placement]) -> Strand | None:
    """A strand whose operands are there already, or whole and so free to cut; those that reduce nothing first."""
    fits = [
        s
        for s in options
        if all(h is want or (h is REPLICATE and isinstance(want, Shard)) for h, want in zip(have, s.ins, strict=True))
    ]
    return min(fits, key=lambda s: sum(isinstance(p, Partial) for p in s.outs), default=None)


def _passes(linear: Sequence[Collection[int]], have: Sequence[Placement]) -> bool:
    partial = {k for k, p in enumerate(have) if p is SUM}
    return bool(partial) and partial in [set(s) for s in linear] and all(p in (SUM, REPLICATE) for p in have)
