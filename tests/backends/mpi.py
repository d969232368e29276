"""Runs of mpirun for tests, where it is there with mpi4py: the extra `mpi` brings both."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS = 300.0
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # ranks may share cores
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def _mpirun() -> str | None:
    """The mpirun beside this Python, else the first of the path; None without mpi4py, too."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return None if importlib.util.find_spec("mpi4py") is None else shutil.which("mpirun", path=path)


MPIRUN = _mpirun()


needs_mpi = (
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="needs mpi4py and mpirun: pip install -e '.[dev,mpi]'"),
)
"""The marks of tests that run mpirun."""


def mpirun(n: int, *words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run this Python on n ranks."""
    assert MPIRUN is not None
    own = {k: x for k, x in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    env = {**own, "PYTHONPATH": str(ROOT), **SETTINGS, **(env or {})}
    line = [MPIRUN, "-n", str(n), sys.executable, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=env, timeout=SECONDS)
