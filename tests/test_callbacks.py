"""What callbacks raise reaches whoever called; a closed pipe ends a run in silence, and all of its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import distir
from distir.api.metrics import Metrics
from distir.ir.errors import MismatchError
from tests.runs import ROOT, Family, small

MODULE = [sys.executable, "-m"]
MLP = ["distir", "run", "examples/mlp.onnx", "--dim", "batch=8", "--loss", "mse"]
RAISED = [BrokenPipeError("mine"), ConnectionResetError("mine"), EOFError("mine"), MismatchError("mine"), KeyError(3)]


def raising(error: Exception) -> Any:
    def callback(event: Any, *_: Any) -> None:
        if not isinstance(event, Metrics) or event.epochs:  # else the run has not begun
            raise error

    return callback


@pytest.mark.parametrize("name", ["on_plan", "on_step", "on_epoch", "on_check"])
@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_an_error_of_a_callback_is_the_caller_s(name: str, error: Exception) -> None:
    settings: dict[str, Any] = {"check": True, "epochs": 1, name: raising(error)}
    with pytest.raises(type(error)) as found:
        distir.run(small(), distir.Plan(dp=2), steps=2, backend="numpy", **settings)
    assert found.value is error


@pytest.mark.parametrize(("name", "error"), [("on_step", RAISED[0]), ("on_epoch", RAISED[2])])
def test_ranks_that_run_end_with_an_error_of_a_callback(name: str, error: Exception, monkeypatch: Any) -> None:
    family = Family()
    key, _, value = family.mark.partition("=")
    monkeypatch.setenv(key, value)
    settings: dict[str, Any] = {"epochs": 1, name: raising(error)}
    with pytest.raises(type(error)) as found:
        distir.run(small(), distir.Plan(dp=2), steps=3, timeout=300, **settings)
    assert found.value is error
    assert set(family.alive()) <= {os.getpid()}


def test_a_callback_may_take_longer_than_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have ended before what they said is heard."""
    family, heard = Family(), []
    key, _, value = family.mark.partition("=")
    monkeypatch.setenv(key, value)

    def on_step(step: int, *_: Any) -> None:
        heard.append(step)
        if step == 0:
            family.wait_for_the_end(60)

    result = distir.run(small(), steps=3, on_step=on_step)
    assert heard == [0, 1, 2]
    assert len(result.losses) == 3
    assert result.weights


JOINED = """
import os, sys
import torch.distributed
import distir
from tests.runs import small

torch.distributed.init_process_group("gloo")  # one group for all runs

def report(what):
    sys.stdout.write(f"rank {os.environ['RANK']}: {what}\\n")
    sys.stdout.flush()

def raising(k, *_):
    raise error

for error in (ValueError("mine"), ConnectionResetError("mine"), BrokenPipeError("mine")):
    try:
        distir.run(small(), distir.Plan(dp=2), steps=4, timeout=30, on_step=raising)
    except Exception as e:
        report(f"{type(e).__name__}: {e}; {e is error}")
torch.distributed.destroy_process_group()  # else torch 2.13 may abort at exit
"""


def test_all_ranks_of_torchrun_hear_of_it() -> None:
    line = [*MODULE, "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable, "-c", JOINED]
    done = subprocess.run(line, env=Family().env(), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0: BrokenPipeError: mine; True",
        "rank 0: ConnectionResetError: mine; True",
        "rank 0: ValueError: mine; True",
        "rank 1: BrokenPipeError: a callback of rank 0 failed: BrokenPipeError: mine; False",
        "rank 1: WorkerError: a callback of rank 0 failed: ConnectionResetError: mine; False",
        "rank 1: WorkerError: a callback of rank 0 failed: ValueError: mine; False",
    ]


def read_lines(line: list[str], lines: int) -> tuple[int, str, Family]:
    """Run a command of whose stdout only so many lines are read: (exit code, what distir wrote to stderr)."""
    family, pipe = Family(), subprocess.PIPE
    process = subprocess.Popen(line, env=family.env(), cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(lines):
        assert process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    return process.wait(timeout=300), said, family


SLOW = pytest.mark.slow
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "-m"]


@pytest.mark.parametrize("epochs", [[], pytest.param(["--epochs", "100000"], marks=SLOW)], ids=["steps", "epochs"])
def test_a_reader_that_has_enough_ends_a_run(epochs: list[str]) -> None:
    flags = ["--dp", "2", "--steps", "2" if epochs else "100000", *epochs]
    code, said, family = read_lines([*MODULE, *MLP, *flags], 4)
    assert (code, said) == (0, "")
    family.wait_for_the_end(2)


@pytest.mark.parametrize("lines", [pytest.param(0, marks=SLOW), 4])
def test_a_reader_that_has_enough_ends_torchrun(lines: int) -> None:
    flags = ["--dp", "2", "--steps", "100000", "--timeout", "60"]
    code, said, family = read_lines([*MODULE, *TORCHRUN, *MLP, *flags], lines)
    assert code == 0
    assert "distir" not in said
    family.wait_for_the_end(2)


@pytest.mark.parametrize("start", [[], pytest.param(TORCHRUN, marks=SLOW)], ids=["here", "torchrun"])
def test_a_reader_that_has_enough_ends_a_benchmark(start: list[str]) -> None:
    code, said, family = read_lines([*MODULE, *start, "distir", "bench", "collectives", "--timeout", "60"], 1)
    assert code == 0
    assert "distir" not in said
    family.wait_for_the_end(2)


@pytest.mark.parametrize(
    ("flags", "closed", "code"),
    [
        (["clusters"], {1}, 0),
        (["clusters"], {0, 1, 2}, 0),
        (["show", "missing.onnx", "--json"], {1}, 2),
        (["show", "missing.onnx", "--json"], {2}, 2),
        ([*MLP[1:], "--dp", "2", "--steps", "2"], {0, 1, 2}, 0),
    ],
)
def test_closed_streams(flags: list[str], closed: set[int], code: int) -> None:
    """They are no error, nor does what goes to one come out of another."""

    def close() -> None:
        for number in closed:
            os.close(number)

    line = [*MODULE, "distir", *flags]
    done = subprocess.run(line, env=Family().env(), cwd=ROOT, capture_output=True, text=True, preexec_fn=close)
    assert done.returncode == code, done.stderr
    if code == 0:
        assert done.stderr == ""
    elif 1 in closed:
        assert done.stderr == "distir: error: there is no file missing.onnx\n"
    else:
        assert "missing.onnx" in done.stdout
        assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("flags", [["show", "missing.onnx"], ["show", "missing.onnx", "--json"]])
def test_an_error_that_nobody_reads(flags: list[str]) -> None:
    """Its exit code stays what it is."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*MODULE, "distir", *flags], env=Family().env(), cwd=ROOT, stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 2
