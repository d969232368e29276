"""`validate` says which output is not the source's, and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distir.ir import Device, Function, FunctionMaker, Mesh, Value, validate
from distir.ir.errors import MismatchError
from distir.ir.function import Role
from distir.ir.type import REPLICATE, BFloat16, DType, Float16, Float32, Float64, Int64, Shard, Tensor
from distir.ir.validate import Terms
from tests.transforms.mutate import Fault, Mutator, apply
from tests.transforms.programs import Plan, distributed, small_gpt

MESH = Mesh([Device("gpu", i) for i in range(2)], {"tp": 2}, "m")


def source(scale: float = 2.0, swapped: bool = False) -> Function:
    """tanh(x w) * scale - x"""
    f = FunctionMaker("source")
    x = f.add_input_value("x", Tensor(Float64, (4, 4)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (4, 4)), Role("parameter"))
    c = f.emit("Constant", value=(scale,), shape=(), dtype=Float64)
    y = f.emit("Mul", f.emit("Tanh", f.emit("MatMul", x, w)), c)
    f.set_outputs([f.add_op("Sub", "y", [x, y] if swapped else [y, x])])
    return f.finalize()


def spread(edit: Callable[[FunctionMaker, Value, Value], Value] | None = None, scale: float = 2.0) -> Function:
    """The same with the columns of w split over tp, gathered at the end."""
    f = FunctionMaker("spread")
    x = f.add_input_value("x", Tensor.whole(Float64, (4, 4), MESH, (REPLICATE,)), Role("data", 0))
    w = f.add_input_value("w", Tensor.whole(Float64, (4, 4), MESH, (Shard(1),)), Role("parameter"))
    c = f.emit("Constant", value=(scale,), shape=(), dtype=Float64, device=MESH)
    y = f.emit("Mul", f.emit("Tanh", f.emit("MatMul", x, w)), c)
    y = f.add_op("MPIAllgather", "whole", [y], {"axis": "tp"})
    f.set_outputs([f.emit("Sub", y, x) if edit is None else edit(f, y, x)])
    return f.finalize()


def test_the_erasure_of_a_distributed_program_is_its_source() -> None:
    validate(spread(), source())
    validate(source(), source())


def test_it_says_where_they_part() -> None:
    with pytest.raises(
        MismatchError, match=r"spread: output %sub is not %y of the source: expected .*value=\(2.0,\)"
    ) as e:
        validate(spread(scale=3.0), source())
    assert "value=(3.0,)" in str(e.value)
    with pytest.raises(MismatchError, match=r"expected Mul.*got input 0"):
        validate(spread(lambda f, y, x: f.emit("Sub", x, x)), source())
    with pytest.raises(MismatchError, match=r"expected Sub.*got Add"):
        validate(spread(lambda f, y, x: f.emit("Add", y, x)), source())


def test_operands_are_ordered() -> None:
    with pytest.raises(MismatchError):
        validate(spread(), source(swapped=True))


def test_inputs_and_outputs_correspond() -> None:
    f = FunctionMaker("other")
    f.add_input_value("x", Tensor(Float64, (4, 4)))
    f.set_outputs(f.inputs)
    with pytest.raises(MismatchError, match="expected 2 inputs, got 1"):
        validate(f.finalize(), source())
    f.add_input_value("w", Tensor(Int64, (4, 4)))
    with pytest.raises(MismatchError, match="input %w: expected f64"):
        validate(f.finalize(), source())


def test_results_of_ops_with_several_are_told_apart() -> None:
    def halves(k: int) -> Function:
        f = FunctionMaker("halves")
        parts = f.emit("Split", f.add_input_value("x", Tensor(Float64, (4, 4))), axis=0, parts=2)
        f.set_outputs([parts[k]])
        return f.finalize()

    validate(halves(1), halves(1))
    with pytest.raises(MismatchError, match="result"):
        validate(halves(0), halves(1))


def test_updates_are_compared() -> None:
    def stepped(swap: bool) -> Function:
        f = FunctionMaker("step")
        a, b = [f.add_input_value(n, Tensor(Float64, (2,)), Role("parameter")) for n in "ab"]
        new = [f.emit("Neg", a), f.emit("Exp", b)]
        f.set_outputs(new)
        f.updates = dict(zip(new, [b, a] if swap else [a, b], strict=True))
        return f.finalize()

    validate(stepped(False), stepped(False))
    with pytest.raises(MismatchError, match="expected updates"):
        validate(stepped(True), stepped(False))


def test_a_callee_is_walked_once_for_equal_arguments() -> None:
    """All microbatches' calls are one walk: the cost does not grow with their number."""
    counts = []
    for microbatches in (2, 4):
        made = distributed(small_gpt(layers=1), Plan(1, 1, 2, microbatches))
        terms = Terms()
        terms.walk(made.program, list(range(len(made.program.inputs))))
        counts.append(len(terms.known))
    assert counts[0] == counts[1]


def test_microbatches_of_different_values_do_not_join() -> None:
    made = distributed(small_gpt(layers=1), Plan(1, 1, 2, 2))
    mutator = Mutator(made.program, 0)
    seen = 0
    for _ in range(40):
        mutant = mutator.draw("operand")
        if mutant is not None:
            seen += 1
            with pytest.raises(MismatchError):
                validate(mutant.function, made.source)
    assert seen > 15


def test_a_rebuilt_program_is_still_valid() -> None:
    made = distributed(small_gpt(layers=1), Plan(2, 2, 2, 2))
    validate(apply(made.program, Fault("nothing")), made.source)


def mean(divided: bool, by: float = 8.0) -> Function:
    f = FunctionMaker("mean")
    x = f.add_input_value("x", Tensor(Float64, (4, 8)), Role("data", 0))
    if divided:
        total = f.emit("ReduceSum", x, axes=(1,), keepdims=0)
        f.set_outputs([f.emit("Div", total, f.emit("Constant", value=(by,), shape=(), dtype=Float64))])
    else:
        f.set_outputs([f.emit("ReduceMean", x, axes=(1,), keepdims=0)])
    return f.finalize()


def test_an_op_that_only_one_of_them_has_is_compared_by_its_definition() -> None:
    for a, b in ((mean(True), mean(False)), (mean(False), mean(True))):
        (definition,) = validate(a, b)
        assert definition.op.op_type == "ReduceMean"
        assert [op.op_type for op in definition.parts.ops] == ["ReduceSum", "Constant", "Div"]
    assert validate(mean(False), mean(False)) == []
    with pytest.raises(MismatchError, match=r"expected Constant.*8.0.*got Constant.*7.0"):
        validate(mean(True, 7.0), mean(False))


def test_a_source_is_compared_as_it_was_passed() -> None:
    """Not taken apart as the distributed program was."""
    program = small_gpt(layers=1)
    made = distributed(program, Plan(1, 2, 1, 2))
    assert {d.op.op_type for d in validate(made.program, program.function)} == {"CrossEntropy"}


Nested = int | tuple["Nested", ...]


def total(nested: Nested, name: str = "Sum", **attributes: int) -> Function:
    """A sum of inputs, by their numbers, and of sums of them; or another op in the place of each sum."""
    f = FunctionMaker("total")
    xs = [f.add_input_value(x, Tensor(Float64, (2,))) for x in "abc"]

    def added(x: Nested) -> Value:
        return xs[x] if isinstance(x, int) else f.emit(name, *map(added, x), **attributes)

    f.set_outputs([added(nested)])
    return f.finalize()


@pytest.mark.parametrize("nested", [(2, 0, 1), ((0, 1), 2), (2, (1, 0)), (((0,), 1), (2,))], ids=str)
def test_a_sum_of_sums_is_the_sum_of_all_in_any_order(nested: Nested) -> None:
    validate(total(nested), total((0, 1, 2)))
    validate(total((0, 1, 2)), total(nested))


@pytest.mark.parametrize(
    "nested", [(0, 1), (1, 2), (0, 1, 1), (0, 1, 2, 2), ((0, 1), 0), ((0, 1), (2, 1)), ((0, 1),)], ids=str
)
def test_sums_of_other_operands_differ(nested: Nested) -> None:
    """Each counts, as often as it stands there."""
    for a, b in ((nested, (0, 1, 2)), ((0, 1, 2), nested)):
        with pytest.raises(MismatchError):
            validate(total(a), total(b))


def test_other_ops_in_a_sum_are_not_taken_apart() -> None:
    with pytest.raises(MismatchError):
        validate(total(((0, 1), 2), "Sub"), total((0, (1, 2)), "Sub"))
    with pytest.raises(MismatchError):
        validate(total((0, 1, 2), "Concat", axis=0), total((1, 0, 2), "Concat", axis=0))

    def scaled(outside: bool) -> Function:
        f = FunctionMaker("scaled")
        a, b = [f.add_input_value(x, Tensor(Float64, ())) for x in "ab"]
        f.set_outputs([f.emit("Sum", f.emit("Mul", a, b), b) if outside else f.emit("Sum", a, b, b)])
        return f.finalize()

    with pytest.raises(MismatchError):
        validate(scaled(True), scaled(False))


def cast(of: str | None, to: DType, swapped: bool = False) -> Function:
    """Of a and b, added or otherwise combined: the cast of the result, or without `of` the sum of their casts."""
    f = FunctionMaker("cast")
    a, b = [f.add_input_value(x, Tensor(Float64, (3,))) for x in "ab"]
    if of is None:
        parts = [f.emit("Cast", x, to=to) for x in (a, b)]
        f.set_outputs([f.emit("Add", *(reversed(parts) if swapped else parts))])
    else:
        f.set_outputs([f.emit("Cast", f.emit(of, a, b), to=to)])
    return f.finalize()


def test_the_cast_of_a_sum_is_the_sum_of_the_casts() -> None:
    for to in (Float32, BFloat16):
        validate(cast("Add", to), cast(None, to))
        validate(cast(None, to), cast("Add", to))
        for other in (cast("Mul", to), cast("Sub", to), cast("Add", Float64), cast(None, Float16)):
            with pytest.raises(MismatchError):
                validate(other, cast(None, to))
    with pytest.raises(MismatchError):  # rounding each to an integer is not rounding the sum
        validate(cast("Add", Int64), cast(None, Int64))
    with pytest.raises(MismatchError):
        validate(cast("Add", Float32), cast(None, Float32, swapped=True))


def test_the_cast_of_sums_of_sums_is_theirs_of_the_casts() -> None:
    """However deep."""

    def chain(inside: bool, n: int = 2000) -> Function:
        f = FunctionMaker("chain")
        a, b = [f.add_input_value(x, Tensor(Float64, (3,))) for x in "ab"]
        if inside:
            a, b = [f.emit("Cast", x, to=Float32) for x in (a, b)]
        x = a
        for k in range(n):
            x = f.emit("Sum", x, a, b) if k == n // 2 else f.emit("Sub", f.emit("Add", x, b), a)
        f.set_outputs([x if inside else f.emit("Cast", x, to=Float32)])
        return f.finalize()

    validate(chain(True), chain(False))
    validate(chain(False), chain(True))
    with pytest.raises(MismatchError):
        validate(chain(True), chain(False, 1999))


def test_a_cast_to_the_dtype_that_there_is_hides_no_other() -> None:
    """Both have the same attributes."""

    def both(inside: bool) -> Function:
        f = FunctionMaker("both")
        x = f.add_input_value("x", Tensor(Float32, (3,)))
        a, b = [f.add_input_value(x, Tensor(Float64, (3,))) for x in "ab"]
        first = f.emit("Cast", x, to=Float32)
        parts = [f.emit("Cast", v, to=Float32) for v in (a, b)] if inside else [a, b]
        total = f.emit("Add", *parts)
        f.set_outputs([first, total if inside else f.emit("Cast", total, to=Float32)])
        return f.finalize()

    validate(both(True), both(False))
    validate(both(False), both(True))
