"""Plans for other tools: round trips of random plans, what a tool cannot express, and the names of options."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from distir.api import Plan, load, simulate
from distir.api.interop.conversion import READERS, TARGETS, check_faults, emit, emit_notes, nearest_plan
from distir.api.interop.option_tables import MEGATRON, TORCHTITAN
from distir.api.interop.plan_settings import TrainingSettings, in_effect
from distir.api.interop.shell_words import shell_options
from distir.api.model import Precision
from distir.ir.errors import InfeasibleError, UsageError
from distir.transforms.pipeline.keep_whole import GATHERED_AGAIN
from distir.transforms.pipeline.recompute import WORDS

HERE = Path(__file__).parent
TOOLS = [t for t in TARGETS if t != "distir"]
POWERS = st.sampled_from([1, 2, 4])
SPLITS = {"cp": "*.1", "ep": "*.0,*.experts.*.0", "replicate": "*.0"}
LEFT = {"torchtitan": {"bucket_mb", "overlap", "loss_gradient", "cut", "order"}, "megatron": {"loss_gradient"}}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan, also such as no tool can carry out."""
    sizes = {name: draw(st.sampled_from([1, 1, 1, 2, 3])) for name in SPLITS}
    names = draw(st.permutations([name for name, n in sizes.items() if n > 1 or draw(st.booleans())]))
    order = draw(st.sampled_from(["default", "default", "nested", "pipeline inside", "any"]))
    plan = Plan(
        dp=draw(POWERS),
        tp=draw(POWERS),
        pp=draw(POWERS),
        microbatches=draw(st.sampled_from([1, 2, 3, 8])),
        schedule=draw(st.sampled_from(["1f1b", "1f1b", "interleaved", "gpipe", "distir2021", "dir/table.csv"])),
        chunks=draw(st.sampled_from([1, 2, 3])),
        overlap=draw(st.booleans()),
        bucket_mb=draw(st.sampled_from([25.0, 25.0, math.inf, 0.0, 0.25, 1 / 3, 2.0**-19])),
        zero=draw(st.integers(0, 3)),
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from([*WORDS, "1e9"])),
        gathered_again=draw(st.sampled_from(GATHERED_AGAIN)),
        loss_gradient=draw(st.sampled_from(["backward", "backward", "forward"])),
        split=tuple([f"{name}={sizes[name]}:{SPLITS[name]}" for name in names]),  # type: ignore[misc]
        cut=draw(st.sampled_from([(), ("even",), ("h1.weight",), ("12",), ("5", "12", "19"), ("6", "12", "18")])),
        pad_multiple=draw(st.sampled_from([1, 1, 8, 128])),
    )
    last = {"nested": ["dp", "replicate", "pp"], "pipeline inside": ["pp", "dp", "replicate"]}.get(order)
    if last:
        return replace(plan, order=tuple([n for n in ["tp", "cp", "ep", *last] if n in plan.order]))
    return plan if order == "default" else replace(plan, order=tuple(draw(st.permutations(plan.order))))


SETTINGS = st.builds(
    TrainingSettings,
    batch=st.just(2**12 * 3**4),
    seq=st.sampled_from([None, 2048]),
    precision=st.sampled_from(
        [
            Precision(),
            Precision("bf16"),
            Precision("bf16", "bf16"),
            Precision("fp16"),
            Precision("fp16", "fp16"),
        ]
    ),
    dtype=st.sampled_from([None, None, None, "bfloat16", "float64"]),
    layers=st.sampled_from([None, 24, 32, 7]),
)


def counts_of(cut: Sequence[str], stages: int, layers: int) -> list[int]:
    """The layers of each stage."""
    if cut == ("even",):
        return [layers // stages + (1 <= k <= layers % stages) for k in range(stages)]
    begins = [0, *map(int, cut), layers]
    return [b - a for a, b in pairwise(begins)]


def as_cut(counts: Sequence[int]) -> tuple[str, ...]:
    """How a file is read that gives stages these numbers of layers."""
    if len(counts) == 1:
        return ()
    even = counts_of(("even",), len(counts), sum(counts))
    return ("even",) if counts == even else tuple(map(str, accumulate(counts[:-1])))


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def said(plan: Plan) -> dict[str, Any]:
    """What a plan says, of axes of more than one device."""
    some = [a.name for a in plan.axes if a.size > 1]
    found = {f.name: getattr(plan, f.name) for f in fields(Plan)}
    return found | {"order": tuple([n for n in plan.order if n in some]), "split": sorted(map(str, plan.split))}


@pytest.mark.parametrize("tool", TOOLS)
@settings(deadline=None, max_examples=60)
@given(plan=plans(), training=SETTINGS)
def test_a_plan_that_can_be_written_reads_back(
    tool: str, plan: Plan, training: TrainingSettings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of any plan the nearest can be written, and reads back as it is; it is the plan itself if that can be written."""
    near, applied, reasons = nearest_plan(plan, tool, training)
    if reasons:
        with pytest.raises(InfeasibleError, match=r"nearest: .*-") as e:
            emit(plan, tool, training)
        assert all(reason in e.value.message for reason in reasons)
    else:
        assert said(near) == said(in_effect(plan))
        assert applied == training
    assert near.size == plan.size
    path = written(tmp_path_factory.mktemp("plans") / "plan", emit(near, tool, applied))
    read = READERS[tool](path, None, applied.layers)
    check_faults(read, ())
    found = said(Plan(**read.fields))
    unsaid = {f.name for f in fields(Plan)} - set(read.fields)
    assert unsaid <= LEFT[tool] | {"order", "bucket_mb"}
    expected = said(near) | {name: found[name] for name in unsaid - {"order"}}
    if near.pp > 1 and not near.cut:  # balanced by cost, which neither tool does: a note says so
        assert tool == "torchtitan" or found["cut"] == ("even",)
        assert any("numbers of layers, not" in note for note in emit_notes(near, tool, applied))
        expected["cut"] = found["cut"]
    elif applied.layers is not None:
        expected["cut"] = as_cut(counts_of(near.cut, near.pp * near.chunks, applied.layers))
    assert found == expected
    assert read.devices == plan.size
    assert read.settings.batch == applied.batch
    assert read.settings.dtype == applied.dtype
    assert applied.dtype or read.settings.precision == applied.precision
    assert applied.seq is None or read.settings.seq == applied.seq


def test_a_file_of_megatron_without_its_multiple_says_nothing_of_padding(tmp_path: Path) -> None:
    text = emit(Plan(tp=2, pad_multiple=8), "megatron", TrainingSettings(32, 16, layers=4))
    assert READERS["megatron"](written(tmp_path / "with", text), None, 4).fields["pad_multiple"] == 8
    lines = text.splitlines(keepends=True)
    left = "".join([line for line in lines if "--make-vocab-size-divisible-by" not in line])
    assert left != text
    assert "pad_multiple" not in READERS["megatron"](written(tmp_path / "without", left), None, 4).fields


BOTH = Plan(
    dp=2,
    tp=2,
    zero=1,
    sequence_parallel=True,
    recompute="gathers",
    split=("cp=2:*.1",),  # type: ignore[arg-type]
    order=("tp", "cp", "dp", "pp"),
)
HYBRID = Plan(dp=2, zero=3, split=("replicate=2:*.0",), order=("tp", "dp", "replicate", "pp"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tool", "plan"),
    [
        ("torchtitan", Plan(dp=4, tp=2, microbatches=2, zero=3, sequence_parallel=True)),
        ("torchtitan", Plan(dp=2, pp=2, microbatches=4, zero=1, recompute="full", cut=("even",))),
        ("torchtitan", HYBRID),
        ("torchtitan", Plan(dp=2, tp=2, split=("cp=2:*.1",), zero=2, sequence_parallel=True)),  # type: ignore[arg-type]
        ("megatron", replace(BOTH, split=(), pp=2, microbatches=4, order=(), cut=("even",))),
        (
            "megatron",
            Plan(dp=2, pp=2, microbatches=4, bucket_mb=math.inf, order=("tp", "pp", "dp"), cut=("even",)),
        ),
        ("megatron", BOTH),
    ],
)
def test_what_is_read_back_takes_the_same_time(tool: str, plan: Plan, tmp_path: Path) -> None:
    model = load("gpt:layers=4,hidden=32,heads=4,vocab=64,seq=16,batch=32", loss="cross-entropy", optimizer="adamw")
    path = written(tmp_path / "plan", emit(plan, tool, TrainingSettings(32, 16, layers=4)))
    again = Plan(**READERS[tool](path, None, 4).fields)
    assert simulate(model, again, "dgx-a100").step_seconds == simulate(model, plan, "dgx-a100").step_seconds


# ---- semantics, by hand


BATCH = TrainingSettings(512, 2048, Precision("bf16"), layers=32)


def torchtitan(plan: Plan, training: TrainingSettings = BATCH) -> dict[str, Any]:
    return tomllib.loads(emit(plan, "torchtitan", training))


def arguments(plan: Plan, tmp_path: Path, training: TrainingSettings = BATCH) -> dict[str, str]:
    path = written(tmp_path / "args", emit(plan, "megatron", training))
    return {name.removeprefix("--"): " ".join(words) for name, words in shell_options(path).options.items()}


def test_a_plan_of_distir_says_of_what_step_it_is() -> None:
    settings = TrainingSettings(64, 512, Precision("bf16"))
    assert emit(Plan(dp=8), "distir", settings).startswith(
        "# a plan of distir, for a step of 64 samples of 512 tokens, --precision bf16\n"
    )
    assert emit(Plan(), "distir", TrainingSettings()) == Plan().to_toml()


def test_torchtitan_counts_samples_of_a_pipeline_and_of_accumulated_gradients() -> None:
    found = torchtitan(Plan(dp=4, pp=2, zero=1, microbatches=16))
    assert found["training"] | {"local_batch_size": 128, "global_batch_size": 512} == found["training"]
    assert found["parallelism"]["pipeline_parallel_microbatch_size"] == 8  # 512 = 4 ranks x 16 microbatches x 8
    found = torchtitan(Plan(dp=4, zero=3, microbatches=16))
    assert found["training"] | {"local_batch_size": 8, "global_batch_size": 512} == found["training"]
    assert "pipeline_parallel_microbatch_size" not in found["parallelism"]


def test_torchtitan_degrees() -> None:
    def degrees(plan: Plan) -> tuple[int, int, str | None]:
        p = torchtitan(plan)["parallelism"]
        names = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward")
        return tuple([p.get(name) for name in names])  # type: ignore[return-value]

    assert degrees(Plan(dp=8)) == (8, 1, None)
    assert degrees(Plan(dp=8, zero=3)) == (1, 8, "always")
    assert degrees(Plan(dp=8, zero=2)) == (1, 8, "never")
    assert degrees(HYBRID) == (2, 2, "always")
    experts = Plan(dp=2, zero=3, split=("ep=4:*.0,*.experts.*.0",))  # type: ignore[arg-type]
    assert degrees(experts) == (1, 8, "always")


def test_layers_of_a_stage_give_the_stages() -> None:
    """torchtitan: ceil((layers + 2) / layers a stage) stages, over all pipeline ranks."""
    plan = Plan(dp=2, zero=1, pp=4, chunks=4, schedule="interleaved", microbatches=8)
    written_for = 0
    for layers in range(14, 64):
        try:
            found = torchtitan(plan, BATCH._replace(layers=layers))["parallelism"]
        except InfeasibleError:
            assert all(math.ceil((layers + 2) / n) != 16 for n in range(1, layers + 3))
            continue
        assert math.ceil((layers + 2) / found["pipeline_parallel_layers_per_stage"]) == 16
        written_for += 1
    assert written_for == 1 + 2 + 3 + 4  # layers + 2 above 15 n, up to 16 n
    assert "pipeline_parallel_layers_per_stage" not in torchtitan(replace(plan, chunks=2))["parallelism"]
    with pytest.raises(InfeasibleError, match=r"4 stages a pipeline rank of 24 layers.*nearest: --chunks 2"):
        torchtitan(plan, BATCH._replace(layers=24))


def test_megatron_counts_samples(tmp_path: Path) -> None:
    plan = Plan(dp=4, tp=2, pp=2, microbatches=16, zero=1, sequence_parallel=True, recompute="gathers")
    found = arguments(plan, tmp_path)
    assert int(found["micro-batch-size"]) * 4 * 16 == int(found["global-batch-size"]) == 512
    assert {"use-distributed-optimizer", "sequence-parallel", "overlap-grad-reduce", "overlap-param-gather"} <= {*found}
    assert int(found["ddp-bucket-size"]) * 4 == 25 << 20  # elements of 4 bytes: gradients are reduced in f32
    assert "recompute-granularity" not in found
    experts = Plan(dp=2, split=("ep=4:*.0,*.experts.*.0",))  # type: ignore[arg-type]
    found = arguments(experts, tmp_path)
    assert (found["expert-model-parallel-size"], found["micro-batch-size"]) == ("4", "64")


def test_the_sequence_is_split_along_both_axes_in_the_files_too(tmp_path: Path) -> None:
    """Without notes, as both tools have it; torchtitan has no tensor parallelism without."""
    found = arguments(BOTH, tmp_path)
    assert found["context-parallel-size"] == found["tensor-model-parallel-size"] == "2"
    assert "sequence-parallel" in found
    text = "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel"
    read = megatron(text, tmp_path)
    assert read.fields["sequence_parallel"]
    assert not [note for note in read.notes if "sequence" in note]
    file = "[training]\nlocal_batch_size = 2\n[parallelism]\ntensor_parallel_degree = 2\ncontext_parallel_degree = 2\n"
    assert READERS["torchtitan"](written(tmp_path / "train.toml", file), 8, None).fields["sequence_parallel"]
    with pytest.raises(InfeasibleError, match=r"without sequence parallelism.*nearest: --sequence-parallel"):
        torchtitan(replace(BOTH, zero=3, recompute="none", sequence_parallel=False))


@pytest.mark.parametrize(
    ("tool", "plan", "words", "hint"),
    [
        ("torchtitan", Plan(dp=2, zero=1), "ZeRO 1", "--zero 2"),
        ("torchtitan", Plan(dp=2, pp=2), "replicas without ZeRO beside other axes", "--zero 1"),
        ("torchtitan", Plan(dp=2, pp=2, zero=2), "ZeRO 2 in a pipeline", "--zero 1"),
        ("torchtitan", Plan(dp=2, tp=2, zero=2), "without sequence parallelism", "--sequence-parallel"),
        ("torchtitan", Plan(dp=2, recompute="attention"), "recomputation attention", "--recompute selective"),
        ("torchtitan", Plan(dp=2, overlap=False), "does not overlap", "--overlap"),
        ("torchtitan", Plan(dp=2, order=("pp", "tp", "dp")), None, None),
        ("torchtitan", Plan(pp=2), "mixed precision without replicas", "--precision fp32"),
        ("torchtitan", Plan(dp=2, pp=2, zero=1, order=("pp", "dp", "tp")), "order pp,dp,tp", "--order tp,dp,pp"),
        ("megatron", Plan(pp=2, schedule="gpipe", microbatches=2), "schedule gpipe", "--schedule 1f1b"),
        ("megatron", Plan(dp=2, recompute="selective"), "recomputation selective", "--recompute attention"),
        ("megatron", Plan(tp=2, sequence_parallel=True), "none with sequence", "--recompute gathers"),
        ("megatron", Plan(split=("cp=2:*.1",)), "none with sequence or context", "--recompute gathers"),  # type: ignore[arg-type]
        ("megatron", Plan(dp=2, overlap=False), "communication that does not overlap", "--overlap"),
        ("megatron", Plan(dp=2, pp=2, order=("tp", "pp", "dp")), None, None),
        ("megatron", Plan(dp=2, cut=("a",)), "stages that begin at given weights", "--cut balanced"),
        ("megatron", Plan(pp=3), "32 layers on 3 stages", "--dp 3 --pp 1"),
        (
            "megatron",
            Plan(pp=2, schedule="interleaved", chunks=2),
            "1 microbatches on 2 pipeline ranks",
            "--schedule 1f1b --chunks 1",
        ),
        ("megatron", Plan(split=("h=2:x.2",)), "the axis h", "--dp 2 no --split"),  # type: ignore[arg-type]
        (
            "megatron",
            Plan(split=("h=2:x.2",), order=("h", "tp", "dp", "pp")),  # type: ignore[arg-type]
            "the axis h",
            "--dp 2 --order tp,dp,pp no --split",
        ),
        (
            "torchtitan",
            Plan(dp=2, zero=3, microbatches=4, schedule="gpipe"),
            "the schedule gpipe on one pipeline rank",
            "--schedule 1f1b",
        ),
        (
            "megatron",
            Plan(dp=2, schedule="interleaved", chunks=2),
            "the schedule interleaved on one pipeline rank",
            "--schedule 1f1b --chunks 1",
        ),
        ("torchtitan", Plan(dp=2, schedule="gpipe", chunks=2), None, None),
    ],
)
def test_what_cannot_be_expressed_is_said(tool: str, plan: Plan, words: str | None, hint: str | None) -> None:
    if words is None:
        emit(plan, tool, BATCH)
        return
    with pytest.raises(InfeasibleError) as e:
        emit(plan, tool, BATCH)
    assert e.value.exit_code == 4
    assert words in e.value.message
    assert e.value.hint == f"nearest: {hint}"


def test_a_batch_that_does_not_divide_is_said() -> None:
    for tool in TOOLS:
        with pytest.raises(InfeasibleError, match=r"2 replicas x 3 microbatches.*nearest: --microbatches 2"):
            emit(Plan(dp=2, microbatches=3, zero=0), tool, BATCH)
        with pytest.raises(InfeasibleError, match="number of samples"):
            emit(Plan(dp=2), tool, TrainingSettings())


# ---- somebody else's files


SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=4   # of the partition: don't ask for more
HOSTS=${#NODES[@]}
WORLD_SIZE=$(($GPUS_PER_NODE * $NUM_NODES))
BATCH=$((16 * ${NUM_NODES} * GPUS_PER_NODE))
CHECKPOINTS=${1:-"checkpoints"}
TP=${TP:-4}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_ARGS="
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
    --seq-length 4096
    --micro-batch-size 2
    --global-batch-size=$BATCH
"
PARALLEL=(--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel)
MORE=()
if [[ "$TP" == "4" ]]; then
    MORE+=(
        "--attention-backend flash"
        # --fp16
        --overlap-grad-reduce  # beside the backward pass
    )
fi
PARALLEL+=("${MORE[@]}")
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $GPT_ARGS ${PARALLEL[@]} --bf16 --use-distributed-optimizer \\
    --overlap-param-gather --recompute-activations --lr 1.5e-4 2>&1 | tee log
"""


def test_a_script_that_starts_megatron(tmp_path: Path) -> None:
    read = READERS["megatron"](written(tmp_path / "run.sh", SCRIPT), None, None)
    check_faults(read, ())
    plan = Plan(**read.fields)
    assert (plan.dp, plan.tp, plan.pp, plan.chunks, plan.schedule) == (4, 4, 2, 4, "interleaved")
    assert plan.microbatches == 512 // (4 * 2)
    assert (plan.zero, plan.sequence_parallel, plan.recompute, plan.overlap) == (1, True, "attention", True)
    assert plan.bucket_mb == 40e6 * 4 / 2**20  # Megatron-LM's default
    assert read.settings == TrainingSettings(512, 4096, Precision("bf16"), None, 32)
    assert len(read.ignored) == 6  # two of torchrun, two sizes of the model, and
    assert {"--attention-backend", "--lr"} < {*read.ignored}


def megatron(text: str, tmp_path: Path, devices: int | None = 8, layers: int | None = None) -> Any:
    return READERS["megatron"](written(tmp_path / "args", f"--micro-batch-size 1 {text}"), devices, layers)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "recompute",
            "of 2 layers",
        ),
        ("--recompute-granularity selective --recompute-modules mlp", "recompute", "recomputation of mlp"),
        ("--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2", "chunks", "unknown depth"),
        ("--pipeline-model-parallel-layout Ett|ttL", "cut", "stages of given layers"),
        ("--rampup-batch-size 16 8 300", "microbatches", "a batch that grows"),
        ("--fp8-format hybrid", "precision", "8 bits"),
        ("--overlap-grad-reduce --ddp-num-buckets 5", "bucket_mb", "5 buckets"),
        ("--expert-model-parallel-size 2 --context-parallel-size 2", "split", "beside cp 2"),
    ],
)
def test_what_distir_cannot_do_of_megatron_is_said(text: str, field: str, words: str, tmp_path: Path) -> None:
    read = megatron(text, tmp_path)
    with pytest.raises(InfeasibleError, match=words):
        check_faults(read, ())
    check_faults(read, (field,))  # a flag says it instead


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--tensor-model-parallel-sizes 2", "did you mean --tensor-model-parallel-size"),
        ("--moe-expert-overlap 2", "may concern the plan"),
        ("--standalone-embedding-stage", "may concern the plan"),
        ("--tensor-model-parallel-size two", "whole number of at least 1, got 'two'"),
        ("--tensor-model-parallel-size 0", "whole number of at least 1, got '0'"),
        ("--tensor-model-parallel-size", "whole number"),
        ("--tensor-model-parallel-size $TP", r"\$TP is not set in the file"),
        ("--tensor-model-parallel-size 3", "8 devices are no multiple of tp 3"),
        ("--recompute-method some", "uniform or block"),
        ("--global-batch-size 9", "no multiple of 8 replicas x 1 samples"),
        ("--bf16 --fp16", "exclude each other"),
        ("'", "No closing quotation"),
    ],
)
def test_bad_arguments_of_megatron(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        megatron(text, tmp_path)


def test_one_pipeline_rank_has_no_virtual_stages_in_megatron(tmp_path: Path) -> None:
    fields = megatron("--num-virtual-stages-per-pipeline-rank 2", tmp_path).fields
    assert (fields["pp"], fields["schedule"], fields["chunks"]) == (1, "1f1b", 1)


def test_devices_are_those_of_torchrun_or_of_the_environment(tmp_path: Path) -> None:
    for text in ("--nnodes 2 --nproc-per-node=8", "WORLD_SIZE=16", "WORLD_SIZE=4\n--nnodes 2 --nproc_per_node 8"):
        path = written(tmp_path / "a", f"{text} --micro-batch-size 1 --tensor-model-parallel-size 2")
        assert READERS["megatron"](path, None, None).devices == 16
        assert READERS["megatron"](path, 4, None).devices == 4


@pytest.mark.parametrize(
    ("text", "zero"),
    [
        ("", 0),
        ("--data-parallel-sharding-strategy optim_grads", 0),  # of Megatron-FSDP alone
        ("--use-distributed-optimizer", 1),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 4", 1),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 8", 0),  # each of one device
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 3),
        ("--use-torch-fsdp2", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 2),
    ],
)
def test_what_replicas_split_in_megatron(text: str, zero: int, tmp_path: Path) -> None:
    assert megatron(text, tmp_path).fields["zero"] == zero


@pytest.mark.parametrize(
    ("text", "recompute"),
    [
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8", "full"),  # of 8 a stage
        ("--recompute-granularity selective --recompute-modules core_attn", "attention"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "gathers"),
        ("--sequence-parallel", "none"),  # without tensor parallelism there is none
        ("--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel", "gathers"),
        ("--context-parallel-size 2", "gathers"),
    ],
)
def test_what_megatron_recomputes(text: str, recompute: str, tmp_path: Path) -> None:
    read = megatron(f"--pipeline-model-parallel-size 2 {text}", tmp_path, layers=16)
    check_faults(read, ())
    assert read.fields["recompute"] == recompute


@pytest.mark.parametrize(
    ("text", "layers", "want"),
    [
        ("", 16, "even"),
        ("", None, "even"),
        ("--num-virtual-stages-per-pipeline-rank 2", 16, "even"),
        ("--decoder-first-pipeline-num-layers 1", 16, [1, 5, 5, 5]),
        ("--decoder-last-pipeline-num-layers 4", 16, [4, 4, 4, 4]),
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4 --num-layers 8", 16, [2, 5, 5, 4]),
        ("--decoder-first-pipeline-num-layers 2 --num-layers 14", None, [2, 4, 4, 4]),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", 14, [3, 4, 4, 3]),
        ("--account-for-embedding-in-pipeline-split", 15, [3, 4, 4, 4]),
        (
            "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2",
            15,
            [2, 2, 2, 2, 2, 2, 2, 1],
        ),
        (
            "--account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 1",
            6,
            [0, 1, 1, 1, 1, 1, 1, 0],
        ),
        (
            "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2",
            14,
            "14 layers and 1 that count as one are no multiple of pp 4 x 2",
        ),
        ("--decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 2", 16, "give one of them"),
        ("", 10, "10 layers cannot be shared out to 4 stages, as it says"),
        ("--num-virtual-stages-per-pipeline-rank 2", 12, "to 8 stages, 2 a rank"),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-virtual-stages-per-pipeline-rank 2",
            14,
            [1, 2, 2, 2, 2, 2, 2, 1],
        ),
        (
            "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 6 "
            "--num-virtual-stages-per-pipeline-rank 2",
            16,
            [1, 2, 2, 3, 1, 2, 2, 3],
        ),
        ("--decoder-first-pipeline-num-layers 2", 16, "16 layers cannot be shared out to 4 stages"),
        ("--decoder-first-pipeline-num-layers 20", 16, "16 layers cannot be shared out"),
        ("--decoder-first-pipeline-num-layers 19", 16, "16 layers cannot be shared out"),
        ("--decoder-first-pipeline-num-layers 1 --num-virtual-stages-per-pipeline-rank 2", 16, "to 8 stages, 2 a rank"),
        ("--account-for-loss-in-pipeline-split", 16, "16 layers cannot be shared out"),
        ("--account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 1", 16, "give one of them"),
    ],
)
def test_the_stages_of_megatron(text: str, layers: int | None, want: str | list[int], tmp_path: Path) -> None:
    def read() -> Any:
        return megatron(f"--pipeline-model-parallel-size 4 {text}", tmp_path, layers=layers)

    if isinstance(want, str) and want != "even":
        with pytest.raises((UsageError, InfeasibleError)) as raised:
            check_faults(read(), ())
        assert want in f"{raised.value.message} {raised.value.hint}"
        if raised.type is InfeasibleError:
            check_faults(read(), ("cut",))
        return
    check_faults(read(), ())
    assert read().fields["cut"] == (("even",) if want == "even" else as_cut(want))  # type: ignore[arg-type]
    assert any("the model 16" in note for note in read().notes) == ("--num-layers 8" in text)


def test_megatron_reduces_gradients_at_once_unless_they_overlap(tmp_path: Path) -> None:
    """Its streams run beside each other all the same."""
    for text, bucket in (("", math.inf), ("--overlap-grad-reduce --ddp-num-buckets 1", math.inf)):
        fields = megatron(text, tmp_path).fields
        assert (fields["overlap"], fields["bucket_mb"]) == (True, bucket)
    assert megatron("--overlap-grad-reduce", tmp_path).fields["bucket_mb"] < 200
    assert "overlap" not in arguments(Plan(dp=2, bucket_mb=math.inf), tmp_path)
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
    assert megatron(sharded, tmp_path).fields["bucket_mb"] == math.inf
    assert "bucket_mb" not in megatron(f"{sharded} --overlap-grad-reduce", tmp_path).fields  # it has its own
    both = "--overlap-grad-reduce --overlap-param-gather"
    for text, count in (("", 1), ("--overlap-grad-reduce", 1), (both, 0)):
        notes = megatron(f"--use-distributed-optimizer {text}", tmp_path).notes
        assert [note.startswith("without --overlap-param-gather") for note in notes] == [True] * count


def test_stages_of_a_model_of_unknown_depth(tmp_path: Path) -> None:
    read = megatron("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1", tmp_path)
    with pytest.raises(InfeasibleError, match="a model of unknown depth"):
        check_faults(read, ())
    check_faults(read, ("cut",))
    assert "cut" not in toml(PIPELINE, tmp_path).fields
    assert any("balanced by cost, as the number of layers is not known" in x for x in toml(PIPELINE, tmp_path).notes)
    assert toml(PIPELINE, tmp_path, layers=30).notes == []


PIPELINE = """
activation_checkpoint = { mode = "none" }
training = { local_batch_size = 4 }
parallelism.pipeline_parallel_degree = 4
"""


@pytest.mark.parametrize(
    ("more", "layers", "want"),
    [
        ("", 30, "even"),  # 7, 8, 8, 7
        ("", 32, [8, 9, 8, 7]),  # 34 of 4 stages: 9, 9, 8, 8, less one in the first and the last
        ("first_stage_less_layers = 0 last_stage_less_layers = 0", 32, "even"),
        ("first_stage_less_layers = 0 last_stage_less_layers = 0", 33, [9, 8, 8, 8]),
        ("first_stage_less_layers = 0 last_stage_less_layers = 2", 30, [8, 8, 8, 6]),
        ("schedule = 'Interleaved1F1B'", 14, "even"),  # 1, 2, 2, 2, 2, 2, 2, 1
        ("schedule = 'Interleaved1F1B'", 16, [2, 3, 2, 2, 2, 2, 2, 1]),
        ("schedule = 'Interleaved1F1B'", 5, "5 layers are too few for 8 stages"),
        ("schedule = 'Interleaved1F1B' layers_per_stage = 3", 32, [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 1]),
        ("layers_per_stage = 9", 32, [8, 9, 8, 7]),
        ("layers_per_stage = 4", 30, "2 stages a pipeline rank under 1F1B, which has one"),
        ("schedule = 'GPipe' layers_per_stage = 4", 30, "2 stages a pipeline rank under GPipe, which has one"),
        ("schedule = 'Interleaved1F1B' layers_per_stage = 9", 32, "1 stage a pipeline rank under Interleaved1F1B"),
        ("first_stage_less_layers = -1", 16, "at least 0, got -1"),
        ("schedule = '1B1F' layers_per_stage = 9", 32, "no schedule '1B1F'"),
    ],
)
def test_the_stages_of_torchtitan(more: str, layers: int, want: str | list[int], tmp_path: Path) -> None:
    """The layers of a stage are those of generate_llm_fqn_per_model_part, torchtitan 0.2."""
    lines = [f"parallelism.pipeline_parallel_{line}" for line in re.findall(r"\w+ = \S+", more)]
    text = "\n".join([PIPELINE, *lines])
    if isinstance(want, str) and want != "even":
        with pytest.raises(UsageError, match=want):
            toml(text, tmp_path, layers=layers)
        return
    read = toml(text, tmp_path, layers=layers)
    check_faults(read, ())
    assert read.fields["cut"] == (("even",) if want == "even" else as_cut(want))  # type: ignore[arg-type]


def test_stages_that_are_balanced_by_cost_are_noted(tmp_path: Path) -> None:
    for tool in TOOLS:
        balanced = Plan(dp=2, pp=4, microbatches=4, zero=1)
        (note,) = emit_notes(balanced, tool, BATCH)
        assert note.endswith(": --cut even" if tool == "megatron" else "not by cost: --cut 8,17,25")
        assert f"# note: {note}" in emit(balanced, tool, BATCH)
        path = written(tmp_path / tool, emit(balanced, tool, BATCH))
        cut = READERS[tool](path, None, 32).fields["cut"]
        assert note.endswith(f"--cut {','.join(cut)}")
        for plan in (replace(balanced, cut=("even",)), Plan(dp=2)):
            assert not emit_notes(plan, tool, BATCH)
            assert "# note" not in emit(plan, tool, BATCH)


def test_depths_that_are_too_small_or_not_known() -> None:
    few = Plan(dp=2, pp=4, microbatches=4, zero=1, chunks=2, schedule="interleaved")
    (note,) = emit_notes(few, "torchtitan", BATCH._replace(layers=3))  # too few for torchtitan
    assert note.endswith("not by cost")
    even = Plan(dp=2, pp=4, microbatches=4, zero=1, cut=("even",))
    assert "layers" not in emit(even, "megatron", BATCH._replace(layers=None)).replace("equal numbers of layers", "")


def test_the_nearest_plan_of_other_stages_is_not_cut_where_it_was() -> None:
    """Megatron-LM has no interleaved schedule of one microbatch."""
    plan = Plan(dp=2, pp=2, chunks=2, schedule="interleaved", zero=1, cut=("6", "12", "18"))
    settings = BATCH._replace(layers=24)
    near, applied, _ = nearest_plan(plan, "megatron", settings)
    assert (near.chunks, near.cut) == (1, ())
    assert emit(near, "megatron", applied)
    odd = Plan(dp=2, pp=4, microbatches=4, zero=1, cut=("1", "20", "21"))
    near, applied, _ = nearest_plan(odd, "megatron", BATCH._replace(layers=33))  # 8, 9, 8 and 8 it cannot have
    assert near.cut == ()
    assert emit(near, "megatron", applied)


def test_equal_numbers_of_layers_are_written() -> None:
    plan = Plan(dp=2, pp=4, microbatches=4, zero=1, cut=("even",))
    for layers, keys in ((30, {}), (32, {"first": 0, "last": 0})):
        found = torchtitan(plan, BATCH._replace(layers=layers))["parallelism"]
        less = {end: found.get(f"pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")}
        assert {end: n for end, n in less.items() if n is not None} == keys
    interleaved = replace(plan, schedule="interleaved", chunks=4)
    found = torchtitan(interleaved, BATCH._replace(layers=32))["parallelism"]
    assert (found["pipeline_parallel_layers_per_stage"], found["pipeline_parallel_last_stage_less_layers"]) == (2, 0)
    one = torchtitan(plan, BATCH._replace(layers=33))["parallelism"]  # 8, 9, 8, 8
    assert one["pipeline_parallel_last_stage_less_layers"] == 0
    for tool in TOOLS:
        for cut, layers, said in (
            (("1", "20", "21"), 32, r"stages of 1, 19, 1, 11 layers .hint: nearest: --cut even"),
            (("1", "20", "21"), None, r"numbers of layers of a model of unknown depth .hint: nearest: --cut balanced"),
            (("1", "20", "w"), 32, "stages that begin at given weights"),
            (("1", "20"), 32, "stages that begin at given weights"),
        ):
            with pytest.raises(InfeasibleError, match=said):
                emit(replace(plan, cut=cut), tool, BATCH._replace(layers=layers))


@pytest.mark.parametrize(
    ("cut", "chunks", "layers", "options"),
    [
        ("even", 1, 32, {}),
        ("8,16,24", 1, 32, {}),
        ("even", 1, 30, {"--account-for-embedding-in-pipeline-split": "", "--account-for-loss-in-pipeline-split": ""}),
        ("8,16,24", 1, 31, {"--account-for-loss-in-pipeline-split": ""}),
        ("2,11,20", 1, 29, {"--decoder-first-pipeline-num-layers": "2"}),
        ("9,18,27", 1, 29, {"--decoder-last-pipeline-num-layers": "2"}),
        ("1,10,19", 1, 21, {"--decoder-first-pipeline-num-layers": "1", "--decoder-last-pipeline-num-layers": "2"}),
        (
            "1,3,5,6,7,9,11",
            2,
            12,
            {"--decoder-first-pipeline-num-layers": "2", "--decoder-last-pipeline-num-layers": "2"},
        ),
    ],
)
def test_stages_written_for_megatron(
    cut: str, chunks: int, layers: int, options: dict[str, str], tmp_path: Path
) -> None:
    plan = Plan(
        dp=2,
        pp=4,
        microbatches=4,
        zero=1,
        cut=tuple(cut.split(",")),
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )
    found = arguments(plan, tmp_path, BATCH._replace(layers=layers))
    said = {f"--{k}": v for k, v in found.items() if k.startswith(("decoder", "account"))}
    assert said == options


def test_devices_and_micro_batch_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="how many devices"):
        megatron("", tmp_path, None)
    with pytest.raises(UsageError, match="--micro-batch-size is missing"):
        READERS["megatron"](written(tmp_path / "a", "--bf16"), 8, None)
    with pytest.raises(UsageError, match="cannot read"):
        READERS["megatron"](str(tmp_path / "none"), 8, None)


def toml(text: str, tmp_path: Path, devices: int | None = 8, layers: int | None = None) -> Any:
    return READERS["torchtitan"](written(tmp_path / "train.toml", text), devices, layers)


def test_defaults_of_torchtitan(tmp_path: Path) -> None:
    """All that is left of the devices is FSDP; every second layer is recomputed, which distir cannot do."""
    read = toml("[model]\nname = 'llama3'\n[training]\nsteps = 10\n[optimizer]\nlr = 1e-4", tmp_path)
    assert (read.ignored, read.devices) == (["model.name", "training.steps", "optimizer.lr"], 8)
    with pytest.raises(InfeasibleError, match="every layer of 2"):
        check_faults(read, ())
    check_faults(read, ("recompute",))
    plan = Plan(**read.fields)
    assert (plan.dp, plan.zero, plan.microbatches) == (8, 3, 1)
    assert read.settings == TrainingSettings(64, 2048, Precision("bf16"))


def test_gathered_parameters_stay_where_a_pipeline_uses_them_again(tmp_path: Path) -> None:
    text = "[activation_checkpoint]\nmode = 'none'\n[parallelism]\npipeline_parallel_degree = 2\n[training]\n"
    plan = Plan(**toml(text + "local_batch_size = 6\nglobal_batch_size = 24", tmp_path).fields)
    assert (plan.dp, plan.pp, plan.zero, plan.microbatches) == (4, 2, 1, 6)
    read = toml(text + "local_batch_size = 6\nglobal_batch_size = 48", tmp_path)
    with pytest.raises(InfeasibleError, match=r"2 runs of the pipeline.*local_batch_size = 12"):
        check_faults(read, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[parallelism]\ntensor_parallel_degre = 2", "did you mean tensor_parallel_degree"),
        ("[paralelism]\ntensor_parallel_degree = 2", "did you mean parallelism"),
        ("[parallelism]\ntensor_parallel_degree = '2'", "expected int, got '2'"),
        ("[parallelism]\ntensor_parallel_degree = 0", "at least 1, got 0"),
        ("[parallelism]\ntensor_parallel_degree = 3", "8 devices are no"),
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = '1B1F'", "no schedule '1B1F'"),
        ("[activation_checkpoint]\nmode = 'most'", "expected selective or full"),
        ("[training]\nglobal_batch_size = 20", "no multiple of 8 local batches of 8"),
        ("parallelism = 3", "parallelism is a section"),
        ("[", "is no TOML"),
    ],
)
def test_bad_files_of_torchtitan(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        toml(text, tmp_path)


def test_a_shard_degree_of_what_is_left_needs_the_devices(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"how many there are is not said.*--gpus N"):
        toml("", tmp_path, None)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'ZBVZeroBubble'", "schedule"),
        ("[parallelism]\ndisable_loss_parallel = true", "tp"),
        ("[training]\nenable_cpu_offload = true", "zero"),
        ("[model]\nconverters = ['float8']", "precision"),
        ("[activation_checkpoint]\nmode = 'memory_budget'", "recompute"),
        ("[parallelism]\nexpert_parallel_degree = 4\ntensor_parallel_degree = 2", "split"),
    ],
)
def test_what_distir_cannot_do_of_torchtitan_is_said(text: str, field: str, tmp_path: Path) -> None:
    read = toml(text, tmp_path)
    assert field in [fault.field for fault in read.faults]
    with pytest.raises(InfeasibleError):
        check_faults(read, {"recompute"} - {field})


# ---- names of options


def listed(name: str) -> dict[str, list[str]]:
    lines = [line for line in (HERE / name).read_text().splitlines() if not line.startswith("#")]
    return {cells[0]: cells[1:] for cells in [line.split("\t") for line in lines]}


def test_names_and_defaults_of_torchtitan_are_those_of_its_source() -> None:
    source = listed("torchtitan_options.tsv")
    ours = {f"{section}.{key}": option for section, table in TORCHTITAN.items() for key, option in table.items()}
    assert {*ours} == {*source}
    for key, option in ours.items():
        kind, default = source[key]
        assert option.type.__name__ in (kind.split(" ")[0].split("[")[0], "dict") or kind.startswith("Literal"), key
        if "field(" not in default:
            assert option.default == eval(default) or (option.default, default) == ("", "None"), key
        if option.choices:
            assert set(option.choices) == set(eval(kind.removeprefix("Literal").replace("]", ",]"))), key


def test_names_of_megatron_are_those_of_its_source() -> None:
    source = listed("megatron_arguments.tsv")
    assert {*MEGATRON} <= {*source}
    for name, option in MEGATRON.items():
        kind = source[name][0]
        assert kind in (option.type.__name__, ",".join(option.choices)) or (option.type is str and not option.choices)


@settings(deadline=None, max_examples=40)
@given(plan=plans(), training=SETTINGS)
def test_only_known_options_with_values_of_theirs_are_written(
    plan: Plan, training: TrainingSettings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    near, applied, _ = nearest_plan(plan, "torchtitan", training)
    source = listed("torchtitan_options.tsv")
    for section, options in tomllib.loads(emit(near, "torchtitan", applied)).items():
        for key, x in options.items():
            kind = source[f"{section}.{key}"][0]
            assert json.dumps(x) in kind.replace("'", '"') or type(x).__name__ in kind, (key, x)
    near, applied, _ = nearest_plan(plan, "megatron", training)
    names = listed("megatron_arguments.tsv")
    path = written(tmp_path_factory.mktemp("args") / "a", emit(near, "megatron", applied))
    for name, words in shell_options(path).options.items():
        kind = names[name][0]
        assert (words == []) == (kind == "bool"), name
        assert kind in ("bool", "int") or words[0] in kind.split(","), name
