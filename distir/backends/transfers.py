"""Sends and receives between two ranks: none blocks, those issued together start together, what was sent is let go.

Messages between two ranks are told apart by a number; of equal number by their order. On gloo, and between ranks that
read each other's memory, that is all. NCCL knows no numbers, and does in order what a rank has to do with another: so
each direction between two ranks has a group of its own, in which messages are received in the order in which they are
sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distir.backends.layout import movable
from distir.backends.memory import Memory
from distir.backends.namespace import torch_dtype
from distir.backends.nearby import Nearby
from distir.ir.device import Device, Mesh
from distir.ir.function import Function
from distir.ir.type import Tensor
from distir.transforms.project import TRANSFERS, homes_of

Pending = Callable[[], torch.Tensor]
"""What is under way: called, it waits, and gives the result."""
Group = Any
"""A process group; None is the group of all ranks."""
Channels = Mapping[tuple[int, int], Group]
"""The group in which one rank sends to another, by (from, to)."""

_IN_FLIGHT_BYTES = 64 << 20
"""So much may be kept only because it is on its way; beyond it, and beyond two messages, the oldest is waited for. That
cannot block for ever: what `check_order` proves holds even if every send waits until it is received."""


def wait(work: Any) -> None:
    """Wait for what torch.distributed has issued, if it is anything."""
    if work is not None:
        work.wait()


def wait_all(works: list[Any]) -> None:
    """Wait for each, once: gloo would wait for a second message."""
    while works:
        wait(works.pop())


@dataclass(slots=True)
class _Issue:
    """A send or receive: `bytes` are free once it has gone, `works` is what to wait for, once, of all its batch.

    `works` is None until it is posted.
    """

    sends: bool
    x: torch.Tensor
    peer: int
    message: int
    bytes: int = 0
    works: list[Any] | None = None

    def wait(self) -> None:
        wait_all(self.works or [])


class Transfers:
    """One rank's sends and receives. What is issued starts with the next `post`."""

    def __init__(
        self, rank: int, memory: Memory, channels: Channels | None = None, nearby: Nearby | None = None
    ) -> None:
        self.rank, self.memory, self.channels, self.nearby = rank, memory, channels, nearby
        self._issued: list[_Issue] = []
        self._sent: deque[_Issue] = deque()
        self._bytes = 0

    def send(self, x: torch.Tensor, to: int, message: int, stays: bool = False) -> None:
        """Send to a rank. The tensor may be dropped (or `stays`), but not changed before the next `drain`."""
        lent = self.memory.lent(x)
        self._issued.append(_Issue(True, lent, to, message, 0 if stays and lent is x else x.nbytes))

    def receive(self, t: Tensor, source: int, message: int) -> Pending:
        """Receive, from a rank, a piece of local type `t`."""
        issue = _Issue(False, self.memory.empty(t.shape, torch_dtype(t.dtype)), source, message)
        self._issued.append(issue)

        def finish() -> torch.Tensor:
            if issue.works is None:
                self.post()
            issue.wait()
            return self.memory.back(issue.x)

        return finish

    def post(self) -> None:
        """Start all that was issued."""
        issued, self._issued = self._issued, []
        for i in issued:
            if self.nearby is not None and i.peer in self.nearby.near:
                i.works = [(self.nearby.send if i.sends else self.nearby.receive)(i.x, i.peer, i.message)]
            elif self.channels is None:
                i.works = [(dist.isend if i.sends else dist.irecv)(i.x, i.peer, tag=i.message)]
            else:
                i.works = self._post_by_direction(i, self.channels)
        for i in issued:
            if i.sends:
                self._sent.append(i)
                self._bytes += i.bytes
        while self._bytes > _IN_FLIGHT_BYTES and len(self._sent) > 2:
            self._forget()

    def _post_by_direction(self, i: _Issue, channels: Channels) -> list[Any]:
        """Start one in the group of its direction: as a batch of one, which goes by what the group has set up, and not
        together with others, for NCCL leaves open what happens where the other side puts together other ones.
        """
        group = channels[(self.rank, i.peer) if i.sends else (i.peer, self.rank)]
        op = dist.P2POp(dist.isend if i.sends else dist.irecv, movable(i.x), i.peer, group, i.message)
        return dist.batch_isend_irecv([op])

    def _forget(self) -> None:
        oldest = self._sent.popleft()
        self._bytes -= oldest.bytes
        oldest.wait()

    def drain(self) -> None:
        """Wait until all that was sent has gone."""
        self.post()
        while self._sent:
            self._forget()


class Line(NamedTuple):
    """The ranks that meet along a mesh axis, in its order; `index` is the place of this one.

    `places`: where in `group`, which is in the order of ranks, each of them is; None if at its own place. `nearby`: by
    which all of them reach each other, if they do. `watch` is told of what is started.
    """

    group: Group
    ranks: list[int]
    index: int
    places: list[int] | None
    nearby: Nearby | None = None
    watch: Callable[[Any], None] | None = None

    def started(self, work: Any) -> Any:
        """The work of a collective, or of a part of one, that has just been started."""
        if self.watch is not None and work is not None:
            self.watch(work)
        return work


def directions(program: Function, number: Mapping[Device, int]) -> list[tuple[int, int]]:
    """From which rank to which the program sends, in its order: the same on every rank."""
    found: dict[tuple[int, int], None] = {}
    for op in program.ops:
        if op.spec.name in TRANSFERS:
            for source in homes_of(op.inputs[0].type):
                found.update(dict.fromkeys(_pairs(source, op.attributes["to"], number)))
    return [(a, b) for a, b in found if a != b]


def _pairs(source: Device | Mesh, to: Device | Mesh, number: Mapping[Device, int]) -> list[tuple[int, int]]:
    a = [number[d] for d in (source.devices if isinstance(source, Mesh) else (source,))]
    b = [number[d] for d in (to.devices if isinstance(to, Mesh) else (to,))]
    if isinstance(source, Mesh) and isinstance(to, Mesh):
        return list(zip(a, b, strict=True))
    return [(i, j) for i in a for j in b]


def directed_groups(program: Function, number: Mapping[Device, int], new: Callable[[list[int]], Group]) -> Channels:
    """A group for each direction in which the program sends; every rank must make all of them."""
    return {(a, b): new([a, b]) for a, b in directions(program, number)}
