"""Writes plans as torchtitan's TOML: its sections parallelism, activation_checkpoint and training (torchtitan 0.2).

- FSDP's shard degree is dp, in which ZeRO splits all: parameters are gathered for each pass ("always", ZeRO 3) or stay
  gathered ("never", ZeRO 2). A replicate degree beside it is the axis `replicate`; alone it is DDP, dp without ZeRO.
- Tensor parallelism always comes with sequence parallelism.
- The microbatches of a pipeline are parts of the local batch; without a pipeline gradients of several local batches are
  accumulated.
- Mixed precision is FSDP's, or autocast's on replicas and single devices: with tensor or pipeline parallelism alone
  there is none.
- Recomputation "selective" by op is near distir's `selective`, but recomputes every second matrix product, too.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any

from distir.api.interop.plan_settings import (
    CONTEXT,
    EXPERTS,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    REPLICATE,
    Request,
    Step,
    TrainingSettings,
    all_gathered_again,
    cut_of,
    in_order,
    layers_of_stages,
    samples,
    split_sizes,
    with_accumulation,
    with_known_axes,
    with_layers_of_stages,
    with_overlap,
    with_schedule,
    with_sharded_groups,
    without_loss_gradient,
    without_padding,
)
from distir.api.model import Precision
from distir.transforms.plan import BUCKET_MB, Plan

TORCHTITAN_NAME = "torchtitan"
SCHEDULE_NAMES = {ONE_F_ONE_B: "1F1B", INTERLEAVED: "Interleaved1F1B", GPIPE: "GPipe"}
USUAL_CHUNKS = 2
"""The stages of a pipeline rank under a schedule of several, where the number of layers of one is not given."""
_LESS = (1, 1)
"""The embedding and the output count as a layer each where layers are shared out among stages, if not told how."""
_MOST_LESS = 8
"""The most layers that they are tried to count as, for stages of given numbers of layers."""
RESHARDED = {3: "always", 2: "never", 1: "never"}
"""What FSDP does with gathered weights after the forward pass, by ZeRO stage."""
WHOLE_IN_PIPELINES = 1
"""The ZeRO stage of weights that stay whole in a pipeline, which reduces gradients after the last backward pass (github
pytorch/pytorch, torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`)."""
_RECOMPUTED = ("none", "selective", "full")
BY_OP = "op"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def torchtitan_toml(request: Request) -> str:
    """The text of a file that torchtitan reads with `--job.config_file`.

    The request is one that passes `TORCHTITAN_STEPS`.
    """
    plan, settings = request
    sizes = split_sizes(plan)
    micro, local = samples(request)
    replicas = plan.dp * sizes[EXPERTS]
    ddp = not plan.zero and plan.dp > 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp if ddp else sizes[REPLICATE],
        "data_parallel_shard_degree": 1 if ddp else replicas,
        "fsdp_reshard_after_forward": RESHARDED.get(plan.zero),
        "tensor_parallel_degree": plan.tp,
        "pipeline_parallel_degree": plan.pp,
        "context_parallel_degree": sizes[CONTEXT],
        "expert_parallel_degree": sizes[EXPERTS],
        "expert_tensor_parallel_degree": plan.tp if sizes[EXPERTS] > 1 else 1,
    }
    if plan.pp > 1:
        parallelism |= {"pipeline_parallel_microbatch_size": micro, **_schedule(plan, settings)}
    checkpoint = {"mode": plan.recompute, "selective_ac_option": BY_OP if plan.recompute == "selective" else None}
    training: dict[str, Any] = {
        "local_batch_size": local if plan.pp > 1 else micro,
        "global_batch_size": settings.batch,
        "seq_len": settings.seq,
        "dtype": settings.dtype,
        "mixed_precision_param": settings.dtype or DTYPES[settings.precision.products],
        "mixed_precision_reduce": DTYPES[settings.precision.gradients],
    }
    sections = {"parallelism": parallelism, "activation_checkpoint": checkpoint, "training": training}
    lines = [
        f"# {TORCHTITAN_NAME}: {plan}, on {plan.size} devices",
        *[f"# note: {x}" for x in torchtitan_notes(request)],
    ]
    for section, options in sections.items():
        lines += ["", f"[{section}]", *[f"{k} = {json.dumps(x)}" for k, x in options.items() if x is not None]]
    return "\n".join([*lines, ""])


def torchtitan_notes(request: Request) -> list[str]:
    """What torchtitan does otherwise than the plan."""
    plan, layers = request.plan, request.settings.layers
    found = recompute_notes(plan)
    if plan.pp > 1 and not plan.cut:
        counts = shared_out(layers, plan.stage_count, *_LESS) if layers is not None else []
        as_cut = f": --cut {','.join(cut_of(counts))}" if counts and min(counts) >= 0 else ""
        found.append(f"stages are shared out by numbers of layers, not by cost{as_cut}")
    return found


def recompute_notes(plan: Plan) -> list[str]:
    """What torchtitan recomputes otherwise than the plan."""
    return ["recomputation by op also recomputes every second matrix product"] if plan.recompute == "selective" else []


def _schedule(plan: Plan, settings: TrainingSettings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if plan.schedule not in SCHEDULE_NAMES:  # a file in torch's format
        kind = "PipelineScheduleSingle" if plan.chunks == 1 else "PipelineScheduleMulti"
        found |= {"pipeline_parallel_schedule": kind, "pipeline_parallel_schedule_csv": fspath(plan.schedule)}  # type: ignore[arg-type]
    else:
        found["pipeline_parallel_schedule"] = SCHEDULE_NAMES[plan.schedule]  # type: ignore[index]
        if plan.chunks > USUAL_CHUNKS:
            found["pipeline_parallel_layers_per_stage"] = _layers_per_stage(plan, settings)
    first, last = _less_layers(plan, settings) or _LESS
    if (first, last) != _LESS:
        found |= {"pipeline_parallel_first_stage_less_layers": first, "pipeline_parallel_last_stage_less_layers": last}
    return found


def shared_out(layers: int, stages: int, first: int, last: int) -> list[int]:
    """The layers that torchtitan gives each of several stages, where the embedding and the output count as so many."""
    each, left = divmod(layers + first + last, stages)
    counts = [each + (k < left) for k in range(stages)]
    return [counts[0] - first, *counts[1:-1], counts[-1] - last]


def _less_layers(plan: Plan, settings: TrainingSettings) -> tuple[int, int] | None:
    """What the embedding and the output count as for the plan's stages; None if nothing gives these, they are not
    known, or the plan has none."""
    counts = layers_of_stages(plan, settings.layers)
    return _less_for(counts) if counts is not None and len(counts) > 1 else None


def _less_for(counts: Sequence[int]) -> tuple[int, int] | None:
    """What the embedding and the output count as where stages have these numbers of layers; None if nothing does."""
    tried = [_LESS, (0, 0), *itertools.product(range(_MOST_LESS + 1), repeat=2)]
    return next((less for less in tried if shared_out(sum(counts), len(counts), *less) == [*counts]), None)


def _layers_per_stage(plan: Plan, settings: TrainingSettings) -> int | None:
    """The layers of a stage that give the plan's number of stages; None if there is none such, or it is not known."""
    stages = plan.stage_count
    if settings.layers is None:
        return None
    layers = settings.layers + sum(_less_layers(plan, settings) or _LESS)
    each = math.ceil(layers / stages)
    return each if math.ceil(layers / each) == stages else None


# ---- what cannot be expressed


def _with_zero(r: Request) -> tuple[str, Request] | None:
    plan = r.plan
    alone = plan.size == plan.dp
    sizes = split_sizes(plan)
    whole = WHOLE_IN_PIPELINES if plan.pp > 1 else 2
    fits = plan.zero in (whole, 3)
    if fits or plan.dp * sizes[CONTEXT] * sizes[EXPERTS] == 1 or (plan.zero == 0 and alone):
        return None
    what = f"ZeRO {plan.zero}" if plan.zero else "replicas without ZeRO beside other axes"
    return f"{what} in a pipeline" if plan.zero and plan.pp > 1 else what, r.changed(zero=whole)


def _with_schedule(r: Request) -> tuple[str, Request] | None:
    schedule = r.plan.schedule
    if isinstance(schedule, str | PathLike) and fspath(schedule).endswith(".csv") and r.plan.chunks <= USUAL_CHUNKS:
        return None
    return with_schedule(*SCHEDULE_NAMES)(r)


def _with_chunks(r: Request) -> tuple[str, Request] | None:
    if r.plan.chunks <= USUAL_CHUNKS or _layers_per_stage(r.plan, r.settings):
        return None
    layers = "a model of unknown depth" if r.settings.layers is None else f"{r.settings.layers} layers"
    return f"{r.plan.chunks} stages a pipeline rank of {layers}", r.changed(chunks=USUAL_CHUNKS)


def _with_cut(r: Request) -> tuple[str, Request] | None:
    return with_layers_of_stages(r, lambda counts: _less_for(counts) is not None)


def _with_sequence(r: Request) -> tuple[str, Request] | None:
    plan = r.plan
    if plan.tp == 1 or plan.sequence_parallel:
        return None
    return "tensor parallelism without sequence parallelism", r.changed(sequence_parallel=True)


def _with_recompute(r: Request) -> tuple[str, Request] | None:
    how = r.plan.recompute
    if how in _RECOMPUTED:
        return None
    return f"the recomputation {how}", r.changed(recompute="none" if how == "gathers" else "selective")


def _with_buckets(r: Request) -> tuple[str, Request] | None:
    if r.plan.bucket_mb == BUCKET_MB:
        return None
    return "the size of buckets", r.changed(bucket_mb=BUCKET_MB)


def _with_precision(r: Request) -> tuple[str, Request] | None:
    given, dtype = r.settings.precision, r.settings.dtype
    if given.products in DTYPES and given.gradients == "fp32" and dtype in (None, *DTYPES.values()):
        return None
    what = f"the type {dtype}" if dtype not in (None, *DTYPES.values()) else f"the precision {' and '.join(given)}"
    products = given.products if given.products in DTYPES else "bf16"
    return what, r._replace(settings=r.settings._replace(precision=Precision(products), dtype=None))


def without_mixed_precision(plan: Plan) -> bool:
    """Whether torchtitan has no mixed precision under a plan: without FSDP, beside other axes."""
    sizes = split_sizes(plan)
    return max(plan.tp, plan.pp) > 1 and max(plan.dp, sizes[CONTEXT], sizes[EXPERTS]) == 1


def _with_fsdp(r: Request) -> tuple[str, Request] | None:
    given = r.settings.precision
    if given.products == "fp32" or r.settings.dtype or not without_mixed_precision(r.plan):
        return None
    return "mixed precision without replicas", r._replace(settings=r.settings._replace(precision=Precision()))


TORCHTITAN_STEPS: tuple[Step, ...] = (
    without_loss_gradient,
    with_known_axes,
    with_sharded_groups,
    _with_zero,
    with_accumulation,
    _with_schedule,
    all_gathered_again,
    without_padding,
    _with_cut,
    _with_chunks,
    _with_sequence,
    _with_recompute,
    with_overlap,
    _with_buckets,
    in_order,
    _with_precision,
    _with_fsdp,
)
"""To the nearest plan that torchtitan can carry out."""
