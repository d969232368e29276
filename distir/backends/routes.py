"""Who sends what to whom: transfers between devices and meshes as sends and receives of one rank.

`message` tells those between the same two ranks apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distir.backends.comm import Network
from distir.backends.layout import combine, merge
from distir.backends.pieces import is_primary, join_pieces
from distir.backends.transfers import Pending
from distir.executor.collectives import cut
from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.type import Tensor
from distir.transforms.project import device_at


def sender(
    network: Network, source: Tensor, to: Device | Mesh, whole: Tensor | None, message: int, stays: bool = False
) -> Callable[[torch.Tensor], None]:
    """What `MPISend` does: to the twin on a mesh, to a device, or, from a device, a piece to each of a mesh.

    `whole` is the type on the mesh, where a device sends to one; `stays`: what is sent is not freed when it has gone.
    """
    send, number = network.transfers.send, network.number
    if isinstance(to, Mesh) and isinstance(source.device, Mesh):
        twin = number[device_at(to, network.coordinate(source.device))]
        return lambda x: send(x, twin, message, stays)
    if isinstance(to, Mesh):
        if whole is None:
            raise ModelError(f"a tensor is sent from {source.device} to {to} without placements")
        targets = [(number[d], c) for d, c in zip(to.devices, to.coords, strict=True) if d is not network.here]

        def scatter(x: torch.Tensor) -> None:
            for rank, coord in targets:
                send(cut(x, whole, coord), rank, message)

        return scatter
    target = number[to]
    if isinstance(source.device, Mesh) and not is_primary(source, network.coordinate(source.device)):
        return lambda x: None  # a copy of what another rank sends
    return lambda x: send(x, target, message, stays)


def receiver(network: Network, source: Tensor, got: Tensor, message: int) -> Callable[..., Pending]:
    """What `MPIRecv` and the receiving side of a gather do: `source` is the type where it comes from.

    Given this rank's own piece, if it has one.
    """
    receive, number, mesh = network.transfers.receive, network.number, source.device
    if isinstance(mesh, Device):
        at = number[mesh]
        return lambda: receive(got, at, message)
    if not isinstance(mesh, Mesh):
        raise ModelError(f"expected to receive from a device or a mesh, got {mesh}")
    if isinstance(got.device, Mesh):
        twin = number[device_at(mesh, network.coordinate(got.device))]
        return lambda: receive(got, twin, message)
    holders = [(d, c) for d, c in zip(mesh.devices, mesh.coords, strict=True) if is_primary(source, c)]
    mine = network.coordinate(mesh) if network.here in mesh.devices else None

    def gather(own: torch.Tensor | None = None) -> Pending:
        parts = {c: receive(source, number[d], message) for d, c in holders if d is not network.here}
        if own is not None and mine is not None and is_primary(source, mine):
            parts[mine] = lambda: own
        return lambda: join_pieces({c: parts[c]() for _, c in holders}, source, merge, combine)

    return gather
