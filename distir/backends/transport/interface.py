"""The transport interface: collectives and messages between ranks.

Every operation is asynchronous and returns works to wait for. There are three transports: `gloo` and `nccl`, over
torch.distributed, and `shared_memory`, between ranks of one host. `choose` selects one for a set of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from distir.backends.tensors.staging import DeviceMemory

Group = Any
"""A process group; None is the group of all ranks."""
COLLECTIVE = 1 << 30
"""The message tag of collectives; no transfer uses it."""


Messages = Sequence[tuple[int, torch.Tensor]]
"""The ranks that are sent to, or received from, each with a tensor."""


class Work(Protocol):
    """An operation in flight: a collective, a send or a receive."""

    def wait(self) -> object:
        """Wait until the result is available and the operands may be reused; to be called once.

        Raises RuntimeError if another rank does not take part in time, or has exited.
        """
        ...


class Transport(Protocol):
    """Collectives along a line of ranks, and messages between two. Tensors are contiguous, and must be neither changed
    nor read before their works are complete.

    `grouped`: a collective is one call of the process group; several tensors are packed into one, and rows are in
    ascending order of ranks (see `Line.places`). Otherwise a collective is made of messages; tensors may be sent one
    by one, and rows are in the order of the line.
    """

    @property
    def grouped(self) -> bool: ...

    def all_reduce(self, x: torch.Tensor, line: Line, kind: str) -> Work:
        """Reduce `x` in place: kind "max" is the maximum, "sum" and "mean" the sum."""
        ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, line: Line) -> list[Work]:
        """Gather each rank's `x` (...) into `out` (n, ...); `x` may be this rank's row of `out`."""
        ...

    def reduce_scatter(
        self, rows: torch.Tensor, line: Line, kind: str, memory: DeviceMemory
    ) -> tuple[list[Work], Callable[[], torch.Tensor]]:
        """Reduce `rows` (n, ...), which has a row for each rank. Returns the works, and a function for the result, of
        kind "sum", "max" or "mean", to be called when they are complete.
        """
        ...

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, line: Line) -> list[Work]:
        """Send a row of `rows` (n, ...) to each rank, and receive a row of `out` (n, ...) from each."""
        ...

    def exchange(self, sent: Messages, received: Messages, line: Line) -> list[Work]:
        """Send to some ranks of the line, and receive from some: a message at most from each to each other."""
        ...

    def send(self, x: torch.Tensor, to: int, message: int) -> list[Work]:
        """Send to a rank. Messages with the same number between two ranks arrive in order."""
        ...

    def receive(self, out: torch.Tensor, source: int, message: int) -> list[Work]:
        """Receive from a rank."""
        ...

    def close(self, done: bool) -> None:
        """Close the connections. `done` is false after an error, when other ranks may be waiting."""
        ...


class Line(NamedTuple):
    """The ranks that take part in a collective along a mesh axis, in its order; `index` is the position of this one.

    `places`: the position of each rank in `group`, whose ranks are in ascending order; None if the two orders agree.
    `watch` is called with the work of every collective when it starts.
    """

    group: Group
    ranks: list[int]
    index: int
    places: list[int] | None
    transport: Transport
    watch: Callable[[Any], None] | None = None

    def started(self, work: Any) -> Any:
        """Pass the work of a collective that has just started to `watch`, and return it."""
        if self.watch is not None and work is not None:
            self.watch(work)
        return work


class Reaches(Transport, Protocol):
    """A transport that reaches only some of the other ranks."""

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Whether each of these ranks reaches all of them; the same answer on all ranks."""
        ...


def choose(near: Reaches | None, general: Transport, ranks: Sequence[int]) -> Transport:
    """The transport between some ranks: `near` if they all reach each other by it, else `general`."""
    return near if near is not None and len(ranks) > 1 and near.reaches(ranks) else general


def wait(work: Work | None) -> None:
    """Wait for a work; torch.distributed returns None for an operation without one."""
    if work is not None:
        work.wait()


def wait_all(works: list[Any]) -> None:
    """Wait for each work once: a second wait on gloo would wait for another message."""
    while works:
        wait(works.pop())


def to_next(send: Callable[[int], list[Any]], receive: Callable[[int], list[Any]], rank: int, world: int) -> list[Any]:
    """Every even rank sends to the next one; of an odd number the last does nothing."""
    if rank % 2:
        return receive(rank - 1)
    return send(rank + 1) if rank + 1 < world else []
