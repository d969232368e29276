"""Data, tensor and pipeline parallelism composed: from a training step to the program every device runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distir.ir.device import TIME, Device, Mesh
from distir.ir.errors import InfeasibleError, UsageError
from distir.ir.function import Function, Value
from distir.ir.type import Shard
from distir.transforms.classes import Classes
from distir.transforms.decompose import decompose
from distir.transforms.graph import Graph, whole
from distir.transforms.microbatch import place_in_time
from distir.transforms.pipeline import pipeline
from distir.transforms.place import Placed, place_all, shares, view
from distir.transforms.roles import batch_dims, batch_size, weights
from distir.transforms.schedule import Generator, PipeDreamScheduler, Table, make_table
from distir.transforms.pad import pad, pad_like, paddable
from distir.transforms.seeds import Split, tensor_parallel
from distir.transforms.shard import shard
from distir.transforms.stages import OpCost, cut_stages, plain_cost

DP, TP, PP = "dp", "tp", "pp"


class Distributed(NamedTuple):
    """A distributed program, the placed program it was cut from, and the source it equals (decomposed and padded)."""

    program: Function
    placed: Function
    source: Function


def parallel_transform_3d(
    function: Function,
    dp: int,
    tp: int,
    pp: int,
    devices: Sequence[Device],
    num_microbatches: int,
    schedule: str | Generator | PipeDreamScheduler | Table = "1f1b",
    batch: Mapping[Value, int] | None = None,
    cost: OpCost = plain_cost,
    order: Sequence[str] | None = None,
) -> Function:
    """The program of `distribute`, by itself."""
    return distribute(function, dp, tp, pp, devices, num_microbatches, schedule, batch, cost, order).program


def distribute(
    function: Function,
    dp: int,
    tp: int,
    pp: int,
    devices: Sequence[Device],
    num_microbatches: int,
    schedule: str | Generator | PipeDreamScheduler | Table = "1f1b",
    batch: Mapping[Value, int] | None = None,
    cost: OpCost = plain_cost,
    order: Sequence[str] | None = None,
) -> Distributed:
    """The function spread over dp * tp * pp devices, its batch over dp and `num_microbatches`.

    `devices` are taken in `order`, fastest first: ("tp", "dp", "pp"), so that tensor-parallel groups stay inside a
    node. With one more device, the first is a host that holds the inputs, and the order is ("pp", "tp", "dp").
    `batch` maps data inputs to their batch dim where roles do not say it. `cost` weighs ops to balance stages.

    Raises InfeasibleError if the number of devices or the batch does not fit, if there are fewer cuttable pieces than
    stages, or if tensor parallelism splits nothing.
    """
    meshes, host = stage_meshes(dp, tp, pp, devices, num_microbatches, order)
    dims = batch_dims(function, batch)
    data = {i: dims[v] for i, v in enumerate(function.inputs) if v in dims}
    source, placed = place(decompose(function), data, dp, tp, meshes[0])
    table = make_table(schedule, pp, num_microbatches)
    cut, stage = cut_stages(placed, pp, num_microbatches, cost)
    return Distributed(pipeline(cut, stage, meshes, table, host), placed, source)


def source_of(distributed: Function, function: Function) -> Function:
    """What a distributed program is compared with: its source, decomposed and padded as it was."""
    return pad_like(decompose(function), distributed)


def stage_meshes(
    dp: int, tp: int, pp: int, devices: Sequence[Device], microbatches: int, order: Sequence[str] | None = None
) -> tuple[list[Mesh], Device | None]:
    """One mesh a stage, and the host if there is one. Raises InfeasibleError for a wrong number of devices."""
    if min(dp, tp, pp, microbatches) < 1:
        raise InfeasibleError(f"degrees are at least 1, got dp {dp}, tp {tp}, pp {pp}, microbatches {microbatches}")
    count = dp * tp * pp
    if len(devices) not in (count, count + 1):
        raise InfeasibleError(
            f"dp {dp} x tp {tp} x pp {pp} needs {count} devices (or one more, a host), got {len(devices)}"
        )
    host = devices[0] if len(devices) > count else None
    order = order or ((TP, DP, PP) if host is None else (PP, TP, DP))
    if sorted(order) != sorted((DP, TP, PP)):
        raise UsageError(f"an order names dp, tp and pp once each, got {', '.join(order)}")
    size = {DP: dp, TP: tp, PP: pp}
    stride = {axis: math.prod(size[a] for a in order[:i]) for i, axis in enumerate(order)}
    axes = {TIME: microbatches, **({DP: dp} if dp > 1 else {}), **({TP: tp} if tp > 1 else {})}
    first = 0 if host is None else 1

    def stage(s: int) -> list[Device]:
        start = first + s * stride[PP]
        return [devices[start + i * stride[DP] + j * stride[TP]] for i in range(dp) for j in range(tp)]

    return [Mesh(stage(s), axes, f"stage{s}") for s in range(pp)], host


def place(function: Function, batch: Mapping[int, int], dp: int, tp: int, mesh: Mesh) -> tuple[Function, Function]:
    """The function, padded, and the same on a mesh: the batch split over time and dp, weights over tp; not scheduled.

    `batch` maps numbers of inputs to their batch dim. The function must be decomposed.
    """
    microbatches = mesh.size(TIME)
    _check_batch(batch_size(function, batch), dp, microbatches)
    split: Placed | None = None
    if tp > 1:
        function, split = _tensor_parallel(function, tp)
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


def _tensor_parallel(function: Function, n: int) -> tuple[Function, Placed]:
    """The function, padded where that lets more be split, and its placements along tp."""
    options = paddable(function, n)
    padded = pad(function, options)
    split = _search(padded, n)
    inputs, nodes = len(function.inputs), split.nodes  # only inputs keep their numbers when padded
    useful = [one for one in options if any(v < inputs and (v, Shard(dim)) in nodes for v, dim in one)]
    if len(useful) < len(options):
        padded = pad(function, useful)
        split = _search(padded, n)
    if not split.chosen:
        sizes = {d for v in weights(function) for d in v.type.global_shape}  # type: ignore[union-attr]
        fits = [k for k in range(2, max(sizes, default=1) + 1) if any(d % k == 0 for d in sizes)][:8]
        raise InfeasibleError(f"tp {n} splits nothing in {function.name}", f"dims of its weights divide by {fits}")
    return padded, split.placed


def _search(function: Function, n: int) -> Split:
    graph = Graph(function)
    return tensor_parallel(graph, n, [graph.index[v] for v in weights(function)])


class Coverage(NamedTuple):
    """How much of a program an axis splits: shares of FLOPs and of parameters, and the weights it does not split."""

    flops: float
    parameters: float
    replicated: tuple[Value, ...]


def coverage(placed: Function, axis: str = TP) -> Coverage:
    """What is split along an axis of a placed program."""
    held = [v for v in placed.inputs if v.kind == "parameter"] or weights(placed)
    elements = {v: math.prod(whole(v.type)) for v in held}
    unsplit = [v for v in held if axis not in v.type.mesh.axes or not isinstance(v.type.on(axis), Shard)]  # type: ignore[union-attr]
    total = flops = 0.0
    for op in placed.ops:
        if op.spec.comm is not None:
            continue
        work = op.spec.flops(op.attributes, [whole(v.type) for v in op.inputs], [whole(v.type) for v in op.outputs])
        total += work
        if any(isinstance(v.type.on(axis), Shard) for v in (*op.inputs, *op.outputs)):  # type: ignore[union-attr]
            flops += work
    share = 1 - sum(elements[v] for v in unsplit) / max(1, sum(elements.values()))
    return Coverage(flops / total if total else 0.0, share, tuple(unsplit))
