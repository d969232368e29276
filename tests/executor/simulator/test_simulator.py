"""The simulator against times worked out by hand, and against the same program inlined, op by op, device by device."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.executor import Simulator, infer_types
from distir.executor.cost_model import CostModel
from distir.executor.simulator.intervals import length, merged
from distir.executor.simulator.maxplus import Call
from distir.executor.simulator.simulation import Simulation
from distir.hardware import load_cluster
from distir.ir import Device, Function, FunctionMaker, Mesh, Role, Topology, Value
from distir.ir.errors import UsageError
from distir.ir.host_runtime import Runtime
from distir.ir.spec import Attrs, Spec
from distir.ir.topology import DeviceSpec, Group, Link
from distir.ir.type import REPLICATE, SUM, Float, Shard, Tensor, Tuple
from tests.executor.inlined import Inlined
from tests.executor.random_schedules import Slower, random_program, random_runtime

X = Tensor(Float(), (8, 8))


class Units(CostModel):
    """A second for Relu, two for Neg, half a second for Add, three for a collective, `hop` for a Send."""

    def __init__(self, topology: Topology, hop: float = 0.25) -> None:
        super().__init__(topology)
        self.hop = hop

    def compute_seconds(self, spec: Spec, attrs: Attrs, ins: object, outs: object, what: DeviceSpec) -> float:
        return {"Relu": 1.0, "Neg": 2.0, "Add": 0.5, "Accumulate": 0.0}[spec.name]

    def collective_seconds(self, spec: Spec, attrs: Attrs, ins: object, outs: object, group: Group) -> float:
        return 3.0

    def transfer_seconds(self, size: float, link: Link) -> float:
        return self.hop


def linked(n: int) -> Topology:
    topology = Topology()
    devices = [topology.add_device("gpu", 1e9, 1e9, 0.0) for _ in range(n)]
    for i, a in enumerate(devices):
        for b in devices[:i]:
            topology.set_bandwidth(a, b, 8)
    return topology


def rows(simulation: Simulation) -> list[tuple[float, float, float]]:
    return [(s.compute, s.communication, s.bubble) for s in simulation.stages]


def test_one_device_runs_in_order() -> None:
    topology = linked(1)
    f = FunctionMaker()
    x = f.add_input_value("x", X.moved(topology.devices[0]))
    f.emit("Add", f.emit("Neg", x), f.emit("Transpose", f.emit("Relu", x), perm=(1, 0)))
    simulation = Simulator(Units(topology)).interpret(f.finalize())
    assert simulation.seconds == simulation.timestamps[topology.devices[0]] == 3.5
    assert [(e.name, e.ts, e.dur) for e in simulation.trace] == [
        ("Neg", 0, 2),
        ("Relu", 2, 1),
        ("Transpose", 3, 0),
        ("Add", 3, 0.5),
    ]
    assert rows(simulation) == [(3.5, 0, 0)]


def test_a_program_on_no_device_runs_on_the_first() -> None:
    topology = linked(2)
    f = FunctionMaker()
    f.emit("Relu", f.add_input_value("x", X))
    simulation = Simulator(Units(topology)).interpret(f.finalize())
    assert dict(simulation.timestamps) == {topology.devices[0]: 1.0, topology.devices[1]: 0.0}
    with pytest.raises(UsageError, match="the topology has no device"):
        Simulator(Units(Topology())).interpret(f.finalize())


def test_the_notebooks_calls() -> None:
    topology = Topology()
    simulator = Simulator(CostModel(topology))  # made before devices are added
    device = topology.add_device("gpu", throughput=1e14, dram_bandwidth=1.2e12, kernel_launch_overhead=0.0)
    maker = FunctionMaker(name="f")
    x = maker.add_input_value("x", None)
    maker.add_op("MatMul", name="y", inputs=(x, x), output_names=("y",))
    function = maker.finalize()
    types = [Tensor(dtype=Float(), shape=(64, 64), device=device)]
    simulation = simulator.interpret(function, (t for t in types))
    assert len(simulation.trace) == len(function.ops)
    typed = infer_types(function, types)
    assert simulator.simulate(typed).timestamps[device] == simulation.timestamps[device] > 0
    event = simulation.trace[0]
    assert (event["name"], event["ts"], event["dur"]) == ("MatMul", 0.0, simulation.seconds)
    assert event.pid == repr(device)
    with pytest.raises(UsageError, match="%x has no type"):
        simulator.interpret(function)


def _overlapping(mesh: Mesh) -> Function:
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float(), (8, 8), mesh, [SUM]))
    y = f.add_input_value("y", Tensor(Float(), (8, 8), mesh))
    reduced = f.emit("MPIAllreduce", x, axis="tp")
    other = f.emit("Relu", f.emit("Relu", y))
    f.emit("Add", f.emit("Transpose", reduced, perm=(1, 0)), other)
    return f.finalize()


def test_communication_overlaps_compute_unless_told_not_to() -> None:
    topology = linked(2)
    f = _overlapping(Mesh(topology.devices, {"tp": 2}, "m"))
    beside = Simulator(Units(topology)).interpret(f)
    assert beside.seconds == 3.5
    assert rows(beside) == [(2.5, 1.0, 0.0)]  # of three seconds of communication two are hidden
    after = Simulator(Units(topology), overlap=False).interpret(f)
    assert after.seconds == 5.5
    assert rows(after) == [(2.5, 3.0, 0.0)]
    assert {e.tid for e in after.trace if e.name != "Transpose"} == {"compute"}
    assert {e.tid for e in beside.trace} == {"compute", "tp", "view"}


def test_a_send_meets_when_both_ends_are_ready() -> None:
    topology = linked(2)
    a, b = topology.devices
    f = FunctionMaker()
    x, y = f.add_input_value("x", X.moved(a)), f.add_input_value("y", X.moved(b))
    sent = f.emit("Send", f.emit("Relu", x), to=b)
    f.emit("Add", sent, f.emit("Neg", y))
    simulation = Simulator(Units(topology)).interpret(f.finalize())
    assert dict(simulation.timestamps) == {a: 1.25, b: 2.5}
    assert rows(simulation) == [(1.0, 0.25, 1.25), (2.5, 0.0, 0.0)]
    one_stream = Simulator(Units(topology), overlap=False).interpret(f.finalize())
    # the Send stands before Neg on b's only stream
    assert dict(one_stream.timestamps) == {a: 1.25, b: 3.75}


def _stages(topology: Topology, order: list[list[str]], microbatches: int) -> Function:
    """A body Relu forward and a body Relu backward on each stage, in the order of a table of cells like `0F3`."""
    meshes = [Mesh([d], {"mb": microbatches}, f"stage{i}") for i, d in enumerate(topology.devices)]
    whole = [Tensor.whole(Float(), (8 * microbatches, 8), m, [Shard(0)]) for m in meshes]
    bodies: dict[tuple[int, str], Function] = {}
    for i, t in enumerate(whole):
        f = FunctionMaker(f"fwd{i}")
        y = f.emit("Relu", f.add_input_value("x", t))
        f.set_outputs([y, f.emit("Pack", y)])
        bodies[i, "F"] = f.finalize()
        f = FunctionMaker(f"bwd{i}")
        f.add_input_value("saved", Tuple([t]))
        f.set_outputs([f.emit("Relu", f.add_input_value("d", t))])
        bodies[i, "B"] = f.finalize()
    main, last = FunctionMaker(), len(meshes) - 1
    ready: dict[tuple[int, str, int], list[Value]] = {
        (0, "F", k): [main.add_input_value("x", whole[0].at(k))] for k in range(microbatches)
    }
    todo = [list(cells) for cells in order]
    while any(todo):
        i = next(i for i, cells in enumerate(todo) if cells and _key(i, cells[0]) in ready)
        _, phase, k = _key(i, todo[i].pop(0))
        operands = ready.pop((i, phase, k))
        out = main.add_op("Call", None, operands, {"mb": k}, [bodies[i, phase]])
        if phase == "F":
            y, saved = out
            if i < last:
                ready[i + 1, "F", k] = [main.emit("Send", y, to=meshes[i + 1])]
            ready[i, "B", k] = [saved] if i < last else [saved, y]
            if i < last:  # waits for what the next stage sends back
                ready[i, "saved", k] = ready.pop((i, "B", k))
        elif i:
            ready[i - 1, "B", k] = [*ready.pop((i - 1, "saved", k)), main.emit("Send", out, to=meshes[i - 1])]
    return main.finalize()


def _key(i: int, cell: str) -> tuple[int, str, int]:
    return i, cell[0], int(cell[1:])


def _gpipe(p: int, m: int) -> list[list[str]]:
    return [[f"F{k}" for k in range(m)] + [f"B{k}" for k in range(m)] for _ in range(p)]


def _1f1b(p: int, m: int) -> list[list[str]]:
    table = []
    for i in range(p):
        warm = min(p - i - 1, m)
        cells = [f"F{k}" for k in range(warm)]
        for k in range(m - warm):
            cells += [f"F{warm + k}", f"B{k}"]
        table.append(cells + [f"B{k}" for k in range(m - warm, m)])
    return table


@pytest.mark.parametrize("order", [_gpipe, _1f1b])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 3), (4, 8)])
def test_the_bubble_of_a_pipeline_is_the_textbooks(order, p: int, m: int) -> None:
    topology = linked(p)
    simulation = Simulator(Units(topology, hop=0.0)).interpret(_stages(topology, order(p, m), m))
    assert simulation.seconds == 2 * m + 2 * (p - 1)  # the bubble is (p - 1) / m of the ideal time
    assert [s.compute for s in simulation.stages] == [2 * m] * p


def test_a_two_stage_pipeline_by_hand() -> None:
    """1F1B, two microbatches, a quarter of a second a Send; stage 0: F0 F1 . B0 . B1, stage 1: F0 B0 F1 B1."""
    topology = linked(2)
    simulation = Simulator(Units(topology)).interpret(_stages(topology, _1f1b(2, 2), 2))
    computed = [e for e in simulation.trace if e.tid == "compute"]
    assert [e.ts for e in computed if e.pid == "gpu:0"] == [0, 1, 3.5, 5.5]
    assert [e.ts for e in computed if e.pid == "gpu:1"] == [1.25, 2.25, 3.25, 4.25]
    assert [(e.ts, e.tid) for e in simulation.trace if e.name == "Send" and e.pid == "gpu:0"] == [
        (1.0, "send stage1"),
        (2.0, "send stage1"),
        (3.25, "recv stage1"),
        (5.25, "recv stage1"),
    ]
    assert simulation.seconds == 6.5
    assert rows(simulation) == [(4.0, 0.75, 1.75), (4.0, 0.5, 2.0)]


def _same(seed: int, overlap: bool) -> None:
    function, topology = random_program(seed)
    cost = CostModel(topology, runtime=random_runtime(random.Random(seed)))
    if seed % 2:  # its code is that of another cost model, with other seconds
        Simulator(Slower(topology, runtime=cost.runtime), overlap=overlap).interpret(function)
    simulation = Simulator(cost, overlap=overlap).interpret(function)
    inlined = Inlined(function, cost, overlap)
    got = [(e.name, e.ts, e.dur, e.pid, e.tid) for e in simulation.trace]
    assert got == inlined.events
    assert len(simulation.trace) == len(got)
    assert {d: t for d, t in simulation.timestamps.items() if t} == {d: t for d, t in inlined.timestamps().items() if t}
    for device, c in simulation.program.classes.devices():
        mine = [(a, a + d, s) for _, a, d, who, s in inlined.events if who == repr(device) and s != "view"]
        lost = [(a, a + d) for who, a, d in inlined.lost if who is device]
        busy = length(merged([np.reshape([*[(a, b) for a, b, _ in mine], *lost], (-1, 2))]))
        stage = simulation.stages[c]
        assert stage.communication + stage.compute == busy
        assert stage.bubble == simulation.seconds - busy
        if overlap:
            assert stage.compute == sum(b - a for a, b, s in mine if s == "compute")


def _compare(function: Function, topology: Topology) -> Simulation:
    simulation, inlined = Simulator(Units(topology)).interpret(function), Inlined(function, Units(topology))
    assert [(e.name, e.ts, e.dur, e.pid, e.tid) for e in simulation.trace] == inlined.events
    mine = [(a, a + d) for _, a, d, who, s in inlined.events if who == "gpu:0" and s != "view"]
    busy = length(merged([np.array(mine)]))
    assert simulation.stages[0].compute + simulation.stages[0].communication == busy
    return simulation


def test_an_input_passed_on_by_a_call_in_a_call_is_waited_for() -> None:
    topology = linked(2)
    mesh = Mesh(topology.devices, {"tp": 2}, "m")
    t = Tensor(Float(), (8, 8), mesh, [SUM])
    inner = FunctionMaker("inner")
    x = inner.add_input_value("x", t)
    inner.emit("Neg", x)  # so that x waits for compute; passed on, it is waited for on tp
    inner.set_outputs([x])
    outer = FunctionMaker("outer")
    got = outer.add_op("Call", None, [outer.add_input_value("x", t)], {}, [inner.finalize()])
    outer.set_outputs([outer.emit("MPIAllreduce", got, axis="tp")])
    main = FunctionMaker()
    y = main.emit("Neg", main.emit("Neg", main.add_input_value("x", t)))
    main.add_op("Call", None, [y], {}, [outer.finalize()])
    assert _compare(main.finalize(), topology).seconds == 7


def test_calls_entered_at_different_delays_are_told_apart() -> None:
    """What the device does in a call depends on when its second input comes: before, in, or after its compute."""
    topology = linked(4)
    here, there = (Mesh(topology.devices[i : i + 2], {"tp": 2}, f"m{i}") for i in (0, 2))
    t = Tensor(Float(), (8, 8), here, [SUM])
    body = FunctionMaker("body")
    x, late = body.add_input_value("x", Tensor(Float(), (8, 8), here)), body.add_input_value("late", t)
    body.emit("Relu", body.emit("Relu", x))
    reduced = body.emit("MPIAllreduce", late, axis="tp")
    body.set_outputs([body.emit("Relu", reduced)])
    function = body.finalize()
    main = FunctionMaker()
    x, y = main.add_input_value("x", Tensor(Float(), (8, 8), here)), main.add_input_value("y", t.moved(there))
    for delay in (0, 1, 9, 0, 0, 5, 2, 3, 4, 0, 0):
        for _ in range(delay):
            y = main.emit("Neg", y)
        main.add_op("Call", None, [x, main.emit("Send", y, to=here)], {}, [function])
    _compare(main.finalize(), topology)


@settings(max_examples=60)
@given(st.integers(0, 1 << 32), st.booleans())
def test_replay_is_exact(seed: int, overlap: bool) -> None:
    """Every event, every clock, every second of compute, communication and bubble: equal, not close."""
    _same(seed, overlap)


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_what_is_waited_for_makes_no_step_quicker(seed: int) -> None:
    """Nothing is sent beside what a waiting device sends along the same axis."""
    function, topology = random_program(seed)
    runtime = random_runtime(random.Random(seed)) or Runtime("none")
    beside, behind = [
        Simulator(CostModel(topology, runtime=replace(runtime, synchronous=waits))).interpret(function).seconds
        for waits in (False, True)
    ]
    assert behind >= beside


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(750))
def test_replay_is_exact_on_many(seed: int) -> None:
    _same(seed, True)


def test_random_programs_are_not_trivial() -> None:
    """Calls, live and dead entries, shared and single classes, several devices in each kind of topology."""
    calls = live = columns = shared = different = 0
    for seed in range(60):
        function, topology = random_program(seed)
        program = Simulator(CostModel(topology)).interpret(function).program
        found = [p for p in program.main.plans if isinstance(p, Call)]
        calls += len(found)
        live += sum(len(p.live) for p in found)
        columns += sum(len(p.body.columns) for p in found)
        shared += any(n > 1 for n in program.classes.sizes)
        different += any(isinstance(h, Mesh) and len(inside) > 1 for h, inside in program.classes.homes.items())
    assert calls > 500
    assert 0.05 < live / columns < 0.9
    assert shared > 10
    assert different > 10


def _data_parallel(devices: list[Device], tp: int) -> Function:
    mesh = Mesh(devices, {"dp": len(devices) // tp, "tp": tp}, "all")
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float(), (64, 64), mesh, [SUM, SUM]))
    f.emit("Relu", f.emit("MPIAllreduce", f.emit("MPIAllreduce", x, axis="tp"), axis="dp"))
    return f.finalize()


def test_work_does_not_grow_with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Topology, devices: object) -> Group:
        raise AssertionError("a group was looked at device by device")

    small, large = load_cluster("dgx-h100", devices=64), load_cluster("dgx-h100", devices=65536)
    monkeypatch.setattr(Topology, "group", never)
    for cluster in (small, large):
        simulation = Simulator(CostModel(cluster)).interpret(_data_parallel(cluster.devices, 8))
        assert len(simulation.program.classes.sizes) == 1
        assert len(simulation.timestamps) == len(cluster.devices)
        assert len(simulation.trace) == 3 * len(cluster.devices)
        found = {axis: peers for (_, axis), peers in simulation.program.classes.peers.items()}
        (peers,) = found["dp"]
        assert (peers.group.size, peers.group.nodes) == (len(cluster.devices) // 8, len(cluster.devices) // 8)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("shift", [0, 3, 8])
def test_classes_by_arithmetic_are_those_found_device_by_device(tp: int, shift: int) -> None:
    cluster = load_cluster("dgx-a100", nodes=7)
    function = _data_parallel(cluster.devices[shift : shift + 48], tp)
    quick = Simulator(CostModel(cluster)).interpret(function)
    inlined = Inlined(function, CostModel(cluster))
    assert [(e.name, e.ts, e.dur, e.pid, e.tid) for e in quick.trace] == inlined.events


def test_the_slowest_device_holds_up_its_group_only() -> None:
    topology = Topology()
    devices = [topology.add_device("gpu", 1e9, 2e6 if i == 3 else 1e9, 0.0) for i in range(4)]
    for i, a in enumerate(devices):
        for b in devices[:i]:
            topology.set_bandwidth(a, b, 8)
    mesh = Mesh(devices, {"dp": 2, "tp": 2}, "m")
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float(), (500, 500), mesh, [REPLICATE, SUM]))
    f.emit("MPIAllreduce", f.emit("Neg", x), axis="tp")
    simulation = Simulator(CostModel(topology)).interpret(f.finalize())
    times = [simulation.timestamps[d] for d in devices]
    assert times[0] == times[1] < 0.1
    assert times[2] == times[3] > 0.9
    assert sorted(simulation.program.classes.sizes) == [1, 1, 2]


@pytest.mark.parametrize("slow", [0, 2])
def test_partners_of_different_devices_are_of_different_classes(slow: int) -> None:
    """One slow device among the senders, or among the receivers, who send something back."""
    topology = Topology()
    devices = [topology.add_device("gpu", 1e9, 2e6 if i == slow else 1e9, 0.0) for i in range(4)]
    for i, a in enumerate(devices):
        for b in devices[:i]:
            topology.set_bandwidth(a, b, 8)
    here, there = Mesh(devices[:2], {"dp": 2}, "here"), Mesh(devices[2:], {"dp": 2}, "there")
    f = FunctionMaker()
    x = f.emit("Send", f.emit("Relu", f.add_input_value("x", Tensor(Float(), (500, 500), here))), to=there)
    f.emit("Relu", f.emit("Send", f.emit("Relu", x), to=here))
    function, cost = f.finalize(), CostModel(topology)
    simulation = Simulator(cost).interpret(function)
    inlined = Inlined(function, cost).timestamps()
    assert dict(simulation.timestamps) == inlined
    assert simulation.program.classes.sizes == [1, 1, 1, 1]
    assert inlined[devices[0]] > 0.9 > 0.1 > inlined[devices[1]]


def test_who_waits_for_different_devices_is_of_different_classes() -> None:
    """Without overlap a sender waits until its receiver is free."""
    topology = Topology()
    devices = [topology.add_device("gpu", 1e9, 2e6 if i == 2 else 1e9, 0.0) for i in range(4)]
    for a, b in ((0, 2), (1, 3)):
        topology.set_bandwidth(devices[a], devices[b], 8)
    here, there = Mesh(devices[:2], {"dp": 2}, "here"), Mesh(devices[2:], {"dp": 2}, "there")
    f = FunctionMaker()
    f.emit("Relu", f.add_input_value("y", Tensor(Float(), (500, 500), there)))
    f.emit("Send", f.add_input_value("x", Tensor(Float(), (500, 500), here)), to=there)
    simulation = Simulator(CostModel(topology), overlap=False).interpret(f.finalize())
    assert simulation.timestamps[devices[0]] > 0.9 > 0.1 > simulation.timestamps[devices[1]]


def test_rates_table_and_fit() -> None:
    topology = Topology()
    device = topology.add_device("gpu", 1e9, 1e9, 0.0, memory=2**30)
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float(), (2**14, 2**14), device), Role("data", 0))
    f.emit("Relu", x)
    simulation = Simulator(Units(topology)).interpret(f.finalize(), tokens=2**15)
    assert (simulation.samples_per_second, simulation.tokens_per_second) == (2**14, 2**15)
    fit = simulation.fits()
    assert not fit
    assert fit.message == "short by 1.0 GiB on gpu:0 (needs 2.0 GiB, has 1.0 GiB)"
    text = str(simulation)
    assert [line.split()[0] for line in text.splitlines()] == ["stage", "gpu:0", "step"]
    assert "16,384.0 samples/s, 32,768 tokens/s" in text
    assert simulation.fits(load_cluster("dgx-a100"))
    assert Simulator(Units(topology)).interpret(f.finalize(), batch=5).samples_per_second == 5


def test_a_device_that_is_not_there() -> None:
    topology = linked(1)
    f = FunctionMaker()
    f.emit("Relu", f.add_input_value("x", X.moved(Device("gpu", 5))))
    with pytest.raises(UsageError, match="gpu:5 is not a device"):
        Simulator(CostModel(topology)).interpret(f.finalize())
    with pytest.raises(KeyError):
        Simulator(Units(topology)).interpret(_relu(topology)).timestamps[Device("gpu", 5)]


def _relu(topology: Topology) -> Function:
    f = FunctionMaker()
    f.emit("Relu", f.add_input_value("x", X.moved(topology.devices[0])))
    return f.finalize()
