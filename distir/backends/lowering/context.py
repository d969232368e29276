"""Shared state of lowering a rank's functions: local attributes of ops, traced kernels, constants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distir.backends.lowering.inplace import in_place
from distir.backends.lowering.kernels import Kernel
from distir.backends.lowering.native import implementation
from distir.backends.lowering.torch_calls import trace
from distir.backends.tensors.torch_namespace import TorchNamespace
from distir.backends.transport.torch_distributed import Network
from distir.ir.device import TIME, Mesh
from distir.ir.function import Attributes, Op, Value
from distir.ir.type import Tensor
from distir.transforms.rank.alias_analysis import ResultAlias
from distir.transforms.rank.group_optimizers import updates_weights

_CONSTANT_BYTES = 1 << 20
"""Largest size of a constant result, which is computed once and kept."""


Start = int | tuple[int, ...] | None


class Local(NamedTuple):
    """A compute op on one rank: its local attributes, and the index offset `start` of its eval (of several dims: a
    tuple), which grows by `stride` from one microbatch to the next; 0 if it does not."""

    attributes: dict[str, Any]
    start: Start
    stride: int | tuple[int, ...]


class RankContext:
    """A rank's network and array namespace, with caches of kernels and constants. `proxy`: the contents of values do
    not matter.
    """

    def __init__(self, network: Network, device: torch.device, proxy: bool = False) -> None:
        self.network, self.proxy = network, proxy
        self.xp = TorchNamespace(device)
        self.constants: dict[Value, torch.Tensor] = {}
        """Values that depend on no input."""
        self._kernels: dict[Any, Kernel | None] = {}
        self._allocators: dict[Any, Callable[[], torch.Tensor]] = {}

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """A function that allocates a tensor; the same one for equal shapes and dtypes."""
        key = tuple(shape), dtype
        if key not in self._allocators:
            self._allocators[key] = functools.partial(self.network.memory.allocate, *key)
        return self._allocators[key]

    def local(self, op: Op) -> Local:
        """The op's local attributes on this rank."""
        attributes = {k: v for k, v in op.attributes.items() if k not in ("device", "place")}
        if op.spec.local:
            attributes |= op.spec.local(op.attributes, [v.type for v in op.inputs], [v.type for v in op.outputs])
        start, stride = self._start(op)
        if start is not None and not stride:
            attributes["start"] = start
        return Local(attributes, start, stride)

    def kernel(self, op: Op, local: Local, free: frozenset[int] = frozenset()) -> Kernel | None:
        """The torch calls of a compute op, cached by spec, attributes and types; None if it cannot be traced.

        The operands in `free` may be overwritten.
        """
        if local.stride:
            return None
        types = tuple(v.type for v in (*op.inputs, *op.outputs))
        key = (op.spec, Attributes(local.attributes), types)
        if key not in self._kernels:
            self._kernels[key] = trace(op, local.attributes, self.xp)
        plain = self._kernels[key]
        if plain is None:
            return None
        if (*key, free) not in self._kernels:
            self._kernels[*key, free] = in_place(plain, free)
        return self._kernels[*key, free]

    def aliases(self, op: Op) -> Sequence[ResultAlias] | None:
        """Which operands each result may alias, for `alias_analysis`; None for constants, which are computed here."""
        local = self.local(op)
        if not local.stride and all(v in self.constants for v in op.inputs) and _bytes(op.outputs) <= _CONSTANT_BYTES:
            y = implementation(op.spec, self.xp)(*[self.constants[v] for v in op.inputs], **local.attributes)
            self.constants.update(zip(op.outputs, y if isinstance(y, tuple | list) else (y,), strict=True))
            return None
        if updates_weights(op):  # in place; tracing a group would allocate as much as a step
            return [ResultAlias(frozenset((len(op.inputs) + k,))) for k in range(len(op.outputs))]
        kernel = self.kernel(op, local)
        if kernel is None:
            return [ResultAlias(frozenset(range(len(op.inputs))), plain=False) for _ in op.outputs]
        return [ResultAlias(m.within, m.plain) for m in (kernel.tensors[r] for r in kernel.results)]

    def _start(self, op: Op) -> tuple[Start, int | tuple[int, ...]]:
        """(global index at which this rank's piece begins in the dim that the op indexes, its growth from one
        microbatch to the next), each a tuple if the op indexes all dims.
        """
        indexed = op.spec.indexed(op.attributes)
        if indexed is None:
            return None, 0
        slot, dim = indexed
        t = (op.inputs[slot] if slot >= 0 else op.outputs[~slot]).type
        device = op.outputs[0].type.device
        if not isinstance(t, Tensor):
            return 0, 0
        if not isinstance(device, Mesh):
            return t.starts(dim, None), 0
        coord = self.network.coordinate(device)
        start = t.starts(dim, coord)
        if t.microbatch_dim is None:
            return start, 0
        time = device.position(TIME)
        after = (*coord[:time], 1, *coord[time + 1 :])
        then = t.starts(dim, after)
        if isinstance(start, tuple) and isinstance(then, tuple):
            growth = tuple([b - a for a, b in zip(start, then, strict=True)])
            return start, growth if any(growth) else 0
        return start, then - start  # type: ignore[operator]


def _bytes(values: Sequence[Value]) -> int:
    return sum(v.type.bytes for v in values)
