"""`torchrun -m distir run` does what `distir run` does; torchrun itself exits 1 whatever a rank's exit code is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distir
from tests.test_cli import CORRUPT, ENV, MLP, MSE, ROOT, command

LINE = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "distir", "run", MLP, *MSE]


def torchrun(*flags: object, env: dict[str, str] = ENV) -> subprocess.CompletedProcess[str]:
    line = [*LINE, *map(str, flags)]
    return subprocess.run(line, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What distir, not torchrun, wrote to stderr."""
    return [line for line in done.stderr.splitlines() if line.startswith(("distir: ", "hint: "))]


def exit_codes(done: subprocess.CompletedProcess[str]) -> set[int]:
    """Those of the ranks that failed, as torchrun reports them."""
    return {int(x) for x in re.findall(r"exitcode  : (-?\d+)", done.stderr)}


def test_the_same_result(tmp_path: Path) -> None:
    """One JSON, one file, the losses of a run without torchrun, and the check."""
    flags = ["--dp", 2, "--microbatches", 2, "--steps", 3, "--check", "--json"]
    done = torchrun(*flags, "--save", tmp_path / "trained.onnx", "--profile", tmp_path / "traces")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["check"]["ok"]
    assert found["losses"] == json.loads(command("run", MLP, *MSE, *flags).stdout)["losses"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["traces", "trained.onnx"]
    assert distir.compare(tmp_path / "traces").ranks == 2


def test_only_rank_0_speaks() -> None:
    done = torchrun("--tp", 2, "--steps", 2, "--check")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(x) for x in ("tp splits", "\nstep ", "predicted", "check passed")] == [1, 2, 1, 1]


def test_a_wrong_result_is_located(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CORRUPT)
    env = {**ENV, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = torchrun("--tp", 2, "--microbatches", 2, "--steps", 2, "--check", env=env)
    assert done.returncode == 1
    assert exit_codes(done) == {5}
    (line,) = said(done)
    assert re.search(r"%loss in step 0 differs by .*; in step 0 %\S+ = MPIAllreduce\(%\S+\) .* on rank \d", line), line


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [(["--dp", 4], 2, "the plan has 4 ranks, torchrun started 2"), (["--dp", 2, "--stepz", 3], 2, "--stepz")],
)
def test_errors(flags: list[object], code: int, words: str) -> None:
    """Each rank says what is wrong and which it is, unless it was ended before; rank 0 alone as JSON."""
    done = torchrun(*flags, "--json")
    assert done.returncode == 1
    assert exit_codes(done) <= {code, -15}
    assert code in exit_codes(done)
    starts = {line.partition("error: ")[0] for line in said(done) if words in line}
    assert starts
    assert starts <= {"distir: ", "distir: rank 1: "}
    assert len(done.stdout.splitlines()) <= 1
