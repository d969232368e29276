"""gloo, between processes on CPUs: collectives other than all-reduce are made of pairwise messages.

gloo's own all-gather is a ring, which takes up to three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distir.backends.tensors.staging import DeviceMemory
from distir.backends.transport.interface import COLLECTIVE, Line, Messages, Work

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "mean": dist.ReduceOp.SUM}
"""gloo has no mean: it is a sum, divided afterwards."""


class Gloo:
    """A `Transport` over gloo, which matches messages by tag."""

    grouped = False

    def all_reduce(self, x: torch.Tensor, line: Line, kind: str) -> Work:
        return line.started(dist.all_reduce(x, OPS[kind], line.group, async_op=True))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, line: Line) -> list[Work]:
        works = _messages(out.unbind(), [x] * len(line.ranks), line)
        copy_own(out, x, line)
        return works

    def reduce_scatter(
        self, rows: torch.Tensor, line: Line, kind: str, memory: DeviceMemory
    ) -> tuple[list[Work], Callable[[], torch.Tensor]]:
        # separate buffers: the total is accumulated in one of them, which must not keep the others alive
        n, shape = len(line.ranks), rows.shape[1:]
        got = [rows[k] if k == line.index else memory.empty(shape, rows.dtype) for k in range(n)]
        works = _messages(got, rows.unbind(), line)
        return works, lambda: _total([memory.from_backend(x) for x in got], line.index, kind)

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, line: Line) -> list[Work]:
        works = _messages(out.unbind(), rows.unbind(), line)
        copy_own(out, rows[line.index], line)
        return works

    def exchange(self, sent: Messages, received: Messages, line: Line) -> list[Work]:
        works = [_posted(dist.irecv(out, source, line.group, COLLECTIVE)) for source, out in received]
        return works + [_posted(dist.isend(x, to, line.group, COLLECTIVE)) for to, x in sent]

    def send(self, x: torch.Tensor, to: int, message: int) -> list[Work]:
        return [_posted(dist.isend(x, to, tag=message))]

    def receive(self, out: torch.Tensor, source: int, message: int) -> list[Work]:
        return [_posted(dist.irecv(out, source, tag=message))]

    def close(self, done: bool) -> None:
        """Nothing to do: the process group is destroyed separately."""


def copy_own(out: torch.Tensor, x: torch.Tensor, line: Line) -> None:
    """Copy this rank's own row to `out`, unless it already is that row."""
    if out[line.index].data_ptr() != x.data_ptr():
        out[line.index].copy_(x)


def _messages(out: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], line: Line) -> list[Work]:
    """Send `rows[k]` to rank k of the line and receive `out[k]` from it, except this rank's own."""
    others = [(k, r) for k, r in enumerate(line.ranks) if k != line.index]
    works = [_posted(dist.irecv(out[k], r, line.group, COLLECTIVE)) for k, r in others]
    return works + [_posted(dist.isend(rows[k], r, line.group, COLLECTIVE)) for k, r in others]


def _posted(work: Any) -> Work:
    return work


def _total(row: Sequence[torch.Tensor], mine: int, kind: str) -> torch.Tensor:
    """The sum, maximum or mean of tensors, in order; overwrites all of them except the one at `mine`."""
    total = row[0]
    for k, x in enumerate(row[1:], 1):
        into = x if k == 1 and mine == 0 else total
        total = torch.maximum(total, x, out=into) if kind == "max" else torch.add(total, x, out=into)
    return total.div_(len(row)) if kind == "mean" else total
