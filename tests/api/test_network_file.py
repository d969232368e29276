"""Cluster files of a measured network: what is refused (see `tests/ir/test_measured.py` for the files)."""

from __future__ import annotations

from pathlib import Path

import pytest

from distir.api.network_file import measure_network
from distir.ir.errors import UsageError
from distir.runtime.launcher import MPIRUN, Launched


def test_one_rank_has_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distir.api.network_file.joins", lambda backend: Launched(MPIRUN, 0, 1, 0, 1))
    with pytest.raises(UsageError, match="a cluster file is of times among ranks, and there is 1"):
        measure_network(tmp_path / "net.toml")
    assert list(tmp_path.iterdir()) == []


def test_only_over_mpi(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="for backend mpi, not for nccl"):
        measure_network(tmp_path / "net.toml", "nccl")
