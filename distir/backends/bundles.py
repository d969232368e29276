"""Collectives on bundles: one for all members, which lie one after the other in one buffer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distir.backends.comm import Network, digit
from distir.backends.layout import merge_front, split_front
from distir.ir.errors import ModelError
from distir.ir.type import REPLICATE, Placement, Shard, Tensor, Tuple

Tensors = Sequence[torch.Tensor]
Start = Callable[[Tensors], Callable[[], tuple[torch.Tensor, ...]]]
"""Starts it on the members; what it returns waits, and gives the members of the result."""


def bundle_starter(network: Network, name: str, before: Tuple, after: Tuple, axis: str) -> Start:
    """What starts the collective `name` along `axis` on a bundle of type `before`."""
    kinds = {"MPIAllreduce": _allreduce, "MPIAllgather": _allgather, "MPIReduceScatter": _reduce_scatter}
    if name not in kinds:
        raise ModelError(f"{name} does not take bundles")
    return kinds[name](network, _tensors(before), _tensors(after), axis)


def _allreduce(network: Network, before: list[Tensor], after: list[Tensor], axis: str) -> Start:
    cuts = _cuts(before)
    reduce = network.allreduce(_flat(before[0], (cuts[-1],), axis, before[0].on(axis)), axis, own=True)

    def start(xs: Tensors) -> Any:
        finish = reduce(torch.cat([x.reshape(-1) for x in xs]))

        def members() -> tuple[torch.Tensor, ...]:
            row = finish()
            return tuple([row[a:b].view(t.shape) for t, (a, b) in zip(after, itertools.pairwise(cuts), strict=True)])

        return members

    return start


def _allgather(network: Network, before: list[Tensor], after: list[Tensor], axis: str) -> Start:
    """Every device's buffer is a row of what is gathered."""
    cuts, digits = _cuts(before), [digit(t, axis) for t in before]
    gather = network.allgather(_flat(before[0], (1, cuts[-1]), axis, Shard(0)), axis)

    def start(xs: Tensors) -> Any:
        finish = gather(torch.cat([x.reshape(-1) for x in xs]).unsqueeze(0))

        def members() -> tuple[torch.Tensor, ...]:
            rows = finish()
            return tuple(
                [
                    merge_front(rows[:, a:b].reshape(n, *t.shape), dim, outer)
                    for t, (dim, outer, n), (a, b) in zip(before, digits, itertools.pairwise(cuts), strict=True)
                ]
            )

        return members

    return start


def _reduce_scatter(network: Network, before: list[Tensor], after: list[Tensor], axis: str) -> Start:
    """The buffer has a row for every device, with its parts of all members."""
    cuts, digits = _cuts(after), [digit(t, axis) for t in after]
    n = digits[0][2]
    row = _flat(before[0], (1, cuts[-1]), axis, Shard(0))
    scatter = network.reduce_scatter(_flat(before[0], (n, cuts[-1]), axis, before[0].on(axis)), row, axis)

    def start(xs: Tensors) -> Any:
        parts = [split_front(x, dim, outer, n).view(n, -1) for x, (dim, outer, _) in zip(xs, digits, strict=True)]
        finish = scatter(torch.cat(parts, 1))

        def members() -> tuple[torch.Tensor, ...]:
            mine = finish().view(-1)
            return tuple([mine[a:b].view(t.shape) for t, (a, b) in zip(after, itertools.pairwise(cuts), strict=True)])

        return members

    return start


def _tensors(t: Tuple) -> list[Tensor]:
    found = [x for x in t.types if isinstance(x, Tensor)]
    if len(found) < len(t.types) or not found:
        raise ModelError(f"expected a bundle of tensors, got {t}")
    return found


def _cuts(types: Sequence[Tensor]) -> list[int]:
    """Where each member begins in the buffer, and where the last ends."""
    return [0, *itertools.accumulate(math.prod(t.shape) for t in types)]


def _flat(like: Tensor, shape: Sequence[int], axis: str, placement: Placement) -> Tensor:
    """The type of a buffer: of this local shape, placed along one axis of the mesh of `like`."""
    placements = [placement if x == axis else REPLICATE for x in like.mesh.axes]
    return Tensor(like.dtype, shape, like.mesh, placements)
