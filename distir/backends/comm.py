"""Moving data between ranks: what the communication ops do on torch tensors, over torch.distributed.

Everything is issued at once and returns a `Pending`: call it to wait, and to have the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distir.backends.namespace import torch_dtype
from distir.backends.pieces import is_primary, join_pieces
from distir.executor.collectives import cut, local_outer
from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.function import Function
from distir.ir.type import Partial, Shard, Tensor
from distir.ops.comm import ALONG_AXIS
from distir.transforms.project import coordinate, device_at

Pending = Callable[[], torch.Tensor]
Group = Any
"""A process group; None is the group of all ranks."""

# torch 2.13 renamed these two
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_WIDER = {torch.int16: torch.int32}
"""What neither gloo nor NCCL reduces is reduced as this."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def split_front(x: torch.Tensor, dim: int, outer: int, n: int) -> torch.Tensor:
    """(n, ...): the n parts of `x`, whose `dim` reads as (outer, n, rest), one after the other in memory."""
    shape = x.shape
    y = x.reshape(*shape[:dim], outer, n, shape[dim] // (outer * n), *shape[dim + 1 :]).movedim(dim + 1, 0)
    return y.contiguous().reshape(n, *shape[:dim], shape[dim] // n, *shape[dim + 1 :])


def merge_front(x: torch.Tensor, dim: int, outer: int) -> torch.Tensor:
    """The inverse of `split_front`."""
    n, *shape = x.shape
    y = x.reshape(n, *shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]).movedim(0, dim + 1)
    return y.reshape(*shape[:dim], shape[dim] * n, *shape[dim + 1 :])


def merge(parts: Sequence[torch.Tensor], dim: int, outer: int) -> torch.Tensor:
    """The whole, of whose `dim`, read as (outer, n, rest), these are the n parts."""
    return merge_front(torch.stack(tuple(parts)), dim, outer)


def movable(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a row, in a type that every backend moves; of the same memory."""
    row = x.view(-1)
    return row.view(torch.uint8) if x.dtype in _WIDER else row


class Network:
    """One rank's end of the communication: its process groups, and the transfers it has under way.

    `devices` are the devices of the plan in the order of ranks; every rank must be given the same program,
    because all create their groups in the program's order. Without `connect` nothing can be sent.
    """

    def __init__(
        self,
        program: Function,
        devices: Sequence[Device],
        rank: int,
        device: torch.device,
        connect: bool = True,
    ) -> None:
        self.rank = rank
        self.device = device
        self.here = devices[rank] if devices else None
        self.number = {d: k for k, d in enumerate(devices)}
        self._sent: list[Any] = []
        self._groups: dict[tuple[int, ...], Group] = {tuple(range(len(devices))): None}
        for mesh, axis in _axes_used(program):
            for ranks in _groups_along(mesh, axis, self.number):
                if ranks not in self._groups and rank in ranks:
                    group = dist.new_group(list(ranks), use_local_synchronization=True) if connect else None
                    self._groups[ranks] = group

    def coordinate(self, mesh: Mesh) -> tuple[int, ...]:
        """Where this rank is in the mesh, 0 along its time axis. Raises ModelError if it is not in it."""
        if self.here is None:
            raise ModelError(f"a program on no device has no place in {mesh}")
        return coordinate(mesh, self.here)

    def _group(self, mesh: Mesh, axis: str) -> Group:
        place = mesh.devices.index(self.here) if self.here is not None else 0
        return self._groups[tuple(self.number[d] for d in mesh.group(axis, place))]

    # --- collectives along a mesh axis: each returns what the op does to this rank's tensor

    def allreduce(self, before: Tensor, axis: str) -> Callable[[torch.Tensor], Pending]:
        """Partial to Replicate."""
        group, op = self._group(before.mesh, axis), _OPS[_partial(before, axis).kind]
        wider = _WIDER.get(torch_dtype(before.dtype))
        narrow = torch_dtype(before.dtype)

        def start(x: torch.Tensor) -> Pending:
            y = x.to(wider) if wider else x.clone(memory_format=torch.contiguous_format)
            work = dist.all_reduce(y, op, group, async_op=True)
            return lambda: (_wait(work), y.to(narrow))[1]

        return start

    def allgather(self, before: Tensor, axis: str) -> Callable[[torch.Tensor], Pending]:
        """Shard to Replicate."""
        group, (dim, outer, n) = self._group(before.mesh, axis), _digit(before, axis)

        def start(x: torch.Tensor) -> Pending:
            x = x.contiguous()
            out = torch.empty((n, *x.shape), dtype=x.dtype, device=x.device)
            work = all_gather(movable(out), movable(x), group=group, async_op=True)
            return lambda: (_wait(work), merge_front(out, dim, outer))[1]

        return start

    def reduce_scatter(self, before: Tensor, after: Tensor, axis: str) -> Callable[[torch.Tensor], Pending]:
        """Partial to Shard."""
        group, op = self._group(before.mesh, axis), _OPS[_partial(before, axis).kind]
        dim, outer, n = _digit(after, axis)
        wider = _WIDER.get(torch_dtype(before.dtype))
        narrow = torch_dtype(before.dtype)
        mine = self.coordinate(before.mesh)[before.mesh.position(axis)]

        def start(x: torch.Tensor) -> Pending:
            parts = split_front(x, dim, outer, n)
            parts = parts.to(wider) if wider else parts
            out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=x.device)
            try:
                work = reduce_scatter(out.view(-1), parts.view(-1), op, group=group, async_op=True)
            except RuntimeError as e:  # gloo has it since torch 2.8
                if "does not support" not in str(e):
                    raise
                parts = parts.clone()
                work = dist.all_reduce(parts, op, group, async_op=True)
                return lambda: (_wait(work), parts[mine].to(narrow))[1]
            return lambda: (_wait(work), out.to(narrow))[1]

        return start

    def alltoall(self, before: Tensor, after: Tensor, axis: str) -> Callable[[torch.Tensor], Pending]:
        """Shard of one dim to Shard of another."""
        group = self._group(before.mesh, axis)
        dim, outer, n = _digit(before, axis)
        to_dim, to_outer, _ = _digit(after, axis)

        def start(x: torch.Tensor) -> Pending:
            parts = split_front(x, to_dim, to_outer, n)
            out = torch.empty_like(parts)
            work = dist.all_to_all_single(movable(out), movable(parts), group=group, async_op=True)
            return lambda: (_wait(work), merge_front(out, dim, outer))[1]

        return start

    # --- transfers between devices and meshes; `message` tells those between the same two ranks apart

    def send(self, x: torch.Tensor, to: int, message: int) -> None:
        """Send to a rank; never waits. The tensor must not be changed before the next `drain`."""
        self._sent.append(dist.isend(x.contiguous(), to, tag=message))

    def receive(self, t: Tensor, source: int, message: int) -> Pending:
        """Post a receive, from a rank, of a piece of local type `t`."""
        out = torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=self.device)
        work = dist.irecv(out, source, tag=message)
        return lambda: (_wait(work), out)[1]

    def drain(self) -> None:
        """Wait until all that was sent has gone."""
        for work in self._sent:
            _wait(work)
        self._sent.clear()

    def sender(self, source: Tensor, to: Device | Mesh, whole: Tensor | None, message: int) -> Callable[..., None]:
        """What `MPISend` does: to the twin on a mesh, to a device, or, from a device, a piece to each of a
        mesh.

        `whole` is the type on the mesh, where a device sends to one.
        """
        if isinstance(to, Mesh) and isinstance(source.device, Mesh):
            twin = self.number[device_at(to, self.coordinate(source.device))]
            return lambda x: self.send(x, twin, message)
        if isinstance(to, Mesh):
            if whole is None:
                raise ModelError(f"a tensor is sent from {source.device} to {to} without placements")
            targets = [(self.number[d], c) for d, c in zip(to.devices, to.coords, strict=True) if d is not self.here]

            def scatter(x: torch.Tensor) -> None:
                for rank, coord in targets:
                    self.send(cut(x, whole, coord), rank, message)

            return scatter
        target = self.number[to]
        if isinstance(source.device, Mesh) and not is_primary(source, self.coordinate(source.device)):
            return lambda x: None  # a copy of what another rank sends
        return lambda x: self.send(x, target, message)

    def receiver(self, source: Tensor, got: Tensor, message: int) -> Callable[..., Pending]:
        """What `MPIRecv` and the receiving side of a gather do: `source` is the type where it comes from.

        Given this rank's own piece, if it has one.
        """
        if not isinstance(source.device, Mesh):
            return lambda: self.receive(got, self._rank(source.device), message)
        if isinstance(got.device, Mesh):
            twin = self.number[device_at(source.device, self.coordinate(got.device))]
            return lambda: self.receive(got, twin, message)
        mesh = source.device
        holders = [(d, c) for d, c in zip(mesh.devices, mesh.coords, strict=True) if is_primary(source, c)]
        mine = self.coordinate(mesh) if self.here in mesh.devices else None

        def gather(own: torch.Tensor | None = None) -> Pending:
            parts = {c: self.receive(source, self.number[d], message) for d, c in holders if d is not self.here}
            if own is not None and mine is not None and is_primary(source, mine):
                parts[mine] = lambda: own
            return lambda: join_pieces({c: parts[c]() for _, c in holders}, source, merge, combine)

        return gather

    def _rank(self, device: Device | Mesh | None) -> int:
        if not isinstance(device, Device):
            raise ModelError(f"expected to receive from a device, got {device}")
        return self.number[device]


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _partial(t: Tensor, axis: str) -> Partial:
    p = t.on(axis)
    if not isinstance(p, Partial):
        raise ModelError(f"expected Partial along {axis!r}, got {t}")
    return p


def _digit(t: Tensor, axis: str) -> tuple[int, int, int]:
    """(dim, outer, n) of the split along `axis`, as it stands in what one device holds."""
    a = t.mesh.position(axis)
    p = t.placements[a]
    if not isinstance(p, Shard):
        raise ModelError(f"expected Shard along {axis!r}, got {t}")
    return p.dim, local_outer(t, a), t.mesh.sizes[a]


def combine(parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    """The sum or maximum of tensors, in order."""
    total = parts[0]
    for x in parts[1:]:
        total = torch.maximum(total, x) if kind == "max" else total + x
    return total


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


def start_group(backend: str, rank: int, world: int, device: torch.device, store: Any, timeout: float) -> None:
    """Join the process group of all ranks: by `store`, or, if None, by the environment that torchrun sets."""
    from datetime import timedelta

    extra: dict[str, Any] = {"store": store, "rank": rank, "world_size": world} if store is not None else {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        extra["device_id"] = device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **extra)
