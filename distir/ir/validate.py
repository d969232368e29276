"""Translation validation: a distributed program, its communication erased, computes the terms of its source.

Terms are hash-consed, so two values are the same term exactly if they are the same operations on the same inputs; a
callee is walked once for each distinct tuple of argument terms. Together with `verify`, whose types say that every
piece is where it must be and every microbatch counted once, this proves the outputs equal.

A sum of sums is the sum of all their operands, in any order. The cast of a sum is the sum of the casts, up to rounding,
if the cast is linear (not towards integers), and so with all that is linear in its operands together.

An op that only one of two programs has is compared by its definition: a mean that one of them decomposes gives the same
terms in both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from distir.ir.definition import WHERE, Definition, definition_of
from distir.ir.errors import MismatchError
from distir.ir.exact_attributes import Form
from distir.ir.function import Attributes, Function, Op, Value, is_cast
from distir.ir.pause import no_collection
from distir.ir.spec import Spec
from distir.ir.type import Tensor

Term = int
"""The number of a term: of a bundle below 0."""
Kind = tuple[Spec | None, int]
"""What is done to the operands of a term: an op and the number of its attributes; (None, k) for result k of a term."""
Key = tuple[Kind, tuple[Any, ...]]
"""A kind, and the operands."""


@no_collection()
def validate(distributed: Function, source: Function) -> list[Definition]:
    """Raises MismatchError: the first output that differs from the source's, and the first difference in its terms.

    Inputs and outputs correspond by position, and have the same source shapes: what is padded is compared with a source
    that is. Returns the definitions of ops that the proof relies on.
    """
    terms = Terms(specs(distributed) & specs(source))
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
    mine, theirs = positions(distributed), positions(source)
    if mine != theirs:
        raise MismatchError(f"{distributed.name}: expected updates {theirs} (input: output), got {mine}")
    return terms.definitions


def specs(function: Function) -> frozenset[Spec]:
    """All ops of a function and of those it calls."""
    return frozenset([op.spec for f in (function, *function.callees()) for op in f.ops])


def positions(f: Function) -> dict[int, int]:
    """The position of each updated input, and that of the output."""
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
        want, got = v.role.source if v.role else None, w.role.source if w.role else None
        if want != got:
            raise MismatchError(_other_source(f"input %{w.name}", want, got))
    return list(range(len(source.inputs)))


def _other_source(what: str, want: object, got: object) -> str:
    return f"{what}: expected {f'the source shape {want}' if want else 'no source shape'}, got {got or 'none'}"


def _adds(spec: Spec, operands: int) -> bool:
    """Whether an op has one result, and several operands in all of which together it is linear, whatever its
    attributes."""
    return operands > 1 and spec.outputs == 1 and frozenset(range(operands)) in spec.linear_sets(operands)


class Terms:
    """Numbers for the terms of functions: equal ones for the same operations on the same arguments.

    Ops that have a definition are numbered by that, but for those `shared`. Communication is erased.
    """

    def __init__(self, shared: Collection[Spec] = ()) -> None:
        self.shared = shared
        self.definitions: list[Definition] = []
        """Those that have been used."""
        self.defined: dict[tuple[Any, ...], Definition | None] = {}
        self.table: dict[Kind, dict[tuple[Any, ...], Sequence[Term]]] = {}
        """By kind and operands the terms of the results."""
        self.known: list[Key | None] = []
        self.bundles: dict[Term, tuple[Term, ...]] = {}
        self.packed: dict[tuple[Term, ...], Term] = {}
        """The other way round."""
        self.calls: dict[tuple[Any, ...], list[Term]] = {}
        self.forms: dict[Attributes, int] = {}
        self._numbers: dict[Form, int] = {}
        self._kinds: dict[tuple[Spec, Form], tuple[Kind, dict[tuple[Any, ...], Sequence[Term]]]] = {}
        """Of the ops whose terms are those of their operands alone: all but communication, sums, casts and what is
        defined."""

    def attributes(self, attrs: Attributes) -> int:
        """The number of the attributes without those that only say where an op is."""
        found = self._numbers.get(attrs.form)
        if found is None:
            form = attrs.without(*WHERE)
            found = self._numbers[attrs.form] = self.forms.setdefault(form, len(self.forms))
        return found

    def walk(self, function: Function, args: Sequence[Term]) -> list[Term]:
        if not self.known:
            self.known = [None] * len(args)
        env: dict[Value, Term] = dict(zip(function.inputs, args, strict=True))
        term, kinds = env.__getitem__, self._kinds
        for op in function.ops:
            ins, outs = tuple(map(term, op.inputs)), op.outputs
            found = kinds.get((op.spec, op.attributes.form))
            if found is None:
                results = self.results(op, ins)
            else:
                results = found[1].get(ins) or self.number(found[0], ins, len(outs))
            if len(outs) == 1:  # as most
                (env[outs[0]],) = results
            else:
                env.update(zip(outs, results, strict=True))
        return [env[v] for v in function.outputs]

    def results(self, op: Op, ins: tuple[Term, ...]) -> Sequence[Term]:
        """The terms of an op's results, given those of its operands."""
        spec = op.spec
        if spec.comm is not None:
            return self.move(op, ins)
        alone = spec in self.shared or spec.meaning is None
        if not alone and (found := self.definition(op)) is not None:
            return self.walk(found.parts, ins)
        kind = spec, self.attributes(op.attributes)
        if is_cast(op):
            return (self.cast(kind, ins[0]),)
        if spec.addends:
            ins = self.summed(spec, ins)
        elif alone and (
            spec.dtype is None or len(ins) != 1
        ):  # else the next may be a cast: that depends on the operand
            self._kinds[spec, op.attributes.form] = kind, self.table.setdefault(kind, {})
        return self.number(kind, ins, len(op.outputs))

    def summed(self, spec: Spec, ins: tuple[Term, ...]) -> tuple[Term, ...]:
        """The operands of a sum, those of sums among them, in any order: addition is associative and commutative."""
        nested = [(k, self.known[t]) for k, t in enumerate(ins)]
        flat = [x for k, key in nested for x in (key[1] if key is not None and key[0][0] is spec else ins[k : k + 1])]
        return tuple(sorted(flat))

    def cast(self, kind: Kind, term: Term) -> Term:
        """The term of a linear cast: of a sum, or what else is linear in all its operands, that of their casts."""
        known = self.table.setdefault(kind, {})
        todo = [term]
        while todo:
            t = todo[-1]
            key = self.known[t] if (t,) not in known else None
            inner = key[0][0] if key is not None else None
            if key is None or inner is None or not _adds(inner, len(key[1])):
                self.number(kind, (t,))
                todo.pop()
                continue
            left = [x for x in key[1] if (x,) not in known]
            if left:
                todo += left
                continue
            parts = tuple([known[x,][0] for x in key[1]])
            parts = self.summed(inner, parts) if inner.addends else parts
            known[t,] = self.number(key[0], parts)
            todo.pop()
        return known[term,][0]

    def number(self, kind: Kind, operands: tuple[Any, ...], results: int = 1) -> Sequence[Term]:
        """Terms for results that a kind and operands alone identify."""
        known = self.table.setdefault(kind, {})
        found = known.get(operands)
        if found is None:
            term = len(self.known)
            self.known.append((kind, operands))
            found = (term,)
            if results != 1:
                self.known += [((None, k), (term,)) for k in range(1, results)]
                found = range(term, term + results)
            known[operands] = found
        return found

    def definition(self, op: Op) -> Definition | None:
        """Of an op, worked out once for operands alike."""
        key = op.spec, self.attributes(op.attributes), *[v.type.erased() for v in op.inputs]
        if key not in self.defined:
            found = self.defined[key] = definition_of(op)
            if found is not None:
                self.definitions.append(found)
        return self.defined[key]

    def move(self, op: Op, ins: tuple[Term, ...]) -> Sequence[Term]:
        spec, callee = op.spec, op.callee
        if callee is not None:
            found = self.calls.get((callee, ins))
            if found is None:
                found = self.calls[callee, ins] = self.walk(callee, ins)
            return found
        if spec.bundle is not None:
            return [self.pack(ins)] if spec.bundle == "pack" else self.bundles[ins[0]]
        if spec.comm is not None and spec.comm.awaits:
            ins = tuple([t for k, t in enumerate(ins) if k not in spec.comm.awaits])
        if ins.count(ins[0]) < len(ins):
            other = next(t for t in ins if t != ins[0])
            raise MismatchError(f"{op}: joins different values over time: {self.difference(ins[0], other)}")
        return [ins[0]] * len(op.outputs)

    def pack(self, members: tuple[Term, ...]) -> Term:
        """The term of a bundle."""
        term = self.packed.get(members)
        if term is None:
            term = self.packed[members] = ~len(self.packed)
            self.bundles[term] = members
        return term

    def difference(self, want: Term, got: Term) -> str:
        """The first difference between two terms, from the results towards the inputs."""
        if want < 0 or got < 0:
            for a, b in zip(self.bundles.get(want, ()), self.bundles.get(got, ()), strict=False):
                if a != b:
                    return self.difference(a, b)
            return "bundles of different form"
        while True:
            a, b = self.known[want], self.known[got]
            if a is not None and b is not None and a[0][0] is b[0][0]:
                (spec, k), (_, other) = a[0], b[0]
                if spec is None and k != other:
                    return f"expected result {k} of an op, got result {other}"
                if k == other and len(a[1]) == len(b[1]):
                    want, got = next((x, y) for x, y in zip(a[1], b[1], strict=True) if x != y)
                    continue
            return f"expected {self.show(want)}, got {self.show(got)}"

    def show(self, term: int) -> str:
        key = self.known[term]
        if key is None:
            return f"input {term}"
        (spec, k), operands = key
        if spec is None:
            return f"result {k} of {self.show(*operands)}"
        attrs = ", ".join(f"{k}={v}" for k, v in list(self.forms)[k].items())
        return f"{spec.name}({attrs})"
