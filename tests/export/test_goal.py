"""A GOAL schedule, read by a small interpreter, takes the simulator's time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from distir.api import Plan, load
from distir.api.exporting import export
from distir.executor.cost_model import CostModel
from distir.executor.simulator.compile import CompiledProgram
from distir.export.rank_steps import steps
from distir.ir import Device, FunctionMaker, Mesh
from distir.ir.errors import UsageError
from distir.ir.placement import Shard
from distir.ir.type import Float32, Tensor
from tests.export.clusters import BANDWIDTH, LATENCY, PLANS, exchanges, flat, model, simulated


class Task(NamedTuple):
    """A line of a rank: what it does, how much (ns or bytes), with which rank, under which tag."""

    word: str
    amount: int
    peer: int = -1
    tag: int = -1


Node = tuple[int, str]
"""A rank, and a label."""
_CALC = re.compile(r"(\w+): calc (\d+)")
_MESSAGE = re.compile(r"(\w+): (send|recv) (\d+)b (?:to|from) (\d+) tag (\d+)")
_REQUIRES = re.compile(r"(\w+) requires (\w+)")


def read(path: Path) -> tuple[dict[Node, Task], dict[Node, list[Node]]]:
    """The tasks of all ranks, and what each requires."""
    lines = path.read_text().split("\n")
    head = re.fullmatch(r"num_ranks (\d+)", lines[0])
    assert head
    tasks: dict[Node, Task] = {}
    after: dict[Node, list[Node]] = defaultdict(list)
    rank, ranks = -1, 0
    for line in lines[1:]:
        if found := re.fullmatch(r"rank (\d+) {", line):
            assert rank == -1
            rank = int(found[1])
            assert rank == ranks
            ranks += 1
        elif line == "}":
            rank = -1
        elif found := _CALC.fullmatch(line):
            tasks[rank, found[1]] = Task("calc", int(found[2]))
        elif found := _MESSAGE.fullmatch(line):
            assert (rank, found[1]) not in tasks
            tasks[rank, found[1]] = Task(found[2], int(found[3]), int(found[4]), int(found[5]))
        elif found := _REQUIRES.fullmatch(line):
            assert (rank, found[2]) in tasks
            after[rank, found[1]].append((rank, found[2]))
        else:
            assert line == "", line
    assert ranks == int(head[1])
    return tasks, after


def partners(tasks: dict[Node, Task]) -> dict[Node, Node]:
    """For each send its receive: under one tag messages between two ranks arrive in order."""
    sent: dict[tuple[int, int, int], list[Node]] = defaultdict(list)
    received: dict[tuple[int, int, int], list[Node]] = defaultdict(list)
    for node, task in tasks.items():
        if task.word == "send":
            sent[node[0], task.peer, task.tag].append(node)
        elif task.word == "recv":
            received[task.peer, node[0], task.tag].append(node)
    assert sent.keys() == received.keys()
    pairs: dict[Node, Node] = {}
    for key, rows in sent.items():
        for a, b in zip(rows, received[key], strict=True):
            assert tasks[a].amount == tasks[b].amount
            pairs |= {a: b, b: a}
    return pairs


def seconds(path: Path) -> float:
    """The time of a schedule: a message begins when both ends are ready, and takes latency and bytes / bandwidth."""
    tasks, after = read(path)
    pairs = partners(tasks)
    waits = {node: len(after[node]) for node in tasks}
    users: dict[Node, list[Node]] = defaultdict(list)
    for node, needed in after.items():
        for other in needed:
            users[other].append(node)
    ready = dict.fromkeys(tasks, 0.0)
    todo = [node for node, n in waits.items() if n == 0]
    arrived: set[Node] = set()
    done = 0
    last = 0.0
    while todo:
        node = todo.pop()
        task = tasks[node]
        if task.word == "calc":
            ended, end = [node], ready[node] + task.amount * 1e-9
        else:
            arrived.add(node)
            other = pairs[node]
            if other not in arrived:
                continue
            ended, end = [node, other], max(ready[node], ready[other]) + LATENCY + task.amount / BANDWIDTH
        last = max(last, end)
        for one in ended:
            done += 1
            for user in users[one]:
                ready[user] = max(ready[user], end)
                waits[user] -= 1
                if not waits[user]:
                    todo.append(user)
    assert done == len(tasks), "a deadlock"
    return last


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_schedule_takes_the_simulators_time(plan: Plan, tmp_path: Path) -> None:
    function = model()
    done = export(function, plan, tmp_path / "x", "goal", flat(plan.size))
    assert done.files == (str(tmp_path / "x.goal"),)
    assert done.bytes == (tmp_path / "x.goal").stat().st_size
    assert done.ranks == plan.size
    want = simulated(function, plan, plan.size).seconds
    assert seconds(tmp_path / "x.goal") == pytest.approx(want, rel=0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["x.goal"]


def test_compute_that_is_lost_beside_a_collective_is_no_message(tmp_path: Path) -> None:
    """On H100 a collective slows the compute beside it; here its groups are of several classes of devices."""
    step = load("gpt:layers=2,hidden=48,heads=12,seq=16,batch=24,vocab=96", loss="cross-entropy")
    plan, sent = Plan(dp=6, tp=2, order=("dp", "tp", "pp")), list[int]()
    for cluster in ("dgx-h100", "dgx-v100"):
        export(step, plan, tmp_path / cluster, "goal", cluster)
        tasks, _ = read(tmp_path / f"{cluster}.goal")
        sent.append(len(partners(tasks)))
    assert sent[0] == sent[1] > 0


def test_all_collectives(tmp_path: Path) -> None:
    export(exchanges(), Plan(), tmp_path / "x", "goal", flat(12))
    want = simulated(exchanges(), Plan(), 12).seconds
    assert seconds(tmp_path / "x.goal") == pytest.approx(want, rel=0.01)
    tasks, _ = read(tmp_path / "x.goal")
    count = Counter((t.word, t.amount) for (rank, _), t in tasks.items() if rank == 0 and t.word != "calc")
    whole = 60 * 600 * 3 * 4  # bytes of x on a device
    thirds = 2 + 2 + 2 + 4  # reduce-scatter, all-gather, two shifts, and an all-reduce there and back
    both = {(word, n): k for n, k in ((whole // 3, thirds), (whole // 9, 2)) for word in ("send", "recv")}
    assert count == Counter(both) + Counter({("send", whole): 1})


def test_rounds_of_collectives(tmp_path: Path) -> None:
    """Who sends to whom, and that a round begins when what it passes on is there."""
    export(exchanges(), Plan(), tmp_path / "x", "goal", flat(12))
    tasks, after = read(tmp_path / "x.goal")
    by_tag: dict[int, list[Node]] = defaultdict(list)
    for node, task in tasks.items():
        if node[0] == 0 and task.word != "calc":
            by_tag[task.tag].append(node)
    rounds = [list(zip(row[::2], row[1::2], strict=True)) for row in by_tag.values() if len(row) > 1]
    assert {(tasks[a].word, tasks[b].word) for row in rounds for a, b in row} == {("send", "recv")}
    to = [[(tasks[a].peer, tasks[b].peer) for a, b in row] for row in rounds]
    ring, pairs = [(1, 2)] * 2, [(1, 2), (2, 1)]
    assert to[:5] == [ring, pairs, [(2, 1)], [(1, 2)], ring]
    for row in rounds:
        for before, (sent, got) in pairwise(row):
            assert set(after[sent]) == set(after[got]) == set(before)


def test_a_message_waits_only_for_its_operand(tmp_path: Path) -> None:
    """Not for what is computed after that, in one run with it."""
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"a": 2}, "m")
    f = FunctionMaker("early")
    x = f.add_input_value("x", Tensor.whole(Float32, (2000, 1000), mesh, (Shard(0),)))
    y = early = f.emit("Relu", f.emit("Relu", x))
    for _ in range(20):
        y = f.emit("Relu", y)
    f.set_outputs([y, f.emit("MPIAllgather", early, axis="a")])
    export(f.finalize(), Plan(), tmp_path / "x", "goal", flat(2))
    tasks, _ = read(tmp_path / "x.goal")
    assert [task.word for (rank, _), task in tasks.items() if rank == 0] == ["calc", "calc", "send", "recv"]
    assert seconds(tmp_path / "x.goal") == pytest.approx(simulated(f.finalize(), Plan(), 2).seconds, rel=0.01)


def test_computation_is_one_task_between_messages(tmp_path: Path) -> None:
    export(model(), Plan(), tmp_path / "x", "goal", flat(1))
    tasks, after = read(tmp_path / "x.goal")
    assert [task.word for task in tasks.values()] == ["calc"]
    assert not after


def test_a_host_is_refused() -> None:
    f = FunctionMaker("hosted")
    x = f.add_input_value("x", Tensor(Float32, (6, 4), Device("cpu", 0)))
    f.set_outputs([f.emit("MPIBroadcast", x, to=Mesh([Device("cpu", k) for k in (1, 2, 3)], {"dp": 3}, "m"))])
    with pytest.raises(UsageError, match="with a host"):
        steps(CompiledProgram(f.finalize(), CostModel(flat(4))))
