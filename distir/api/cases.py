"""Measured training runs in a CSV file: its columns, its rows, and the model, plan and cluster that a row describes.

`docs/accuracy.md` describes the file column by column. Lines that begin with `#` are comments.
"""

from __future__ import annotations

import csv
import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from distir.api.interop.plan_settings import CONTEXT, nested, splits_of
from distir.api.model import PRECISIONS, Precision
from distir.hardware import FP8, load_cluster, load_runtime
from distir.ir.errors import DistirError, UsageError
from distir.ir.host_runtime import Runtime
from distir.models.decoder import ARCHITECTURES, Decoder
from distir.transforms.pipeline.keep_whole import GATHERED_AGAIN
from distir.transforms.pipeline.schedule import SCHEDULES
from distir.transforms.plan import AXES, BUCKET_MB, EVEN, MIB, Plan

MLP = "mlp"
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": ARCHITECTURES["gpt"],
    "llama": ARCHITECTURES["llama"],
    "mpt": {**ARCHITECTURES["gpt"], "bias": False},
}
"""The parts of the decoders, by family. MPT's layers are GPT-2's, without biases of products."""
VOCAB = 51_200
"""The size of the vocabulary where the cell is empty: GPT-2's, padded as Megatron-LM pads it."""
CLIP_NORM = 1.0
"""Megatron-LM, Composer and torchtitan limit the norm of all gradients to 1 by default: decoders are trained so."""
DROPOUT = 0.1
"""Megatron-LM's ratio of dropout by default, in the years of its runs with unfused attention."""
_FUSED = ("flash", "fused")
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
_NONE = "none"
_COMPILED = "torch.compile=1"
"""How notes say that PyTorch compiled the model."""
_ASYNC = re.compile(
    r"(?<!no )(?<!without )async[-_ ](tp|tensor[-_ ]parallel(ism)?)\b(?!\s*=\s*(0|false))", re.IGNORECASE
)
"""How notes say that torchtitan sent tensor parallelism's activations in pieces beside products."""
_BEFORE_2022 = ("megatron-2020", "sc21")
"""How sources of published runs begin that are older than Megatron-LM's `--no-async-tensor-model-parallel-allreduce`:
until 2021 `copy_to_tensor_model_parallel_region` waited for the sum of gradients, which since then is sent beside the
product of the weight's (github NVIDIA/Megatron-LM, megatron/mpu/layers.py: aed2f75 and 02bb1f5). Sequence parallelism
came with the latter."""
PEAKS = "allocated", "reserved", "used"
"""Which memory was measured: what the allocator handed out, what it held, or all of the device that was in use."""
NO_SOURCE = "(no source)"
"""What the source of a row is called that does not name one; it is not predicted."""
_MOST = 1 << 53
"""Numbers up to here are exact in a float."""


@dataclass(frozen=True)
class Perceptron:
    """The sizes of `distir.models.mlp`: `layers` square weights of `hidden` by `hidden`, `batch` samples a step."""

    layers: int
    hidden: int
    batch: int


class Setup(NamedTuple):
    """What a run's program is made of: equal setups have the same program.

    `optimizer` is None for a step without one. `cluster`: a shipped one, or a .toml file.
    """

    model: Decoder | Perceptron
    precision: Precision
    optimizer: str | None
    plan: Plan
    cluster: str


class Measurement(NamedTuple):
    """A measured run: a row of the file.

    `measured_seconds` of a step and `measured_gib`, the peak of memory on a device, are None where the file does not
    say. `peak_of` is one of PEAKS. `runtime` is the software that executed the run. `setup` is None where distir cannot
    express the run; then `reason` says why.
    """

    id: str
    source: str
    line: int
    measured_seconds: float | None
    measured_gib: float | None
    peak_of: str
    runtime: str
    setup: Setup | None
    reason: str | None


def _whole(text: str) -> int:
    n = int(text)
    if not 1 <= n <= _MOST:
        raise ValueError(text)
    return n


def _positive(text: str) -> float:
    x = float(text)
    if not 0 < x < math.inf:
        raise ValueError(text)
    return x


def _ratio(text: str) -> float:
    x = float(text)
    if not 0 <= x < 1:
        raise ValueError(text)
    return x


def _flag(text: str) -> bool:
    return bool(("0", "1").index(text))


def _stage(text: str) -> int:
    return ("0", "1", "2", "3").index(text)


def _counted(text: str) -> str:
    return PEAKS[PEAKS.index(text)]


_EXPECTED: dict[Callable[[str], Any], str] = {
    _whole: "a whole number of at least 1",
    _positive: "a number above 0",
    _ratio: "a number of at least 0 and below 1",
    _flag: "0 or 1",
    _stage: "0, 1, 2 or 3",
    _counted: "allocated, reserved or used",
}


class CsvColumn(NamedTuple):
    """A column of the file: how a cell is read (ValueError if it cannot be), and what an empty cell means.

    `needed`: the file must have the column, and a row without it cannot be predicted.
    """

    read: Callable[[str], Any]
    empty: Any = None
    needed: bool = False


COLUMNS: dict[str, CsvColumn] = {
    "id": CsvColumn(str, ""),
    "source": CsvColumn(str, None, True),
    "model_family": CsvColumn(str, None, True),
    "layers": CsvColumn(_whole, None, True),
    "hidden": CsvColumn(_whole, None, True),
    "heads": CsvColumn(_whole),
    "kv_heads": CsvColumn(_whole, 0),
    "ffn_hidden": CsvColumn(_whole, 0),
    "vocab": CsvColumn(_whole, VOCAB),
    "seq": CsvColumn(_whole),
    "global_batch": CsvColumn(_whole, None, True),
    "micro_batch": CsvColumn(_whole, None, True),
    "dp": CsvColumn(_whole, 1),
    "tp": CsvColumn(_whole, 1),
    "pp": CsvColumn(_whole, 1),
    "vpp": CsvColumn(_whole, 1),
    "cp": CsvColumn(_whole, 1),
    "ep": CsvColumn(_whole, 1),
    "zero_stage": CsvColumn(_stage, 0),
    "sequence_parallel": CsvColumn(_flag, False),
    "recompute": CsvColumn(str, _NONE),
    "attention": CsvColumn(str, ""),
    "dropout": CsvColumn(_ratio),
    "tied": CsvColumn(_flag),
    "dtype": CsvColumn(str, None, True),
    "grad_dtype": CsvColumn(str, ""),
    "optimizer": CsvColumn(str, _NONE),
    "schedule": CsvColumn(str, ""),
    "overlap_grad_reduce": CsvColumn(_flag, False),
    "cluster": CsvColumn(str, None, True),
    "runtime": CsvColumn(str, ""),
    "gpus": CsvColumn(_whole),
    "measured_step_s": CsvColumn(_positive, None, True),
    "measured_peak_gib": CsvColumn(_positive),
    "measured_peak_of": CsvColumn(_counted, ""),
    "measured_tokens_per_s_per_gpu": CsvColumn(_positive),
    "notes": CsvColumn(str, ""),
}
"""In the order of the file; other columns are ignored, but for those whose names are nearly one that is left out."""
_FOR_THE_READER = ("gpus", "measured_tokens_per_s_per_gpu", "notes")
"""Columns without which a row is predicted all the same."""


def read_rows(path: str | os.PathLike[str]) -> list[Measurement]:
    """The rows of a file of measured runs.

    A row with a bad cell, or that distir cannot express, has a reason and no setup. Raises UsageError for a file that
    cannot be read, is no CSV, lacks a column that is needed, or has no rows.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(file, name))
    except OSError as e:
        raise UsageError(f"cannot read {name}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{name} is not text", "a file of measured runs is CSV, in UTF-8") from e
    if not rows:
        raise UsageError(f"{name} has no rows", "a header, then a line a measured run")
    return rows


def _rows(lines: Iterator[str], name: str) -> Iterator[Measurement]:
    begins = [0]

    def uncommented() -> Iterator[str]:
        quoted = False  # whether the line begins inside a cell: there # begins no comment
        for number, line in enumerate(lines, 1):
            if quoted or not line.startswith("#"):
                begins.append(number)
                quoted ^= line.count('"') % 2 == 1
                yield line

    reader = csv.reader(uncommented(), strict=True)
    try:
        header: list[str] | None = None
        for cells in reader:
            line, begins[1:] = begins[1], []
            if not any(map(str.strip, cells)):
                continue
            if header is None:
                header = [c.strip() for c in cells]
                _check_header(header, f"{name}, line {line}")
            else:
                yield _row(header, [c.strip() for c in cells], f"{name}, line {line}", line)
    except csv.Error as e:
        raise UsageError(f"{name}, line {begins[-1]}: {e}", "a file of measured runs is CSV") from e


def _check_header(header: list[str], where: str) -> None:
    if twice := [c for k, c in enumerate(header) if c in header[:k]]:
        raise UsageError(f"{where}: the column {twice[0]!r} is there twice")
    for column in COLUMNS:
        if column in header:
            continue
        others = [c for c in header if c not in COLUMNS] if column not in _FOR_THE_READER else []
        near = difflib.get_close_matches(column, others, 1, 0.8)
        if near or COLUMNS[column].needed:
            hint = (
                f"is it {near[0]!r}?" if near else f"needed are {', '.join(k for k, c in COLUMNS.items() if c.needed)}"
            )
            raise UsageError(f"{where}: no column {column!r}", hint)


def reason_of(e: DistirError) -> str:
    """An error as the reason why a row is not predicted: with what was meant, if its hint says that."""
    meant, ends, _ = (e.hint or "").partition("?")
    return f"{e.message}: {meant}?" if ends and meant.startswith("did you mean") else e.message


class _CellError(DistirError):
    """A cell of another form than its column's."""


def _row(header: list[str], cells: list[str], where: str, line: int) -> Measurement:
    """A row of the file, its first fault as its reason."""
    reason: str | None = None
    if len(cells) != len(header):
        reason = f"{where}: expected {len(header)} cells, got {len(cells)}"
    values: dict[str, Any] = {}
    given = dict(zip(header, cells, strict=False))
    for name, column in COLUMNS.items():
        text = given.get(name, "")
        values[name] = column.empty
        if text:
            try:
                values[name] = column.read(text)
            except ValueError:
                expected = _EXPECTED[column.read]
                reason = reason or f"{where}, column {name}: expected {expected}, got {text[:40]!r}"
        elif name == "measured_step_s":
            reason = reason or f"{where}, column {name}: empty"
    setup = None
    values["runtime"] = values["runtime"] or _runtime(values)
    if values["dtype"] == FP8:  # what is not a product of a weight is in 16 bits
        values["dtype"] = "bf16"
        if FP8 not in values["runtime"].split("+"):
            values["runtime"] += f"+{FP8}"
    if reason is None:
        try:
            setup = _setup(values)
        except DistirError as e:
            reason = reason_of(e)
    return Measurement(
        values["id"] or f"line {line}",
        values["source"] or NO_SOURCE,
        line,
        values["measured_step_s"],
        values["measured_peak_gib"],
        values["measured_peak_of"] or _reported(values),
        values["runtime"],
        setup,
        reason,
    )


def _runtime(values: Mapping[str, Any]) -> str:
    """The software that a run was executed by, where the file does not say it: that of which its cluster has figures;
    else decoders of Megatron's families with whole parameters on each replica by Megatron-LM; Llama with sharded ones
    by torchtitan, MPT by Composer, all else by PyTorch, in eager mode unless the notes say that it compiled."""
    if own := _own_runtime(values["cluster"]):
        return own.name
    if values["model_family"] in ("gpt", "llama") and values["zero_stage"] < 3:
        old = (values["source"] or "").lower().startswith(_BEFORE_2022) and not values["sequence_parallel"]
        return "megatron+sync" if old else "megatron"
    compiled = _COMPILED in values["notes"]
    if values["model_family"] == "llama":
        if compiled and values["tp"] > 1 and _ASYNC.search(values["notes"]):
            return "torchtitan-async"
        return "torchtitan-compiled" if compiled else "torchtitan"
    if values["model_family"] == "mpt" and not compiled:
        return "composer"
    return "torch-compiled" if compiled else "torch-eager"


def _reported(values: Mapping[str, Any]) -> str:
    """The memory that the software of a run reports."""
    try:
        return _runtime_of(values).reports
    except DistirError:  # it is the row's reason once the row is predicted
        return PEAKS[0]


def _runtime_of(values: Mapping[str, Any]) -> Runtime:
    return runtime_named(values["runtime"], values["cluster"] or "")


@cache
def _own_runtime(cluster: str | None) -> Runtime | None:
    """The runtime that a cluster's figures were measured with; None without one, or without such a cluster."""
    try:
        regular = load_cluster(cluster or "").regular
    except DistirError:  # it is the row's reason once the row is predicted
        return None
    return regular and regular.runtime


def runtime_named(name: str, cluster: str) -> Runtime:
    """A cluster's own runtime, if that is its name, or the shipped one. Raises UsageError if there is none."""
    return load_runtime(name, _own_runtime(cluster))


def _setup(values: Mapping[str, Any]) -> Setup:
    """What a row describes. Raises DistirError, with the reason, where distir cannot express it."""
    for name, column in COLUMNS.items():
        if column.needed and values[name] is None:
            raise UsageError(f"{name} is not given")
    if values["ep"] > 1:
        raise UsageError(f"ep {values['ep']}: the file's models have no experts")
    dtype = values["dtype"]
    if dtype not in PRECISIONS:
        raise UsageError(f"dtype {dtype} is none of {', '.join([*PRECISIONS, FP8])}")
    model = _model(values)
    if isinstance(model, Perceptron):
        if dtype != "fp32" or values["optimizer"] != _NONE:
            raise UsageError(f"the step of an {MLP} is in fp32, without optimizer")
        if values["cp"] > 1:
            raise UsageError(f"cp {values['cp']}: an {MLP} has no sequences")
        return Setup(model, Precision(), None, _plan(values), values["cluster"])
    if values["optimizer"] not in _OPTIMIZERS:
        wrong = "is not given" if values["optimizer"] == _NONE else f"{values['optimizer']} is unknown"
        raise UsageError(f"optimizer {wrong}: expected {', '.join(_OPTIMIZERS)}")
    precision = Precision(dtype, _grad_dtype(values))
    if precision.gradients not in ("fp32", dtype):
        raise UsageError(f"grad_dtype {precision.gradients} is neither fp32 nor the dtype, {dtype}")
    return Setup(model, precision, _OPTIMIZERS[values["optimizer"]], _plan(values), values["cluster"])


def _model(values: Mapping[str, Any]) -> Decoder | Perceptron:
    family, batch = values["model_family"], values["global_batch"]
    if family == MLP:
        return Perceptron(values["layers"], values["hidden"], batch)
    if family not in FAMILIES:
        raise UsageError(f"model_family {family} is none of {', '.join([*FAMILIES, MLP])}")
    for name in ("heads", "seq"):
        if values[name] is None:
            raise UsageError(f"{name} is not given")
    sizes = {name: values[name] for name in ("layers", "hidden", "heads", "kv_heads", "vocab", "seq")}
    if values["attention"] not in ("", "unfused", *_FUSED):
        raise UsageError(f"attention {values['attention']} is none of unfused, {', '.join(_FUSED)}")
    unfused = values["attention"] == "unfused"
    own = {"separate": _runtime_of(values).separate, "ffn": values["ffn_hidden"], "batch": batch}
    own |= {"attention": "unfused" if unfused else "fused", "dropout": DROPOUT if unfused else 0.0}
    given = {name: values[name] for name in ("dropout", "tied") if values[name] is not None}
    return Decoder(**{**FAMILIES[family], **sizes, **own, **given})


def _recompute(values: Mapping[str, Any]) -> str:
    """What is recomputed: selective recomputation of unfused attention is that of Megatron-LM, else the runtime's;
    where the runtime saves shards only, what sequence and context parallelism gather (as `interop.from_megatron` has
    it)."""
    if values["recompute"] == "selective":
        return "attention" if values["attention"] == "unfused" else _runtime_of(values).selective
    gathered = (values["sequence_parallel"] and values["tp"] > 1) or values["cp"] > 1
    again = values["recompute"] == _NONE and gathered and _runtime_of(values).gathers_again
    return "gathers" if again else values["recompute"]


def _plan(values: Mapping[str, Any]) -> Plan:
    replicas, micro, batch = values["dp"], values["micro_batch"], values["global_batch"]
    if batch % (replicas * micro):
        raise UsageError(f"a batch of {batch} is no whole number of microbatches: dp {replicas} x micro_batch {micro}")
    chunks, schedule = values["vpp"], values["schedule"] or ("interleaved" if values["vpp"] > 1 else _NONE)
    if schedule == _NONE and values["pp"] > 1:
        schedule = "" if values["schedule"] else "1f1b"
    if schedule not in (*SCHEDULES, _NONE):
        raise UsageError(f"schedule {values['schedule']} with pp {values['pp']}: known are {', '.join(SCHEDULES)}")
    if chunks > 1 and schedule != "interleaved":
        raise UsageError(f"vpp {chunks} needs the schedule interleaved, got {schedule}")
    if values["recompute"] not in (_NONE, "selective", "full"):
        raise UsageError(f"recompute {values['recompute']} is none of none, selective, full")
    once = values["zero_stage"] == 3 and values["pp"] > 1 and _runtime_of(values).gathers_once
    overlap = values["overlap_grad_reduce"] and not once
    plan = Plan(
        **{f.name: values[f.name] for f in AXES},
        microbatches=batch // (replicas * micro),
        schedule="1f1b" if schedule == _NONE else schedule,
        chunks=chunks,
        overlap=overlap,
        bucket_mb=_bucket_mb(values) if overlap else math.inf,  # Megatron-LM reduces one buffer of all
        zero=1 if once else values["zero_stage"],
        gathered_again=_gathered_again(values),
        sequence_parallel=values["sequence_parallel"],
        recompute=_recompute(values),
        split=splits_of({CONTEXT: values["cp"]}),
    )
    if values["gpus"] not in (None, plan.size):
        raise UsageError(f"gpus is {values['gpus']}, the product of dp, tp, pp and cp {plan.size}")
    return replace(plan, order=_order(plan, values), cut=_cut(values))


def _bucket_mb(values: Mapping[str, Any]) -> float:
    """MiB of gradients in a bucket."""
    bucket = _runtime_of(values).bucket
    if bucket is None:
        return BUCKET_MB
    least, each = bucket
    size = 4 if _grad_dtype(values) == "fp32" else 2
    return max(least, each * values["dp"] * values["cp"]) * size / MIB


def _grad_dtype(values: Mapping[str, Any]) -> str:
    return values["grad_dtype"] or ("fp16" if values["dtype"] == "fp16" else "fp32")


def _gathered_again(values: Mapping[str, Any]) -> str:
    """What backward passes gather again: in a pipeline all, as each microbatch in flight would have its own copy."""
    return _runtime_of(values).gathered_again if values["pp"] == 1 else GATHERED_AGAIN[0]


def _cut(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the stages of a decoder begin: at equal numbers of layers, if its runtime has that; else none."""
    return (EVEN,) if _runtime_of(values).even_stages and values["layers"] >= values["pp"] * values["vpp"] > 1 else ()


def _order(plan: Plan, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The order of axes, fastest first: as Megatron-LM has it, but where the runtime numbers stages first."""
    order = nested(plan)
    if _runtime_of(values).stages_first:
        return "pp", *[name for name in order if name != "pp"]
    return order
