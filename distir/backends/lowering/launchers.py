"""Launch functions of collectives, one per op; their types and meaning are defined in `distir.ops`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distir.backends.transport.interface import Line, wait_all
from distir.backends.transport.torch_distributed import Network, cuts_of
from distir.ir.device import AxisNames
from distir.ir.errors import ModelError
from distir.ir.spec import Attrs
from distir.ir.type import REPLICATE, Placement, Tensor

Tensors = Sequence[torch.Tensor]
Start = Callable[[Tensors], Callable[[], Tensors]]
"""Starts a collective on the members of a bundle, or on one tensor; returns a function that waits and returns the
results."""


class Launch(NamedTuple):
    """Arguments of a launcher: `before` and `after` are the types of the members, or of the one tensor."""

    network: Network
    attributes: Attrs
    before: Sequence[Tensor]
    after: Sequence[Tensor]
    within: Sequence[bool]
    """For each member, whether it may be gathered in place (see `gather` in `exchange`), or reduced in place."""

    @property
    def axis(self) -> AxisNames:
        return self.attributes["axis"]


def _allreduce(x: Launch) -> Start:
    network, before, after, axis = x.network, x.before, x.after, x.axis
    if len(before) == 1:
        return _single(network.allreduce(before[0], axis, own=any(x.within)))
    cuts = cuts_of(before)
    reduce = network.allreduce(_flat(before[0], (cuts[-1],), axis, before[0].on(axis)), axis, own=True)

    def start(xs: Tensors) -> Callable[[], Tensors]:
        finish = reduce(torch.cat([x.reshape(-1) for x in xs]))

        def members() -> Tensors:
            row = finish()
            return [row[a:b].view(t.shape) for t, (a, b) in zip(after, itertools.pairwise(cuts), strict=True)]

        return members

    return start


def _flat(like: Tensor, shape: Sequence[int], axis: AxisNames, placement: Placement) -> Tensor:
    """The type of a buffer of this local shape, a sum along one axis, or several, of the mesh of `like`."""
    at = like.mesh.positions(axis)
    placements = [placement if i in at else REPLICATE for i in range(len(like.mesh.axes))]
    return Tensor(like.dtype, shape, like.mesh, placements)


def _single(start: Callable[[torch.Tensor], Callable[[], torch.Tensor]]) -> Start:
    """Adapt a collective on one tensor to the interface for several."""

    def started(xs: Tensors) -> Callable[[], Tensors]:
        finish = start(xs[0])
        return lambda: [finish()]

    return started


def permuted_ranks(x: Launch, line: Line) -> tuple[int, int]:
    """The rank of the line that a permutation sends to, and the one that it receives from."""
    n, shift = len(line.ranks), x.attributes.get("shift", 1)
    return line.ranks[(line.index + shift) % n], line.ranks[(line.index - shift) % n]


def _permute(x: Launch) -> Start:
    """Send to one rank of the line and receive from another."""
    memory, line = x.network.memory, x.network.line(x.before[0], x.axis)
    to, source = permuted_ranks(x, line)

    def start(own: torch.Tensor) -> Callable[[], torch.Tensor]:
        own = memory.to_backend(own)
        out = memory.empty(own.shape, own.dtype)
        works = line.transport.exchange([(to, own)], [(source, out)], line)

        def finish() -> torch.Tensor:
            wait_all(works)
            return memory.from_backend(out)

        return finish

    return _single(start)


class Side(NamedTuple):
    """One side of a halo: the neighbour's index in the line; what it takes, (start, length) in the own slice, and what
    it gives, in the result.
    """

    neighbour: int
    taken: tuple[int, int]
    given: tuple[int, int]


def halo_sides(x: Launch, line: Line) -> tuple[int, tuple[int, int, float], list[Side]]:
    """The dim of a halo, its (lo, hi, fill), and its sides, of which one at an end of the line has no neighbour."""
    p = x.after[0].local(x.axis)
    if p.dim is None or p.halo is None:
        raise ModelError(f"expected a halo along {x.axis!r}, got {x.after[0]}")
    (lo, hi, _), size = p.halo, x.before[0].shape[p.dim]
    below = Side(line.index - 1, (0, hi), (0, lo))
    return p.dim, p.halo, [below, Side(line.index + 1, (size - lo, lo), (lo + size, hi))]


def _halo(x: Launch) -> Start:
    """Send the ends of the own slice to the neighbours, and receive theirs; at the ends of the line, fill."""
    memory, line, before, after = x.network.memory, x.network.line(x.before[0], x.axis), x.before[0], x.after[0]
    dim, (lo, _, fill), sides = halo_sides(x, line)
    size = before.shape[dim]

    def start(own: torch.Tensor) -> Callable[[], torch.Tensor]:
        y = torch.empty(after.shape, dtype=own.dtype, device=own.device)
        y.narrow(dim, lo, size).copy_(own)
        sent: list[tuple[int, torch.Tensor]] = []
        received: list[tuple[int, torch.Tensor]] = []
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for neighbour, taken, given in sides:
            part = y.narrow(dim, *given)
            if not 0 <= neighbour < len(line.ranks):
                part.fill_(fill)
                continue
            rank = line.ranks[neighbour]
            if taken[1]:
                sent.append((rank, memory.to_backend(own.narrow(dim, *taken).contiguous())))
            if given[1]:
                received.append((rank, memory.empty(part.shape, part.dtype)))
                parts.append((part, received[-1][1]))
        works = line.transport.exchange(sent, received, line)

        def finish() -> torch.Tensor:
            wait_all(works)
            for part, arrived in parts:
                part.copy_(memory.from_backend(arrived))
            sent.clear()
            return y

        return finish

    return _single(start)


LAUNCHERS: dict[str, Callable[[Launch], Start]] = {
    "MPIAllreduce": _allreduce,
    "MPIAllgather": lambda x: x.network.allgather(x.before, x.axis, x.within),
    "MPIReduceScatter": lambda x: x.network.reduce_scatter(x.before, x.after, x.axis),
    "MPIAlltoall": lambda x: _single(x.network.alltoall(x.before[0], x.after[0], x.axis)),
    "MPIPermute": _permute,
    "HaloExchange": _halo,
}


def by_member(start: Callable[..., Callable[[], Tensors]], members: int) -> Callable[..., Any]:
    """Adapt `start`, which returns a function that waits for all members: the result returns a function per member,
    which waits and returns that member.
    """

    def each(*operands: Any) -> tuple[Callable[[], torch.Tensor], ...]:
        pending = [start(*operands)]
        results: list[Any] = []

        def member(k: int) -> torch.Tensor:
            if pending:
                results.extend(pending.pop()())
            x, results[k] = results[k], None  # release a member as soon as it is taken
            return x

        return tuple([functools.partial(member, k) for k in range(members)])

    return each
