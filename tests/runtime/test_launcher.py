"""What started this process, and the cores that its ranks have."""

from __future__ import annotations

import os

import pytest

from distir.runtime import launcher
from distir.runtime.launcher import cores_of_ranks


def test_cores_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun binds each rank to its own."""
    for name in os.environ:
        if name.startswith(("OMPI_", "PMI_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(launcher, "host_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert cores_of_ranks() == 2
    for name, x in (("RANK", 1), ("SIZE", 3), ("LOCAL_RANK", 1), ("LOCAL_SIZE", 3)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(x))
    assert cores_of_ranks() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # not bound
    assert cores_of_ranks() == 4
    for name, x in (("RANK", 1), ("WORLD_SIZE", 3), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(x))
    assert cores_of_ranks() == 2  # torchrun binds none
