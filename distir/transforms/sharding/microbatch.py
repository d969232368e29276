"""Splitting the batch over time: which ops work on a microbatch, and which on the whole batch.

Along the time axis the only collective is a sum: a value summed over microbatches is complete only after the last of
them. An op that needs such a sum runs after all microbatches (the update); if its result is needed within the
microbatches (the count of a mean loss), the sum and all it depends on are computed before them, on the whole batch (the
prologue).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from distir.ir.placement import REPLICATE, SUM, Placement, Shard, reductions, splits
from distir.ir.spec import FactorMapping
from distir.transforms.roles import weights
from distir.transforms.sharding.classes import Classes, classes_from
from distir.transforms.sharding.graph import Graph, Signature, closure
from distir.transforms.sharding.place import Placed


def place_in_time(graph: Graph, microbatches: int, batch: Mapping[int, int], complete: Sequence[int] = ()) -> Placed:
    """Place every op along the time axis; `batch` maps each data input to its batch dim. What takes one of the values
    that are to be `complete` waits for it, if it is a sum over microbatches.

    With a single microbatch, if the forward pass would be in the prologue, nothing is split: every op works on the
    whole batch.
    """
    classes = classes_from(graph, microbatches, tuple([(v, Shard(dim)) for v, dim in batch.items()]))
    key = "in time", classes, tuple(complete)
    if key not in graph.cache:
        graph.cache[key] = _place(graph, classes, complete)
    placed, before = graph.cache[key]
    if microbatches == 1 and not before.isdisjoint(closure(graph, _parameters(graph), forward=True)):
        return placed._replace(mappings=[None] * len(placed.mappings))
    return placed


def _parameters(graph: Graph) -> list[int]:
    """What the forward pass works with; not counters and other state, of which a prologue may compute numbers."""
    return [graph.index[v] for v in weights(graph.function) if v.kind != "state"]


class _Known(NamedTuple):
    """How ops of one signature and of the same options are treated, by the placements of their operands."""

    options: Sequence[FactorMapping]
    found: dict[tuple[Placement, ...], tuple[FactorMapping | None, Sequence[Placement], bool]]


def _place(graph: Graph, classes: Classes, complete: Sequence[int]) -> tuple[Placed, set[int]]:
    """The placements, and the ops of the prologue."""
    kinds: dict[tuple[int, int], _Known] = {}
    known: list[_Known] = []
    for sig, row in zip(graph.sigs, classes.mappings, strict=True):
        kind = sig.number, id(row)
        if kind not in kinds:
            kinds[kind] = _Known([mapping for mapping, _ in row], {})
        known.append(kinds[kind])
    unsplit = [_Known((), {}) for _ in graph.kinds]
    before: set[int] = set()
    totals = set(complete)
    while True:
        count = len(totals)
        mappings, conflict = _sweep(graph, known, unsplit, before, totals)
        if len(totals) > count:
            continue
        if conflict is None:
            return Placed(0.0, mappings, set(), {}), before
        before |= closure(graph, conflict, forward=False)


def _sweep(
    graph: Graph, known: Sequence[_Known], unsplit: Sequence[_Known], before: Collection[int], totals: set[int]
) -> tuple[list[FactorMapping | None], list[int] | None]:
    """Each op's mapping, with the ops `before` unsplit; or the values that are complete too late for an op that needs
    them. `known` is by op, `unsplit` by signature.

    `totals` are sums over microbatches that some op takes whole. What takes one, or what is made of it, beside what
    comes late waits for it; so does what passes it on, if that, too, is taken whole (then no other sum need be kept):
    such sums are added, for a sweep that goes by them. This one then only looks for more of them: its result is void.
    """
    state: list[Placement] = [REPLICATE] * len(graph.values)
    after: set[int] = set()  # values that are complete only after all microbatches
    sources: dict[int, list[int]] = {}  # result of a linear op on partial sums -> those sums
    mappings: list[FactorMapping | None] = [None] * len(graph.sigs)
    waiting: dict[tuple[int, int], FactorMapping] = {}  # of ops that wait, by their numbers of operands and results
    taken_whole: set[int] = set()
    count = len(totals)
    placement, sigs, all_ins, all_outs = state.__getitem__, graph.sigs, graph.ins, graph.outs
    for j in graph.order:
        ins, outs = all_ins[j], all_outs[j]
        have = tuple(map(placement, ins))
        late = not after.isdisjoint(ins)
        if SUM in have:
            if late:
                sums = [v for v, p in zip(ins, have, strict=True) if p is SUM]
                totals.update(_taken_whole(sums, sources, taken_whole))
            if all([p is REPLICATE or v in totals for p, v in zip(have, ins, strict=True)]):
                form = len(ins), len(outs)
                if form not in waiting:
                    waiting[form] = FactorMapping(*[(REPLICATE,) * count for count in form])
                mappings[j] = waiting[form]
                after.update(outs)
                continue
        options, found = unsplit[sigs[j].number] if j in before else known[j]
        if late:
            sums = [v for v in ins if v in after]
            wrong = any([p is not REPLICATE for p in have]) or (options and _splits_but_for(sums, ins, have, options))
            if wrong and len(totals) == count:
                return mappings, sums
            after.update(outs)
            continue
        work = found.get(have)
        if work is None:
            work = found[have] = _work(sigs[j], have, options)
        mapping, placements, whole = work
        if not whole:
            sums = [v for v in ins if state[v] is SUM]
            if options and _splits_but_for(sums, ins, have, options):
                return mappings, sums
            after.update(outs)
            while sums:
                v = sums.pop()
                if v not in taken_whole:
                    taken_whole.add(v)
                    sums += sources.get(v, ())
        elif mapping is None and SUM in have:
            passed_on = [v for v in ins if state[v] is SUM]
            sources.update(dict.fromkeys(outs, passed_on))
        mappings[j] = mapping
        if len(outs) == 1:  # as most
            state[outs[0]] = placements[0]
        else:
            for v, p in zip(outs, placements, strict=True):
                state[v] = p
    return mappings, None


def _taken_whole(sums: Sequence[int], sources: Mapping[int, Sequence[int]], taken: Collection[int]) -> set[int]:
    """Of these sums those that some op takes whole; in place of another, those from which it is made."""
    found: set[int] = set()
    todo = list(sums)
    while todo:
        v = todo.pop()
        if v in taken:
            found.add(v)
        else:
            todo += sources.get(v, ())
    return found


def _work(
    sig: Signature, have: Sequence[Placement], options: Sequence[FactorMapping]
) -> tuple[FactorMapping | None, Sequence[Placement], bool]:
    """An op's mapping, its results' placements, and whether it takes its operands without completing sums first."""
    mapping = _possible(options, have)
    if mapping is not None:
        return mapping, mapping.outs, True
    if _passes(sig.linear, have):
        return None, [SUM] * len(sig.outs), True
    return None, [REPLICATE] * len(sig.outs), all(p is REPLICATE for p in have)


def _splits_but_for(
    sums: Sequence[int], ins: Sequence[int], have: Sequence[Placement], options: Sequence[FactorMapping]
) -> bool:
    """True if the op could work on microbatches, were the sums complete: other operands fit or are free to slice."""
    return any(
        splits(s.ins)
        and all(want is REPLICATE if v in sums else h.covers(want) for v, h, want in zip(ins, have, s.ins, strict=True))
        for s in options
    )


def _possible(options: Sequence[FactorMapping], have: Sequence[Placement]) -> FactorMapping | None:
    """A mapping that fits the operands, or slices replicated ones, which is free; with the fewest reductions."""
    fits = [s for s in options if all(h.covers(want) for h, want in zip(have, s.ins, strict=True))]
    return min(fits, key=lambda s: len(reductions(s.outs)), default=None)


def _passes(linear: Sequence[Collection[int]], have: Sequence[Placement]) -> bool:
    partial = {k for k, p in enumerate(have) if p is SUM}
    return bool(partial) and partial in [set(s) for s in linear] and all(p in (SUM, REPLICATE) for p in have)
