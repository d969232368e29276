"""The batch over time: what is done once before, per microbatch, and once after."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from distir.ir import FunctionMaker, Value
from distir.ir.function import Role
from distir.ir.type import Float64, Int64, Partial, Shard, Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.graph import Graph
from distir.transforms.microbatch import place_in_time
from distir.transforms.training import training_step
from tests.transforms.programs import BATCH, Plan, Program, check, distributed, gpt2_tiny, small_gpt


def program(build: Callable[[FunctionMaker, Value, Value], list[Value]], train: bool = True) -> Program:
    """Of x (batch, 4), w (4, 4) and labels: what `build` makes, its first result the loss."""
    f = FunctionMaker("p")
    x = f.add_input_value("x", Tensor(Float64, (BATCH, 4)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float64, (4, 4)), Role("parameter"))
    f.set_outputs(build(f, x, w))
    function = f.finalize()
    if train:
        function = training_step(function, function.outputs[0].name, gradients=True)
    rng = np.random.default_rng(0)
    made = [
        rng.integers(0, 3, shape_of(v)) if tensor(v).dtype is Int64 else rng.standard_normal(shape_of(v))
        for v in function.inputs
    ]
    return Program(function, made)


def total(f: FunctionMaker, v: Value) -> Value:
    return f.emit("ReduceSum", f.emit("Mul", v, v), axes=tuple(range(len(shape_of(v)))), keepdims=0)


def bodies(program: Program, plan: Plan) -> dict[str, list[str]]:
    """The names of the ops of each body."""
    function = distributed(program, plan).program
    return {f.name: [op.op_type for op in f.ops] for f in function.callees()}


def test_the_count_of_a_mean_comes_before() -> None:
    """On the mesh, per data-parallel piece and one all-reduce, before microbatches are cut."""
    function = distributed(small_gpt(), Plan(2, 1, 1, 4)).program
    prologue = next(f for f in function.callees() if f.name == "prologue0")
    reduced = [op for op in prologue.ops if op.op_type == "MPIAllreduce"]
    assert [op.attributes["axis"] for op in reduced] == ["dp"]
    assert tensor(reduced[0].inputs[0]).dtype is Int64
    assert [op.op_type for op in function.ops if op.callee is prologue] == ["Call"]
    assert not any(op.attributes.get("axis") == "mb" for op in prologue.ops)


def test_labels_that_differ_in_how_many_count_are_averaged_exactly() -> None:
    """Half of the samples have almost all labels ignored: means of means would be off."""
    made = gpt2_tiny()
    labels = made.arrays[[v.name for v in made.function.inputs].index("labels")]
    share = (labels == -100).mean(1)
    assert share.max() > 0.5 > 0.1 > share.min()
    check(made, Plan(2, 1, 1, 4))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_mean_over_the_batch_of_data_is_a_prologue(microbatches: int) -> None:
    def normalised(f: FunctionMaker, x: Value, w: Value) -> list[Value]:
        mean = f.emit("ReduceMean", x, axes=(0,), keepdims=1)
        return [total(f, f.emit("MatMul", f.emit("Sub", x, mean), w))]

    made = program(normalised)
    check(made, Plan(2, 1, 1, microbatches))
    assert "ReduceSum" in bodies(made, Plan(1, 1, 1, microbatches))["prologue0"]


def test_what_needs_the_whole_batch_of_activations_is_done_before_too() -> None:
    def crossed(f: FunctionMaker, x: Value, w: Value) -> list[Value]:
        y = f.emit("MatMul", x, w)
        mean = f.emit("ReduceMean", y, axes=(0,), keepdims=1)
        return [total(f, f.emit("Tanh", f.emit("Sub", y, mean)))]

    check(program(crossed), Plan(2, 1, 1, 2))
    check(program(crossed), Plan(1, 2, 1, 4))


@pytest.mark.parametrize("plan", [Plan(1, 1, 1, 4), Plan(2, 1, 2, 2), Plan(4, 1, 2, 2, "gpipe", host=True)], ids=str)
def test_results_of_every_kind(plan: Plan) -> None:
    """Joined over time, summed, the largest, and what does not vary."""

    def several(f: FunctionMaker, x: Value, w: Value) -> list[Value]:
        y = f.emit("Tanh", f.emit("MatMul", x, w))
        z = f.emit("MatMul", y, w)
        best = f.emit("ReduceMax", z, axes=(0, 1), keepdims=0)
        return [total(f, z), z, f.emit("ReduceSum", y, axes=(0,), keepdims=0), best, f.emit("Exp", w)]

    check(program(several, train=False), plan)


def test_a_sum_over_time_is_placed_as_such() -> None:
    made = program(lambda f, x, w: [total(f, f.emit("MatMul", x, w))], train=False)
    graph = Graph(made.function)
    placed = place_in_time(graph, 4, {0: 0})
    strands = {op.op_type: s for op, s in zip(made.function.ops, placed.strands, strict=True)}
    matmul, reduced = strands["MatMul"], strands["ReduceSum"]
    assert matmul is not None
    assert reduced is not None
    assert matmul.ins[0] is Shard(0)
    assert reduced.outs == (Partial("sum"),)


def test_updates_run_once_after_all_microbatches() -> None:
    function = distributed(small_gpt(), Plan(1, 1, 1, 4)).program
    calls = [op for op in function.ops if op.callee is not None]
    names = [(op.callee.name, op.attributes.get("mb")) for op in calls if op.callee]
    assert names[0] == ("prologue0", None)
    assert names[-1] == ("update0", None)
    assert [mb for name, mb in names if name.startswith("fwd0")] == [0, 1, 2, 3]
    assert [mb for name, mb in names if name.startswith("bwd0")] == [0, 1, 2, 3]
    update = calls[-1].callee
    assert update is not None
    assert {op.op_type for op in update.ops} == {"Unpack", "MPIAllreduce", "SGD"}


def test_the_size_of_a_program_grows_by_lines_of_calls_only() -> None:
    counts = {}
    for microbatches in (2, 4):
        function = distributed(small_gpt(), Plan(2, 2, 2, microbatches)).program
        # the first, the middle and the last microbatch have bodies of their own
        counts[microbatches] = {f.name.split(".")[0]: len(f.ops) for f in function.callees()}
    assert counts[2].keys() == counts[4].keys()
