"""How ranks on one host exchange tensors: they read and write each other's memory. gloo would pass all through sockets.

When all who bring something to a meeting have told that it is there, each who has a part in it does that: it reads
what it needs, writes where it belongs, and tells when it has. They tell over pipes, a record at a time; in each rank a
thread reads them and does its part, whatever the program does meanwhile. A wait ends as soon as all have begun, as with
gloo: what `check_order` proves holds.

The kernel copies from one process to the other at once (process_vm_readv(2), cross-memory attach): nothing is mapped,
nothing is kept, no file is left. Pipes are found as the open files of a process, under /proc. Where the kernel does not
allow it (on another host or in another container, by a rule, on another system than Linux), or the environment has
DISTIR_CROSS_MEMORY=0, gloo does it all.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from pathlib import Path

import torch

from distir.backends.crossmemory import copier

_CARD = struct.Struct("<16sqqqqqq16s")
"""What tells a process from all others: the boot of its host, its number; what its pipe holds, the pipe's descriptor,
device and inode; where in its memory what word is.
"""
_RECORD = struct.Struct("<iiiqq4x")
"""What has happened, on which rank, in which group; at the how manieth meeting of it, and the address of what was
brought. A page holds a whole number of them: a pipe takes and gives each at once.
"""
_BROUGHT, _DONE, _READY, _HEARD, _END = range(5)
_BATCH_BYTES = 64 * _RECORD.size
"""So much is read of it at once."""
_LINE_BYTES = 64
"""Parts that ranks work on begin at multiples of so many bytes: a line of a cache is written by one."""
_CHUNK = 1 << 15
"""So many elements are reduced at once. They stay in a core's cache from the reading to the writing, and are too few
for torch to call other threads, which the program has a use for.
"""
_WIDEST_BYTES = 8
"""Of an element."""
_REDUCE = {"max": torch.maximum}
"""All other kinds add up."""
_LOOK_SECONDS = 0.5
"""Who waits looks so often whether the others are still there."""
_LEAVE_SECONDS = 1.0
_MESSAGE_BITS = 32
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_HOST = bytes(16)

Rows = Sequence[torch.Tensor]
Act = Callable[[Mapping[int, int]], None]
"""A rank's part, given the addresses of what was brought, by rank."""
Key = tuple[int, int]
"""Which meeting: of which group, the how manieth."""


class Work:
    """A meeting that is under way, as torch's works are: `wait` for its result."""

    def __init__(self, nearby: Nearby) -> None:
        self.nearby = nearby
        self.brought: dict[int, int] = {}
        self.done: set[int] = set()
        self.joined = self.acted = False
        """Whether this rank has come, and what follows is set; whether it has done its part."""
        self.bringers: Sequence[int] = ()
        self.doers: Sequence[int] = ()
        self.act: Act | None = None
        self.held: Rows = ()
        """What is read or written, by whomever."""
        self.over = threading.Event()
        self._callbacks: list[Callable[[Work], None]] = []

    def wait(self) -> None:
        """Raises RuntimeError if a rank does not come, or is gone."""
        self.nearby.settle(self)

    def get_future(self) -> Work:
        """What calls back when it is over."""
        return self

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        self._callbacks.append(callback)
        if self.over.is_set():
            self.end()

    def end(self) -> None:
        self._call_back()
        self.over.set()
        self._call_back()  # who came between

    def _call_back(self) -> None:
        with contextlib.suppress(IndexError):  # each is called once, by whichever thread
            while True:
                self._callbacks.pop()(self)


class Nearby:
    """One rank's end: which others it can reach, and what is under way with them.

    `exchange` gives what all ranks of the process group bring, in order. A rank waits `timeout` seconds for others.
    """

    def __init__(self, rank: int, timeout: float, exchange: Callable[[bytes], list[bytes]]) -> None:
        self.rank, self.timeout = rank, timeout
        self._inbox, self._slot = os.pipe()
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, int] = {rank: self._slot}
        self._pass = copier()
        self._scratch = torch.empty(_CHUNK * _WIDEST_BYTES, dtype=torch.uint8)
        boot, status = _boot(), os.fstat(self._inbox)
        word = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        pipe = _capacity(self._slot), self._slot, status.st_dev, status.st_ino
        cards = exchange(_CARD.pack(boot, os.getpid(), *pipe, ctypes.addressof(word), word.raw))
        here = {r: card for r, card in enumerate(map(_CARD.unpack, cards)) if boot == card[0] != _NO_HOST}
        self._most = min([card[2] for card in here.values()], default=0) // (3 * max(1, len(here)) * _RECORD.size)
        """So many meetings may be under way: see `_make_room`."""
        for r, (_, pid, _, *whom) in here.items():
            if r != rank and self._most:
                self._open(r, pid, *whom)
        reached = exchange(bytes([r in self._pipes for r in range(len(cards))]))
        self._reach = [{k for k, flag in enumerate(row) if flag} for row in reached]
        self.near = frozenset(r for r in range(len(cards)) if self.reaches((rank, r)))
        """The ranks that this one reaches, and that reach it."""
        self._groups: dict[tuple[int, ...], int] = {}
        self._met: Counter[Key] = Counter()
        """How often a group has met, by message."""
        self._works: dict[Key, Work] = {}
        self._under_way: deque[Work] = deque()
        self._heard = threading.Event()
        """Set when all has been heard that was told before it was cleared."""
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="distir-nearby", daemon=True)
        self._thread.start()

    def _open(self, rank: int, pid: int, pipe: int, device: int, inode: int, address: int, word: bytes) -> None:
        """Reach another rank, if the kernel lets us, and it is the one that is meant."""
        path, read = f"/proc/{pid}/fd/{pipe}", torch.zeros(len(word), dtype=torch.uint8)
        with contextlib.suppress(OSError):
            status = os.stat(path)  # before it is opened: to open a pipe that nobody reads would block
            self._pass("read", pid, address, read)
            if (status.st_dev, status.st_ino) == (device, inode) and bytes(read.tolist()) == word:
                self._pipes[rank] = os.open(path, os.O_WRONLY)
                self._pids[rank] = pid

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Whether each of these reaches all of them: all ranks answer alike."""
        return all(self._reach[r].issuperset(ranks) for r in ranks)

    def group(self, ranks: Sequence[int]) -> int:
        """The number of a group: all ranks of the process group must first ask for all groups, in the same order."""
        return self._groups.setdefault(tuple(sorted(ranks)), len(self._groups))

    # --- what is brought, and what each does with it: nobody may change it before the work is over

    def allreduce(self, x: torch.Tensor, ranks: Sequence[int], kind: str) -> Work:
        """Reduce `x`, contiguous, in place, by "sum" or "max": each of `ranks` does a part of it, for all."""
        me, row = ranks.index(self.rank), x.view(-1)
        others = [r for r in ranks if r != self.rank]
        line = _LINE_BYTES // x.itemsize
        part = -(-len(row) // (len(ranks) * line)) * line
        begin, end = min(len(row), me * part), min(len(row), (me + 1) * part)
        reduce = _REDUCE.get(kind, torch.add)

        def act(brought: Mapping[int, int]) -> None:
            for at in range(begin, end, _CHUNK):
                total = row[at : min(end, at + _CHUNK)]
                other = self._scratch[: total.nbytes].view(x.dtype)
                for r in others:
                    self._copy("read", r, brought[r] + at * x.itemsize, other)
                    reduce(total, other, out=total)
                for r in others:
                    self._copy("write", r, brought[r] + at * x.itemsize, total)

        key = self._next(self.group(ranks))
        return self._start(key, ranks, ranks, dict.fromkeys(ranks, x.data_ptr()), act, [x])

    def reduce_scatter(self, out: torch.Tensor, rows: Rows, ranks: Sequence[int], kind: str) -> Work:
        """Have in `out` what all bring for this rank, reduced, in the order of `ranks`: `rows[k]` is for the k-th. All
        contiguous; `kind` as for `allreduce`.
        """
        reduce = _REDUCE.get(kind, torch.add)
        own, whole = rows[ranks.index(self.rank)].view(-1), out.view(-1)

        def act(brought: Mapping[int, int]) -> None:
            for at in range(0, len(whole), _CHUNK):
                part = whole[at : at + _CHUNK]
                other = self._scratch[: part.nbytes].view(part.dtype)
                total = own[at : at + _CHUNK]
                for k, r in enumerate(ranks):
                    x = own[at : at + _CHUNK] if r == self.rank else other if k else part
                    if r != self.rank:
                        self._copy("read", r, brought[r] + at * x.itemsize, x)
                    total = reduce(total, x, out=part) if k else x

        addresses = {r: x.data_ptr() for r, x in zip(ranks, rows, strict=True)}
        return self._start(self._next(self.group(ranks)), ranks, ranks, addresses, act, [*rows, out])

    def swap(self, out: Rows, rows: Rows, ranks: Sequence[int]) -> Work:
        """Bring `rows[k]`, contiguous, to the k-th of `ranks`, and `out[k]` from it, but for one's own."""

        def act(brought: Mapping[int, int]) -> None:
            for r, x in zip(ranks, out, strict=True):
                if r != self.rank:
                    self._copy("read", r, brought[r], x)

        addresses = {r: x.data_ptr() for r, x in zip(ranks, rows, strict=True)}
        return self._start(self._next(self.group(ranks)), ranks, ranks, addresses, act, [*rows, *out])

    def send(self, x: torch.Tensor, to: int, message: int) -> Work:
        """Bring `x`, contiguous, to a rank."""
        key = self._next(self._way(self.rank, to), message)
        return self._start(key, [self.rank], [to], {to: x.data_ptr()}, None, [x])

    def receive(self, out: torch.Tensor, source: int, message: int) -> Work:
        """Have in `out`, contiguous, what a rank sends as `message`: of several, first what is sent first."""

        def act(brought: Mapping[int, int]) -> None:
            self._copy("read", source, brought[source], out)

        return self._start(self._next(self._way(source, self.rank), message), [source], [self.rank], {}, act, [out])

    def _copy(self, what: str, rank: int, address: int, x: torch.Tensor) -> None:
        """Raises RuntimeError if that rank is gone."""
        try:
            self._pass(what, self._pids[rank], address, x)
        except OSError as e:
            raise RuntimeError(f"cannot {what} memory of rank {rank}: {e.strerror}") from e

    # --- meetings

    def _next(self, group: int, message: int = 0) -> Key:
        self._met[group, message] += 1
        return group, message << _MESSAGE_BITS | self._met[group, message]

    def _way(self, source: int, to: int) -> int:
        """The number of two ranks of which the first sends: no other's, nor a group's."""
        return -1 - source * len(self._reach) - to

    def _start(
        self,
        key: Key,
        bringers: Sequence[int],
        doers: Sequence[int],
        addresses: Mapping[int, int],
        act: Act | None,
        held: Rows,
    ) -> Work:
        """Come to a meeting; `addresses` of what this rank brings to each. Raises ValueError for what is not
        contiguous.
        """
        if not all(x.is_contiguous() for x in held):
            raise ValueError("only what is contiguous can be read and written by others")
        brings = self.rank in bringers
        if brings:
            self._make_room()
        work = self._works.setdefault(key, Work(self))  # others may have come before
        work.bringers, work.doers, work.act, work.held = bringers, doers, act, held
        if brings:
            work.brought[self.rank] = 0
            self._under_way.append(work)
            for r in doers:
                if r != self.rank:
                    self._tell(r, _BROUGHT, key, addresses[r])
        work.joined = True
        if work.done or self._ready(work):  # the thread may not have seen that this rank has come
            self._tell(self.rank, _READY, key)
        if self._failure is not None:  # nor see it any more
            work.end()
        return work

    def _make_room(self) -> None:
        """Wait until so little is under way that no pipe is ever full: the threads that empty them never wait.

        Each who brings something sends a rank two records at most, and may make it send itself a third. Waiting cannot
        block for ever: what `check_order` proves holds even if each send and each collective is waited for at once.
        """
        while self._under_way and (self._under_way[0].over.is_set() or len(self._under_way) >= self._most):
            self.settle(self._under_way.popleft())

    def settle(self, work: Work) -> None:
        """Wait until a meeting is over. Raises RuntimeError if a rank does not come, or is gone."""
        end = time.monotonic() + self.timeout
        gone: set[int] = set()
        while not work.over.wait(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
            absent = set(work.bringers) - work.brought.keys() or set(work.doers) - work.done
            if absent & gone and self._heard.is_set():
                raise RuntimeError(f"rank {_listed(absent & gone)} is gone")
            if time.monotonic() >= end:
                raise RuntimeError(f"waited {self.timeout:g} s for rank {_listed(absent)}")
            if left := {r for r in absent if self._left(r)} - gone:
                gone |= left
                self._heard.clear()  # all that they told before they left is to be heard first
                self._tell(self.rank, _HEARD, (0, 0))
        if self._failure is not None and len(work.done) < max(1, len(work.doers)):
            raise RuntimeError(str(self._failure)) from self._failure

    def _left(self, rank: int) -> bool:
        """Whether nobody reads a rank's pipe any more."""
        poll = select.poll()
        poll.register(self._pipes[rank], 0)
        return any(what & select.POLLERR for _, what in poll.poll(0))

    def _tell(self, rank: int, what: int, key: Key, address: int = 0) -> None:
        """Raises RuntimeError if that rank is gone."""
        try:
            os.write(self._pipes[rank], _RECORD.pack(what, self.rank, *key, address))
        except BrokenPipeError as e:
            raise RuntimeError(f"rank {rank} is gone") from e

    # --- the thread

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                while True:
                    for what, rank, group, number, address in _RECORD.iter_unpack(os.read(self._inbox, _BATCH_BYTES)):
                        if what == _END:
                            return
                        if what == _HEARD:
                            self._heard.set()
                            continue
                        self._hear(what, rank, (group, number), address)
        except BaseException as e:  # whoever waits is told
            self._failure = e
            for work in list(self._works.values()):
                work.end()

    def _hear(self, what: int, rank: int, key: Key, address: int) -> None:
        work = self._works.get(key)
        if work is None:
            if what == _READY:
                return  # it is over
            work = self._works.setdefault(key, Work(self))
        if what == _BROUGHT:
            work.brought[rank] = address
        elif what == _DONE:
            work.done.add(rank)
        if not work.acted and self._ready(work):
            work.acted = True
            assert work.act is not None
            work.act(work.brought)
            for r in {*work.bringers, *work.doers} - {self.rank}:
                self._tell(r, _DONE, key)
            work.done.add(self.rank)
        if work.joined and len(work.done) == len(work.doers):
            del self._works[key]
            work.act, work.held = None, ()  # not kept for the sake of the work
            work.end()

    @staticmethod
    def _ready(work: Work) -> bool:
        """Whether this rank can do its part."""
        return work.joined and work.act is not None and len(work.brought) == len(work.bringers)

    def close(self, done: bool) -> None:
        """Leave the others. `done`: nobody waits for anybody; else after an error."""
        while done and self._under_way:
            self.settle(self._under_way.popleft())
        self._tell(self.rank, _END, (0, 0))
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            return  # stuck in telling one that does not listen: it ends with the process
        for number in (self._inbox, *self._pipes.values()):
            os.close(number)


def _listed(ranks: Set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _boot() -> bytes:
    """What tells a host from all others since it was started; nothing where no other process is to be reached."""
    if sys.platform != "linux" or os.environ.get("DISTIR_CROSS_MEMORY") == "0":
        return _NO_HOST
    try:
        return uuid.UUID(_BOOT.read_text().strip()).bytes
    except (OSError, ValueError):
        return _NO_HOST


def _capacity(pipe: int) -> int:
    """The bytes that a pipe holds: fewer where a user has many."""
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else 0
