"""Moving data between ranks: what the communication ops do on torch tensors, over torch.distributed.

Everything is issued at once and returns a `Pending`: call it to wait, and to have the result.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from distir.backends.exchange import Finish, Reductions, Row, exchange, gather, reduce_parts
from distir.backends.layout import WIDER, merge_front, movable, split_front
from distir.backends.memory import Memory, memory_for
from distir.backends.namespace import torch_dtype
from distir.backends.nearby import Nearby
from distir.backends.transfers import Group, Line, Pending, Transfers, directed_groups, wait, wait_all
from distir.executor.collectives import local_outer
from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.function import Function
from distir.ir.type import Partial, Shard, Tensor
from distir.ops.comm import ALONG_AXIS
from distir.transforms.project import coordinate

# torch 2.13 renamed these two
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "mean": dist.ReduceOp.SUM}
"""A mean is a sum that is then divided: gloo has none."""


class Network:
    """One rank's end of the communication: its process groups, and the transfers it has under way.

    `devices` are the devices of the plan in the order of ranks; every rank must be given the same program,
    because all create all groups, in the program's order. Without `connect` nothing can be sent. `memory` is where the
    backend takes tensors from, `numbered` whether it tells messages apart by number, as gloo does (see `transfers`);
    without them as it is for the backend of the process group.
    """

    def __init__(
        self,
        program: Function,
        devices: Sequence[Device],
        rank: int,
        device: torch.device,
        connect: bool = True,
        memory: Memory | None = None,
        numbered: bool | None = None,
    ) -> None:
        self.rank = rank
        self.memory = memory or memory_for(device)
        self.watch: Callable[[Any], None] | None = None
        """Is told of the work of every collective when it is started."""
        self.here = devices[rank] if devices else None
        self.number = {d: k for k, d in enumerate(devices)}
        self._groups: dict[tuple[int, ...], Group] = {tuple(range(len(devices))): None}
        for mesh, axis in _axes_used(program):
            for ranks in _groups_along(mesh, axis, self.number):
                members = tuple(sorted(ranks))
                if members not in self._groups:
                    self._groups[members] = _new_group(members) if connect else None
        if numbered is None:
            numbered = not (connect and dist.is_initialized()) or dist.get_backend() == "gloo"
        self.numbered = numbered
        channels = None if numbered else directed_groups(program, self.number, _new_channel)
        # what the driver of a GPU has pinned, other processes may not read
        self.nearby = nearby() if connect and numbered and device.type == "cpu" else None
        if self.nearby is not None:
            for members in self._groups:
                self.nearby.group(members)
        self.transfers = Transfers(rank, self.memory, channels, self.nearby)
        self._reductions = Reductions()

    def coordinate(self, mesh: Mesh) -> tuple[int, ...]:
        """Where this rank is in the mesh, 0 along its time axis. Raises ModelError if it is not in it."""
        if self.here is None:
            raise ModelError(f"a program on no device has no place in {mesh}")
        return coordinate(mesh, self.here)

    def _group(self, mesh: Mesh, axis: str) -> Line:
        """The ranks along an axis, this among them."""
        place = mesh.devices.index(self.here) if self.here is not None else 0
        ranks = [self.number[d] for d in mesh.group(axis, place)]
        members = sorted(ranks)
        places = None if ranks == members else [members.index(r) for r in ranks]
        all_near = self.nearby is not None and len(ranks) > 1 and self.nearby.reaches(ranks)
        group, near = self._groups[tuple(members)], self.nearby if all_near else None
        return Line(group, ranks, ranks.index(self.rank), places, near, self.watch)

    # --- collectives along a mesh axis: each returns what the op does to this rank's tensor

    def allreduce(self, before: Tensor, axis: str, own: bool = False) -> Callable[[torch.Tensor], Pending]:
        """Partial to Replicate; an operand of its `own` is reduced in place."""
        memory, line = self.memory, self._group(before.mesh, axis)
        kind, n = _partial(before, axis).kind, before.mesh.size(axis)
        narrow = torch_dtype(before.dtype)
        wider = WIDER.get(narrow)

        def start(x: torch.Tensor) -> Pending:
            y = memory.lent(x.to(wider or narrow)) if own or wider else memory.copied(x)
            if line.nearby is None:
                work = line.started(dist.all_reduce(y, _OPS[kind], line.group, async_op=True))
            else:
                work = line.started(line.nearby.allreduce(y, line.ranks, kind))

            def finish() -> torch.Tensor:
                wait(work)
                return memory.back(_reduced(y, kind, n).to(narrow))

            return finish

        return start

    def allgather(self, parts: Sequence[Tensor], axis: str, within: Sequence[bool]) -> Callable[[Row], Finish]:
        """Shard to Replicate, of several tensors. Those of which `within` is true may lie in a whole that nobody else
        needs.
        """
        memory, line = self.memory, self._group(parts[0].mesh, axis)
        digits = [digit(t, axis) for t in parts]
        if self.numbered:
            return gather(memory, line, parts, digits, within)
        n, cuts = digits[0][2], cuts_of(parts)

        def start(xs: Row) -> Finish:
            x = memory.lent(xs[0].view(-1) if len(xs) == 1 and xs[0].is_contiguous() else _flat(xs))
            out = memory.empty((n, *x.shape), x.dtype)
            work = line.started(all_gather(movable(out), movable(x), group=line.group, async_op=True))

            def finish() -> list[torch.Tensor]:
                wait(work)
                rows = _at(memory.back(out), line.places)
                return [
                    merge_front(rows[:, a:b].reshape(n, *t.shape), dim, outer, memory.room)
                    for t, (dim, outer, n), (a, b) in zip(parts, digits, pairwise(cuts), strict=True)
                ]

            return finish

        return start

    def reduce_scatter(self, before: Sequence[Tensor], after: Sequence[Tensor], axis: str) -> Callable[[Row], Finish]:
        """Partial to Shard, of several tensors."""
        memory, line = self.memory, self._group(after[0].mesh, axis)
        kind, digits = _partial(before[0], axis).kind, [digit(t, axis) for t in after]
        if self.numbered:
            return reduce_parts(memory, line, after, digits, kind, self._reductions)
        n, cuts, narrow = digits[0][2], cuts_of(after), torch_dtype(before[0].dtype)
        wider = WIDER.get(narrow)

        def start(xs: Row) -> Finish:
            self._reductions.make_room()
            rows = [split_front(x, *d, memory.room).reshape(n, -1) for x, d in zip(xs, digits, strict=True)]
            parts = _to(rows[0] if len(rows) == 1 else torch.cat(rows, 1), line.places)
            parts = memory.lent(parts if wider is None else parts.to(wider))
            out = memory.empty(parts.shape[1:], parts.dtype)
            work = line.started(reduce_scatter(out, parts.view(-1), _OPS[kind], group=line.group, async_op=True))

            def finish() -> list[torch.Tensor]:
                wait(work)
                mine = memory.back(_reduced(out, kind, n).to(narrow))
                return [mine[a:b].view(t.shape) for t, (a, b) in zip(after, pairwise(cuts), strict=True)]

            return self._reductions.started(finish)

        return start

    def alltoall(self, before: Tensor, after: Tensor, axis: str) -> Callable[[torch.Tensor], Pending]:
        """Shard of one dim to Shard of another."""
        memory, line = self.memory, self._group(before.mesh, axis)
        dim, outer, n = digit(before, axis)
        to_dim, to_outer, _ = digit(after, axis)
        exchanges = self.numbered
        places = None if exchanges else line.places

        def start(x: torch.Tensor) -> Pending:
            parts = memory.lent(_to(split_front(x, to_dim, to_outer, n, memory.room), places))
            out = memory.empty(parts.shape, parts.dtype)
            if exchanges:
                works = exchange(out, parts.unbind(), line)
            else:
                rows = movable(out), movable(parts)
                works = [line.started(dist.all_to_all_single(*rows, group=line.group, async_op=True))]

            def finish() -> torch.Tensor:
                wait_all(works)
                return merge_front(_at(memory.back(out), places), dim, outer, memory.room)

            return finish

        return start


def _at(x: torch.Tensor, places: list[int] | None) -> torch.Tensor:
    """The rows of `x` in the order of `places`."""
    return x if places is None else x[places]


def _to(x: torch.Tensor, places: list[int] | None) -> torch.Tensor:
    """The inverse of `_at`."""
    if places is None:
        return x
    out = torch.empty_like(x)
    out[places] = x
    return out


def _flat(xs: Row) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in xs])


def cuts_of(types: Sequence[Tensor]) -> list[int]:
    """Where each of several tensors begins in a row of them all, and where the last ends."""
    return [0, *accumulate(math.prod(t.shape) for t in types)]


def _reduced(total: torch.Tensor, kind: str, n: int) -> torch.Tensor:
    """What n ranks have added up, or taken the maximum of, in place as the result."""
    return total.div_(n) if kind == "mean" else total


def _partial(t: Tensor, axis: str) -> Partial:
    p = t.on(axis)
    if not isinstance(p, Partial):
        raise ModelError(f"expected Partial along {axis!r}, got {t}")
    return p


def digit(t: Tensor, axis: str) -> tuple[int, int, int]:
    """(dim, outer, n) of the split along `axis`, as it stands in what one device holds."""
    a = t.mesh.position(axis)
    p = t.placements[a]
    if not isinstance(p, Shard):
        raise ModelError(f"expected Shard along {axis!r}, got {t}")
    return p.dim, local_outer(t, a), t.mesh.sizes[a]


def _axes_used(program: Function) -> list[tuple[Mesh, str]]:
    """The mesh axes along which the program has collectives, in its order: the same on every rank."""
    found: dict[tuple[Mesh, str], None] = {}
    for function in (*program.callees(), program):
        for op in function.ops:
            if op.spec.name in ALONG_AXIS:
                mesh = op.inputs[0].type.device
                if isinstance(mesh, Mesh) and mesh.time != mesh.position(op.attributes["axis"]):
                    found.setdefault((mesh, op.attributes["axis"]))
    return list(found)


def _groups_along(mesh: Mesh, axis: str, number: Mapping[Device, int]) -> Iterator[tuple[int, ...]]:
    """The groups of ranks that differ only along `axis`."""
    for k, d in enumerate(mesh.devices):
        group = mesh.group(axis, k)
        if group[0] is d:
            yield tuple(number[x] for x in group)


_timeout: timedelta | None = None
"""That of the process group that was joined: torch gives further groups its own default."""
_nearby: Nearby | None = None
"""How this rank reaches others of its host, in that process group."""


def _new_group(ranks: Sequence[int]) -> Group:
    """A group of these ranks, in ascending order. All ranks must call this, members or not: names count the calls."""
    group: Group = dist.new_group(list(ranks), timeout=_timeout)
    if len(ranks) > 1 and _meets(ranks):
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group


def _new_channel(ranks: Sequence[int]) -> Group:
    """A group in which the first of two ranks sends to the second; all must call this."""
    group: Group = dist.new_group(list(ranks), timeout=_timeout)
    if _meets(ranks):
        sends = dist.get_rank() == ranks[0]
        op = dist.P2POp(dist.isend if sends else dist.irecv, torch.zeros(1, device="cuda"), ranks[sends], group)
        wait_all(dist.batch_isend_irecv([op]))
    return group


def _meets(ranks: Sequence[int]) -> bool:
    """Whether this rank has to meet the others of a new group.

    NCCL lets ranks meet when they first use a group, and two when they first send: each waits, and does nothing else,
    until all have come. So they meet when it is made, to which all come in the same order: a receive that is posted
    ahead would else keep a rank from what it has to do before anybody sends.
    """
    return dist.is_initialized() and dist.get_backend() == "nccl" and dist.get_rank() in ranks


def start_group(backend: str, rank: int, world: int, device: torch.device, store: Any, timeout: float) -> None:
    """Join the process group of all ranks: by `store`, or, if None, by the environment that torchrun sets."""
    global _timeout, _nearby
    extra: dict[str, Any] = {"store": store, "rank": rank, "world_size": world} if store is not None else {}
    if device.type == "cuda":
        torch.cuda.set_device(device)  # without binding the group to it: all ranks would then split at every new group
    _timeout = timedelta(seconds=timeout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(backend, timeout=_timeout, **extra)
    if backend == "gloo" and world > 1:
        _nearby = Nearby(rank, timeout, _exchanged)


def _exchanged(mine: bytes) -> list[bytes]:
    """What all ranks bring, as many bytes each, in order."""
    rows = torch.empty((dist.get_world_size(), len(mine)), dtype=torch.uint8)
    all_gather(rows.view(-1), torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    return [bytes(row.tolist()) for row in rows]


def nearby() -> Nearby | None:
    """How this rank reaches others of its host; None where nobody does."""
    return _nearby


def leave_group(done: bool) -> None:
    """Leave the process group. Not `done`: after an error, when other ranks may wait for this one. Then NCCL would wait
    for them, and nobody would hear of the error; its group ends with the process.
    """
    global _nearby
    left, _nearby = _nearby, None
    try:
        if left is not None:
            left.close(done)
    finally:
        if dist.is_initialized() and (done or dist.get_backend() == "gloo"):
            dist.destroy_process_group()
