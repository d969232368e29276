"""MPI, between processes on CPUs that mpirun has started: each collective is one non-blocking call, on tensors' memory.

MPI may move data only while it is called: `wait` polls, and so do a proxy's sleeps (`Mpi.beside`).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from distir.backends.tensors.staging import DeviceMemory
from distir.backends.transport.interface import Group, Line, Messages, Work, to_next, wait_all
from distir.ir.errors import UsageError, WorkerError
from distir.runtime.emulate import Beside

_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.bool: "UINT8_T",  # whose only reduction is a maximum
}
"""The names of MPI's types that its own reductions take. It has none of 16 bits: see `_reduction`."""
_RING_BYTES = 1 << 16
"""From so many bytes on Open MPI's non-blocking all-reduce may be a ring."""
_EAGER_POLLS = 50
"""How often a wait polls before it sleeps in between, where ranks share cores."""
_NAP_SECONDS = 20e-6
_IDLE_SECONDS = 0.005


def connect_mpi(world: int, timeout: float) -> Mpi:
    """Join MPI as one of `world` ranks, once a process. `timeout`: seconds without another rank's answer.

    Raises UsageError if mpi4py finds no MPI library, or one of another MPI than mpirun's.
    """
    ours = "mpi4py.MPI" not in sys.modules  # else the caller starts and ends MPI
    try:
        import mpi4py  # pyright: ignore[reportMissingImports]

        if ours:
            mpi4py.rc.thread_level = "serialized"
            mpi4py.rc.finalize = False
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError) as e:
        lines = str(e).strip().splitlines()
        raise UsageError(f"mpi4py finds no MPI library: {lines[0] if lines else e}", "pip install 'distir[mpi]'") from e
    if MPI.COMM_WORLD.size != world:
        library = MPI.Get_library_version().split(",")[0].strip()
        raise UsageError(
            f"mpirun has started {world} ranks, and mpi4py finds {MPI.COMM_WORLD.size}",
            f"mpirun and mpi4py need the same MPI library: mpi4py has {library}",
        )
    if not _joined:
        _joined.append(Mpi(MPI, ours))
    _joined[0].timeout = timeout
    return _joined[0]


_joined: list[Mpi] = []
"""What `connect_mpi` has made: MPI is joined once a process."""


def finish() -> None:
    """Leave MPI, when all ranks do. After an error it is not left: then mpirun ends the other ranks with this one."""
    if _joined and (joined := _joined.pop()).ours and not joined.failed:
        joined.finalize()


class Mpi:
    """A `Transport` over MPI, which matches messages by tag, and this process's place in it.

    A `Group` is a communicator, its ranks in ascending order. `ours`: distir has started MPI, and ends it.
    """

    grouped = True

    def __init__(self, mpi: Any, ours: bool) -> None:
        self.mpi, self.ours, self.timeout, self.failed = mpi, ours, 0.0, False
        self.world = mpi.COMM_WORLD.Dup()
        here = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
        self.one_host = here.size == self.world.size
        self.crowded = here.size > (os.cpu_count() or 1)
        """Whether ranks share cores: one that waits should leave its core to others."""
        here.Free()
        self.beside = Beside(self.world.Iprobe)
        self._groups: dict[tuple[int, ...], Group] = {}
        if ours:
            atexit.register(finish)
            sys.excepthook = functools.partial(self._excepthook, sys.excepthook)

    def _excepthook(self, others: Callable[..., None], *error: Any) -> None:
        """An exception ends this process: the other ranks are not to be waited for."""
        self.failed = True
        others(*error)

    def finalize(self) -> None:
        """Wait, idle, until all ranks have come here, and end MPI."""
        done = self.world.Ibarrier()
        while not done.Test():
            time.sleep(_IDLE_SECONDS)
        self.mpi.Finalize()

    # --- what ranks agree on

    def store(self) -> TCPStore:
        """A store of rank 0 that all ranks reach, through which a process group for control messages is joined."""
        host = "127.0.0.1" if self.one_host else socket.gethostname()
        first = self.world.rank == 0
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if first else None
        host, port = self.world.bcast(None if store is None else (host, store.port))
        return store or TCPStore(host, port, is_master=False)

    def group(self, ranks: Sequence[int]) -> Group:
        """The communicator of these ranks, in ascending order; made on first use, by its members only."""
        key = tuple(ranks)
        if key not in self._groups:
            number = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")
            members = self.world.Get_group().Incl(list(ranks))
            self._groups[key] = self.world.Create_group(members, number % 32768)  # the least of largest tags
        return self._groups[key]

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of all ranks, of each number; a barrier, too."""
        row = torch.tensor(numbers, dtype=torch.int64)
        whole = [self._memory(row), len(numbers), self.mpi.INT64_T]
        self._flying(self.world.Iallreduce(self.mpi.IN_PLACE, whole, self.mpi.MIN), row).wait()
        self._flying(self.world.Ibarrier()).wait()  # those that slept in the first wait have come late out of it
        return row.tolist()

    # --- as a transport

    def slow_in_place(self, x: torch.Tensor) -> bool:
        """Whether Open MPI reduces `x` quicker into other memory.

        In place it copies the operand before the call returns (2 ranks, 3 MB: 0.5 ms), and has no ring, but a tree,
        which sends everything at each level (4 ranks on 2 cores: 4.2 ms, as a ring 1.8).
        """
        return x.nbytes >= _RING_BYTES

    def all_reduce(self, x: torch.Tensor, line: Line, kind: str) -> Work:
        whole, op = self._reduced(x, kind)
        return self._flying(self._comm(line).Iallreduce(self.mpi.IN_PLACE, whole, op), x)

    def all_reduce_into(self, out: torch.Tensor, x: torch.Tensor, line: Line, kind: str) -> Work:
        """`all_reduce` with the result in `out`, without a copy of `x`: see `slow_in_place`."""
        (given, op), (whole, _) = self._reduced(x, kind), self._reduced(out, kind)
        return self._flying(self._comm(line).Iallreduce(given, whole, op), x, out)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, line: Line) -> list[Work]:
        return [self._flying(self._comm(line).Iallgather(self._bytes(x), self._bytes(out)), x, out)]

    def reduce_scatter(
        self, rows: torch.Tensor, line: Line, kind: str, memory: DeviceMemory
    ) -> tuple[list[Work], Callable[[], torch.Tensor]]:
        out = memory.empty(rows.shape[1:], rows.dtype)
        (given, op), (mine, _) = self._reduced(rows, kind), self._reduced(out, kind)
        work = self._flying(self._comm(line).Ireduce_scatter_block(given, mine, op), rows, out)
        return [work], lambda: memory.from_backend(out.div_(len(line.ranks)) if kind == "mean" else out)

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, line: Line) -> list[Work]:
        return [self._flying(self._comm(line).Ialltoall(self._bytes(rows), self._bytes(out)), rows, out)]

    def exchange(self, sent: Messages, received: Messages, line: Line) -> list[Work]:
        comm, place = self._comm(line), {r: k for k, r in enumerate(sorted(line.ranks))}
        works: list[Work] = [self._flying(comm.Irecv(self._bytes(out), place[k]), out) for k, out in received]
        works += [self._flying(comm.Isend(self._bytes(x), place[k]), x) for k, x in sent]
        return works

    def send(self, x: torch.Tensor, to: int, message: int) -> list[Work]:
        return [self._flying(self.world.Isend(self._bytes(x), to, message), x)]

    def receive(self, out: torch.Tensor, source: int, message: int) -> list[Work]:
        return [self._flying(self.world.Irecv(self._bytes(out), source, message), out)]

    def benchmark(
        self, collective: str, whole: torch.Tensor, other: torch.Tensor, part: torch.Tensor, size: int
    ) -> Callable[[], None]:
        """A function that runs one of `bench_collectives`'s collectives once, among `size` neighbours."""
        first = self.world.rank // size * size
        ranks = list(range(first, first + size))
        world = self.world if size == self.world.size else self.group(ranks)
        rank = world.rank
        line = Line(None if world is self.world else world, ranks, rank, None, self)
        rows, others = whole.view(size, -1), other.view(size, -1)
        mine, root = self._bytes(part), self._bytes(whole) if rank == 0 else None
        given, op = self._reduced(whole, "sum")
        into = self._reduced(other, "sum")[0] if rank == 0 else None
        starts: dict[str, Callable[[], list[Work]]] = {
            "all-reduce": lambda: [self.all_reduce_into(other, whole, line, "sum")],
            "all-gather": lambda: self.all_gather(rows, part, line),
            "reduce-scatter": lambda: self.reduce_scatter(rows, line, "sum", DeviceMemory(whole.device))[0],
            "all-to-all": lambda: self.all_to_all(others, rows, line),
            "gather": lambda: [self._flying(world.Igather(mine, root))],
            "scatter": lambda: [self._flying(world.Iscatter(root, mine))],
            "broadcast": lambda: [self._flying(world.Ibcast(self._bytes(whole)))],
            "reduce": lambda: [self._flying(world.Ireduce(given, into, op))],
            "send-recv": lambda: self.exchange(
                [(ranks[(rank + 1) % size], whole)], [(ranks[(rank - 1) % size], other)], line
            ),
            "send": lambda: to_next(
                lambda to: self.send(whole, to, 0),
                lambda source: self.receive(other, source, 0),
                self.world.rank,
                self.world.size,
            ),
        }
        return lambda: wait_all(starts[collective]())

    def close(self, done: bool) -> None:
        """After an error MPI is not left: mpirun ends the other ranks with this one."""
        self.failed = self.failed or not done

    def _comm(self, line: Line) -> Any:
        return self.world if line.group is None else line.group

    def _flying(self, request: Any, *tensors: torch.Tensor) -> _Request:
        return _Request(request, self, tensors)

    def _memory(self, x: torch.Tensor) -> Any:
        return self.mpi.memory.fromaddress(x.data_ptr(), x.nbytes)

    def _bytes(self, x: torch.Tensor) -> list[Any]:
        return [self._memory(x), self.mpi.BYTE]

    def _reduced(self, x: torch.Tensor, kind: str) -> tuple[list[Any], Any]:
        """A buffer as an operand of a reduction, and MPI's reduction. A mean is a sum, divided afterwards."""
        name = _TYPES.get(x.dtype)
        if name is None:
            return [self._memory(x), self.mpi.UINT16_T], _reduction(self.mpi, x.dtype, kind)
        return [self._memory(x), getattr(self.mpi, name)], self.mpi.MAX if kind == "max" else self.mpi.SUM


@functools.cache
def _reduction(mpi: Any, dtype: torch.dtype, kind: str) -> Any:
    """A reduction of float16 or bfloat16, each sum of two computed in float32 (as torch adds them)."""

    def reduce(given: Any, into: Any, _: Any) -> None:
        a, b = (torch.frombuffer(x, dtype=dtype) for x in (given, into))
        (torch.maximum if kind == "max" else torch.add)(a, b, out=b)

    return mpi.Op.Create(reduce, commute=True)


class _Request:
    """A request in flight, with the tensors whose memory it reads and writes."""

    __slots__ = ("mpi", "request", "tensors")

    def __init__(self, request: Any, mpi: Mpi, tensors: Sequence[torch.Tensor]) -> None:
        self.request, self.mpi, self.tensors = request, mpi, tensors

    def wait(self) -> None:
        """Raises WorkerError if other ranks do not take part in time."""
        test = self.request.Test
        if not test():
            end, crowded, polls = time.monotonic() + self.mpi.timeout, self.mpi.crowded, 0
            while not test():
                if time.monotonic() > end:
                    raise WorkerError(f"other ranks have not taken part in communication for {self.mpi.timeout:g} s")
                polls += 1
                if crowded and polls > _EAGER_POLLS:
                    time.sleep(_NAP_SECONDS)
        self.mpi.beside.waited()
        self.tensors = ()
