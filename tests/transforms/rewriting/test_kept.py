"""What a rewrite changes alone proves it, or the whole programs are compared (`test_claims`)."""

from __future__ import annotations

from typing import Any

import pytest

from distir.executor.reference.sequential import evaluate
from distir.ir import Function, FunctionMaker
from distir.ir.errors import MismatchError
from distir.ir.function import Op
from distir.ir.spec import lookup
from distir.ir.type import Float, Tensor
from distir.ir.validate import Terms, specs
from distir.transforms.rewriting.claims import check_rewrite
from distir.transforms.rewriting.kept import differing_above_kept


def proved(before: Function, ops: list[Op]) -> bool:
    """Whether these ops in place of `before`'s are proved by what changes."""
    after = Function("after", before.inputs, tuple(ops), before.outputs)
    return differing_above_kept(before, after, Terms(specs(before) & specs(after))) == []


def test_what_changes_alone_proves_a_rewrite() -> None:
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (4, 4)))
    a = maker.emit("Neg", x)
    b = maker.emit("Neg", x)
    c = maker.emit("Add", a, b)
    d = maker.emit("Exp", c)
    maker.set_outputs([d])
    before = maker.finalize()
    neg, again, add, exp = before.ops
    copy = Op(add.spec, add.inputs, add.attributes, add.outputs)
    assert proved(before, [neg, again, copy, exp])
    other = Op(lookup("Sub"), add.inputs, add.attributes, add.outputs)
    assert not proved(before, [neg, again, other, exp])
    assert not proved(before, [neg, again, exp, copy])  # not in order
    assert not proved(before, [neg, again, copy, copy, exp])  # made twice
    # that a and b are equal is seen below: the terms of both are needed
    assert not proved(before, [neg, Op(add.spec, (a, a), add.attributes, add.outputs), exp])


def test_the_few_values_that_differ_are_tested_without_the_terms_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """x + x as x - (-x), between two chains that both programs have; x - x is not the same."""
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (4, 4)))
    for _ in range(50):
        x = maker.emit("Tanh", x)
    doubled = maker.emit("Add", x, x)
    y = doubled
    for _ in range(50):
        y = maker.emit("Tanh", y)
    maker.set_outputs([y])
    before = maker.finalize()
    numbered: list[Op] = []
    results = Terms.results

    def counting(terms: Terms, op: Op, ins: Any) -> Any:
        numbered.append(op)
        return results(terms, op, ins)

    monkeypatch.setattr(Terms, "results", counting)

    def rewritten(negated: bool) -> Function:
        beside = FunctionMaker("beside")
        beside.inputs.append(x)
        y = beside.emit("Neg", x) if negated else x
        op = Op(lookup("Sub"), (x, y), before.ops[50].attributes, (doubled,))
        return Function("f", before.inputs, (*before.ops[:50], *beside.ops, op, *before.ops[51:]), before.outputs)

    check_rewrite(before, rewritten(negated=True), evaluate)
    assert len(numbered) < 10
    with pytest.raises(MismatchError, match="a rewrite of Add as Sub does not compute the same"):
        check_rewrite(before, rewritten(negated=False), evaluate)
