"""Runs whose supervisors are forked from one process that has loaded torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from distir.backends.processes import fork_server
from distir.backends.processes.fork_server import preloaded
from tests.backends.launching import run
from tests.backends.processes.test_launch import alive, counter, end_running, ones

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks only on Linux")


@pytest.fixture(autouse=True)
def no_server_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_server", None)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ranks() -> list[int]:
    """Of all runs: processes of that name that have this one as an ancestor."""

    def below(pid: int) -> Iterator[int]:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from below(int(child))

    return [pid for pid in below(os.getpid()) if Path(f"/proc/{pid}/comm").read_text().startswith("distir-rank")]


def lineage(change: Callable[[], None] = lambda: None) -> list[int]:
    """Run two ranks: pids of their supervisor, its parent, and on to this process. `change` is called meanwhile."""
    found: list[int] = []

    def on_step(k: int, seconds: float, outputs: dict[int, np.ndarray]) -> None:
        if k == 0:
            found.append(parent(ranks()[0]))
            while found[-1] != os.getpid():
                found.append(parent(found[-1]))
            change()

    main = counter()
    result = run(main, ones(main), 50, timeout=300, on_step=on_step)
    assert [float(x[0]) for x in result.outputs] == [24.0 * (k + 2) for k in range(50)]
    return found[:-1]


def test_runs_share_the_process_that_loads_torch() -> None:
    with preloaded():
        first, second = lineage(), lineage()
        with preloaded():
            third = lineage()
    assert len(first) == len(second) == len(third) == 2
    assert first[1] == second[1] == third[1]
    assert len({first[0], second[0], third[0]}) == 3
    assert not any(map(alive, first + second + third))
    assert len(lineage()) == 1  # outside, a process of its own


def test_a_server_that_is_killed_is_done_without() -> None:
    with preloaded():
        supervisor, server = lineage()
        again = lineage(lambda: os.kill(server, signal.SIGKILL))  # nor does it disturb a run
        assert again[1] == server
        assert len(lineage()) == len(lineage()) == 1
    assert not alive(supervisor)


def test_a_server_that_does_not_answer_is_done_without() -> None:
    """It is ended: a late answer would be taken for that of another request."""
    with preloaded():
        _, server = lineage()
        held = fork_server.server()
        assert held is not None
        assert held._socket is not None
        held._socket.settimeout(0.2)
        os.kill(server, signal.SIGSTOP)
        assert len(lineage()) == len(lineage()) == 1
        assert not alive(server)


def test_a_run_is_where_its_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Path] = []
    with preloaded():
        for folder in (ROOT, tmp_path):
            monkeypatch.chdir(folder)
            lineage(lambda: found.append(Path(f"/proc/{ranks()[0]}/cwd").readlink()))
    assert found == [ROOT, tmp_path]


def test_what_torch_may_read_as_it_is_loaded_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with preloaded():
        _, server = lineage()
        with monkeypatch.context() as m:
            m.setenv("OMP_NUM_THREADS", "2")
            assert len(lineage()) == 1
        assert lineage()[1] == server


SCRIPT = """
from distir.backends.processes.fork_server import preloaded
from tests.backends.launching import run
from tests.backends.processes.test_fork_server import parent, ranks
from tests.backends.processes.test_launch import counter, ones

def on_step(k, seconds, outputs):
    if k == 0:
        found = ranks()
        print(*found, parent(found[0]), parent(parent(found[0])), flush=True)

main = counter()
with preloaded():
    run(main, ones(main), 2, timeout=300)
    run(main, ones(main), 10**6, timeout=300, on_step=on_step)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_ends_in_a_run(end: signal.Signals, tmp_path: Path) -> None:
    assert len({*end_running(SCRIPT, end, tmp_path)}) == 4
