"""How runs end that do not come to their end: killed, interrupted, terminated. What is lost, and what is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distir.cli import main
from tests.runs import ROOT, Family, free_port

STEPS, EVERY = 60, 5
SCRIPT = f"""
import hashlib, sys
import distir
from tests.runs import small

result = distir.run(
    small(), distir.Plan(dp=2), steps={STEPS}, checkpoint=sys.argv[1], every={EVERY}, resume=True,
    on_step=lambda k, *_: print(k, flush=True),
)
print("end", hashlib.sha256(b"".join(x.tobytes() for x in result.weights.values())).hexdigest())
"""
CLI = [sys.executable, "-m", "distir", "run", "examples/mlp.onnx", "--dim", "batch=8", "--loss", "mse", "--dp", "2"]


def start(line: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def completed(directory: Path, family: Family, tmp: Path) -> tuple[int, str]:
    """Run the script to its end: its first step (STEPS if none was left), and what became of the weights."""
    process = start([sys.executable, "-c", SCRIPT, str(directory)], family.env(TMPDIR=str(tmp)))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    *steps, last = out.strip().splitlines()
    return int(steps[0]) if steps else STEPS, last


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    first, last = completed(tmp_path_factory.mktemp("whole") / "c", Family(), tmp_path_factory.mktemp("tmp"))
    assert first == 0
    return last


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    """A folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


OTHERS = ("supervisor", "launcher", "launcher and supervisor", "all ranks")


def victims(kind: str, launcher: int, family: dict[int, str], dice: random.Random) -> list[int]:
    ranks = [pid for pid, name in family.items() if name.startswith("distir-rank")]
    supervisor = [pid for pid in family if pid != launcher and pid not in ranks]
    return {
        "rank": [dice.choice(ranks)] if ranks else [],
        "all ranks": ranks,
        "supervisor": supervisor,
        "launcher": [launcher],
        "launcher and supervisor": [launcher, *supervisor],
    }[kind]


def kill_and_go_on(kind: str, seed: int, tmp_path: Path, tmp: Path, undisturbed: str) -> None:
    """Kill processes at a random moment; then go on, and compare. A rank at a moment when there are any."""
    dice, family, directory = random.Random(seed), Family(), tmp_path / "c"
    process = start([sys.executable, "-c", SCRIPT, str(directory)], family.env(TMPDIR=str(tmp)))
    assert process.stdout is not None
    seen = ""
    if dice.random() < 0.85:  # else it may be before the first step
        seen = process.stdout.readline()
    time.sleep(dice.uniform(0, 1.2))
    while not (chosen := victims(kind, process.pid, family.alive(), dice)) and process.poll() is None:
        time.sleep(0.01)
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    seen += process.communicate(timeout=300)[0]
    family.wait_for_the_end(2)
    if directory.exists() and kind != "launcher and supervisor":
        assert not [p for p in directory.iterdir() if p.name.startswith(".")]  # nor what was being written
    last = max([int(line) for line in seen.splitlines() if line.isdecimal()], default=-1)
    if "end" in seen:
        return  # it was quicker
    first, result = completed(directory, family, tmp)
    assert result == undisturbed
    if first < STEPS:  # else no process was started, and none looked for what others had left
        assert list(tmp.iterdir()) == []
    checkpoint = (last + 1) // EVERY * EVERY
    assert first in (checkpoint, checkpoint + EVERY)  # a checkpoint may be whole before its step is reported
    assert sorted(p.name for p in directory.iterdir()) == [
        "latest",
        f"step-{STEPS - EVERY:08}",
        f"step-{STEPS:08}",
    ]


def test_a_rank_that_is_killed_loses_the_steps_since_the_last_checkpoint(
    tmp_path: Path, tmp: Path, undisturbed: str
) -> None:
    kill_and_go_on("rank", random.randrange(1 << 30), tmp_path, tmp, undisturbed)


def test_what_starts_the_ranks_ends_while_it_still_loads_torch(tmp_path: Path) -> None:
    """If whoever started it is gone."""
    folder, stub = tmp_path / "run", tmp_path / "stub"
    for path in (folder, stub):
        path.mkdir()
    (stub / "torch.py").write_text("import time\ntime.sleep(120)\n")
    mine, its = socket.socketpair()
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(stub), str(ROOT)]))
    command = [sys.executable, "-m", "distir.backends.processes.worker", str(folder), str(its.fileno())]
    process = subprocess.Popen(command, env=env, pass_fds=[its.fileno()])
    its.close()
    mine.close()
    assert process.wait(timeout=300) == 1
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_is_killed_whenever(seed: int, tmp_path: Path, tmp: Path, undisturbed: str) -> None:
    kill_and_go_on("rank", seed, tmp_path, tmp, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", OTHERS)
def test_whatever_is_killed_whenever(kind: str, seed: int, tmp_path: Path, tmp: Path, undisturbed: str) -> None:
    kill_and_go_on(kind, seed, tmp_path, tmp, undisturbed)


def interrupted(
    processes: list[subprocess.Popen[str]], family: Family, end: signal.Signals, group: bool, tmp: Path | None = None
) -> list[str]:
    """End runs that have come to their sixth step; all of their processes are gone within 2 seconds. Their stderr."""
    out = processes[0].stdout
    assert out is not None
    while (line := out.readline()) and not line.startswith("5 "):
        pass
    assert len(family.alive()) >= 2
    for p in processes:
        if group:
            os.killpg(p.pid, end)
        else:
            p.send_signal(end)
    family.wait_for_the_end(2)
    assert tmp is None or list(tmp.iterdir()) == []
    return [p.communicate(timeout=10)[1] for p in processes]


ENDS = [
    (signal.SIGINT, False, 130, "distir: error: interrupted\n"),
    (signal.SIGINT, True, 130, "distir: error: interrupted\n"),
    (signal.SIGTERM, False, -signal.SIGTERM, ""),
]


@pytest.mark.parametrize(("end", "group", "code", "said"), ENDS)
def test_all_ranks_end_within_two_seconds(
    end: signal.Signals, group: bool, code: int, said: str, tmp_path: Path, tmp: Path
) -> None:
    """In the middle of steps and of writing checkpoints."""
    family, directory = Family(), tmp_path / "c"
    line = [*CLI, "--steps", "1000000", "--checkpoint", str(directory), "--every", "2"]
    process = start(line, family.env(TMPDIR=str(tmp)))
    (err,) = interrupted([process], family, end, group, tmp)
    assert (process.returncode, err) == (code, said)
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]
    assert main(["run", str(ROOT / CLI[4]), *line[5:], "--resume", "--steps", "1", "--backend", "numpy"]) == 0
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_is_half_written_goes_with_the_run(end: signal.Signals, tmp_path: Path, tmp: Path) -> None:
    family, part = Family(), tmp_path / "c" / ".step-00000003.part"
    process = start([*CLI, "--steps", "1000000", "--checkpoint", str(part.parent)], family.env(TMPDIR=str(tmp)))
    assert process.stdout is not None
    while (line := process.stdout.readline()) and not line.startswith("5 "):
        pass
    part.mkdir()  # as if a rank were at it: the run itself writes one at its end only
    (part / "__0_0.distcp").write_bytes(b"half")
    process.send_signal(end)
    family.wait_for_the_end(2)
    process.communicate(timeout=10)
    assert list(part.parent.iterdir()) == []


def test_all_ranks_of_torchrun_end_within_two_seconds(tmp_path: Path) -> None:
    family, port = Family(), str(free_port())
    processes = []
    for rank in range(2):
        env = family.env(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        line = [*CLI, "--steps", "1000000", "--checkpoint", str(tmp_path), "--every", "2"]
        processes.append(start(line, env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}))
    errors = interrupted(processes, family, signal.SIGINT, group=False)
    assert any(err.endswith("error: interrupted\n") for err in errors)
    assert not any("Traceback" in err for err in errors)
    # whoever hears of the other's end first may take it for a failure
    assert {p.returncode for p in processes} <= {130, 6}
