"""Structural equality: whatever differs is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distir.ir import Device, Function, Role, parse, pformat, same
from distir.ir.function import Attributes
from distir.ir.same import difference
from distir.ir.spec import lookup
from distir.ir.type import Float64, Tensor
from tests.ir.programs import pipeline


def copy() -> Function:
    return parse(pformat(pipeline()))


def attribute(f: Function, k: int, **new: object) -> None:
    f.ops[k].attributes = Attributes({**f.ops[k].attributes, **new})


def swap_operands(f: Function) -> None:
    f.ops[-1].inputs = (f.ops[-1].inputs[0], f.ops[-1].inputs[2], f.ops[-1].inputs[1])


def callee(f: Function) -> Function:
    found = f.ops[-1].callee
    assert found is not None
    return found


CHANGES: dict[str, Callable[[Function], object]] = {
    "name": lambda f: setattr(f, "name", "other"),
    "inputs": lambda f: setattr(f, "inputs", f.inputs[:-1]),
    "ops": lambda f: setattr(f, "ops", f.ops[:-1]),
    "outputs": lambda f: setattr(f, "outputs", f.outputs[::-1]),
    "fewer outputs": lambda f: setattr(f, "outputs", f.outputs[:1]),
    "updates": lambda f: f.updates.clear(),
    "sources": lambda f: f.sources.update({f.outputs[0]: (3,)}),
    "input name": lambda f: setattr(f.inputs[0], "name", "other"),
    "result name": lambda f: setattr(f.ops[0].outputs[0], "name", "other"),
    "role": lambda f: setattr(f.inputs[0], "role", Role("state")),
    "type": lambda f: setattr(f.ops[0].outputs[0], "type", Tensor(Float64(), (1,))),
    "operands": swap_operands,
    "number of operands": lambda f: setattr(f.ops[1], "inputs", f.ops[1].inputs[:-1]),
    "number of results": lambda f: setattr(f.ops[-1], "outputs", f.ops[-1].outputs[:-1]),
    "op": lambda f: setattr(f.ops[0], "spec", lookup("Neg")),
    "attribute": lambda f: attribute(f, 0, to=Device("gpu", 99)),
    "new attribute": lambda f: attribute(f, 0, extra=None),
    "int for bool": lambda f: attribute(callee(f), 2, value=(True,)),
    "sign of zero": lambda f: attribute(callee(f), 2, value=(-0.125, -0.0)),
    "of": lambda f: setattr(f.ops[3], "of", f.ops[1]),
    "callee": lambda f: attribute(callee(f), 0, axis="dp"),
    "callee name": lambda f: setattr(callee(f), "name", "other"),
    "microbatch": lambda f: attribute(f, 1, mb=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_is_found(change: str) -> None:
    f = copy()
    assert same(f, pipeline())
    CHANGES[change](f)
    assert not same(f, pipeline())
    assert not same(pipeline(), f)
    assert difference(f, pipeline())


@pytest.mark.parametrize("change", ["name", "input name", "result name", "callee name"])
def test_names_may_be_left_out(change: str) -> None:
    f = copy()
    CHANGES[change](f)
    assert same(f, pipeline(), names=False)


@pytest.mark.parametrize(("a", "b"), [(1, True), (1, 1.0), (0.0, -0.0), ((1,), (1.0,)), ((), None), ("1", 1)])
def test_attributes_that_python_may_hold_equal(a: object, b: object) -> None:
    f, g = copy(), copy()
    attribute(f, 0, x=a)
    attribute(g, 0, x=b)
    assert not same(f, g)


def test_nan_is_nan() -> None:
    f, g = copy(), copy()
    attribute(f, 0, x=(float("nan"),))
    attribute(g, 0, x=(float("nan"),))
    assert same(f, g)


def test_order_of_attributes_does_not_count() -> None:
    f, g = copy(), copy()
    attribute(f, 0, a=1, b=2)
    attribute(g, 0, b=2, a=1)
    assert same(f, g)


def test_of_is_compared_by_place() -> None:
    f, g = copy(), copy()
    f.ops[3].of, g.ops[3].of = f.ops[0], g.ops[0]
    assert same(f, g)
    g.ops[3].of = f.ops[0]
    assert not same(f, g)
