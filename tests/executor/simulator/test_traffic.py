"""What a step communicates: counted as often as the trace has it, by the algorithm that its seconds come from."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distir
from distir.executor import Simulator
from distir.executor.cost_model import CostModel, collective_cost
from distir.executor.simulator.labels import SEND, axis_text
from distir.executor.simulator.maxplus import Call
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.traffic import FAR, TrafficKind, sent_by_class, traffic
from distir.hardware import load_cluster
from distir.ir.topology import Group
from distir.models import gpt
from distir.transforms import parallel_transform_3d
from distir.transforms.differentiation.training import training_step
from tests.executor.random_schedules import random_program

EXAMPLES = Path(__file__).parents[3] / "examples"


def counted(simulation: Simulation) -> dict[tuple[str, str, str], tuple[int, float]]:
    """How often, and for how many seconds, the first device of each class communicates along each axis, by op."""
    program = simulation.program
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for kind, of_classes in sent_by_class(program).items():
        for c, counts in of_classes.items():
            for message, n in counts.items():
                found[repr(program.classes.first[c]), kind.axis, kind.collective] += [message.seconds] * n
    return {key: (len(xs), sum(xs)) for key, xs in found.items()}


def traced(simulation: Simulation) -> dict[tuple[str, str, str], tuple[int, float]]:
    """The same, of the events of the trace."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    first = set(map(repr, simulation.program.classes.first))
    for e in simulation.trace:
        if e.pid not in first:
            continue
        if e.op.spec.route == "axis" and e.tid == axis_text(e.op.attributes["axis"]):
            wire = e.op.spec.comm and e.op.spec.comm.wire
            found[e.pid, e.tid, (wire and wire.collective) or e.op.op_type].append(e.dur)
        elif e.op.spec.route == "send" and e.tid.startswith(SEND):
            found[e.pid, SEND, "transfer"].append(e.dur)
    return {key: (len(xs), sum(xs)) for key, xs in found.items()}


@given(st.integers(0, 1 << 32))
def test_counts_are_those_of_the_trace(seed: int) -> None:
    function, topology = random_program(seed)
    simulation = Simulator(CostModel(topology)).interpret(function)
    got, want = counted(simulation), traced(simulation)
    assert got.keys() == want.keys()
    for key, (n, seconds) in want.items():
        assert got[key] == (n, pytest.approx(seconds, rel=1e-6, abs=1e-12))


PLANS = [
    distir.Plan(dp=2, tp=2, pp=2, microbatches=4),
    distir.Plan(dp=8, zero=3, microbatches=2),
    distir.Plan(dp=4, pp=4, chunks=2, schedule="interleaved", microbatches=8),
    distir.Plan(dp=2, tp=4, pp=4, sequence_parallel=True, microbatches=4),
    distir.Plan(dp=2, pp=4, microbatches=8, cut=("2.norm1.weight", "4.norm1.weight", "6.norm1.weight")),
]


@pytest.mark.parametrize("cluster", ["dgx-a100", "tyche-gb200"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_of_plans_too(plan: distir.Plan, cluster: str) -> None:
    """Also where equal stages share code, and where replicas stand differently in racks."""
    model = distir.load("gpt:layers=8,hidden=64,heads=4,vocab=512,seq=32,batch=32", loss="cross-entropy")
    simulation = distir.simulate(model, plan, cluster).simulation
    got, want = counted(simulation), traced(simulation)
    assert {key: n for key, (n, _) in got.items()} == {key: n for key, (n, _) in want.items()}
    hidden = [key for key, (_, seconds) in want.items() if got[key][1] != pytest.approx(seconds, rel=1e-6)]
    assert all(got[key][1] > want[key][1] for key in hidden)
    # that of GB200 sends what sequence parallelism gathers beside products, which hide a part of the seconds
    assert {axis for _, axis, _ in hidden} == ({"tp"} if cluster == "tyche-gb200" and plan.sequence_parallel else set())


def test_equal_stages_are_counted_each() -> None:
    """They share code: what it communicates counts for the devices of each."""
    model = distir.load("gpt:layers=8,hidden=64,heads=4,vocab=512,seq=32,batch=32", loss="cross-entropy")
    program = distir.simulate(model, PLANS[-1], "dgx-a100").simulation.program
    calls = [plan for plan in program.main.plans if isinstance(plan, Call)]
    assert any(plan.model is not plan.body for plan in calls)


def test_the_device_that_communicates_most_is_shown() -> None:
    model = distir.load("gpt:layers=4,hidden=64,heads=4,vocab=512,seq=32,batch=16", loss="cross-entropy")
    program = distir.simulate(model, distir.Plan(dp=2, pp=2, tp=2, microbatches=4), "dgx-a100").simulation.program
    of_classes = sent_by_class(program)
    rows = traffic(program)
    assert [x.seconds for x in rows] == sorted([x.seconds for x in rows], reverse=True)
    for row in rows:
        found = {
            c: {m: n for m, n in counts.items() if row.least <= m.size <= row.most}
            for c, counts in of_classes[row.kind].items()
        }
        each = {c: sum([m.seconds * n for m, n in counts.items()]) for c, counts in found.items()}
        assert row.seconds == max(each.values())
        counts = found[max(each, key=each.__getitem__)]
        assert row.times == sum(counts.values())
        assert (row.least, row.most) == (min(m.size for m in counts), max(m.size for m in counts))


def test_sizes_that_are_far_apart_are_rows_of_their_own() -> None:
    """Each message is in one row; what is FAR apart is not in one row, what is not is not in two."""
    model = distir.load("gpt:layers=4,hidden=512,heads=4,vocab=4096,seq=128,batch=16", loss="cross-entropy")
    program = distir.simulate(model, distir.Plan(dp=2, tp=4, microbatches=4), "dgx-a100").simulation.program
    rows, of_classes = traffic(program), sent_by_class(program)
    several = [kind for kind in of_classes if len([row for row in rows if row.kind == kind]) > 1]
    assert several
    for kind, classes in of_classes.items():
        mine = sorted([row for row in rows if row.kind == kind], key=lambda row: row.least)
        assert all(b.least >= FAR * a.most for a, b in pairwise(mine))
        sizes = sorted({m.size for counts in classes.values() for m in counts})
        far = [k for k, (a, b) in enumerate(pairwise(sizes)) if b >= FAR * a]
        assert len(mine) == 1 + len(far)
        for c, counts in classes.items():
            if len(classes) == 1:
                assert sum(row.times for row in mine) == sum(counts.values()), c


def test_bus_bandwidth_as_nccl_tests_count_it() -> None:
    """Of an all-reduce among n 2 (n - 1) / n of the bytes a second, of an all-gather (n - 1) / n, of a transfer all."""

    def share(kind: TrafficKind) -> float:
        n = kind.devices
        return {"all-reduce": 2 * (n - 1) / n, "transfer": 1.0}.get(kind.collective, (n - 1) / n)

    model = distir.load("gpt:layers=2,hidden=64,heads=4,vocab=512,seq=32,batch=32", loss="cross-entropy")
    for plan in (distir.Plan(dp=8), distir.Plan(dp=8, zero=3), distir.Plan(pp=2, microbatches=2)):
        program = distir.simulate(model, plan, "dgx-h100").simulation.program
        for kind, of_classes in sent_by_class(program).items():
            for message in [m for counts in of_classes.values() for m in counts]:
                assert message.sent == pytest.approx(message.size * share(kind))
        for row in traffic(program):
            low, high = (row.times * x * share(row.kind) / row.seconds for x in (row.least, row.most))
            assert low * (1 - 1e-9) <= row.bus_bandwidth <= high * (1 + 1e-9)


def test_who_scatters_sends_a_part_of_each_transfer() -> None:
    """Of what the two devices of a stage have alike each sends half, under Megatron."""
    model = distir.load("gpt:layers=2,hidden=64,heads=4,vocab=512,seq=32,batch=32,tied=0", loss="cross-entropy")
    plan = distir.Plan(tp=2, pp=2, microbatches=2)
    for runtime, share in (("megatron", 0.5), ("torch-eager", 1.0)):
        program = distir.simulate(model, plan, "dgx-a100", runtime=runtime).simulation.program
        (found,) = [of_classes for kind, of_classes in sent_by_class(program).items() if kind.collective == "transfer"]
        assert min([m.sent / m.size for counts in found.values() for m in counts]) == share


SIZES = [1 << k for k in range(8, 33, 2)]


@pytest.mark.parametrize(("cluster", "devices"), [("dgx-h100", 8), ("dgx-a100", 8), ("dgx-a100", 64), ("gh200", 16)])
def test_the_algorithm_is_that_of_the_seconds(cluster: str, devices: int) -> None:
    """With all others taken from the library it is as quick; without it slower, or there is none."""
    topology = load_cluster(cluster, devices=devices)
    group = topology.group(topology.devices[:devices])
    group = group._replace(measured=())
    wire = distir.ir.spec.lookup("MPIAllreduce").comm.wire  # type: ignore[union-attr]
    assert wire is not None
    chosen = Counter[str]()
    for size in SIZES:
        found = collective_cost.pattern(wire, size, group)
        chosen[found] += 1
        seconds = collective_cost.collective(wire, size, group)
        assert collective_cost.collective(wire, size, only(group, found)) == seconds
        if found != "ring":  # without any, a ring with the latencies of the links is assumed
            assert collective_cost.collective(wire, size, without(group, found)) > seconds
    if group.nodes > 1:
        assert set(chosen) == {"ring", "tree"}
        assert collective_cost.pattern(wire, SIZES[0], group) == "tree"


def only(group: Group, kind: str) -> Group:
    return group._replace(algorithms=tuple([a for a in group.algorithms if a.kind == kind]))


def without(group: Group, kind: str) -> Group:
    return group._replace(algorithms=tuple([a for a in group.algorithms if a.kind != kind]))


def test_on_shared_cores_they_take_as_long_as_they_do() -> None:
    """Ranks that wait for each other, and for cores: in all no less than what compute does not hide."""
    model = distir.load(str(EXAMPLES / "gpt2-tiny.onnx"), {"batch": 8}, loss="cross-entropy")
    for plan in (distir.Plan(dp=4), distir.Plan(dp=2, zero=3), distir.Plan(pp=2, microbatches=4)):
        prediction = distir.simulate(model, plan, str(Path(__file__).parents[2] / "calibrated.toml"))
        simulation = prediction.simulation
        got, want = counted(simulation), traced(simulation)
        assert {key: n for key, (n, _) in got.items()} == {key: n for key, (n, _) in want.items()}
        for key, (_, seconds) in want.items():
            assert got[key][1] == pytest.approx(seconds, rel=1e-6)
        if plan.pp == 1:  # else devices also wait for what they receive
            assert sum(row.seconds for row in traffic(simulation.program)) >= sum(prediction.exposed.values())


def test_distir_2021_has_one_algorithm() -> None:
    topology = load_cluster("dgx-a100", devices=16)
    step = training_step(gpt(1, 16, 2, 32, 8, 16), "cross-entropy")
    program = parallel_transform_3d(step, 16, 1, 1, topology.devices[:16], 1)
    for cost, chosen in ((CostModel(topology), "tree"), (CostModel.distir2021(topology), "ring")):
        found = traffic(Simulator(cost).interpret(program).program)
        assert {row.kind.algorithm for row in found} == {chosen}


def test_kinds_are_told_apart() -> None:
    """The same collective over one node and over two, and by another algorithm, are rows of their own."""
    model = distir.load("gpt:layers=2,hidden=512,heads=4,vocab=5120,seq=32,batch=32", loss="cross-entropy")
    program = distir.simulate(model, distir.Plan(dp=16), "dgx-a100").simulation.program
    kinds = {row.kind for row in traffic(program)}
    assert TrafficKind("dp", "all-reduce", 16, 2, "ring") in kinds
    assert TrafficKind("dp", "all-reduce", 16, 2, "tree") in kinds
