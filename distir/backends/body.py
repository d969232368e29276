"""One function on its way to Python: names, waiting, freeing, and the lines for its ops. See `lowering`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distir.backends.kernels import literal, render
from distir.backends.native import implementation
from distir.backends.optimizers import GRADIENT, steps_together, update
from distir.backends.ownership import Memory
from distir.backends.rules import RULES, passes
from distir.ir.device import Mesh
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor

if TYPE_CHECKING:
    from distir.backends.lowering import Compiled, Lowering

_RESERVED = frozenset(("args", "begin", "t"))
"""Names that every function has of its own."""


class Body:
    """One function on its way to Python; `source` is what it was before its ops were joined."""

    def __init__(self, lowering: Lowering, source: Function, function: Function, memory: Memory) -> None:
        self.lowering, self.source, self.function, self.memory = lowering, source, function, memory
        self.network = lowering.network
        self.lines: list[str] = []
        self.bound: dict[str, Any] = {}
        self._bound_names: dict[Any, str] = {}
        self.number: dict[Value, int] = {}
        self.same: dict[Value, Value] = {}
        """Values that are another one, under its name."""
        self.pending: set[Value] = set()
        self.varies: str | None = None
        self.now = 0
        """The number of the op that is being lowered."""
        self.temporaries: list[str] = []
        self.last: dict[Value, int] = {}

    def lower(self, name: str) -> tuple[str, Compiled, frozenset[int], str | None]:
        """The source of a Python function of that name, the function, which outputs are pending, and what varies."""
        f = self.function
        for op in f.ops:
            if op.spec.comm is not None and passes(op):
                self.same[op.outputs[0]] = op.inputs[0]
        for k, op in enumerate(f.ops):
            for v in op.inputs:
                self.last[self.itself(v)] = k
        for v in f.outputs:
            self.last[self.itself(v)] = len(f.ops)
        self._begin()
        for k, row in self._rows():
            if steps_together(row[0]):
                self._step(row, k)
            else:
                self._op(row[0], k)
        pending = self._end()
        source = f"def {name}(args, t):\n" + "\n".join("    " + line for line in self.lines) + "\n"
        exec(compile(source, f"<distir {name}>", "exec"), self.bound)
        return source, self.bound[name], pending, self.varies

    # --- names

    def itself(self, v: Value) -> Value:
        """The value whose name `v` has."""
        while v in self.same:
            v = self.same[v]
        return v

    def var(self, v: Value) -> str:
        """The Python name of a value."""
        v = self.itself(v)
        k = self.number.get(v)
        if k is None:
            k = self.number[v] = len(self.number)
        return f"{'h' if v in self.pending else 'v'}{k}"

    def use(self, v: Value) -> str:
        """The name of a value that is needed now: what is pending is waited for first."""
        v = self.itself(v)
        if v in self.lowering.constants:
            self.bound[self.var(v)] = self.lowering.constants[v]
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
            while known in self.bound or known in _RESERVED:
                k += 1
                known = f"{name}_{k}"
            self.bound[known] = x
            if key is not None:
                self._bound_names[key] = known
        return known

    # --- structure

    def _rows(self) -> Iterator[tuple[int, list[Op]]]:
        """The ops in order, each with its number, but optimizers that can step together in one row, with the last's."""
        row: list[Op] = []
        for k, op in enumerate(self.function.ops):
            if row and not _together(row, op):
                yield k - 1, row
                row = []
            row.append(op)
        if row:
            yield len(self.function.ops) - 1, row

    def _begin(self) -> None:
        inputs = self.function.inputs
        if inputs:
            self.lines.append(f"{', '.join(self.var(v) for v in inputs)}, = args; args.clear()")
        self._free([v for v in inputs if v not in self.last], -1)

    def _end(self) -> frozenset[int]:
        outputs = [self.itself(v) for v in self.function.outputs]
        for v in [v for v in self.pending if outputs.count(v) != 1]:
            self.use(v)
        row = "".join(f"{self.var(v) if v in self.pending else self.use(v)}, " for v in outputs)
        self.lines.append(f"return ({row.rstrip()})")
        return frozenset(k for k, v in enumerate(outputs) if v in self.pending)

    def _free(self, values: Sequence[Value], k: int) -> None:
        """Delete those of `values` that nothing after op number k uses."""
        dead = [v for v in dict.fromkeys(map(self.itself, values)) if self.last.get(v, -1) <= k]
        # constants stay; what was started must end: see `_end`
        dead = [v for v in dead if v not in self.lowering.constants and v not in self.pending]
        if dead:
            self.lines.append(f"del {', '.join(map(self.var, dead))}")

    def _op(self, op: Op, k: int) -> None:
        name, self.now, begin = op.spec.name, k, len(self.lines)
        if op.callee is not None:
            self._call(op, op.callee, k)
            self._time([op], begin)
            return
        done = op.outputs and (op.outputs[0] in self.lowering.constants or op.outputs[0] in self.same)
        if op.spec.comm is None and not done:
            self._compute(op, k)
        elif not done:
            if name not in RULES:
                raise ModelError(f"{self.function.name}: the torch backend cannot run {name}")
            RULES[name](self, op)
        self._time([op], begin)
        self._tell(op)
        self._free([*op.inputs, *op.outputs], k)

    def _time(self, ops: Sequence[Op], begin: int) -> None:
        """Have the lines from number `begin` on, which are those of `ops`, timed."""
        if self.lowering.profiler is not None:
            self.lines[begin:] = self.lowering.profiler.timed(self, ops, self.lines[begin:])

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
        self.assign_to(op.outputs[0], expression)

    def assign_to(self, v: Value, expression: str) -> None:
        """Let `v` be the value of an expression."""
        self.lines.append(f"{self.var(v)} = {expression}")

    def moment(self, mesh: Mesh, v: Value) -> str:
        """Which microbatch `v` is of, as an expression."""
        if mesh.time is None or mesh.sizes[mesh.time] == 1:
            return "0"
        self.varies = v.name
        return "t"

    # --- ops that compute

    def _compute(self, op: Op, k: int) -> None:
        local = self.lowering.local(op)
        free = frozenset(j for j in range(len(op.inputs)) if self.memory.may_overwrite(op, k, j))
        kernel = self.lowering.kernel(op, local, free)
        operands = [self.use(v) for v in op.inputs]
        results = [self.var(v) for v in op.outputs]
        if kernel is not None:
            lines, expressions = render(kernel, operands, self.bind, self._temporary)
            self.lines += lines
            self.lines += [f"{v} = {x}" for v, x in zip(results, expressions, strict=True)]
            self._forget()
            return
        keywords = [f"{name}={literal(name, x, self.bind)}" for name, x in local.attributes.items()]
        if local.stride:
            self.varies = op.outputs[0].name
            keywords.append(f"start={local.start} + t * {local.stride}")
        compute = self.bind(op.spec.name, implementation(op.spec, self.lowering.xp))
        expression = f"{compute}({', '.join([*operands, *keywords])})"
        if callable(op.spec.outputs) and len(op.outputs) == 1:
            expression = f"{self.bind('as_row', _as_row)}({expression})"
        single = op.spec.outputs == 1
        self.lines.append(f"{results[0] if single else ', '.join(results) + ','} = {expression}")

    def _step(self, row: Sequence[Op], k: int) -> None:
        """Steps of an optimizer, with one call, the last of them op number k: weights and states are changed where they
        are, if nobody sees it, else in copies.
        """
        begin = len(self.lines)
        used = dict.fromkeys([v for op in row for v in op.inputs])
        for v in used:
            self.use(v)
        for number, op in enumerate(row, k - len(row) + 1):
            operands = [j for j in range(len(op.outputs) + 1) if j != GRADIENT]
            for result, j in zip(op.outputs, operands, strict=True):
                if self.memory.may_overwrite(op, number, j):
                    self.take_over(result, op.inputs[j])
                else:
                    self.assign_to(result, f"{self.bind('clone', torch.Tensor.clone)}({self.var(op.inputs[j])})")
        columns = [[op.inputs[GRADIENT] for op in row], *zip(*[op.outputs for op in row], strict=True)]
        arguments = [f"[{', '.join(map(self.var, values))}]" for values in columns]
        arguments += [f"step={self.var(v)}" for v in row[0].inputs[len(row[0].outputs) + 1 :]]
        self.lines.append(f"{self.bind(row[0].spec.name.lower(), update(row[0]))}({', '.join(arguments)})")
        self._time(row, begin)
        for op in row:
            self._tell(op)
        self._free([*used, *[v for op in row for v in op.outputs]], k)

    def take_over(self, result: Value, before: Value) -> None:
        """`result` is from now on what `before`, which nothing else uses, was called."""
        before = self.itself(before)
        self.same[result] = before
        self.last[before] = self.last.get(result, -1)

    def _temporary(self) -> str:
        self.temporaries.append(f"s{len(self.temporaries)}")
        return self.temporaries[-1]

    def _forget(self) -> None:
        if self.temporaries:
            self.lines.append(f"del {', '.join(self.temporaries)}")
            self.temporaries.clear()


def _together(row: Sequence[Op], op: Op) -> bool:
    """Whether an optimizer can step together with those in `row`: all alike, and none on what another gives."""
    first = row[0]
    made = {v for o in row for v in o.outputs}
    return (
        op.spec is first.spec
        and steps_together(op)
        and op.attributes == first.attributes
        and _dtype(op) is _dtype(first)
        and op.inputs[len(op.outputs) + 1 :] == first.inputs[len(op.outputs) + 1 :]
        and made.isdisjoint(op.inputs)
    )


def _dtype(op: Op) -> Any:
    t = op.inputs[0].type
    return t.dtype if isinstance(t, Tensor) else None


def _as_row(y: Any) -> Sequence[Any]:
    return y if isinstance(y, tuple | list) else (y,)
