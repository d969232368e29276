"""Data, tensor and pipeline parallelism composed: from a training step to the program every device runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from distir.ir.device import Device
from distir.ir.function import Function, Value
from distir.ir.pause import no_collection
from distir.transforms.passes import BodyPasses, PassContext, run_passes, scheduled
from distir.transforms.pipeline.schedule import Schedule
from distir.transforms.pipeline.stages import PLAIN, StageCost
from distir.transforms.plan import Plan
from distir.transforms.rewriting.decompose import decompose, stays
from distir.transforms.rewriting.fuse import fuse
from distir.transforms.rewriting.part_constants import part_constants
from distir.transforms.roles import batch_dims
from distir.transforms.sharding.pad import pad_like
from distir.transforms.sharding.pad_state import pad_state, stored


class Distributed(NamedTuple):
    """A distributed program, the placed program it was cut from, and the prepared source that it must equal."""

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
    **more: Any,
) -> Function:
    """The function spread over dp * tp * pp devices, its batch over dp and `num_microbatches`.

    The function is sequential: a forward pass, or a training step. The program's inputs and outputs are the function's,
    in order; a device holds its part of them.

    `devices` are dp * tp * pp, none twice, taken in the plan's order, fastest first: ("tp", "dp", "pp"), so that
    tensor-parallel groups stay inside a node. With one more device, the first is a host that holds the inputs, whole,
    and the order is ("pp", "tp", "dp"). `schedule` and `more` are fields of `Plan`.

    Raises InfeasibleError if the number of devices or the batch does not fit, if there are fewer cuttable pieces than
    stages, if tensor parallelism splits nothing, or for a schedule of another size or that would deadlock; UsageError
    for what is no field's value.
    """
    if len(devices) == dp * tp * pp + 1:
        more = {"order": ("pp", "tp", "dp")} | more
    plan = Plan(dp, tp, pp, num_microbatches, schedule, **more)
    return distribute(function, plan, devices).program


@no_collection()
def distribute(
    function: Function,
    plan: Plan,
    devices: Sequence[Device],
    batch: Mapping[Value, int] | None = None,
    cost: StageCost = PLAIN,
    splits: Mapping[str, Sequence[tuple[int, int]]] = MappingProxyType({}),
    cuts: Sequence[int] = (),
) -> Distributed:
    """The function spread over devices as the plan says, and what the program is compared with.

    `batch` maps data inputs to their batch dim where roles do not say it. `cost` is what stages are balanced by.
    `splits`: for each further axis of the plan the dims that it splits, as (position of an input, dim). `cuts`: the
    positions of the inputs at whose first use the plan's stages begin, one for each name of its `cut`.
    Raises as `parallel_transform_3d`.
    """
    dims = batch_dims(function, batch)
    numbers = {i: dims[v] for i, v in enumerate(function.inputs) if v in dims}
    settings = PassContext(plan, devices, cost, numbers, splits, tuple(cuts))
    source = run_passes(function, ("fuse", "decompose", "pad"), settings)
    placed = run_passes(source, ("place", "join", "narrow", "group", "recompute"), settings)
    return Distributed(scheduled(placed, settings, BodyPasses.of(plan)), placed, source)


def source_of(distributed: Function, function: Function) -> Function:
    """The reference for a distributed program: its source, fused; if it was padded, decomposed and padded as that."""
    fused = fuse(function)
    pairs = list(zip(fused.inputs, distributed.inputs, strict=False))
    if all([v.type.erased() is w.type.erased() for v, w in pairs]):
        return fused
    split = all([stays(op, split=True) for f in (distributed, *distributed.callees()) for op in f.ops])
    parts = pad_like(part_constants(decompose(fused, split)), distributed)
    return pad_state(parts, stored(parts, distributed))
