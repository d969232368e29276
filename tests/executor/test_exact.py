"""The quick paths are exact on distributed programs, too: equal, not close, to the same program inlined, op by op,
device by device, whatever the plan, the schedule, the devices and the links.

`test_simulator` and `test_memory` do the same with random programs.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.trace import live, walk
from distir.ir import Device, Function, FunctionMaker, Mesh, Role, Topology
from distir.ir.errors import InfeasibleError
from distir.ir.type import Float, Tensor
from distir.models.gpt import gpt
from distir.transforms.differentiation.training import SGD, AdamW, training_step
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.pipeline.schedule_table import Cell, Table
from tests.executor.inlined import Inlined, turns
from tests.executor.random_schedules import Slower, random_runtime, random_topology

BATCH = 8


@functools.cache
def mlp_step(layers: int, biased: bool) -> Function:
    f = FunctionMaker("mlp")
    x = f.add_input_value("x", Tensor(Float(), (BATCH, 16)), Role("data", 0))
    for i in range(layers):
        x = f.emit("MatMul", x, f.add_input_value(f"w{i}", Tensor(Float(), (16, 16)), Role("parameter")))
        if biased:
            x = f.emit("Add", x, f.add_input_value(f"b{i}", Tensor(Float(), (16,)), Role("parameter")))
        x = f.emit("Tanh", x)
    f.set_outputs([x])
    return training_step(f.finalize(), "mse", SGD(0.1, momentum=0.9))


@functools.cache
def gpt_step(layers: int) -> Function:
    return training_step(gpt(layers, 8, 4, 16, 4, BATCH, Float()), "cross-entropy", AdamW(0.01))


class Case(NamedTuple):
    """A distributed program, where it is, and the table of its schedule if it is one of its own."""

    function: Function
    topology: Topology
    plan: str


def random_table(rng: random.Random, ranks: int, microbatches: int) -> Table:
    """A table that runs: at each moment any cell that is ready, forward or backward, of any rank."""
    table: Table = [[] for _ in range(ranks)]
    done: set[Cell] = set()
    while True:
        ready: list[Cell] = []
        for s in range(ranks):
            f, b = (sum(cell.phase == phase for cell in table[s]) for phase in "FB")
            if f < microbatches and (s == 0 or Cell(s - 1, "F", f) in done):
                ready.append(Cell(s, "F", f))
            if b < f and (s == ranks - 1 or Cell(s + 1, "B", b) in done):
                ready.append(Cell(s, "B", b))
        if not ready:
            return table
        cell = rng.choice(ready)
        table[cell.stage].append(cell)
        done.add(cell)


def random_case(seed: int) -> Case:
    """An MLP's or a small GPT's training step under a random plan; raises InfeasibleError for one that cannot be."""
    rng = random.Random(seed)
    dp, tp, pp = rng.choice([1, 2, 2]), rng.choice([1, 1, 2, 4]), rng.choice([1, 2, 2, 3])
    microbatches = rng.choice([1, 2, 4])
    schedule = rng.choice(["gpipe", "1f1b", "interleaved", "random"])
    chunks = rng.choice([1, 2]) if schedule == "interleaved" else 1
    host = rng.random() < 0.3
    step = gpt_step(rng.choice([1, 2])) if rng.random() < 0.4 else mlp_step(rng.choice([6, 7]), rng.random() < 0.5)
    topology, devices = random_topology(rng, dp * tp * pp + host)
    if rng.random() < 0.3:
        rng.shuffle(devices)
    table = random_table(rng, pp, microbatches) if schedule == "random" else schedule
    order = rng.sample(["dp", "tp", "pp"], 3)
    function = parallel_transform_3d(step, dp, tp, pp, devices, microbatches, table, order=order, chunks=chunks)
    plan = f"{step.name} dp{dp} tp{tp} pp{pp} mb{microbatches} {schedule} {chunks} host{host} {order}"
    return Case(function, topology, plan)


def check(case: Case, overlap: bool, seed: int) -> Simulation:
    """Every event of every device; when each was done; what is live at any time, and its peak.

    Of half of the cases the code is that of another cost model, with other seconds.
    """
    cost = CostModel(case.topology, runtime=random_runtime(random.Random(seed)))
    if seed % 2:
        Simulator(Slower(case.topology, runtime=cost.runtime), overlap=overlap).interpret(case.function)
    simulation = Simulator(cost, overlap=overlap).interpret(case.function)
    inlined = Inlined(case.function, cost, overlap)
    assert [(e.name, e.ts, e.dur, e.pid, e.tid) for e in simulation.trace] == inlined.events
    done = inlined.timestamps()
    assert {d: t for d, t in simulation.timestamps.items() if t} == {d: t for d, t in done.items() if t}
    assert simulation.seconds == max(done.values())
    devices = list(simulation.program.classes.devices())
    for device, c in random.Random(seed).sample(devices, min(3, len(devices))):
        use, sizes = simulation.memory(device), inlined.memory(device)
        assert use.total == max(map(sum, sizes)) == simulation.peak_memory[device]
        points = live(use, list(walk(simulation.run)), c)
        assert turns(size for _, size in points) == turns(sizes)
        assert all(a <= b for (a, _), (b, _) in itertools.pairwise(points))
    return simulation


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_distributed_programs_are_simulated_exactly(seed: int, overlap: bool) -> None:
    try:
        case = random_case(seed)
    except InfeasibleError:
        assume(False)
        return
    check(case, overlap, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_distributed_programs_are_simulated_exactly_on_many(seed: int) -> None:
    try:
        case = random_case(seed)
    except InfeasibleError:
        return
    check(case, seed % 3 > 0, seed)


def test_the_random_plans_are_not_trivial() -> None:
    """Every kind of parallelism, classes of several devices and of one, hosts and calls are among them."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        try:
            case = random_case(seed)
        except InfeasibleError:
            continue
        classes = Simulator(CostModel(case.topology)).interpret(case.function).program.classes
        seen["all"] += 1
        seen["shared"] += any(n > 1 for n in classes.sizes)
        seen["parted"] += any(isinstance(h, Mesh) and len(inside) > 1 for h, inside in classes.homes.items())
        seen["host"] += "hostTrue" in case.plan
        seen["interleaved"] += "interleaved 2" in case.plan
        seen["random"] += "random" in case.plan
        seen["calls"] += sum(op.callee is not None for op in case.function.ops)
    assert seen["all"] > 35
    assert min(seen[k] for k in ("shared", "parted", "host", "interleaved", "random")) > 3, seen
    assert seen["calls"] > 500


# ---- where devices differ they do not share a class


def regular(slow: int | None = None, far: tuple[int, int] | None = None) -> tuple[Topology, list[Device]]:
    """Eight equal devices, all linked alike; but device `slow`, and but the link between the two that are `far`."""
    t = Topology()
    devices = [t.add_device("gpu", 1e9 if i == slow else 2e9, 1e9, 1e-6) for i in range(8)]
    for i, a in enumerate(devices):
        for b in devices[:i]:
            t.set_link(a, b, 3e8 if far == (b.index, a.index) else 8e8, 1e-6)
    return t, devices


def differing(function: Function, topology: Topology) -> dict[Device, int]:
    simulation = check(Case(function, topology, ""), True, 0)
    return dict(simulation.program.classes.devices())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_devices_share_a_class(schedule: str) -> None:
    topology, devices = regular()
    function = parallel_transform_3d(mlp_step(6, True), 2, 2, 2, devices, 4, schedule)
    classes = differing(function, topology)
    assert [classes[d] for d in devices] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("slow", range(8))
def test_a_slow_device_is_a_class_of_its_own(slow: int) -> None:
    topology, devices = regular(slow=slow)
    classes = differing(parallel_transform_3d(mlp_step(6, True), 2, 2, 2, devices, 4), topology)
    assert [d.index for d in devices if classes[d] == classes[devices[slow]]] == [slow]


@pytest.mark.parametrize("far", [(0, 1), (0, 2), (1, 5), (4, 6), (2, 3)])
def test_who_is_linked_by_a_slow_link_is_in_no_class_with_the_others(far: tuple[int, int]) -> None:
    """Its group is slower than the others: so are those that wait for it."""
    topology, devices = regular(far=far)
    classes = differing(parallel_transform_3d(mlp_step(6, True), 2, 2, 2, devices, 4), topology)
    ends = {classes[devices[i]] for i in far}
    rest = {c for d, c in classes.items() if d.index not in far}
    assert not ends & rest
