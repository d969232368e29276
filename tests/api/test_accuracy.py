"""The accuracy of predictions: scores against brute force, rows against `distir simulate`, bad and impossible rows."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.api.accuracy import _RECENT, GIB, _program, accuracy, cost_of, in_turn, predict, program_of, score
from distir.api.cases import COLUMNS, Measurement, Perceptron, read_rows, runtime_named
from distir.api.interop.from_megatron import read_megatron
from distir.api.interop.plan_settings import in_effect
from distir.api.scores import Case, Scores, ranks, scores, spearman
from distir.cli import main
from distir.executor.cost_model import CostModel
from distir.hardware import load_runtime
from distir.ir import Topology
from distir.ir.errors import UsageError, WorkerError
from distir.models.decoder import Decoder
from distir.runtime.forked import can_fork
from distir.transforms.plan import BUCKET_MB, Plan

ROOT = Path(__file__).parent.parent.parent
GPT: dict[str, Any] = {
    "id": "gpt-0",
    "source": "lab",
    "model_family": "gpt",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "vocab": 128,
    "seq": 32,
    "global_batch": 16,
    "micro_batch": 2,
    "dp": 2,
    "tp": 2,
    "pp": 2,
    "recompute": "full",
    "dtype": "fp16",
    "grad_dtype": "fp32",
    "optimizer": "adam",
    "schedule": "1f1b",
    "overlap_grad_reduce": 0,
    "cluster": "dgx-a100",
    "gpus": 8,
    "measured_step_s": 0.01,
}
MLP: dict[str, Any] = {
    "id": "mlp-0",
    "source": "old",
    "model_family": "mlp",
    "layers": 4,
    "hidden": 256,
    "global_batch": 64,
    "micro_batch": 16,
    "tp": 2,
    "pp": 1,
    "dtype": "fp32",
    "optimizer": "none",
    "cluster": "dgx-h100",
    "measured_step_s": 0.002,
    "measured_peak_gib": 0.5,
}


@pytest.fixture
def table(tmp_path: Path):
    """Writes a file of rows."""

    def write(*rows: dict[str, Any], head: str = "") -> Path:
        names = list(dict.fromkeys([*[n for n, c in COLUMNS.items() if c.needed], *[n for row in rows for n in row]]))
        lines = [",".join(names), *[",".join([str(row.get(n, "")) for n in names]) for row in rows]]
        path = tmp_path / "runs.csv"
        path.write_text(head + "\n".join(lines) + "\n")
        return path

    return write


# --- scores


def brute_rank(numbers: list[float], k: int) -> float:
    """The mean place of a number over all orders in which equal numbers may stand."""
    return 1 + sum(x < numbers[k] for x in numbers) + (sum(x == numbers[k] for x in numbers) - 1) / 2


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_ranks(numbers: list[int]) -> None:
    assert ranks(numbers).tolist() == [brute_rank(list(numbers), k) for k in range(len(numbers))]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=8))
def test_spearman_is_the_correlation_of_ranks(pairs: list[tuple[int, int]]) -> None:
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    found = spearman(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found is None
    else:
        x, y = ([brute_rank(v, k) for k in range(len(v))] for v in (a, b))
        assert found == pytest.approx(statistics.correlation(x, y), abs=1e-12)


def brute(cases: list[Case]) -> Scores:
    """The scores by their definitions, in plain Python."""
    errors = [c.predicted / c.measured - 1 for c in cases]
    sizes = sorted(abs(e) for e in errors)

    def percentile(q: float) -> float:
        at = q * (len(sizes) - 1)
        low = math.floor(at)
        return sizes[low] + (at - low) * (sizes[min(low + 1, len(sizes) - 1)] - sizes[low])

    found: list[tuple[float, int]] = []
    for model in {c.model for c in cases}:
        of = [c for c in cases if c.model == model]
        times = [c.measured for c in of], [c.predicted for c in of]
        if len(of) > 2 and all(len(set(t)) > 1 for t in times):
            x, y = ([brute_rank(t, k) for k in range(len(t))] for t in times)
            found.append((statistics.correlation(x, y), len(of)))
    regrets: list[float] = []
    for choice in {c.choice for c in cases}:
        of = [c for c in cases if c.choice == choice]
        if len(of) > 1:
            quickest = min(c.predicted for c in of)
            chosen = next(c for c in of if c.predicted == quickest)
            regrets.append(chosen.measured / min(c.measured for c in of) - 1)
    peaks = [abs(c.predicted_peak - c.measured_peak) / c.measured_peak for c in cases if c.measured_peak]
    return Scores(
        len(cases),
        statistics.fmean(sizes),
        percentile(0.5),
        percentile(0.9),
        sizes[-1],
        statistics.fmean(errors),
        sum(r * n for r, n in found) / sum(n for _, n in found) if found else None,
        statistics.fmean(regrets) if regrets else None,
        statistics.fmean(peaks) if peaks else None,
    )


TIMES = st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0])


@given(
    st.lists(
        st.builds(
            Case,
            TIMES,
            TIMES,
            st.sampled_from("ab"),
            st.sampled_from("xyz"),
            st.none() | TIMES,
            TIMES,
        ),
        min_size=1,
        max_size=9,
    )
)
def test_scores(cases: list[Case]) -> None:
    for a, b in zip(scores(cases), brute(cases), strict=True):
        assert (a is None) == (b is None)
        assert a == pytest.approx(b, abs=1e-12)


def test_scores_of_nothing() -> None:
    assert scores([]) == Scores(0, *[None] * 8)


def test_the_choice_is_between_runs_of_one_model_on_as_many_devices_with_one_batch(table) -> None:
    """The row that is predicted quickest is not the one measured quickest; another batch is another choice."""
    slow = {**GPT, "id": "b", "dp": 1, "tp": 4, "measured_step_s": 0.005}
    path = table(GPT, slow, {**GPT, "id": "c", "global_batch": 32, "measured_step_s": 0.001})
    found = accuracy(path)
    quick, other, _ = [scored.predicted.seconds for scored in found.rows if scored.predicted]
    assert quick < other
    assert found.sources["lab"].regret == pytest.approx(1.0)
    assert found.sources["lab"].spearman == pytest.approx(-0.5, abs=1)


# --- predictions


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_row_is_predicted_as_simulate_does(table, capsys: pytest.CaptureFixture[str]) -> None:
    row, *others = read_rows(
        table(
            *[{**GPT, "overlap_grad_reduce": 1, "measured_peak_of": of} for of in ("used", "", "allocated", "reserved")]
        )
    )
    found = score(row)
    assert found.predicted is not None
    sizes = "gpt:layers=2,hidden=64,heads=4,vocab=128,seq=32,batch=16"
    step = "--loss cross-entropy --optimizer adamw --clip-norm 1 --precision fp16 --grad-dtype fp32"
    plan = "--dp 2 --tp 2 --pp 2 --microbatches 4 --cut 1.norm1.weight --recompute full --overlap --runtime megatron"
    want = simulated(capsys, sizes, *step.split(), *plan.split(), "--cluster", "dgx-a100")
    assert found.predicted.seconds == want["step_seconds"]
    assert found.predicted.peak_bytes == max(s["peak_memory"] for s in want["stages"])
    parts = [s["memory_at_peak"] for s in want["stages"]]
    beside = "allocator slack", "communication buffers", "context"
    for other, left_out in zip(others, (beside, beside, beside[1:]), strict=True):
        predicted = score(other).predicted
        assert predicted is not None
        assert predicted.peak_bytes == max(sum(row.values()) - sum(row[k] for k in left_out) for row in parts)


def test_sequence_and_context_parallelism_of_megatron_gather_again(table) -> None:
    """It saves shards (arXiv 2205.05198, section 4.2.2), and Transformer Engine what a device has of keys and values;
    other recomputation has these gathers in it."""
    row = {**GPT, "sequence_parallel": 1, "recompute": "none"}
    whole = {"sequence_parallel": 0}
    others = {"runtime": "torch-eager"}, whole, {"recompute": "full"}, {**whole, "cp": 2, "gpus": ""}
    found = [r.setup and r.setup.plan.recompute for r in read_rows(table(row, *[{**row, **other} for other in others]))]
    assert found == ["gathers", "none", "none", "full", "gathers"]


def test_fp8_is_of_products_of_weights(table) -> None:
    """The program is that of bf16; products are quicker where the device has such ones, whatever the runtime is."""
    row = {**GPT, "dtype": "bf16", "grad_dtype": "", "cluster": "dgx-h100", "hidden": 4096, "seq": 2048}
    cells = [{}, {"dtype": "fp8"}, {"runtime": "megatron+fp8"}, {"cluster": "eos-h100"}]
    rows = read_rows(table(*[{**row, **more} for more in cells], {**row, "cluster": "eos-h100", "dtype": "fp8"}))
    assert [row.runtime for row in rows] == [
        "megatron",
        "megatron+fp8",
        "megatron+fp8",
        "megatron-core",
        "megatron-core+fp8",
    ]
    assert len({row.setup and row.setup.precision for row in rows}) == 1
    seconds = [found.predicted.seconds for found in map(score, rows) if found.predicted]
    assert seconds[1] == seconds[2] < seconds[0]
    assert seconds[4] < seconds[3]
    (old,) = read_rows(table({**row, "cluster": "dgx-a100", "dtype": "fp8"}))
    assert score(old).reason == "megatron+fp8: the devices of dgx-a100 have no peak of 8 bits"


def test_attention_may_be_another_kernel_than_the_runtimes(table) -> None:
    """A variant of the cluster's own runtime, with products in 16 bits and in 8."""
    row = {**GPT, "dtype": "bf16", "grad_dtype": "", "cluster": "eos-h100", "hidden": 4096, "seq": 2048}
    cells = [{}, *[{"runtime": f"megatron-core{variants}"} for variants in ("+flash2", "+flash2", "+fp8+flash2")]]
    dtypes = [{}, {}, {"dtype": "fp8"}, {"dtype": "fp8"}]
    own, flash, *narrow = read_rows(table(*[{**row, **a, **b} for a, b in zip(cells, dtypes, strict=True)]))
    assert own.runtime == "megatron-core"
    assert [x.runtime for x in narrow] == ["megatron-core+flash2+fp8", "megatron-core+fp8+flash2"]
    quick, slow = (found.predicted.seconds for found in map(score, (own, flash)) if found.predicted)
    assert quick < slow


def test_the_runtime_of_a_measured_cluster_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        (Path(__file__).parents[1] / "calibrated.toml").read_text().replace("call_us = 17.8896", "call_us = 3e6")
    )
    assert runtime_named("distir+flash2", str(file)).call == 3.0
    assert runtime_named("distir+flash2", "dgx-h100") is load_runtime("distir+flash2")


def test_dropout_and_a_head_of_its_own(table) -> None:
    """Without the cells dropout is that of Megatron's unfused attention, and the head is the family's."""
    cells: list[dict[str, Any]] = [
        {"attention": "flash"},
        {"attention": "unfused"},
        {"attention": "flash", "dropout": 0.2, "tied": 0},
        {"attention": "unfused", "dropout": 0},
        {"model_family": "llama", "tied": 1},
    ]
    rows = read_rows(table(*[{**GPT, **row} for row in cells]))
    models = [row.setup.model for row in rows if row.setup]
    assert [(m.attention, m.dropout, m.tied) for m in models if isinstance(m, Decoder)] == [
        ("fused", 0.0, True),
        ("unfused", 0.1, True),
        ("fused", 0.2, False),
        ("unfused", 0.0, True),
        ("fused", 0.0, True),
    ]
    (bad,) = read_rows(table({**GPT, "dropout": 1}))
    assert bad.reason is not None
    assert bad.reason.endswith("column dropout: expected a number of at least 0 and below 1, got '1'")


def test_llama_with_sharded_weights_is_torchtitans(table) -> None:
    """Its products, its selective recomputation (a compiler saves what is needed), what it gathers again, its log."""
    eager = {**GPT, "model_family": "llama", "tp": 1, "pp": 1, "gpus": 2, "zero_stage": 3, "recompute": "selective"}
    compiled, other = (
        {**eager, "notes": "torch.compile=1"},
        {**eager, "model_family": "mpt", "measured_peak_of": "used"},
    )
    piped = {**compiled, "measured_peak_of": "allocated", "dp": 1, "pp": 2}
    rows = read_rows(table(eager, compiled, other, piped))
    setups = [row.setup for row in rows if row.setup]
    assert [s.plan.recompute for s in setups] == ["all-products", "products", "selective", "products"]
    assert [s.plan.gathered_again for s in setups] == ["blocks", "blocks", "all", "all"]
    assert [s.model.separate for s in setups] == [True, True, False, True]  # type: ignore[union-attr]
    assert [row.peak_of for row in rows] == ["reserved", "reserved", "used", "allocated"]


def test_a_llama_with_everything(table, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"model_family": "llama", "kv_heads": 2, "ffn_hidden": 96, "layers": 4, "vpp": 2, "schedule": "interleaved"}
    more |= {"zero_stage": 1, "sequence_parallel": 1, "recompute": "selective", "overlap_grad_reduce": 1}
    (row,) = read_rows(table({**GPT, **more, "dtype": "bf16", "grad_dtype": "bf16", "cluster": "dgx-h100"}))
    sizes = "llama:layers=4,hidden=64,heads=4,kv_heads=2,ffn=96,vocab=128,seq=32,batch=16"
    step = "--loss cross-entropy --optimizer adamw --clip-norm 1 --precision bf16 --grad-dtype bf16"
    plan = "--dp 2 --tp 2 --pp 2 --microbatches 4 --recompute selective --schedule interleaved --chunks 2 --zero 1"
    plan += " --cut 1.norm1.weight,2.norm1.weight,3.norm1.weight"
    words = [*step.split(), *plan.split(), "--sequence-parallel", "--cluster", "dgx-h100", "--runtime", "megatron"]
    want = simulated(capsys, sizes, *words)
    predicted = score(row).predicted
    assert predicted is not None
    assert predicted.seconds == want["step_seconds"]


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        ({"recompute": "none"}, ""),
        ({"recompute": "none", "sequence_parallel": 1}, "--sequence-parallel"),
        ({"recompute": "none", "sequence_parallel": 1, "tp": 1, "gpus": 4}, "--sequence-parallel"),
        ({"recompute": "selective", "attention": "unfused"}, "--recompute-granularity selective"),
        ({"sequence_parallel": 1}, "--sequence-parallel --recompute-granularity full --recompute-method uniform"),
        ({"recompute": "none", "cp": 2, "gpus": 16}, "--context-parallel-size 2"),
        (
            {"recompute": "none", "cp": 2, "gpus": 16, "sequence_parallel": 1},
            "--context-parallel-size 2 --sequence-parallel",
        ),
    ],
)
def test_rows_and_arguments_of_megatron_are_the_same_plan(table, tmp_path, row: dict[str, Any], arguments: str) -> None:
    """Without --overlap-grad-reduce: gradients are reduced at once, and streams run beside each other, which of a row
    `predict` says."""
    (found,) = read_rows(table({**GPT, "runtime": "megatron", **row}))
    assert found.setup is not None
    tp, gpus = row.get("tp", GPT["tp"]), row.get("gpus", GPT["gpus"])
    sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size 2 --fp16"
    file = tmp_path / "arguments"
    file.write_text(f"{sizes} --micro-batch-size 2 --global-batch-size 16 {arguments}")
    read = Plan(**read_megatron(file, gpus).fields)
    assert not found.setup.plan.overlap
    plan = replace(found.setup.plan, overlap=True)
    assert in_effect(plan) == in_effect(replace(read, loss_gradient=plan.loss_gradient, cut=plan.cut))


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_row_with_context_parallelism(table, sequence: int, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = read_rows(table({**GPT, "cp": 2, "gpus": 16, "overlap_grad_reduce": 1, "sequence_parallel": sequence}))
    sizes = "gpt:layers=2,hidden=64,heads=4,vocab=128,seq=32,batch=16"
    step = "--loss cross-entropy --optimizer adamw --clip-norm 1 --precision fp16 --grad-dtype fp32"
    plan = "--dp 2 --tp 2 --pp 2 --split cp=2:*.1 --order tp,cp,dp,pp --microbatches 4 --cut 1.norm1.weight"
    words = [*step.split(), *plan.split(), "--recompute", "full", "--runtime", "megatron"]
    words += ["--sequence-parallel"] * sequence
    want = simulated(capsys, sizes, *words, "--cluster", "dgx-a100")
    predicted = score(row).predicted
    assert predicted is not None
    assert predicted.seconds == want["step_seconds"]


def test_an_mlp_is_a_forward_and_backward_pass_without_update(table) -> None:
    (row,) = read_rows(table(MLP))
    assert row.setup is not None
    assert row.setup.model == Perceptron(4, 256, 64)
    assert row.setup.plan == Plan(tp=2, microbatches=4, overlap=False, bucket_mb=math.inf)
    program = program_of(row)
    assert not program.updates
    assert [v.type.erased().global_shape for v in program.inputs] == [(64, 256)] * 2 + [(256, 256)] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"layers": 6, "pp": 3, "gpus": 12}, [0, 0, 1, 1, 2, 2]),
        ({"layers": 7, "pp": 3, "gpus": 12}, [0, 0, 1, 1, 1, 2, 2]),  # the last has the head, the first the embedding
        ({"layers": 6, "pp": 2, "vpp": 2, "schedule": "interleaved"}, [0, 1, 1, 0, 0, 1]),
        ({"layers": 5, "model_family": "llama", "runtime": "torchtitan"}, [0, 0, 1, 1, 1]),
        ({"layers": 1}, None),
        ({"runtime": "torch-eager"}, None),
        ({"pp": 1, "schedule": "none", "gpus": 4}, None),
    ],
)
def test_stages_have_equal_numbers_of_layers(table, changes: dict[str, Any], ranks: list[int] | None) -> None:
    """Of Megatron-LM and torchtitan; of other software, or where layers are too few, stages are balanced."""
    (row,) = read_rows(table({**GPT, **changes}))
    assert row.setup is not None
    assert row.setup.plan.cut == (() if ranks is None else ("even",))
    assert score(row).predicted is not None
    if ranks is not None:
        homes = {v.name: v.type.device for v in program_of(row).inputs}
        found = [homes[f"{k}.norm1.weight"] for k in range(len(ranks))]
        assert [home.name for home in found] == [f"stage{rank}" for rank in ranks]  # type: ignore[union-attr]


def test_fsdp_in_a_pipeline_gathers_and_reduces_once_a_step(table) -> None:
    fsdp = {
        **GPT,
        "model_family": "llama",
        "zero_stage": 3,
        "overlap_grad_reduce": 1,
        "grad_dtype": "fp32",
        "dtype": "bf16",
    }
    alone, piped = read_rows(table({**fsdp, "pp": 1, "schedule": "none", "gpus": 4}, fsdp))
    assert alone.setup is not None
    assert piped.setup is not None
    plans = alone.setup.plan, piped.setup.plan
    assert [(p.zero, p.overlap, p.bucket_mb) for p in plans] == [(3, True, BUCKET_MB), (1, False, math.inf)]


@pytest.mark.parametrize(
    ("changes", "numbers", "size"),
    [({"grad_dtype": "fp16"}, 40e6, 2), ({}, 40e6, 4), ({"dp": 64, "global_batch": 512}, 64e6, 4)],
)
def test_buckets_of_megatron_core_grow_with_the_replicas(
    table, changes: dict[str, Any], numbers: float, size: int
) -> None:
    core = {**GPT, "runtime": "megatron-core", "overlap_grad_reduce": 1, "gpus": "", **changes}
    (row,) = read_rows(table(core))
    assert row.setup is not None
    assert row.setup.plan.bucket_mb == numbers * size / 2**20


def test_empty_cells(table) -> None:
    bare = {k: v for k, v in GPT.items() if k not in ("recompute", "grad_dtype", "schedule", "vocab", "gpus", "id")}
    fp16, bf16, pipe = read_rows(table(bare, {**bare, "dtype": "bf16"}, {**bare, "vpp": 2, "layers": 8}))
    assert fp16.setup is not None
    assert bf16.setup is not None
    assert pipe.setup is not None
    assert (fp16.setup.precision, bf16.setup.precision) == (("fp16", "fp16"), ("bf16", "fp32"))
    assert fp16.setup.model.vocab == 51_200  # type: ignore[union-attr]
    given = {"overlap": False, "bucket_mb": math.inf, "cut": ("even",)}
    assert fp16.setup.plan == Plan(2, 2, 2, 4, **given)
    assert pipe.setup.plan == Plan(2, 2, 2, 4, "interleaved", chunks=2, **given)
    assert [r.id for r in (fp16, bf16)] == ["line 2", "line 3"]


@pytest.mark.parametrize(
    ("changes", "runtime"),
    [
        ({}, "megatron"),
        ({"model_family": "llama", "zero_stage": 1}, "megatron"),
        ({"source": "sc21-t2"}, "megatron+sync"),
        ({"source": "megatron-2020"}, "megatron+sync"),
        ({"source": "SC21"}, "megatron+sync"),
        ({"source": "sc21", "sequence_parallel": 1}, "megatron"),
        ({"source": "sc21-t2", "runtime": "megatron"}, "megatron"),
        ({"source": ""}, "megatron"),
        ({"zero_stage": 3}, "torch-eager"),
        ({"model_family": "mpt"}, "composer"),
        ({"model_family": "llama", "zero_stage": 3}, "torchtitan"),
        ({"model_family": "llama", "zero_stage": 3, "notes": "torch.compile=1"}, "torchtitan-compiled"),
        (
            {"model_family": "llama", "zero_stage": 3, "tp": 8, "notes": "torch.compile=1; async_tp=1"},
            "torchtitan-async",
        ),
        (
            {"model_family": "llama", "zero_stage": 3, "tp": 8, "notes": "torch.compile=1; async TP=0"},
            "torchtitan-compiled",
        ),
        (
            {"model_family": "llama", "zero_stage": 3, "tp": 8, "notes": "no async TP; torch.compile=1"},
            "torchtitan-compiled",
        ),
        ({"model_family": "llama", "zero_stage": 3, "cluster": "whitefiber-h200"}, "torchtitan-2025"),
        ({"zero_stage": 3, "notes": "sampled; torch.compile=1; bf16"}, "torch-compiled"),
        ({"zero_stage": 3, "notes": "sampled; torch.compile=0; bf16"}, "torch-eager"),
        ({"runtime": "mine"}, "mine"),
        ({"cluster": "distir-v100-x4"}, "distir-2021"),
        ({"cluster": "distir-v100-x4", "runtime": "megatron"}, "megatron"),
    ],
)
def test_runtime(table, changes: dict[str, Any], runtime: str) -> None:
    assert [r.runtime for r in read_rows(table({**GPT, **changes}))] == [runtime]


def test_devices_are_in_the_order_of_the_runtime(table) -> None:
    there = {"cluster": "distir-v100-x4"}
    first, last = read_rows(table({**GPT, **there}, {**GPT, **there, "runtime": "megatron"}))
    assert first.setup is not None
    assert last.setup is not None
    assert first.setup.plan.order[0] == "pp"
    assert last.setup.plan.order == Plan().order
    assert sorted(first.setup.plan.order) == sorted(last.setup.plan.order)


def test_rows_of_one_setup_share_a_program(table) -> None:
    a, b, c = read_rows(table(GPT, {**GPT, "measured_step_s": 9}, {**GPT, "micro_batch": 1}))
    assert program_of(a) is program_of(b)
    assert program_of(a) is not program_of(c)


def test_few_programs_are_kept(table) -> None:
    """A program takes megabytes, and a file may have thousands of rows."""
    rows = read_rows(table(*[{**GPT, "layers": 1, "global_batch": 8 * k} for k in range(1, _RECENT + 3)]))
    before = _program.cache_info().misses
    for row in rows:
        program_of(row)
    assert _program.cache_info().misses - before > _RECENT >= _program.cache_info().currsize


def test_each_cluster_and_runtime_has_its_own_peak_of_memory(table, monkeypatch) -> None:
    """Of one model and plan, which are built once."""
    monkeypatch.setattr("distir.api.accuracy.host_cores", lambda: 1)
    same = {**GPT, "dp": 8, "tp": 1, "pp": 1, "schedule": "none", "gpus": 8}
    rows = [
        {**same, "id": f"{cluster}-{runtime}", "cluster": cluster, "runtime": runtime}
        for cluster in ("dgx-a100", "mosaic-a100-80gb", "dgx-h100")
        for runtime in ("megatron", "composer")
    ]
    together = [row["predicted_peak_gib"] for row in accuracy(table(*rows)).to_json()["rows"]]
    alone = [accuracy(table(row)).to_json()["rows"][0]["predicted_peak_gib"] for row in rows]
    assert together == alone
    assert len(set(alone)) > 3


def test_rows_of_a_model_come_one_after_the_other(table) -> None:
    """So each model is built once, though few are kept; rows that have none come together, too."""
    deep, none = {**GPT, "layers": 4}, {**GPT, "model_family": "bert"}
    file = table(*[{**row, "id": k} for k, row in enumerate([GPT, deep, none, {**GPT, "micro_batch": 1}, deep, none])])
    assert [row.id for row in in_turn(read_rows(file))] == ["0", "3", "1", "4", "2", "5"]


@pytest.mark.skipif(not can_fork(), reason="this system forks no processes")
def test_rows_are_predicted_side_by_side(table, monkeypatch) -> None:
    """The result is that of one process, in the order of the file, however long which takes."""
    deep = {**GPT, "layers": 4}
    file = table(*[{**row, "id": k} for k, row in enumerate([deep, MLP, GPT, {**GPT, "model_family": "bert"}, deep])])
    done: list[tuple[int, int]] = []
    monkeypatch.setattr("distir.api.accuracy.host_cores", lambda: 3)
    several = accuracy(file, on_row=lambda *at: done.append(at))
    assert done == [(k, 5) for k in range(5)]
    monkeypatch.setattr("distir.api.accuracy.can_fork", lambda: False)
    alone = accuracy(file)
    assert several.to_json() == alone.to_json()
    assert [scored.row for scored in several.rows] == read_rows(file)


@pytest.mark.skipif(not can_fork(), reason="this system forks no processes")
def test_a_process_that_is_killed(table, monkeypatch) -> None:
    monkeypatch.setattr("distir.api.accuracy.host_cores", lambda: 2)
    monkeypatch.setattr("distir.api.accuracy.predict", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerError, match="a process of the predictions was ended from outside"):
        accuracy(table(GPT, {**GPT, "layers": 4}))


def test_a_program_is_priced_again_by_another_cost_model(table) -> None:
    (row,) = read_rows(table(GPT))
    program = program_of(row)
    before = predict(row, program)
    regular = cost_of(row).topology.regular
    assert regular is not None
    slower = replace(regular, spec=replace(regular.spec, kernel_launch_overhead=1e-3))
    after = predict(row, program, CostModel(Topology(slower)))
    assert after.seconds > 10 * before.seconds
    assert after.peak_bytes == before.peak_bytes
    assert predict(row, program) == before


# --- rows that cannot be predicted


def test_a_row_without_source_is_listed_apart(table) -> None:
    found = accuracy(table(GPT, {**GPT, "source": ""}))
    assert [scored.row.source for scored in found.rows] == ["lab", "(no source)"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cp": 2, "gpus": 8}, "gpus is 8, the product of dp, tp, pp and cp 16"),
        ({"ep": 2}, "ep 2: the file's models have no experts"),
        ({"dtype": "int8"}, "dtype int8 is none of fp32, bf16, fp16, fp8"),
        ({"grad_dtype": "bf16"}, "grad_dtype bf16 is neither fp32 nor the dtype, fp16"),
        ({"optimizer": "lamb"}, "optimizer lamb is unknown: expected adam, adamw, sgd"),
        ({"optimizer": ""}, "optimizer is not given: expected adam, adamw, sgd"),
        ({"model_family": "other"}, "model_family other is none of gpt, llama, mpt, mlp"),
        ({"micro_batch": ""}, "micro_batch is not given"),
        ({"source": ""}, "source is not given"),
        ({"heads": ""}, "heads is not given"),
        ({"seq": ""}, "seq is not given"),
        ({"heads": 5}, "hidden 64 does not divide by 5 heads"),
        ({"micro_batch": 3}, "a batch of 16 is no whole number of microbatches: dp 2 x micro_batch 3"),
        ({"schedule": "none"}, "schedule none with pp 2: known are 1f1b, gpipe, interleaved, distir2021"),
        ({"schedule": "/etc/hosts"}, "schedule /etc/hosts with pp 2: known are 1f1b, gpipe, interleaved, distir2021"),
        ({"vpp": 2}, "vpp 2 needs the schedule interleaved, got 1f1b"),
        ({"recompute": "half"}, "recompute half is none of none, selective, full"),
        ({"gpus": 4}, "gpus is 4, the product of dp, tp, pp and cp 8"),
        ({"cluster": "nowhere"}, "unknown cluster 'nowhere'"),
        ({"tp": 1, "pp": 4, "schedule": "interleaved", "vpp": 64}, "53 cuttable pieces cannot make 256 stages"),
    ],
)
def test_a_row_that_cannot_be_expressed_has_its_reason(table, changes: dict[str, Any], reason: str) -> None:
    found = accuracy(table(GPT, {**GPT, **changes}))
    good, bad = found.rows
    assert good.predicted is not None
    assert bad.predicted is None
    assert bad.reason is not None
    assert bad.reason.startswith(reason)
    assert bad.row.measured_seconds == 0.01
    assert found.sources["lab"].rows == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp16"}, "the step of an mlp is in fp32, without optimizer"),
        ({"optimizer": "adam"}, "the step of an mlp is in fp32, without optimizer"),
        ({"cp": 2}, "cp 2: an mlp has no sequences"),
    ],
)
def test_an_mlp_that_cannot_be_expressed(table, changes: dict[str, Any], reason: str) -> None:
    assert [r.reason for r in read_rows(table({**MLP, **changes}))] == [reason]


@pytest.mark.parametrize(
    ("column", "cell", "expected"),
    [
        ("layers", "two", "expected a whole number of at least 1, got 'two'"),
        ("layers", "0", "expected a whole number of at least 1, got '0'"),
        ("hidden", "64.0", "expected a whole number of at least 1, got '64.0'"),
        ("heads", "-4", "expected a whole number of at least 1, got '-4'"),
        ("global_batch", "1" + "0" * 400, "expected a whole number of at least 1, got '1" + "0" * 39 + "'"),
        ("zero_stage", "4", "expected 0, 1, 2 or 3, got '4'"),
        ("sequence_parallel", "yes", "expected 0 or 1, got 'yes'"),
        ("measured_step_s", "nan", "expected a number above 0, got 'nan'"),
        ("measured_step_s", "0", "expected a number above 0, got '0'"),
        ("measured_step_s", "inf", "expected a number above 0, got 'inf'"),
        ("measured_step_s", "", "empty"),
        ("measured_peak_gib", "much", "expected a number above 0, got 'much'"),
    ],
)
def test_a_bad_cell_names_file_line_and_column(table, column: str, cell: str, expected: str) -> None:
    path = table(GPT, {**GPT, column: cell}, head="# a comment\n\n")
    found = accuracy(path)
    assert [scored.reason for scored in found.rows] == [None, f"{path}, line 5, column {column}: {expected}"]
    assert json.dumps(found.to_json(), allow_nan=False)


def test_every_kind_of_cell_has_a_word_for_what_is_expected(table) -> None:
    for name, column in COLUMNS.items():
        if column.read is not str:
            (row,) = read_rows(table({**GPT, name: "?"}))
            assert row.reason is not None
            assert f"column {name}: expected " in row.reason


def test_rows_of_another_length(tmp_path: Path, table) -> None:
    path = table(GPT)
    text = path.read_text()
    path.write_text(text + "gpt-1,lab\n" + text.splitlines()[1] + ",x\n")
    n = len(text.splitlines()[0].split(","))
    reasons = [row.reason for row in read_rows(path)]
    assert reasons == [
        None,
        f"{path}, line 3: expected {n} cells, got 2",
        f"{path}, line 4: expected {n} cells, got {n + 1}",
    ]


def test_lines_count_where_a_cell_has_several(table) -> None:
    path = table({**GPT, "notes": '"one\ntwo\n# no comment"'}, {**GPT, "layers": "x"})
    good, bad = read_rows(path)
    assert good.reason is None
    assert bad.line == 5
    assert bad.reason is not None
    assert f"{path}, line 5, column layers" in bad.reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "has no rows"),
        (b"# only a comment\n", "has no rows"),
        (b"id,source\nx,y\n", "line 1: no column 'model_family'"),
        (b"\xff\xfe\x00", "is not text"),
        (b'id,"source\n', "line 1: unexpected end of data"),
        (b"id,id\n", "line 1: the column 'id' is there twice"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_rows(path)


def test_a_column_that_is_misspelt(table) -> None:
    path = table({**GPT, "recompte": "full"})
    path.write_text(path.read_text().replace(",recompute,", ",other,"))
    with pytest.raises(UsageError, match=r"no column 'recompute'.*is it 'recompte'"):
        read_rows(path)


def test_columns_for_the_reader_are_not_missed(table) -> None:
    """Others may have nearly their names."""
    given = {name: x for name, x in GPT.items() if name not in ("gpus", "notes")}
    (row,) = read_rows(table({**given, "gpu": "A100", "note": "mine"}))
    assert row.reason is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runtime": "megatorn"}, "unknown runtime 'megatorn': did you mean megatron?"),
        ({"cluster": "dgx-a10"}, "unknown cluster 'dgx-a10': did you mean dgx-a100?"),
        ({"runtime": "jax"}, "unknown runtime 'jax'"),
    ],
)
def test_a_reason_says_what_was_meant(table, changes: dict[str, Any], reason: str) -> None:
    (row,) = read_rows(table({**GPT, **changes}))
    assert score(row).reason == reason


def test_a_header_alone_has_no_rows(table) -> None:
    with pytest.raises(UsageError, match="has no rows"):
        read_rows(table())


# --- the command


def test_json(table, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(GPT, MLP, {**GPT, "id": "gpt-1", "dtype": "int8"})
    assert main(["accuracy", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["sources", "rows"]
    assert list(found["sources"]) == ["lab", "old"]
    names = ["rows", "mean_absolute_error", "p50", "p90", "worst", "bias", "spearman", "regret", "memory_error"]
    assert all(list(s) == names for s in found["sources"].values())
    keys = ["id", "measured_step_s", "predicted_step_s", "measured_peak_gib", "predicted_peak_gib", "reason"]
    assert all(list(row) == keys for row in found["rows"])
    gpt, mlp, bad = found["rows"]
    assert [row["id"] for row in found["rows"]] == ["gpt-0", "mlp-0", "gpt-1"]
    assert gpt["reason"] is None
    assert found["sources"]["lab"]["bias"] == pytest.approx(gpt["predicted_step_s"] / 0.01 - 1)
    assert found["sources"]["old"]["memory_error"] == pytest.approx(abs(mlp["predicted_peak_gib"] / 0.5 - 1))
    assert found["sources"]["lab"]["memory_error"] is None
    assert {k: bad[k] for k in keys[1:5]} == dict(zip(keys[1:5], [0.01, None, None, None], strict=True))
    assert bad["reason"].startswith("dtype int8")


def test_table(table, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(GPT, MLP, *[{**GPT, "id": f"bad-{k}", "dtype": "int8"} for k in range(5)])
    assert main(["accuracy", str(path), "--rows"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^source +rows +MAE +p50 +p90 +worst +bias +Spearman +regret +memory error$", text, re.MULTILINE)
    assert re.search(r"^lab +1 of 6 +[\d.]+%", text, re.MULTILINE)
    assert re.search(r"^old +1 +[\d.]+% .* [\d.]+%$", text, re.MULTILINE)
    assert re.search(r"^gpt-0 +[a-z-]+ +10.000 ms +[\d.]+ [mu]s +[+-][\d.]+% +- +[\d.]+ GiB$", text, re.MULTILINE)
    reason = "dtype int8 is none of fp32, bf16, fp16, fp8: 5 rows, bad-0, bad-1, bad-2 and 2 more"
    assert f"\nnot predicted:\n  {reason}\n" in text
    assert "median time of a prediction: " in text
    assert "more memory" not in text


def test_rows_that_would_not_fit_are_named(table, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(GPT, {**GPT, "id": "large", "hidden": 32768, "heads": 256, "layers": 8})
    assert main(["accuracy", str(path)]) == 0
    assert "\npredicted, but to need more memory than the devices have: 1 row, large\n" in capsys.readouterr().out


def test_that_no_row_is_predicted_is_an_error(table, capsys: pytest.CaptureFixture[str]) -> None:
    """The reasons are told all the same."""
    path = table({**GPT, "dtype": "int8"}, MLP)
    assert main(["accuracy", str(path), "--source", "lab", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["result"]["rows"][0]["reason"].startswith("dtype int8")
    assert err.startswith(f"distir: error: {path}: no row can be predicted\nhint: dtype int8")
    assert main(["accuracy", str(path), "--source", "lab"]) == 2
    assert "not predicted:\n  dtype int8" in capsys.readouterr().out


def test_sources_are_chosen(table, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(GPT, MLP)
    assert main(["accuracy", str(path), "--source", "old", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["mlp-0"]
    assert main(["accuracy", str(path), "--source", "new"]) == 2
    assert capsys.readouterr().err.endswith("no rows of the source 'new'\nhint: it has lab, old\n")


def test_files_that_cannot_be_read_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", str(tmp_path / "none.csv")]) == 2
    assert main(["accuracy", str(tmp_path)]) == 2
    (tmp_path / "empty.csv").write_text("")
    assert main(["accuracy", str(tmp_path / "empty.csv")]) == 2
    assert capsys.readouterr().err.count("distir: error: ") == 3


def test_plot(table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(GPT, MLP)
    assert main(["accuracy", str(path), "--plot", str(tmp_path / "a.svg")]) == 0
    assert "drawn: " in capsys.readouterr().out
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert main(["accuracy", str(path), "--plot", str(tmp_path / "a.txt")]) == 2


def test_where_no_figure_can_be_written_nothing_is_predicted(table, capsys, monkeypatch) -> None:
    monkeypatch.setattr("distir.api.accuracy.score", pytest.fail)
    assert main(["accuracy", str(table(GPT)), "--plot", "none/a.pdf"]) == 2
    assert "cannot write none/a.pdf: none is no folder that can be written to" in capsys.readouterr().err


def test_the_figure_has_a_colour_a_source_and_the_errors_of_a_fifth(table) -> None:
    from distir.api.plot import accuracy_figure

    found = accuracy(table(GPT, {**GPT, "measured_step_s": 1.0}, MLP))
    figure = accuracy_figure(found)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = figure.numbers()[0]["lines"]
    assert list(lines) == ["equal", "+20%", "-20%", "lab", "old"]
    predicted = [scored.predicted.seconds for scored in found.rows if scored.predicted]
    assert lines["lab"] == [[0.01, predicted[0]], [1.0, predicted[1]]]
    for name, share in (("equal", 1.0), ("+20%", 1.2), ("-20%", 0.8)):
        assert [y / x for x, y in lines[name]] == pytest.approx([share] * 2)
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    assert colours["lab"] != colours["old"]
    assert all(axes.get_xlim()[0] < x < axes.get_xlim()[1] for x, _ in itertools.chain(lines["lab"], lines["old"]))


def test_without_matplotlib_nothing_is_predicted(table, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    import sys

    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib" or m == "distir.viz.figure"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["accuracy", str(table(GPT)), "--plot", "a.pdf"]) == 2
    assert "pip install 'distir[viz]'" in capsys.readouterr().err


def test_the_page_describes_every_column() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(COLUMNS)


def test_numbers_are_numpys_only_inside() -> None:
    assert not [x for x in scores([Case(1.0, 2.0, 0, 0, 1.0, 2.0)]) if isinstance(x, np.generic)]


def test_a_row_without_setup_is_not_predicted() -> None:
    row = Measurement("x", "y", 1, 1.0, None, "allocated", "megatron", None, "why not")
    with pytest.raises(UsageError, match="x cannot be predicted: why not"):
        program_of(row)
    assert GIB == 2**30
