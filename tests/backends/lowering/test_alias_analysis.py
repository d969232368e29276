"""Memory that is written to again: random programs, step after step, on ranks whose communication is as late as it may
be, compute what the sequential program does, and leave what was given to them alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from distir.backends.lowering import body
from distir.backends.lowering.engine import TorchRank, own_array
from distir.backends.tensors import staging as memory
from distir.backends.transport import exchange
from distir.executor.reference.joining import join
from distir.executor.reference.sequential import SequentialExecutor, unfit
from distir.importer import import_from_onnx
from distir.ir import Function
from distir.ir.device import Device, Mesh
from distir.ir.errors import InfeasibleError
from distir.ir.function import FunctionMaker, Role, Value
from distir.ir.type import REPLICATE, SUM, Float64, Shard, Tensor
from distir.transforms.differentiation.training import training_step
from distir.transforms.rewriting.precision import with_dtype
from tests.backends.threads import World
from tests.transforms.programs import (
    ADAMW,
    BATCH,
    EXAMPLES,
    MOMENTUM,
    TOLERANCE,
    Plan,
    Program,
    distributed,
    error,
    imported_mlp,
    in_float64,
    small_gpt,
)
from tests.transforms.random_programs import BLOCKS, LARGE, random_plans, random_programs

STEPS = 3
PLANS = random_plans.map(lambda plan: plan._replace(host=False))  # weights that come from a host go nowhere


@pytest.fixture(autouse=True, params=["as it is", "all is large"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors go together to other ranks, and have no blocks of the pool: large ones are tried, too."""
    if request.param == "all is large":
        monkeypatch.setattr(exchange, "_APART_BYTES", 0)
        for module in (body, memory):
            monkeypatch.setattr(module, "LARGE", 1)


def sequential(program: Program) -> list[list[np.ndarray]]:
    """The outputs of each step."""
    f, arrays = program.function, list(program.arrays)
    rows: list[list[np.ndarray]] = []
    for _ in range(STEPS):
        rows.append(SequentialExecutor().compute(f, arrays))
        for v, x in zip(f.outputs, rows[-1], strict=True):
            if v in f.updates:
                arrays[f.inputs.index(f.updates[v])] = x
    return rows


def on_ranks(
    program: Program, main: Function, size: int, look: Callable[[TorchRank], object] = id
) -> tuple[list[list[np.ndarray]], Counter[str]]:
    """The outputs of each step, whole, and what the Python of all ranks does how often; `look` sees each rank."""
    world = World(size)
    with pytest.MonkeyPatch.context() as patch:
        world.install(patch)

        def work(rank: int) -> tuple[TorchRank, list[dict[int, np.ndarray]]]:
            engine = TorchRank(main, rank)
            engine.load(dict(enumerate(program.arrays)))
            values = dict(engine.values)
            given = {k: own_array(x) for k, x in values.items()}
            steps: list[dict[int, np.ndarray]] = []
            got: list[dict[int, torch.Tensor]] = []
            for _ in range(STEPS):
                got.append(engine.step())
                steps.append({k: own_array(x) for k, x in got[-1].items()})
                for k in given.keys() - set(engine.updates.values()):
                    assert engine.values[k] is values[k]
                    np.testing.assert_array_equal(own_array(values[k]), given[k])
            for outputs, before in zip(got, steps, strict=True):  # only the updates may have been overwritten
                for k in outputs.keys() - engine.updates.keys():
                    np.testing.assert_array_equal(own_array(outputs[k]), before[k])
            return engine, steps

        ranks = world.run(work)
    seen = Counter[str]()
    for engine, _ in ranks:
        look(engine)
        source = engine.source()
        seen.update({word: source.count(word) for word in ("out=", "_(", "bucket", "linear(", "sgd", "clone(")})
    return [
        [whole(main, k, [(e, s[n]) for e, s in ranks]) for k in range(len(main.outputs))] for n in range(STEPS)
    ], seen


def whole(main: Function, k: int, ranks: list[tuple[TorchRank, dict[int, np.ndarray]]]) -> np.ndarray:
    v = main.outputs[k]
    t = v.type
    assert isinstance(t, Tensor)
    pieces = {engine.coordinate(t): made[k] for engine, made in ranks if k in made}
    x = join(pieces, t) if isinstance(t.device, Mesh) else pieces[()]
    return unfit(x, main.sources.get(v))


def compared(program: Program, plan: Plan, look: Callable[[TorchRank], object] = id) -> Counter[str]:
    try:
        main = in_float64(distributed(program, plan).program)
    except InfeasibleError:
        return Counter()
    program = program._replace(function=in_float64(program.function))
    got, seen = on_ranks(program, main, len(plan.devices), look)
    for step, (a, b) in enumerate(zip(got, sequential(program), strict=True)):
        if max(np.abs(x).max(initial=0.0) for x in b) > 1e3:
            break  # it diverges, and so does rounding
        assert error(a, b) <= TOLERANCE * 10**step, f"{plan}, step {step}"
    return seen


def test_random_programs_on_random_plans() -> None:
    seen = Counter[str]()
    fixed = settings(
        max_examples=3,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=LARGE,
        deadline=None,
    )
    for block in BLOCKS:
        fixed(given(random_programs(block), PLANS)(lambda program, plan: seen.update(compared(program, plan))))()
    assert min(seen[word] for word in ("out=", "_(", "bucket", "linear(", "sgd")) >= 20, seen


@pytest.mark.parametrize("plan", [Plan(), Plan(microbatches=4), Plan(dp=2, microbatches=2, bucket_mb=0.001)], ids=str)
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
def test_optimizers(plan: Plan, optimizer: Any) -> None:
    seen = compared(small_gpt(optimizer=optimizer), plan)
    assert seen["clone("] == 0


def test_buffers_are_kept_if_nothing_is_left_in_them() -> None:
    for gradients in (False, True):
        p = imported_mlp()
        forward = import_from_onnx(EXAMPLES / "mlp.onnx", dims={"batch": BATCH})[0]
        step = with_dtype(training_step(forward, "mse", MOMENTUM, gradients=gradients), Float64)
        arrays = {v.name: x for v, x in zip(p.function.inputs, p.arrays, strict=True)}
        program = Program(step, [arrays[v.name] for v in step.inputs])
        plan = Plan(dp=2, bucket_mb=0.01)
        keeps: set[bool] = set()
        seen = compared(program, plan, lambda engine, keeps=keeps: keeps.add(engine.lowering.keeps_buffers))
        assert seen["bucket"] > 2
        assert keeps == {not gradients}


def test_a_function_that_is_called_twice_keeps_no_buffer() -> None:
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"mb": 2, "dp": 2}, "stage0")
    t = Tensor.whole(Float64, (8, 3), mesh, (REPLICATE, Shard(0, 2)))
    body = FunctionMaker("body")
    x = body.emit("LocalSlice", body.add_input_value("x", t), axis="mb", dim=0)
    sums = [body.emit("ReduceSum", y, axes=(0,), keepdims=0) for y in (x, body.emit("Exp", x))]
    bundle = body.emit("MPIAllreduce", body.emit("Pack", *sums), axis="dp")
    body.set_outputs(body.emit("Unpack", bundle))
    callee, f = body.finalize(), FunctionMaker("main")
    x = f.add_input_value("x", t)
    first, second = [f.add_op("Call", None, [x], {"mb": k}, [callee]) for k in range(2)]
    totals = [f.emit("Accumulate", a, b) for a, b in zip(first, second, strict=True)]
    f.set_outputs([f.emit("MPIAllreduce", v, axis="mb") for v in totals])
    program = Program(f.finalize(), [np.arange(24.0).reshape(8, 3) / 24])
    got, seen = on_ranks(program, program.function, 2)
    assert seen["bucket"] == 2
    for row in got:
        assert error(row, program.results()) <= TOLERANCE


def copies_on_two_ranks(program: Program) -> int:
    """How many operands of communication are copied in all steps, whose results must be right."""
    copies: list[torch.Tensor] = []
    copy = memory.DeviceMemory.copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.DeviceMemory, "copy", lambda self, x: copies.append(x) or copy(self, x))
        got, _ = on_ranks(program, program.function, 2)
    for row in got:
        assert error(row, program.results()) <= TOLERANCE
    return len(copies)


@pytest.mark.parametrize("read", ["never", "later", "by the caller"])
def test_a_sum_is_reduced_in_place_only_if_nothing_else_reads_it(read: str) -> None:
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"dp": 2}, "all")
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor.whole(Float64, (4, 3), mesh, (Shard(0, 2),)))
    part = f.emit("ReduceSum", x, axes=(0,), keepdims=0)
    total = f.emit("MPIAllreduce", part, axis="dp")
    later = [f.emit("MPIAllreduce", f.emit("Neg", part), axis="dp")] if read == "later" else []
    f.set_outputs([total, *later, *([part] if read == "by the caller" else [])])
    program = Program(f.finalize(), [np.arange(12.0).reshape(4, 3) + 1])
    assert copies_on_two_ranks(program) == (0 if read == "never" else 2 * STEPS)


@pytest.mark.parametrize("later", [False, True])
def test_a_sum_that_a_caller_gives_away_is_reduced_in_place(later: bool) -> None:
    """Unless the callee reads it again."""
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"dp": 2}, "all")
    body = FunctionMaker("body")
    part = body.add_input_value("part", Tensor.whole(Float64, (3,), mesh, (SUM,)))
    total = body.emit("MPIAllreduce", body.emit("Reshape", part, shape=(3, 1)), axis="dp")
    again = [body.emit("MPIAllreduce", body.emit("Neg", part), axis="dp")] if later else []
    body.set_outputs([body.emit("Mul", total, total), *again])
    callee, f = body.finalize(), FunctionMaker("main")
    x = f.add_input_value("x", Tensor.whole(Float64, (4, 3), mesh, (Shard(0, 2),)))
    made = f.add_op("Call", None, [f.emit("ReduceSum", x, axes=(0,), keepdims=0)], {}, [callee])
    f.set_outputs([made] if isinstance(made, Value) else made)
    program = Program(f.finalize(), [np.arange(12.0).reshape(4, 3) + 1])
    assert copies_on_two_ranks(program) == (2 * STEPS if later else 0)


def test_a_sum_that_is_reduced_is_copied_into_a_buffer() -> None:
    """Of a second reduction, along another axis: the first does not compute into it."""
    mesh = Mesh([Device("cpu", k) for k in range(4)], {"dp": 2, "tp": 2}, "all")
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor.whole(Float64, (4, 4), mesh, (Shard(0, 2), Shard(1, 2))))
    rows = [f.emit("ReduceSum", y, axes=(0, 1), keepdims=0) for y in (x, f.emit("Exp", x))]
    sums = [f.emit("MPIAllreduce", row, axis="tp") for row in rows]
    f.set_outputs(f.emit("Unpack", f.emit("MPIAllreduce", f.emit("Pack", *sums), axis="dp")))
    program = Program(f.finalize(), [np.arange(16.0).reshape(4, 4) / 16])
    got, seen = on_ranks(program, program.function, 4)
    assert seen["bucket"] > 0
    for row in got:
        assert error(row, program.results()) <= TOLERANCE


def test_what_is_given_twice_is_not_overwritten() -> None:
    """An output that is a view of what replaces an input, and two inputs that are replaced by one memory."""
    f = FunctionMaker()
    t = Tensor(Float64, (2, 3))
    a, b, c = [f.add_input_value(n, t, Role("state")) for n in "abc"]
    x = f.add_input_value("x", t, Role("constant"))
    new = f.emit("Add", a, x)
    turned = f.emit("Reshape", new, shape=(3, 2))
    same, other = f.emit("Reshape", turned, shape=(2, 3)), f.emit("Exp", f.emit("Neg", f.emit("Add", b, c)))
    f.set_outputs([new, same, other, turned])
    f.updates = {new: a, same: b, other: c}
    program = Program(f.finalize(), [np.full((2, 3), float(k + 1)) for k in range(4)])
    got, _ = on_ranks(program, program.function, 1)
    for k, (xs, ys) in enumerate(zip(got, sequential(program), strict=True)):
        assert error(xs, ys) <= TOLERANCE, k


def test_sharded_optimizers_step_together() -> None:
    """Although each weight is cut just before its own step; and where the weights are."""
    seen = compared(imported_mlp(), Plan(dp=2, microbatches=2, overlap=False, zero=2))
    assert (seen["sgd"], seen["clone("]) == (2, 0)  # one call a rank
    assert compared(imported_mlp(), Plan(dp=2, zero=1))["clone("] == 0


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=LARGE, deadline=None)
@given(st.sampled_from(BLOCKS).flatmap(random_programs), PLANS)
def test_more_random_programs(program: Program, plan: Plan) -> None:
    compared(program, plan)
