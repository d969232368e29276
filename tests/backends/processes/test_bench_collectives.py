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

from distir.backends.processes.bench_collectives import (
    COLLECTIVES,
    COPIES,
    Loops,
    Settings,
    Timing,
    _pass_on,
    _prepare,
    _run,
    bench_collectives,
    bus_factor,
    default_names,
)
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
    assert {bus_factor(c, 1) for c in COLLECTIVES} == {0}  # one rank has no links
    assert {bus_factor(c, n) for c in COPIES for n in (1, 4)} == {1}


def test_what_is_measured_by_default() -> None:
    assert default_names("gloo", 2) == default_names("mpi", 4) == COLLECTIVES
    assert default_names("nccl", 2) == COLLECTIVES + COPIES
    assert default_names("nccl", 1) == COLLECTIVES[:-2] + COPIES
    assert COLLECTIVES[-2:] == ("send-recv", "send")


def test_collectives_of_one_rank(tmp_path: Path) -> None:
    """Over gloo, which is refused to users: what one rank measures over NCCL."""
    settings = Settings(1, "gloo", default_names("gloo", 1), (1, 4096), 60.0, "float32", Loops((1,), seconds=0.001))
    timings = [Timing(*row) for row in _run(tmp_path, settings)]
    assert [(t.collective, t.size) for t in timings] == [(c, n) for c in COLLECTIVES[:-2] for n in (4, 4096)]
    assert all(t.algorithm_bandwidth > 0 and t.bus_bandwidth == 0 and t.ranks == 1 for t in timings)


@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: made.append(zeros(*args, **kwargs)) or made[-1])
    size, over, copy = _prepare(name, 1007, 0, 2, torch.device("cpu"), torch.bfloat16)
    assert (size, over, [x.nbytes for x in made]) == (1006, "copy", [1006, 1006])  # whole elements
    made[0].fill_(3)
    copy()
    assert made[1].eq(3).all()


def test_copies_go_where_their_names_say() -> None:
    """From a device without data nothing comes to the host."""
    meta = torch.device("meta")
    for name in ("host-to-device", "device-to-device"):
        _prepare(name, 1024, 0, 1, meta, torch.float32)[2]()
    with pytest.raises(NotImplementedError):
        _prepare("device-to-host", 1024, 0, 1, meta, torch.float32)[2]()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_alone() -> None:
    timings = bench_collectives(1, "nccl", sizes=(4096, 1 << 20), timeout=60)
    assert [(t.collective, t.size) for t in timings] == [
        (c, n) for c in default_names("nccl", 1) for n in (4096, 1 << 20)
    ]
    for t in timings:
        assert 0 < t.seconds < 10
        assert t.algorithm_bandwidth > 0
        assert t.bus_bandwidth == (t.algorithm_bandwidth if t.collective in COPIES else 0)
        assert t.over == ("copy" if t.collective in COPIES else "nccl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nproc": 1}, "collectives need at least 2 ranks, got 1"),
        ({"nproc": 0, "backend": "nccl"}, "collectives need at least 1 rank, got 0"),
        ({"nproc": 1, "backend": "nccl", "collectives": ["all-reduce", "send"]}, "send needs at least 2 ranks, got 1"),
        ({"collectives": ["all-reduce", "device-to-host"]}, "device-to-host needs a GPU"),
        ({"collectives": ["all-redcue"]}, "unknown collective 'all-redcue'"),
        ({"dtype": "float3"}, "unknown dtype 'float3'"),
        ({"sizes": [0]}, "sizes are at least 1 byte"),
        ({"backend": "ucc"}, "unknown backend 'ucc'"),
    ],
)
def test_arguments_that_do_not_fit(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_collectives(**{"nproc": 2, **change})


@pytest.mark.parametrize(("gpus", "ranks"), [(0, "1 rank"), (4, "4 ranks")])
def test_by_default_a_rank_per_gpu(gpus: int, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([gpus, 0])  # for the check of the backend there are none
    monkeypatch.setattr("torch.cuda.device_count", lambda: next(counts))
    with pytest.raises(UsageError, match=f"backend nccl needs a GPU per rank: {ranks}, 0 GPUs here"):
        bench_collectives(backend="nccl")


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
