"""What a plan for another tool is made of: the plan in effect, what it is applied to, and steps to the nearest plan.

Axes of a plan's `split` are known by three names: `cp` splits dim 1 of data (context parallelism), `ep` dim 0 of data
and of experts' weights (expert parallelism), `replicate` dim 0 of data: replicas of groups that ZeRO splits (HSDP,
hybrid sharding). The other tools count `ep` and `replicate` as data parallelism.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from distir.api.model import Precision
from distir.ir.errors import InfeasibleError, counted
from distir.transforms.pipeline.layers import even_layers
from distir.transforms.pipeline.schedule import SCHEDULES
from distir.transforms.plan import EVEN, InputSplit, Plan, default_of

CONTEXT, EXPERTS, REPLICATE = "cp", "ep", "replicate"
"""Names of further axes that have a meaning in the other tools."""
SPLIT_DIMS = {CONTEXT: "*.1", EXPERTS: "*.0,*.experts.*.0", REPLICATE: "*.0"}
"""The dims of inputs along each, where a file of another tool is read."""
ONE_F_ONE_B, INTERLEAVED, GPIPE = "1f1b", "interleaved", "gpipe"


class TrainingSettings(NamedTuple):
    """What else the other tools' options say: `batch`, samples a step on all devices; `seq`, tokens a sample; the
    precision; `dtype`, the type of the whole program if not the model's; `layers`, the model's number of blocks. None:
    not known."""

    batch: int | None = None
    seq: int | None = None
    precision: Precision = Precision()
    dtype: str | None = None
    layers: int | None = None


class Request(NamedTuple):
    """A plan that is to be written, and what it is applied to."""

    plan: Plan
    settings: TrainingSettings

    def changed(self, **changes: Any) -> Request:
        """With other values of the plan's fields. For another number of stages it no longer says where each begins."""
        plan = replace(self.plan, **changes)
        if plan.stage_count != self.plan.stage_count and plan.cut != (EVEN,):
            plan = replace(plan, cut=())
        return self._replace(plan=plan)


class Fault(NamedTuple):
    """What distir cannot do of a file of another tool: the field that it would be in, what, and what is near."""

    field: str
    message: str
    hint: str


class ReadConfig(NamedTuple):
    """What a file of another tool says: `fields` of a plan, and the settings.

    `faults`: what distir cannot do. `notes`: what is done only nearly so. `ignored`: the options that do not concern
    the plan. `devices`: how many the plan takes.
    """

    fields: dict[str, Any]
    settings: TrainingSettings
    faults: Sequence[Fault]
    notes: Sequence[str]
    ignored: Sequence[str]
    devices: int


Step = Callable[[Request], "tuple[str, Request] | None"]
"""What a tool cannot express of a request, and the nearest request in this respect; None if it can."""


def nearest_request(request: Request, steps: Sequence[Step]) -> tuple[Request, list[str]]:
    """The nearest request that passes all steps, and what was in the way."""
    reasons: list[str] = []
    request = request._replace(plan=in_effect(request.plan))
    for step in steps:
        if (found := step(request)) is not None:
            reasons.append(found[0])
            request = found[1]._replace(plan=in_effect(found[1].plan))
    return request, reasons


def in_effect(plan: Plan) -> Plan:
    """The plan without settings that change nothing: chunks of schedules that have none, the schedule of one microbatch
    in one stage, ZeRO on one replica, sequence parallelism without tensor parallelism, equal numbers of layers of one
    stage; axes of one device."""
    kept = tuple([s for s in plan.split if s.size > 1])
    gone = [s.axis for s in plan.split if s.size == 1]
    changes: dict[str, Any] = {"split": kept, "order": tuple([name for name in plan.order if name not in gone])}
    if plan.schedule == INTERLEAVED and plan.chunks == 1:
        changes["schedule"] = ONE_F_ONE_B
    elif isinstance(plan.schedule, str) and plan.schedule in SCHEDULES and plan.schedule != INTERLEAVED:
        changes |= {"chunks": 1, "schedule": ONE_F_ONE_B if plan.pp == plan.microbatches == 1 else plan.schedule}
    if plan.dp == 1 and all([s.axis == REPLICATE for s in kept]):
        changes["zero"] = 0
    if plan.tp == 1:
        changes["sequence_parallel"] = False
    if plan.pp * changes.get("chunks", plan.chunks) == 1 and plan.cut == (EVEN,):
        changes["cut"] = ()
    return replace(plan, **changes)


def split_sizes(plan: Plan) -> dict[str, int]:
    """The number of devices along the further axes that the other tools know."""
    found = {split.axis: split.size for split in plan.split}
    return {name: found.get(name, 1) for name in SPLIT_DIMS}


def splits_of(sizes: dict[str, int]) -> tuple[InputSplit, ...]:
    """The further axes of these sizes, but those of one device."""
    return tuple([InputSplit.parse(f"{name}={n}:{SPLIT_DIMS[name]}") for name, n in sizes.items() if n > 1])


def nested(plan: Plan, pipeline_inside: bool = False) -> tuple[str, ...]:
    """The order of axes in the other tools, fastest first: tp, cp, ep, dp, replicate, pp; or pp before dp."""
    last = ("pp", "dp", REPLICATE) if pipeline_inside else ("dp", REPLICATE, "pp")
    return tuple([name for name in ("tp", CONTEXT, EXPERTS, *last) if name in plan.order])


def ordered(plan: Plan, order: Sequence[str]) -> bool:
    """Whether axes of more than one device run in this order."""
    some = [a.name for a in plan.axes if a.size > 1]
    return [n for n in plan.order if n in some] == [n for n in order if n in some]


def samples(request: Request) -> tuple[int, int]:
    """The samples of a microbatch on a device, and of all microbatches on it.

    Raises InfeasibleError if the batch is not known, or does not divide.
    """
    plan, batch = request.plan, request.settings.batch
    if batch is None:
        raise InfeasibleError("the number of samples in a step is not known", "such as --dim batch=512")
    sizes = split_sizes(plan)
    replicas = plan.dp * sizes[EXPERTS] * sizes[REPLICATE]
    pieces = replicas * plan.microbatches
    if batch % pieces:
        fitting = [n for n in range(1, plan.microbatches) if batch % (n * replicas) == 0]
        hint = f"nearest: --microbatches {fitting[-1]}" if fitting else f"a batch is a multiple of {replicas}"
        text = f"{counted(replicas, 'replica')} x {counted(plan.microbatches, 'microbatch', 'es')}"
        raise InfeasibleError(f"a batch of {batch} does not divide by {text}", hint)
    return batch // pieces, batch // replicas


# ---- steps of all tools


def without_loss_gradient(r: Request) -> tuple[str, Request] | None:
    """The gradient of the loss is the backward pass's."""
    usual = default_of(next(f for f in fields(Plan) if f.name == "loss_gradient"))
    if r.plan.loss_gradient == usual:
        return None
    return "the gradient of the loss in the forward pass", r.changed(loss_gradient=usual)


def with_overlap(r: Request) -> tuple[str, Request] | None:
    """Streams of a GPU run beside each other."""
    return None if r.plan.overlap else ("communication that does not overlap", r.changed(overlap=True))


def with_layers_of_stages(r: Request, expressible: Callable[[Sequence[int]], bool]) -> tuple[str, Request] | None:
    """A tool shares out layers by number. `expressible`: whether it can give stages these numbers of layers."""
    plan, layers = r.plan, r.settings.layers
    if not plan.cut:
        return None
    counts = layers_of_stages(plan, layers)
    if counts is not None and expressible(counts):
        return None
    if counts is not None:
        what = f"stages of {', '.join(map(str, counts))} layers"
    elif layers is None and all([name == EVEN or name.isdecimal() for name in plan.cut]):
        what = "stages of numbers of layers of a model of unknown depth"
    else:
        what = "stages that begin at given weights"
    even = layers is not None and expressible(even_layers(layers, plan.stage_count))
    return what, r.changed(cut=(EVEN,) if even else ())


def layers_of_stages(plan: Plan, layers: int | None) -> list[int] | None:
    """The layers that each stage of a plan has, of so many; None where it does not say, or they are not known."""
    stages = plan.stage_count
    if layers is None or not plan.cut:
        return None
    if plan.cut == (EVEN,):
        return even_layers(layers, stages)
    if not all([name.isdecimal() for name in plan.cut]) or len(plan.cut) != stages - 1:
        return None
    begins = [0, *map(int, plan.cut), layers]
    counts = [b - a for a, b in pairwise(begins)]
    return counts if min(counts) >= 0 else None


def cut_of(counts: Sequence[int]) -> tuple[str, ...]:
    """`Plan.cut` for stages of these numbers of layers."""
    if [*counts] == even_layers(sum(counts), len(counts)):
        return (EVEN,)
    return tuple(map(str, accumulate(counts[:-1])))


def with_known_axes(r: Request) -> tuple[str, Request] | None:
    """Further axes are `cp`, `ep` and `replicate`; `ep` takes its devices from data parallelism, not beside `cp`."""
    known = {CONTEXT: {1}, REPLICATE: {0}, EXPERTS: {0}}
    other = [s for s in r.plan.split if {dim for _, dim in s.dims} != known.get(s.axis)]
    if other:
        return f"the axis {other[0].axis} of dims {other[0]}"[:120], _folded(r, other)
    experts = [s for s in r.plan.split if s.axis == EXPERTS]
    if experts and split_sizes(r.plan)[CONTEXT] > 1:
        return "context beside expert parallelism", _folded(r, experts)
    return None


def with_sharded_groups(r: Request) -> tuple[str, Request] | None:
    """Replicas of groups are there only where ZeRO splits a group."""
    replicated = [s for s in r.plan.split if s.axis == REPLICATE]
    if replicated and not r.plan.zero:
        return f"the axis {REPLICATE} without ZeRO", _folded(r, replicated)
    return None


def _folded(r: Request, splits: Collection[InputSplit]) -> Request:
    """With these axes as more data parallelism."""
    names = [s.axis for s in splits]
    plan = r.plan
    left = tuple([s for s in plan.split if s.axis not in names])
    order = tuple([name for name in plan.order if name not in names])
    return r.changed(dp=plan.dp * math.prod([s.size for s in splits]), split=left, order=order)


def with_schedule(*names: str) -> Step:
    """A step: the schedule is one of these."""

    def step(r: Request) -> tuple[str, Request] | None:
        if r.plan.schedule in names:
            return None
        other = INTERLEAVED if r.plan.chunks > 1 else ONE_F_ONE_B
        return _schedule_name(r.plan), r.changed(schedule=other)

    return step


def with_accumulation(r: Request) -> tuple[str, Request] | None:
    """On one pipeline rank there is no schedule: microbatches run one after the other."""
    if r.plan.pp > 1 or (r.plan.schedule == ONE_F_ONE_B and r.plan.chunks == 1):
        return None
    return f"{_schedule_name(r.plan)} on one pipeline rank", r.changed(schedule=ONE_F_ONE_B, chunks=1)


def _schedule_name(plan: Plan) -> str:
    text = plan.schedule if isinstance(plan.schedule, str | os.PathLike) else "of a table"
    return f"the schedule {os.fspath(text)}"


def all_gathered_again(r: Request) -> tuple[str, Request] | None:
    """The tools have no word for which weights stay whole between passes."""
    if r.plan.gathered_again == "all":
        return None
    return f"that only {r.plan.gathered_again} are gathered again", r.changed(gathered_again="all")


def without_padding(r: Request) -> tuple[str, Request] | None:
    """The tool pads no dims."""
    if r.plan.pad_multiple == 1:
        return None
    return f"dims padded to multiples of {r.plan.pad_multiple}", r.changed(pad_multiple=1)


def in_order(r: Request) -> tuple[str, Request] | None:
    """The axes run in the tools' order."""
    order = nested(r.plan)
    return None if ordered(r.plan, order) else (f"the order {','.join(r.plan.order)}", r.changed(order=order))


def fields_of(plan: Plan, leave: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a plan that is read, but some; the order only if it is not the default."""
    found = {f.name: getattr(plan, f.name) for f in fields(Plan) if f.name not in leave}
    if ordered(plan, replace(plan, order=()).order):
        del found["order"]
    return found
