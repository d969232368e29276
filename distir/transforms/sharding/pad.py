"""Padding dims that do not divide: a vocabulary of 509 over 2 devices becomes one of 510.

Which dims: a weight's dim of odd size whose whole factor class is clean, so that it can be split once it divides; also
where ops need it whole that take its length (`unpadded`). What stands in the padding of an input is 0; where an op
reduces over a padded dim, or could otherwise let the padding into a result, it is first filled with the neutral value
(`neutral` of the op's spec). Inputs remember their source shape in their role: executors pad what they feed, and cut
what they give back. All other values remain the same objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir.ir.axes import Shape
from distir.ir.function import Attributes, Function, FunctionMaker, Op, Role, Value, type_of
from distir.ir.infer import infer
from distir.ir.placement import Shard, reductions, splits
from distir.ir.spec import FactorMapping
from distir.ir.type import Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.rewriting.laws import Law, rewrites
from distir.transforms.roles import weights
from distir.transforms.sharding.classes import Classes
from distir.transforms.sharding.graph import Signature, graph_of

WORTH = 8
"""A dim is padded only if that makes it longer by less than 1 / WORTH."""
Sizes = dict[tuple[int, int], int]
"""(value number, dim) -> padded size"""


def paddable(function: Function, n: int, multiple: int = 1) -> list[Sizes]:
    """The classes that padding would let split n ways, each with the padded size of all its dims.

    Each part is of a `multiple`, if that makes dims longer by little.
    """
    graph = graph_of(function)
    longer = {
        shape: [Shard(dim) for dim, size in enumerate(shape) if _padded_size(size, n, multiple) > size]
        for shape in {graph.shapes[v] for v in graph.weights}
    }
    starts = [(v, split) for v in graph.weights for split in longer[graph.shapes[v]]]
    if not starts:  # as most dims divide
        return []
    classes = _Classes(graph, 1, starts)
    found: list[Sizes] = []
    kept = classes.bad | classes.with_halos  # at the end of the dim, what is beside an element would be padding
    for op, row in zip(function.ops, classes.mappings, strict=True):
        if row:  # as few have
            kept |= {c for mapping, c in row if _of_integers(op, mapping) or _regroups(op, mapping)}
    for c, nodes in sorted(classes.members().items()):
        sizes = {graph.shapes[v][split.dim] for v, split in nodes}
        if c not in kept and len(sizes) == 1 and all(split.outer == 1 for _, split in nodes):
            size = _padded_size(sizes.pop(), n, multiple)
            found.append({(v, split.dim): size for v, split in nodes})
    return found


def _padded_size(size: int, n: int, multiple: int) -> int:
    """The size of a dim that is padded to divide n ways, each part of a `multiple` or else of any size; 0 if neither
    is worth it."""
    return next((m for k in (n * multiple, n) if (m := -(-size // k) * k) - size < size / WORTH), 0)


def _of_integers(op: Op, mapping: FactorMapping) -> bool:
    """Whether a result is reduced from integers alone, which are not filled."""
    along = [tensor(op.inputs[k]).dtype.floating for k, _ in splits(mapping.ins)]
    return bool(reductions(mapping.outs)) and not any(along)


def _regroups(op: Op, mapping: FactorMapping) -> bool:
    """Whether a count depends on the dim's length: that of the groups of a convolution."""
    if op.spec.local is None:
        return False
    longer = {slot: p.dim for slot, p in mapping.splits()}

    def twice(slot: int, v: Value) -> Tensor:
        dim = longer.get(slot)
        return Tensor(tensor(v).dtype, [2 * n if d == dim else n for d, n in enumerate(shape_of(v))])

    ins, outs = [twice(k, v) for k, v in enumerate(op.inputs)], [twice(~k, v) for k, v in enumerate(op.outputs)]
    made, takes = op.spec.local(op.attributes, ins, outs), op.spec.attributes
    return any(x != op.attributes.get(k, x) and takes[k].kind == "count" for k, x in made.items())


class _Classes(Classes):
    """The classes of dims for one device, also through ops that need a dim whole, but not its padding."""

    def mapping(self, sig: Signature, k: int, split: Shard) -> FactorMapping | None:
        return super().mapping(sig, k, split) or sig.spec.counted(sig.attrs, sig.ins, k, split)


@rewrites(Law.PADDED)
def pad(function: Function, chosen: Sequence[Sizes]) -> Function:
    """The function with these classes' dims padded; inputs and outputs remember their source shapes."""
    if not chosen:
        return function
    sizes = {node: size for one in chosen for node, size in one.items()}
    starts = [(v, Shard(dim)) for v, dim in sizes]
    # padded dims are followed through the mappings for one device
    rows = [[mapping for mapping, _ in row] for row in _Classes(graph_of(function), 1, starts).mappings]
    return Padder(function, sizes, rows).build()


def pad_like(function: Function, padded: Function) -> Function:
    """The function padded as another, its padded form, was: what a distributed program is compared with."""
    graph = graph_of(function)
    starts = [
        (i, Shard(dim))
        for i, (v, w) in enumerate(zip(function.inputs, padded.inputs, strict=False))
        if w.role and w.role.source
        for dim, (size, larger) in enumerate(zip(shape_of(v), used_shape(w), strict=False))
        if size < larger
    ]
    classes = _Classes(graph, 1, starts)
    members = classes.members()
    chosen: dict[int, Sizes] = {}
    for i, split in starts:
        size = used_shape(padded.inputs[i])[split.dim]
        c = classes.at[i][split]
        chosen[c] = {(v, s.dim): size for v, s in members[c]}
    return pad(function, list(chosen.values()))


def used_shape(v: Value) -> Shape:
    """The shape in which a program uses an input, which may be stored with more padding (`pad_state`)."""
    return v.role.used if v.role and v.role.used else shape_of(v)


class Padder:
    """Rebuilds a function with padded dims. `mappings` has for each op those for one device of dims that are padded."""

    def __init__(self, function: Function, sizes: Sizes, mappings: Sequence[Sequence[FactorMapping]]) -> None:
        self.function, self.sizes, self.mappings = function, sizes, mappings
        self.weights = frozenset(weights(function))
        self.graph = graph_of(function)
        self.maker = FunctionMaker(function.name)
        self.maker.reserve(self.graph.values)  # all values keep their names
        self.env: dict[Value, Value] = {}
        """What replaces values; those that are not in it remain."""
        self.tail: dict[tuple[Value, int], float] = {}  # known contents of the padding of a new value's dim
        self.filled: dict[tuple[Value, int, float], Value] = {}

    def type(self, v: Value) -> Tensor:
        i = self.graph.index[v]
        shape = [self.sizes.get((i, d), n) for d, n in enumerate(self.graph.shapes[i])]
        return Tensor(tensor(v).dtype, shape)

    def build(self) -> Function:
        for v in self.function.inputs:
            self._input(v)
        ops: dict[Op, Op] = {}
        for j, op in enumerate(self.function.ops):
            self._op(j, op, ops)
        outputs = [self._output(v) for v in self.function.outputs]
        self.maker.set_outputs(outputs)
        new = dict(zip(self.function.outputs, outputs, strict=True))
        self.maker.updates = {new[a]: self._now(b) for a, b in self.function.updates.items()}
        return self.maker.finalize()

    def _input(self, v: Value) -> None:
        t = self.type(v)
        role = v.role
        before = self.graph.shapes[self.graph.index[v]]
        if role is None and v in self.weights:
            role = Role("parameter")  # once one input has a role, roles say which are weights
        if t.shape != before:
            role = self._role(v, role)
        if t is not v.type or role is not v.role:
            self.env[v] = Value(v.name, t, role)
        self.maker.inputs.append(self._now(v))
        for d, (n, m) in enumerate(zip(before, t.shape, strict=True)):
            if n != m:
                self.tail[self.env[v], d] = 0.0

    def _now(self, v: Value) -> Value:
        """What replaces a value, or the value itself."""
        return self.env.get(v, v)

    def _role(self, v: Value, role: Role | None) -> Role:
        """The role of an input that is padded, before which it had `role`."""
        if role is None:
            return Role("data", None, shape_of(v))
        sizes = zip(shape_of(v), self.type(v).shape, role.used or (), strict=False)
        used = tuple([m if n != m else u for n, m, u in sizes]) or None
        return Role(role.kind, role.batch, role.source or shape_of(v), used)

    def _op(self, j: int, op: Op, ops: dict[Op, Op]) -> None:
        of = ops.get(op.of, op.of) if op.of else None
        mappings = self.mappings[j]
        if not mappings:  # it has no padded dim
            if of is not op.of or not self.env.keys().isdisjoint(op.inputs):
                ops[op] = op = Op(op.spec, tuple(map(self._now, op.inputs)), op.attributes, op.outputs, of)
            self.maker.ops.append(op)
            return
        ins = list(map(self._now, op.inputs))
        renews = not self.function.updates.keys().isdisjoint(op.outputs)
        for mapping in mappings:
            ins = self._clear(op, ins, mapping) if renews else self._fill(op, ins, mapping)
        attributes = dict(op.attributes)
        if op.spec.local:
            types = [self.type(v) for v in op.inputs], [self.type(v) for v in op.outputs]
            local = op.spec.local(op.attributes, *types)
            attributes.update({k: x for k, x in local.items() if k in attributes})
        if op.spec.unpadded:
            self._note_length(op, attributes)
        attrs = Attributes(attributes)
        types = infer(op.spec, attrs, tuple(map(type_of, ins)))
        outs = [v if v.type is t else Value(v.name, t) for v, t in zip(op.outputs, types, strict=True)]
        made = ops[op] = Op(op.spec, tuple(ins), attrs, tuple(outs), of)
        self.maker.ops.append(made)
        self.env.update([(v, w) for v, w in zip(op.outputs, outs, strict=True) if v is not w])
        for mapping in mappings:
            self._result(op, mapping, ins, made)

    def _note_length(self, op: Op, attributes: dict[str, Any]) -> None:
        """Say how long the dim was that an op counts from the end of, where it is padded."""
        slot, dim = op.spec.indexed(op.attributes) or (0, 0)
        i = self.graph.index[op.inputs[slot] if slot >= 0 else op.outputs[~slot]]
        shape = self.graph.shapes[i]
        dims = range(len(shape)) if dim is None else [dim % len(shape)]
        if any((i, d) in self.sizes for d in dims) and op.spec.unpadded is not None:
            attributes.setdefault(op.spec.unpadded, shape if dim is None else shape[dim])

    def _fill(self, op: Op, ins: list[Value], mapping: FactorMapping) -> list[Value]:
        """The operands, filled with the neutral value if a result is reduced over the padded dim."""
        if all(p.kind is None for p in mapping.outs):
            return ins
        value = op.spec.neutral(mapping)
        return [
            w if p.dim is None else self._filled(v, w, p.dim, value)
            for v, w, p in zip(op.inputs, ins, mapping.ins, strict=True)
        ]

    def _clear(self, op: Op, ins: list[Value], mapping: FactorMapping) -> list[Value]:
        """The operands, filled with 0 where an op gives the next values of inputs, and reduces over no padded dim.

        So these are 0 there, if it keeps zeros, and it is still the op that gives them, as ZeRO expects of optimizers.
        """
        if any(p.kind is not None for p in mapping.outs):
            return self._fill(op, ins, mapping)
        return [
            w if p.dim is None else self._filled(v, w, p.dim, 0.0)
            for v, w, p in zip(op.inputs, ins, mapping.ins, strict=True)
        ]

    def _filled(self, source: Value, v: Value, dim: int, value: float) -> Value:
        """`v` with `value` in its padding; integers as they are: padded rows of indices do not occur."""
        if self.tail.get((v, dim)) == value or not tensor(v).dtype.floating:
            return v
        key = v, dim, value
        if key not in self.filled:
            size = self.graph.shapes[self.graph.index[source]][dim]
            attributes = {"dim": dim, "size": size, "value": value}
            self.filled[key] = self.maker.add_op("FillTail", v.name, [v], attributes)
            self.tail[self.filled[key], dim] = value
        return self.filled[key]

    def _result(self, op: Op, mapping: FactorMapping, ins: Sequence[Value], made: Op) -> None:
        """A result's padding is 0 if the op is linear in operands whose padding is 0, or keeps zero.

        Or if it scatters: indices never point into the padding; or if the op takes the length of the dim.
        """
        slot, dim = op.spec.indexed(op.attributes) or (-1, None)
        if op.spec.unpadded is not None and slot >= 0 and dim is not None:
            rank = len(shape_of(op.inputs[slot]))
            if mapping.ins[slot].dim == dim % rank:
                self.tail.update([((made.outputs[k], p.dim), 0.0) for k, p in splits(mapping.outs)])
                return
        along = {k: p.dim for k, p in splits(mapping.ins)}
        known = {k: self.tail.get((ins[k], dim)) for k, dim in along.items()}
        if any(x is None or math.isinf(x) for x in known.values()):
            return  # 0 * inf is nan
        zero = {k for k, x in known.items() if x == 0.0}
        linear = any(s <= zero for s in op.spec.linear_sets(len(ins), op.attributes))
        indexed = op.spec.indexed(op.attributes)
        scatters = not along and indexed is not None and indexed[0] < 0
        if scatters or (along and linear) or (op.spec.keeps_zero and len(zero) == len(along) > 0):
            for k, p in splits(mapping.outs):
                self.tail[made.outputs[k], p.dim] = 0.0

    def _output(self, v: Value) -> Value:
        """The next value of an input is padded with zeros, as the input is; other outputs with anything."""
        w = self._now(v)
        i = self.graph.index[v]
        for d in range(len(self.graph.shapes[i])):
            if (i, d) in self.sizes and v in self.function.updates:
                w = self._filled(v, w, d, 0.0)
        if w.type is not v.type or v in self.function.sources:
            self.maker.sources[w] = self.function.sources.get(v, self.graph.shapes[i])
        return w
