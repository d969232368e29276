"""Traces of a run: every op of a rank's program, in order, on its thread; as Perfetto reads them."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import distir
from distir.api.data import Data
from distir.backends.lowering.engine import TorchRank
from distir.backends.lowering.profile import RECORDED, Profiler
from distir.ir.function import Function, Op
from distir.transforms.rank.rank_program import rank_program
from tests.executor.perfetto import Engine, TraceProcessor

MLP = Path(__file__).parents[3] / "examples" / "mlp.onnx"
CPU = torch.device("cpu")


def profiled(folder: Path, steps: int) -> tuple[Function, dict[str, Any]]:
    """A program on one rank, without a process group, and its trace."""
    model = distir.load(MLP, {"batch": 8}, loss="mse", optimizer="adamw")
    program = distir.distribute(model, distir.Plan(microbatches=2))
    arrays = model.initial()
    given = [(arrays | Data(model.function, arrays).step(0))[v] for v in model.function.inputs]
    profiler = Profiler(program, 0, CPU, folder, 0, steps)
    rank = TorchRank(program, 0, profiler=profiler)
    rank.load(dict(enumerate(given)))
    for k in range(steps):
        profiler.begin_step()
        rank.step()
        profiler.end_step(k)
    profiler.write()
    return program, json.loads((folder / "rank0.json").read_text())


def slices(trace: dict[str, Any], category: str | None = None) -> list[dict[str, Any]]:
    found = [e for e in trace["traceEvents"] if e["ph"] == "X" and category in (None, e["cat"])]
    return sorted(found, key=lambda e: e["ts"])


def span(e: dict[str, Any]) -> tuple[int, int]:
    """Begin and end, in nanoseconds."""
    begin = round(e["ts"] * 1e3)
    return begin, begin + round(e["dur"] * 1e3)


def within(e: dict[str, Any], outer: dict[str, Any]) -> bool:
    (a, b), (c, d) = span(e), span(outer)
    return c <= a and b <= d


def instances(program: Function) -> list[tuple[Op, Function, int | None]]:
    """The ops that a rank runs, in order, calls expanded."""
    out: list[tuple[Op, Function, int | None]] = []

    def walk(function: Function, microbatch: int | None) -> None:
        for op in function.ops:
            if op.callee is not None:
                walk(op.callee, op.attributes.get("mb"))
            else:
                out.append((op, function, microbatch))

    walk(program, None)
    return out


def is_constant(op: Op, function: Function) -> bool:
    """Whether it depends on nothing: then it is computed when the Python is written."""
    made = function.producers()
    return all(v in made and is_constant(made[v], function) for v in op.inputs)


def test_every_op_appears(tmp_path: Path) -> None:
    """Each of the rank's program that computes, for each microbatch, in order."""
    program, trace = profiled(tmp_path, 2)
    want = [
        (op.spec.name, f.name, f"%{op.outputs[0].name}", microbatch)
        for op, f, microbatch in instances(rank_program(program, 0).function)
        if op.spec.comm is None and not op.spec.alias and not is_constant(op, f)
    ]
    got: list[tuple[Any, ...]] = []
    for e in slices(trace, "compute"):
        about = e["args"]
        got.append((e["name"], about["function"], about["result"], about.get("microbatch")))
    assert len(set(got)) == len(got)
    assert [x for x in got if x in set(want)] == want
    assert {"Gemm", "GroupedAdamW"} <= {name for name, *_ in got}
    assert {e["args"]["step"] for e in slices(trace)} == {1}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo does it, which does not tell")
def test_what_ranks_exchange_tells_when_it_is_complete(tmp_path: Path) -> None:
    """Which is before whoever waits for it goes on: parameters that are gathered, and gradients that are reduced."""
    model = distir.load(MLP, {"batch": 8}, loss="mse")
    distir.run(model, distir.Plan(dp=2, zero=3), steps=3, profile=tmp_path)
    for rank in range(2):
        trace = json.loads((tmp_path / f"rank{rank}.json").read_text())
        begins = {(e["args"]["step"], e["args"]["result"]): e for e in slices(trace, "communication")}
        ends = {(e["args"]["step"], e["args"]["result"]): e for e in slices(trace, "wait") if "result" in e["args"]}
        assert {"MPIAllgather", "MPIReduceScatter"} <= {e["name"] for e in begins.values()}
        assert begins.keys() == ends.keys()
        assert not [e for e in begins.values() if e["args"].get("late")]
        assert all(span(e)[1] < span(ends[k])[1] for k, e in begins.items())


def test_times_nest(tmp_path: Path) -> None:
    """Ops one after the other, inside the function that has them, inside the step."""
    program, trace = profiled(tmp_path, 2)
    (step,) = slices(trace, "step")
    ops = slices(trace, "compute")
    assert all(span(e)[0] < span(e)[1] for e in ops)
    assert all(span(a)[1] <= span(b)[0] for a, b in itertools.pairwise(ops))
    calls = slices(trace, "function")
    assert {e["args"].get("microbatch") for e in calls} >= {0, 1}
    for e in ops:
        inside = [c["name"] for c in calls if within(e, c)]
        assert inside == [name for name in [e["args"]["function"]] if name != program.name]
        assert within(e, step)


@pytest.mark.parametrize(("steps", "recorded"), [(1, [0]), (2, [1]), (RECORDED + 3, [*range(1, RECORDED + 1)])])
def test_the_first_step_warms_up_and_few_are_recorded(tmp_path: Path, steps: int, recorded: list[int]) -> None:
    _, trace = profiled(tmp_path, steps)
    assert [e["args"]["step"] for e in slices(trace, "step")] == recorded
    assert len(list(tmp_path.iterdir())) == 1


def test_a_resumed_run_records_its_own_steps(tmp_path: Path) -> None:
    program = distir.distribute(distir.load(MLP, {"batch": 8}), distir.Plan())
    assert Profiler(program, 0, CPU, tmp_path, 20, 30).recorded[0] == 21
    assert list(Profiler(program, 0, CPU, tmp_path, 20, 21).recorded) == [20]


def test_a_trace_of_an_earlier_run_is_gone_until_there_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text("old")
    program = distir.distribute(distir.load(MLP, {"batch": 8}), distir.Plan())
    Profiler(program, 0, CPU, tmp_path, 0, 1)
    assert list(tmp_path.iterdir()) == []


def test_perfetto_reads_it(tmp_path: Path) -> None:
    _, trace = profiled(tmp_path, 3)
    read = TraceProcessor(Engine.load(), (tmp_path / "rank0.json").read_bytes())
    assert read.query("select name, value from stats where severity != 'info' and value > 0") == []
    rows = read.query("select count(*) as n from slice")
    assert rows[0]["n"] == len(slices(trace))
    assert read.query("select name from process where name is not null") == [{"name": "rank 0"}]
    threads = {row["name"] for row in read.query("select name from thread where name is not null")}
    assert threads == {"step", "compute"}
    # functions are whole slices that hold the ops
    depth = read.query("select distinct depth from slice where category = 'compute' order by depth")
    assert [row["depth"] for row in depth] == [0, 1]
