"""A competitor's side of the protocol with benchmarks/execution.py, which runs one competitor at a time.

The controller writes a number of steps; this rank runs them, answers with a line of JSON, and blocks in a read, so that
it uses no CPU while others run. Ranks find each other by the environment variables of torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from models import Work, data_of
from torch import Tensor


class Turns:
    """Counts the steps of a turn. `report` seconds and losses of each step."""

    def __init__(self) -> None:
        self.left = 0
        self.steps = 0
        self.answer: dict[str, list[float]] = {"seconds": [], "losses": []}
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer

    def step(self) -> int:
        """The number of the next step; waits until it may run. Raises SystemExit when no more are wanted."""
        if not self.left:
            print(json.dumps(self.answer), file=self._out, flush=True)
            self.answer = {"seconds": [], "losses": []}
            line = sys.stdin.readline()
            if not line:
                raise SystemExit
            self.left = int(line)
        self.left -= 1
        self.steps += 1
        return self.steps - 1

    def report(self, seconds: float, loss: float | None) -> None:
        """Record the seconds of a step on this rank, and its loss if this rank has (its share of) it."""
        self.answer["seconds"].append(seconds)
        if loss is not None:
            self.answer["losses"].append(loss)


def arguments() -> tuple[Work, dict[str, Any]]:
    """The workload, and this competitor's settings."""
    said = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return Work(**said["work"]), said["settings"]


def start() -> tuple[int, int]:
    """Join the process group; returns this rank and the number of ranks."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def optimizer(parameters: Sequence[torch.nn.Parameter], work: Work, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Plain SGD; `implementation` is torch's "fused", as distir has it, "foreach" or "loop"; if not said, the first."""
    kind = settings.get("implementation", "fused")
    return torch.optim.SGD(parameters, lr=work.lr, fused=kind == "fused", foreach=kind == "foreach")


def run(work: Work, step: Callable[[Sequence[Tensor]], Tensor | None], rank: int, shares: int) -> None:
    """Take turns until the controller is gone. All ranks begin a step together; data are there before it begins.

    `shares`: into how many parts the data of a step are cut, for the ranks; 1 gives each rank all of them.
    """
    turns, token = Turns(), torch.zeros(1)
    while True:
        batch = data_of(work, turns.step(), rank % shares, shares)
        dist.all_reduce(token)
        begin = time.perf_counter()
        loss = step(batch)
        seconds = time.perf_counter() - begin
        turns.report(seconds, None if loss is None else float(loss))
