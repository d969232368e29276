"""Hypothesis profiles; what tests may not leave; skips that fail where all is there (.ci/run: DISTIR_NO_SKIP=1)."""

import os
import sys
from collections.abc import Generator

import pytest
from hypothesis import settings

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
