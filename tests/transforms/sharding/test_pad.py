"""Padding never changes a result, whatever stands in it; executors pad what they feed and cut what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distir
from distir.api.data import index_ranges
from distir.executor.reference.sequential import SequentialExecutor, evaluate
from distir.ir import Function, FunctionMaker, Value, verify
from distir.ir.errors import MismatchError
from distir.ir.function import Role
from distir.ir.same import same
from distir.ir.type import Float64, Tensor
from distir.ops.rules import shape_of
from distir.transforms.differentiation.training import training_step
from distir.transforms.rewriting.decompose import decompose
from distir.transforms.sharding.check_padding import check_padding
from distir.transforms.sharding.pad import pad, pad_like, paddable
from tests.transforms.programs import (
    TOLERANCE,
    Plan,
    Program,
    check,
    distributed,
    error,
    filled,
    gpt2_tiny,
    imported_mlp,
    run,
    small_gpt,
    written_mlp,
)
from tests.transforms.random_programs import LARGE, random_programs


def padded(program: Program, n: int) -> Function:
    """The decomposed function with all padded that can be, so that it divides by n."""
    function = decompose(program.function)
    return pad(function, paddable(function, n))


def enlarged(function: Function) -> list[Value]:
    return [v for v in function.inputs if v.role is not None and v.role.source is not None]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "make",
    [gpt2_tiny, imported_mlp, lambda: small_gpt(vocabulary=15), lambda: written_mlp(width=15)],
    ids=["gpt2-tiny", "mlp", "small gpt", "written mlp"],
)
def test_padding_changes_no_result(make: Callable[[], Program], n: int) -> None:
    program = make()
    function = padded(program, n)
    verify(function)
    assert error(run(function, program), program.results()) <= TOLERANCE


def test_only_what_does_not_divide_is_padded() -> None:
    function = padded(gpt2_tiny(), 2)
    assert {(shape_of(v), v.role.source) for v in enlarged(function) if v.role} == {((510, 64), (509, 64))}
    assert {shape_of(v): s for v, s in function.sources.items()} == {(510, 64): (509, 64)}
    assert padded(small_gpt(), 2) is decompose(small_gpt().function) or not enlarged(padded(small_gpt(), 2))


def test_a_dim_is_not_padded_by_much() -> None:
    """9 to 10 is 1 in 9; 5 to 8 would be more than half again."""
    assert enlarged(padded(small_gpt(vocabulary=9), 2))
    assert not enlarged(padded(small_gpt(vocabulary=5), 4))


@settings(max_examples=60, deadline=None, suppress_health_check=LARGE)
@given(random_programs(), st.sampled_from([2, 3, 4, 5]))
def test_padding_changes_no_result_of_random_programs(program: Program, n: int) -> None:
    function = padded(program, n)
    verify(function)
    assert error(run(function, program), program.results()) <= TOLERANCE


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=LARGE)
@given(random_programs(), st.sampled_from([2, 3, 4, 5]))
def test_padding_changes_no_result_of_many_random_programs(program: Program, n: int) -> None:
    assert error(run(padded(program, n), program), program.results()) <= TOLERANCE


def test_values_that_are_not_padded_remain() -> None:
    source = decompose(small_gpt(vocabulary=15).function)
    made = pad(source, paddable(source, 4))
    values = {v for f in (source,) for v in (*f.inputs, *[v for op in f.ops for v in op.outputs])}
    new = [v for op in made.ops for v in op.outputs if v not in values]
    assert new
    assert all(16 in shape_of(v) for v in new)
    assert not {v for op in made.ops for v in op.inputs} - values - set(made.inputs) - set(new)
    assert len(set(made.ops) & set(source.ops)) > len(source.ops) // 2


def test_padding_stays_zero_from_step_to_step() -> None:
    """The next value of a padded input has zeros where the input has them."""
    program = gpt2_tiny()
    function = padded(program, 4)
    seen: dict[Value, Any] = {}
    SequentialExecutor(tap=lambda v, x: seen.setdefault(v, x)).compute(function, program.arrays)
    grown = {new: old for new, old in function.updates.items() if old in enlarged(function)}
    assert len(grown) == 3  # the embedding and its two moments
    for new in grown:
        assert seen[new].shape == (512, 64)
        assert np.all(seen[new][509:] == 0)
        assert np.any(seen[new][:509] != 0)


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (Plan(), 509),
        (Plan(pad_multiple=8), 512),
        (Plan(pad_multiple=64), 512),
        (Plan(pad_multiple=200), 509),  # 600 would be more by over 1/8
        (Plan(tp=2), 510),
        (Plan(tp=2, pad_multiple=8), 512),
        (Plan(tp=4, pad_multiple=64), 512),
        (Plan(tp=2, pad_multiple=400), 510),
        (Plan(2, 1, 2, 2, zero=3, pad_multiple=128), 512),
    ],
    ids=str,
)
def test_a_vocabulary_becomes_a_multiple_on_each_device(plan: Plan, size: int) -> None:
    made = distributed(gpt2_tiny(), plan)
    table = next(v for v in made.source.inputs if shape_of(v)[1:] == (64,) and shape_of(v)[0] > 256)
    assert shape_of(table) == (size, 64)
    grown = {shape_of(v) for v in enlarged(made.source)}
    assert grown == ({(size, 64)} if size > 509 else set())
    assert set(made.program.sources.values()) == ({(509, 64)} if size > 509 else set())


def test_without_a_multiple_a_program_of_one_device_remains() -> None:
    for program in (gpt2_tiny(), small_gpt(vocabulary=15)):
        assert distributed(program, Plan(2, pad_multiple=1)).source is decompose(program.function, False)


def test_a_cross_entropy_that_is_not_split_takes_the_length_of_its_classes() -> None:
    """No op fills the padding of logits or of their gradient: they are the largest values."""
    made = distributed(gpt2_tiny(), Plan(pad_multiple=64))
    entropies = [op for op in made.source.ops if op.op_type.startswith("CrossEntropy")]
    assert [op.attributes["count"] for op in entropies] == [509, 509]
    assert not any(op.op_type == "FillTail" for op in made.source.ops)
    labels = next(v for v in made.source.inputs if v.name == "labels")
    assert index_ranges(made.source)[labels].limit == 509
    check_padding(decompose(gpt2_tiny().function, False), made.source, evaluate)
    parts = decompose(made.source)
    assert error(run(parts, gpt2_tiny()), gpt2_tiny().results()) <= TOLERANCE


def test_where_a_device_has_padding_alone() -> None:
    """97 classes on 12 devices are 108: the last 9 are none."""
    made = check(small_gpt(vocabulary=97), Plan(tp=12))
    assert any(shape_of(v)[0] == 108 for v in enlarged(made))


def test_the_batch_is_not_padded() -> None:
    """Nor what belongs to it: a weight for each of its samples."""
    f = FunctionMaker("bias")
    x = f.add_input_value("x", Tensor(Float64, (14, 30)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (14, 30)), Role("parameter"))
    f.set_outputs([f.emit("Mul", x, w)])
    program = Program(f.finalize(), [np.arange(420.0).reshape(14, 30)] * 2)
    made = distributed(program, Plan(2, pad_multiple=4))
    assert [shape_of(v) for v in made.source.inputs] == [(14, 32), (14, 32)]
    assert error(run(made.program, program), program.results()) <= TOLERANCE


def test_a_function_padded_twice_keeps_its_source_shapes() -> None:
    program = small_gpt(vocabulary=15, width=20)
    source = decompose(program.function)
    once = pad(source, paddable(source, 16))
    assert once.sources
    twice = pad(once, paddable(once, 3))
    assert len(enlarged(twice)) > len(enlarged(once))
    assert {v.name: s for v, s in once.sources.items()}.items() <= {v.name: s for v, s in twice.sources.items()}.items()
    verify(twice)
    assert error(run(twice, program), program.results()) <= TOLERANCE


def test_several_steps_with_padded_weights() -> None:
    """What a step gives can be fed to the next."""
    program = small_gpt(vocabulary=15)
    function = distributed(program, Plan(1, 2, 2, 2)).program
    wholes = [list(program.arrays), list(program.arrays)]
    for _ in range(3):
        for f, arrays in zip((program.function, function), wholes, strict=True):
            results = SequentialExecutor().compute(f, arrays)
            for new, old in f.updates.items():
                arrays[f.inputs.index(old)] = results[f.outputs.index(new)]
    assert error(wholes[1], wholes[0]) <= TOLERANCE
    assert error(wholes[0], program.arrays) > 1e-3


def test_what_reduces_a_padded_dim_sees_neutral_values() -> None:
    """Of a maximum over a padded dim with negative values, 0 in the padding would win."""
    f = FunctionMaker("top")
    x = f.add_input_value("x", Tensor(Float64, (4, 9)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (9,)), Role("parameter"))
    y = f.emit("Mul", x, w)
    f.set_outputs([f.emit("ReduceMax", y, axes=(1,), keepdims=0), f.emit("ReduceSum", f.emit("Exp", y), axes=(1,))])
    program = Program(f.finalize(), [-1 - np.arange(36.0).reshape(4, 9), np.ones(9)])
    function = padded(program, 2)
    assert [shape_of(v) for v in enlarged(function)] == [(4, 10), (10,)]
    fills = [op.attributes["value"] for op in function.ops if op.op_type == "FillTail"]
    assert sorted(fills) == [float("-inf"), 0.0]
    assert error(run(function, program), program.results()) <= TOLERANCE


def test_a_state_that_is_reduced_over_a_padded_dim_sees_neutral_values() -> None:
    """Its next value is the maximum: what such an op takes is not cleared, as what an optimizer takes is."""
    f = FunctionMaker("top")
    x = f.add_input_value("x", Tensor(Float64, (4, 9)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (9,)), Role("parameter"))
    old = f.add_input_value("highest", Tensor(Float64, (4,)), Role("state"))
    y = f.emit("Exp", f.emit("Mul", x, w))
    new = f.emit("ReduceMax", f.emit("Neg", y), axes=(1,), keepdims=0)
    f.set_outputs([f.emit("Add", new, old), new])
    f.updates = {new: old}
    program = Program(f.finalize(), [0.1 * np.arange(36.0).reshape(4, 9), np.ones(9), np.zeros(4)])
    function = padded(program, 2)
    assert [shape_of(v) for v in enlarged(function)] == [(4, 10), (10,)]
    check_padding(program.function, function, evaluate)
    assert error(run(function, program), program.results()) <= TOLERANCE


def test_an_op_that_takes_what_padding_has_replaced_is_found() -> None:
    """It is an op of the source, but its operand is not a value of the padded program; also an output that is the
    source's, but said to have another shape there."""
    f = FunctionMaker("stale")
    x = f.add_input_value("x", Tensor(Float64, (4, 9)), Role("data", 0))
    f.set_outputs([f.emit("Exp", f.emit("Neg", x))])
    source = f.finalize()
    same_again = Function("stale", source.inputs, source.ops, source.outputs)
    check_padding(source, same_again, evaluate)
    replaced = Function("stale", (Value("x", x.type, x.role),), source.ops, source.outputs)
    with pytest.raises(MismatchError, match="Neg"):
        check_padding(source, replaced, evaluate)
    lies = Function("stale", source.inputs, source.ops, source.outputs, {}, {source.outputs[0]: (3, 9)})
    with pytest.raises(MismatchError, match="source shape"):
        check_padding(source, lies, evaluate)


def test_a_dim_along_which_integers_are_counted_is_not_padded() -> None:
    """Labels share the dim of positions with weights: those in its padding would count as labels."""
    f = FunctionMaker("positions")
    x = f.add_input_value("x", Tensor(Float64, (8, 15, 31)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (15, 31)), Role("parameter"))
    f.set_outputs([f.emit("Add", x, w)])
    step = training_step(f.finalize(), gradients=True)
    program = filled(step, {"labels": np.arange(120).reshape(8, 15) % 31}, np.random.default_rng(0))
    for plan in (Plan(pad_multiple=8), Plan(2, microbatches=2, zero=3, pad_multiple=8)):
        made = distributed(program, plan)
        assert [shape_of(v) for v in enlarged(made.source)] == [(8, 15, 32), (15, 32)]
        assert error(run(made.program, program), program.results()) <= TOLERANCE


def test_a_dim_of_a_named_split_is_not_padded() -> None:
    """15 rows of positions with weights, on 3 devices: 16 would not divide."""
    f = FunctionMaker("positions")
    x = f.add_input_value("x", Tensor(Float64, (8, 15, 31)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (15, 31)), Role("parameter"))
    f.set_outputs([f.emit("Tanh", f.emit("Add", x, w))])
    model = distir.Model(f.finalize()).training("mse", "sgd")
    program = distir.distribute(model, distir.Plan(split=("cp=3:*.1",), pad_multiple=8))  # type: ignore[arg-type]
    (w,) = [v for v in program.inputs if v.name == "w"]
    assert w.type.global_shape == (15, 32)  # type: ignore[union-attr]


@pytest.mark.parametrize("groups", [1, 5, 15])
def test_groups_of_a_convolution_are_not_padded(groups: int) -> None:
    f = FunctionMaker("grouped")
    x = f.add_input_value("x", Tensor(Float64, (8, 3, 6)), Role("data", 0))
    first, second = [f.add_input_value("w", Tensor(Float64, (15, n, 3)), Role("parameter")) for n in (3, 15 // groups)]
    conv = {"strides": (1,), "dilations": (1,), "pads": (0, 0)}
    y = f.emit("Tanh", f.emit("Conv", x, first, groups=1, **conv))
    f.set_outputs([f.emit("Conv", y, second, groups=groups, **conv)])
    step = training_step(f.finalize(), "mse", gradients=True)
    program = filled(step, {}, np.random.default_rng(0))
    for plan in (Plan(pad_multiple=8), Plan(2, pad_multiple=8), Plan(tp=2 if groups == 1 else 3)):
        made = distributed(program, plan)
        assert bool(enlarged(made.source)) == (groups == 1)
        assert error(run(made.program, program), program.results()) <= TOLERANCE


def test_pad_like_pads_the_source_as_a_distributed_program_was() -> None:
    program = small_gpt(vocabulary=15)
    made = distributed(program, Plan(1, 2, 2, 2))
    assert enlarged(made.program)
    assert same(pad_like(decompose(program.function), made.program), made.source)


def test_a_program_without_roles_keeps_its_weights_apart_from_its_data() -> None:
    program = written_mlp(layers=4, width=15)
    function = padded(program, 2)
    kinds = {v.name: v.kind for v in function.inputs}
    assert {k for name, k in kinds.items() if name.startswith("w")} == {"parameter"}
    assert "parameter" not in {k for name, k in kinds.items() if not name.startswith("w")}
    check(program, Plan(2, 2, 2, 2))
