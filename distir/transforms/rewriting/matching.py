"""Pattern matching for fusion: walks back from a value through its producers, and replaces groups of ops by one op.

Patterns are over ops, constants and uses, never over names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from distir.ir.cached import producers
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import DType, Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.rewriting.cleanup import prune

Operand = Value | Callable[[FunctionMaker], Value]
"""A value, or a function that appends the ops that make it."""


class Found(NamedTuple):
    """A match: the `ops` that compute the value `root`, and the op that replaces them, whose first result it is."""

    root: Value
    ops: frozenset[Op]
    op_type: str
    operands: Sequence[Operand]
    attributes: dict[str, Any]


class Program:
    """A function to match patterns in, with its producers and uses."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.producers = producers(function)
        self.outputs = frozenset(function.outputs)

    @cached_property
    def uses(self) -> dict[Value, list[Op]]:
        """The ops that use each value."""
        found: dict[Value, list[Op]] = {}
        for op in self.function.ops:
            for v in dict.fromkeys(op.inputs):
                found.setdefault(v, []).append(op)
        return found

    @cached_property
    def differentiated(self) -> frozenset[Op]:
        """The ops that others are backward ops of."""
        return frozenset(op.of for op in self.function.ops if op.of is not None)

    def made_by(self, v: Value, *names: str) -> Op | None:
        """The op that makes `v`, if it is of one of these types."""
        op = self.producers.get(v)
        return op if op is not None and op.op_type in names else None

    def number(self, v: Value) -> float | None:
        """The value of `v` if it is a constant of one element."""
        op = self.made_by(v, "Constant")
        return float(op.attributes["value"][0]) if op is not None and len(op.attributes["value"]) == 1 else None

    def only_use(self, v: Value) -> Op | None:
        """The only op that uses `v`; None if there are none or several, or `v` is an output."""
        uses = self.uses.get(v, [])
        return uses[0] if len(uses) == 1 and v not in self.outputs else None

    def closed(self, found: Found) -> bool:
        """Whether all results of the group, except its root and constants, are used inside it alone."""
        return self.differentiated.isdisjoint(found.ops) and all(
            v is found.root
            or op.op_type == "Constant"
            or (v not in self.outputs and found.ops.issuperset(self.uses[v]))
            for op in found.ops
            for v in op.outputs
        )


class Trail:
    """Collects the ops of a match, walking back from a value."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ops: set[Op] = set()

    def step(self, v: Value, *names: str) -> Op | None:
        """The op that makes `v`, if it is of one of these types; it is added to the match."""
        op = self.program.made_by(v, *names)
        if op is not None:
            self.ops.add(op)
        return op

    def sides(self, op: Op) -> Iterator[tuple[Value, Value]]:
        """The two operands, in both orders."""
        a, b = op.inputs
        yield a, b
        yield b, a

    def factor(self, v: Value) -> tuple[Value, float]:
        """`v` as a value of its own shape times a number: through Mul and Div by constants of one element."""
        by = 1.0
        while (op := self.program.made_by(v, "Mul", "Div")) is not None:
            pairs = self.sides(op) if op.op_type == "Mul" else [op.inputs]
            for x, c in pairs:
                number = self.program.number(c)
                if number and shape_of(x) == shape_of(v):
                    by = by * number if op.op_type == "Mul" else by / number
                    self.ops.add(op)
                    v = x
                    break
            else:
                break
        return v, by


def epsilon(dtype: DType) -> float:
    """The unit roundoff: the maximum relative error of rounding to the dtype."""
    return {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype.name]


def rewrite(function: Function, find: Callable[[Program, Op], Found | None], *names: str) -> Function:
    """The function with every match of `find` replaced; it is called for each op of these types, from the last to the
    first.

    Matches with intermediate values that are used outside, or that overlap an earlier match, are not replaced. Values
    that remain are the same objects. Returns the function itself if nothing matches.
    """
    specs = tuple(map(lookup, names))
    ops = [op for op in reversed(function.ops) if op.spec in specs]
    if not ops:
        return function
    program = Program(function)
    found: dict[Value, Found] = {}
    taken: set[Op] = set()
    for op in ops:
        group = find(program, op) if op not in taken else None
        if group is not None and taken.isdisjoint(group.ops) and program.closed(group):
            found[group.root] = group
            taken |= {op for op in group.ops if op.op_type != "Constant"}
    return _replaced(function, found, taken) if found else function


def _replaced(function: Function, found: dict[Value, Found], taken: set[Op]) -> Function:
    maker = FunctionMaker(function.name)
    maker.inputs.extend(function.inputs)
    maker.set_outputs(function.outputs)
    maker.updates, maker.sources = dict(function.updates), dict(function.sources)
    maker.reserve(function.inputs)
    maker.reserve([v for op in function.ops for v in op.outputs])
    for op in function.ops:
        group = next((found[v] for v in op.outputs if v in found), None)
        if group is not None:
            _build(maker, group)
        elif op not in taken:
            maker.ops.append(op)
    return prune(maker.finalize())


def _build(maker: FunctionMaker, group: Found) -> None:
    """Append the replacing op; its first result is the root, the same Value; other new values are named after it."""
    first = len(maker.ops)
    operands = [x if isinstance(x, Value) else x(maker) for x in group.operands]
    maker.add_op(group.op_type, None, operands, group.attributes)
    last = maker.ops[-1]
    for op in maker.ops[first:-1]:
        for v in op.outputs:
            v.name = maker.fresh(f"{group.root.name}.{op.op_type.lower()}")
    for v in last.outputs[1:]:
        v.name = maker.fresh(f"{group.root.name}.saved")
    maker.ops[-1] = Op(last.spec, last.inputs, last.attributes, (group.root, *last.outputs[1:]))


def alike(a: Value, b: Value) -> bool:
    """Whether two values are tensors of the same type."""
    return isinstance(a.type, Tensor) and tensor(a) is b.type
