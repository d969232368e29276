"""Memory of a device beside the program's tensors, and the bytes that its allocator takes for a tensor.

All of it are documented figures of the software; their sources stand with them in `distir/hardware`. A device without
a context, such as a CPU, has none of it.
"""

from __future__ import annotations

from typing import NamedTuple

from distir.executor.cost_model import CostModel
from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.labels import SEND, axis_text
from distir.ir.device import Device

MIB = 1 << 20
_ROUND, _MEDIUM, _LARGE, _LARGE_ROUND = 512, MIB, 10 * MIB, 2 * MIB
_SEGMENTS = 2 * MIB, 20 * MIB
"""PyTorch's caching allocator (github pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp): sizes are multiples of 512
bytes. Blocks of up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB. A larger one has a segment
of its own, of a multiple of 2 MiB; what it leaves of it is a block of its own if that is more than 1 MiB."""


class Overheads(NamedTuple):
    """Bytes of a device beside the tensors.

    `workspace`: what matrix products work in. `slack`: what the allocator holds beyond its blocks, as its last segments
    are not full, and what pools of streams keep (`pools`); other holes between blocks in use (fragmentation) are not
    modelled. `communication`: the communication
    library's buffers. `context`: the driver's and the kernels'.
    """

    workspace: int = 0
    slack: int = 0
    communication: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    def with_slack(self, more: int) -> Overheads:
        """With so many bytes more that the allocator holds; on devices that have one."""
        return self._replace(slack=self.slack + more) if self.context else self

    def by_category(self) -> dict[str, int]:
        """Bytes by category."""
        return dict(zip(OVERHEADS, self, strict=True))


OVERHEADS = "workspace", "allocator slack", "communication buffers", "context"
"""The names of these categories."""


def allocated(size: int) -> int:
    """The bytes that the caching allocator counts for a tensor of `size` bytes, in a segment that is new."""
    block = -(-size // _ROUND) * _ROUND
    if block < _LARGE:
        return block
    segment = -(-block // _LARGE_ROUND) * _LARGE_ROUND
    return block if segment - block > _MEDIUM else segment


def caches(program: CompiledProgram) -> bool:
    """Whether tensors lie in blocks of a caching allocator: a device of the program has a context."""
    topology = program.cost.topology
    return any([topology.spec(first).context > 0 for first in program.classes.first])


def overheads(program: CompiledProgram, c: int) -> Overheads:
    """The memory beside tensors of each device of class c.

    There is a workspace for each thread of the runtime that issues products, and a communicator for each axis, or
    axes, along which the class communicates; all its transfers share one.
    """
    found, regular = least_overheads(program.cost, program.classes.first[c]), program.cost.topology.regular
    if regular is None or not found.context:
        return found
    return found._replace(communication=round(regular.communicator * len(communicators(program, c))))


def least_overheads(cost: CostModel, device: Device) -> Overheads:
    """The memory beside tensors of a device that communicates with no other."""
    spec = cost.topology.spec(device)
    if not spec.context:
        return Overheads()
    threads = cost.runtime.threads if cost.runtime is not None else 1
    return Overheads(round(spec.workspace * threads), sum(_SEGMENTS), 0, round(spec.context))


def communicators(program: CompiledProgram, c: int) -> set[str]:
    """The axes along which a class of devices communicates, and SEND if it sends or receives."""
    classes = program.classes
    found = {axis_text(axis) for (_, axis), peers in classes.peers.items() if any([c in p.classes for p in peers])}
    if any([c in (p.source, p.target) for pairs in classes.pairs.values() for p in pairs]):
        found.add(SEND)
    return found
