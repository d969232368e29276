"""Data, tensor and pipeline parallelism composed: from a training step to the program every device runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distir.ir.device import TIME, Device, Mesh
from distir.ir.errors import InfeasibleError, UsageError
from distir.ir.function import Function, Value
from distir.ir.kept import kept
from distir.ir.pause import no_collection
from distir.transforms.bodies import Cut, cut_bodies
from distir.transforms.decompose import decompose
from distir.transforms.fuse import fuse
from distir.transforms.pad import pad_like
from distir.transforms.phases import BACKWARD, FORWARD
from distir.transforms.pipeline import pipeline
from distir.transforms.roles import batch_dims
from distir.transforms.schedule import DISTIR_2021, Schedule, make_table
from distir.transforms.spread import DP, TP, place
from distir.transforms.stages import PLAIN, StageCost, cut_stages

PP = "pp"
BUCKET_MB = 25.0
"""The size of gradient buckets, in MiB: torch's DistributedDataParallel has the same default."""
MIB = 1 << 20


class Distributed(NamedTuple):
    """A distributed program, the placed program it was cut from, and the source, made ready, that it equals."""

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
    schedule: Schedule = "1f1b",
    batch: Mapping[Value, int] | None = None,
    cost: StageCost = PLAIN,
    order: Sequence[str] | None = None,
    chunks: int = 1,
    overlap: bool = True,
    bucket_mb: float = BUCKET_MB,
    zero: int = 0,
) -> Function:
    """The function spread over dp * tp * pp devices, its batch over dp and `num_microbatches`.

    The function is sequential: a forward pass, or a training step. The program's inputs and outputs are the function's,
    in order; a device holds its part of them.

    `devices` are dp * tp * pp, none twice, taken in `order`, fastest first: ("tp", "dp", "pp"), so that tensor-parallel
    groups stay inside a node. With one more device, the first is a host that holds the inputs, whole, and the order is
    ("pp", "tp", "dp").
    `schedule` is a name ("1f1b", "gpipe", "interleaved", "distir2021"), a `PipeDreamScheduler`, a table or the path of
    its file (`distir.transforms.schedule`): what each pipeline rank runs, in order.
    `chunks` is the number of stages a pipeline rank has (for the schedule "interleaved"): stage s is on rank s % pp.
    `batch` maps data inputs to their batch dim where roles do not say it. `cost` is what stages are balanced by.
    Gradients are reduced over dp during the last microbatch's backward pass; without `overlap` when all is done, which
    serves devices that do one thing at a time: a stage's reductions would hold up what it sends to the one before.
    The schedule "distir2021" has no overlap. `bucket_mb` is how many MiB of gradients are reduced at once (see
    `distir.transforms.bucket`): 0 for one all-reduce a parameter, infinity for one in all; without overlap there are
    no buckets. `zero` is the stage of ZeRO: optimizer state (1), gradients (2) and parameters (3) are split over dp,
    too (see `distir.transforms.zero`).

    Raises InfeasibleError if the number of devices or the batch does not fit, if there are fewer cuttable pieces than
    stages, if tensor parallelism splits nothing, or for a schedule of another size or that would deadlock; UsageError
    for an unknown schedule or an order that is not of these three.
    """
    return distribute(
        function, dp, tp, pp, devices, num_microbatches, schedule, batch, cost, order, chunks, overlap, bucket_mb, zero
    ).program


@no_collection()
def distribute(
    function: Function,
    dp: int,
    tp: int,
    pp: int,
    devices: Sequence[Device],
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    batch: Mapping[Value, int] | None = None,
    cost: StageCost = PLAIN,
    order: Sequence[str] | None = None,
    chunks: int = 1,
    overlap: bool = True,
    bucket_mb: float = BUCKET_MB,
    zero: int = 0,
) -> Distributed:
    """As `parallel_transform_3d`, which says what the arguments are; with the program, what it is compared with."""
    meshes, host = stage_meshes(dp, tp, pp, devices, num_microbatches, order)
    dims = batch_dims(function, batch)
    data = {i: dims[v] for i, v in enumerate(function.inputs) if v in dims}
    source, placed = place(decompose(fuse(function), tp > 1), data, dp, tp, meshes[0], zero)
    table = make_table(schedule, pp, num_microbatches, chunks)
    overlap, turn = (False, FORWARD) if schedule == DISTIR_2021 else (overlap, BACKWARD)
    cut = _cut(placed, pp * chunks, num_microbatches, cost, overlap, turn)
    return Distributed(pipeline(cut, meshes * chunks, table, host, bucket_mb * MIB), placed, source)


@kept
def _cut(placed: Function, parts: int, microbatches: int, cost: StageCost, overlap: bool, turn: str) -> Cut:
    return cut_bodies(*cut_stages(placed, parts, microbatches, cost, turn), overlap, turn)


class Prepared(NamedTuple):
    """A source on the way to what a distributed program is compared with: as given, and after each rewrite of it."""

    source: Function
    fused: Function
    parts: Function
    padded: Function


def prepared(distributed: Function, function: Function) -> Prepared:
    """A distributed program's source, fused, decomposed and padded as it was."""
    whole = any(op.spec.decompose is not None for f in (distributed, *distributed.callees()) for op in f.ops)
    fused = fuse(function)
    parts = decompose(fused, not whole)
    return Prepared(function, fused, parts, pad_like(parts, distributed))


def source_of(distributed: Function, function: Function) -> Function:
    """What a distributed program is compared with: its source, fused, decomposed and padded as it was."""
    return prepared(distributed, function).padded


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
    if len(set(devices)) < len(devices):
        again = next(d for d, n in Counter(devices).items() if n > 1)
        raise InfeasibleError(f"a plan needs {len(devices)} different devices, got {again} more than once")
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
