"""Collectives and messages between ranks of one host that read and write each other's memory, not through sockets.

An exchange is one collective or one message. Its sources post the addresses of their buffers; when all have, each
worker copies what it needs, writes its results, and reports completion. Ranks notify each other by records over pipes.

A rank reads the records, and does its part of each exchange that is ready, while it waits for any exchange, and when
it starts one. While a large exchange is in flight a second thread of the rank reads them instead, so that it proceeds
while the rank computes; for small ones waking up that thread would take longer than the exchange. So an exchange
completes at the latest when all of its ranks wait, for any exchange: what `check_order` proves holds. If some ranks are
out of reach the second thread always reads: a rank that waits for one of them, through gloo, reads no records.

The kernel copies directly between processes (process_vm_readv(2), cross-memory attach): nothing is mapped and no file
is left. Pipes are opened as files of the other process under /proc. Where the kernel does not allow this (another host
or container, a security policy, a system other than Linux), or with DISTIR_CROSS_MEMORY=0, gloo is used instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import secrets
import select
import struct
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

import torch

from distir.backends.transport.shared_memory.crossmemory import copier
from distir.ir.errors import WorkerError

_IDENTITY = struct.Struct("<16sqqqqqq16s")
"""Identity of a process: boot id of its host, pid; capacity, descriptor, device and inode of its pipe; the address of a
random word in its memory, and the word.
"""
_RECORD = struct.Struct("<iiqqq")
"""A notification: event, rank, group, number of the exchange in the group, address of the buffer posted. A page holds a
whole number of records, so that a pipe reads and writes each atomically.
"""
_POSTED, _DONE, _READY, _FLUSH, _END = range(5)
_BATCH_BYTES = 64 * _RECORD.size
"""Bytes read from the pipe at a time."""
_LINE_BYTES = 64
"""Alignment of the parts of different workers: a cache line is written by one of them only."""
_CHUNK = 1 << 15
"""Elements reduced at a time: they stay in a core's cache, and are too few for torch to start other threads, which
the program needs.
"""
_WIDEST_BYTES = 8
"""Size of the widest element."""
_IN_BACKGROUND_BYTES = 1 << 18
"""An exchange with more bytes in buffers of this rank proceeds while the rank computes."""
_REDUCE = {"max": torch.maximum, "min": torch.minimum}
"""All other kinds are sums."""
_CHECK_SECONDS = 0.5
"""Interval at which a waiting rank checks that the others are alive."""
_LEAVE_SECONDS = 1.0
_MESSAGE_BITS = 32
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_HOST = bytes(16)

Rows = Sequence[torch.Tensor]
Work = Callable[[Mapping[int, int]], None]
"""A rank's part of an exchange, given the posted addresses by rank."""
Key = tuple[int, int]
"""An exchange: (group, its number in the group)."""


class PeerWork:
    """An exchange in flight, with the interface of torch's Work: `wait` for its result."""

    def __init__(self, peer_memory: PeerMemory) -> None:
        self.peer_memory = peer_memory
        self.posted: dict[int, int] = {}
        self.done: set[int] = set()
        self.joined = self.worked = self.in_background = False
        """`joined`: this rank has started the exchange and the fields below are set; `worked`: it has done its part;
        `in_background`: it is to proceed while the rank computes."""
        self.sources: Sequence[int] = ()
        self.workers: Sequence[int] = ()
        self.work_on: Work | None = None
        self.buffers: Rows = ()
        """Buffers that any rank reads or writes, kept alive."""
        self.finished = threading.Event()
        self._callbacks: list[Callable[[PeerWork], None]] = []

    def wait(self) -> None:
        """Wait for completion. Raises RuntimeError on timeout, or if a rank has exited."""
        self.peer_memory.wait_for(self)

    def get_future(self) -> PeerWork:
        """The future, which is the work itself."""
        return self

    def add_done_callback(self, callback: Callable[[PeerWork], None]) -> None:
        self._callbacks.append(callback)
        if self.finished.is_set():
            self.end()

    def end(self) -> None:
        self._call_back()
        self.finished.set()
        self._call_back()  # callbacks added in between

    def _call_back(self) -> None:
        with contextlib.suppress(IndexError):  # each is called once, by either thread
            while True:
                self._callbacks.pop()(self)


class PeerMemory:
    """One rank's access to the memory of other ranks: which it can reach, and the exchanges in flight.

    `exchange` is an all-gather of bytes among all ranks. A rank waits `timeout` seconds for others.
    """

    def __init__(self, rank: int, timeout: float, exchange: Callable[[bytes], list[bytes]]) -> None:
        self.rank, self.timeout = rank, timeout
        self._inbox, self._slot = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, int] = {rank: self._slot}
        self._copier = copier()
        self._scratch = torch.empty(_CHUNK * _WIDEST_BYTES, dtype=torch.uint8)
        boot, status = _boot_id(), os.fstat(self._inbox)
        word = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        pipe = _capacity(self._slot), self._slot, status.st_dev, status.st_ino
        identities = exchange(_IDENTITY.pack(boot, os.getpid(), *pipe, ctypes.addressof(word), word.raw))
        here = {
            r: identity
            for r, identity in enumerate(map(_IDENTITY.unpack, identities))
            if boot == identity[0] != _NO_HOST
        }
        self._most_in_flight = min([identity[2] for identity in here.values()], default=0) // (
            3 * max(1, len(here)) * _RECORD.size
        )
        """Limit on the exchanges in flight: see `_limit_in_flight`."""
        for r, (_, pid, _, *address_of) in here.items():
            if r != rank and self._most_in_flight:
                self._connect(r, pid, *address_of)
        reached = exchange(bytes([r in self._pipes for r in range(len(identities))]))
        self._reach = [{k for k, flag in enumerate(row) if flag} for row in reached]
        self.near = frozenset(r for r in range(len(identities)) if self.reaches((rank, r)))
        """The ranks that this one reaches and that reach it."""
        self._reaches_all = self.reaches(range(len(identities)))
        self._groups: dict[tuple[int, ...], int] = {}
        self._counts: Counter[Key] = Counter()
        """Number of exchanges so far, by group and message."""
        self._works: dict[Key, PeerWork] = {}
        self._in_flight: deque[PeerWork] = deque()
        self._flushed = threading.Event()
        """Set when all records sent before it was cleared have been handled."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        """Guards the three fields below."""
        self._thread_reads = False
        """Whether the second thread reads records: while there are any `_in_background`, and until `_awaited` ends."""
        self._in_background = 0
        """The number of exchanges in flight that proceed in the background."""
        self._awaited: PeerWork | None = None
        """The exchange that the rank waits for, or last waited for."""
        self._begin = threading.Semaphore(0)
        """Released when the thread is to read."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="distir-peer-memory", daemon=True)
        self._thread.start()

    def _connect(self, rank: int, pid: int, pipe: int, device: int, inode: int, address: int, word: bytes) -> None:
        """Open another rank's pipe, if the kernel allows it and the process proves to be that rank."""
        path, read = f"/proc/{pid}/fd/{pipe}", torch.zeros(len(word), dtype=torch.uint8)
        with contextlib.suppress(OSError):
            status = os.stat(path)  # before opening it: opening a pipe without a reader would block
            self._copier("read", pid, address, read)
            if (status.st_dev, status.st_ino) == (device, inode) and bytes(read.tolist()) == word:
                self._pipes[rank] = os.open(path, os.O_WRONLY)
                self._pids[rank] = pid

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Whether each of these ranks reaches all of them; the same answer on all ranks."""
        return all(self._reach[r].issuperset(ranks) for r in ranks)

    def group(self, ranks: Sequence[int]) -> int:
        """The number of a group: a hash of its members, so that they agree on it.

        Raises RuntimeError on a collision with another group of this rank (probability 2^-63).
        """
        members = tuple(sorted(ranks))
        number = self._groups.get(members)
        if number is None:
            number = int.from_bytes(hashlib.sha256(repr(members).encode()).digest()[:8], "big") >> 1
            if number in self._groups.values():
                raise RuntimeError(f"the group of ranks {members} has the number of another")
            self._groups[members] = number
        return number

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of all ranks, of each number, where each reaches all; a barrier, too."""
        row = torch.tensor(numbers, dtype=torch.int64)
        self.allreduce(row, range(len(self._reach)), "min").wait()
        return row.tolist()

    # --- operations: buffers may not be changed before the work is complete

    def allreduce(self, x: torch.Tensor, ranks: Sequence[int], kind: str) -> PeerWork:
        """Reduce `x`, contiguous, in place, by "sum", "max" or "min"; each of `ranks` reduces one part for all."""
        me, row = ranks.index(self.rank), x.view(-1)
        others = [r for r in ranks if r != self.rank]
        line = _LINE_BYTES // x.itemsize
        part = -(-len(row) // (len(ranks) * line)) * line
        begin, end = min(len(row), me * part), min(len(row), (me + 1) * part)
        reduce = _REDUCE.get(kind, torch.add)

        def work_on(posted: Mapping[int, int]) -> None:
            for at in range(begin, end, _CHUNK):
                total = row[at : min(end, at + _CHUNK)]
                other = self._scratch[: total.nbytes].view(x.dtype)
                for r in others:
                    self._copy("read", r, posted[r] + at * x.itemsize, other)
                    reduce(total, other, out=total)
                for r in others:
                    self._copy("write", r, posted[r] + at * x.itemsize, total)

        key = self._next(self.group(ranks))
        return self._start(key, ranks, ranks, dict.fromkeys(ranks, x.data_ptr()), work_on, [x])

    def reduce_scatter(self, out: torch.Tensor, rows: Rows, ranks: Sequence[int], kind: str) -> PeerWork:
        """Reduce the rows that all ranks have for this rank into `out`, in the order of `ranks`; `rows[k]` is for the
        k-th. All contiguous; `kind` as for `allreduce`.
        """
        reduce = _REDUCE.get(kind, torch.add)
        own, whole = rows[ranks.index(self.rank)].view(-1), out.view(-1)

        def work_on(posted: Mapping[int, int]) -> None:
            for at in range(0, len(whole), _CHUNK):
                part = whole[at : at + _CHUNK]
                other = self._scratch[: part.nbytes].view(part.dtype)
                total = own[at : at + _CHUNK]
                for k, r in enumerate(ranks):
                    x = own[at : at + _CHUNK] if r == self.rank else other if k else part
                    if r != self.rank:
                        self._copy("read", r, posted[r] + at * x.itemsize, x)
                    total = reduce(total, x, out=part) if k else x

        addresses = {r: x.data_ptr() for r, x in zip(ranks, rows, strict=True)}
        return self._start(self._next(self.group(ranks)), ranks, ranks, addresses, work_on, [*rows, out])

    def swap(self, out: Rows, rows: Rows, ranks: Sequence[int]) -> PeerWork:
        """Send `rows[k]`, contiguous, to the k-th of `ranks`, and receive `out[k]` from it, except this rank's own."""

        def work_on(posted: Mapping[int, int]) -> None:
            for r, x in zip(ranks, out, strict=True):
                if r != self.rank:
                    self._copy("read", r, posted[r], x)

        addresses = {r: x.data_ptr() for r, x in zip(ranks, rows, strict=True)}
        return self._start(self._next(self.group(ranks)), ranks, ranks, addresses, work_on, [*rows, *out])

    def send(self, x: torch.Tensor, to: int, message: int) -> PeerWork:
        """Send `x`, contiguous, to a rank."""
        key = self._next(self._channel(self.rank, to), message)
        return self._start(key, [self.rank], [to], {to: x.data_ptr()}, None, [x])

    def receive(self, out: torch.Tensor, source: int, message: int) -> PeerWork:
        """Receive `message` from a rank into `out`, contiguous; messages of one number arrive in order."""

        def work_on(posted: Mapping[int, int]) -> None:
            self._copy("read", source, posted[source], out)

        return self._start(
            self._next(self._channel(source, self.rank), message), [source], [self.rank], {}, work_on, [out]
        )

    def _copy(self, what: str, rank: int, address: int, x: torch.Tensor) -> None:
        """Read or write a rank's memory. Raises RuntimeError if the rank has exited."""
        try:
            self._copier(what, self._pids[rank], address, x)
        except OSError as e:
            raise RuntimeError(f"cannot {what} memory of rank {rank}: {e.strerror}") from e

    # --- exchanges

    def _next(self, group: int, message: int = 0) -> Key:
        self._counts[group, message] += 1
        return group, message << _MESSAGE_BITS | self._counts[group, message]

    def _channel(self, source: int, to: int) -> int:
        """The number of the channel from one rank to another; distinct from the numbers of groups."""
        return -1 - source * len(self._reach) - to

    def _start(
        self,
        key: Key,
        sources: Sequence[int],
        workers: Sequence[int],
        addresses: Mapping[int, int],
        work_on: Work | None,
        buffers: Rows,
    ) -> PeerWork:
        """Start an exchange; `addresses`: of this rank's buffer for each worker. Raises ValueError for a buffer that is
        not contiguous.
        """
        if not all(x.is_contiguous() for x in buffers):
            raise ValueError("only contiguous tensors can be read and written by other ranks")
        is_source = self.rank in sources
        if is_source:
            self._limit_in_flight()
        work = self._works.setdefault(key, PeerWork(self))  # it is there if another rank has started first
        work.sources, work.workers, work.work_on, work.buffers = sources, workers, work_on, buffers
        size = sum({x.data_ptr(): x.nbytes for x in buffers}.values())  # a row may be there once for each rank
        if not self._reaches_all or size > _IN_BACKGROUND_BYTES:
            with self._lock:
                work.in_background = True
                self._in_background += 1
                if not self._thread_reads:
                    self._thread_reads = True
                    self._begin.release()
        if is_source:
            work.posted[self.rank] = 0
            self._in_flight.append(work)
            for r in workers:
                if r != self.rank:
                    self._notify(r, _POSTED, key, addresses[r])
        work.joined = True
        if work.done or self._ready(work):  # all records may have been handled before this rank joined
            self._notify(self.rank, _READY, key)
        if self._failure is not None:
            work.end()
        elif not self._thread_reads:
            self._progress(0.0)
        return work

    def _limit_in_flight(self) -> None:
        """Wait until so few exchanges are in flight that no pipe can be full, so that no thread blocks in writing.

        For each exchange a rank sends another at most two records, and may cause a third that it sends to itself.
        Waiting cannot deadlock: what `check_order` proves holds even if each send and each collective blocks.
        """
        while self._in_flight and (
            self._in_flight[0].finished.is_set() or len(self._in_flight) >= self._most_in_flight
        ):
            self.wait_for(self._in_flight.popleft())

    def wait_for(self, work: PeerWork) -> None:
        """Wait until an exchange is complete. Raises RuntimeError on timeout, or if a rank has exited."""
        if not work.finished.is_set():
            with self._lock:
                self._awaited = work
                until = work.finished.wait if self._thread_reads else partial(self._read_until, work)
            self._wait(work, until)
        if self._failure is not None and len(work.done) < max(1, len(work.workers)):
            raise RuntimeError(str(self._failure)) from self._failure

    def _wait(self, work: PeerWork, until: Callable[[float], bool]) -> None:
        """`until(seconds)` waits for so long, and returns whether the exchange is complete."""
        end = time.monotonic() + self.timeout
        exited: set[int] = set()
        while not until(max(0.0, min(_CHECK_SECONDS, end - time.monotonic()))):
            absent = set(work.sources) - work.posted.keys() or set(work.workers) - work.done
            if absent & exited and self._flushed.is_set():
                raise RuntimeError(f"rank {_listed(absent & exited)} has exited")
            if time.monotonic() >= end:
                raise RuntimeError(f"waited {self.timeout:g} s for rank {_listed(absent)}")
            if left := {r for r in absent if self._has_exited(r)} - exited:
                exited |= left
                self._flushed.clear()  # handle all records that they sent before they exited
                self._notify(self.rank, _FLUSH, (0, 0))

    def _read_until(self, work: PeerWork, seconds: float) -> bool:
        """Read records until an exchange is complete, for so long at most; returns whether it is."""
        end = time.monotonic() + seconds
        while not work.finished.is_set() and self._progress(max(0.0, end - time.monotonic())):
            pass
        return work.finished.is_set()

    def _progress(self, seconds: float) -> bool:
        """Wait for records for so long at most, and handle them; returns whether there were any."""
        if not self._poll.poll(seconds * 1e3):
            return False
        try:
            self._read()
        except Exception as e:  # raised again in `wait_for`
            self._fail(e)
        return True

    def _read(self) -> None:
        """Wait for records, and handle them."""
        for what, rank, group, number, address in _RECORD.iter_unpack(os.read(self._inbox, _BATCH_BYTES)):
            if what == _END:
                self._ended = True
            elif what == _FLUSH:
                self._flushed.set()
            else:
                self._handle(what, rank, (group, number), address)

    def _has_exited(self, rank: int) -> bool:
        """Whether a rank's pipe has no reader any more."""
        poll = select.poll()
        poll.register(self._pipes[rank], 0)
        return any(what & select.POLLERR for _, what in poll.poll(0))

    def _notify(self, rank: int, what: int, key: Key, address: int = 0) -> None:
        """Send a rank a record. Raises RuntimeError if the rank has exited."""
        try:
            os.write(self._pipes[rank], _RECORD.pack(what, self.rank, *key, address))
        except BrokenPipeError as e:
            raise RuntimeError(f"rank {rank} has exited") from e

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._ended:
                self._begin.acquire()
                self._read_in_background()
        except BaseException as e:  # raised again in `wait_for`
            self._fail(e)

    def _read_in_background(self) -> None:
        """Read records while the second thread has to (see `_thread_reads`)."""
        while not self._ended:
            self._read()
            with self._lock:
                waits = self._awaited is not None and not self._awaited.finished.is_set()
                if not self._in_background and not waits:
                    self._thread_reads = False
                    return

    def _fail(self, e: BaseException) -> None:
        """End all exchanges."""
        self._failure = e
        for work in list(self._works.values()):
            work.end()

    def _handle(self, what: int, rank: int, key: Key, address: int) -> None:
        work = self._works.get(key)
        if work is None:
            if what == _READY:
                return  # already complete
            work = self._works.setdefault(key, PeerWork(self))
        if what == _POSTED:
            work.posted[rank] = address
        elif what == _DONE:
            work.done.add(rank)
        if not work.worked and self._ready(work):
            work.worked = True
            if work.work_on is None:
                raise WorkerError(f"rank {self.rank} has no part in a collective that is ready")
            with torch.inference_mode():  # in which the buffers may have been made
                work.work_on(work.posted)
            for r in {*work.sources, *work.workers} - {self.rank}:
                self._notify(r, _DONE, key)
            work.done.add(self.rank)
        if work.joined and len(work.done) == len(work.workers):
            del self._works[key]
            work.work_on, work.buffers = None, ()  # the work may outlive its buffers
            if work.in_background:
                with self._lock:
                    self._in_background -= 1
            work.end()

    @staticmethod
    def _ready(work: PeerWork) -> bool:
        """Whether this rank can do its part: it has joined, and all sources have posted."""
        return work.joined and work.work_on is not None and len(work.posted) == len(work.sources)

    def close(self, done: bool) -> None:
        """Disconnect. `done`: after a complete run, in which no rank waits for another; else after an error."""
        while done and self._in_flight:
            self.wait_for(self._in_flight.popleft())
        self._notify(self.rank, _END, (0, 0))
        with self._lock:
            self._in_background += 1  # the thread reads until it has read the record
        self._begin.release()
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            return  # blocked in writing to a rank that does not read: it ends with the process
        for number in (self._inbox, *self._pipes.values()):
            os.close(number)


def _listed(ranks: Set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _boot_id() -> bytes:
    """The boot id of this host; zeros where cross-memory access is unavailable or disabled."""
    if sys.platform != "linux" or os.environ.get("DISTIR_CROSS_MEMORY") == "0":
        return _NO_HOST
    try:
        return uuid.UUID(_BOOT.read_text().strip()).bytes
    except (OSError, ValueError):
        return _NO_HOST


def _capacity(pipe: int) -> int:
    """The capacity of a pipe in bytes: smaller for a user with many pipes."""
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else 0
