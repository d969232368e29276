"""From a rank's program to Python: each function becomes straight-line source over torch calls, and is
compiled.

    def fwd0(args, t):
        v0, v1, v2, = args; args.clear()
        v3 = addmm(v2, v0, t_1(v1))
        h4 = allreduce_tp(v3)
        del v3
        v5 = gelu(v0)
        v4 = h4(); del h4
        ...

A value is deleted at its last use; arguments come in a list that the callee empties, so that it can free them
too. What communication returns (`h4`) is waited for at its first use, and may leave the function that issued
it. `t` is the microbatch a body runs, None where nothing varies in time. Memory that nobody sees any more is
written to again (`relu_`), see `ownership`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from distir.backends.body import Body, Waits
from distir.backends.comm import Network
from distir.backends.compiled import sort
from distir.backends.inplace import in_place
from distir.backends.kernels import Kernel
from distir.backends.namespace import TorchNamespace
from distir.backends.native import implementation
from distir.backends.optimizers import put_together, steps_together
from distir.backends.ownership import Ownership, Share
from distir.backends.profile import Profiler
from distir.backends.trace import trace
from distir.executor.collectives import start_of
from distir.ir.device import Mesh
from distir.ir.function import Attributes, Function, Op, Value
from distir.ir.type import Shard, Tensor
from distir.ir.verify import verify
from distir.transforms.outline import Sort, outline
from distir.transforms.recompose import recompose

Compiled = Callable[[list[Any], int | None], Sequence[Any]]
Tap = Callable[[str, str, torch.Tensor, int | None], None]
"""Sees every tensor that is made: (function, value, tensor, microbatch). It must copy what it keeps."""

OnGradient = Callable[[str, str, torch.Tensor], None]
"""Sees every gradient that an optimizer takes: (function, first result of the optimizer op, gradient)."""

_KEPT_BYTES = 1 << 20
"""A result that depends on nothing is computed once and kept, if it is no larger."""


class Lowered:
    """A function as Python. `waits` says of each output whether it is there when it is returned: see `Waits`.

    `varies` names a value of it that depends on the microbatch, None if there is none.
    """

    __slots__ = ("call", "name", "source", "varies", "waits")

    def __init__(self, name: str, source: str, call: Compiled, waits: Sequence[Waits], varies: str | None) -> None:
        self.name, self.source, self.call, self.waits, self.varies = name, source, call, waits, varies


class Local(NamedTuple):
    """An op that computes, on one rank: its local attributes, and the `start` of its eval, which may grow by `stride`
    from one microbatch to the next."""

    attributes: dict[str, Any]
    start: int | None
    stride: int


class Lowering:
    """Lowers the functions of one rank's program; each callee once."""

    def __init__(
        self,
        network: Network,
        device: torch.device,
        tap: Tap | None = None,
        profiler: Profiler | None = None,
        compiling: bool = False,
        on_gradient: OnGradient | None = None,
    ) -> None:
        self.network = network
        self.on_gradient = on_gradient
        self.compiling = compiling
        self.tap = tap
        self.profiler = profiler
        self.xp = TorchNamespace(device)
        self.done: dict[tuple[Function, tuple[Waits, ...]], Lowered] = {}
        self.constants: dict[Value, torch.Tensor] = {}
        """Values that depend on nothing."""
        self._ownership: Ownership | None = None
        self._kernels: dict[Any, Kernel | None] = {}
        self._names: dict[str, int] = {}
        self._rooms: dict[Any, Callable[[], torch.Tensor]] = {}

    def __call__(
        self, function: Function, updates: Mapping[int, int] | None = None, waits: tuple[Waits, ...] | None = None
    ) -> Lowered:
        """A function as Python. The first to be lowered is the program, `updates` the positions of its outputs that
        replace inputs before the next step, and of these. `waits` says which inputs come before they are there.

        Raises IRTypeError if the program, with all that is done to it before it is run, is not well typed.
        """
        if self._ownership is None:
            given = function
            if self.compiling:
                function = outline(function, self._sort)
            if (run := _as_run(function, {})) is not given:
                verify(run)
            self._ownership = Ownership(function, self._shares, _body, updates or {})
        owned, waits = self._ownership, waits or (0,) * len(function.inputs)
        lowered = self.done.get((function, waits))
        if lowered is None:
            kept = owned.keeps_buffers and owned.calls[function] <= 1
            body = Body(self, function, _body(function), owned.memory[function], waits, kept)
            name = self._function_name(function.name)
            lowered = self.done[function, waits] = Lowered(name, *body.lower(name))
        return lowered

    def compiles(self, function: Function) -> bool:
        """Whether the function is for torch.compile, which then takes it as a whole."""
        return self.compiling and bool(function.ops) and all(self._sort(op) == "joins" for op in function.ops)

    def _sort(self, op: Op) -> Sort:
        """How an op goes with those that are compiled together. For each microbatch it would be compiled anew."""
        found = sort(op)
        return "stays" if found == "joins" and self.local(op).stride else found

    @property
    def keeps_buffers(self) -> bool:
        """Whether communication buffers may be kept from step to step, by functions that a step calls once."""
        return self._ownership is not None and self._ownership.keeps_buffers

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """What gives memory for a tensor."""
        key = tuple(shape), dtype
        if key not in self._rooms:
            self._rooms[key] = functools.partial(self.network.memory.room, *key)
        return self._rooms[key]

    def source(self) -> str:
        """All the Python there is, callees first."""
        return "\n\n".join(lowered.source for lowered in self.done.values())

    def _function_name(self, name: str) -> str:
        """A name for the Python function of that name, unlike all others."""
        plain = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
        plain = plain if plain and not plain[0].isdigit() else f"f{plain}"
        k = self._names[plain] = self._names.get(plain, -1) + 1
        return f"{plain}_{k}" if k else plain

    def local(self, op: Op) -> Local:
        """What the op is on this rank."""
        attributes = {k: v for k, v in op.attributes.items() if k not in ("device", "place")}
        if op.spec.local:
            attributes |= op.spec.local(op.attributes, [v.type for v in op.inputs], [v.type for v in op.outputs])
        start, stride = self._start(op)
        if start is not None and not stride:
            attributes["start"] = start
        return Local(attributes, start, stride)

    def kernel(self, op: Op, local: Local, free: frozenset[int] = frozenset()) -> Kernel | None:
        """The torch calls of an op that computes, the same for all ops that are alike; None if they cannot be told.

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

    def _shares(self, op: Op) -> Sequence[Share] | None:
        """See `ownership`. Constants are computed on the way."""
        local = self.local(op)
        if not local.stride and all(v in self.constants for v in op.inputs) and _bytes(op.outputs) <= _KEPT_BYTES:
            y = implementation(op.spec, self.xp)(*[self.constants[v] for v in op.inputs], **local.attributes)
            self.constants.update(zip(op.outputs, y if isinstance(y, tuple | list) else (y,), strict=True))
            return None
        if steps_together(op):  # see `Body`: nothing need be traced, which would take all that a step in parts takes
            return [Share(frozenset((len(op.inputs) + k,))) for k in range(len(op.outputs))]
        kernel = self.kernel(op, local)
        if kernel is None:
            return [Share(frozenset(range(len(op.inputs))), plain=False) for _ in op.outputs]
        return [Share(m.within, m.plain) for m in (kernel.tensors[r] for r in kernel.results)]

    def _start(self, op: Op) -> tuple[int | None, int]:
        """The global index at which this rank's piece begins, in the dim that the op's `index` names, and by how much
        it grows from one microbatch to the next.
        """
        indexed = op.spec.indexed(op.attributes)
        if indexed is None:
            return None, 0
        slot, dim = indexed
        t = (op.inputs[slot] if slot >= 0 else op.outputs[~slot]).type
        device = op.outputs[0].type.device
        if not isinstance(device, Mesh) or not isinstance(t, Tensor):
            return 0, 0
        dim %= len(t.shape)
        coord = self.network.coordinate(device)
        start = start_of(t, dim, coord)
        if device.time is None or device.sizes[device.time] == 1 or not isinstance(t.placements[device.time], Shard):
            return start, 0
        after = (*coord[: device.time], 1, *coord[device.time + 1 :])
        return start, start_of(t, dim, after) - start


def _body(function: Function) -> Function:
    """The function as it is run."""
    return put_together(recompose(function))


def _as_run(function: Function, done: dict[Function, Function]) -> Function:
    """The function, and all that it calls, as they are run, for `verify`; itself if that is as it is."""
    if function not in done:
        f = _body(function)
        ops = list(f.ops)
        for k, op in enumerate(ops):
            if op.callee is not None and (callee := _as_run(op.callee, done)) is not op.callee:
                ops[k] = Op(op.spec, op.inputs, Attributes({**op.attributes, "callee": callee}), op.outputs)
        same = all(map(operator.is_, ops, f.ops))
        done[function] = f if same else Function(f.name, f.inputs, tuple(ops), f.outputs, f.updates, f.sources)
    return done[function]


def _bytes(values: Sequence[Value]) -> int:
    return sum(v.type.bytes for v in values)
