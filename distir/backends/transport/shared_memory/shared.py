"""The `Transport` over `peer_memory`, between ranks of one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distir.backends.tensors.staging import DeviceMemory
from distir.backends.transport.interface import COLLECTIVE, Line, Messages, Work
from distir.backends.transport.shared_memory.peer_memory import PeerMemory


class SharedMemory:
    """A `Transport` to the ranks that `peer_memory` can reach."""

    grouped = False

    def __init__(self, peer_memory: PeerMemory) -> None:
        self.peer_memory = peer_memory

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Whether each of these ranks reaches all of them; the same answer on all ranks."""
        return self.peer_memory.reaches(ranks)

    def all_reduce(self, x: torch.Tensor, line: Line, kind: str) -> Work:
        return line.started(self.peer_memory.allreduce(x, line.ranks, kind))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, line: Line) -> list[Work]:
        return self._swap(out, [x] * len(line.ranks), line)

    def reduce_scatter(
        self, rows: torch.Tensor, line: Line, kind: str, memory: DeviceMemory
    ) -> tuple[list[Work], Callable[[], torch.Tensor]]:
        out = memory.empty(rows.shape[1:], rows.dtype)
        work = line.started(self.peer_memory.reduce_scatter(out, rows.unbind(), line.ranks, kind))
        return [work], lambda: out.div_(len(line.ranks)) if kind == "mean" else out

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, line: Line) -> list[Work]:
        return self._swap(out, rows.unbind(), line)

    def _swap(self, out: torch.Tensor, rows: Sequence[torch.Tensor], line: Line) -> list[Work]:
        work = line.started(self.peer_memory.swap(out.unbind(), rows, line.ranks))
        if out[line.index].data_ptr() != rows[line.index].data_ptr():
            out[line.index].copy_(rows[line.index])
        return [work]

    def exchange(self, sent: Messages, received: Messages, line: Line) -> list[Work]:
        works = [self.peer_memory.receive(out, source, COLLECTIVE) for source, out in received]
        works += [self.peer_memory.send(x, to, COLLECTIVE) for to, x in sent]
        return [line.started(work) for work in works]

    def send(self, x: torch.Tensor, to: int, message: int) -> list[Work]:
        return [self.peer_memory.send(x, to, message)]

    def receive(self, out: torch.Tensor, source: int, message: int) -> list[Work]:
        return [self.peer_memory.receive(out, source, message)]

    def close(self, done: bool) -> None:
        self.peer_memory.close(done)
