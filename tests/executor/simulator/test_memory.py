"""Live memory against counts by hand, and against the same program inlined, buffer by buffer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distir
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator.categories import GRADIENT
from distir.executor.simulator.memory import MemoryUse
from distir.executor.simulator.trace import live, walk
from distir.ir import Device, Function, FunctionMaker, Mesh, Role, Topology
from distir.ir.errors import UsageError
from distir.ir.host_runtime import Runtime
from distir.ir.type import NOW, SUM, Float, Float16, Shard, Tensor, Tuple
from distir.ops.rules import tensor
from tests.executor.inlined import Inlined, turns
from tests.executor.random_schedules import random_program

ONE = 4 * 1024
"""Bytes of the tensors used here."""


def topology(n: int = 1) -> Topology:
    made = Topology()
    devices = [made.add_device("gpu", 1e9, 1e9, 0.0) for _ in range(n)]
    for i, a in enumerate(devices):
        for b in devices[:i]:
            made.set_bandwidth(a, b, 8)
    return made


DEVICE = Device("gpu", 0)
X = Tensor(Float(), (32, 32), DEVICE)


def use(f: FunctionMaker | Function, n: int = 1, device: Device = DEVICE, runtime: Runtime | None = None) -> MemoryUse:
    function = f.finalize() if isinstance(f, FunctionMaker) else f
    return Simulator(CostModel(topology(n), runtime=runtime)).interpret(function).memory(device)


def test_values_die_after_their_last_use() -> None:
    f = FunctionMaker()
    a = f.add_input_value("x", X)
    for _ in range(5):
        a = f.emit("Relu", a)
    got = use(f)
    assert got.total == 3 * ONE  # the input, which the caller holds, and two of the chain
    assert [sum(p.after) for p in got.curve] == [2 * ONE] * 5
    assert got.where is f.ops[1]
    assert sum(got.start) == ONE


def test_views_share_their_operands_buffer() -> None:
    f = FunctionMaker()
    y = f.emit("Relu", f.add_input_value("x", X))
    z = f.emit("Transpose", f.emit("Reshape", y, shape=(64, 16)), perm=(1, 0))
    w = f.emit("Relu", f.emit("Relu", z))
    f.set_outputs([w, z])
    assert use(f).total == 4 * ONE


@pytest.mark.parametrize("fuses", [False, True])
def test_what_a_fused_kernel_hands_on_takes_no_memory(fuses: bool) -> None:
    """A sum over microbatches, of what each gives in 16 bits: whether the cast of it is ever whole."""
    mesh = Mesh([DEVICE], {"mb": 2}, "m")
    narrow = Tensor(Float16, (32, 32), mesh, (SUM,), (1, 2))
    f = FunctionMaker()
    done = f.add_input_value("sum", Tensor(Float(), (32, 32), mesh, (SUM,), (0, 1)))
    x = f.emit("Cast", f.emit("Cast", f.add_input_value("x", narrow), to=Float()), to=Float16)
    cast = f.emit("Cast", x, to=Float())
    f.set_outputs([f.emit("Accumulate", done, cast)])
    got = use(f, runtime=Runtime("host", fuses=fuses))
    assert sum(got.start) == ONE + ONE // 2
    # the inputs, which the caller holds, and the sum; and what is added to it: its cast, or, without that, itself
    assert got.total == sum(got.start) + ONE + (ONE // 2 if fuses else ONE)


@pytest.mark.parametrize("fuses", [False, True])
def test_a_chain_keeps_what_it_reads(fuses: bool) -> None:
    """The operand of a chain is live until the chain ends; a wider one than its result is not kept for it."""
    f = FunctionMaker()
    a = f.emit("Neg", f.emit("MatMul", f.add_input_value("x", X), f.add_input_value("y", X)))
    small = f.emit("Cast", f.emit("Exp", a), to=Float16)
    f.set_outputs([f.emit("Neg", small)])
    got = use(f, runtime=Runtime("host", fuses=fuses))
    # x and y, and: the product and each of its successors; or the product until the cast is written, and that
    assert got.total == (3 * ONE + ONE // 2 if fuses else 4 * ONE)


def test_a_chain_of_two_operands_writes_what_it_makes_of_them() -> None:
    f = FunctionMaker()
    x, y = (f.add_input_value(name, X) for name in "xy")
    f.set_outputs([f.emit("Neg", f.emit("Add", f.emit("MatMul", x, y), f.emit("MatMul", y, x)))])
    assert use(f, runtime=Runtime("host", fuses=True)).total == use(f).total == 5 * ONE


def test_what_nobody_uses_dies_at_once() -> None:
    f = FunctionMaker()
    x = f.add_input_value("x", X)
    f.emit("Relu", x)
    f.set_outputs([f.emit("Relu", x)])
    assert use(f).total == 2 * ONE


@pytest.mark.parametrize("used", [False, True])
def test_what_a_reduction_takes_lives_while_it_is_under_way(used: bool) -> None:
    """Until the next starts; unless its result is used at once, and so waited for."""
    mesh = Mesh((Device("gpu", 0), Device("gpu", 1)), {"dp": 2})
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float(), (32, 32), mesh, (SUM,)))
    first = f.emit("MPIReduceScatter", f.emit("Add", x, x), axis="dp", dim=0)
    others = [f.emit("Relu", first)] if used else [first]
    second = f.emit("MPIReduceScatter", f.emit("Add", x, x), axis="dp", dim=0)
    f.set_outputs([*others, second])
    got = use(f, 2)
    # the input, one part and one more whole; and the first whole, or the second part
    assert got.total == 2.5 * ONE + (0.5 * ONE if used else ONE)
    assert sum(got.curve[-1].after) == 2 * ONE


def _step(donate: bool) -> FunctionMaker:
    f = FunctionMaker()
    w = f.add_input_value("a", X, Role("parameter"))
    g = f.emit("Relu", w)
    new = f.emit("SGD", w, g, lr=0.1)
    f.set_outputs([new] if donate else [new, f.emit("Relu", w)])
    f.updates[new] = w
    return f


def test_an_update_takes_over_its_parameters_buffer() -> None:
    got = use(_step(donate=True))
    assert got.by_category() == {
        "parameters": ONE,
        "gradients": ONE,
        "optimizer state": 0,
        "activations": 0,
        "buffers": 0,
    }
    assert got.curve[-1].after == (ONE, 0, 0, 0, 0)


def test_but_not_if_the_old_value_is_still_needed() -> None:
    assert use(_step(donate=False)).by_category()["parameters"] == 2 * ONE


def test_an_input_that_is_not_updated_stays_and_is_not_taken_over() -> None:
    f = FunctionMaker()
    w = f.add_input_value("w", X, Role("parameter"))
    f.emit("SGD", w, f.emit("Relu", w), lr=0.1)
    got = use(f)
    assert got.total == 3 * ONE
    assert got.curve[-1].after[0] == ONE


def test_roles_are_categories() -> None:
    f = FunctionMaker()
    f.add_input_value("p", X, Role("parameter"))
    f.add_input_value("s", X, Role("state"))
    f.add_input_value("s", X, Role("state"))
    f.add_input_value("d", X, Role("data", 0))
    f.add_input_value("plain", X)
    assert use(f).start == (ONE, 0, 2 * ONE, 0, 2 * ONE)


def test_what_forward_ops_save_for_backward_ops_is_an_activation() -> None:
    f = FunctionMaker()
    x = f.add_input_value("x", X, Role("data", 0))
    y = f.emit("Relu", x)
    forward = f.ops[-1]
    z = f.emit("Relu", f.emit("Relu", y))
    f.add_op("ReluGrad", None, [y, z], of=forward)
    got = use(f)
    assert got.by_category()["activations"] == 2 * ONE  # y and z, but not what lies between them
    assert got.by_category()["buffers"] == 2 * ONE


def _pipeline(microbatches: int) -> Function:
    """One stage: all forwards, then all backwards, whose gradients add up, then an update."""
    mesh = Mesh([DEVICE], {"mb": microbatches}, "stage0")
    x = Tensor.whole(Float(), (32 * microbatches, 32), mesh, [Shard(0)])
    w = Tensor(Float(), (32, 32), mesh)

    def forward() -> Function:
        f = FunctionMaker("forward")
        a, b = f.add_input_value("w", w), f.add_input_value("x", x)
        h = f.emit("Relu", f.emit("MatMul", b, a))
        f.set_outputs([f.emit("Pack", b, h)])
        return f.finalize()

    def backward(first: bool) -> Function:
        f = FunctionMaker("backward")
        b, h = f.emit("Unpack", f.add_input_value("saved", Tuple([x, x])))
        d = f.emit("Relu", h)
        g = f.emit("MatMul", f.emit("Transpose", b, perm=(1, 0)), d)
        if not first:
            g = f.emit("Accumulate", f.add_input_value("sum", w.placed("mb", SUM, (0, NOW))), g)
        f.set_outputs([g])
        return f.finalize()

    body, start, more = forward(), backward(True), backward(False)
    main = FunctionMaker()
    weight = main.add_input_value("w", w, Role("parameter"))
    data = [main.add_input_value("x", x.at(k), Role("data", 0)) for k in range(microbatches)]
    saved = [main.add_op("Call", None, [weight, d], {"mb": k}, [body]) for k, d in enumerate(data)]
    total = main.add_op("Call", None, [saved[0]], {"mb": 0}, [start])
    for k in range(1, microbatches):
        total = main.add_op("Call", None, [saved[k], total], {"mb": k}, [more])
    new = main.emit("SGD", weight, main.emit("MPIAllreduce", total, axis="mb"), lr=0.1)
    main.set_outputs([new])
    main.updates[new] = weight
    return main.finalize()


@pytest.mark.parametrize("m", [2, 3, 8])
def test_a_pipeline_stage_by_hand(m: int) -> None:
    got = use(_pipeline(m))
    # at the second backward: weight and inputs; what m - 1 forwards saved, the input being the caller's; the sum, the
    # next gradient beside it and, while that is made, d
    calls = {p.op: p for p in got.curve}
    assert sum(calls[m - 1].after) == ONE * (1 + m + m)
    assert sum(calls[m].after) == ONE * (1 + m + (m - 1) + 1)
    assert sum(calls[m + 1].highest) == ONE * (1 + m + (m - 1) + 1 + 1)
    assert calls[m].after == (ONE, ONE, 0, ONE * (m - 1), ONE * m)
    assert calls[max(calls)].after == (ONE, 0, 0, 0, ONE * m)
    assert got.total == ONE * (1 + m + m + 1)


def test_more_microbatches_take_no_more_evaluations() -> None:
    sizes = []
    for m in (4, 40):
        simulation = Simulator(CostModel(topology())).interpret(_pipeline(m))
        simulation.memory(DEVICE)
        sizes.append(len(simulation._memory._results))
    assert sizes[0] == sizes[1] <= 4


def _compare(f: FunctionMaker) -> MemoryUse:
    function = f.finalize()
    cost = CostModel(topology())
    most, end = Inlined(function, cost).peak(DEVICE)
    got = use(function)
    assert (got.total, list(got.curve[-1].after)) == (most, end)
    return got


def _update() -> Function:
    """A body that updates its first operand with its second, in place if it may."""
    f = FunctionMaker("update")
    a, b = f.add_input_value("a", X), f.add_input_value("b", X)
    f.set_outputs([f.emit("Relu", f.emit("SGD", a, b, lr=0.1))])
    return f.finalize()


def test_operands_that_share_a_buffer_are_told_apart_from_those_that_do_not() -> None:
    f, body = FunctionMaker(), _update()
    x = f.add_input_value("x", X)
    for _ in range(2):
        y, z = f.emit("Relu", x), f.emit("Relu", x)
        f.add_op("Call", None, [y, z], {}, [body])
        y = f.emit("Relu", x)
        f.add_op("Call", None, [y, f.emit("Transpose", y, perm=(1, 0))], {}, [body])
    f.set_outputs([])
    _compare(f)


def test_one_tensor_kept_of_many() -> None:
    """A body gives back one member of a bundle that the caller still holds: when that goes, the member stays."""
    make, keep = FunctionMaker("make"), FunctionMaker("keep")
    x = make.add_input_value("x", X)
    make.set_outputs([make.emit("Pack", *[make.emit("Relu", x) for _ in range(3)])])
    bundle = Tuple([X, X, X])
    _, middle, _ = keep.emit("Unpack", keep.add_input_value("all", bundle))
    keep.emit("Relu", middle)
    keep.set_outputs([keep.emit("Transpose", middle, perm=(1, 0))])
    drop = FunctionMaker("drop")
    for v in drop.emit("Unpack", drop.add_input_value("all", bundle)):
        drop.emit("Relu", v)
    drop.set_outputs([])
    f = FunctionMaker()
    x = f.add_input_value("x", X)
    everything = f.add_op("Call", None, [x], {}, [make.finalize()])
    member = f.add_op("Call", None, [everything], {}, [keep.finalize()])
    f.add_op("Call", None, [everything], {}, [drop.finalize()])
    f.set_outputs([f.emit("Relu", f.emit("Relu", member))])
    got = _compare(f)
    assert [sum(p.after) // ONE for p in got.curve] == [4, 4, 2, 2, 2]


def _same(seed: int) -> None:
    function, where = random_program(seed)
    cost = CostModel(where)
    simulation = Simulator(cost).interpret(function)
    inlined = Inlined(function, cost)
    for device, c in simulation.program.classes.devices():
        got, sizes = simulation.memory(device), inlined.memory(device)
        assert got.total == max(map(sum, sizes)) == simulation.peak_memory[device]
        assert (got.curve[-1].after if got.curve else got.start) == sizes[-1]
        points = live(got, list(walk(simulation.run)), c)
        assert turns(size for _, size in points) == turns(sizes)


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_calls_count_as_their_bodies_inlined(seed: int) -> None:
    """The peak of every device, and by category what is live at any time."""
    _same(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500))
def test_calls_count_as_their_bodies_inlined_on_many(seed: int) -> None:
    _same(seed)


def test_devices_that_are_not_used() -> None:
    f = FunctionMaker()
    f.emit("Relu", f.add_input_value("x", X))
    simulation = Simulator(CostModel(topology(2))).interpret(f.finalize())
    assert simulation.peak_memory[Device("gpu", 1)] == 0
    with pytest.raises(UsageError, match="does not use gpu:1"):
        simulation.memory(Device("gpu", 1))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("chunks", [1, 2])
def test_sums_of_gradients_have_a_buffer(zero: int, chunks: int) -> None:
    """As large as all weights in float32 from the start; what is summed up in it takes no more."""
    sizes = "gpt:layers=4,hidden=32,heads=4,vocab=64,seq=16,batch=16,tied=0"
    model = distir.load(sizes, loss="cross-entropy", optimizer="adamw", precision="bf16")
    schedule = "interleaved" if chunks > 1 else "1f1b"
    plan = distir.Plan(dp=2, pp=2, microbatches=4, zero=zero, chunks=chunks, schedule=schedule)
    plain, buffered = (
        distir.simulate(model, plan, CostModel(topology(4), runtime=Runtime("host", gradient_buffer=has))).simulation
        for has in (False, True)
    )
    for device in topology(4).devices:
        weights = [
            math.prod(tensor(v).global_shape)
            for v in plain.program.function.inputs
            if v.kind == "parameter" and device in tensor(v).mesh.devices
        ]
        without, found = plain.memory(device), buffered.memory(device)
        buffer = found.start[GRADIENT] - without.start[GRADIENT]
        assert buffer == 4 * sum(weights)
        for a, b in zip(without.curve, found.curve, strict=True):
            assert b.after[GRADIENT] - buffer in (0, 4)  # the sum of losses
            assert sum(b.after) - b.after[GRADIENT] == sum(a.after) - a.after[GRADIENT]
        assert found.total == max([sum(p.highest) for p in found.curve])
        assert buffered.peak_memory[device] == found.total  # counted without categories
