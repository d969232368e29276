"""Lower one function to Python: the lines for its ops, calls and updates. See `generate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from distir.backends.lowering.buckets import find_buckets
from distir.backends.lowering.compiled import compiled
from distir.backends.lowering.context import RankContext
from distir.backends.lowering.emitters import rule_of
from distir.backends.lowering.function_writer import FunctionWriter, Waits, any_waits, numbers
from distir.backends.lowering.kernels import literal, render
from distir.backends.lowering.native import implementation
from distir.backends.lowering.optimizers import update
from distir.backends.lowering.profile import Profiler
from distir.backends.tensors.pool import LARGE
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor
from distir.ops.optim import shared_numbers
from distir.transforms.rank.alias_analysis import FunctionMemory
from distir.transforms.rank.group_optimizers import updates_weights

Compiled = Callable[[list[Any], int | None], Sequence[Any]]
Tap = Callable[[str, str, torch.Tensor, int | None], None]
"""Called with every tensor that is computed: (function, value, tensor, microbatch). It must copy what it keeps."""

OnGradient = Callable[[str, str, torch.Tensor], None]
"""Called with every gradient passed to an optimizer: (function, updated weight, gradient)."""


class Lowered:
    """A function lowered to Python. `waits`: for each output the communication it still waits for, see `Waits`.

    `varies`: name of a value in it that depends on the microbatch, or None.
    """

    __slots__ = ("call", "name", "source", "varies", "waits")

    def __init__(self, name: str, source: str, call: Compiled, waits: Sequence[Waits], varies: str | None) -> None:
        self.name, self.source, self.call, self.waits, self.varies = name, source, call, waits, varies


class Observers(NamedTuple):
    """Callbacks on values while a step runs: see `TorchRank`."""

    tap: Tap | None = None
    profiler: Profiler | None = None
    on_gradient: OnGradient | None = None


NO_OBSERVERS = Observers()


class FunctionLowering(FunctionWriter):
    """Lowers one function.

    `waits` are those of its inputs; `persistent`: its communication buffers may be kept from one call to the next.
    `compiles(function)`: whether a function is for torch.compile; `callee` lowers a callee.
    """

    def __init__(
        self,
        context: RankContext,
        observers: Observers,
        function: Function,
        memory: FunctionMemory,
        waits: Sequence[Waits],
        persistent: bool,
        compiles: Callable[[Function], bool],
        callee: Callable[[Function, tuple[Waits, ...]], Lowered],
    ) -> None:
        super().__init__(context, function, memory, waits)
        self.observers, self.compiles, self.callee = observers, compiles, callee
        self.compiled = compiles(function)
        self._temporaries: list[str] = []
        find_buckets(self, persistent or context.proxy)  # the contents of a proxy's do not matter

    def lower(self, name: str) -> tuple[str, Compiled, list[Waits], str | None]:
        """(source of a Python function of that name, the function, waits of its outputs, `varies`); see `Lowered`."""
        self._begin()
        for k, op in enumerate(self.function.ops):
            if updates_weights(op):
                self._update(op, k)
            else:
                self._op(op, k)
        waits = self._end()
        constants = [f"{name} = {v.type}" for v, name in self.names.items() if v in self.context.constants]
        lines = [*([f"# kept from step to step: {', '.join(constants)}"] if constants else []), *self.lines]
        source = f"def {name}(args, t):\n" + "\n".join("    " + line for line in lines) + "\n"
        exec(compile(source, f"<distir {name}>", "exec"), self.bound)
        call = self.bound[name]
        return source, compiled(call, source) if self.compiled else call, waits, self.varies

    # --- structure

    def _begin(self) -> None:
        inputs = self.function.inputs
        if inputs:
            self.lines.append(f"{', '.join(self.var(v) for v in inputs)}, = args; args.clear()")
        self.free([v for v in inputs if v not in self.last], -1)

    def _end(self) -> list[Waits]:
        outputs = [self.itself(v) for v in self.function.outputs]
        for v in list(self.waits):
            if outputs.count(v) != 1:
                self.use(v)
        row = "".join(f"{self.var(v) if v in self.waits else self.use(v)}, " for v in outputs)
        self.lines.append(f"return ({row.rstrip()})")
        return [self.waits.get(v, 0) for v in outputs]

    def _op(self, op: Op, k: int) -> None:
        self.now, begin = k, len(self.lines)
        if op.callee is not None:
            self._call(op, op.callee, k)
            self._time(op, begin)
            return
        done = op.outputs and (op.outputs[0] in self.context.constants or op.outputs[0] in self.same)
        if op.spec.comm is None and not done:
            if (j := op.spec.gradient) is not None:
                self._emit_on_gradient([(op.outputs[0], op.inputs[j])])
            self._compute(op, k)
        elif not done:
            rule = rule_of(op.spec)
            if rule is None:
                raise ModelError(f"{self.function.name}: the torch backend cannot run {op.spec.name}")
            rule(self, op)
        self._time(op, begin)
        self._emit_tap(op)
        self.free([*op.inputs, *op.outputs], k)

    def _time(self, op: Op, begin: int) -> None:
        """With a profiler, add timing to the lines from number `begin` on, which are those of `op`."""
        if self.observers.profiler is not None:
            self.lines[begin:] = self.observers.profiler.timed(self, op, self.lines[begin:])

    def _emit_tap(self, op: Op) -> None:
        """With a tap, add lines that pass it the results of `op`."""
        tap = self.observers.tap
        for v in op.outputs if tap is not None and op.spec.bundle is None else ():
            if isinstance(v.type, Tensor):
                names = f"{self.function.name!r}, {v.name!r}"
                self.lines.append(f"{self.bind('tap', tap)}({names}, {self.use(v)}, t)")

    def _emit_on_gradient(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        """With `on_gradient`, add lines that pass it gradients before an optimizer uses them; pairs are (updated
        weight, gradient).
        """
        seen = self.observers.on_gradient
        for weight, gradient in pairs if seen is not None else ():
            names = f"{self.function.name!r}, {weight.name!r}"
            self.lines.append(f"{self.bind('on_gradient', seen)}({names}, {self.use(gradient)})")

    def _call(self, op: Op, callee: Function, k: int) -> None:
        waited = self.compiles(callee)
        passed = [(self.use(v), 0) if waited else self.pass_on(v, k) for v in op.inputs]
        lowered = self.callee(callee, _renumbered([w for _, w in passed]))
        microbatch = op.attributes.get("mb")
        if microbatch is None and lowered.varies:
            raise UsageError(f"{callee.name}: %{lowered.varies} varies in time, but the call has no microbatch")
        function = self.bind(lowered.name, lowered.call)
        self.lines.append(f"args = [{', '.join([name for name, _ in passed])}]")
        self.free(op.inputs, k)  # before the call, so that the callee can free them
        first = self.started
        for v, w in zip(op.outputs, lowered.waits, strict=True):
            if any_waits(w):
                self.waits[v] = _later(w, first)
                self.started = max(self.started, *numbers(self.waits[v]))
        results = "".join(f"{self.var(v)}, " for v in op.outputs)
        self.lines.append(f"{results + '= ' if results else ''}{function}(args, {microbatch!r})")
        self.free(op.outputs, k)

    # --- ops that compute

    def _compute(self, op: Op, k: int) -> None:
        local = self.context.local(op)
        into = self.place(op.outputs[0]) if len(op.outputs) == 1 else None
        new = into is not None or self.compiled
        free = [j for j in range(len(op.inputs)) if not new and self.memory.may_overwrite(op, k, j)]
        kernel = self.context.kernel(op, local, frozenset(free))
        operands = [self.use(v) for v in op.inputs]
        results = [self.var(v) for v in op.outputs]
        if kernel is not None:
            lines, expressions = render(kernel, operands, self.bind, self._temporary, into, self._allocation)
            self.lines += lines
            self.lines += [f"{v} = {x}" for v, x in zip(results, expressions, strict=True)]
            self._forget()
            return
        keywords = [f"{name}={literal(name, x, self.bind)}" for name, x in local.attributes.items()]
        if local.stride:
            self.varies = op.outputs[0].name
            keywords.append(f"start={_at_microbatch(local.start, local.stride)}")
        compute = self.bind(op.spec.name, implementation(op.spec, self.context.xp))
        expression = f"{compute}({', '.join([*operands, *keywords])})"
        if callable(op.spec.outputs) and len(op.outputs) == 1:
            expression = f"{self.bind('as_row', _as_row)}({expression})"
        single = op.spec.outputs == 1
        self.lines.append(f"{results[0] if single else ', '.join(results) + ','} = {expression}")
        if into is not None:
            self.lines.append(f"{results[0]} = {self.bind('copy_', torch.Tensor.copy_)}({into}, {results[0]})")

    def _allocation(self, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """An expression that allocates a large result from the pool on CPUs; None elsewhere: GPUs have torch's caching
        allocator, and compiled functions allocate themselves.
        """
        if self.compiled or self.context.xp.device.type != "cpu" or math.prod(shape) * dtype.itemsize < LARGE:
            return None
        return f"{self.bind('allocate', self.context.allocate(shape, dtype))}()"

    def _update(self, op: Op, k: int) -> None:
        """Op number k, an optimizer or a group of them: updates weights and states in place if nothing else reads them,
        else in copies.
        """
        begin, self.now = len(self.lines), k
        each = op.spec.each or op.spec
        inputs = list(enumerate(op.inputs))
        rows = op.spec.rows(op.attributes, inputs) if op.spec.each else [inputs]
        n = len(op.outputs) // len(rows)
        for number, row in enumerate(rows):
            changed = [x for j, x in enumerate(row) if j != each.gradient]
            for result, (j, v) in zip(op.outputs[number * n : (number + 1) * n], changed, strict=False):
                if self.memory.may_overwrite(op, k, j):
                    self.use(v)
                    self.take_over(result, v)
                else:
                    self.lines.append(f"{self.var(result)} = {self.bind('clone', torch.clone)}({self.use(v)})")
        gradients = [row[each.gradient or 0][1] for row in rows]
        self._emit_on_gradient(zip(op.outputs[::n], gradients, strict=True))
        columns = [gradients, *[op.outputs[j::n] for j in range(n)]]
        arguments = [f"[{', '.join(map(self.use, values))}]" for values in columns]
        shared = [v for _, v in rows[0][n + 1 :]]
        names = shared_numbers(op.attributes, len(shared))
        arguments += [f"{name}={self.use(v)}" for name, v in zip(names, shared, strict=True)]
        self.lines.append(f"{self.bind(each.name.lower(), update(op))}({', '.join(arguments)})")
        self._time(op, begin)
        self._emit_tap(op)
        self.free([*op.inputs, *op.outputs], k)

    def _temporary(self) -> str:
        self._temporaries.append(f"s{len(self._temporaries)}")
        return self._temporaries[-1]

    def _forget(self) -> None:
        if self._temporaries:
            self.lines.append(f"del {', '.join(self._temporaries)}")
            self._temporaries.clear()


def _at_microbatch(start: Any, stride: Any) -> str:
    """The expression of a start at microbatch `t`."""
    if isinstance(start, tuple):
        return f"({', '.join([_at_microbatch(*pair) for pair in zip(start, stride, strict=True)])},)"
    return f"{start} + t * {stride}" if stride else str(start)


def _as_row(y: Any) -> Sequence[Any]:
    return y if isinstance(y, tuple | list) else (y,)


def _mapped(w: Waits, new: dict[int, int]) -> Waits:
    return tuple([new[n] for n in w]) if isinstance(w, tuple) else new[w]


def _renumbered(waits: Sequence[Waits]) -> tuple[Waits, ...]:
    """`waits` renumbered 0, 1, 2 ..., so that equal calls have equal keys."""
    new = {n: k for k, n in enumerate(sorted({0, *[n for w in waits for n in numbers(w)]}))}
    return tuple([_mapped(w, new) if any_waits(w) else 0 for w in waits])


def _later(w: Waits, by: int) -> Waits:
    return _mapped(w, {n: n + by if n else 0 for n in numbers(w)})
