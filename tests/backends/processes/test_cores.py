"""Which cores ranks run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import distir
from distir.backends.processes import cores
from distir.backends.processes.bench_collectives import bench_collectives
from distir.backends.processes.cores import bind
from distir.ir.topology import cores_of

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_thread_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[int]] = []
    monkeypatch.setattr(cores, "_cores_in_order", lambda: [0, 4, 1, 5])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: told.append([pid, *mask]), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    bind(1, 2)
    bind(5, 8)
    assert told == [[0, 1, 5], [0, 4]]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    bind(1, 2)
    bind(5, 8)  # its threads need all cores
    assert told[2:] == [[0, 1, 5]]
    monkeypatch.setenv("DISTIR_BIND", "0")
    bind(1, 2)
    assert len(told) == 3


def test_hardware_threads_of_a_core_lie_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        where = tmp_path / f"cpu{cpu}" / "topology"
        where.mkdir(parents=True)
        (where / "physical_package_id").write_text(f"{cpu % 2}\n")
        (where / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(cores, "_TOPOLOGY", str(tmp_path) + "/cpu{}/topology")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cores._cores_in_order() == [0, 4, 2, 6, 1, 5, 3, 7]
    monkeypatch.setattr(cores, "_TOPOLOGY", str(tmp_path) + "/none{}")
    assert cores._cores_in_order() == list(range(8))


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have."""
    parents = {int(p.name): p / "stat" for p in Path("/proc").iterdir() if p.name.isdigit()}
    children: dict[int, list[int]] = {}
    for child, stat in parents.items():
        with contextlib.suppress(OSError):  # it has ended
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(child)
    found, todo = set[int](), [pid]
    while todo:
        todo += (more := children.get(todo.pop(), []))
        found.update(more)
    return found


def train(seen: Callable[[], None]) -> None:
    model = distir.load(str(EXAMPLES / "mlp.onnx"), {"batch": 8}, loss="mse", optimizer="sgd")
    distir.run(model, distir.Plan(dp=2), steps=3, on_step=lambda *_: seen())


def measure(seen: Callable[[], None]) -> None:
    bench_collectives(2, collectives=["all-reduce"], sizes=(8, 16), on_timing=lambda _: seen())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("what", [train, measure])
def test_ranks_are_bound(
    what: Callable[[Callable[[], None]], None], bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads of each; other processes are not."""
    monkeypatch.setenv("DISTIR_BIND", "01"[bound])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mine, host = os.sched_getaffinity(0), cores._cores_in_order()
    own = [{host[k] for k in cores_of(r, 2, len(host))} for r in range(2)]
    seen: list[list[list[set[int]]]] = []

    def see() -> None:
        seen.append([])
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended
                seen[-1].append([os.sched_getaffinity(int(t.name)) for t in Path(f"/proc/{pid}/task").iterdir()])

    what(see)
    first = seen[0]  # while all are there
    assert all(masks == [masks[0]] * len(masks) for masks in first)
    assert all(masks[0] in (*own, mine) for masks in first)
    if len(host) > 1:
        assert [sum([masks[0] == cores for masks in first]) for cores in own] == [int(bound)] * 2
    assert os.sched_getaffinity(0) == mine
