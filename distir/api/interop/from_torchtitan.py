"""Reads torchtitan's TOML as a plan (torchtitan 0.2); `to_torchtitan` says what corresponds to what."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any

from distir.api.interop.option_tables import TORCHTITAN, ToolOption
from distir.api.interop.plan_settings import (
    CONTEXT,
    EXPERTS,
    INTERLEAVED,
    ONE_F_ONE_B,
    REPLICATE,
    Fault,
    ReadConfig,
    TrainingSettings,
    cut_of,
    fields_of,
    in_effect,
    nested,
    split_sizes,
    splits_of,
)
from distir.api.interop.to_torchtitan import (
    BY_OP,
    DTYPES,
    RESHARDED,
    SCHEDULE_NAMES,
    USUAL_CHUNKS,
    WHOLE_IN_PIPELINES,
    recompute_notes,
    shared_out,
    without_mixed_precision,
)
from distir.api.model import Precision
from distir.ir.errors import UsageError, counted, did_you_mean
from distir.ir.files import read_toml
from distir.transforms.plan import Plan

_SECTIONS_NEAR = 0.8
_OTHER_SCHEDULES = ("LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_OF_ONE_STAGE, _OF_SEVERAL = "PipelineScheduleSingle", "PipelineScheduleMulti"


@dataclass(frozen=True)
class _Given:
    """The values of all options, those left out at their defaults; and what is known besides."""

    name: str
    values: Mapping[str, Any]
    devices: int | None
    layers: int | None
    faults: list[Fault]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def read_torchtitan(path: str | PathLike[str], devices: int | None = None, layers: int | None = None) -> ReadConfig:
    """What a file says. `devices` is needed where it does not say the shard degree; `layers`, the model's number of
    blocks, where it says how many a stage has.

    Raises UsageError for a file that cannot be read, a key that there is not, a value of another type, or degrees and
    batches that do not fit each other.
    """
    name = fspath(path)
    values = {key: option.default for table in TORCHTITAN.values() for key, option in table.items()}
    faults: list[Fault] = []
    notes: list[str] = []
    ignored: list[str] = []
    for section, options in read_toml(name, "torchtitan 0.2 reads TOML").items():
        table = _section(name, section, options)
        if table is None:
            ignored += [f"{section}.{key}" for key in options] if isinstance(options, dict) else [section]
            if converters := isinstance(options, dict) and options.get("converters"):
                text = f"{name}: {section}.converters = {json.dumps(converters)}: products in fewer bits"
                faults.append(Fault("precision", text, "without converters"))
            continue
        for key, x in options.items():
            option = _checked(f"{name}: {section}.{key}", table, key, x)
            values[key] = x
            if option.field == "" and not option.reason:
                ignored.append(f"{section}.{key}")
            if option.reason and x != option.default:
                text = f"{section}.{key} = {json.dumps(x)}: {option.reason}"
                if option.field:
                    faults.append(Fault(option.field, text, f"without {key}"))
                else:
                    notes.append(text)
    given = _Given(name, values, devices, layers, faults)
    plan = _plan(given)
    settings = _settings(given, plan)
    fields = fields_of(plan, ["bucket_mb", "overlap", "loss_gradient", *([] if plan.cut else ["cut"])])
    if without_mixed_precision(plan) and not settings.dtype:
        notes.append("torchtitan has no mixed precision without FSDP beside other axes: all is in float32")
    if plan.pp > 1 and given.layers is None:
        notes.append("stages are balanced by cost, as the number of layers is not known: --cut even, or --cut N,N,...")
    return ReadConfig(fields, settings, faults, [*notes, *recompute_notes(plan)], ignored, plan.size)


def _section(name: str, section: str, options: Any) -> Mapping[str, ToolOption] | None:
    """The options of a section; None for one that does not concern the plan."""
    if section in TORCHTITAN:
        if not isinstance(options, dict):
            raise UsageError(f"{name}: {section} is a section, got {options!r}")
        return TORCHTITAN[section]
    if near := did_you_mean(section, TORCHTITAN, cutoff=_SECTIONS_NEAR):
        raise UsageError(f"{name}: torchtitan has no section {section!r}", near)
    return None


def _checked(where: str, table: Mapping[str, ToolOption], key: str, x: Any) -> ToolOption:
    """The option of a key. Raises UsageError for none, or a value that is none of it."""
    if key not in table:
        raise UsageError(f"{where}: torchtitan has no such key", did_you_mean(key, table))
    option = table[key]
    kinds = (int, float) if option.type is float else option.type
    if not isinstance(x, kinds) or (isinstance(x, bool) and option.type is not bool):
        raise UsageError(f"{where}: expected {option.type.__name__}, got {x!r}")
    if option.type is int and x < 1 and x != option.default and option.field is None:
        raise UsageError(f"{where}: expected a whole number of at least 1, got {x}")
    if option.choices and x not in option.choices:
        raise UsageError(f"{where}: expected {' or '.join(map(str, option.choices))}, got {x!r}")
    return option


def _plan(given: _Given) -> Plan:
    tp, pp, cp = (given[f"{kind}_parallel_degree"] for kind in ("tensor", "pipeline", "context"))
    ep = given["expert_parallel_degree"]
    replicate, shard = _replicas(given, tp * pp * cp)
    if shard % ep or (ep > 1 and cp > 1):
        text = (
            f"{given.name}: expert parallelism of {ep} beside a shard degree of {shard} and context parallelism of {cp}"
        )
        given.faults.append(Fault("split", text, "experts are spread over ranks of the shard degree alone"))
        ep = 1
    if ep > 1 and given["expert_tensor_parallel_degree"] != tp:
        text = f"{given.name}: experts of another tensor parallelism than {tp}"
        given.faults.append(Fault("split", text, f"nearest: expert_tensor_parallel_degree = {tp}"))
    dp, zero = shard // ep, 3
    if shard * cp == 1:  # DDP
        dp, replicate, zero = replicate, 1, 0
    else:
        policy = given["fsdp_reshard_after_forward"]
        if policy == "default":
            policy = RESHARDED[WHOLE_IN_PIPELINES if pp > 1 else 3]
        stages = (WHOLE_IN_PIPELINES, 3) if pp > 1 else (2, 3)
        zero = next(stage for stage in stages if RESHARDED[stage] == policy)
    schedule, chunks = _schedule(given, pp)
    plan = Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        microbatches=_microbatches(given, replicate * dp * ep, pp),
        schedule=schedule,
        chunks=chunks,
        zero=zero,
        sequence_parallel=tp > 1,
        recompute=_recompute(given),
        cut=_cut(given, pp * chunks),
        split=splits_of({CONTEXT: cp, EXPERTS: ep, REPLICATE: replicate}),
    )
    return in_effect(replace(plan, order=nested(plan)))


def _replicas(given: _Given, others: int) -> tuple[int, int]:
    """The replicate and the shard degree, of devices of which the other axes take so many each."""
    replicate, shard, devices = (
        given["data_parallel_replicate_degree"],
        given["data_parallel_shard_degree"],
        given.devices,
    )
    if shard == -1:
        if devices is None:
            text = "data_parallel_shard_degree is what is left of the devices, and how many there are is not said"
            raise UsageError(f"{given.name}: {text}", "--gpus N")
        shard = devices // (replicate * others)
    if devices is not None and replicate * shard * others != devices:
        text = f"replicas of {others} devices, {replicate} x {shard}" if shard else f"replicas of {replicate * others}"
        raise UsageError(f"{given.name}: {devices} devices are no {text}", "--gpus says how many there are")
    return replicate, shard


def _microbatches(given: _Given, replicas: int, pp: int) -> int:
    local, whole = given["local_batch_size"], given["global_batch_size"]
    whole = local * replicas if whole == -1 else whole
    if whole % (local * replicas):
        text = f"a global batch of {whole} is no multiple of {replicas} local batches of {local}"
        raise UsageError(f"{given.name}: {text}")
    rounds = whole // (local * replicas)
    if pp == 1:
        return rounds
    micro = given["pipeline_parallel_microbatch_size"]
    if local % micro:
        raise UsageError(f"{given.name}: a local batch of {local} is no multiple of microbatches of {micro}")
    if rounds > 1:
        text = f"{given.name}: gradients of {rounds} runs of the pipeline are accumulated"
        given.faults.append(Fault("microbatches", text, f"nearest: local_batch_size = {local * rounds}"))
    return rounds * local // micro


def _schedule(given: _Given, pp: int) -> tuple[str, int]:
    """The schedule, and the stages of a pipeline rank."""
    if pp == 1:
        return ONE_F_ONE_B, 1
    name, file = given["pipeline_parallel_schedule"].lower(), given["pipeline_parallel_schedule_csv"]
    if name in (_OF_ONE_STAGE.lower(), _OF_SEVERAL.lower()):
        if not file:
            raise UsageError(f"{given.name}: this schedule needs pipeline_parallel_schedule_csv")
        return file, 1 if name == _OF_ONE_STAGE.lower() else _chunks(given, pp)
    found = next((k for k, x in SCHEDULE_NAMES.items() if x.lower() == name), None)
    if found is None:
        if name not in [x.lower() for x in _OTHER_SCHEDULES]:
            known = f"known are {', '.join([*SCHEDULE_NAMES.values(), *_OTHER_SCHEDULES])}"
            raise UsageError(f"{given.name}: torchtitan has no schedule {given['pipeline_parallel_schedule']!r}", known)
        text = f"{given.name}: the schedule {given['pipeline_parallel_schedule']}"
        nearest = SCHEDULE_NAMES[INTERLEAVED]
        given.faults.append(Fault("schedule", text, f"nearest: {nearest}; or --schedule with the file of its table"))
        found = INTERLEAVED
    single = found != INTERLEAVED
    if given.layers is not None and given["pipeline_parallel_layers_per_stage"] is not None:
        each = _chunks(given, pp)
        if (each != 1) == single:
            text = f"{counted(each, 'stage')} a pipeline rank under {given['pipeline_parallel_schedule']}"
            raise UsageError(f"{given.name}: {text}, which has {'one' if single else 'several'}")
    return file or found, _chunks(given, pp) if found == INTERLEAVED else 1


def _cut(given: _Given, stages: int) -> tuple[str, ...]:
    """Where stages begin, by numbers of layers; none if there is one, or where the model's depth is not known."""
    if stages == 1 or given.layers is None:
        return ()
    less = _less_layers(given)
    if min(less) < 0:
        raise UsageError(f"{given.name}: the layers that a stage has less are at least 0, got {min(less)}")
    counts = shared_out(given.layers, stages, *less)
    if min(counts) < 0:
        raise UsageError(f"{given.name}: {given.layers} layers are too few for {stages} stages")
    return cut_of(counts)


def _less_layers(given: _Given) -> tuple[int, int]:
    """How many layers the embedding and the head count for."""
    return (
        given["pipeline_parallel_first_stage_less_layers"],
        given["pipeline_parallel_last_stage_less_layers"],
    )


def _chunks(given: _Given, pp: int) -> int:
    each = given["pipeline_parallel_layers_per_stage"]
    if each is None:
        return USUAL_CHUNKS
    if given.layers is None:
        text = f"{given.name}: stages of {each} layers of a model of unknown depth"
        given.faults.append(Fault("chunks", text, "--chunks says how many stages a pipeline rank has"))
        return USUAL_CHUNKS
    stages = math.ceil((given.layers + sum(_less_layers(given))) / each)
    if stages % pp:
        text = f"{given.layers} layers, {each} a stage, are {stages} stages: no multiple of {pp} pipeline ranks"
        raise UsageError(f"{given.name}: {text}")
    return stages // pp


def _recompute(given: _Given) -> str:
    mode, option = given["mode"], given["selective_ac_option"]
    if mode in ("none", "full"):
        return mode
    if mode == "selective" and option == BY_OP:
        return mode
    if mode == "selective" and option in ("0", "1"):  # each layer
        return "full"
    if mode == "selective" and not option.isdecimal():
        raise UsageError(f"{given.name}: activation_checkpoint.selective_ac_option is a number or op, got {option!r}")
    text = "a budget of memory" if mode == "memory_budget" else f"every layer of {option} is recomputed"
    hint = "nearest: --recompute full or selective, instead of activation_checkpoint (by default selective, 2)"
    given.faults.append(Fault("recompute", f"{given.name}: {text}", hint))
    return "selective"


def _settings(given: _Given, plan: Plan) -> TrainingSettings:
    sizes = split_sizes(plan)
    replicas = plan.dp * sizes[EXPERTS] * sizes[REPLICATE]
    whole = given["local_batch_size"] * replicas if given["global_batch_size"] == -1 else given["global_batch_size"]
    dtype = given["dtype"] if given["dtype"] != "float32" else None
    word = next(k for k, x in DTYPES.items() if x == given["mixed_precision_param"])
    mixed = dtype is None and not without_mixed_precision(plan)
    return TrainingSettings(whole, given["seq_len"], Precision(word) if mixed else Precision(), dtype)
