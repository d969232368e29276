"""From a sequential program to a placed one: the batch split over time and dp, weights over tp."""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.device import TIME, Mesh
from distir.ir.errors import InfeasibleError
from distir.ir.function import Function
from distir.ir.type import Shard
from distir.ops.rules import shape_of
from distir.transforms.classes import Classes
from distir.transforms.graph import Graph
from distir.transforms.microbatch import place_in_time
from distir.transforms.pad import pad, paddable
from distir.transforms.place import Placed, place_all, shares, view
from distir.transforms.roles import batch_size, weights
from distir.transforms.seeds import Split, tensor_parallel
from distir.transforms.shard import shard

DP, TP = "dp", "tp"
_TRIED = 6
"""Degrees tried for the hint of an error."""


def place(function: Function, batch: Mapping[int, int], dp: int, tp: int, mesh: Mesh) -> tuple[Function, Function]:
    """The function, padded, and the same on a mesh: the batch split over time and dp, weights over tp; not scheduled.

    `batch` maps numbers of inputs to their batch dim. The function must be decomposed.
    """
    microbatches = mesh.size(TIME)
    _check_batch(batch_size(function, batch), dp, microbatches)
    split: Placed | None = None
    if tp > 1:
        function, split = _tensor_parallel(function, tp, batch, microbatches * dp)
    graph = Graph(function)
    decisions: dict[str, Placed] = {TIME: place_in_time(graph, microbatches, batch)}
    if dp > 1:
        decisions[DP] = data_parallel(graph, dp, batch, microbatches)
    if split is not None:
        decisions[TP] = split
    return function, shard(graph, mesh, decisions)


def _check_batch(size: int, dp: int, microbatches: int) -> None:
    if size % (dp * microbatches):
        fits = [m for m in range(1, size // dp + 1) if size % (dp * m) == 0] if size % dp == 0 else []
        hint = f"with dp {dp} use {', '.join(map(str, fits))} microbatches" if fits else f"use a dp that divides {size}"
        raise InfeasibleError(
            f"a batch of {size} does not divide by dp {dp} x {microbatches} microbatches = {dp * microbatches}", hint
        )


def data_parallel(graph: Graph, n: int, batch: Mapping[int, int], outer: int) -> Placed:
    """The batch's class split over n devices, on the digit inside the microbatches."""
    classes = Classes(graph, n, [(v, Shard(dim, outer)) for v, dim in batch.items()])
    full = view(graph, [[(strand, 0) for strand, _ in row] for row in classes.strands])
    return place_all(full, n, {0}, shares(full))


def _tensor_parallel(function: Function, n: int, batch: Mapping[int, int], pieces: int) -> tuple[Function, Placed]:
    """The function, padded where that lets more be split, and its placements along tp.

    The batch, split into `pieces` over time and dp, is not split once more.
    """
    options = paddable(function, n)
    padded = pad(function, options)
    split = _search(padded, n, batch, pieces)
    inputs, nodes = len(function.inputs), split.nodes  # only inputs keep their numbers when padded
    useful = [one for one in options if any(v < inputs and (v, Shard(dim)) in nodes for v, dim in one)]
    if len(useful) < len(options):
        padded = pad(function, useful)
        split = _search(padded, n, batch, pieces)
    if not split.chosen:
        raise InfeasibleError(f"tp {n} splits nothing in {function.name}", _what_splits(function, batch, pieces))
    return padded, split.placed


def _what_splits(function: Function, batch: Mapping[int, int], pieces: int) -> str:
    """A hint: the first degrees that split something."""
    sizes = {d for v in weights(function) for d in shape_of(v)}
    degrees = [k for k in range(2, max(sizes, default=1) + 1) if any(d % k == 0 for d in sizes)]
    fits = [str(k) for k in degrees[:_TRIED] if _search(function, k, batch, pieces).chosen]
    return f"use --tp {' or '.join(fits)}" if fits else "use --tp 1: its weights cannot be split"


def _search(function: Function, n: int, batch: Mapping[int, int], pieces: int) -> Split:
    graph = Graph(function)
    taken: dict[int, list[tuple[Shard, int]]] = {}
    for v, split in Classes(graph, pieces, [(v, Shard(dim)) for v, dim in batch.items()]).nodes:
        taken.setdefault(v, []).append((split, pieces))
    return tensor_parallel(graph, n, [graph.index[v] for v in weights(function)], taken)
