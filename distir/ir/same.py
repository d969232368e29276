"""Structural equality: values, ops and functions compare by identity, `same` compares their contents."""

from __future__ import annotations

from typing import Any

from distir.ir.function import Attributes, Function, Op, Value


def same(f: Function, g: Function, names: bool = True) -> bool:
    """Whether two functions are equal: types, roles, ops, attributes, `of`, outputs, updates, callees, and all names.

    Without `names`, those of functions and values do not count (those of meshes are part of a type).
    """
    return difference(f, g, names) is None


def difference(f: Function, g: Function, names: bool = True) -> str | None:
    """The first difference between two functions in words, None if they are the `same`."""
    return _Comparison(names).functions(f, g)


class _Comparison:
    """Pairs known to be equal, so that each callee is compared once."""

    def __init__(self, names: bool) -> None:
        self.names = names
        self.known: set[tuple[Function, Function]] = set()

    def functions(self, f: Function, g: Function) -> str | None:
        if f is g or (f, g) in self.known:
            return None
        if self.names and f.name != g.name:
            return f"functions are named {f.name!r} and {g.name!r}"
        for what in ("inputs", "ops", "outputs"):
            if len(getattr(f, what)) != len(getattr(g, what)):
                return f"{f.name}: {len(getattr(f, what))} and {len(getattr(g, what))} {what}"
        value: dict[Value, Value] = {}
        ops: dict[Op, Op] = {}
        for a, b in zip(f.inputs, g.inputs, strict=True):
            value[a] = b
            if not self.values(a, b):
                return f"{f.name}: inputs {a} {a.role} and {b} {b.role}"
        for k, (a, b) in enumerate(zip(f.ops, g.ops, strict=True)):
            if found := self.ops(a, b, value):
                return f"{f.name}: op {k}: {found}"
            if (a.of is None) != (b.of is None) or (a.of is not None and ops.get(a.of) is not b.of):
                return f"{f.name}: op {k}: of {a.of} and of {b.of}"
            ops[a] = b
            value.update(zip(a.outputs, b.outputs, strict=True))
        for a, b in zip(f.outputs, g.outputs, strict=True):
            if value.get(a) is not b:
                return f"{f.name}: outputs %{a.name} and %{b.name}"
        if {value.get(a): value.get(b) for a, b in f.updates.items()} != g.updates:
            return f"{f.name}: updates {f.updates} and {g.updates}"
        if {value.get(a): shape for a, shape in f.sources.items()} != g.sources:
            return f"{f.name}: sources {f.sources} and {g.sources}"
        self.known.add((f, g))
        return None

    def values(self, a: Value, b: Value) -> bool:
        return a.type is b.type and a.role == b.role and (not self.names or a.name == b.name)

    def ops(self, a: Op, b: Op, value: dict[Value, Value]) -> str | None:
        if a.spec is not b.spec or len(a.inputs) != len(b.inputs) or len(a.outputs) != len(b.outputs):
            return f"{a} and {b}"
        for x, y in zip(a.inputs, b.inputs, strict=True):
            if value.get(x) is not y:
                return f"operands %{x.name} and %{y.name}"
        for x, y in zip(a.outputs, b.outputs, strict=True):
            if not self.values(x, y):
                return f"results {x} and {y}"
        return self.attributes(a.attributes, b.attributes)

    def attributes(self, a: Attributes, b: Attributes) -> str | None:
        if a is b:
            return None
        if a.keys() != b.keys():
            return f"attributes {sorted(a)} and {sorted(b)}"
        for name, x in a.items():
            if not self.equal(x, b[name]):
                return f"attribute {name}: {_short(x)} and {_short(b[name])}"
        return None

    def equal(self, x: Any, y: Any) -> bool:
        """1, 1.0 and True differ, as do 0.0 and -0.0; any two nan are equal."""
        if type(x) is not type(y):
            return False
        if isinstance(x, tuple):
            return len(x) == len(y) and all(map(self.equal, x, y))
        if isinstance(x, float):
            return repr(x) == repr(y)
        if isinstance(x, Function):
            return self.functions(x, y) is None
        return x == y


def _short(x: Any) -> str:
    return f"function {x.name}" if isinstance(x, Function) else repr(x)
