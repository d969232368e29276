"""Costs of a program's ops as shares of its own totals, so that no split depends on the hardware or the batch.

What has a batch factor is counted for one sample: FLOPs over all FLOPs, elements made over all that are made. What has
none (the gradient of a weight, its update) is counted in elements of weights: to make one costs what it costs to hold
one. So the shares of a program are the same for every batch, and those of a large batch, where activations decide.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from distir.ir.type import Shard
from distir.transforms.roles import weights
from distir.transforms.sharding.classes import Node, classes_from
from distir.transforms.sharding.graph import Graph, closure, distinct_rows


class Shares(NamedTuple):
    """Of each op's FLOPs, of making each value, and of storing each input (0 if it is no weight).

    `kinds` numbers the ops: those of one kind are alike in signature and in all shares.
    """

    flops: list[float]
    made: list[float]
    stored: list[float]
    kinds: list[int]


def shares(graph: Graph, batch: tuple[Node, ...] = ()) -> Shares:
    """The shares of a program whose data have the batch dims `batch`, cached with the graph.

    Without batch dims all of it counts as one sample.
    """
    found = graph.cache.get((Shares, batch))
    if found is None:
        found = graph.cache[Shares, batch] = _shares(graph, batch)
    return found


def _shares(graph: Graph, batch: tuple[Node, ...]) -> Shares:
    import numpy as np

    size = samples(graph, batch)
    shapes, of_value = graph.numbered_shapes
    varies = np.array(_varying(graph, batch, size) if batch else [True] * len(graph.values), bool)
    stored = sum([graph.elements[v] for v in graph.weights]) or 1
    # values of one shape are alike, those that vary and those that do not
    alike = of_value * 2 + varies
    made = [n // size if varying else n for n in map(math.prod, shapes) for varying in (False, True)]
    times = np.bincount(alike[len(graph.inputs) :], minlength=len(made)).tolist()
    total = sum([n * k for n, k in zip(made[1::2], times[1::2], strict=True)]) or 1
    share = [n / (total if k % 2 else stored) for k, n in enumerate(made)]
    kinds = np.array([sig.number for sig in graph.sigs], np.int64)
    flops = [sig.flops for sig in graph.sigs]
    first = 0
    for sig, rows in zip(graph.kinds, graph.rows, strict=True) if batch else ():
        varied = varies[rows.values]
        patterns, kind = distinct_rows(varied)
        kinds[rows.ops] = first + kind
        first += len(patterns)
        for j in rows.ops[varied.any(axis=1)].tolist() if sig.flops else ():
            flops[j] /= size
    work = sum(flops) or 1
    holds = [0.0] * len(graph.values)
    for v in graph.weights:
        holds[v] = graph.elements[v] / stored
    return Shares([n / work for n in flops], [share[k] for k in alike.tolist()], holds, kinds.tolist())


def samples(graph: Graph, batch: tuple[Node, ...]) -> int:
    """How many samples the data have of which `batch` are the batch dims; 1 without any."""
    return next((graph.shapes[v][split.dim] for v, split in batch), 1)


def _varying(graph: Graph, batch: tuple[Node, ...], size: int) -> list[bool]:
    """Which values have the batch as a factor of their elements."""
    varies = classes_from(graph, size, batch).varying
    if size > 1:
        return varies
    # reshapes lose a batch of 1: then a value varies if it has another dim of the data that is no dim of a weight
    sizes: dict[int, list[Node]] = {}
    for v, _ in batch:
        for dim, n in enumerate(graph.shapes[v]):
            sizes.setdefault(n, []).append((v, Shard(dim)))
    for n, starts in sizes.items() if max(sizes) > 1 else ():
        at = classes_from(graph, n, tuple(starts)).at
        weight_classes = {c for v in weights(graph.function) for c in at[graph.index[v]].values()}
        varies = [
            varying or not weight_classes.issuperset(row.values()) for varying, row in zip(varies, at, strict=True)
        ]
    # a dim of size 1 is ambiguous: what does not depend on the data has no batch factor
    depends = {v for j in closure(graph, [v for v, _ in batch], forward=True) for v in graph.outs[j]}
    depends.update(v for v, _ in batch)
    return [varying and v in depends for v, varying in enumerate(varies)]
