"""Lower transfers between devices and meshes to sends and receives of one rank.

`message` distinguishes transfers between the same two ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distir.backends.tensors.torch_namespace import TORCH
from distir.backends.transport.torch_distributed import Network
from distir.backends.transport.transfers import Pending
from distir.ir.device import Device, Mesh
from distir.ir.errors import ModelError
from distir.ir.type import Tensor
from distir.runtime.pieces import is_primary, join_pieces
from distir.transforms.rank.project import device_at


def sender(
    network: Network, source: Tensor, to: Device | Mesh, whole: Tensor | None, message: int, stays: bool = False
) -> Callable[[torch.Tensor], None]:
    """The function of `MPISend`: from a mesh to the device with the same coordinate on another mesh, to a device, or
    from a device a piece to each device of a mesh.

    `whole`: the type on the mesh, if a device sends to one; `stays`: the tensor is kept alive after the send.
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
                send(whole.cut(x, coord), rank, message)

        return scatter
    target = number[to]
    if isinstance(source.device, Mesh) and not is_primary(source, network.coordinate(source.device)):
        return lambda x: None  # a replica of what another rank sends
    return lambda x: send(x, target, message, stays)


def receiver(network: Network, source: Tensor, got: Tensor, message: int) -> Callable[..., Pending]:
    """The function of `MPIRecv` and of the receiving side of a gather; `source` is the type on the sending side.

    The function takes this rank's own piece if it has one.
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
        return lambda: join_pieces({c: parts[c]() for _, c in holders}, source, TORCH)

    return gather
