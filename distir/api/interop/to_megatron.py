"""Writes plans as arguments of Megatron-LM, in an array of a shell script.

- Data parallelism is what is left of the devices; expert parallelism takes its devices from it. The global batch is
  micro-batch x data parallelism x microbatches.
- The distributed optimizer is ZeRO 1; Megatron-FSDP shards gradients ("optim_grads", ZeRO 2), and parameters
  ("optim_grads_params", ZeRO 3). Several instances of the optimizer are the axis `replicate`.
- Virtual stages of a pipeline rank are chunks of the interleaved schedule.
- With sequence parallelism inputs of products are saved in shards and gathered once more: that is `gathers`. Selective
  recomputation, of core attention, is `attention`.
- A vocabulary is padded to a multiple of a number and the degree of tensor parallelism. Megatron-LM pads no other dims,
  and without the option vocabularies to 128; a file without it says nothing of the plan's `pad_multiple`.
- Gradients are reduced in buckets beside the backward pass, or in one bucket after it, without --overlap-grad-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distir.api.interop.plan_settings import (
    CONTEXT,
    EXPERTS,
    INTERLEAVED,
    ONE_F_ONE_B,
    REPLICATE,
    Request,
    Step,
    all_gathered_again,
    layers_of_stages,
    nested,
    ordered,
    samples,
    split_sizes,
    with_accumulation,
    with_known_axes,
    with_layers_of_stages,
    with_overlap,
    with_schedule,
    with_sharded_groups,
    without_loss_gradient,
)
from distir.api.model import Precision
from distir.transforms.plan import BUCKET_MB, EVEN, MIB

FSDP_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""By ZeRO stage."""
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_CORE_ATTENTION = "attention"


def megatron_arguments(request: Request) -> str:
    """The text of a file that a shell reads (`source`): an array of arguments, and how many devices they are for.

    The request is one that passes `MEGATRON_STEPS`.
    """
    plan = request.plan
    lines = [
        f"# Megatron-LM: {plan}",
        *[f"# note: {x}" for x in megatron_notes(request)],
        '# torchrun --nnodes ... --nproc-per-node ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" ...',
        f"WORLD_SIZE={plan.size}",
        "MEGATRON_ARGS=(",
        *[f"    {argument}" for argument in _arguments(request)],
        ")",
    ]
    return "\n".join([*lines, ""])


def megatron_notes(request: Request) -> list[str]:
    """What Megatron-LM does otherwise than the plan."""
    if request.plan.pp == 1 or request.plan.cut:
        return []
    return ["stages have equal numbers of layers, not equal costs: --cut even"]


def _arguments(request: Request) -> Iterator[str]:
    plan, settings = request
    sizes = split_sizes(plan)
    yield f"--tensor-model-parallel-size {plan.tp}"
    yield f"--pipeline-model-parallel-size {plan.pp}"
    if plan.chunks > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {plan.chunks}"
    yield from _layers_of_ends(request)
    if sizes[CONTEXT] > 1:
        yield f"--context-parallel-size {sizes[CONTEXT]}"
    if sizes[EXPERTS] > 1:
        yield f"--expert-model-parallel-size {sizes[EXPERTS]}"
    if plan.sequence_parallel:
        yield "--sequence-parallel"
    if not ordered(plan, nested(plan)):
        yield "--use-tp-pp-dp-mapping"
    yield f"--micro-batch-size {samples(request)[0]}"
    yield f"--global-batch-size {settings.batch}"
    if settings.seq is not None:
        yield f"--seq-length {settings.seq}"
    yield f"--make-vocab-size-divisible-by {plan.pad_multiple}"
    yield from _zero(request)
    yield from _overlap(request)
    if plan.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif plan.recompute == _CORE_ATTENTION:
        yield "--recompute-granularity selective"
    yield from _precision(settings.precision)


def _layers_of_ends(request: Request) -> Iterator[str]:
    """How many layers the first and the last rank have, where that is another number."""
    plan = request.plan
    counts = layers_of_stages(plan, request.settings.layers)
    found = _ends(counts, plan.pp, plan.chunks) if counts is not None else None
    if found is None:
        return
    for end, n in zip(("first", "last"), found.ranks, strict=True):
        if n is not None:
            yield f"--decoder-{end}-pipeline-num-layers {n}"
    for what, counted in zip(("embedding", "loss"), found.counted, strict=True):
        if counted:
            yield f"--account-for-{what}-in-pipeline-split"


class _Ends(NamedTuple):
    """What is told of the ends of a pipeline: the layers of the first and the last rank, if not those of the others;
    whether the embedding and the head count as a layer."""

    ranks: tuple[int | None, int | None] = (None, None)
    counted: tuple[bool, bool] = (False, False)


def _ends(counts: Sequence[int], pp: int, chunks: int) -> _Ends | None:
    """What gives stages these numbers of layers; None if nothing does."""
    for counted in ((False, False), (True, False), (False, True), (True, True)):
        whole = [*counts]
        whole[0] += counted[0]
        whole[-1] += counted[1]
        if len(set(whole)) == 1:
            return _Ends(counted=counted)
    ranks = counts[:pp]
    if pp == 1 or [*counts] != [*ranks] * chunks or len(set(ranks[1:-1])) > 1:
        return None
    first, last = [None if n == ranks[1] else n * chunks for n in (ranks[0], ranks[-1])]
    return _Ends((first, last))


def _zero(request: Request) -> Iterator[str]:
    plan = request.plan
    if plan.zero:
        yield "--use-distributed-optimizer"
    if plan.zero > 1:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {FSDP_STRATEGIES[plan.zero]}"
        yield "--ckpt-format fsdp_dtensor"  # Megatron-FSDP accepts no other
    if (instances := split_sizes(plan)[REPLICATE]) > 1:
        yield f"--num-distributed-optimizer-instances {instances}"


def _overlap(request: Request) -> Iterator[str]:
    plan = request.plan
    if math.isinf(plan.bucket_mb):
        return
    yield "--overlap-grad-reduce"
    if plan.zero:
        yield "--overlap-param-gather"
    if plan.zero > 1:  # Megatron-FSDP makes a bucket of each block
        return
    yield f"--ddp-bucket-size {max(1, round(plan.bucket_mb * MIB / gradient_bytes(request.settings.precision)))}"


def _precision(precision: Precision) -> Iterator[str]:
    if precision.products != "fp32":
        yield f"--{precision.products}"
        if precision.gradients == "fp32":
            yield "--accumulate-allreduce-grads-in-fp32"
        elif precision.products == "bf16":
            yield "--grad-reduce-in-bf16"


def gradient_bytes(precision: Precision) -> int:
    """The bytes of an element of a gradient."""
    return _BYTES[precision.gradients]


# ---- what cannot be expressed


def _with_layers(r: Request) -> tuple[str, Request] | None:
    """Every stage has as many layers, if nothing else is said."""
    plan, layers = r.plan, r.settings.layers
    if layers is None or plan.cut or layers % plan.stage_count == 0:
        return None
    what = f"{layers} layers on {plan.stage_count} stages"
    if layers % plan.pp == 0:
        chunks = max(n for n in range(1, plan.chunks) if layers % (plan.pp * n) == 0)
        return what, r.changed(chunks=chunks)
    pp = max(n for n in range(1, plan.pp) if plan.pp % n == 0 and layers % n == 0)
    return what, r.changed(pp=pp, dp=plan.dp * (plan.pp // pp), chunks=1, schedule=ONE_F_ONE_B)


def _with_groups(r: Request) -> tuple[str, Request] | None:
    """The interleaved schedule takes microbatches in groups of as many as there are pipeline ranks."""
    plan = r.plan
    if plan.schedule != INTERLEAVED or plan.microbatches % plan.pp == 0:
        return None
    what = f"interleaved, {plan.microbatches} microbatches on {plan.pp} pipeline ranks"
    return what, r.changed(schedule=ONE_F_ONE_B, chunks=1)


def _with_recompute(r: Request) -> tuple[str, Request] | None:
    plan = r.plan
    gathers = plan.sequence_parallel or split_sizes(plan)[CONTEXT] > 1
    least, other = ("gathers", "none") if gathers else ("none", "gathers")
    if plan.recompute in (least, _CORE_ATTENTION, "full"):
        return None
    what = f"the recomputation {plan.recompute}" + (" with sequence or context parallelism" if gathers else "")
    return what, r.changed(recompute=least if plan.recompute == other else _CORE_ATTENTION)


def _with_buckets(r: Request) -> tuple[str, Request] | None:
    plan = r.plan
    elements = plan.bucket_mb * MIB / gradient_bytes(r.settings.precision)
    if math.isinf(elements):
        return None
    if plan.zero > 1:
        usual = BUCKET_MB
    elif elements == round(elements) != 1:
        return None
    else:
        usual = max(2, round(elements)) * gradient_bytes(r.settings.precision) / MIB
    if plan.bucket_mb == usual:
        return None
    return f"buckets of {plan.bucket_mb:g} MiB", r.changed(bucket_mb=usual)


def _in_order(r: Request) -> tuple[str, Request] | None:
    order = nested(r.plan)
    if ordered(r.plan, order) or ordered(r.plan, nested(r.plan, pipeline_inside=True)):
        return None
    return f"the order {','.join(r.plan.order)}", r.changed(order=order)


def _with_precision(r: Request) -> tuple[str, Request] | None:
    given, dtype = r.settings.precision, r.settings.dtype
    if dtype not in (None, "float32"):
        settings = r.settings._replace(precision=Precision("bf16"), dtype=None)
        return f"the type {dtype} of all that is computed", r._replace(settings=settings)
    if given.gradients in ("fp32", given.products):
        return None
    settings = r.settings._replace(precision=Precision(given.products))
    return f"the precision {' and '.join(given)}", r._replace(settings=settings)


def _with_cut(r: Request) -> tuple[str, Request] | None:
    if r.plan.cut == (EVEN,) and r.settings.layers is None:
        return None
    return with_layers_of_stages(r, lambda counts: _ends(counts, r.plan.pp, r.plan.chunks) is not None)


MEGATRON_STEPS: tuple[Step, ...] = (
    without_loss_gradient,
    with_known_axes,
    with_sharded_groups,
    with_accumulation,
    with_schedule(ONE_F_ONE_B, INTERLEAVED),
    all_gathered_again,
    _with_cut,
    _with_layers,
    _with_groups,
    _with_recompute,
    _with_precision,
    with_overlap,
    _with_buckets,
    _in_order,
)
"""To the nearest plan that Megatron-LM can carry out."""
