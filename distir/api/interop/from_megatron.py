"""Reads arguments of Megatron-LM as a plan; `to_megatron` says what corresponds to what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any

from distir.api.interop.option_tables import CONCERNS, MEGATRON, ToolOption
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
    splits_of,
)
from distir.api.interop.shell_words import ShellOptions, shell_options
from distir.api.interop.to_megatron import FSDP_STRATEGIES, gradient_bytes
from distir.api.model import Precision
from distir.ir.errors import UsageError, did_you_mean
from distir.transforms.plan import EVEN, MIB, Plan

_LEAST_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000
"""Elements of a bucket if none are given: at least so many, and so many for each data-parallel rank."""
_NEAR = 0.9
_CORE_ATTENTION = ["core_attn"]


@dataclass(frozen=True)
class _Given:
    """The values of all options, None or the default for those left out; and where faults and notes go."""

    name: str
    values: Mapping[str, Any]
    faults: list[Fault]
    notes: list[str]

    def __getitem__(self, option: str) -> Any:
        return self.values[f"--{option}"]


def read_megatron(path: str | PathLike[str], devices: int | None = None, layers: int | None = None) -> ReadConfig:
    """What the arguments in a file say: a list of them, or the script that starts a run. `devices` is needed where
    neither arguments of torchrun nor WORLD_SIZE say it; `layers`, the model's number of blocks, where `--num-layers`
    does not.

    Raises UsageError for a file that cannot be read, a bad value, an option that may concern the plan and is not known,
    or sizes that do not fit each other.
    """
    name = fspath(path)
    found = shell_options(name)
    values: dict[str, Any] = {option: known.default for option, known in MEGATRON.items()}
    faults: list[Fault] = []
    notes: list[str] = []
    ignored: list[str] = []
    for option, words in found.options.items():
        known = _known(name, option)
        if known is None:
            ignored.append(option)
            continue
        x = values[option] = _value(f"{name}: {option}", known, words)
        if known.field == "" and not known.reason:
            ignored.append(option)
        if known.reason and x != known.default:
            if known.field:
                faults.append(Fault(known.field, f"{name}: {option}: {known.reason}", f"without {option}"))
            else:
                notes.append(f"{option}: {known.reason}")
    given = _Given(name, values, faults, notes)
    devices = devices or _devices(found)
    if devices is None:
        raise UsageError(f"{name} does not say how many devices there are", "--gpus N")
    said = given["num-layers"]
    if None not in (said, layers) and said != layers:
        notes.append(f"{name} has {said} layers, the model {layers}")
    layers = layers or said
    precision = _precision(given)
    plan, whole = _plan(given, devices, layers, precision)
    settings = TrainingSettings(whole, given["seq-length"], precision, None, layers)
    leave = ["loss_gradient"]
    leave += ["bucket_mb"] if plan.zero > 1 and given["overlap-grad-reduce"] else []
    leave += ["pad_multiple"] if given["make-vocab-size-divisible-by"] is None else []
    return ReadConfig(fields_of(plan, leave), settings, faults, notes, ignored, plan.size)


def _known(name: str, option: str) -> ToolOption | None:
    """What is known of an option; None if it does not concern the plan. Raises UsageError if that is not known."""
    if option in MEGATRON:
        return MEGATRON[option]
    near = did_you_mean(option, MEGATRON, cutoff=_NEAR)
    if option.replace("_", "-") in ("--nproc-per-node", "--nnodes") or not (
        near or any(word in option for word in CONCERNS)
    ):
        return None
    raise UsageError(f"{name}: {option} may concern the plan, and distir does not know it", near or "without it")


def _value(where: str, option: ToolOption, words: list[str]) -> Any:
    """The value that words after an option give. Raises UsageError for one that is none of it."""
    if option.type is bool:
        return True
    if option.type is list:
        return words
    text = words[0] if words else ""
    if "$" in text:
        raise UsageError(f"{where}: {text} is not set in the file", "put its value in its place")
    if option.type is int and not (text.isdecimal() and (int(text) > 0 or option.default == 0)):
        raise UsageError(f"{where}: expected a whole number of at least 1, got {text!r}")
    if not text or (option.choices and text not in option.choices):
        raise UsageError(f"{where}: expected {' or '.join(option.choices) or 'a value'}, got {text!r}")
    return option.type(text) if option.type is int else text


def _devices(found: ShellOptions) -> int | None:
    """The devices of torchrun's arguments, or of WORLD_SIZE."""
    sizes = {option.replace("_", "-"): words for option, words in found.options.items()}
    each = [sizes.get(f"--{name}", [""])[:1] for name in ("nnodes", "nproc-per-node")]
    counts = [int(words[0]) for words in each if words and words[0].isdecimal()]
    if len(counts) == len(each):
        return math.prod(counts) or None
    world = found.variables.get("WORLD_SIZE", "")
    return int(world) or None if world.isdecimal() else None


def _plan(given: _Given, devices: int, layers: int | None, precision: Precision) -> tuple[Plan, int]:
    """The plan, and the samples of a step."""
    tp, pp, cp, ep = (
        given[f"{kind}-size"]
        for kind in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel", "expert-model-parallel")
    )
    if devices % (tp * pp * cp):
        text = f"{devices} devices are no multiple of tp {tp} x pp {pp} x cp {cp}"
        raise UsageError(f"{given.name}: {text}", "--gpus says how many there are")
    replicas = devices // (tp * pp * cp)
    instances = given["num-distributed-optimizer-instances"]
    if ep > 1 and (cp > 1 or replicas % ep or given["expert-tensor-parallel-size"] not in (None, tp)):
        text = (
            f"{given.name}: expert parallelism of {ep} beside cp {cp}, {replicas} replicas and other shards of experts"
        )
        given.faults.append(Fault("split", text, "experts are spread over data-parallel ranks, and split as all by tp"))
        ep = 1
    if (replicas // ep) % instances:
        raise UsageError(f"{given.name}: {replicas // ep} replicas are no multiple of {instances} optimizer instances")
    zero = _zero(given) if replicas * cp > instances else 0  # an instance of one device has all
    replicate = instances if zero else 1
    microbatches, whole = _microbatches(given, replicas)
    chunks = _chunks(given, pp, layers)
    if zero and not given["overlap-param-gather"]:
        given.notes.append("without --overlap-param-gather: parameters are gathered beside compute all the same")
    sequence = given["sequence-parallel"] and tp > 1
    plan = Plan(
        dp=replicas // ep // replicate,
        tp=tp,
        pp=pp,
        microbatches=microbatches,
        schedule=INTERLEAVED if chunks > 1 else ONE_F_ONE_B,
        chunks=chunks,
        bucket_mb=_bucket_mb(given, replicas * cp, precision),
        zero=zero,
        sequence_parallel=sequence,
        recompute=_recompute(given, sequence or cp > 1, layers, pp),
        split=splits_of({CONTEXT: cp, EXPERTS: ep, REPLICATE: replicate}),
        cut=_cut(given, pp, chunks, layers),
        pad_multiple=given["make-vocab-size-divisible-by"] or 1,
    )
    return in_effect(replace(plan, order=nested(plan, given["use-tp-pp-dp-mapping"]))), whole


def _microbatches(given: _Given, replicas: int) -> tuple[int, int]:
    micro = given["micro-batch-size"]
    if micro is None:
        raise UsageError(f"{given.name}: --micro-batch-size is missing", "Megatron-LM has no default for it")
    whole = given["global-batch-size"] or micro * replicas
    if whole % (micro * replicas):
        text = f"a global batch of {whole} is no multiple of {replicas} replicas x {micro} samples"
        raise UsageError(f"{given.name}: {text}", "--gpus says how many devices there are")
    return whole // (micro * replicas), whole


def _chunks(given: _Given, pp: int, layers: int | None) -> int:
    each, chunks = given["num-layers-per-virtual-pipeline-stage"], given["num-virtual-stages-per-pipeline-rank"]
    if pp == 1:
        return 1
    if each is None:
        return chunks or 1
    if chunks is not None:
        raise UsageError(f"{given.name}: layers of a virtual stage and virtual stages are both given", "give one")
    if layers is None:
        text = f"{given.name}: virtual stages of {each} layers of a model of unknown depth"
        given.faults.append(Fault("chunks", text, "--chunks says how many stages a pipeline rank has"))
        return 1
    whole = layers + sum(_counted(given))
    if whole % (pp * each):
        counted = f"{layers} layers" + (f" and {whole - layers} that count as one" if whole > layers else "")
        raise UsageError(f"{given.name}: {counted} are no multiple of pp {pp} x {each} layers a virtual stage")
    return whole // (pp * each)


def _cut(given: _Given, pp: int, chunks: int, layers: int | None) -> tuple[str, ...]:
    """Where stages begin: at equal numbers of layers, but for what is said of the first and the last pipeline rank, or
    where the embedding and the head count as a layer each (Megatron-LM, transformer_block.py and transformer_layer.py:
    get_num_layers_to_build and get_transformer_layer_offset)."""
    ends, less = [given[f"decoder-{end}-pipeline-num-layers"] for end in ("first", "last")], _counted(given)
    told = ends != [None, None]
    if told and (sum(less) or given["num-layers-per-virtual-pipeline-stage"]):
        what = "an embedding or a head that counts as one" if sum(less) else "those of a virtual stage"
        raise UsageError(f"{given.name}: layers of the first or last rank, and {what}", "give one of them")
    if pp == 1:
        return ()
    if layers is None:
        if told or sum(less):
            text = f"{given.name}: stages of given numbers of layers of a model of unknown depth"
            given.faults.append(Fault("cut", text, "--cut says where they begin"))
        return (EVEN,)
    others = pp - 2 + ends.count(None)
    each = (layers - sum([n or 0 for n in ends]) + sum(less)) // max(1, others)
    ranks = [each if ends[0] is None else ends[0], *[each] * (pp - 2), each if ends[1] is None else ends[1]]
    counts = [n // chunks for n in ranks] * chunks
    counts[0] -= less[0]
    counts[-1] -= less[1]
    if min(counts) < 0 or sum(counts) != layers:
        stages = f"{pp * chunks} stages" + (f", {chunks} a rank" if chunks > 1 else "")
        text = f"{given.name}: {layers} layers cannot be shared out to {stages}, as it says"
        given.faults.append(Fault("cut", text, "--cut says where they begin"))
        return ()
    return cut_of(counts)


def _counted(given: _Given) -> list[int]:
    """Whether the embedding and the head count as a layer."""
    return [int(given[f"account-for-{what}-in-pipeline-split"]) for what in ("embedding", "loss")]


def _zero(given: _Given) -> int:
    if given["use-torch-fsdp2"]:
        return 2 if given["torch-fsdp2-no-reshard-after-forward"] else 3
    if given["use-megatron-fsdp"]:
        return FSDP_STRATEGIES.index(given["data-parallel-sharding-strategy"])
    return int(given["use-distributed-optimizer"])


def _bucket_mb(given: _Given, ranks: int, precision: Precision) -> float:
    """MiB of gradients in a bucket, where so many ranks reduce them."""
    if not given["overlap-grad-reduce"] or given["ddp-num-buckets"] == 1:
        return math.inf
    if given["ddp-num-buckets"]:
        text = f"{given.name}: {given['ddp-num-buckets']} buckets of gradients"
        given.faults.append(Fault("bucket_mb", text, "--bucket-mb says how large they are"))
    elements = given["ddp-bucket-size"] or max(_LEAST_BUCKET, _BUCKET_OF_RANK * ranks)
    return 0.0 if elements == 1 else elements * gradient_bytes(precision) / MIB


def _recompute(given: _Given, gathers: bool, layers: int | None, pp: int) -> str:
    how = "selective" if given["recompute-activations"] else given["recompute-granularity"]
    method, number, modules = (given[f"recompute-{kind}"] for kind in ("method", "num-layers", "modules"))
    if how is None:
        return "gathers" if gathers else "none"  # what sequence or context parallelism gathers is not saved
    if how == "selective":
        if modules not in (None, _CORE_ATTENTION):
            text = f"{given.name}: recomputation of {' '.join(modules) or 'nothing'}"
            given.faults.append(Fault("recompute", text, "nearest: --recompute attention"))
        return "attention"
    whole = method == "uniform" and number in (None, 1)
    if not whole and not (method == "block" and layers is not None and number is not None and number * pp >= layers):
        text = f"{given.name}: full recomputation, method {method}, of {number or 'no number of'} layers"
        given.faults.append(Fault("recompute", text, "nearest: --recompute full, of each layer by itself"))
    return "full"


def _precision(given: _Given) -> Precision:
    if given["bf16"] and given["fp16"]:
        raise UsageError(f"{given.name}: --bf16 and --fp16 exclude each other", "give one")
    if given["bf16"]:
        return Precision("bf16", "bf16" if given["grad-reduce-in-bf16"] else "fp32")
    if given["fp16"]:
        return Precision("fp16", "fp32" if given["accumulate-allreduce-grads-in-fp32"] else "fp16")
    return Precision()
