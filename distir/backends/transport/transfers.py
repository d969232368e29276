"""Point-to-point transfers between ranks: non-blocking, posted in batches, and freed once sent.

Messages between two ranks are matched by number, and those with the same number by order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distir.backends.tensors.staging import DeviceMemory
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.backends.transport.gloo import Gloo
from distir.backends.transport.interface import Transport, wait_all
from distir.ir.device import Device, Mesh
from distir.ir.function import Function
from distir.ir.type import Tensor
from distir.transforms.rank.project import coordinate, device_at, homes_of

Pending = Callable[[], torch.Tensor]
"""An operation in flight: calling it waits and returns the result."""

_GLOO = Gloo()
_IN_FLIGHT_BYTES = 64 << 20
"""Bytes that may be kept alive only by sends in flight; beyond this, and beyond two messages, the oldest is waited for.
Waiting cannot deadlock: what `check_order` proves holds even if every send blocks until it is received."""


@dataclass(slots=True)
class _Issue:
    """A send or receive. `bytes`: memory that is freed once it is complete. `works`: what to wait for; None until it is
    posted.
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
    """A rank's sends and receives, over the transport that `transport(ranks)` gives for two ranks (default: gloo).

    Transfers start at the next `post`.
    """

    def __init__(
        self, rank: int, memory: DeviceMemory, transport: Callable[[Sequence[int]], Transport] | None = None
    ) -> None:
        self.rank, self.memory = rank, memory
        self.transport = transport or (lambda ranks: _GLOO)
        self._issued: list[_Issue] = []
        self._sent: deque[_Issue] = deque()
        self._bytes = 0

    def send(self, x: torch.Tensor, to: int, message: int, stays: bool = False) -> None:
        """Send to a rank. The tensor may be released, but not changed before the next `drain`. `stays`: something else
        keeps it alive, so it does not count as memory in flight.
        """
        operand = self.memory.to_backend(x)
        self._issued.append(_Issue(True, operand, to, message, 0 if stays and operand is x else x.nbytes))

    def receive(self, t: Tensor, source: int, message: int) -> Pending:
        """Receive, from a rank, a piece of local type `t`."""
        issue = _Issue(False, self.memory.empty(t.shape, torch_dtype(t.dtype)), source, message)
        self._issued.append(issue)

        def finish() -> torch.Tensor:
            if issue.works is None:
                self.post()
            issue.wait()
            return self.memory.from_backend(issue.x)

        return finish

    def post(self) -> None:
        """Start all transfers issued since the last call."""
        issued, self._issued = self._issued, []
        for i in issued:
            transport = self.transport((self.rank, i.peer))
            i.works = list((transport.send if i.sends else transport.receive)(i.x, i.peer, i.message))
        for i in issued:
            if i.sends:
                self._sent.append(i)
                self._bytes += i.bytes
        while self._bytes > _IN_FLIGHT_BYTES and len(self._sent) > 2:
            self._forget()

    def _forget(self) -> None:
        oldest = self._sent.popleft()
        self._bytes -= oldest.bytes
        oldest.wait()

    def drain(self) -> None:
        """Wait until all sends are complete."""
        self.post()
        while self._sent:
            self._forget()


def directions(program: Function, here: Device | None, number: Mapping[Device, int]) -> list[tuple[int, int]]:
    """The pairs (from, to) of ranks between which a rank's program sends or receives, in the order of the distributed
    program, so that both ranks of each pair make their channels in the same order.
    """
    found: dict[tuple[Device, Device], None] = {}
    transfers = [op for op in program.ops if op.attributes.get("message") is not None]
    for op in sorted(transfers, key=lambda op: op.attributes["message"]):
        for source in homes_of(op.inputs[0].type) if op.inputs else (op.attributes["source"],):
            found.update(dict.fromkeys(_pairs(source, op.attributes["to"], here)))
    return [(number[a], number[b]) for a, b in found if a is not b]


def _pairs(source: Device | Mesh, to: Device | Mesh, here: Device | None) -> list[tuple[Device, Device]]:
    """The pairs of sending and receiving devices of a transfer in which device `here` takes part."""
    a, b = (place.devices if isinstance(place, Mesh) else (place,) for place in (source, to))
    if isinstance(source, Mesh) and isinstance(to, Mesh):
        sends = [(x, device_at(to, coordinate(source, x))) for x in a if x is here]
        return sends + [(device_at(source, coordinate(to, y)), y) for y in b if y is here]
    return [(x, y) for x in a for y in b if here in (x, y)]
