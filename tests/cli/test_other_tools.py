"""--torchtitan, --megatron-args and --emit of `simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distir.cli import main

GPT = "gpt:layers=2,hidden=32,heads=4,vocab=64"
TRAINED = ["--loss", "cross-entropy", "--optimizer", "adamw", "--cluster", "dgx-a100"]
ARGS = "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 32 --seq-length 16 --bf16 --lr 1"
TOML = """
[parallelism]
data_parallel_shard_degree = 4
[activation_checkpoint]
mode = "none"
[training]
local_batch_size = 2
global_batch_size = 16
seq_len = 32
"""


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `simulate` in a folder with two files: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    Path("args").write_text(ARGS)
    Path("train.toml").write_text(TOML)

    def call(*args: object) -> tuple[int, str, str]:
        code = main(["simulate", *map(str, args), *TRAINED])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_a_file_gives_plan_batch_sequence_and_precision(cli) -> None:
    code, out, err = cli(GPT, "--megatron-args", "args", "--gpus", 8)
    assert (code, err) == (0, "distir: note: args: 1 option outside the plan ignored: --lr\n")
    same = ["--dim", "batch=32", "--dim", "seq=16", "--precision", "bf16", "--bucket-mb", "inf"]
    assert cli(GPT, *same, "--dp", 4, "--tp", 2, "--microbatches", 4)[:2] == (0, out)
    code, out, err = cli(GPT, "--torchtitan", "train.toml")
    same = ["--dim", "batch=16", "--dim", "seq=32", "--precision", "bf16", "--dp", 4, "--zero", 3]
    assert (code, err) == (0, "")
    assert cli(GPT, *same, "--microbatches", 2)[:2] == (0, out)


def test_flags_override_a_file(cli) -> None:
    code, out, err = cli(f"{GPT},batch=64", "--megatron-args", "args", "--gpus", 8, "--zero", 1, "--precision", "fp32")
    assert code == 0
    assert "args has 32 samples a step, the model 64" in err
    assert "ZeRO 1" in out
    same = [f"{GPT},batch=64,seq=16", "--bucket-mb", "inf", "--dp", 4, "--tp", 2]
    assert cli(*same, "--microbatches", 4, "--zero", 1)[1] == out
    code, out, _ = cli(GPT, "--batch", 64, "--seq", 8, "--megatron-args", "args", "--gpus", 8, "--zero", 1)
    assert (code, "batch 64" in out) == (0, True)


LAYERS = "gpt:layers=14,hidden=16,heads=2,vocab=64"
STAGES = """[activation_checkpoint]
mode = "none"
[parallelism]
pipeline_parallel_degree = 4
[training]
local_batch_size = 8
seq_len = 16
"""


def test_stages_are_those_of_the_file(cli) -> None:
    Path("t.toml").write_text(STAGES)
    Path("m").write_text(f"{ARGS} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2")
    for flag, file, gpus, cut in (("--torchtitan", "t.toml", 4, "3,7,11"), ("--megatron-args", "m", 8, "2,6,10")):
        code, out, _ = cli(LAYERS, flag, file, "--gpus", gpus)
        assert (code, cli(LAYERS, flag, file, "--gpus", gpus, "--cut", cut)[1].splitlines()[5:]) == (
            0,
            out.splitlines()[5:],
        )
        assert cli(LAYERS, flag, file, "--gpus", gpus, "--cut", "balanced")[1] != out
        assert (
            f"cut at {cut.replace(',', ', ')}"
            in cli(LAYERS, "--schedule", "gpipe", flag, file, "--gpus", gpus, "--cut", cut)[1]
        )
        kept = cli(LAYERS, "--schedule", "gpipe", flag, file, "--gpus", gpus)[1]
        assert ("cut at 2, 6, 10" if flag == "--megatron-args" else "stages of equal numbers of layers") in kept
        for flags in (["--pp", 2], ["--chunks", 2, "--schedule", "interleaved"]):
            code, out, err = cli(LAYERS, flag, file, "--gpus", gpus, *flags)
            assert (code, "cut" in out, "layers" in out.splitlines()[0]) == (0, False, False)
            assert f"with {flags[0]} stages are balanced by cost, not as it says" in err


def test_stages_of_megatron_are_equal_however_many(cli) -> None:
    Path("m").write_text(f"{ARGS} --pipeline-model-parallel-size 2")
    code, out, err = cli(LAYERS, "--megatron-args", "m", "--gpus", 8, "--pp", 4)
    assert (code, "stages of equal numbers of layers" in out, "balanced" in err) == (0, True, False)


def test_stages_are_balanced_where_the_model_has_other_layers(cli, tmp_path: Path) -> None:
    """Of a file its layers are those that repeat."""
    from examples.export import export

    export("mlp", tmp_path / "m.onnx", layers=6, width=16)
    model = [str(tmp_path / "m.onnx"), "--dim", "batch=16", "--loss", "mse", "--optimizer", "sgd"]
    few = "6 layers that repeat in the model"
    pipe = "--micro-batch-size 8 --pipeline-model-parallel-size"
    for text, cut, note in (
        (f"{pipe} 2 --decoder-first-pipeline-num-layers 2 --num-layers 6", "2", ""),
        (f"{pipe} 2 --decoder-first-pipeline-num-layers 2 --num-layers 7", "balanced", f"{few}, not the 7 of the file"),
        (f"{pipe} 2", "3", ""),
        (
            f"{pipe} 2 --num-virtual-stages-per-pipeline-rank 4 --global-batch-size 16",
            "balanced",
            f"{few}: stages are balanced by cost",
        ),
    ):
        Path("n").write_text(text)
        code, out, err = cli(*model, "--megatron-args", "n", "--gpus", 2)
        assert (code, note in err) == (0, True)
        again = cli(*model, "--megatron-args", "n", "--gpus", 2, "--cut", cut)
        assert again[0] == 0
        assert again[1].splitlines()[1:] == out.splitlines()[1:]
        assert "cut at 4," in cli(*model, "--megatron-args", "n", "--pp", 2, "--chunks", 1, "--gpus", 2, "--cut", 4)[1]


def test_plans_are_written_and_read_back(cli) -> None:
    given = [GPT, "--dim", "batch=32", "--dim", "seq=16", "--precision", "bf16", "--dp", 4, "--tp", 2, "--zero", 3]
    given += ["--sequence-parallel", "--recompute", "full"]
    code, out, err = cli(
        *given, "--emit", "torchtitan", "a.toml", "--emit", "megatron", "b", "--emit", "distir", "c.toml"
    )
    assert (code, err) == (0, "")
    *same, a, b, c = out.splitlines()
    assert (a, b, c) == tuple(
        f"plan written for {x}" for x in ("torchtitan to a.toml", "megatron to b", "distir to c.toml")
    )
    for flag, path in (("--torchtitan", "a.toml"), ("--megatron-args", "b")):
        assert cli(GPT, flag, path)[1].splitlines() == same
    assert cli(*given[:7], "--plan", "c.toml")[1].splitlines() == same
    found = json.loads(cli(*given, "--emit", "megatron", "b", "--json")[1])
    assert found["emitted"] == [{"tool": "megatron", "file": "b"}]


def test_nothing_is_written_if_one_file_cannot_be(cli) -> None:
    got, _, err = cli(f"{GPT},batch=32,seq=16", "--emit", "distir", "x", "--emit", "megatron", "none/y")
    assert got == 2
    assert "cannot write none/y: none is no folder that can be written to" in err
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("code", "flags", "words", "hint"),
    [
        (2, ["--plan", "p", "--torchtitan", "train.toml"], "--plan and --torchtitan each give a plan", "one of them"),
        (2, ["--gpus", "8"], "--gpus is of a file of another tool", "--torchtitan or --megatron-args"),
        (2, ["--megatron-args", "args"], "args does not say how many devices there are", "--gpus N"),
        (2, ["--emit", "deepspeed", "x"], "no plans are written for 'deepspeed'", "distir, torchtitan, megatron"),
        (4, ["--dp", "2", "--zero", "1", "--emit", "torchtitan", "x"], "cannot express ZeRO 1", "nearest: --zero 2"),
        (2, ["--emit", "distir", "x", "--emit", "megatron", "x"], "x is to be written twice", "another name"),
        (2, ["--emit", "distir", "x", "--emit", "megatron", "x/"], "x/ is to be written twice", "another name"),
        (4, ["--torchtitan", "bad.toml"], "every layer of 2 is recomputed", "--recompute full or selective"),
    ],
)
def test_errors(cli, code: int, flags: list[str], words: str, hint: str) -> None:
    Path("bad.toml").write_text("[parallelism]\ndata_parallel_shard_degree = 4\n")
    got, out, err = cli(f"{GPT},batch=32,seq=16", *flags)
    assert (got, out) == (code, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert words in lines[0]
    assert lines[1].startswith("hint: ")
    assert hint in lines[1]
    assert not Path("x").exists()
    if "bad.toml" in flags:  # a flag says instead what the file cannot
        assert cli(f"{GPT},batch=32,seq=16", *flags, "--recompute", "full")[0] == 0
