"""NCCL, between GPUs: each collective is one call of the process group.

NCCL has no message tags and runs the operations between two ranks in order. So each direction between two ranks has its
own group, in which messages are received in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from distir.backends.tensors.layout import movable
from distir.backends.tensors.staging import DeviceMemory
from distir.backends.transport.gloo import OPS
from distir.backends.transport.interface import Group, Line, Messages, Work

# torch 2.13 renamed these two
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Channels = Mapping[tuple[int, int], Group]
"""The group for messages from one rank to another, by (from, to)."""


class Nccl:
    """A `Transport` over NCCL, or a process group with the same ordering of messages."""

    grouped = True

    def __init__(self, rank: int, channels: Channels) -> None:
        self.rank, self.channels = rank, channels

    def all_reduce(self, x: torch.Tensor, line: Line, kind: str) -> Work:
        return line.started(dist.all_reduce(x, OPS[kind], line.group, async_op=True))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, line: Line) -> list[Work]:
        return [line.started(all_gather(movable(out), movable(x), group=line.group, async_op=True))]

    def reduce_scatter(
        self, rows: torch.Tensor, line: Line, kind: str, memory: DeviceMemory
    ) -> tuple[list[Work], Callable[[], torch.Tensor]]:
        out = memory.empty(rows.shape[1:], rows.dtype)
        work = line.started(reduce_scatter(out, rows.view(-1), OPS[kind], group=line.group, async_op=True))
        return [work], lambda: memory.from_backend(out.div_(len(line.ranks)) if kind == "mean" else out)

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, line: Line) -> list[Work]:
        return [line.started(dist.all_to_all_single(movable(out), movable(rows), group=line.group, async_op=True))]

    def exchange(self, sent: Messages, received: Messages, line: Line) -> list[Work]:
        """All messages as one batch: posted one after the other they would deadlock."""
        batch = [dist.P2POp(dist.irecv, movable(out), source, line.group) for source, out in received]
        batch += [dist.P2POp(dist.isend, movable(x), to, line.group) for to, x in sent]
        return [line.started(work) for work in dist.batch_isend_irecv(batch)] if batch else []

    def send(self, x: torch.Tensor, to: int, message: int) -> list[Work]:
        return self._post(dist.isend, x, to, self.channels[self.rank, to], message)

    def receive(self, out: torch.Tensor, source: int, message: int) -> list[Work]:
        return self._post(dist.irecv, out, source, self.channels[source, self.rank], message)

    @staticmethod
    def _post(call: Callable[..., object], x: torch.Tensor, peer: int, group: Group, message: int) -> list[Work]:
        """Post one message as a batch of one, which uses the communicator of the group. NCCL does not define what
        happens if the two sides batch messages differently.
        """
        return dist.batch_isend_irecv([dist.P2POp(call, movable(x), peer, group, message)])  # type: ignore[arg-type]

    def close(self, done: bool) -> None:
        """Nothing to do: the process group is destroyed separately."""
