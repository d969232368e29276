"""The communication ops on torch tensors, over torch.distributed or MPI.

Every operation is asynchronous and returns a `Pending`: calling it waits and returns the result.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distir.backends.tensors.layout import WIDER, merge_front, split_front
from distir.backends.tensors.staging import DeviceMemory, control_device, memory_for
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.backends.transport.exchange import Finish, Reductions, Row, gather, reduce_parts
from distir.backends.transport.gloo import Gloo
from distir.backends.transport.interface import Group, Line, Transport, choose, wait, wait_all
from distir.backends.transport.mpi import Mpi, connect_mpi
from distir.backends.transport.nccl import Nccl, all_gather
from distir.backends.transport.shared_memory.peer_memory import PeerMemory
from distir.backends.transport.shared_memory.shared import SharedMemory
from distir.backends.transport.transfers import Pending, Transfers, directions
from distir.ir.device import AxisNames, Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.function import Function
from distir.ir.type import Partial, Tensor
from distir.transforms.rank.project import coordinate


class Network:
    """A rank's process groups and its transfers in flight.

    `program` is the rank's own; `devices` are the devices of the plan in the order of ranks. The rank makes the groups
    that it is a member of, in the order in which its program first uses them. Without `connect` nothing can be sent.
    `memory`: the memory that the backend reads and writes; `numbered`: whether it matches messages by number, as gloo
    does (see `transfers`); both default to what the backend of the process group needs.
    """

    def __init__(
        self,
        program: Function,
        devices: Sequence[Device],
        rank: int,
        device: torch.device,
        connect: bool = True,
        memory: DeviceMemory | None = None,
        numbered: bool | None = None,
    ) -> None:
        self.rank = rank
        self.memory = memory or memory_for(device)
        self.watch: Callable[[Any], None] | None = None
        """Called with the work of every collective when it starts."""
        self.here = devices[rank] if devices else None
        self.number = {d: k for k, d in enumerate(devices)}
        self._groups: dict[tuple[int, ...], Group] = {tuple(range(len(devices))): None}
        for members in groups_of(program, self.here, self.number):
            if members not in self._groups:
                self._groups[members] = _new_group(members) if connect else None
        if numbered is None:
            numbered = not (connect and dist.is_initialized()) or dist.get_backend() == "gloo"
        mpi = _mpi if connect else None
        self.beside = mpi and mpi.beside  # communication that moves only while it is called for
        if mpi is not None:
            general: Transport = mpi
        elif numbered:
            general = Gloo()
        else:
            general = Nccl(rank, {way: _new_channel(way) for way in directions(program, self.here, self.number)})
        # memory pinned by a GPU driver cannot be read by other processes
        reached = peer_memory() if connect and numbered and device.type == "cpu" else None
        near = None if reached is None else SharedMemory(reached)
        self.transport: Callable[[Sequence[int]], Transport] = partial(choose, near, general)
        self.transfers = Transfers(rank, self.memory, self.transport)
        self._reductions = Reductions()

    def coordinate(self, mesh: Mesh) -> tuple[int, ...]:
        """This rank's coordinate in a mesh, 0 along the time axis. Raises ModelError if it is not in the mesh."""
        if self.here is None:
            raise ModelError(f"a program without devices has no coordinate in {mesh}")
        return coordinate(mesh, self.here)

    def line(self, t: Tensor, axis: AxisNames) -> Line:
        """The ranks along a mesh axis, including this one, in the order of the pieces of `t` that they hold."""
        mesh, p = t.mesh, t.on(axis)
        place = mesh.devices.index(self.here) if self.here is not None else 0
        ranks = [self.number[d] for d in mesh.group(axis, place)]
        if p.shift:
            ranks = ranks[p.shift :] + ranks[: p.shift]
        members = sorted(ranks)
        places = None if ranks == members else [members.index(r) for r in ranks]
        group = self._groups[tuple(members)]
        return Line(group, ranks, ranks.index(self.rank), places, self.transport(ranks), self.watch)

    # --- collectives along a mesh axis: each returns a function of this rank's tensors that starts the collective

    def allreduce(self, before: Tensor, axis: AxisNames, own: bool = False) -> Callable[[torch.Tensor], Pending]:
        """Partial to Replicate; with `own` the operand may be overwritten: it is reduced in place if that is quick."""
        memory, line = self.memory, self.line(before, axis)
        kind, n = _partial(before, axis).kind, before.mesh.size(axis)
        narrow = torch_dtype(before.dtype)
        wider = WIDER.get(narrow)
        mpi = line.transport if isinstance(line.transport, Mpi) and not wider else None

        def start(x: torch.Tensor) -> Pending:
            if mpi is not None and (not own or mpi.slow_in_place(x)):
                y = memory.empty(x.shape, narrow)
                work = mpi.all_reduce_into(y, memory.to_backend(x), line, kind)
            else:
                y = memory.to_backend(x.to(wider or narrow)) if own or wider else memory.copy(x)
                work = line.transport.all_reduce(y, line, kind)

            def finish() -> torch.Tensor:
                wait(work)
                return memory.from_backend(_reduced(y, kind, n).to(narrow))

            return finish

        return start

    def allgather(self, parts: Sequence[Tensor], axis: AxisNames, within: Sequence[bool]) -> Callable[[Row], Finish]:
        """Shard to Replicate, of several tensors. Where `within` is true a part may be gathered in place (see `gather`
        in `exchange`).
        """
        memory, line = self.memory, self.line(parts[0], axis)
        splits = [split_along(t, axis) for t in parts]
        if not line.transport.grouped:
            return gather(memory, line, parts, splits, within)
        n, cuts = splits[0][2], cuts_of(parts)

        def start(xs: Row) -> Finish:
            x = memory.to_backend(xs[0].view(-1) if len(xs) == 1 and xs[0].is_contiguous() else _flat(xs))
            out = memory.empty((n, *x.shape), x.dtype)
            works = line.transport.all_gather(out, x, line)

            def finish() -> list[torch.Tensor]:
                wait_all(works)
                rows = _at(memory.from_backend(out), line.places)
                return [
                    merge_front(rows[:, a:b].reshape(n, *t.shape), dim, outer, memory.allocate)
                    for t, (dim, outer, n), (a, b) in zip(parts, splits, pairwise(cuts), strict=True)
                ]

            return finish

        return start

    def reduce_scatter(
        self, before: Sequence[Tensor], after: Sequence[Tensor], axis: AxisNames
    ) -> Callable[[Row], Finish]:
        """Partial to Shard, of several tensors."""
        memory, line = self.memory, self.line(after[0], axis)
        kind, splits = _partial(before[0], axis).kind, [split_along(t, axis) for t in after]
        if not line.transport.grouped:
            return reduce_parts(memory, line, after, splits, kind, self._reductions)
        n, cuts, narrow = splits[0][2], cuts_of(after), torch_dtype(before[0].dtype)
        wider = WIDER.get(narrow)

        def start(xs: Row) -> Finish:
            self._reductions.limit_in_flight()
            rows = [split_front(x, *d, memory.allocate).reshape(n, -1) for x, d in zip(xs, splits, strict=True)]
            parts = _to(rows[0] if len(rows) == 1 else torch.cat(rows, 1), line.places)
            parts = memory.to_backend(parts if wider is None else parts.to(wider))
            works, total = line.transport.reduce_scatter(parts, line, kind, memory)

            def finish() -> list[torch.Tensor]:
                wait_all(works)
                mine = total().to(narrow)
                return [mine[a:b].view(t.shape) for t, (a, b) in zip(after, pairwise(cuts), strict=True)]

            return self._reductions.started(finish)

        return start

    def alltoall(self, before: Tensor, after: Tensor, axis: AxisNames) -> Callable[[torch.Tensor], Pending]:
        """Shard of one dim to Shard of another."""
        memory, line = self.memory, self.line(before, axis)
        dim, outer, n = split_along(before, axis)
        to_dim, to_outer, _ = split_along(after, axis)
        places = line.places if line.transport.grouped else None

        def start(x: torch.Tensor) -> Pending:
            parts = memory.to_backend(_to(split_front(x, to_dim, to_outer, n, memory.allocate), places))
            out = memory.empty(parts.shape, parts.dtype)
            works = line.transport.all_to_all(out, parts, line)

            def finish() -> torch.Tensor:
                wait_all(works)
                return merge_front(_at(memory.from_backend(out), places), dim, outer, memory.allocate)

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
    """The offset of each of several tensors in their concatenation, and its length."""
    return [0, *accumulate(math.prod(t.shape) for t in types)]


def _reduced(total: torch.Tensor, kind: str, n: int) -> torch.Tensor:
    """The result of a reduction over n ranks, in place: a mean is still to be divided."""
    return total.div_(n) if kind == "mean" else total


def _partial(t: Tensor, axis: AxisNames) -> Partial:
    p = t.on(axis)
    if p.kind is None:
        raise ModelError(f"expected Partial along {axis!r}, got {t}")
    return p


def split_along(t: Tensor, axis: AxisNames) -> tuple[int, int, int]:
    """(dim, outer, n) of the split along `axis`, in the local shape."""
    p = t.local(axis)
    if p.dim is None:
        raise ModelError(f"expected Shard along {axis!r}, got {t}")
    return p.dim, p.outer, t.mesh.size(axis)


Along = tuple[Mesh, AxisNames]


def groups_of(program: Function, here: Device | None, number: Mapping[Device, int]) -> list[tuple[int, ...]]:
    """The groups of ranks, each ascending, in which a rank's program has collectives, in the order of their first use.

    Making a group is a rendezvous of its ranks. In the order of the program these cannot deadlock,
    as `check_order` proves for the program.
    """
    found: dict[tuple[int, ...], None] = {}
    for mesh, axis in _axes_used(program, {}, set()):
        if here in mesh.devices and mesh.size(axis) > 1:
            found[tuple(sorted([number[d] for d in mesh.group(axis, mesh.devices.index(here))]))] = None
    return list(found)


def _axes_used(function: Function, found: dict[Along, None], seen: set[Function]) -> Iterable[Along]:
    """The mesh axes along which a function, or its callees, has collectives, in order."""
    if function not in seen:
        seen.add(function)
        for op in function.ops:
            if op.callee is not None:
                _axes_used(op.callee, found, seen)
            elif op.spec.route == "axis":
                mesh = op.inputs[0].type.device
                if isinstance(mesh, Mesh) and not mesh.is_time(op.attributes["axis"]):
                    found.setdefault((mesh, op.attributes["axis"]))
    return found


_timeout: timedelta | None = None
"""The timeout of the process group that was joined, for further groups too: torch would use its own default."""
_groups: dict[tuple[object, ...], Group] = {}
"""The further groups that this rank has made, by members."""
_peer_memory: PeerMemory | None = None
"""This rank's access to the memory of other ranks of its host."""
_mpi: Mpi | None = None
"""This rank's place in MPI; None on other backends."""


def _new_group(ranks: Sequence[int]) -> Group:
    """The group of these ranks, in ascending order; made on first use, by its members only."""
    if _mpi is not None:
        return _mpi.group(ranks)
    key = tuple(ranks)
    if key not in _groups:
        group = _groups[key] = _made(ranks, f"group of {ranks}")
        if len(ranks) > 1 and _needs_rendezvous():
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return _groups[key]


def _new_channel(ranks: Sequence[int]) -> Group:
    """A group in which the first of two ranks sends to the second; both must call this."""
    key = ("channel", *ranks)
    if key not in _groups:
        group = _groups[key] = _made(ranks, f"channel {ranks}")
        if _needs_rendezvous():
            sends = dist.get_rank() == ranks[0]
            op = dist.P2POp(dist.isend if sends else dist.irecv, torch.zeros(1, device="cuda"), ranks[sends], group)
            wait_all(dist.batch_isend_irecv([op]))
    return _groups[key]


def _made(ranks: Sequence[int], what: str) -> Group:
    """A new process group that only its members make.

    Its ranks find each other by its name. torch names a group by a count of the groups made so far, which agrees
    between ranks only if all ranks make all groups; with `use_local_synchronization` the count is of the rank's own
    groups. So the count is set to a hash of the members.
    """
    number, names = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big"), distributed_c10d._world
    before, names.group_count = names.group_count, number
    try:
        group: Group = dist.new_group(list(ranks), timeout=_timeout)
    finally:
        names.group_count = before
    if getattr(group, "group_name", str(number)) != str(number):
        raise ModelError(f"torch {torch.__version__} does not name process groups as distir expects")
    return group


def _needs_rendezvous() -> bool:
    """Whether the ranks of a new group have to synchronise when it is made.

    NCCL connects ranks at the first use of a group, or the first message between two, and blocks until all have
    called. So groups are connected when they are made, in an order that all ranks share: otherwise a receive posted
    ahead would block a rank before work that the sender depends on.
    """
    return dist.is_initialized() and dist.get_backend() == "nccl"


def start_group(backend: str, rank: int, world: int, device: torch.device, store: Any, timeout: float) -> None:
    """Join the process group of all ranks, through `store`, or, if None, the environment set by torchrun.

    With "mpi" it is joined through MPI, and is one of gloo, for control messages and checkpoints."""
    global _timeout, _peer_memory, _mpi
    if backend == "mpi":
        _mpi = connect_mpi(world, timeout)
        store = _mpi.store()
    extra: dict[str, Any] = {"store": store, "rank": rank, "world_size": world} if store is not None else {}
    if device.type == "cuda":
        torch.cuda.set_device(device)  # not bound to the group: torch would split communicators
    _timeout = timedelta(seconds=timeout)
    os.environ.pop("TORCH_DIST_INIT_BARRIER", None)  # with which torch waits for all ranks at every new group
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo" if backend == "mpi" else backend, timeout=_timeout, **extra)
    if backend == "gloo" and world > 1:
        _peer_memory = PeerMemory(rank, timeout, _exchanged)


def _exchanged(mine: bytes) -> list[bytes]:
    """All-gather of bytes, equally many on each rank."""
    rows = torch.empty((dist.get_world_size(), len(mine)), dtype=torch.uint8)
    all_gather(rows.view(-1), torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    return [bytes(row.tolist()) for row in rows]


def least(numbers: Sequence[int], device: torch.device) -> list[int]:
    """The least of all ranks, of each number; also a barrier, after which the device is idle."""
    if _mpi is not None:
        return _mpi.least(numbers)
    if _peer_memory is not None and _peer_memory.reaches(range(dist.get_world_size())):
        found = _peer_memory.least(numbers)  # gloo takes five times as long: it wakes more threads
    else:
        row = torch.tensor(numbers, dtype=torch.int64, device=control_device(device))
        dist.all_reduce(row, dist.ReduceOp.MIN)
        found = row.tolist()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found


def over_mpi() -> Mpi | None:
    """See `_mpi`."""
    return _mpi


def peer_memory() -> PeerMemory | None:
    """This rank's access to the memory of other ranks of its host; None on other backends or with one rank."""
    return _peer_memory


def leave_group(done: bool) -> None:
    """Leave the process group. `done` is false after an error, when other ranks may be waiting for this one: then an
    NCCL group, whose destruction would wait for them, is left to end with the process.
    """
    global _peer_memory, _mpi
    near, _peer_memory, mpi, _mpi = _peer_memory, None, _mpi, None
    _groups.clear()
    try:
        for left in (near, mpi):
            if left is not None:
                left.close(done)
    finally:
        if dist.is_initialized() and (done or dist.get_backend() == "gloo"):
            dist.destroy_process_group()
