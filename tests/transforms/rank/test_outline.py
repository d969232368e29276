"""Outlining: which ops are in a run, that calls compute the same, and when they wait for communication."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies

from distir.ir import Device, Mesh
from distir.ir.errors import InfeasibleError
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.type import REPLICATE, Float64, Partial, Tensor
from distir.ir.verify import verify
from distir.transforms.rank.order import check_order
from distir.transforms.rank.outline import Sort, outline, sort
from distir.transforms.rank.project import project_all
from tests.transforms.programs import TOLERANCE, Plan, Program, distributed, error, run, small_gpt
from tests.transforms.random_programs import BLOCKS, LARGE, random_plans, random_programs

MESH = Mesh([Device("cpu", 0), Device("cpu", 1)], {"tp": 2})
WHOLE, PART = (Tensor(Float64, (4, 4), MESH, (p,)) for p in (REPLICATE, Partial("sum")))


def texts(f: Function) -> list[str]:
    """The names of all ops; of a call, of the ops in its callee."""
    return [
        f"({' '.join(o.op_type for o in op.callee.ops)})"
        if op.callee is not None and ".part" in op.callee.name
        else op.op_type
        for op in f.ops
    ]


def with_reduction(independent: bool = False) -> tuple[FunctionMaker, Value, Value]:
    """x -> Neg, Add, all-reduce; with `independent`, then two ops that do not need its result. Returns both results."""
    f = FunctionMaker("f")
    x = f.add_input_value("x", PART)
    a = f.emit("Add", f.emit("Neg", x), x)
    y = f.emit("MPIAllreduce", a, axis="tp")
    other = f.emit("Add", f.emit("Neg", x), x) if independent else x
    return f, y, other


def test_a_run_ends_where_communication_begins() -> None:
    f, y, _ = with_reduction()
    f.set_outputs([f.emit("Relu", f.emit("Neg", y))])
    source = f.finalize()
    new = outline(source, sort)
    verify(new)
    assert texts(new) == ["(Neg Add)", "MPIAllreduce", "(Neg Relu)"]
    assert (new.inputs, new.outputs) == (source.inputs, source.outputs)
    inside = {v for g in new.callees() for op in g.ops for v in (*op.inputs, *op.outputs)}
    assert inside.isdisjoint(v for op in source.ops for v in (*op.inputs, *op.outputs))


def test_what_does_not_need_what_is_on_its_way_runs_meanwhile() -> None:
    f, y, other = with_reduction(independent=True)
    z = f.emit("Neg", other)
    f.set_outputs([f.emit("Relu", f.emit("Neg", y)), z])
    assert texts(outline(f.finalize(), sort)) == ["(Neg Add)", "MPIAllreduce", "(Neg Add Neg)", "(Neg Relu)"]


def test_what_was_waited_for_once_is_there() -> None:
    f, y, _ = with_reduction()
    a = f.emit("Relu", y)
    f.set_outputs([f.emit("Mul", f.emit("Neg", a), y)])
    assert texts(outline(f.finalize(), sort)) == ["(Neg Add)", "MPIAllreduce", "(Relu Neg Mul)"]


def test_members_of_a_bundle_come_together() -> None:
    f = FunctionMaker("f")
    a, b = (f.add_input_value(name, PART) for name in "ab")
    rows = f.emit("MPIAllreduce", f.emit("Pack", a, b), axis="tp")
    x, y = f.emit("Unpack", rows)
    c = f.emit("Neg", f.emit("Neg", x))
    f.set_outputs([f.emit("Add", c, y)])
    assert texts(outline(f.finalize(), sort)) == ["Pack", "MPIAllreduce", "Unpack", "(Neg Neg Add)"]


def kind_of(stays: str) -> Callable[[Op], Sort]:
    return lambda op: "stays" if op.op_type == stays else "joins"


def test_what_stays_goes_before_a_run_or_after_it() -> None:
    """Wherever its operands allow; a run ends before an op that needs both."""
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float64, (4,)))
    a = f.emit("Neg", x)
    r = f.emit("Relu", a)
    b = f.emit("Neg", a)
    s = f.emit("Relu", x)
    c = f.emit("Add", b, s)
    f.set_outputs([r, c])
    g = f.finalize()
    assert texts(outline(g, kind_of("Relu"))) == ["Relu", "(Neg Neg Add)", "Relu"]
    f.set_outputs([f.emit("Add", f.emit("Neg", c), r)])
    assert texts(outline(f.finalize(), kind_of("Relu"))) == ["Relu", "(Neg Neg Add Neg)", "Relu", "Add"]


def test_what_nobody_uses_is_no_result() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float64, (4,)))
    a = f.emit("Neg", x)
    f.emit("Relu", a)
    f.set_outputs([f.emit("Neg", a), a])
    g = outline(f.finalize(), sort)
    assert texts(g) == ["(Neg Relu Neg)"]
    assert [v.name for v in g.callees()[0].outputs] == [a.name, g.outputs[0].name]


def test_functions_that_are_called_twice_are_cut_once() -> None:
    f = distributed(small_gpt(), Plan(microbatches=4)).program
    new = outline(f, sort)
    assert len({g.name for g in new.callees()}) == len(new.callees())
    calls = [op for op in new.ops if op.callee is not None]
    assert len(calls) > len({op.callee for op in calls})


PLANS = [Plan(dp=2), Plan(tp=2), Plan(pp=2, microbatches=4), Plan(dp=2, tp=2, microbatches=2)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_all_that_computes_is_in_few_runs(plan: Plan) -> None:
    """And nothing that communicates is; what ranks exchange stays in its order."""
    programs = project_all(distributed(small_gpt(), plan).program)
    new = [p._replace(function=outline(p.function, sort)) for p in programs]
    check_order(new)
    for p in new:
        verify(p.function)
        whole = [op for g in (p.function, *p.function.callees()) for op in g.ops]
        left = [op for g in (p.function, *p.function.callees()) if ".part" not in g.name for op in g.ops]
        assert sum(sort(op) == "joins" for op in left) * 4 < sum(sort(op) == "joins" for op in whole)
        for g in p.function.callees():
            assert ".part" not in g.name or all(sort(op) == "joins" for op in g.ops)


@settings(max_examples=40, deadline=None, suppress_health_check=LARGE)
@given(strategies.sampled_from(BLOCKS).flatmap(random_programs), random_plans, strategies.integers(0, 1 << 30))
def test_the_same_is_computed_whatever_joins(program: Program, plan: Plan, seed: int) -> None:
    try:
        function = distributed(program, plan).program
    except InfeasibleError:
        return
    dice = random.Random(seed)

    def any_sort(op: Op) -> Sort:
        found = sort(op)
        if found == "moves":
            return found
        timed = op.spec.indexed(op.attributes) is not None  # a part is called without a microbatch
        return "stays" if timed or found == "stays" or dice.random() < 0.2 else "joins"

    new = outline(function, any_sort)
    verify(new)
    gap = error(run(new, program), program.results())
    assert gap <= TOLERANCE, f"{plan}: off by {gap}"
