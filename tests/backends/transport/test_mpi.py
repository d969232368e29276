"""MPI, where it is: all that a rank communicates, models against the sequential program, proxies; ranks that fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distir.api import load, simulate
from distir.api.network_file import COLLECTIVES as MEASURED
from distir.api.network_file import SIZES
from distir.backends.processes.bench_collectives import COLLECTIVES
from distir.cli import main
from distir.hardware import load_cluster
from distir.runtime.launcher import launched, this_rank
from tests.backends.mpi import mpirun, needs_mpi
from tests.test_cli import MLP, MSE


def _needs_mpi(test: Any) -> Any:
    for mark in needs_mpi:
        test = mark(test)
    return test


FAILING = """
from distir.backends.lowering import engine
from distir.runtime.launcher import this_rank

class Rank(engine.TorchRank):
    def step(self):
        if this_rank() == 1:
            raise RuntimeError("no more\\nof this")
        return super().step()

from distir.backends.processes import rank_loop
rank_loop.TorchRank = Rank
from distir.cli import console
console()
"""
"""A command line whose rank 1 fails in its first step."""


@_needs_mpi
def test_every_op_and_dtype_and_models() -> None:
    done = mpirun(4, "-m", "tests.backends.transport.mpi_rank")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert min(found["values"]) > 500
    assert tuple(found["collectives"]) == COLLECTIVES
    assert all(found["ok"])
    assert max(max(row) for row in found["errors"]) <= 1e-10
    assert found["iterations"] == [3] * len(found["errors"])
    assert set(found["backends"]) == {"mpi"}


@_needs_mpi
def test_a_cluster_file_of_the_network(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    done = mpirun(2, "-m", "distir", "bench", "collectives", "--backend", "mpi", "--out", file, "--pause", 0)
    assert done.returncode == 0, done.stderr
    assert f"written to {file}" in done.stdout
    regular = load_cluster(file).regular
    assert regular is not None
    assert regular.in_turn
    assert [(m.collective, m.ranks) for m in regular.measured] == [(c, 2) for c in MEASURED]
    assert all(len(m.points) == len(SIZES) for m in regular.measured)
    assert simulate(load("proxy-dlrm:ranks=2"), cluster=str(file)).step_seconds > 3.091e-3


def said(text: str) -> list[str]:
    """The lines of distir: mpirun has lines of its own."""
    return re.findall(r"^(?:distir|hint): .*", text, re.MULTILINE)


@_needs_mpi
def test_another_number_of_ranks() -> None:
    done = mpirun(2, "-m", "distir", "run", MLP, *MSE, "--dp", 4, "--backend", "mpi", "--json")
    assert done.returncode == 2
    assert said(done.stderr) == ["distir: error: the plan has 4 ranks, mpirun started 2"]
    assert json.loads(done.stdout)["exit_code"] == 2


@_needs_mpi
def test_a_rank_that_fails_ends_all() -> None:
    done = mpirun(2, "-c", FAILING, "run", MLP, *MSE, "--dp", 2, "--backend", "mpi")
    assert done.returncode == 6
    assert said(done.stderr) == ["distir: rank 1: error: rank 1 failed: RuntimeError: no more"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([*words]) == 2
    return said(capsys.readouterr().err)


RUN = ("run", str(MLP), *map(str, MSE), "--dp", "2")
BENCH = ("bench", "collectives")
WITHOUT_MPIRUN = [
    "distir: error: backend mpi runs on ranks that mpirun has started",
    "hint: mpirun -n RANKS distir ...",
]
WITHOUT_MPI4PY = [
    "distir: error: backend mpi needs mpi4py, which is not installed",
    "hint: pip install 'distir[mpi]' brings mpi4py, Open MPI and mpirun",
]


@pytest.mark.parametrize("words", [RUN, (*RUN, "--proxy"), BENCH], ids=["run", "proxy", "bench"])
def test_what_mpi_needs(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert refused(capsys, *words, "--backend", "mpi") == WITHOUT_MPIRUN
    monkeypatch.setenv("RANK", "0")  # of torchrun
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(capsys, *words, "--backend", "mpi") == WITHOUT_MPIRUN
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(capsys, *words, "--backend", "mpi") == WITHOUT_MPI4PY


def test_ranks_of_mpirun_do_not_start_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    for words in (RUN, BENCH):
        assert refused(capsys, *words) == [
            "distir: error: mpirun has started 2 ranks, and backend gloo starts its own",
            "hint: --backend mpi, or leave out mpirun",
        ]
    assert refused(capsys, *RUN, "--backend", "mpi", "--device", "cuda") == [
        "distir: error: backend mpi does not run on cuda",
        "hint: gloo runs on both, nccl on cuda, mpi and numpy on cpu",
    ]


def test_who_has_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    assert this_rank() == 0
    for k, name in enumerate(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str((5, 8, 1, 2)[k]))
    assert launched() == ("mpirun", 5, 8, 1, 2)
    monkeypatch.setenv("RANK", "3")
    assert this_rank() == 5  # without the number of ranks it is not torchrun's
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched() == ("torchrun", 3, 4, 3, 1)
