"""All-gather and reduce-scatter of several tensors at once, over a transport that works by messages.

Large parts are sent by themselves without a copy; small ones are packed together.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distir.backends.tensors.layout import merge_front, split_front
from distir.backends.tensors.staging import DeviceMemory
from distir.backends.transport.interface import Line, wait_all
from distir.ir.errors import WorkerError
from distir.ir.type import Tensor

Row = Sequence[torch.Tensor]
Split = tuple[int, int, int]
"""(dim, outer, n) of a split, in the local shape."""
Finish = Callable[[], list[torch.Tensor]]
"""Waits and returns the results; to be called once."""

_APART_BYTES = 1 << 18
"""Parts of at least so many bytes are sent by themselves: a message costs as much as copying that many bytes."""
_MOST_IN_FLIGHT = 1
"""Reductions in flight when another starts; beyond this the oldest is waited for, to free its operands. Waiting cannot
deadlock: what `check_order` proves holds even if each reduction blocks."""


class _Packing:
    """Which of several parts are sent by themselves (`apart`), and the offsets of the others in a packed buffer."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        alone = len(parts) == 1
        self.parts = parts
        self.apart = [k for k, t in enumerate(parts) if alone or t.bytes >= _APART_BYTES]
        self.together = [k for k, t in enumerate(parts) if k not in self.apart]
        self.cuts = [0, *itertools.accumulate(math.prod(parts[k].shape) for k in self.together)]

    def slices(self) -> list[tuple[int, int, int]]:
        """(part, begin, end) of each part in the packed buffer."""
        return [(k, a, b) for k, (a, b) in zip(self.together, itertools.pairwise(self.cuts), strict=True)]


def gather(
    memory: DeviceMemory, line: Line, parts: Sequence[Tensor], splits: Sequence[Split], within: Sequence[bool]
) -> Callable[[Row], Finish]:
    """A function that starts an all-gather of tensors of local types `parts`, split by `splits`. Where `within` is
    true, a part may be gathered in place in the whole that it is a view of, which nothing else reads.
    """
    packing, n = _Packing(parts), len(line.ranks)

    def start(xs: Row) -> Finish:
        outs: list[torch.Tensor] = []
        works: list[Any] = []
        for k in packing.apart:
            out = _whole(xs[k], n, line.index) if within[k] and splits[k][:2] == (0, 1) else None
            x = memory.to_backend(xs[k])
            if out is None or x is not xs[k]:
                out = memory.empty((n, *x.shape), x.dtype)
            works += line.transport.all_gather(out, x, line)
            outs.append(out)
        if packing.together:
            x = memory.to_backend(torch.cat([xs[k].reshape(-1) for k in packing.together]))
            outs.append(memory.empty((n, *x.shape), x.dtype))
            works += line.transport.all_gather(outs[-1], x, line)

        def finish() -> list[torch.Tensor]:
            wait_all(works)
            wholes: dict[int, torch.Tensor] = {}
            if packing.together:
                rows = memory.from_backend(outs.pop())
                for k, a, b in packing.slices():
                    wholes[k] = merge_front(rows[:, a:b].reshape(n, *parts[k].shape), *splits[k][:2], memory.allocate)
            for k, out in zip(packing.apart, outs, strict=True):
                wholes[k] = merge_front(memory.from_backend(out), *splits[k][:2], memory.allocate)
            outs.clear()
            return [wholes[k] for k in range(len(parts))]

        return finish

    return start


def _whole(x: torch.Tensor, n: int, index: int) -> torch.Tensor | None:
    """The whole (n, ...) of which `x` is the part at `index`, if `x` lies so in its storage; else None."""
    first = x.storage_offset() - index * x.numel()
    rows = x.numel() // max(1, x.shape[0]) if x.shape else 0
    if not rows or not x.is_contiguous() or x.stride(0) != rows:
        return None
    if first < 0 or (first + n * x.numel()) * x.itemsize > x.untyped_storage().nbytes():
        return None
    return x.as_strided((n, *x.shape), (x.numel(), *x.stride()), first)


class Reductions:
    """A rank's reduce-scatters in flight."""

    def __init__(self) -> None:
        self._in_flight: deque[_Reduction] = deque()

    def limit_in_flight(self) -> None:
        """Wait for the oldest until another may start."""
        while self._in_flight and (self._in_flight[0].taken or len(self._in_flight) >= _MOST_IN_FLIGHT):
            self._in_flight.popleft().end()

    def started(self, finish: Finish) -> Finish:
        """Register a reduction; the function returned in place of `finish` gives its results."""
        reduction = _Reduction(finish)
        self._in_flight.append(reduction)
        return reduction.take


class _Reduction:
    """A reduction that is in flight until it is ended or its result is taken."""

    def __init__(self, finish: Finish) -> None:
        self.finish: Finish | None = finish
        self.result: list[torch.Tensor] | None = None

    @property
    def taken(self) -> bool:
        return self.finish is None and self.result is None

    def end(self) -> None:
        """Wait for completion, which frees the operands."""
        if self.finish is not None:
            self.result, self.finish = self.finish(), None

    def take(self) -> list[torch.Tensor]:
        """The results, once."""
        self.end()
        result, self.result = self.result, None
        if result is None:
            raise WorkerError("the results of an exchange were taken twice")
        return result


def reduce_parts(
    memory: DeviceMemory,
    line: Line,
    parts: Sequence[Tensor],
    splits: Sequence[Split],
    kind: str,
    reductions: Reductions,
) -> Callable[[Row], Finish]:
    """A function that starts a reduce-scatter to tensors of local types `parts`, split by `splits`."""
    packing, n = _Packing(parts), len(line.ranks)

    def start(xs: Row) -> Finish:
        reductions.limit_in_flight()
        rows = [memory.to_backend(split_front(xs[k], *splits[k], memory.allocate)) for k in packing.apart]
        if packing.together:
            flat = [split_front(xs[k], *splits[k], memory.allocate).reshape(n, -1) for k in packing.together]
            rows.append(memory.to_backend(torch.cat(flat, 1)))
        works: list[Any] = []
        totals: list[Callable[[], torch.Tensor]] = []
        for row in rows:
            posted, total = line.transport.reduce_scatter(row, line, kind, memory)
            works += posted
            totals.append(total)

        def finish() -> list[torch.Tensor]:
            wait_all(works)
            results = [total() for total in totals]
            totals.clear()
            rows.clear()
            done = dict(zip(packing.apart, results, strict=False))
            done |= {k: results[-1][a:b].view(parts[k].shape) for k, a, b in packing.slices()}
            return [done[k] for k in range(len(parts))]

        return reductions.started(finish)

    return start
