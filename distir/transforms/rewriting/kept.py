"""A rewrite proved by what it changes alone: the ops that both programs have need no terms."""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.function import Function, Op, Value
from distir.ir.validate import Term, Terms
from distir.transforms.rewriting.cleanup import live


def differing_above_kept(before: Function, after: Function, terms: Terms) -> list[Value] | None:
    """The values of both programs to which the ops that only one has give other terms, if the values that ops of both
    make are equal.

    If there are none, all are equal, by induction over the ops of `after`: the work grows with what a rewrite changes
    alone. If there are some, equality may depend on ops of both. None if that cannot be said so, or `after` is not
    well-formed.
    """
    made, there = {*before.inputs, *after.inputs}, set(after.ops)
    equal: dict[Value, Term] = {}
    terms.known = [None]

    def run(op: Op, env: dict[Value, Term]) -> Sequence[Term]:
        ins: list[Term] = []
        for v in op.inputs:
            term = env.get(v)
            if term is None and (term := equal.get(v)) is None:
                term = equal[v] = len(terms.known)
                terms.known.append(None)
            ins.append(term)
        return terms.results(op, tuple(ins))

    want: dict[Value, Term] = {}
    got: dict[Value, Term] = {}
    gone = [op for op in before.ops if op not in there]
    there.difference_update(before.ops)
    changed = [op for op in after.ops if op in there]
    if any([op.callee is not None for op in (*gone, *changed)]):
        return None
    for op in gone:
        want.update(zip(op.outputs, run(op, want), strict=True))
    for op in after.ops:
        if not made.issuperset(op.inputs) or not made.isdisjoint(op.outputs):
            return None
        made.update(op.outputs)
    for op in live(changed, want):  # others make new values alone
        got.update(zip(op.outputs, run(op, got), strict=True))
    return [v for v, t in got.items() if v in want and t != want[v]]
