"""From a rank's program to Python: each function becomes straight-line source over torch calls, and is
compiled.

    def fwd0(args, t):
        v0, v1 = args; args.clear()
        v2 = matmul(v1, v0)
        h3 = allreduce_tp(v2)
        del v2
        v4 = gelu(v1)
        v3 = h3(); del h3
        ...

A value is deleted at its last use; arguments come in a list that the callee empties, so that it can free them
too. What communication returns (`h3`) is waited for at its first use, and may leave the function that issued
it. `t` is the microbatch a body runs, None where nothing varies in time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distir.backends.comm import Network
from distir.backends.kernels import Kernel, literal, render, trace
from distir.backends.namespace import TorchNamespace
from distir.backends.ownership import Accumulation, Handed, Ownership, handed_over
from distir.backends.rules import RULES
from distir.executor.collectives import start_of
from distir.ir.device import Mesh
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Function, Op, Value
from distir.ir.type import Shard, Tensor

Compiled = Callable[[list[Any], int | None], Sequence[Any]]
Tap = Callable[[str, str, torch.Tensor, int | None], None]
"""Sees every tensor that is made: (function, value, tensor, microbatch). It must copy what it keeps."""

_KEPT_BYTES = 1 << 20
"""A result that depends on nothing is computed once and kept, if it is no larger."""


class Lowered:
    """A function as Python. `pending` are the positions of outputs that are returned not yet waited for.

    `varies` names a value of it that depends on the microbatch, None if there is none.
    """

    __slots__ = ("call", "name", "pending", "source", "varies")

    def __init__(self, name: str, source: str, call: Compiled, pending: frozenset[int], varies: str | None) -> None:
        self.name, self.source, self.call, self.pending, self.varies = name, source, call, pending, varies


class Lowering:
    """Lowers the functions of one rank's program; each callee once."""

    def __init__(self, network: Network, device: torch.device, tap: Tap | None = None) -> None:
        self.network = network
        self.tap = tap
        self.xp = TorchNamespace(device)
        self.done: dict[Function, Lowered] = {}
        self.handed: Handed | None = None
        self.kernels: dict[Any, Kernel | None] = {}
        self._names: dict[str, int] = {}

    def __call__(self, function: Function) -> Lowered:
        lowered = self.done.get(function)
        if lowered is None:
            if self.handed is None:
                self.handed = handed_over(function)
            lowered = self.done[function] = Body(self, function).lower()
        return lowered

    def source(self) -> str:
        """All the Python there is, callees first."""
        return "\n\n".join(lowered.source for lowered in self.done.values())

    def function_name(self, name: str) -> str:
        """A name for the Python function of that name, unlike all others."""
        plain = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
        plain = plain if plain and not plain[0].isdigit() else f"f{plain}"
        k = self._names[plain] = self._names.get(plain, -1) + 1
        return f"{plain}_{k}" if k else plain


class Body:
    """One function on its way to Python."""

    def __init__(self, lowering: Lowering, function: Function) -> None:
        self.lowering, self.function = lowering, function
        self.network, self.xp = lowering.network, lowering.xp
        self.lines: list[str] = []
        self.bound: dict[str, Any] = {}
        self._bound_names: dict[Any, str] = {}
        self.number: dict[Value, int] = {}
        self.pending: set[Value] = set()
        self.kept: set[Value] = set()
        self.varies: str | None = None
        self.temporaries: list[str] = []
        self._ownership: Ownership | None = None
        self.last: dict[Value, int] = {}

    def lower(self) -> Lowered:
        f = self.function
        name = self.lowering.function_name(f.name)
        for k, op in enumerate(f.ops):
            for v in op.inputs:
                self.last[v] = k
        for v in f.outputs:
            self.last[v] = len(f.ops)
        self._begin()
        for k, op in enumerate(f.ops):
            self._op(op, k)
        pending = self._end()
        source = f"def {name}(args, t):\n" + "\n".join("    " + line for line in self.lines) + "\n"
        exec(compile(source, f"<distir {name}>", "exec"), self.bound)
        return Lowered(name, source, self.bound[name], pending, self.varies)

    # --- names

    def var(self, v: Value) -> str:
        """The Python name of a value."""
        k = self.number.get(v)
        if k is None:
            k = self.number[v] = len(self.number)
        return f"{'h' if v in self.pending else 'v'}{k}"

    def use(self, v: Value) -> str:
        """The name of a value that is needed now: what is pending is waited for first."""
        if v in self.pending:
            handle = self.var(v)
            self.pending.discard(v)
            self.lines.append(f"{self.var(v)} = {handle}(); del {handle}")
        return self.var(v)

    def bind(self, name: str, x: Any) -> str:
        """A global of the Python function: an object that its source names."""
        try:
            key: Any = (name, x, type(x))
            known = self._bound_names.get(key)
        except TypeError:
            key = known = None
        if known is None:
            known, k = name, 0
            while known in self.bound:
                k += 1
                known = f"{name}_{k}"
            self.bound[known] = x
            if key is not None:
                self._bound_names[key] = known
        return known

    # --- structure

    def _begin(self) -> None:
        inputs = self.function.inputs
        if inputs:
            self.lines.append(f"{', '.join(self.var(v) for v in inputs)}, = args; args.clear()")
        self._free([v for v in inputs if v not in self.last], -1)

    def _end(self) -> frozenset[int]:
        outputs = self.function.outputs
        for v in [v for v in self.pending if outputs.count(v) != 1]:
            self.use(v)
        row = "".join(f"{self.var(v)}, " for v in outputs)
        self.lines.append(f"return ({row.rstrip()})")
        return frozenset(k for k, v in enumerate(outputs) if v in self.pending)

    def _free(self, values: Sequence[Value], k: int) -> None:
        """Delete those of `values` that nothing after op number k uses."""
        dead = [v for v in dict.fromkeys(values) if self.last.get(v, -1) <= k and v not in self.kept]
        dead = [v for v in dead if v not in self.pending]  # what was started must end: see `_end`
        if dead:
            self.lines.append(f"del {', '.join(map(self.var, dead))}")

    def _op(self, op: Op, k: int) -> None:
        name = op.spec.name
        if op.callee is not None:
            self._call(op, op.callee, k)
        elif op.spec.comm is None:
            self._compute(op)
        elif (rule := RULES.get(name)) is not None:
            rule(self, op)
        else:
            raise ModelError(f"{self.function.name}: the torch backend cannot run {name}")
        if op.callee is None:
            self._tell(op)
            self._free([*op.inputs, *op.outputs], k)

    def _tell(self, op: Op) -> None:
        """Show the tap what the op made, as soon as it is there."""
        tap = self.lowering.tap
        for v in op.outputs if tap is not None and op.spec.bundle is None else ():
            if isinstance(v.type, Tensor):
                names = f"{self.function.name!r}, {v.name!r}"
                self.lines.append(f"{self.bind('tap', tap)}({names}, {self.use(v)}, t)")

    def _call(self, op: Op, callee: Function, k: int) -> None:
        lowered = self.lowering(callee)
        moment = op.attributes.get("mb")
        if moment is None and lowered.varies:
            raise UsageError(f"{callee.name}: %{lowered.varies} varies in time, but the call has no microbatch")
        function = self.bind(lowered.name, lowered.call)
        args = [self.use(v) for v in op.inputs]
        self.lines.append(f"args = [{', '.join(args)}]")
        self._free(op.inputs, k)  # before the call: the callee holds them now
        self.pending.update(v for j, v in enumerate(op.outputs) if j in lowered.pending)
        results = "".join(f"{self.var(v)}, " for v in op.outputs)
        self.lines.append(f"{results + '= ' if results else ''}{function}(args, {moment!r})")
        self._free(op.outputs, k)

    def assign(self, op: Op, expression: str, pending: bool = False) -> None:
        """`%result = expression`."""
        if pending:
            self.pending.add(op.outputs[0])
        self.lines.append(f"{self.var(op.outputs[0])} = {expression}")

    def accumulation(self, op: Op) -> Accumulation:
        """How an `Accumulate` may be done."""
        if self._ownership is None:
            self._ownership = Ownership(self.function, (self.lowering.handed or {}).get(self.function, frozenset()))
        return self._ownership.accumulation(op)

    def moment(self, mesh: Mesh, v: Value) -> str:
        """Which microbatch `v` is of, as an expression."""
        if mesh.time is None or mesh.sizes[mesh.time] == 1:
            return "0"
        self.varies = v.name
        return "t"

    # --- ops that compute

    def _compute(self, op: Op) -> None:
        spec = op.spec
        device = op.outputs[0].type.device if op.outputs else None
        attrs = {k: v for k, v in op.attributes.items() if k not in ("device", "place")}
        if spec.local:
            attrs.update(spec.local(op.attributes, [v.type for v in op.inputs], [v.type for v in op.outputs]))
        start = self._start(op, device)
        if start is not None and start.isdigit():
            attrs["start"], start = int(start), None
        if not op.inputs and start is None and _bytes(op.outputs) <= _KEPT_BYTES:
            self._keep(op, attrs)
            return
        operands = [self.use(v) for v in op.inputs]
        kernel = self._kernel(op, attrs) if spec.torch is None and start is None else None
        if kernel is not None:
            lines, results = render(kernel, operands, self.bind, self._temporary)
            self.lines += lines
            self.lines += [f"{self.var(v)} = {x}" for v, x in zip(op.outputs, results, strict=True)]
            self._forget()
            return
        keywords = [f"{k}={literal(k, x, self.bind)}" for k, x in attrs.items()]
        if start is not None:
            keywords.append(f"start={start}")
        expression = f"{self._whole(op)}({', '.join([*operands, *keywords])})"
        if callable(spec.outputs) and len(op.outputs) == 1:
            expression = f"{self.bind('as_row', _as_row)}({expression})"
        results = [self.var(v) for v in op.outputs]
        single = spec.outputs == 1
        self.lines.append(f"{results[0] if single else ', '.join(results) + ','} = {expression}")

    def _kernel(self, op: Op, attrs: Mapping[str, Any]) -> Kernel | None:
        """The torch calls of an op; the same for all ops that are alike."""
        kernels = self.lowering.kernels
        types = tuple(v.type for v in (*op.inputs, *op.outputs))
        key = (op.spec, tuple(sorted(attrs.items(), key=lambda item: item[0])), types)
        if key not in kernels:
            kernels[key] = trace(op, attrs, self.xp)
        return kernels[key]

    def _whole(self, op: Op) -> str:
        """The name of a function for the op in one call: torch's own kernel where it names one, else its
        `eval`.
        """
        spec = op.spec
        if spec.torch is not None:
            return self.bind(spec.torch.rsplit(".", 1)[-1], operator.attrgetter(spec.torch)(torch))
        if spec.eval is None:
            raise ModelError(f"{spec.name} cannot be evaluated: it should have been decomposed")
        return self.bind(spec.name, functools.partial(spec.eval, self.xp))

    def _temporary(self) -> str:
        self.temporaries.append(f"s{len(self.temporaries)}")
        return self.temporaries[-1]

    def _forget(self) -> None:
        if self.temporaries:
            self.lines.append(f"del {', '.join(self.temporaries)}")
            self.temporaries.clear()

    def _keep(self, op: Op, attrs: Mapping[str, Any]) -> None:
        """Compute now what depends on nothing."""
        if op.spec.eval is None:
            raise ModelError(f"{op.spec.name} cannot be evaluated: it should have been decomposed")
        for v, x in zip(op.outputs, _as_row(op.spec.eval(self.xp, **attrs)), strict=True):
            self.bound[self.var(v)] = x
            self.kept.add(v)

    def _start(self, op: Op, device: Any) -> str | None:
        """The global index at which this rank's piece begins, in the dim that the op's `index` names."""
        indexed = op.spec.indexed(op.attributes)
        if indexed is None:
            return None
        slot, dim = indexed
        t = (op.inputs[slot] if slot >= 0 else op.outputs[~slot]).type
        if not isinstance(device, Mesh) or not isinstance(t, Tensor):
            return "0"
        dim %= len(t.shape)
        coord = self.network.coordinate(device)
        base = start_of(t, dim, coord)
        if device.time is None or not isinstance(t.placements[device.time], Shard):
            return str(base)
        after = (*coord[: device.time], 1, *coord[device.time + 1 :])
        stride = start_of(t, dim, after) - base
        moment = self.moment(device, op.outputs[0])
        return str(base) if stride == 0 or moment == "0" else f"{base} + {moment} * {stride}"


def _bytes(values: Sequence[Value]) -> int:
    return sum(v.type.bytes for v in values)


def _as_row(y: Any) -> Sequence[Any]:
    return y if isinstance(y, tuple | list) else (y,)
