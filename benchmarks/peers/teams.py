"""Runs competitors, each a group of processes, in turns: while one runs, the others block in a read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RANKS = 2
CHECKED_STEPS = 5
PATIENCE_SECONDS = 1200.0


class Entry(NamedTuple):
    """A competitor: a script of this folder, its workload (fields of `models.Work`), and its settings."""

    script: str
    work: Mapping[str, Any]
    settings: Mapping[str, Any]


class Team:
    """The processes of one competitor, a rank each with one thread. Raises RuntimeError if one of them ends."""

    def __init__(self, name: str, entry: Entry, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name.replace(' ', '-')}.log"
        said = json.dumps({"work": entry.work, "settings": entry.settings})
        command = [sys.executable, str(HERE / f"{entry.script}.py"), said]
        common = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", WORLD_SIZE=str(RANKS))
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        self.ranks: list[subprocess.Popen[str]] = []
        with self.log.open("w") as log:
            for rank in range(RANKS):
                env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.ranks.append(
                    subprocess.Popen(
                        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                    )
                )
        self.losses: list[float] = []

    def ready(self) -> None:
        """Wait until it is ready for a turn."""
        self._answers()

    def turn(self, steps: int) -> list[float]:
        """Run some steps; returns the seconds of each, of the slower rank. Appends their losses to `losses`."""
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # it has ended: `_answers` says why
                _pipe(rank.stdin).write(f"{steps}\n")
                _pipe(rank.stdin).flush()
        answers = self._answers()
        losses = [a["losses"] for a in answers if a["losses"]]
        self.losses += [statistics.fmean(row) for row in zip(*losses, strict=True)]
        timed = [a["seconds"] for a in answers if a["seconds"]]
        return [max(row) for row in zip(*timed, strict=True)]

    def _answers(self) -> list[dict[str, list[float]]]:
        late = threading.Timer(PATIENCE_SECONDS, self.end)
        late.start()
        try:
            lines = [_pipe(rank.stdout).readline() for rank in self.ranks]
        finally:
            late.cancel()
        if not all(lines):
            words = self.log.read_text(errors="replace").strip()
            raise RuntimeError(f"{self.name} ended: {words[-2000:]}")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """End its processes."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()
            _pipe(rank.stdin).close()
            _pipe(rank.stdout).close()


def _pipe(pipe: Any) -> Any:
    if pipe is None:
        raise RuntimeError("the process was started without pipes")
    return pipe


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def started(entries: Mapping[str, Entry], folder: Path) -> Iterator[list[Team]]:
    """A context with the teams of these entries, ready; ends them on exit."""
    teams: list[Team] = []
    try:
        teams += [Team(name, entry, folder) for name, entry in entries.items()]
        for team in teams:
            team.ready()
        yield teams
    finally:
        for team in teams:
            team.end()


def alternate(teams: Sequence[Team], alternations: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of a step by team, a median for each alternation: in one every team has a turn of about `seconds`.

    The first step of a turn, with the caches another team left, does not count; every other alternation goes through
    the teams in reverse.
    """
    steps: dict[str, int] = {}
    for team in teams:
        quick = statistics.median(team.turn(CHECKED_STEPS)[1:])
        steps[team.name] = 1 + max(2, min(30, round(seconds / quick)))
    found: dict[str, list[float]] = {team.name: [] for team in teams}
    for k in range(alternations):
        for team in teams if k % 2 else reversed(teams):
            found[team.name].append(statistics.median(team.turn(steps[team.name])[1:]))
    return found
