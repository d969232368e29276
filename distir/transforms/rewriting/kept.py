"""A rewrite proved by what it changes alone: the ops that both programs have need no terms."""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.function import Function, Op, Value
from distir.ir.validate import Term, Terms


def same_above_kept(before: Function, after: Function, terms: Terms) -> bool:
    """Whether the ops that only one program has give equal terms, if the values that ops of both make are equal.

    Then these are, too, by induction over the ops of `after`: the work grows with what a rewrite changes alone. False
    if equality may depend on ops of both, or `after` is not well-formed.
    """
    made, kept = {*before.inputs, *after.inputs}, set(before.ops) & set(after.ops)
    equal: dict[Value, Term] = {}
    terms.known = [None]

    def run(op: Op, env: dict[Value, Term]) -> Sequence[Term]:
        for v in op.inputs:
            if v not in env and v not in equal:
                equal[v] = len(terms.known)
                terms.known.append(None)
        return terms.results(op, tuple([env[v] if v in env else equal[v] for v in op.inputs]))

    want: dict[Value, Term] = {}
    got: dict[Value, Term] = {}
    for op in before.ops:
        if op not in kept:
            if op.callee is not None:
                return False
            want.update(zip(op.outputs, run(op, want), strict=True))
    for op in after.ops:
        if not made.issuperset(op.inputs) or not made.isdisjoint(op.outputs):
            return False
        made.update(op.outputs)
        if op not in kept:
            if op.callee is not None:
                return False
            got.update(zip(op.outputs, run(op, got), strict=True))
    return all([t == want[v] for v, t in got.items() if v in want])
