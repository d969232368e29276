"""Gathers, and reductions to parts, as messages between each two ranks of a line, for several tensors at once.

gloo's own pass everything round all ranks, which costs up to three times as much. A large part goes from where it lies
to where it belongs; small ones go together, in a copy.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distir.backends.layout import merge_front, split_front
from distir.backends.memory import Memory
from distir.backends.transfers import Line, wait_all
from distir.ir.type import Tensor

Row = Sequence[torch.Tensor]
Digit = tuple[int, int, int]
"""(dim, outer, n) of a split, as it stands in what one device holds."""
Finish = Callable[[], list[torch.Tensor]]
"""Waits, and gives the results; to be called once."""

_APART_BYTES = 1 << 18
"""Parts this large go by themselves: a message costs as much as copying so much."""
_NUMBER = 1 << 30
"""The number of messages between ranks that meet: no other has it."""
_UNDER_WAY = 1
"""So many reductions may be under way when another starts; of more the oldest is waited for, so that its operands are
free. That cannot block for ever: what `check_order` proves holds even if each is waited for at once."""


class _Packing:
    """Which of several parts go by themselves, and where the others begin in what goes together."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        alone = len(parts) == 1
        self.parts = parts
        self.apart = [k for k, t in enumerate(parts) if alone or t.bytes >= _APART_BYTES]
        self.together = [k for k, t in enumerate(parts) if k not in self.apart]
        self.cuts = [0, *itertools.accumulate(math.prod(parts[k].shape) for k in self.together)]

    def slices(self) -> list[tuple[int, int, int]]:
        """Of what goes together: which part it is, its begin and its end."""
        return [(k, a, b) for k, (a, b) in zip(self.together, itertools.pairwise(self.cuts), strict=True)]


def swap(out: Row, rows: Row, line: Line) -> list[Any]:
    """Send `rows[k]`, contiguous, to the rank at k of a line, and receive `out[k]` from it, but for its own; gives what
    to wait for.
    """
    if line.nearby is not None:
        return [line.started(line.nearby.swap(out, rows, line.ranks))]
    others = [(k, r) for k, r in enumerate(line.ranks) if k != line.index]
    works: list[Any] = [dist.irecv(out[k], r, line.group, _NUMBER) for k, r in others]
    works += [dist.isend(rows[k], r, line.group, _NUMBER) for k, r in others]
    return works


def exchange(out: torch.Tensor, rows: Row, line: Line) -> list[Any]:
    """`swap`, its own row copied."""
    works = swap(out.unbind(), rows, line)
    out[line.index].copy_(rows[line.index])
    return works


def gather(
    memory: Memory, line: Line, parts: Sequence[Tensor], digits: Sequence[Digit], within: Sequence[bool]
) -> Callable[[Row], Finish]:
    """What starts an all-gather: of local types `parts`, split by `digits`. Those of which `within` is true may lie in
    a whole that nobody else needs, and are then gathered there.
    """
    packing, n = _Packing(parts), len(line.ranks)

    def start(xs: Row) -> Finish:
        outs: list[torch.Tensor] = []
        works: list[Any] = []
        for k in packing.apart:
            out = _whole(xs[k], n, line.index) if within[k] and digits[k][:2] == (0, 1) else None
            x = memory.lent(xs[k])
            if out is None or x is not xs[k]:
                out = memory.empty((n, *x.shape), x.dtype)
                works += exchange(out, [x] * n, line)
            else:
                works += swap(out.unbind(), [x] * n, line)
            outs.append(out)
        if packing.together:
            x = memory.lent(torch.cat([xs[k].reshape(-1) for k in packing.together]))
            outs.append(memory.empty((n, *x.shape), x.dtype))
            works += exchange(outs[-1], [x] * n, line)

        def finish() -> list[torch.Tensor]:
            wait_all(works)
            wholes: dict[int, torch.Tensor] = {}
            if packing.together:
                rows = memory.back(outs.pop())
                for k, a, b in packing.slices():
                    wholes[k] = merge_front(rows[:, a:b].reshape(n, *parts[k].shape), *digits[k][:2], memory.room)
            for k, out in zip(packing.apart, outs, strict=True):
                wholes[k] = merge_front(memory.back(out), *digits[k][:2], memory.room)
            outs.clear()
            return [wholes[k] for k in range(len(parts))]

        return finish

    return start


def _whole(x: torch.Tensor, n: int, index: int) -> torch.Tensor | None:
    """(n, ...): the memory of which `x` is the part at `index` of n, None if that is not of one piece."""
    first = x.storage_offset() - index * x.numel()
    rows = x.numel() // max(1, x.shape[0]) if x.shape else 0
    if not rows or not x.is_contiguous() or x.stride(0) != rows:
        return None
    if first < 0 or (first + n * x.numel()) * x.itemsize > x.untyped_storage().nbytes():
        return None
    return x.as_strided((n, *x.shape), (x.numel(), *x.stride()), first)


class Reductions:
    """The reductions to parts that a rank has under way."""

    def __init__(self) -> None:
        self._under_way: deque[_Reduction] = deque()

    def make_room(self) -> None:
        """End those that are too many for another to start."""
        while self._under_way and (self._under_way[0].taken or len(self._under_way) >= _UNDER_WAY):
            self._under_way.popleft().end()

    def started(self, finish: Finish) -> Finish:
        """The same, which may be finished before it is asked for."""
        reduction = _Reduction(finish)
        self._under_way.append(reduction)
        return reduction.take


class _Reduction:
    """One that is under way until it is ended or taken."""

    def __init__(self, finish: Finish) -> None:
        self.finish: Finish | None = finish
        self.result: list[torch.Tensor] | None = None

    @property
    def taken(self) -> bool:
        return self.finish is None and self.result is None

    def end(self) -> None:
        """Wait; its operands are then free."""
        if self.finish is not None:
            self.result, self.finish = self.finish(), None

    def take(self) -> list[torch.Tensor]:
        """The results, once."""
        self.end()
        result, self.result = self.result, None
        assert result is not None
        return result


def reduce_parts(
    memory: Memory, line: Line, parts: Sequence[Tensor], digits: Sequence[Digit], kind: str, reductions: Reductions
) -> Callable[[Row], Finish]:
    """What starts a reduction of tensors to their parts, of local types `parts`, split by `digits`."""
    packing, n = _Packing(parts), len(line.ranks)

    def start(xs: Row) -> Finish:
        reductions.make_room()
        rows = [memory.lent(split_front(xs[k], *digits[k], memory.room)) for k in packing.apart]
        if packing.together:
            flat = [split_front(xs[k], *digits[k], memory.room).reshape(n, -1) for k in packing.together]
            rows.append(memory.lent(torch.cat(flat, 1)))
        works: list[Any] = []
        totals = [_reduce(memory, line, row, kind, works) for row in rows]

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


def _reduce(memory: Memory, line: Line, row: torch.Tensor, kind: str, works: list[Any]) -> Callable[[], torch.Tensor]:
    """Start to reduce the row of this rank's parts; `works` get what to wait for. Then the result can be had, once."""
    n, shape = len(line.ranks), row.shape[1:]
    if line.nearby is not None:
        out = memory.empty(shape, row.dtype)
        works.append(line.started(line.nearby.reduce_scatter(out, row.unbind(), line.ranks, kind)))
        return lambda: out.div_(n) if kind == "mean" else out
    # each by itself: the total is left in one of them, and must not keep the others
    got = [row[k] if k == line.index else memory.empty(shape, row.dtype) for k in range(n)]
    works += swap(got, row.unbind(), line)
    return lambda: _total([memory.back(x) for x in got], line.index, kind)


def _total(row: Sequence[torch.Tensor], mine: int, kind: str) -> torch.Tensor:
    """The sum, maximum or mean of tensors, in order; all may be written to but the one at `mine`."""
    total = row[0]
    for k, x in enumerate(row[1:], 1):
        into = x if k == 1 and mine == 0 else total
        total = torch.maximum(total, x, out=into) if kind == "max" else torch.add(total, x, out=into)
    return total.div_(len(row)) if kind == "mean" else total
