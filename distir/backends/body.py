"""One function on its way to Python: names, waiting, freeing, and the lines for its ops. See `lowering`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distir.backends.buckets import Bucket, find_buckets
from distir.backends.compiled import compiled
from distir.backends.kernels import literal, render
from distir.backends.native import implementation
from distir.backends.optimizers import gradient_of, steps_together, update
from distir.backends.ownership import Memory, each_part
from distir.backends.passing import passes
from distir.backends.pool import LARGE
from distir.backends.rules import RULES
from distir.ir.device import Mesh
from distir.ir.errors import ModelError, UsageError
from distir.ir.function import Function, Op, Value
from distir.ir.type import Tensor, Tuple

if TYPE_CHECKING:
    from distir.backends.lowering import Compiled, Lowering

_RESERVED = frozenset(("args", "begin", "t"))
"""Names that every function has of its own."""

Waits = int | tuple[int, ...]
"""Of a value: 0 if it is there, else the number of the communication it comes from, in the order in which these were
started; of a bundle the numbers of its members."""


class Body:
    """One function on its way to Python; `source` is what it was before its ops were joined.

    `waits` are those of its inputs; `kept`: it may keep its communication buffers from one call to the next.
    """

    def __init__(
        self,
        lowering: Lowering,
        source: Function,
        function: Function,
        memory: Memory,
        waits: Sequence[Waits],
        kept: bool,
    ) -> None:
        self.lowering, self.source, self.function, self.memory = lowering, source, function, memory
        self.kept = kept
        self.compiled = lowering.compiles(source)
        self.network = lowering.network
        self.lines: list[str] = []
        self.bound: dict[str, Any] = {}
        self._bound_names: dict[Any, str] = {}
        self.names: dict[Value, str] = {}
        self.same: dict[Value, Value] = {}
        """Values that are another one, under its name."""
        self.waits: dict[Value, Waits] = {v: w for v, w in zip(function.inputs, waits, strict=True) if _any(w)}
        """What is not there yet: it has a function's name, which waits and gives it."""
        self._started = max([0, *[n for w in waits for n in _numbers(w)]])
        self.varies: str | None = None
        self.now = 0
        """The number of the op that is being lowered."""
        self._temporaries: list[str] = []
        self.last: dict[Value, int] = {}
        self._place: dict[Value, tuple[Bucket, int]] = {}
        self.buckets: dict[Op, Bucket] = {}
        """Those of bundles, by the ops that pack these."""

    def lower(self, name: str) -> tuple[str, Compiled, list[Waits], str | None]:
        """The source of a Python function of that name, the function, for each output what it waits for, and what
        varies.
        """
        f = self.function
        for op in f.ops:
            if op.spec.comm is not None and passes(op):
                self.same[op.outputs[0]] = op.inputs[0]
        for k, op in enumerate(f.ops):
            for v in op.inputs:
                self.last[self.itself(v)] = k
        for v in f.outputs:
            self.last[self.itself(v)] = len(f.ops)
        self.buckets = find_buckets(self, self.kept)
        self._place = {v: (bucket, k) for pack, bucket in self.buckets.items() for k, v in enumerate(pack.inputs)}
        self._begin()
        for k, row in self._rows():
            if steps_together(row[0]):
                self._step(row, k)
            else:
                self._op(row[0], k)
        waits = self._end()
        held = [f"{name} = {v.type}" for v, name in self.names.items() if v in self.lowering.constants]
        lines = [*([f"# kept from step to step: {', '.join(held)}"] if held else []), *self.lines]
        source = f"def {name}(args, t):\n" + "\n".join("    " + line for line in lines) + "\n"
        exec(compile(source, f"<distir {name}>", "exec"), self.bound)
        call = self.bound[name]
        return source, compiled(call, source) if self.compiled else call, waits, self.varies

    # --- names

    def itself(self, v: Value) -> Value:
        """The value whose name `v` has."""
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
        """The name of a value that is needed now: what is under way is waited for first."""
        v = self.itself(v)
        if v in self.lowering.constants:
            self.bound[self.var(v)] = self.lowering.constants[v]
        waits = self.waits.pop(v, 0)
        if type(waits) is int and waits:
            handle = self.names.pop(v)
            self.names[v] = "v" + handle[1:]
            self.lines.append(f"{self.names[v]} = {handle}(); del {handle}")
        elif waits:
            members = [f"{self.var(v)}[{k}]{'()' if n else ''}" for k, n in enumerate(_numbers(waits))]
            self.lines.append(f"{self.var(v)} = ({', '.join(members)},)")
        return self.var(v)

    def hand(self, v: Value, k: int) -> tuple[str, Waits]:
        """The name of a value that op number k hands on as it is, and what it waits for: 0 if it is needed again, for
        then it is waited for first.
        """
        v = self.itself(v)
        if v not in self.waits or self.last[v] > k or self._operands(k).count(v) > 1:
            return self.use(v), 0
        return self.var(v), self.waits.pop(v)

    def _operands(self, k: int) -> list[Value]:
        return [self.itself(v) for v in self.function.ops[k].inputs]

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

    def _end(self) -> list[Waits]:
        outputs = [self.itself(v) for v in self.function.outputs]
        for v in list(self.waits):
            if outputs.count(v) != 1:
                self.use(v)
        row = "".join(f"{self.var(v) if v in self.waits else self.use(v)}, " for v in outputs)
        self.lines.append(f"return ({row.rstrip()})")
        return [self.waits.get(v, 0) for v in outputs]

    def _free(self, values: Sequence[Value], k: int) -> None:
        """Delete those of `values` that nothing after op number k uses."""
        dead = [v for v in dict.fromkeys(map(self.itself, values)) if self.last.get(v, -1) <= k]
        # constants stay; what was started must end: see `_end`
        dead = [v for v in dead if v in self.names and v not in self.lowering.constants and v not in self.waits]
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
            self._show_gradients([op])
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

    def _show_gradients(self, ops: Sequence[Op]) -> None:
        """Show the gradients that optimizers are about to take to whoever wants to see them."""
        seen = self.lowering.on_gradient
        for op in ops if seen is not None else ():
            if (k := op.spec.gradient) is not None:
                names = f"{self.function.name!r}, {op.outputs[0].name!r}"
                self.lines.append(f"{self.bind('on_gradient', seen)}({names}, {self.use(op.inputs[k])})")

    def _call(self, op: Op, callee: Function, k: int) -> None:
        waited = self.lowering.compiles(callee)
        handed = [(self.use(v), 0) if waited else self.hand(v, k) for v in op.inputs]
        lowered = self.lowering(callee, waits=_renumbered([w for _, w in handed]))
        moment = op.attributes.get("mb")
        if moment is None and lowered.varies:
            raise UsageError(f"{callee.name}: %{lowered.varies} varies in time, but the call has no microbatch")
        function = self.bind(lowered.name, lowered.call)
        self.lines.append(f"args = [{', '.join([name for name, _ in handed])}]")
        self._free(op.inputs, k)  # before the call: the callee holds them now
        first = self._started
        for v, w in zip(op.outputs, lowered.waits, strict=True):
            if _any(w):
                self.waits[v] = _later(w, first)
                self._started = max(self._started, *_numbers(self.waits[v]))
        results = "".join(f"{self.var(v)}, " for v in op.outputs)
        self.lines.append(f"{results + '= ' if results else ''}{function}(args, {moment!r})")
        self._free(op.outputs, k)

    def assign(self, op: Op, expression: str, pending: bool = False) -> None:
        """`%result = expression`; `pending` if that is a function which waits for it, or, of a bundle, are such."""
        (v,) = op.outputs
        if pending:
            self._started += 1
            self.waits[v] = (self._started,) * len(v.type.types) if isinstance(v.type, Tuple) else self._started
        self.lines.append(f"{self.var(v)} = {expression}")

    def place(self, v: Value) -> str | None:
        """Where in a communication buffer a value is made, None if in memory of its own."""
        bucket, k = self._place.get(v, (None, 0))
        return bucket.names[k + 1] if bucket is not None and v in bucket.placed else None

    def take_over(self, result: Value, before: Value) -> None:
        """`result` is from now on what `before`, which nothing else uses, was called."""
        before = self.itself(before)
        self.same[result] = before
        self.last[before] = self.last.get(result, -1)

    def moment(self, mesh: Mesh, v: Value) -> str:
        """Which microbatch `v` is of, as an expression."""
        if mesh.time is None or mesh.sizes[mesh.time] == 1:
            return "0"
        self.varies = v.name
        return "t"

    # --- ops that compute

    def _compute(self, op: Op, k: int) -> None:
        local = self.lowering.local(op)
        into = self.place(op.outputs[0]) if len(op.outputs) == 1 else None
        new = into is not None or self.compiled
        free = [j for j in range(len(op.inputs)) if not new and self.memory.may_overwrite(op, k, j)]
        kernel = self.lowering.kernel(op, local, frozenset(free))
        operands = [self.use(v) for v in op.inputs]
        results = [self.var(v) for v in op.outputs]
        if kernel is not None:
            lines, expressions = render(kernel, operands, self.bind, self._temporary, into, self._room)
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
        if into is not None:
            self.lines.append(f"{results[0]} = {self.bind('copy_', torch.Tensor.copy_)}({into}, {results[0]})")

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """An expression for memory to compute a large tensor into. Devices but CPUs have a caching allocator of their
        own, and what is compiled takes its memory itself.
        """
        if self.compiled or self.lowering.xp.device.type != "cpu" or math.prod(shape) * dtype.itemsize < LARGE:
            return None
        return f"{self.bind('room', self.lowering.room(shape, dtype))}()"

    def _step(self, row: Sequence[Op], k: int) -> None:
        """Steps of an optimizer, the last of them op number k: one call for all whose gradients come together, in the
        order in which they come. Weights and states are changed where they are, if nobody sees it, else in copies.
        """
        begin = len(self.lines)
        groups: dict[int, list[Op]] = {}
        for op in row:
            groups.setdefault(max(_numbers(self.waits.get(self.itself(gradient_of(op)), 0))), []).append(op)
        used = dict.fromkeys([v for op in row for v in op.inputs])
        for number, op in enumerate(row, k - len(row) + 1):
            for result, j in zip(
                op.outputs, [j for j in range(len(op.outputs) + 1) if j != op.spec.gradient], strict=True
            ):
                v = op.inputs[j]
                parts = each_part(self.memory.parts[v])
                if self.memory.may_overwrite(op, number, j) and self.memory.alone(parts, row):
                    self.use(v)
                    self.take_over(result, v)
                else:
                    self.lines.append(f"{self.var(result)} = {self.bind('clone', torch.clone)}({self.use(v)})")
        for _, ops in sorted(groups.items()):
            self._show_gradients(ops)
            columns = [[gradient_of(op) for op in ops], *zip(*[op.outputs for op in ops], strict=True)]
            arguments = [f"[{', '.join(map(self.use, values))}]" for values in columns]
            arguments += [f"step={self.use(v)}" for v in ops[0].inputs[len(ops[0].outputs) + 1 :]]
            self.lines.append(f"{self.bind(ops[0].spec.name.lower(), update(ops[0]))}({', '.join(arguments)})")
            self._time(ops, begin)
            begin = len(self.lines)
        for op in row:
            self._tell(op)
        self._free([*used, *[v for op in row for v in op.outputs]], k)

    def _temporary(self) -> str:
        self._temporaries.append(f"s{len(self._temporaries)}")
        return self._temporaries[-1]

    def _forget(self) -> None:
        if self._temporaries:
            self.lines.append(f"del {', '.join(self._temporaries)}")
            self._temporaries.clear()


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


def _numbers(w: Waits) -> tuple[int, ...]:
    return w if isinstance(w, tuple) else (w,)


def _any(w: Waits) -> bool:
    return any(_numbers(w))


def _mapped(w: Waits, new: dict[int, int]) -> Waits:
    return tuple([new[n] for n in w]) if isinstance(w, tuple) else new[w]


def _renumbered(waits: Sequence[Waits]) -> tuple[Waits, ...]:
    """The same with the numbers 0, 1, 2 ..., so that calls that are alike have the same."""
    new = {n: k for k, n in enumerate(sorted({0, *[n for w in waits for n in _numbers(w)]}))}
    return tuple([_mapped(w, new) if _any(w) else 0 for w in waits])


def _later(w: Waits, by: int) -> Waits:
    return _mapped(w, {n: n + by if n else 0 for n in _numbers(w)})
