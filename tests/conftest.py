"""Hypothesis profiles; how many processes run the tests; what tests may not leave; skips that fail where all is there
(.ci/run: DISTIR_NO_SKIP=1)."""

import functools
import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from distir.backends.processes import fork_server

# Before numpy and torch are loaded: threads of one test would only take the cores that the other processes need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where no bytecode is kept, every process that a test starts compiles all of distir again: half a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell's background job begins with SIGINT ignored, and so would what tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MOST_PROCESSES = 8
"""Tests start ranks of their own, up to eight each."""

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

NO_SKIP = os.environ.get("DISTIR_NO_SKIP") == "1"


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        # The text of a skip is (path, line, reason).
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason} (DISTIR_NO_SKIP: only tests marked gpu or mpi may skip)"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: a process per core for whole folders; none for files or single tests, which then begin at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    folders = all(Path(arg).is_dir() for arg in config.args)
    interactive = config.getoption("capture") == "no"  # -s: what workers print is not shown
    return min(cores, MOST_PROCESSES) if folders and cores > 1 and not interactive else 0


@pytest.fixture(scope="session")
def torch_loaded() -> Generator[fork_server.ForkServer, None, None]:
    server = fork_server.ForkServer()
    yield server
    server.end()


@pytest.fixture
def preloaded(torch_loaded: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of runs on this host are forked from a process that has loaded torch, which takes longer than most runs of
    tests. Tests of how processes start and end do without."""
    if sys.platform == "linux":
        monkeypatch.setattr(fork_server, "_server", torch_loaded)
        monkeypatch.setattr(fork_server, "OF_A_RUN", fork_server.OF_A_RUN | {"PYTEST_CURRENT_TEST"})


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What the functions of tests have cached goes with the module: with all that is derived from a program, it would
    be millions of objects, which every collection traverses."""
    if nextitem is not None and nextitem.path != item.path:
        for name, module in list(sys.modules.items()):
            if name.startswith("tests."):
                for x in list(vars(module).values()):
                    if isinstance(x, functools._lru_cache_wrapper):
                        x.cache_clear()


def pytest_sessionfinish() -> None:
    """What tests have left is not collected: it takes seconds, in which pytest-xdist interrupts its processes."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """No test leaves another default dtype of torch's to those after it."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_default_dtype() != torch.float32:
        left = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        pytest.fail(f"{item.name} has left {left} as torch's default dtype")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu") is None and item.get_closest_marker("mpi") is None:
        _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid_skip(report)  # a whole module, as by importorskip
    return report
