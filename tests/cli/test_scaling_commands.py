"""Epochs, metrics, scaling and figures from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distir.cli import main

ROOT = Path(__file__).parents[2]
GPT, MLP = (str(ROOT / "examples" / f"{name}.onnx") for name in ("gpt2-tiny", "mlp"))
TRAIN = ["--dim", "batch=4", "--loss", "cross-entropy", "--backend", "numpy"]
WORDS = "".join(f"{k} bottles of beer on the wall, {k} bottles of beer\n" for k in range(300))


@pytest.fixture
def cli(capfd):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def call(*args):
        code = main([str(x) for x in args])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(WORDS)
    return path


def test_a_row_an_epoch(cli, corpus: Path, tmp_path: Path):
    file, bpe = tmp_path / "m.json", tmp_path / "bpe.json"
    flags = ["--dp", 2, "--data", corpus, "--epochs", 2, "--steps", 3, "--metrics", file, "--tokenizer", bpe]
    code, out, err = cli("run", GPT, *TRAIN, *flags, "--check")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[2].split() == ["epoch", "loss", "validation", "loss", "time", "tokens/s"]
    assert [line.split()[0] for line in lines[3:5]] == ["0", "1"]
    assert lines[6].startswith("epoch ")
    assert "(epoch 1)" in lines[6]
    assert lines[7].startswith("check passed")
    found = json.loads(file.read_text())
    assert len(found["epochs"]) == 2
    assert found["steps"] == 3
    assert bpe.exists()
    again = json.loads(cli("run", GPT, *TRAIN, *flags, "--json")[1])
    losses = [row["validation_loss"] for row in again["metrics"]["epochs"]]
    assert losses == [row["validation_loss"] for row in found["epochs"]]
    assert len(again["losses"]) == 6


def test_all_of_the_data_without_validation(cli, tmp_path: Path):
    ids = np.random.default_rng(0).integers(0, 509, (18, 16))
    np.savez(tmp_path / "data.npz", input_ids=ids, labels=ids)
    flags = ["--data", tmp_path / "data.npz", "--epochs", 1, "--val-fraction", 0, "--json"]
    found = json.loads(cli("run", GPT, *TRAIN, *flags)[1])
    assert len(found["losses"]) == 4
    assert found["metrics"]["samples"] == {"training": 18, "held_out": 0}
    assert found["metrics"]["epochs"][0]["validation_loss"] is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--epochs", 0], ["--epochs", "at least 1"]),
        (["--epochs", 1, "--val-fraction", 1], ["--val-fraction", "below 1"]),
        (["--epochs", 1, "--val-fraction", "x"], ["--val-fraction", "a number"]),
        (["--metrics", "no/such/folder/m.json"], ["cannot write no/such/folder/m.json"]),
        (["--data", "missing.txt"], ["cannot read data file missing.txt"]),
        (["--data", "EMPTY"], ["is empty"]),
        (["--data", "CORPUS", "--epochs", 1, "--val-fraction", 0.99], ["held out", "hint: --val-fraction 0"]),
    ],
)
def test_bad_flags_exit_2(cli, corpus: Path, tmp_path: Path, flags: list, words: list[str]):
    (tmp_path / "empty.txt").write_text("")
    named = {"EMPTY": tmp_path / "empty.txt", "CORPUS": corpus}
    code, out, err = cli("run", GPT, *TRAIN, *[named.get(x, x) for x in flags])
    assert (code, out) == (2, "")
    assert err.startswith("distir: error: ")
    for word in words:
        assert word in err


def test_scaling_and_its_figure(cli, tmp_path: Path):
    file, figure = tmp_path / "s.json", tmp_path / "s.svg"
    code, out, err = cli("bench", "scaling", GPT, *TRAIN, "--epochs", 2, "--steps", 2, "--metrics", file)
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()[1:3]] == [["1", "rank", "4"], ["2", "ranks", "8"]]
    assert f"distir plot {file}" in out
    assert [run["batch"] for run in json.loads(file.read_text())["runs"]] == [4, 8]
    assert cli("plot", file, "-o", figure) == (0, f"drawn: {figure}\n", "")
    assert figure.read_text().startswith("<?xml")
    code, out, _ = cli("plot", file, file, "-o", figure, "--json")
    assert json.loads(out) == {"files": [str(file)] * 2, "figure": str(figure)}


def test_scaling_as_json(cli):
    flags = ["--dim", "batch=4", "--loss", "mse", "--backend", "numpy", "--epochs", 1, "--steps", 2]
    _, out, _ = cli("bench", "scaling", MLP, *flags, "--ranks", "1,4", "--json")
    assert [run["plan"]["dp"] for run in json.loads(out)["runs"]] == [1, 4]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bench", "scaling", GPT, "--loss", "cross-entropy"], ["not given: batch", "hint: --batch 64"]),
        (["bench", "scaling", GPT, *TRAIN, "--ranks", "1,1"], ["distinct"]),
        (["bench", "scaling", GPT, *TRAIN, "--ranks", "1,x"], ["--ranks", "whole number"]),
        (["plot", "missing.json", "-o", "x.pdf"], ["cannot read missing.json"]),
        (["plot", GPT, "-o", "x.pdf"], ["gpt2-tiny.onnx"]),
        (["plot", "m.json"], ["-o"]),
    ],
)
def test_what_cannot_be_measured_or_drawn(cli, args: list[str], words: list[str]):
    code, out, err = cli(*args)
    assert (code, out) == (2, "")
    for word in words:
        assert word in err


@pytest.mark.parametrize("words", [["plot"], ["bench", "scaling"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        main([*words, "--help"])
    assert e.value.code == 0
    assert "exit codes" in capsys.readouterr().out
