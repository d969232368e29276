"""Which cores ranks run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distir.backends.processes import cores
from distir.backends.processes.cores import bind


def test_a_thread_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[int]] = []
    monkeypatch.setattr(cores, "_host_cores", lambda: [0, 4, 1, 5])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: told.append([pid, *mask]), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    bind(1, 2)
    bind(5, 8)
    assert told == [[0, 1, 5], [0, 4]]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    bind(1, 2)
    bind(5, 8)  # its threads need all cores
    assert told[2:] == [[0, 1, 5]]
    monkeypatch.setenv("DISTIR_BIND", "0")
    bind(1, 2)
    assert len(told) == 3


def test_hardware_threads_of_a_core_lie_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, (package, core) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 1), (1, 1)]):
        where = tmp_path / f"cpu{cpu}" / "topology"
        where.mkdir(parents=True)
        (where / "physical_package_id").write_text(f"{package}\n")
        (where / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(cores, "_TOPOLOGY", str(tmp_path) + "/cpu{}/topology")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cores._host_cores() == [0, 4, 2, 6, 1, 5, 3, 7]
    monkeypatch.setattr(cores, "_TOPOLOGY", str(tmp_path) + "/none{}")
    assert cores._host_cores() == list(range(8))
