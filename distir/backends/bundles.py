"""Collectives on bundles: one for all members."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distir.backends.comm import Network, cuts_of
from distir.ir.errors import ModelError
from distir.ir.type import REPLICATE, Placement, Tensor, Tuple

Tensors = Sequence[torch.Tensor]
Start = Callable[[Tensors], Callable[[], Tensors]]
"""Starts it on the members; what it returns waits, and gives the members of the result."""


def bundle_starter(
    network: Network, name: str, before: Tuple, after: Tuple, axis: str, within: Sequence[bool] = ()
) -> Start:
    """What starts the collective `name` along `axis` on a bundle of type `before`. See `Network.allgather` on
    `within`.
    """
    starts: dict[str, Callable[[], Start]] = {
        "MPIAllreduce": lambda: _allreduce(network, _tensors(before), _tensors(after), axis),
        "MPIAllgather": lambda: network.allgather(_tensors(before), axis, within),
        "MPIReduceScatter": lambda: network.reduce_scatter(_tensors(before), _tensors(after), axis),
    }
    if name not in starts:
        raise ModelError(f"{name} does not take bundles")
    return starts[name]()


def _allreduce(network: Network, before: list[Tensor], after: list[Tensor], axis: str) -> Start:
    cuts = cuts_of(before)
    reduce = network.allreduce(_flat(before[0], (cuts[-1],), axis, before[0].on(axis)), axis, own=True)

    def start(xs: Tensors) -> Any:
        finish = reduce(torch.cat([x.reshape(-1) for x in xs]))

        def members() -> tuple[torch.Tensor, ...]:
            row = finish()
            return tuple([row[a:b].view(t.shape) for t, (a, b) in zip(after, itertools.pairwise(cuts), strict=True)])

        return members

    return start


def _tensors(t: Tuple) -> list[Tensor]:
    found = [x for x in t.types if isinstance(x, Tensor)]
    if len(found) < len(t.types) or not found:
        raise ModelError(f"expected a bundle of tensors, got {t}")
    return found


def _flat(like: Tensor, shape: Sequence[int], axis: str, placement: Placement) -> Tensor:
    """The type of a buffer: of this local shape, placed along one axis of the mesh of `like`."""
    placements = [placement if x == axis else REPLICATE for x in like.mesh.axes]
    return Tensor(like.dtype, shape, like.mesh, placements)
