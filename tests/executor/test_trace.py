"""Traces: lazy, right, and readable by others."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator import Simulation
from distir.hardware import load_cluster
from distir.ir import FunctionMaker, Mesh
from distir.ir.type import SUM, Float, Tensor
from tests.executor.random_schedules import random_program


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


def test_no_event_begins_before_its_inputs_end() -> None:
    seen = 0
    for seed in range(80):
        simulation = simulate(seed)
        main = set(simulation.program.function.ops)
        ends: dict[object, float] = {}
        for e in simulation.trace:
            if e.op not in main:
                continue
            for v in e.op.inputs:
                if (v, e.pid) in ends:
                    seen += 1
                    assert e.ts >= ends[v, e.pid]
            for v in e.op.outputs:
                ends[v, e.pid] = max(ends.get((v, e.pid), 0.0), e.ts + e.dur)
    assert seen > 50


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
    shown = {repr(d): c for c, d in enumerate(program.classes.first)}
    want = sorted(
        (e.name, shown[e.pid], e.tid, e.ts * 1e6) for e in simulation.trace if e.pid in shown and e.tid != "view"
    )
    slices = [e for e in events if e["ph"] == "X"]
    assert sorted((e["name"], e["pid"], threads[e["tid"]], e["ts"]) for e in slices) == want
    assert all(e["dur"] >= 0 for e in slices)


def test_chrome_arrows_and_counters(tmp_path: Path) -> None:
    simulation = next(s for s in map(simulate, range(100)) if any(e.name == "Send" for e in s.trace))
    events = _chrome(simulation, tmp_path / "trace.json")
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts
    assert starts.keys() == ends.keys()
    for k, start in starts.items():
        sent = slices[start["pid"], start["tid"], start["ts"]]
        assert ends[k]["pid"] != start["pid"]
        assert ends[k]["ts"] == pytest.approx(sent["ts"] + sent["dur"])
    for c in range(len(simulation.program.classes.sizes)):
        counters = [e for e in events if e["ph"] == "C" and e["pid"] == c]
        assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)
        peak = simulation.peak_memory[simulation.program.classes.first[c]]
        assert max(sum(e["args"].values()) for e in counters) == peak
