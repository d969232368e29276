"""Strategies: what an axis of a mesh is for, and so how every op is placed along it.

A new kind of parallelism is a row of `STRATEGIES`, and an axis of the plan that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

from distir.ir.cached import cached
from distir.ir.errors import InfeasibleError
from distir.ir.function import Function
from distir.ir.type import Shard
from distir.ops.rules import shape_of
from distir.transforms.plan import BATCH, INPUTS, WEIGHTS, Axis, Sharding
from distir.transforms.roles import weights
from distir.transforms.sharding.classes import Classes, Node, classes_from
from distir.transforms.sharding.graph import graph_of
from distir.transforms.sharding.input_split import NOTHING, BatchSplit, Named, Taken, split_inputs
from distir.transforms.sharding.microbatch import place_in_time
from distir.transforms.sharding.pad import pad, paddable
from distir.transforms.sharding.pad_state import extended
from distir.transforms.sharding.place import Placed
from distir.transforms.sharding.seeds import Split, tensor_parallel
from distir.transforms.sharding.sequence import shard_sequence
from distir.transforms.sharding.zero import shard_state

IN_TIME = "time"
"""The strategy of the axis of microbatches, which is none of devices."""
_TRIED = 6
"""Degrees tried for the hint of an error."""
_MOST_TRIED = 1 << 12
"""The largest size of an axis that such a hint looks at: a dim may be of any size."""
Batch = tuple[tuple[int, int], ...]
"""(number of an input, its batch dim)"""


class Problem(NamedTuple):
    """Input of a strategy: a function, its data's batch dims, the plan's settings, and placements along other axes."""

    function: Function
    batch: Batch
    sharding: Sharding
    decided: Mapping[str, Placed]
    """The placements along axes decided earlier, by axis."""
    dims: Mapping[str, Batch]
    """By axis the dims of inputs that it splits, as (number of the input, dim)."""

    @property
    def starts(self) -> tuple[tuple[int, tuple[Node, ...]], ...]:
        """For each axis that splits dims of inputs its size, and these dims: inside microbatches and replicas, and
        inside what an axis before it splits."""
        inside = dict.fromkeys(self.batch, self.sharding.pieces)
        found: list[tuple[int, tuple[Node, ...]]] = []
        for axis in self.sharding.along(INPUTS):
            pairs = self.dims[axis.name]
            found.append((axis.size, tuple([(v, Shard(dim, inside.get((v, dim), 1))) for v, dim in pairs])))
            inside |= {pair: inside.get(pair, 1) * axis.size for pair in pairs}
        return tuple(found)

    @property
    def data(self) -> tuple[Node, ...]:
        """The dims of the data other than the batch, each inside what axes split of it."""
        graph = graph_of(self.function)
        ways: dict[tuple[int, int], int] = {}
        for axis in self.sharding.along(INPUTS):
            ways |= {pair: ways.get(pair, 1) * axis.size for pair in self.dims[axis.name]}
        dims = [(v, dim) for v in graph.inputs if graph.roles[v] == "data" for dim in range(len(graph.shapes[v]))]
        return tuple([(v, Shard(dim, ways.get((v, dim), 1))) for v, dim in dims if (v, dim) not in self.batch])

    def taken(self, *strategies: str) -> list[tuple[Placed, int]]:
        """The placements along axes of these strategies, or of all, that are decided, with their sizes."""
        axes = [a for a in self.sharding.axes if a.name in self.decided]
        return [(self.decided[a.name], a.size) for a in axes if a.strategy in strategies or not strategies]


def _unpadded(problem: Problem, axis: Axis) -> Function:
    return problem.function


class Strategy(NamedTuple):
    """How every op is placed along an axis, and the function padded before, so that more of it can be split."""

    place: Callable[[Problem, Axis], Placed]
    pad: Callable[[Problem, Axis], Function] = _unpadded


def _place_microbatches(problem: Problem, axis: Axis) -> Placed:
    graph = graph_of(problem.function)
    # ZeRO 2 and 3 scatter, and so extend, the gradient of each microbatch; else that of all is extended
    complete = extended(graph) if problem.sharding.zero == 1 else ()
    return place_in_time(graph, axis.size, dict(problem.batch), complete)


def _place_replicas(problem: Problem, axis: Axis) -> Placed:
    """The batch split over replicas, inside earlier axes of replicas; with ZeRO state, gradients and weights, too."""
    sharding = problem.sharding
    outside = [a.size for a in sharding.along(BATCH) if a.name in problem.decided]
    outer = sharding.microbatches * math.prod(outside)
    replicas = data_parallel(problem.function, axis.size, problem.batch, outer, problem.taken(INPUTS))
    if not sharding.zero:
        return replicas
    return shard_state(graph_of(problem.function), replicas, axis.size, sharding.zero, problem.taken())


def _place_inputs(problem: Problem, axis: Axis) -> Placed:
    """Named dims of inputs split, and what is computed from them where that costs least.

    Raises InfeasibleError where a dim does not divide.
    """
    graph, sharding = graph_of(problem.function), problem.sharding
    k = [a.name for a in sharding.along(INPUTS)].index(axis.name)
    n, starts = problem.starts[k]
    for v, split in starts:
        size = graph.shapes[v][split.dim]
        if size % (split.outer * n):
            ways = f"{split.outer} x {n}" if split.outer > 1 else f"{n}"
            fits = [str(d) for d in range(2, min(size, _MOST_TRIED) + 1) if size % (split.outer * d) == 0]
            raise InfeasibleError(
                f"{axis.name} {n}: dim {split.dim} of %{graph.values[v].name}, {size}, does not divide by {ways}",
                f"use {axis.name}={' or '.join(fits[:_TRIED])}" if fits else f"leave {axis.name} out",
            )
    nodes = tuple([(v, Shard(dim)) for v, dim in problem.batch])
    batch = BatchSplit(classes_from(graph, sharding.pieces, nodes), sharding.pieces)
    if clash := [(v, split) for v, split in starts if batch.overlaps(v, split, n)]:
        v, split = clash[0]
        raise InfeasibleError(
            f"{axis.name} cannot split dim {split.dim} of %{graph.values[v].name}: it is split with the batch",
            f"leave it out, or split the batch of the data along {axis.name}, too",
        )
    classes = classes_from(graph, n, starts, max([split.outer for _, split in starts], default=1))
    others = [pair for a in sharding.along(INPUTS) if a is not axis for pair in problem.dims[a.name]]
    kept = [v for v, dim in others if any([split.dim == dim for split in classes.at[v]])]
    return split_inputs(graph, classes, n, Named(starts, kept), problem.taken(INPUTS), batch)


def state_along_inputs(problem: Problem) -> dict[str, Placed]:
    """The placements along axes of inputs, with what ZeRO splits along them, too: inside what replicas have of it.

    An axis that splits the batch alone is left as it is: along it are replicas of the groups that ZeRO splits (hybrid
    sharding).
    """
    graph, sharding, decided = graph_of(problem.function), problem.sharding, dict(problem.decided)
    found: dict[str, Placed] = {}
    inside = [decided[a.name] for a in sharding.along(BATCH)]
    for axis in [a for a in sharding.along(INPUTS) if not set(problem.dims[a.name]) <= set(problem.batch)]:
        others = [(decided[a.name], a.size) for a in sharding.axes if a is not axis]
        placed = shard_state(graph, decided[axis.name], axis.size, sharding.zero, others, inside)
        decided[axis.name] = found[axis.name] = placed
        inside.append(placed)
    return found


def _place_weights(problem: Problem, axis: Axis) -> Placed:
    """Weights split where that costs least; with sequence parallelism what lies between their products, too.

    Raises InfeasibleError where that has no sequence that divides.
    """
    function, batch, sharding = problem.function, problem.batch, problem.sharding
    split = _search(function, axis.size, batch, sharding.pieces, problem.starts)
    if not sharding.sequence:
        return split.placed
    graph, n = graph_of(function), axis.size
    starts, data = tuple([(v, Shard(dim)) for v, dim in batch]), problem.data
    fits = tuple([(v, p) for v, p in data if graph.shapes[v][p.dim] % (p.outer * n) == 0])
    placed = shard_sequence(graph, split, n, starts, sharding.pieces, problem.starts, fits)
    if placed is None:
        parts = sorted({p.outer for _, p in data} - {1})
        further = [f", or {n * k} where it is in {k} parts already" for k in parts]
        raise InfeasibleError(
            f"sequence parallelism over {axis.name} {n} splits nothing in {function.name}",
            f"it needs a dim of the data, other than the batch, that {n} divides{''.join(further)}; else do without it",
        )
    return placed


def data_parallel(function: Function, n: int, batch: Batch, outer: int, taken: Taken = ()) -> Placed:
    """The batch's class split over n devices, inside the split into microbatches, beside what axes in `taken` split.

    If every op has the same mappings inside microbatches as for the whole batch, the placements found for one
    microbatch are reused with another `outer`.
    """
    graph = graph_of(function)
    starts = tuple([(v, Shard(dim)) for v, dim in batch])
    there = None if taken else classes_from(graph, n, starts).inside(outer, n)
    if there is None:
        classes = Classes(graph, n, [(v, Shard(dim, outer)) for v, dim in batch], outer)
        return split_inputs(graph, classes, n, NOTHING, taken)
    one = _data_parallel(function, n, starts)
    mappings = [None if s is None else there[id(s)] for s in one.mappings]
    inputs = {v: Shard(s.dim, s.outer * outer) for v, s in one.inputs.items()}
    return one._replace(mappings=mappings, inputs=inputs)


@cached
def _data_parallel(function: Function, n: int, starts: tuple[Node, ...]) -> Placed:
    graph = graph_of(function)
    return split_inputs(graph, classes_from(graph, n, starts), n)


def _pad_weights(problem: Problem, axis: Axis) -> Function:
    """The function, padded where that lets more of the weights be split.

    The batch, split over time and replicas, is not split once more. Raises InfeasibleError if nothing can be split.
    """
    function, batch, starts = problem.function, problem.batch, problem.starts
    n, pieces, multiple = axis.size, problem.sharding.pieces, problem.sharding.pad_multiple
    options = _paddable(function, n, multiple)
    which = tuple(range(len(options)))
    split = _search(_padded(function, n, multiple, which), n, batch, pieces, starts)
    inputs = len(function.inputs)  # only inputs keep their numbers when padded
    useful = tuple([k for k in which if any(v < inputs and split.splits(v, Shard(d)) for v, d in options[k])])
    if useful != which:
        split = _search(_padded(function, n, multiple, useful), n, batch, pieces, starts)
    if not split.chosen:
        raise InfeasibleError(f"{axis.name} {n} splits nothing in {function.name}", _what_splits(problem, axis.name))
    return _padded(function, n, multiple, useful)


def pad_to_multiple(problem: Problem) -> Function:
    """The function, its dims of weights padded to the plan's multiple, but those of the batch, or of named splits.

    Where an axis splits weights, what it splits is padded (`_pad_weights`): ops are decomposed then, so that hardly any
    dim would stay as it is.
    """
    function, sharding, n = problem.function, problem.sharding, problem.sharding.pad_multiple
    if n == 1 or sharding.along(WEIGHTS):
        return function
    kept = {*problem.batch, *[pair for pairs in problem.dims.values() for pair in pairs]}
    which = [k for k, sizes in enumerate(_paddable(function, n, 1)) if kept.isdisjoint(sizes)]
    return _padded(function, n, 1, tuple(which))


_paddable = cached(paddable)


@cached
def _padded(function: Function, n: int, multiple: int, which: tuple[int, ...]) -> Function:
    """The function with these of the `paddable` classes padded."""
    options = _paddable(function, n, multiple)
    return pad(function, [options[k] for k in which])


def _what_splits(problem: Problem, axis: str) -> str:
    """A hint: the first degrees that split something."""
    function, batch, pieces, starts = problem.function, problem.batch, problem.sharding.pieces, problem.starts
    sizes = {d for v in weights(function) for d in shape_of(v)}
    degrees = (k for k in range(2, max(sizes, default=1) + 1) if any([d % k == 0 for d in sizes]))
    fits = [str(k) for k in islice(degrees, _TRIED) if _search(function, k, batch, pieces, starts).chosen]
    return f"use --{axis} {' or '.join(fits)}" if fits else f"use --{axis} 1: its weights cannot be split"


@cached
def _search(
    function: Function, n: int, batch: Batch, pieces: int, taken: tuple[tuple[int, tuple[Node, ...]], ...]
) -> Split:
    graph = graph_of(function)
    starts = tuple([(v, Shard(dim)) for v, dim in batch])
    return tensor_parallel(graph, n, graph.weights, starts, pieces, taken=taken)


STRATEGIES: dict[str, Strategy] = {
    INPUTS: Strategy(_place_inputs),
    WEIGHTS: Strategy(_place_weights, _pad_weights),
    IN_TIME: Strategy(_place_microbatches),
    BATCH: Strategy(_place_replicas),
}
"""By name, in the order in which axes are decided: first those whose dims are given; data parallelism splits what the
axes of weights leave whole."""
