"""From a sequential program to a placed one: the batch split over time and dp, weights over tp."""

from __future__ import annotations

from collections.abc import Mapping

from distir.ir.device import TIME, Mesh
from distir.ir.errors import InfeasibleError
from distir.ir.function import Function
from distir.ir.kept import kept
from distir.ir.type import Shard
from distir.ops.rules import shape_of
from distir.transforms.classes import Classes, Node, classes_from
from distir.transforms.graph import Graph, graph_of
from distir.transforms.microbatch import place_in_time
from distir.transforms.pad import pad, paddable
from distir.transforms.place import Placed, place_all, view
from distir.transforms.roles import batch_size, weights
from distir.transforms.seeds import Split, tensor_parallel
from distir.transforms.shard import shard
from distir.transforms.shares import shares
from distir.transforms.zero import shard_state

DP, TP = "dp", "tp"
_TRIED = 6
"""Degrees tried for the hint of an error."""
_RECENT = 1 << 16
"""How many ops of placed functions are kept with their source: plans that differ in their schedule share them."""
Batch = tuple[tuple[int, int], ...]
"""(number of an input, its batch dim)"""


def place(
    function: Function, batch: Mapping[int, int], dp: int, tp: int, mesh: Mesh, zero: int = 0
) -> tuple[Function, Function]:
    """The function, padded, and the same on a mesh: the batch split over time and dp, weights over tp; not scheduled.

    `zero` is the stage of `shard_state`: what of weights, state and gradients is split over dp, too. `batch` maps
    numbers of inputs to their batch dim. The function must be decomposed.
    """
    microbatches = mesh.size(TIME)
    _check_batch(batch_size(function, batch), dp, microbatches)
    key = dp, tp, mesh, tuple(batch.items()), zero
    recent: dict[object, tuple[Function, Function]] = function.found.setdefault(place, {})
    if key not in recent:
        recent[key] = _place(function, dp, tp, mesh, microbatches, tuple(batch.items()), zero)
        while len(recent) > 1 and sum(len(placed.ops) for _, placed in recent.values()) > _RECENT:
            del recent[next(iter(recent))]
    return recent[key]


def _place(
    function: Function, dp: int, tp: int, mesh: Mesh, microbatches: int, batch: Batch, zero: int
) -> tuple[Function, Function]:
    split: Placed | None = None
    if tp > 1:
        function, split = _tensor_parallel(function, tp, batch, microbatches * dp)
    graph = graph_of(function)
    decisions: dict[str, Placed] = {TIME: place_in_time(graph, microbatches, dict(batch))}
    if dp > 1:
        replicas = data_parallel(function, dp, batch, microbatches)
        if zero:
            replicas = shard_state(graph, replicas, dp, zero, [(split, tp)] if split is not None else [])
        # each microbatch's gradients are scattered before they are added up, or all microbatches' together
        decisions = {DP: replicas, **decisions} if zero > 1 else {**decisions, DP: replicas}
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


def data_parallel(function: Function, n: int, batch: Batch, outer: int) -> Placed:
    """The batch's class split over n devices, on the digit inside the microbatches.

    Nothing but the digit differs between numbers of microbatches, if every op says the same of both digits: then what
    was decided for one microbatch is taken over.
    """
    graph = graph_of(function)
    starts = tuple([(v, Shard(dim)) for v, dim in batch])
    there = classes_from(graph, n, starts).inside(outer, n)
    if there is None:
        return _batch_split(graph, Classes(graph, n, [(v, Shard(dim, outer)) for v, dim in batch]), n)
    one = _data_parallel(function, n, starts)
    strands = [None if s is None else there[id(s)] for s in one.strands]
    inputs = {v: Shard(s.dim, s.outer * outer) for v, s in one.inputs.items()}
    return one._replace(strands=strands, inputs=inputs)


@kept
def _data_parallel(function: Function, n: int, starts: tuple[Node, ...]) -> Placed:
    graph = graph_of(function)
    return _batch_split(graph, classes_from(graph, n, starts), n)


def _batch_split(graph: Graph, classes: Classes, n: int) -> Placed:
    full = view(graph, [[(strand, 0) for strand, _ in row] for row in classes.strands], shares(graph))
    # replicas hold weights whole, also those that have the batch as a dim
    return place_all(full, n, {0}, [graph.index[v] for v in weights(graph.function)])


def _tensor_parallel(function: Function, n: int, batch: Batch, pieces: int) -> tuple[Function, Placed]:
    """The function, padded where that lets more be split, and its placements along tp.

    The batch, split into `pieces` over time and dp, is not split once more.
    """
    options = _paddable(function, n)
    which = tuple(range(len(options)))
    split = _search(_padded(function, n, which), n, batch, pieces)
    inputs = len(function.inputs)  # only inputs keep their numbers when padded
    useful = tuple([k for k in which if any(v < inputs and split.splits(v, Shard(d)) for v, d in options[k])])
    if useful != which:
        split = _search(_padded(function, n, useful), n, batch, pieces)
    if not split.chosen:
        raise InfeasibleError(f"tp {n} splits nothing in {function.name}", _what_splits(function, batch, pieces))
    return _padded(function, n, useful), split.placed


_paddable = kept(paddable)


@kept
def _padded(function: Function, n: int, which: tuple[int, ...]) -> Function:
    """The function with these of the `paddable` classes padded."""
    options = _paddable(function, n)
    return pad(function, [options[k] for k in which])


def _what_splits(function: Function, batch: Batch, pieces: int) -> str:
    """A hint: the first degrees that split something."""
    sizes = {d for v in weights(function) for d in shape_of(v)}
    degrees = [k for k in range(2, max(sizes, default=1) + 1) if any(d % k == 0 for d in sizes)]
    fits = [str(k) for k in degrees[:_TRIED] if _search(function, k, batch, pieces).chosen]
    return f"use --tp {' or '.join(fits)}" if fits else "use --tp 1: its weights cannot be split"


@kept
def _search(function: Function, n: int, batch: Batch, pieces: int) -> Split:
    graph = graph_of(function)
    starts = tuple([(v, Shard(dim)) for v, dim in batch])
    return tensor_parallel(graph, n, [graph.index[v] for v in weights(function)], starts, pieces)
