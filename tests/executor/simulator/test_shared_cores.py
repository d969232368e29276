"""Ranks that share the cores of a host: what the seconds of every op must be, from what is busy beside it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import distir
from distir.api.calibration_runs import perceptron
from distir.executor.cost_model import CostModel
from distir.executor.simulator import shared_cores
from distir.executor.simulator.simulation import Simulation, Simulator
from distir.hardware import load_cluster, this_host
from distir.ir import Device, Function, FunctionMaker, Mesh, Op, Value
from distir.ir.host_runtime import Runtime
from distir.ir.topology import CoreSharing, Topology, cores_of
from distir.ir.type import SUM, Float32, Tensor
from distir.transforms.rank.project import homes_of
from tests.executor.random_schedules import random_program, random_runtime


def simulated(
    f: Function,
    t: Topology,
    sharing: CoreSharing | None,
    runtime: Runtime | None = None,
    overlap: bool | None = None,
) -> Simulation:
    assert t.regular is not None
    cost = CostModel(Topology(replace(t.regular, sharing=sharing)), runtime=runtime)
    return Simulator(cost, overlap=overlap).interpret(f)


def level(demands: list[float], bandwidth: float) -> float:
    """At most how many bytes/s each of several ranks gets so that all together get the bandwidth, by bisection."""
    if len(demands) < 2 or sum(demands) <= bandwidth:
        return math.inf
    low, high = 0.0, max(demands)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if sum([min(d, middle) for d in demands]) > bandwidth else (middle, high)
    return high


def law_holds(alone: Simulation, shared: Simulation, sharing: CoreSharing) -> bool:
    """Whether each op got its seconds alone, at the rate that is left to it by what is busy beside it. What feeds the
    ranks takes a core for each from the begin until it has its seconds."""
    ranks = sum(shared.program.classes.sizes)
    cost = shared.program.cost
    events = list(zip(alone.trace, shared.trace, strict=True))
    spans = [(e.ts, e.ts + e.dur) for _, e in events]
    computes = [e.tid == "compute" for e, _ in events]
    demands = [0.0] * len(events)
    for k, (e, _) in enumerate(events):
        if computes[k] and e.dur and sharing.bandwidth < math.inf:
            ins, outs = [v.type for v in e.op.inputs], [v.type for v in e.op.outputs]
            demands[k] = cost.streamed(e.op.spec, e.op.attributes, ins, outs) / e.dur
    edges = sorted({0.0, *[x for span in spans for x in span]})

    devices = sorted([d for d, _ in shared.program.classes.devices()], key=lambda d: d.index)
    own = [set(cores_of(r, ranks, sharing.cores)) for r in range(ranks)]
    """The cores of each rank."""
    rank_of = [[repr(d) for d in devices].index(e.pid) for _, e in events]
    works = [computes[k] or e.pid in made_on(e.op) for k, (_, e) in enumerate(events)]
    """What is sent is copied by who receives it."""
    together: dict[object, set[int]] = {}
    for k, (_, e) in enumerate(events):
        together.setdefault((id(e.op), e.ts, e.dur), set()).update([rank_of[k]] * works[k])
    ranks_of = [together[id(e.op), e.ts, e.dur] for _, e in events]
    """Those that do an op together, or alike: as fast as the slowest of them."""

    def busy(a: float, b: float) -> list[int]:
        return [k for k, (s, t) in enumerate(spans) if s <= a and b <= t]

    def slower(running: list[int], fed: bool, among: set[int]) -> float:
        """How much slower the slowest of some ranks is: each by what is busy on its cores."""
        wanted = [0.0] * ranks
        for k in running:
            wanted[rank_of[k]] += 1.0 if computes[k] else works[k] * sharing.communication
        return max(
            [1.0, *[sum([fed + wanted[x] for x in range(ranks) if own[x] == own[r]]) / len(own[r]) for r in among]]
        )

    left, end = sharing.feeding, 0.0
    for a, b in pairwise([*edges, math.inf]):
        rate = slower(busy(a, b), True, set(range(ranks)))
        end = min(b, a + left * rate)
        left -= (end - a) / rate
        if end < b:
            break
    got = [0.0] * len(events)
    for a, b in pairwise(sorted({*edges, end})):
        running = busy(a, b)
        cores = {k: slower(running, b <= end, ranks_of[k]) for k in running}
        most = level([demands[k] / cores[k] for k in running if demands[k]], sharing.bandwidth)
        for k in running:
            compute, send = 1 / cores[k], 1 / (1 - sharing.communication + sharing.communication * cores[k])
            rate = compute if computes[k] else send
            got[k] += (b - a) * (min(rate, most / demands[k]) if demands[k] else rate)
    return all(x == pytest.approx(e.dur, rel=1e-6, abs=1e-12) for x, (e, _) in zip(got, events, strict=True))


def made_on(op: Op) -> set[str]:
    """The devices of an op's results."""
    homes = [home for v in op.outputs for home in homes_of(v.type)]
    return {repr(d) for home in homes for d in (home.devices if isinstance(home, Mesh) else (home,))}


SHARINGS = st.builds(
    CoreSharing,
    st.integers(1, 3),
    st.sampled_from([math.inf, 1e9, 1e7]),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.just(0.0),
    st.sampled_from([0.0, 2e-5, 1.0]),
    st.sampled_from([0.0, 64.0]),
    st.just(0.0),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.integers(0, 1 << 30), SHARINGS)
@example(1287, CoreSharing(3, communication=0.0))  # all cores are in use all the time
@example(113, CoreSharing(2, 1e7, 0.0))  # two ranks with a core each, and one memory
@example(85, CoreSharing(2, 1e7, 1.0, 0.0, 2e-5))  # a rank alone beside the process that feeds it
def test_random_programs_obey_the_law(seed: int, sharing: CoreSharing) -> None:
    f, t = random_program(seed)
    if t.uniform is None or t.uniform.intra.slows or t.uniform.inter.slows:
        return
    alone, shared = simulated(f, t, None), simulated(f, t, sharing)
    assert law_holds(alone, shared, sharing)
    assert shared.seconds >= alone.seconds * (1 - 1e-12)
    work = sum([e.dur for e in alone.trace if e.tid == "compute"])
    assert shared.seconds >= work / sharing.cores * (1 - 1e-7)  # a trace has durations in single precision


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.integers(0, 1 << 30))
@example(283)  # hosts wait for transfers
@example(775)
def test_tasks_wait_for_what_the_loop_waits_for(seed: int) -> None:
    """Run in their order with their own seconds they end when the program does, whatever hosts wait for."""
    f, t = random_program(seed)
    if t.uniform is None:
        return
    alone = simulated(f, t, None, random_runtime(random.Random(seed)))
    program = alone.program
    tasks: list[shared_cores._Task] = []
    shared_cores._Flattened(program, tasks, []).run(program.main, [() for _ in program.main.columns])
    clock, end = [0.0] * len(program.streams), list[float]()
    for task in tasks:
        end.append(max([0.0, *[clock[s] for s in task.streams], *[end[k] for k in task.needs]]) + task.seconds)
        for s in task.streams:
            clock[s] = end[-1]
    assert max(end, default=0.0) == pytest.approx(alone.seconds, rel=1e-12)


def test_the_law_sees_a_wrong_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    f, t = chains([4, 4, 2])
    sharing = CoreSharing(2)
    monkeypatch.setattr(shared_cores, "_run", lambda tasks, *_: [x.seconds for x in tasks])
    assert not law_holds(simulated(f, t, None), simulated(f, t, sharing), sharing)


def chains(lengths: list[int]) -> tuple[Function, Topology]:
    """On each device so many ops, one after another, of 1 ms each."""
    t = load_cluster("cpu-2core", devices=len(lengths), nodes=2)
    assert t.regular is not None
    t = Topology(replace(t.regular, spec=replace(t.regular.spec, kernel_launch_overhead=1e-3, dram_bandwidth=1e30)))
    f = FunctionMaker("chains")
    ends = []
    for device, n in zip(t.devices, lengths, strict=False):
        x = f.add_input_value(f"x{device.index}", Tensor(Float32, (1,), device=device))
        for _ in range(n):
            x = f.emit("Relu", x)
        ends.append(x)
    f.set_outputs(ends)
    return f.finalize(), t


@pytest.mark.parametrize(
    ("cores", "lengths", "seconds"),
    [
        (2, [3, 3], [3, 3]),
        (1, [3, 3], [6, 6]),
        (2, [2, 2, 2, 2], [4, 4, 4, 4]),
        # two share a core until the shorter has its 2 ms at 4 ms; then the other has the core
        (1, [2, 5], [4, 7]),
        # three on two cores at two thirds: 1 ms takes 1.5 ms; then each has a core
        (2, [1, 3, 3], [1.5, 3.5, 3.5]),
        # the first and the third are bound to one core, which they share until the third ends; the others to one
        (2, [4, 1, 3, 1], [7, 2, 6, 2]),
    ],
)
def test_chains_by_hand(cores: int, lengths: list[int], seconds: list[float]) -> None:
    f, t = chains(lengths)
    shared = simulated(f, t, CoreSharing(cores))
    assert [shared.timestamps[d] * 1e3 for d in t.devices[: len(lengths)]] == pytest.approx(seconds)


def test_ranks_share_the_bandwidth_of_memory() -> None:
    """Each op takes 1 ms, and reads 4 bytes and overwrites them. Of 18 kB/s three ranks that want 8 get 6; on two cores
    each works two thirds of the time and wants 5.3. One alone gets what it wants. Smaller tensors stay in the cache."""
    f, t = chains([1, 1, 1])
    for cores, bandwidth, cache, ms in (
        (3, 18e3, 0.0, 8 / 6),
        (3, 24e3, 0.0, 1.0),
        (2, 18e3, 0.0, 1.5),
        (2, 12e3, 0.0, 2.0),
        (3, 18e3, 4.0, 1.0),
        (3, 18e3, 3.9, 8 / 6),
    ):
        shared = simulated(f, t, CoreSharing(cores, bandwidth, cache=cache))
        assert [shared.timestamps[d] * 1e3 for d in t.devices[:3]] == pytest.approx([ms] * 3)
    f, t = chains([2, 1])  # 1 ms of work takes 2 ms beside another, then 1 ms alone
    shared = simulated(f, t, CoreSharing(2, 8e3))
    assert [shared.timestamps[d] * 1e3 for d in t.devices[:2]] == pytest.approx([3, 2])


def test_a_rank_that_needs_little_bandwidth_goes_on_as_alone() -> None:
    """Two ranks that want 8 and 16 kB/s of 18 get 8 and 10; when the first ends after 1 ms, the second has all."""
    _, t = chains([0, 0])
    f = FunctionMaker("unequal")
    xs = [f.add_input_value(f"x{d.index}", Tensor(Float32, (d.index + 1,), device=d)) for d in t.devices[:2]]
    f.set_outputs([f.emit("Relu", x) for x in xs])
    shared = simulated(f.finalize(), t, CoreSharing(2, 18e3))
    assert [shared.timestamps[d] * 1e3 for d in t.devices[:2]] == pytest.approx([1.0, 1 + 6 / 16])


def test_what_needs_little_bandwidth_gets_it() -> None:
    share = CoreSharing(2, bandwidth=10.0).share
    assert [share(x) for x in ([], [(20.0, 1)], [(5.0, 2)])] == [math.inf] * 3
    assert share([(6.0, 2)]) == share([(6.0, 1), (6.0, 1)]) == 5
    assert share([(8.0, 1), (2.0, 1), (9.0, 1)]) == share([(9.0, 2), (1.0, 2)]) == 4
    assert share([(1.0, 1), (20.0, 1)]) == 9


def test_communication_takes_longer_by_what_it_needs_of_a_core() -> None:
    """The collective of two ranks on one core: of its seconds half take twice as long."""
    f, t = reduced(4)
    full = simulated(f, t, CoreSharing(2)).seconds - 4e-3
    for communication, slower in ((0.0, 1.0), (0.5, 1.0), (0.75, 1 + 0.75 * 0.5), (1.0, 2.0)):
        shared = simulated(f, t, CoreSharing(1, communication=communication)).seconds - 8e-3
        assert shared == pytest.approx(full * slower)


def test_a_message_takes_a_core_of_who_receives_it() -> None:
    """Each rank computes for 9 ms beside it, on a core of its own: the receiver loses as long as the message takes."""
    _, t = chains([0, 0])
    f = FunctionMaker("sent")
    xs = [f.add_input_value(f"x{d.index}", Tensor(Float32, (1,), device=d)) for d in t.devices[:2]]
    sent = f.emit("Send", xs[0], to=t.devices[1])
    for _ in range(9):
        xs = [f.emit("Relu", x) for x in xs]
    f.set_outputs([*xs, sent])
    program = f.finalize()
    alone = simulated(program, t, None)
    [seconds] = {e.dur for e in alone.trace if e.op.spec.name == "Send"}
    shared = simulated(program, t, CoreSharing(2))
    assert [shared.timestamps[d] for d in t.devices[:2]] == pytest.approx([9e-3, 9e-3 + seconds])


def reduced(*compute: int) -> tuple[Function, Topology]:
    """Two ranks compute for so many ms, then add up, as often as there are numbers."""
    _, t = chains([0, 0])
    mesh = Mesh(t.devices[:2], {"dp": 2}, "all")
    f = FunctionMaker("reduced")
    sums: list[Value] = []
    for k, n in enumerate(compute):
        x = f.add_input_value(f"x{k}", Tensor.whole(Float32, (2,), mesh, [SUM]))
        for _ in range(n):
            x = f.emit("Add", x, x)
        sums.append(f.emit("MPIAllreduce", x, axis="dp"))
    f.set_outputs(sums)
    return f.finalize(), t


@pytest.mark.parametrize("compute", [[4], [4, 1]])
def test_the_ranks_of_a_collective_do_not_arrive_together(compute: list[int]) -> None:
    """By a random walk in the seconds without communication: nearly in proportion at first."""
    f, t = reduced(*compute)
    alone, shared = (
        simulated(f, t, CoreSharing(2, communication=0.0, jitter=x), overlap=False).seconds for x in (0.0, 9e-3)
    )
    expected = sum([(1e-6 + 9e-3 * n * 1e-3) ** 0.5 - 1e-3 for n in compute])
    assert shared - alone == pytest.approx(expected)
    late = CoreSharing(2, jitter=1e-3).late
    assert [late(x) for x in (0.0, 1e-6, 1.0)] == pytest.approx([0.0, 0.5e-6, 1e-3**0.5 - 1e-3], rel=1e-3)


@pytest.mark.parametrize("compute", [[4], [4, 1]])
def test_communication_takes_longer_after_long_compute(compute: list[int]) -> None:
    f, t = reduced(*compute)
    alone, shared = (
        simulated(f, t, CoreSharing(2, communication=0.0, cold=x), overlap=False).seconds for x in (0.0, 2e-4)
    )
    assert shared - alone == pytest.approx(sum([2e-4 * (1 - math.exp(-n)) for n in compute]))
    assert CoreSharing(2, cold=2e-4).resumed(0.0) == 0.0


def test_communication_after_long_compute_that_waits_for_the_last_rank() -> None:
    f, t = reduced(4)
    alone, shared = (
        simulated(f, t, CoreSharing(2, communication=0.0, jitter=j, cold=c), overlap=False).seconds
        for j, c in ((0.0, 0.0), (9e-3, 2e-4))
    )
    late = (1e-6 + 9e-3 * 4e-3) ** 0.5 - 1e-3
    assert shared - alone == pytest.approx(late + 2e-4 * (1 - math.exp(-4)))


@pytest.mark.parametrize("sends", [True, False])
def test_of_two_ranks_the_one_counts_that_has_not_communicated_for_longest(sends: bool) -> None:
    """One has, a millisecond before: the one that sends, or the one that receives."""
    _, t = chains([0, 0, 0])
    first, second, third = t.devices[:3]
    f = FunctionMaker("sends")
    x = f.add_input_value("x", Tensor(Float32, (1,), device=first))
    y = f.add_input_value("y", Tensor(Float32, (1,), device=third))
    for _ in range(3):
        x, y = f.emit("Relu", x), f.emit("Relu", y)
    z = f.emit("Send", x, to=third) if sends else f.emit("Send", y, to=second)
    f.set_outputs([z, y, f.emit("Send", f.emit("Relu", x), to=second)])
    program = f.finalize()
    alone, shared = (
        simulated(program, t, CoreSharing(3, communication=0.0, cold=x)).timestamps[second] for x in (0.0, 2e-4)
    )
    assert shared - alone == pytest.approx(2e-4 * (1 - math.exp(-4)))


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_message_takes_longer_after_long_compute(sleeps: bool) -> None:
    """Sent after 3 ms. A sleep takes the seconds that it is given."""
    _, t = chains([0, 0])
    f = FunctionMaker("sends")
    x = f.add_input_value("x", Tensor(Float32, (1,), device=t.devices[0]))
    for _ in range(3):
        x = f.emit("Relu", x)
    y = f.add_input_value("y", Tensor(Float32, (1,), device=t.devices[1]))
    last = f.emit("Sleep", x, seconds=1e-3, types=(x.type,)) if sleeps else f.emit("Send", x, to=t.devices[1])
    f.set_outputs([last, f.emit("Relu", y)])
    program = f.finalize()
    alone, shared = (simulated(program, t, CoreSharing(2, communication=0.0, cold=x)).seconds for x in (0.0, 2e-4))
    assert shared - alone == pytest.approx(0.0 if sleeps else 2e-4 * (1 - math.exp(-3)))


@pytest.mark.parametrize(("others", "cores"), [(1, 2), (2, 1)])
def test_those_that_wait_for_the_last_rank_of_a_collective_take_no_core(others: int, cores: int) -> None:
    """Two ranks compute for 4 ms and wait; others, which have 30 ms to compute, have all cores meanwhile, and do not
    make it longer. As a collective takes cores, too, all share them before and after that."""
    f, t = reduced(4)
    sent = simulated(f, t, CoreSharing(2), overlap=False).seconds - 4e-3
    _, t = chains([0] * (2 + others))
    m = FunctionMaker("beside")
    mesh = Mesh(t.devices[:2], {"dp": 2}, "all")
    x = m.add_input_value("x", Tensor.whole(Float32, (2,), mesh, [SUM]))
    ys = [m.add_input_value(f"y{d.index}", Tensor(Float32, (1,), device=d)) for d in t.devices[2 : 2 + others]]
    for _ in range(4):
        x = m.emit("Add", x, x)
    for _ in range(30):
        ys = [m.emit("Relu", y) for y in ys]
    m.set_outputs([m.emit("MPIAllreduce", x, axis="dp"), *ys])
    # how much slower all are together, and the others by themselves
    shared, alone, jitter = (2 + others) / cores, max(1.0, others / cores), 24e-3
    late = (1e-6 + jitter * 4e-3 * shared) ** 0.5 - 1e-3
    assert sent < late < 26e-3
    found = simulated(m.finalize(), t, CoreSharing(cores, jitter=jitter), overlap=False)
    assert found.timestamps[t.devices[0]] == pytest.approx(4e-3 * shared + late + shared * sent)
    assert found.timestamps[t.devices[2]] == pytest.approx((4e-3 + sent) * shared + (26e-3 - sent) * alone)


def test_what_feeds_the_ranks_takes_a_core_for_each() -> None:
    """Beside two ranks, for 2 ms of two threads: on a core each gets half until 4 ms. With cores of their own they slow
    none, and the step does not wait."""
    f, t = chains([4, 4])
    for cores, ms in ((2, [6, 6]), (3, [6, 4])):  # the second rank is bound to two
        fed = simulated(f, t, CoreSharing(cores, communication=0.0, feeding=2e-3))
        assert [fed.timestamps[d] * 1e3 for d in t.devices[:2]] == pytest.approx(ms)
    f, t = chains([4, 2])
    fed = simulated(f, t, CoreSharing(4, communication=0.0, feeding=1.0))
    assert [fed.timestamps[d] * 1e3 for d in t.devices[:2]] == pytest.approx([4, 2])


def test_what_is_issued_takes_a_core() -> None:
    """Both ranks issue the collective at once, for 1 ms, on one core: all of their seconds are twice as long."""
    f, t = reduced(4)
    runtime = Runtime("inline", communication=1e-3, inline=True)
    two, one = (simulated(f, t, CoreSharing(n), runtime).seconds for n in (2, 1))
    assert two > 5e-3
    assert one == pytest.approx(2 * two)


def test_ranks_that_sleep_take_no_core() -> None:
    """The seconds of a proxy's compute are given: beside two that compute, a sleeper neither slows nor is slowed."""
    _, t = chains([0, 0, 0])
    f = FunctionMaker("sleeps")
    xs = [f.add_input_value(f"x{d.index}", Tensor(Float32, (1,), device=d)) for d in t.devices[:3]]
    f.set_outputs([f.emit("Sleep", xs[0], seconds=1e-3, types=(xs[0].type,)), *[f.emit("Relu", x) for x in xs[1:]]])
    shared = simulated(f.finalize(), t, CoreSharing(1))
    assert [shared.timestamps[d] for d in t.devices[:3]] == pytest.approx([1e-3, 2e-3, 2e-3])


def test_steps_of_a_model_on_this_host() -> None:
    """Four replicas on two cores take twice as long as on four, as they communicate little; all shares add up."""
    model = distir.Model(perceptron([512] * 4, 512, Float32)).training("mse", "sgd")
    two, four = (distir.simulate(model, distir.Plan(dp=4), this_host(4, cores=n)) for n in (2, 4))
    assert 1.6 < two.step_seconds / four.step_seconds <= 2
    for stage in two.simulation.stages:
        assert stage.compute + stage.communication + stage.bubble == pytest.approx(two.step_seconds)
    assert sum([s.compute + s.communication for s in two.simulation.stages]) > 0


def test_devices_of_their_own_share_nothing() -> None:
    f, t = chains([3, 3])
    device = Device("cpu", 0)
    assert simulated(f, t, CoreSharing(2, communication=0.0)).timestamps[device] == pytest.approx(3e-3)
