"""Translation validation: a distributed program, its communication erased, computes the terms of its source.

Terms are hash-consed, so two values are the same term exactly if they are the same operations on the same inputs; a
callee is walked once for each distinct tuple of argument terms. Together with `verify`, whose types say that every
piece is where it must be and every microbatch counted once, this proves the outputs equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir.ir.errors import MismatchError
from distir.ir.function import Attributes, Function, Op, Value
from distir.ir.pause import no_collection
from distir.ir.spec import Spec
from distir.ir.type import Tensor

Term = Any
"""The number of a term; a tuple of terms for a bundle."""


@no_collection()
def validate(distributed: Function, source: Function) -> None:
    """Raises MismatchError that names the first output which is not the source's, and where the two part.

    Inputs and outputs correspond by position, and have the same source shapes. Both functions must have
    been through the same `decompose` (and `pad`).
    """
    terms = _Terms()
    inputs = _correspond(distributed, source)
    want = terms.walk(source, inputs)
    got = terms.walk(distributed, inputs)
    for v, w, a, b in zip(source.outputs, distributed.outputs, want, got, strict=True):
        if a != b:
            raise MismatchError(
                f"{distributed.name}: output %{w.name} is not %{v.name} of the source: {terms.difference(a, b)}"
            )
        if isinstance(v.type, Tensor) and isinstance(w.type, Tensor) and v.type.erased() is not w.type.erased():
            raise MismatchError(f"output %{w.name}: expected {v.type.erased()}, got {w.type.erased()}")
        if source.sources.get(v) != distributed.sources.get(w):
            raise MismatchError(_other_source(f"output %{w.name}", source.sources.get(v), distributed.sources.get(w)))
    mine, theirs = _updates(distributed), _updates(source)
    if mine != theirs:
        raise MismatchError(f"{distributed.name}: expected updates {theirs} (input: output), got {mine}")


def _updates(f: Function) -> dict[int, int]:
    """The number of each updated input, and that of the output."""
    inputs, outputs = {v: i for i, v in enumerate(f.inputs)}, {v: i for i, v in enumerate(f.outputs)}
    return {inputs[old]: outputs[new] for new, old in f.updates.items()}


def _correspond(distributed: Function, source: Function) -> list[Term]:
    for what, mine, theirs in (
        ("inputs", distributed.inputs, source.inputs),
        ("outputs", distributed.outputs, source.outputs),
    ):
        if len(mine) != len(theirs):
            raise MismatchError(f"{distributed.name}: expected {len(theirs)} {what}, got {len(mine)}")
    for v, w in zip(source.inputs, distributed.inputs, strict=True):
        if v.type.erased() is not w.type.erased():
            raise MismatchError(f"input %{w.name}: expected {v.type.erased()}, got {w.type.erased()}")
        want, got = (x.role.source if x.role else None for x in (v, w))
        if want != got:
            raise MismatchError(_other_source(f"input %{w.name}", want, got))
    return list(range(len(source.inputs)))


def _other_source(what: str, want: object, got: object) -> str:
    return f"{what}: expected {f'the source shape {want}' if want else 'no source shape'}, got {got or 'none'}"


class _Terms:
    def __init__(self) -> None:
        self.table: dict[tuple[Any, ...], int] = {}
        self.known: list[tuple[Any, ...] | None] = []
        self.calls: dict[tuple[Any, ...], list[Term]] = {}
        self.erased: dict[int, tuple[Attributes, Attributes]] = {}

    def attributes(self, attrs: Attributes) -> Attributes:
        """The attributes without those that only say where an op is."""
        if "device" not in attrs and "place" not in attrs:
            return attrs
        found = self.erased.get(id(attrs))
        if found is None:
            found = self.erased[id(attrs)] = attrs, attrs.without("device", "place")
        return found[1]

    def walk(self, function: Function, args: Sequence[Term]) -> list[Term]:
        if not self.known:
            self.known = [None] * len(args)
        env: dict[Value, Term] = dict(zip(function.inputs, args, strict=True))
        table, known, attributes = self.table, self.known, self.attributes
        for op in function.ops:
            ins = tuple([env[v] for v in op.inputs])
            if op.spec.comm is not None:
                outs = self.move(op, ins)
            else:
                key = (op.spec, attributes(op.attributes), ins)
                term = table.get(key)
                if term is None:
                    term = table[key] = len(known)
                    known.append(key)
                    known += [(None, k, term) for k in range(1, len(op.outputs))]
                outs = range(term, term + len(op.outputs))
            for v, t in zip(op.outputs, outs, strict=True):
                env[v] = t
        return [env[v] for v in function.outputs]

    def move(self, op: Op, ins: tuple[Term, ...]) -> Sequence[Term]:
        callee = op.callee
        if callee is not None:
            key = (callee, ins)
            if key not in self.calls:
                self.calls[key] = self.walk(callee, ins)
            return self.calls[key]
        bundle = op.spec.bundle
        if bundle is not None:
            return [ins] if bundle == "pack" else list(ins[0])
        if op.spec.name == "After":
            return ins[:1]
        if any(t != ins[0] for t in ins):
            other = next(t for t in ins if t != ins[0])
            raise MismatchError(f"{op}: joins different values over time: {self.difference(ins[0], other)}")
        return [ins[0]] * len(op.outputs)

    def difference(self, want: Term, got: Term) -> str:
        """Where two terms part, looking from the results towards the inputs."""
        if isinstance(want, tuple) or isinstance(got, tuple):
            for a, b in zip(want, got, strict=False) if isinstance(want, tuple) and isinstance(got, tuple) else ():
                if a != b:
                    return self.difference(a, b)
            return "bundles of different form"
        while True:
            a, b = self.known[want], self.known[got]
            if a is not None and b is not None and a[0] is b[0]:
                if a[0] is None:
                    if a[1] != b[1]:
                        return f"expected result {a[1]} of an op, got result {b[1]}"
                    want, got = a[2], b[2]
                    continue
                if a[1] == b[1] and len(a[2]) == len(b[2]):
                    want, got = next((x, y) for x, y in zip(a[2], b[2], strict=True) if x != y)
                    continue
            return f"expected {self.show(want)}, got {self.show(got)}"

    def show(self, term: int) -> str:
        key = self.known[term]
        if key is None:
            return f"input {term}"
        if key[0] is None:
            return f"result {key[1]} of {self.show(key[2])}"
        spec: Spec = key[0]
        attrs = ", ".join(f"{k}={v}" for k, v in key[1].items())
        return f"{spec.name}({attrs})"
