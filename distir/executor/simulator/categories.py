"""The categories of memory: parameters, gradients, optimizer state, activations or buffers.

Derived from roles, types and dataflow, never from names. Of the values a program computes:

- a next parameter or optimizer state (`Function.updates`) is of that category;
- a sum over microbatches is a gradient; so is what a weight's update uses that has the weight's shape, back to the op
  that made it;
- what a body makes of parameters alone and gives to its caller, such as a weight in 16 bits, counts with these;
- what a body otherwise gives to its caller, and what a forward op makes and a backward op uses, is an activation; so is
  everything a program makes that has no backward op;
- the rest is a buffer, as are data and constants.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from distir.executor.simulator.equal_callees import shapes_of
from distir.ir.axes import Shape
from distir.ir.cached import cached
from distir.ir.function import Function, Op, Value
from distir.ir.mesh_form import MeshForm
from distir.ir.spec import lookup
from distir.ir.type import Tensor, Tuple, Type

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "buffers")
PARAMETER, GRADIENT, STATE, ACTIVATION, BUFFER = range(5)
_OF_ROLE = {"parameter": PARAMETER, "state": STATE}
Leaf = tuple[Value, int]
"""A value, and the number of a tensor in it if it is a bundle."""
Dependence = tuple[int, ...] | None
"""What each tensor of a value depends on; None if all depend on other things than parameters."""
Key = tuple[Function, tuple[Dependence, ...]]
"""A function, and its arguments."""


def leaves(t: Type) -> list[Tensor]:
    """The tensors of a type, in order."""
    return [x for part in t.types for x in leaves(part)] if isinstance(t, Tuple) else [t]


def tensors_in(t: Type) -> int:
    """The number of tensors of a type."""
    return sum([tensors_in(x) for x in t.types]) if isinstance(t, Tuple) else 1


class Categories:
    """The categories of a program's values; with `here`, of those that are where this says, by their types."""

    def __init__(self, main: Function, here: Callable[[Type], bool] | None = None) -> None:
        self.main = main
        self.labels: dict[Leaf, int] = {}
        self._producers: dict[Function, dict[Value, Op]] = {}
        self._inputs: dict[Function, dict[Value, int]] = {}
        self._parts: dict[Op, Parts] = {}
        self._rows: dict[Op, list[list[Value]]] = {}
        self._leaves: dict[Type, list[Tensor]] = {}
        self._kept: dict[tuple[object, ...], bool] = {}
        self._callers = _callers(main)
        self._call, self._pack, self._unpack = lookup("Call"), lookup("Pack"), lookup("Unpack")
        callees = main.callees()
        updates = list(main.updates.items())
        if here is not None:
            callees = [f for f in callees if any([here(v.type) for v in f.outputs])]
            sent = _sent_shapes(main)
            if sent is not None:
                updates = [(v, old) for v, old in updates if here(old.type) or leaves(old.type)[0].global_shape in sent]
        for out, source in updates:
            kind = _OF_ROLE.get(source.kind or "", BUFFER)
            for i in range(tensors_in(out.type)):
                self._label(self._origin(main, (out, i)), kind, source)
        owned = _owned(main)
        for callee in callees:
            for v in callee.outputs:
                for i in range(tensors_in(v.type)):
                    at, leaf = self._origin(callee, (v, i))
                    if leaf not in self.labels:
                        self.labels[leaf] = PARAMETER if owned.has(at, leaf) else ACTIVATION
        self._activations()

    def of_input(self, v: Value) -> int:
        """The category of an input of the program."""
        return _OF_ROLE.get(v.kind or "", BUFFER)

    def of(self, v: Value, i: int, t: Tensor) -> int:
        """The category of tensor number i, of type t, of a value that an op makes."""
        found = self.labels.get((v, i), BUFFER)
        return GRADIENT if found in (ACTIVATION, BUFFER) and t.over_time.kind is not None else found

    def _producers_of(self, f: Function) -> dict[Value, Op]:
        found = self._producers.get(f)
        if found is None:
            found = self._producers[f] = f.producers()
        return found

    def _producer(self, f: Function, v: Value) -> Op | None:
        return self._producers_of(f).get(v)

    def _origin(self, f: Function, leaf: Leaf) -> tuple[Function, Leaf]:
        """The op that allocates a tensor's buffer, found through views, bundles and calls."""
        producers = self._producers_of(f)
        while True:
            v, i = leaf
            op = producers.get(v)
            if op is None or not op.inputs:
                return f, leaf
            if op.spec is self._call:
                f = op.attributes["callee"]
                producers = self._producers_of(f)
                leaf = f.outputs[self._parts_of(op, op.outputs).number[v]], i
            elif op.spec is self._pack:
                leaf = self._parts_of(op, op.inputs).member(i)
            elif op.spec is self._unpack:
                parts = self._parts_of(op, op.outputs)
                leaf = op.inputs[0], i + parts.starts[parts.number[v]]
            elif op.spec.alias:
                leaf = op.inputs[0], i
            else:
                return f, leaf

    def _parts_of(self, op: Op, values: tuple[Value, ...]) -> Parts:
        """Where the tensors of an op's operands or results are, counted through; an op is asked for one of them."""
        found = self._parts.get(op)
        if found is None:
            found = self._parts[op] = Parts(values)
        return found

    def _operands(self, op: Op, v: Value) -> Sequence[Value]:
        """The operands that a result depends on: of an op that repeats another, those of its repetition."""
        if op.spec.each is None:
            return op.inputs
        k = self._parts_of(op, op.outputs).number[v] // op.spec.each.count(op.attributes)
        rows = self._rows.get(op)
        if rows is None:
            rows = self._rows[op] = op.spec.rows(op.attributes, op.inputs)
        return rows[k]

    def _leaf(self, v: Value, i: int) -> Tensor:
        """Tensor number i of a value."""
        if isinstance(v.type, Tensor):
            return v.type
        if v.type not in self._leaves:
            self._leaves[v.type] = leaves(v.type)
        return self._leaves[v.type][i]

    def _input(self, f: Function, v: Value) -> int:
        """The number of an input."""
        if f not in self._inputs:
            self._inputs[f] = {v: k for k, v in enumerate(f.inputs)}
        return self._inputs[f][v]

    def _label(self, at: tuple[Function, Leaf], kind: int, source: Value) -> None:
        f, leaf = at
        if self._producer(f, leaf[0]) is None:
            return
        self.labels[leaf] = kind
        if kind == PARAMETER:
            self._gradients(f, leaf, source)

    def _gradients(self, f: Function, leaf: Leaf, weight: Value) -> None:
        """Label what a weight's update uses that has its shape, as far back as ops keep that shape."""
        shape = leaves(weight.type)[0].global_shape
        todo, seen = [(f, leaf)], {leaf}
        while todo:
            f, (v, i) = todo.pop()
            op = self._producer(f, v)
            if op is None:
                if f in self._callers:  # an operand of the body
                    caller, call = self._callers[f]
                    found = self._origin(caller, (call.inputs[self._input(f, v)], i))
                    if found[1] not in seen:
                        seen.add(found[1])
                        todo.append(found)
                continue
            if v is not leaf[0] and self.labels.setdefault((v, i), GRADIENT) == PARAMETER:
                continue
            if v is not leaf[0] and not self._keeps_shape(op):
                continue
            for x in self._operands(op, v):
                where, found = self._origin(f, (x, 0))
                if found not in seen and self._leaf(*found).global_shape == shape:
                    seen.add(found)
                    todo.append((where, found))

    def _keeps_shape(self, op: Op) -> bool:
        """Whether the op works point by point, or moves data only."""
        if op.spec.comm is not None:
            return True
        key = op.spec, op.attributes.form, *[v.type for v in op.inputs]
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = _is_pointwise(op)
        return found

    def _activations(self) -> None:
        main = self.main
        backward = [op for op in main.ops if op.of is not None]
        if not backward:
            if not any(op.callee for op in main.ops):
                for op in main.ops:
                    for v in op.outputs:
                        self.labels.setdefault((v, 0), ACTIVATION)
            return
        for op in backward:
            for x in op.inputs:
                _, leaf = self._origin(main, (x, 0))
                maker = self._producer(main, leaf[0])
                if maker is not None and maker.of is None:
                    self.labels.setdefault(leaf, ACTIVATION)


@cached
def _sent_shapes(main: Function) -> frozenset[Shape] | None:
    """The shapes of what a program sends from one place to another; None if that is not known.

    What has none of these shapes, such as the gradient of a weight that is not tied, is where the weight is.
    """
    if len(shapes_of(main)) < len(main.callees()):  # a callee may be in several places
        return None
    found: set[Shape] = set()
    for op in main.ops:
        tensors = [t for v in (*op.inputs, *op.outputs) for t in leaves(v.type)] if op.callee is None else []
        if len({t.device for t in tensors}) > 1:
            found.update([t.global_shape for t in tensors])
    return frozenset(found)


@cached
def _callers(main: Function) -> dict[Function, tuple[Function, Op]]:
    """The one call of each function that is called once, and the function that it is in."""
    found: dict[Function, tuple[Function, Op]] = {}
    many: set[Function] = set()
    for f in (main, *main.callees()):
        for op in f.ops:
            if op.callee is not None and (op.callee in found or op.callee in many):
                found.pop(op.callee, None)
                many.add(op.callee)
            elif op.callee is not None:
                found[op.callee] = f, op
    return found


@cached
def _owned(main: Function) -> _Owned:
    return _Owned(main)


class _Owned:
    """Tells which tensors a program computes of parameters alone, in callees too.

    Callees that are equal up to their mesh are walked once, in the first of them.
    """

    NONE, OWNED, OTHER = range(3)
    """What a tensor depends on: nothing, parameters alone, anything else."""

    def __init__(self, main: Function) -> None:
        self._shapes = shapes_of(main)
        self._first: dict[MeshForm, Function] = {}
        """The first function of each shape."""
        self._places: dict[Function, dict[Value, Value]] = {}
        """By function the value of the first that is at the place of each of its own."""
        self._rows: dict[Function, dict[Key, dict[Value, Dependence]]] = {}
        """What a function's values depend on, for each of the arguments that it is called with; without those of which
        all tensors depend on other things."""
        self._walked: dict[Key, dict[Value, Dependence]] = {}
        self._walk(main, tuple([self._of_input(v) for v in main.inputs]))

    def _of_input(self, v: Value) -> Dependence:
        return (self.OWNED,) * tensors_in(v.type) if v.kind == "parameter" else None

    def has(self, f: Function, leaf: Leaf) -> bool:
        """Whether a tensor of `f` is computed of parameters alone, in all calls."""
        v, i = leaf
        rows = self._rows.get(f, {})
        v = self._place(f, v) if rows else v
        found = [row.get(v) for row in rows.values()]
        return max([self.OTHER if x is None else x[i] for x in found], default=self.NONE) == self.OWNED

    def _alike(self, f: Function) -> Function:
        """The first function that is equal to `f` up to its mesh."""
        shape = self._shapes.get(f)
        return f if shape is None else self._first.setdefault(shape[0], f)

    def _place(self, f: Function, v: Value) -> Value:
        first = self._alike(f)
        if first is f:
            return v
        if f not in self._places:
            pairs = zip(f.ops, first.ops, strict=True)
            self._places[f] = dict(zip(f.inputs, first.inputs, strict=True)) | {
                x: y for a, b in pairs for x, y in zip(a.outputs, b.outputs, strict=True)
            }
        return self._places[f][v]

    def _walk(self, f: Function, args: tuple[Dependence, ...]) -> list[Dependence]:
        first = self._alike(f)
        key = first, args
        env = self._walked.get(key)
        if env is None:
            env = self._walked[key] = self._depend(first, args)
        self._rows.setdefault(f, {})[key] = env
        return [env.get(v) for v in first.outputs]

    def _depend(self, f: Function, args: tuple[Dependence, ...]) -> dict[Value, Dependence]:
        env: dict[Value, Dependence] = {v: x for v, x in zip(f.inputs, args, strict=True) if x is not None}
        for op in f.ops:
            if op.callee is not None:
                found = self._walk(op.callee, tuple([env.get(v) for v in op.inputs]))
                env.update([(v, given) for v, given in zip(op.outputs, found, strict=True) if given is not None])
            elif op.spec.bundle == "pack":
                if not env.keys().isdisjoint(op.inputs):
                    rows = [env.get(v) or (self.OTHER,) * tensors_in(v.type) for v in op.inputs]
                    env[op.outputs[0]] = tuple(itertools.chain.from_iterable(rows))
            elif op.spec.bundle == "unpack":
                if (row := env.get(op.inputs[0])) is not None:
                    members = iter(row)
                    env.update([(v, tuple(itertools.islice(members, tensors_in(v.type)))) for v in op.outputs])
            else:
                kind = self._kind(env, op.inputs[:1] if op.spec.alias else op.inputs)  # what a view, or `After`, is of
                if kind != self.OTHER:
                    env.update([(v, (kind,) * tensors_in(v.type)) for v in op.outputs])
        return env

    def _kind(self, env: Mapping[Value, Dependence], operands: Iterable[Value]) -> int:
        """What the results of an op depend on, all of them alike."""
        found = self.NONE
        for v in operands:
            given = env.get(v)
            if given is None:  # as most
                return self.OTHER
            found = max((found, *given))
        return found


class Parts:
    """Values in a row: the number of each, and at which tensor it starts if all their tensors are counted through."""

    def __init__(self, values: tuple[Value, ...]) -> None:
        self.values = values
        self.number = {v: k for k, v in reversed(list(enumerate(values)))}
        sizes = [tensors_in(v.type) for v in values]
        self.starts = [0, *itertools.accumulate(sizes)]

    def member(self, i: int) -> Leaf:
        """The value that has tensor number i, and its number there."""
        k = bisect.bisect_right(self.starts, i) - 1
        return self.values[k], i - self.starts[k]


def _is_pointwise(op: Op) -> bool:
    """Whether the op works point by point."""
    shapes = [v.type.global_shape for v in op.inputs if isinstance(v.type, Tensor)]
    factors = op.spec.factors(op.attributes, shapes)
    return factors is not None and not factors.kinds and all(s in ((), shapes[0]) for s in shapes)
