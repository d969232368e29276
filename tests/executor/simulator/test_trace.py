"""Traces: lazy, right, and read by others as they are meant (that, by Perfetto itself)."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distir
from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator.categories import CATEGORIES
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.trace import Event
from distir.hardware import load_cluster
from distir.ir import Function, FunctionMaker, Mesh, Topology
from distir.ir.errors import InfeasibleError
from distir.ir.type import SUM, Float, Shard, Tensor
from distir.models import gpt, mlp
from tests.executor.inlined import Inlined
from tests.executor.perfetto import Engine, TraceProcessor
from tests.executor.random_schedules import random_program
from tests.executor.test_exact import Case, random_case


def simulate(seed: int, overlap: bool = True) -> Simulation:
    function, topology = random_program(seed)
    return Simulator(CostModel(topology), overlap=overlap).interpret(function)


SEEDS = st.integers(0, 1 << 32)


@given(SEEDS, st.booleans())
def test_on_one_stream_no_two_events_overlap(seed: int, overlap: bool) -> None:
    streams: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for e in simulate(seed, overlap).trace:
        streams.setdefault((e.pid, e.tid), []).append((e.ts, e.ts + e.dur))
    for (_, stream), spans in streams.items():
        if stream != "view":
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def instances(events: Iterable[Event], inlined: Inlined) -> Iterator[tuple[list[Event], tuple, tuple]]:
    """Each op that ran, calls expanded: its events, and what stands for the values it used and made just then."""
    left = deque(events)
    for op, uses, makes in inlined.flat:
        mine: list[Event] = []
        while left and left[0].op is op and left[0].pid not in {e.pid for e in mine}:
            mine.append(left.popleft())
        yield mine, uses, makes
    assert not left


def assert_inputs_end_first(simulation: Simulation) -> int:
    """The number of times that an event of a device used what another had made there."""
    program, seen = simulation.program, 0
    ends: dict[tuple[object, str], float] = {}
    for events, uses, makes in instances(simulation.trace, Inlined(program.function, program.cost, program.overlap)):
        assert events
        for e in events:
            made = [ends[v, e.pid] for v in uses if (v, e.pid) in ends]
            seen += len(made)
            assert e.ts >= max(made, default=0.0)
        for e, v in itertools.product(events, makes):
            ends[v, e.pid] = e.ts + e.dur
    return seen


@given(SEEDS, st.booleans())
def test_no_event_begins_before_its_inputs_end(seed: int, overlap: bool) -> None:
    """Events of every op, those in calls too, of every device."""
    assert_inputs_end_first(simulate(seed, overlap))


def test_inputs_are_looked_at() -> None:
    assert sum(assert_inputs_end_first(simulate(seed)) for seed in range(20)) > 5000


@pytest.mark.parametrize("function", [mlp(5, 8, 16), gpt(2, 8, 4, 16, 4, 2)], ids=lambda f: f.name)
def test_one_device_and_no_calls_give_as_many_events_as_ops(function: Function) -> None:
    topology = Topology()
    device = topology.add_device("gpu", 1e12, 1e12, 1e-6)
    simulation = Simulator(CostModel(topology)).interpret(function)
    assert len(simulation.trace) == len(function.ops) == len(list(simulation.trace))
    assert [e.name for e in simulation.trace] == [op.spec.name for op in function.ops]
    assert {e.pid for e in simulation.trace} == {repr(device)}
    assert sum(e.dur for e in simulation.trace) == simulation.seconds


@given(SEEDS)
def test_it_reads_as_a_list(seed: int) -> None:
    trace = simulate(seed).trace
    events = list(trace)
    assert len(trace) == len(events)
    assert [trace[i] for i in range(0, len(events), 7)] == events[::7] == trace[::7]
    assert trace[:5] == events[:5]
    if events:
        assert trace[-1] == events[-1]
    with pytest.raises(IndexError):
        trace[len(events)]


def test_looking_at_one_event_makes_no_others() -> None:
    cluster = load_cluster("dgx-a100", devices=65536)
    f = FunctionMaker()
    mesh = Mesh(cluster.devices, {"dp": 8192, "tp": 8}, "all")
    x = f.add_input_value("x", Tensor(Float(), (64, 64), mesh, [SUM, SUM]))
    for axis in ("tp", "dp"):
        x = f.emit("MPIAllreduce", x, axis=axis)
    trace = Simulator(CostModel(cluster)).interpret(f.finalize()).trace
    assert len(trace) == 2 * 65536
    assert (trace[0].pid, trace[0].tid, trace[-1].pid, trace[-1].tid) == ("gpu:0", "tp", "gpu:65535", "dp")
    assert next(iter(trace)).name == "MPIAllreduce"


def test_the_last_event_ends_with_the_run() -> None:
    for seed in range(20):
        simulation = simulate(seed)
        assert max((e.ts + e.dur for e in simulation.trace), default=0.0) == simulation.seconds


def test_events_read_as_mappings_too() -> None:
    event = simulate(1).trace[0]
    assert (event["name"], event["ts"], event["pid"]) == (event.name, event.ts, event.pid)
    with pytest.raises(KeyError):
        event["colour"]


def _chrome(simulation: Simulation, path: Path) -> list[dict]:
    simulation.to_chrome(path)
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("seed", range(12))
def test_chrome_traces(seed: int, tmp_path: Path) -> None:
    """A process a class, a thread a stream; slices agree with the events of one device of each class."""
    simulation = simulate(seed)
    events = _chrome(simulation, tmp_path / "trace.json")
    program = simulation.program
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(names) == len(program.classes.sizes) == len(set(names.values()))
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(threads) == len(program.streams)
    assert not threads.keys() & (names.keys() | {0})  # else a viewer takes them for another process's
    shown = {repr(d): 1 + c for c, d in enumerate(program.classes.first)}
    want = sorted(
        (e.name, shown[e.pid], e.tid, round(e.ts * 1e9) / 1e3)
        for e in simulation.trace
        if e.pid in shown and e.tid != "view"
    )
    slices = [e for e in events if e["ph"] == "X"]
    assert sorted((e["name"], e["pid"], threads[e["tid"]], e["ts"]) for e in slices) == want
    assert all(e["dur"] >= 0 for e in slices)


def test_slices_that_touch_do_not_overlap_when_rounded(tmp_path: Path) -> None:
    """A viewer rounds to nanoseconds."""
    for seed in range(12):
        threads: dict[int, list[tuple[int, int]]] = {}
        for e in _chrome(simulate(seed), tmp_path / "trace.json"):
            if e["ph"] == "X":
                assert e["ts"] == round(e["ts"] * 1e3) / 1e3
                threads.setdefault(e["tid"], []).append((round(e["ts"] * 1e3), round(e["dur"] * 1e3)))
        for spans in threads.values():
            assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


# ---- as Perfetto reads them


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load()


def perfetto(engine: Engine, simulation: Simulation, path: Path) -> TraceProcessor:
    simulation.to_chrome(path / "trace.json")
    read = TraceProcessor(engine, (path / "trace.json").read_bytes())
    assert read.query("select name, value from stats where severity != 'info' and value > 0") == []
    return read


SLICES = """
    select slice.id, slice.ts, slice.dur, slice.depth, slice.name, thread.name as thread, process.name as process
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""


def distributed(seed: int, overlap: bool = True) -> Simulation:
    """A training step under a plan with a pipeline; or a random program."""
    if seed % 2:
        return simulate(seed, overlap)
    case = next(case for k in itertools.count(seed) if (case := _case(k)) is not None and "pp1" not in case.plan)
    return Simulator(CostModel(case.topology), overlap=overlap).interpret(case.function)


def _case(seed: int) -> Case | None:
    try:
        return random_case(seed)
    except InfeasibleError:
        return None


def names(simulation: Simulation) -> dict[int, str]:
    """The name of the process of each class."""
    classes = simulation.program.classes
    return {c: classes.label(c) + (f" ({size} devices)" if size > 1 else "") for c, size in enumerate(classes.sizes)}


@pytest.mark.parametrize("seed", range(12))
def test_processes_and_threads(engine: Engine, seed: int, tmp_path: Path) -> None:
    """A process a class of devices; a thread for its compute, and for each stream of its communication."""
    simulation = distributed(seed)
    read = perfetto(engine, simulation, tmp_path)
    process = names(simulation)
    assert len(set(process.values())) == len(process)
    found = read.query("select name from process where name is not null")
    assert {row["name"] for row in found} == set(process.values())
    threads = read.query("select process.name as process, thread.name from thread join process using (upid)")
    got = sorted((row["process"], row["name"]) for row in threads if row["name"] is not None)
    assert got == sorted((process[c], name) for c, name in simulation.program.streams)


@pytest.mark.parametrize("seed", range(12))
def test_slices(engine: Engine, seed: int, tmp_path: Path) -> None:
    """Those of the first device of each class, to the nanosecond; none inside another."""
    simulation = distributed(seed)
    rows = perfetto(engine, simulation, tmp_path).query(SLICES)
    assert {row["depth"] for row in rows} <= {0}
    first = {repr(d): names(simulation)[c] for c, d in enumerate(simulation.program.classes.first)}
    events = [e for e in simulation.trace if e.pid in first and e.tid != "view"]
    want = sorted((first[e.pid], e.tid, e.ts * 1e9, e.dur * 1e9, e.name) for e in events)
    got = sorted((row["process"], row["thread"], row["ts"], row["dur"], row["name"]) for row in rows)
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert (a[0], a[1], a[4]) == (b[0], b[1], b[4])
        assert (a[2], a[3]) == pytest.approx((b[2], b[3]), abs=1.01)


@pytest.mark.parametrize("seed", range(12))
def test_arrows(engine: Engine, seed: int, tmp_path: Path) -> None:
    """From the slice that sends to the one that receives, on threads and processes of these names."""
    simulation = distributed(seed)
    read = perfetto(engine, simulation, tmp_path)
    slices = {row["id"]: row for row in read.query(SLICES)}
    arrows = [(slices[r["slice_out"]], slices[r["slice_in"]]) for r in read.query("select * from flow")]
    for a, b in arrows:
        assert (a["name"], a["ts"], a["dur"]) == (b["name"], b["ts"], b["dur"])
        assert a["process"] != b["process"]
        assert (a["thread"].split()[0], b["thread"].split()[0]) == ("send", "recv")
    ends = {side: {row["id"] for row in pair} for side, pair in zip("ab", zip(*arrows, strict=True), strict=False)}
    sends = {k for k, row in slices.items() if row["thread"].split()[0] == "send"}
    receives = {k for k, row in slices.items() if row["thread"].split()[0] == "recv"}
    alone = {
        e.name for e in simulation.trace if e.name in ("Send", "MPIScatter", "MPIBroadcast", "MPIGather", "MPIReduce")
    }
    if alone:
        assert arrows
    assert ends.get("a", set()) == sends
    assert ends.get("b", set()) == receives


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_arrows_without_overlap(engine: Engine, seed: int, tmp_path: Path) -> None:
    """A transfer then stands among the compute, on a device's only thread."""
    simulation = distributed(seed, overlap=False)
    read = perfetto(engine, simulation, tmp_path)
    slices = {row["id"]: row for row in read.query(SLICES)}
    assert {row["thread"] for row in slices.values()} == {"compute"}
    arrows = [(slices[r["slice_out"]], slices[r["slice_in"]]) for r in read.query("select * from flow")]
    assert arrows
    for a, b in arrows:
        assert (a["name"], a["ts"], a["dur"]) == (b["name"], b["ts"], b["dur"])
        assert a["process"] != b["process"]


@pytest.mark.parametrize("seed", range(12))
def test_memory_counters(engine: Engine, seed: int, tmp_path: Path) -> None:
    """By category, of each class: their sum is at its highest the peak."""
    simulation = distributed(seed)
    read = perfetto(engine, simulation, tmp_path)
    rows = read.query(
        "select counter.ts, counter.value, track.name, process.name as process from counter "
        "join process_counter_track as track on track_id = track.id join process using (upid) order by counter.id"
    )
    curves: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        curves.setdefault(row["process"], {}).setdefault(row["name"], []).append(row["value"])
    for c, process in names(simulation).items():
        curve = curves[process]
        assert set(curve) == {f"live memory (bytes) {name}" for name in CATEGORIES}
        peak = simulation.peak_memory[simulation.program.classes.first[c]]
        assert max(map(sum, zip(*curve.values(), strict=True))) == peak


def test_the_memory_of_a_call_counts_while_it_computes(tmp_path: Path) -> None:
    """A view inside a call (a microbatch of an input that is there from the beginning) does not date it back."""
    model = distir.load(Path(__file__).parents[3] / "examples" / "gpt2-tiny.onnx", {"batch": 8}, loss="cross-entropy")
    simulation = distir.simulate(model, distir.Plan(pp=2, microbatches=4), "cpu-2core").simulation
    simulation.to_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for pid in {e["pid"] for e in events if e["ph"] == "C"}:
        ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid and e["name"] == "MatMul"]
        points = [(e["ts"], sum(e["args"].values())) for e in events if e["ph"] == "C" and e["pid"] == pid]
        peak = max(size for _, size in points)
        assert all(t > min(ends) for t, size in points if size == peak)


def test_an_arrow_ends_in_its_own_slice_where_the_next_follows_at_once(engine: Engine, tmp_path: Path) -> None:
    """And from a mesh to a device it goes to the device."""
    topology = Topology()
    devices = [topology.add_device("gpu", 1e9, 1e9, 0.0) for _ in range(3)]
    for a, b in itertools.combinations(devices, 2):
        topology.set_bandwidth(a, b, 8)
    mesh = Mesh(devices[1:], {"dp": 2}, "workers")
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor(Float(), (500, 500), devices[0]))
    parts = [f.emit("MPIScatter", x, to=mesh, placements=(Shard(0),)) for _ in range(3)]
    for v in parts:
        f.emit("MPIGather", v, to=devices[0])
    simulation = Simulator(CostModel(topology)).interpret(f.finalize())
    read = perfetto(engine, simulation, tmp_path)
    slices = {row["id"]: row for row in read.query(SLICES)}
    flows = read.query("select slice_out, slice_in from flow")
    ends = [(slices[r["slice_out"]], slices[r["slice_in"]]) for r in flows]
    ends.sort(key=lambda pair: (pair[0]["name"] == "MPIGather", pair[0]["ts"]))
    assert [(a["name"], a["process"], b["process"]) for a, b in ends] == [
        *[("MPIScatter", "gpu:0", "workers (2 devices)")] * 3,
        *[("MPIGather", "workers (2 devices)", "gpu:0")] * 3,
    ]
    assert [a["ts"] for a, _ in ends] == [b["ts"] for _, b in ends]
    for a, b in itertools.pairwise(ends[:3]):
        assert a[1]["ts"] + a[1]["dur"] == b[1]["ts"]
