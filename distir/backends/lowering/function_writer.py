"""Write a function's Python: names of values, waits for communication, deletion at last use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from distir.backends.lowering.context import RankContext
from distir.ir.device import AxisNames, Mesh, names_of
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor, Tuple
from distir.transforms.rank.alias_analysis import FunctionMemory
from distir.transforms.rank.idle import is_idle

_RESERVED = frozenset(("args", "begin", "t"))
"""Local names used in every generated function."""

Waits = int | tuple[int, ...]
"""The communication that a value waits for: 0 for none, else its number in the order of starts; for a bundle the
numbers of its members."""


class Bucket:
    """The buffer of a bundle's tensors. The line that makes it and its views is written, by `begin`, when one of their
    names is first used; `begin` returns the names.
    """

    def __init__(self, types: Sequence[Tensor], begin: Callable[[], list[str]]) -> None:
        self.types = types
        self.placed: set[Value] = set()
        """The members that are computed directly into their views."""
        self.started = False
        self._begin = begin

    @functools.cached_property
    def names(self) -> list[str]:
        """The name of the buffer, then those of the views."""
        self.started = True
        return self._begin()


class FunctionWriter:
    """Collects the lines of one function. `waits` are those of its inputs."""

    def __init__(
        self, context: RankContext, function: Function, memory: FunctionMemory, waits: Sequence[Waits]
    ) -> None:
        self.context, self.function, self.memory = context, function, memory
        self.network = context.network
        self.lines: list[str] = []
        self.bound: dict[str, Any] = {}
        self._bound_names: dict[Any, str] = {}
        self.names: dict[Value, str] = {}
        self.same: dict[Value, Value] = {}
        """Values that are identical to another, and use its name."""
        self.waits: dict[Value, Waits] = {v: w for v, w in zip(function.inputs, waits, strict=True) if any_waits(w)}
        """Values in flight: their name is that of a function that waits and returns the value."""
        self.started = max([0, *[n for w in waits for n in numbers(w)]])
        self.varies: str | None = None
        self.now = 0
        """The number of the op that is being lowered."""
        self.last: dict[Value, int] = {}
        self.buckets: dict[Op, Bucket] = {}
        """Buckets by the Pack op of their bundle."""
        self.place_of: dict[Value, tuple[Bucket, int]] = {}
        """For a member of a bucket's bundle, the bucket and its index there."""
        for op in function.ops:
            if op.spec.comm is not None and is_idle(op):
                self.same[op.outputs[0]] = op.inputs[0]
        for k, op in enumerate(function.ops):
            for v in op.inputs:
                self.last[self.itself(v)] = k
        for v in function.outputs:
            self.last[self.itself(v)] = len(function.ops)

    # --- names

    def itself(self, v: Value) -> Value:
        """The value that `v` is identical to, itself by default."""
        while v in self.same:
            v = self.same[v]
        return v

    def var(self, v: Value) -> str:
        """The Python name of a value, or of the function that waits for it."""
        v = self.itself(v)
        if v not in self.names:
            self.names[v] = f"{'h' if type(self.waits.get(v)) is int else 'v'}{len(self.names)}"
        return self.names[v]

    def use(self, v: Value) -> str:
        """The name of a value that is needed now; writes a wait first if it is in flight."""
        v = self.itself(v)
        if v in self.context.constants:
            self.bound[self.var(v)] = self.context.constants[v]
        waits = self.waits.pop(v, 0)
        if type(waits) is int and waits:
            handle = self.names.pop(v)
            self.names[v] = "v" + handle[1:]
            self.lines.append(f"{self.names[v]} = {handle}(); del {handle}")
        elif waits:
            members = [f"{self.var(v)}[{k}]{'()' if n else ''}" for k, n in enumerate(numbers(waits))]
            self.lines.append(f"{self.var(v)} = ({', '.join(members)},)")
        return self.var(v)

    def pass_on(self, v: Value, k: int) -> tuple[str, Waits]:
        """The name of a value that op number k passes on without using it, and its waits. If the value is used again
        later it is waited for first, and its waits are 0.
        """
        v = self.itself(v)
        if v not in self.waits or self.last[v] > k or self._operands(k).count(v) > 1:
            return self.use(v), 0
        return self.var(v), self.waits.pop(v)

    def _operands(self, k: int) -> list[Value]:
        return [self.itself(v) for v in self.function.ops[k].inputs]

    def bind_along(self, name: str, axis: AxisNames, x: Any) -> str:
        """As `bind`, for what communicates along an axis, or several."""
        return self.bind("_".join([name, *names_of(axis)]), x)

    def bind(self, name: str, x: Any) -> str:
        """Make an object a global of the Python function; returns its name."""
        try:
            key: Any = (name, x, type(x))
            known = self._bound_names.get(key)
        except TypeError:
            key = known = None
        if known is None:
            known, k = name, 0
            while known in self.bound or known in _RESERVED:
                k += 1
                known = f"{name}_{k}"
            self.bound[known] = x
            if key is not None:
                self._bound_names[key] = known
        return known

    # --- for rules

    def assign(self, op: Op, expression: str, pending: bool = False) -> None:
        """Write `result = expression`. `pending`: the expression is a function that waits and returns the result, or
        for a bundle a tuple of such functions.
        """
        (v,) = op.outputs
        if pending:
            self.started += 1
            self.waits[v] = (self.started,) * len(v.type.types) if isinstance(v.type, Tuple) else self.started
        self.lines.append(f"{self.var(v)} = {expression}")

    def place(self, v: Value) -> str | None:
        """The view of a communication buffer into which a value is computed, or None."""
        bucket, k = self.place_of.get(v, (None, 0))
        return bucket.names[k + 1] if bucket is not None and v in bucket.placed else None

    def take_over(self, result: Value, before: Value) -> None:
        """`result` takes over the name of `before`, which nothing else uses."""
        before = self.itself(before)
        self.same[result] = before
        self.last[before] = self.last.get(result, -1)

    def microbatch(self, mesh: Mesh, v: Value) -> str:
        """An expression for the microbatch that `v` is of."""
        if mesh.time is None or mesh.sizes[mesh.time] == 1:
            return "0"
        self.varies = v.name
        return "t"

    def free(self, values: Sequence[Value], k: int) -> None:
        """Delete those of `values` that nothing after op number k uses."""
        dead = [v for v in dict.fromkeys(map(self.itself, values)) if self.last.get(v, -1) <= k]
        # constants are kept; communication in flight must be waited for: see `_end`
        dead = [v for v in dead if v in self.names and v not in self.context.constants and v not in self.waits]
        if dead:
            self.lines.append(f"del {', '.join(map(self.var, dead))}")


def numbers(w: Waits) -> tuple[int, ...]:
    """The waits of a tensor, or of each member of a bundle, as a tuple."""
    return w if isinstance(w, tuple) else (w,)


def any_waits(w: Waits) -> bool:
    """Whether any communication is waited for."""
    return any(numbers(w))
