"""What a rewrite changes alone proves it, or the whole programs are compared (`test_claims`)."""

from __future__ import annotations

from distir.ir import Function, FunctionMaker
from distir.ir.function import Op
from distir.ir.spec import lookup
from distir.ir.type import Float, Tensor
from distir.ir.validate import Terms, specs
from distir.transforms.rewriting.kept import same_above_kept


def proved(before: Function, ops: list[Op]) -> bool:
    """Whether these ops in place of `before`'s are proved by what changes."""
    after = Function("after", before.inputs, tuple(ops), before.outputs)
    return same_above_kept(before, after, Terms(specs(before) & specs(after)))


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
