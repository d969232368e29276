"""Temporary folders of runs that were killed are removed by the next run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distir.runtime.run_directory import scratch_folder
from tests.runs import ROOT, Family

KILLED = """
import os, signal
import distir.backends.processes.launch
from distir.api.locate import _recording
from distir.ir.function import FunctionMaker
from distir.runtime.job import Job

distir.backends.processes.launch.run = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
f = FunctionMaker("f")
f.set_outputs([])
with _recording(Job(f.finalize(), {}), None):
    pass
"""


def test_values_of_a_check_that_was_killed_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = Family().env(TMPDIR=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", KILLED], env=env, cwd=ROOT).returncode == -signal.SIGTERM
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []
