"""Ranks of one host that read and write each other's memory: what they exchange, who does, and what happens if one is
gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.backends.transport import torch_distributed
from distir.backends.transport.shared_memory import crossmemory, peer_memory
from distir.backends.transport.shared_memory.peer_memory import PeerMemory, PeerWork
from distir.backends.transport.transfers import wait_all

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="this system has no /proc")

SECONDS = 10.0


class Exchange:
    """What ranks that are threads of this process tell each other before they meet."""

    def __init__(self, n: int) -> None:
        self.rows: list[bytes] = [b""] * n
        self.barrier = threading.Barrier(n, timeout=SECONDS)

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(mine: bytes) -> list[bytes]:
            self.rows[rank] = mine
            self.barrier.wait()
            rows = list(self.rows)
            self.barrier.wait()
            return rows

        return exchange


def together(n: int, work: Callable[[PeerMemory], Any], timeout: float = SECONDS, done: bool = True) -> list[Any]:
    """What `work` gives on each of n ranks, each a thread. Raises the first error there is."""
    exchange, found, errors = Exchange(n), [None] * n, []

    def run(rank: int) -> None:
        try:
            end = PeerMemory(rank, timeout, exchange.of(rank))
            found[rank] = work(end)
            end.close(done)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * SECONDS)
    if errors:
        raise errors[0]
    assert not any(t.is_alive() for t in threads), "a rank waits for ever"
    return found


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8]


@st.composite
def several_exchanges(draw: st.DrawFn) -> tuple[int, list[tuple[str, int, torch.dtype, int, int]]]:
    """Ranks, and what they do one after the other: of so many elements of a type, between two of them."""
    n = draw(st.integers(2, 4))
    rank = st.integers(0, n - 1)
    sizes = st.sampled_from([0, 1, 3, 17, 1000, 40_000])
    kinds = st.sampled_from(["sum", "max", "part sum", "part max", "swap", "gather", "send"])
    return n, draw(st.lists(st.tuples(kinds, sizes, st.sampled_from(DTYPES), rank, rank), min_size=1, max_size=8))


def brought(rank: int, k: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([rank, k]).integers(0, 9, size)).to(dtype)


@settings(max_examples=30, deadline=None)
@given(several_exchanges(), st.booleans(), st.sampled_from([8, 1 << 10, 1 << 15]), st.sampled_from([-1, 500, 1 << 18]))
def test_what_is_exchanged(
    case: tuple[int, list[tuple[str, int, torch.dtype, int, int]]], late: bool, chunk: int, background: int
) -> None:
    """Waited for at once, or when all have begun; in the background all, the larger ones, or none."""
    n, rows = case
    ranks = list(range(n))[::-1]

    def work(end: PeerMemory) -> list[torch.Tensor]:
        works: list[PeerWork] = []
        results: list[torch.Tensor] = []
        for k, (kind, size, dtype, a, b) in enumerate(rows):
            x = brought(end.rank, k, size, dtype)
            if kind in ("sum", "max"):
                works.append(end.allreduce(x, ranks, kind))
                results.append(x)
            elif kind.startswith("part"):
                results.append(torch.full_like(x, 7))
                works.append(end.reduce_scatter(results[-1], [x + r for r in ranks], ranks, kind.split()[1]))
            elif kind == "send":
                if end.rank == a != b:
                    works.append(end.send(x, b, size))
                if end.rank == b != a:
                    results.append(torch.full_like(x, 7))
                    works.append(end.receive(results[-1], a, size))
            else:
                out = x.new_full((n, size), 7)
                mine = [x] * n if kind == "gather" else [x + r for r in ranks]
                works.append(end.swap(list(out), mine, ranks))
                results.append(out)
            if not late:
                wait_all(works)
        wait_all(works)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "_CHUNK", chunk)
        patch.setattr(peer_memory, "_IN_BACKGROUND_BYTES", background)
        found = together(n, work)
    for rank, results in enumerate(found):
        at = iter(results)
        for k, (kind, size, dtype, a, b) in enumerate(rows):
            xs = [brought(r, k, size, dtype) for r in ranks]
            if kind in ("sum", "max"):
                stacked = torch.stack(xs)
                assert torch.equal(next(at), stacked.amax(0) if kind == "max" else stacked.sum(0).to(dtype))
            elif kind.startswith("part"):
                stacked = torch.stack([x + rank for x in xs])
                assert torch.equal(next(at), stacked.amax(0) if kind == "part max" else stacked.sum(0).to(dtype))
            elif kind == "send":
                if rank == b != a:
                    assert torch.equal(next(at), brought(a, k, size, dtype))
            else:
                out = next(at)
                for j, (r, x) in enumerate(zip(ranks, xs, strict=True)):
                    want = x.new_full((size,), 7) if r == rank else x if kind == "gather" else x + rank
                    assert torch.equal(out[j], want)


@pytest.mark.parametrize(("size", "meanwhile"), [(10, "computes"), (10, "starts another"), (100_000, "computes")])
def test_when_exchanges_proceed(size: int, meanwhile: str) -> None:
    """Large ones while a rank computes, small ones when it next waits, or starts one."""
    begun, posted, completed = threading.Event(), threading.Event(), threading.Event()

    def work(end: PeerMemory) -> tuple[bool, float]:
        x, y = torch.full((size,), 1.0 + end.rank), torch.ones(3)
        if end.rank == 0:
            first = end.allreduce(x, [0, 1], "sum")
            begun.set()
            assert posted.wait(SECONDS)
            if meanwhile == "starts another":
                end.send(y, 1, 0)
            early = completed.wait(0.5 if (size, meanwhile) == (10, "computes") else SECONDS)
        else:
            assert begun.wait(SECONDS)
            first = end.allreduce(x, [0, 1], "sum")
            posted.set()
            first.wait()
            completed.set()
            early = True
        end.allreduce(y, [0, 1], "sum").wait()
        if meanwhile == "starts another" and end.rank == 1:
            end.receive(y, 0, 0).wait()
        first.wait()
        return early, float(x[-1])

    assert together(2, work) == [((size, meanwhile) != (10, "computes"), 3.0), (True, 3.0)]


def test_buffers_made_in_inference_mode_are_added_to_outside_of_it() -> None:
    def work(end: PeerMemory) -> float:
        with torch.inference_mode():
            x = torch.full((4,), 1.0 + end.rank)
            begun = end.allreduce(x, [0, 1], "sum")
        begun.wait()
        return float(x[0])

    assert together(2, work) == [3.0, 3.0]


def test_threads_read_only_while_they_have_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between large exchanges a rank reads the records itself."""
    monkeypatch.setattr(peer_memory, "_IN_BACKGROUND_BYTES", 1000)
    read: list[tuple[int, bool]] = []
    handle = PeerMemory._handle

    def handled(end: PeerMemory, *args: Any) -> None:
        read.append((phase[end.rank], threading.current_thread().name == "distir-peer-memory"))
        handle(end, *args)

    phase = [0, 0]
    monkeypatch.setattr(PeerMemory, "_handle", handled)

    def work(end: PeerMemory) -> None:
        for k in range(6):
            phase[end.rank] = k
            xs = [torch.ones(1000 if k % 2 else 10) for _ in range(5)]
            wait_all([end.allreduce(x, [0, 1], "sum") for x in xs])
            begin = time.monotonic()
            while end._thread_reads and time.monotonic() < begin + SECONDS:
                time.sleep(0.001)  # it is about to hear that there is nothing more
            meet.wait()

    meet = threading.Barrier(2, timeout=SECONDS)
    together(2, work)
    assert {(k, thread) for k, thread in read if k % 2 == 0} == {(0, False), (2, False), (4, False)}
    assert {(1, True), (3, True), (5, True)} <= set(read)


def test_where_some_ranks_are_out_of_reach_threads_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for one of them, by other means, does not read."""
    connect, begun, done = PeerMemory._connect, threading.Event(), threading.Event()

    def apart(end: PeerMemory, rank: int, *args: Any) -> None:
        if 2 not in (rank, end.rank):
            connect(end, rank, *args)

    monkeypatch.setattr(PeerMemory, "_connect", apart)

    def work(end: PeerMemory) -> bool:
        if end.rank == 2:
            return True
        if end.rank == 1:
            assert begun.wait(SECONDS)
        first = end.allreduce(torch.ones(3), [0, 1], "sum")
        if end.rank == 0:
            begun.set()
            return done.wait(SECONDS)
        first.wait()
        done.set()
        return True

    assert together(3, work) == [True] * 3


def test_far_more_than_pipes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a pipe that only it could empty."""
    monkeypatch.setattr(peer_memory, "_capacity", lambda pipe: 1 << 11)
    most: list[int] = []

    def work(end: PeerMemory) -> float:
        xs = [torch.full((3,), float(end.rank + k)) for k in range(3000)]
        works: list[Any] = []
        for x in xs:
            works.append(end.allreduce(x, [0, 1, 2], "sum"))
            most.append(len(end._in_flight))
        wait_all(works)
        return sum(float(x[0]) - 3 - 3 * k for k, x in enumerate(xs))

    assert together(3, work) == [0.0] * 3
    assert max(most) <= (1 << 11) // (3 * 3 * 32)


@pytest.mark.parametrize("n", [2, 4])
def test_the_least_of_all_ranks(n: int) -> None:
    """Of each number, on all of them; none has it before the last has come."""
    came, had = [0.0] * n, [0.0] * n

    def work(end: PeerMemory) -> list[int]:
        time.sleep(0.05 * end.rank)
        came[end.rank] = time.monotonic()
        found = end.least([end.rank, -end.rank, (1 << 62) - end.rank, -(1 << 63)])
        had[end.rank] = time.monotonic()
        return found

    assert together(n, work) == [[0, 1 - n, (1 << 62) - n + 1, -(1 << 63)]] * n
    assert min(had) >= max(came)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_device_is_idle_after_ranks_agree(monkeypatch: pytest.MonkeyPatch, near: bool, where: str) -> None:
    """Through shared memory if all ranks reach each other, else through the process group."""
    told: list[str] = []

    class Reached:
        def reaches(self, ranks: Sequence[int]) -> bool:
            return near and list(ranks) == [0, 1]

        def least(self, numbers: Sequence[int]) -> list[int]:
            told.append("shared memory")
            return list(numbers)

    monkeypatch.setattr(torch_distributed, "_peer_memory", Reached())
    monkeypatch.setattr(torch_distributed, "control_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(torch_distributed.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch_distributed.dist, "all_reduce", lambda row, op: told.append("process group"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append("idle"))
    assert torch_distributed.least([3, 5], torch.device(where)) == [3, 5]
    assert told == ["shared memory" if near else "process group", *["idle"] * (where == "cuda")]


def test_nothing_is_kept() -> None:
    def work(end: PeerMemory) -> int:
        for k in range(50):
            end.allreduce(torch.ones(8), [0, 1], "sum").wait()
            x = torch.full((8,), float(k))
            (end.send(x, 1, 3) if end.rank == 0 else end.receive(x, 0, 3)).wait()
        begin = time.monotonic()
        while end._works and time.monotonic() < begin + SECONDS:
            time.sleep(0.001)  # the last is about to end
        return len(end._works)

    files = len(os.listdir("/proc/self/fd"))
    assert together(2, work) == [0, 0]
    assert len(os.listdir("/proc/self/fd")) == files
    assert not [t for t in threading.enumerate() if t.name == "distir-peer-memory"]


def test_a_thread_ends_though_many_records_are_unread() -> None:
    sent = threading.Event()

    def work(end: PeerMemory) -> None:
        if end.rank == 0:
            for _ in range(200):
                end.send(torch.ones(1), 1, 0)
            sent.set()
        assert sent.wait(SECONDS)

    together(2, work, done=False)
    assert not [t for t in threading.enumerate() if t.name == "distir-peer-memory"]


def test_who_is_notified_of_the_end() -> None:
    def work(end: PeerMemory) -> tuple[int, int]:
        notified: list[PeerWork] = []
        work = end.allreduce(torch.ones(4), [0, 1], "sum")
        work.get_future().add_done_callback(notified.append)
        work.wait()
        end.allreduce(torch.ones(4), [0, 1], "sum").wait()  # the one before has then ended
        early = len(notified)
        work.add_done_callback(notified.append)
        return early, len(notified)

    assert together(2, work) == [(1, 2)] * 2


@pytest.mark.parametrize(
    "why", ["another host", "switched off", "forbidden", "forbidden one way", "not the one that is meant"]
)
def test_one_that_is_not_reached(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks answer alike, and the others still reach each other."""
    card, opened = peer_memory._boot_id, PeerMemory._connect

    def boot() -> bytes:
        return b"another host now" if threading.current_thread() is strange[0] and why == "another host" else card()

    def meet(end: PeerMemory, rank: int, *args: Any) -> None:
        pid, *rest = args
        if 2 in (rank, end.rank) and why == "forbidden":
            pid = 1 << 22  # beyond the largest there is
        if end.rank == 2 and why == "forbidden one way":
            pid = 1 << 22
        if 2 in (rank, end.rank) and why == "not the one that is meant":
            rest[-1] = bytes(16)
        opened(end, rank, pid, *rest)

    strange: list[Any] = [None]
    monkeypatch.setattr(peer_memory, "_boot_id", boot)
    monkeypatch.setattr(PeerMemory, "_connect", meet)
    if why == "switched off":
        monkeypatch.setenv("DISTIR_CROSS_MEMORY", "0")
    init = PeerMemory.__init__

    def made(end: PeerMemory, rank: int, *args: Any) -> None:
        if rank == 2:
            strange[0] = threading.current_thread()
        init(end, rank, *args)

    monkeypatch.setattr(PeerMemory, "__init__", made)
    groups = [[0, 1], [0, 1, 2], [1, 2], [2]]
    off = why == "switched off"
    want = [not off, False, False, True]
    assert together(3, lambda end: [end.reaches(g) for g in groups]) == [want] * 3
    assert together(3, lambda end: set(end.near)) == [{0}, {1}, {2}] if off else [{0, 1}, {0, 1}, {2}]


def test_a_rank_that_does_not_come() -> None:
    def work(end: PeerMemory) -> str:
        if end.rank == 2:
            time.sleep(1.0)
            return ""
        with pytest.raises(RuntimeError) as e:
            end.allreduce(torch.ones(4), [0, 1, 2], "sum").wait()
        return str(e.value)

    assert together(3, work, timeout=0.3, done=False) == ["waited 0.3 s for rank 2"] * 2 + [""]


def test_a_rank_that_is_waited_for_and_goes() -> None:
    """It is noticed long before the time is over."""

    notified = threading.Event()

    def work(end: PeerMemory) -> str:
        if end.rank == 1:
            assert notified.wait(SECONDS)
            return ""
        coming = end.allreduce(torch.ones(4), [0, 1], "sum")
        notified.set()
        with pytest.raises(RuntimeError) as e:
            coming.wait()
        return str(e.value)

    begin = time.monotonic()
    assert together(2, work, timeout=300.0, done=False) == ["rank 1 has exited", ""]
    assert time.monotonic() < begin + SECONDS


def test_who_leaves_waits_until_all_was_taken() -> None:
    def work(end: PeerMemory) -> float:
        x = torch.full((100,), float(end.rank))
        if end.rank == 0:
            end.send(x, 1, 0)
        else:
            time.sleep(0.5)
            end.receive(x, 0, 0).wait()
        return float(x[-1])

    assert together(2, work) == [0.0, 0.0]


def test_messages_are_told_apart_by_number() -> None:
    def work(end: PeerMemory) -> list[float]:
        xs = [torch.full((4,), float(k)) for k in range(3)]
        if end.rank == 0:
            wait_all([end.send(x, 1, k) for k, x in enumerate(xs)])
        else:
            wait_all([end.receive(xs[k], 0, k - 1) for k in (2, 1)] + [end.receive(xs[0], 0, 2)])
        return [float(x[0]) for x in xs]

    assert together(2, work)[1] == [2.0, 0.0, 1.0]


def test_what_the_kernel_copies_in_several_calls() -> None:
    """It may copy less than it was asked to: of more than 2 GiB it does."""
    x, copy = torch.arange(1000.0), crossmemory.copier()
    y = torch.zeros(1000)
    short: list[int] = []

    class Less(crossmemory._Vector):
        def __init__(self, base: int, length: int) -> None:
            short.append(length)
            super().__init__(base, min(length, 700))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossmemory, "_Vector", Less)
        copy("read", os.getpid(), x.data_ptr(), y)
    assert torch.equal(x, y)
    assert len(short) == 2 * 6


def test_what_is_not_contiguous() -> None:
    def work(end: PeerMemory) -> None:
        x = torch.ones(4, 4)[:, :2]
        with pytest.raises(ValueError, match="contiguous"):
            end.swap([x, x], [x, x], [0, 1])

    together(2, work, done=False)


def test_pipes_that_hold_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_capacity", lambda pipe: 6 * 32 - 1)
    assert together(2, lambda end: end.reaches([0, 1])) == [False, False]
    monkeypatch.setattr(peer_memory, "_capacity", lambda pipe: 6 * 32)
    assert together(2, lambda end: end.allreduce(torch.ones(9), [0, 1], "sum").wait()) == [None, None]


def test_one_that_has_left() -> None:
    def work(end: PeerMemory) -> str:
        if end.rank == 1:
            return ""
        begin = time.monotonic()
        while time.monotonic() < begin + SECONDS:
            try:
                end.send(torch.ones(4), 1, 0)
            except RuntimeError as e:
                return str(e)
        return "it was never noticed"

    assert together(2, work, done=False) == ["rank 1 has exited", ""]


def test_memory_that_cannot_be_read() -> None:
    """Who waits is notified, now and later; what is under way ends."""

    def work(end: PeerMemory) -> list[str]:
        begin = time.monotonic()
        end._pids = dict.fromkeys(end._pids, 1 << 22)
        said: list[str] = []
        for start in (
            lambda: end.allreduce(torch.ones(64), [0, 1], "sum"),
            lambda: end.receive(torch.ones(64), 1 - end.rank, 0),
        ):
            with pytest.raises(RuntimeError) as e:
                start().wait()
            said.append(str(e.value))
        assert time.monotonic() < begin + SECONDS / 2
        return said

    for rank, said in enumerate(together(2, work, done=False)):
        assert said == [f"cannot read memory of rank {1 - rank}: No such process"] * 2
