"""Simulates plans, and refines bounds, several at a time, each in a process that has the model from its parent."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context
from typing import NamedTuple

from distir.search.candidate_bounds import Bounds, CandidateBound, Relatives
from distir.search.exact import Detail, PlanOutcome, Setting, evaluate, examine
from distir.search.space import Candidate
from distir.search.stage_bounds import cut_bounds


class Price(NamedTuple):
    """To bound the seconds of all candidates of a profile, by the sizes of their microbatches."""

    relatives: Relatives
    microbatches: Sequence[int]
    devices: int


class Bound(NamedTuple):
    """To bound candidates of one profile."""

    candidates: Sequence[Candidate]


class Refine(NamedTuple):
    """To bound candidates of one template by their cuts."""

    candidates: Sequence[Candidate]


class Simulate(NamedTuple):
    """To simulate a candidate."""

    candidate: Candidate


Task = Price | Bound | Refine | Simulate
Answer = list[float] | list[CandidateBound] | PlanOutcome
"""Of `Price` a bound for each size; of `Bound` and `Refine` one for each candidate; of `Simulate` the outcome."""


class Simulators(NamedTuple):
    """`jobs` tasks of one setting at a time; without an executor in this process."""

    setting: Setting
    jobs: int = 1
    executor: ProcessPoolExecutor | None = None

    def answers(self, wanted: Callable[[], Task | None], bounds: Bounds) -> Iterator[tuple[Task, Answer]]:
        """Each task with its answer, as they are ready; `wanted` is asked whenever a process is free, until nothing
        runs and it has none."""
        if self.executor is None:
            while (task := wanted()) is not None:
                yield task, _answer(bounds, task)
            return
        running: dict[Future[Answer], Task] = {}
        while True:
            while len(running) < self.jobs and (task := wanted()) is not None:
                running[self.executor.submit(_answered, task)] = task
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()

    def details(self, candidates: Iterable[Candidate]) -> tuple[dict[Candidate, Detail], bool]:
        """Where the time of each candidate goes; their programs are verified and validated. Ctrl-C ends this with the
        details that are there; the second result says whether it did. Raises MismatchError."""
        rows = list(dict.fromkeys(candidates))
        found: dict[Candidate, Detail] = {}
        try:
            if self.executor is None:
                each = (examine(self.setting, c) for c in rows)
            else:
                each = self.executor.map(_examine, rows)
            for c, detail in zip(rows, each, strict=True):
                found[c] = detail
        except KeyboardInterrupt:
            return found, True
        return found, False


@contextmanager
def simulators(setting: Setting, jobs: int) -> Iterator[Simulators]:
    """Simulators for a setting; their processes end with the context. Where none can be forked it is this process."""
    if jobs == 1 or "fork" not in get_all_start_methods():
        yield Simulators(setting)
        return
    global _bounds
    _bounds = Bounds(setting)
    executor = ProcessPoolExecutor(jobs, get_context("fork"), _ignore_interrupts)
    try:
        yield Simulators(setting, jobs, executor)
    finally:
        _bounds = None
        executor.shutdown(cancel_futures=True)


_bounds: Bounds | None = None
"""What processes inherit: a model is not sent to them. Each keeps the profiles that it places."""


def _inherited() -> Bounds:
    if _bounds is None:
        raise RuntimeError("a process without a setting")
    return _bounds


def _answer(bounds: Bounds, task: Task) -> Answer:
    match task:
        case Price():
            return [bounds.of_all(task.relatives, n, task.devices) for n in task.microbatches]
        case Bound():
            return [bounds.of(c) for c in task.candidates]
        case Refine():
            return cut_bounds(bounds.setting, task.candidates)
        case Simulate():
            return evaluate(bounds.setting, task.candidate)


def _answered(task: Task) -> Answer:
    return _answer(_inherited(), task)


def _examine(c: Candidate) -> Detail:
    return examine(_inherited().setting, c)


def _ignore_interrupts() -> None:
    """Ctrl-C goes to all processes of a terminal: the parent ends these."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
