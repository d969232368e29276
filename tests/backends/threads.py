"""Ranks as threads of this process, and a torch.distributed for them that is as late as it may be.

What is sent or reduced is read when the first waits for it, and written when each does: a program that touches what is
under way computes something else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_me = threading.local()
SECONDS = 60.0
"""How long a rank waits for another before it is a deadlock."""


class _Meeting:
    """What the ranks of a group bring to one collective."""

    def __init__(self) -> None:
        self.brought: dict[int, torch.Tensor] = {}
        self.results: list[torch.Tensor] | None = None


class _Work:
    """`wait` waits until `ready`, and finishes, once."""

    def __init__(self, world: World, ready: Callable[[], bool], finish: Callable[[], None]) -> None:
        self.world, self.ready, self.finish = world, ready, finish
        self.done = False

    def wait(self) -> None:
        with self.world.changed:
            if not self.world.changed.wait_for(lambda: self.world.failed or self.ready(), SECONDS):
                raise TimeoutError("a rank waits for ever")
            if not self.done and not self.world.failed:
                self.finish()
            self.done = True
            self.world.changed.notify_all()


class World:
    """The process group of `size` ranks."""

    def __init__(self, size: int) -> None:
        self.everyone = tuple(range(size))
        self.changed = threading.Condition()
        self.failed = False
        self.meetings: dict[Any, _Meeting] = {}
        self.counts: dict[Any, int] = {}
        self.mail: dict[tuple[int, int, int], list[dict[str, torch.Tensor]]] = {}

    def new_group(self, ranks: Sequence[int], **_: Any) -> tuple[int, ...]:
        return tuple(ranks)

    def _meet(
        self, group: Any, x: torch.Tensor, out: torch.Tensor, results: Callable[[list[torch.Tensor]], Any]
    ) -> _Work:
        """A collective: `results` makes what each rank gets of what all bring, in order."""
        ranks = self.everyone if group is None else group
        with self.changed:
            k = self.counts[_me.rank, ranks] = self.counts.get((_me.rank, ranks), 0) + 1
            meeting = self.meetings.setdefault((ranks, k), _Meeting())
            meeting.brought[_me.rank] = x
            self.changed.notify_all()
        place = ranks.index(_me.rank)

        def finish() -> None:
            if meeting.results is None:
                meeting.results = results([meeting.brought[r].clone() for r in ranks])
            out.view(-1).copy_(meeting.results[place].view(-1))  # type: ignore[index]

        return _Work(self, lambda: len(meeting.brought) == len(ranks), finish)

    def all_reduce(self, x: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _Work:
        def results(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [_reduced(xs, op)] * len(xs)

        return self._meet(group, x, x, results)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> _Work:
        return self._meet(group, x, out, lambda xs: [torch.cat([y.view(-1) for y in xs])] * len(xs))

    def reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> _Work:
        return self._meet(group, x, out, lambda xs: list(_reduced(xs, op).view(-1).chunk(len(xs))))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> _Work:
        def results(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            parts = [y.view(-1).chunk(len(xs)) for y in xs]
            return [torch.cat([row[k] for row in parts]) for k in range(len(xs))]

        return self._meet(group, x, out, results)

    def isend(self, x: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> _Work:
        return self._post((_me.rank, dst, tag), "sent", x)

    def irecv(self, out: torch.Tensor, src: int, group: Any = None, tag: int = 0) -> _Work:
        return self._post((src, _me.rank, tag), "received", out)

    def _post(self, way: tuple[int, int, int], side: str, x: torch.Tensor) -> _Work:
        """One side of a message; the n-th that is sent is the n-th that is received. Who waits first delivers it, once
        both sides are posted: gloo needs neither to wait for that."""
        with self.changed:
            row = self.mail.setdefault(way, [])
            letter = next((found for found in row if side not in found), None)
            if letter is None:
                letter = {}
                row.append(letter)
            letter[side] = x
            self.changed.notify_all()

        def finish() -> None:
            if "delivered" not in letter:
                letter["received"].view(-1).copy_(letter["sent"].view(-1))
                letter["delivered"] = x

        return _Work(self, lambda: len(letter) > 1, finish)

    def install(self, monkeypatch: Any) -> None:
        """Put it in torch.distributed's place."""
        from distir.backends.transport import nccl

        for name in ("new_group", "all_reduce", "isend", "irecv"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "all_to_all_single", self.all_to_all)
        monkeypatch.setattr(nccl, "all_gather", self.all_gather)
        monkeypatch.setattr(nccl, "reduce_scatter", self.reduce_scatter)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` gives on each rank, each in a thread. Raises the first error there is."""
        results: list[Any] = [None] * len(self.everyone)
        errors: list[BaseException] = []

        def start(rank: int) -> None:
            _me.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as e:
                with self.changed:
                    errors.append(e)
                    self.failed = True
                    self.changed.notify_all()

        threads = [threading.Thread(target=start, args=(r,), daemon=True) for r in self.everyone]
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # threads share it: what each sets and resets must not change it
        try:
            for t in threads:
                t.start()
            for t in threads:
                t.join(2 * SECONDS)
        finally:
            torch.set_default_dtype(before)
        if errors:
            raise errors[0]
        assert not any(t.is_alive() for t in threads)
        return results


def _reduced(xs: list[torch.Tensor], op: Any) -> torch.Tensor:
    stacked = torch.stack(xs)
    return stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0).to(xs[0].dtype)
