"""The interconnect benchmark: what it measures, what it says of it, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distir.backends.processes.bench_collectives import COLLECTIVES, Timing, _pass_on, bench_collectives, bus_factor
from distir.ir.errors import UsageError, WorkerError


def test_every_collective_at_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[Timing] = []
    timings = bench_collectives(2, sizes=(1024, 65536), on_timing=seen.append)
    assert seen == timings
    assert [(t.collective, t.size) for t in timings] == [(c, n) for c in COLLECTIVES for n in (1024, 65536)]
    for t in timings:
        assert 0 < t.seconds < 10
        assert t.algorithm_bandwidth == pytest.approx(t.size / t.seconds)
        assert t.bus_bandwidth == pytest.approx(t.algorithm_bandwidth * bus_factor(t.collective, 2))
    if sys.platform == "linux":
        over = {t.collective: t.over for t in timings}
        assert (over["all-reduce"], over["broadcast"]) == ("memory", "gloo")
    assert list(tmp_path.iterdir()) == []


def test_what_is_sent_and_received_goes_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NCCL a rank that first sends waits for one that receives, and there would be none."""
    posted: list[list[str]] = []
    monkeypatch.setattr(dist, "P2POp", lambda op, x, peer: (op.__name__, peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: posted.append(ops) or [])
    _pass_on(torch.ones(2), torch.ones(2), 0, 3)
    assert posted == [[("isend", 1), ("irecv", 2)]]


def test_sizes_are_made_to_fit_the_ranks_and_the_dtype() -> None:
    timings = bench_collectives(3, collectives=["all-reduce", "all-gather"], sizes=[1007], dtype="bfloat16")
    assert [t.size for t in timings] == [1002, 1002]  # three equal parts of whole elements


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(c, 4) for c in COLLECTIVES] == [1.5, *[0.75] * 5, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nproc": 1}, "collectives need at least 2 ranks, got 1"),
        ({"collectives": ["all-redcue"]}, "unknown collective 'all-redcue'"),
        ({"dtype": "float3"}, "unknown dtype 'float3'"),
        ({"sizes": [0]}, "sizes are at least 1 byte"),
        ({"backend": "ucc"}, "unknown backend 'ucc'"),
    ],
)
def test_arguments_that_do_not_fit(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_collectives(**{"nproc": 2, **change})


def test_what_is_left_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["all-reduce", "broadcast"]
    monkeypatch.setenv("DISTIR_CROSS_MEMORY", "0")
    assert [t.over for t in bench_collectives(2, collectives=names, sizes=[64])] == ["gloo", "gloo"]


def test_a_rank_that_is_killed() -> None:
    def kill(timing: Timing) -> None:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, rest = stat.read_text().rpartition(")")
                if name.endswith("(distir-rank1") and int(rest.split()[1]) == os.getpid():
                    os.kill(int(stat.parent.name), signal.SIGKILL)

    if sys.platform != "linux":
        pytest.skip("this system does not show processes under /proc")
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        bench_collectives(2, sizes=[1 << 10] * 200, on_timing=kill)


def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network interface that is not there."""
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(WorkerError, match=r"rank \d failed: "):
        bench_collectives(2, collectives=["send-recv"], sizes=[1024])
