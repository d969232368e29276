"""Simulates plans, several at a time, each in a process that has the model from its parent."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context
from typing import NamedTuple

from distir.search.exact import Detail, PlanOutcome, Setting, evaluate, examine
from distir.search.space import Candidate

Bounded = tuple[float, Candidate]
"""A candidate with its lower bound of seconds."""


class Simulators(NamedTuple):
    """`jobs` simulations of one setting at a time; without an executor in this process."""

    setting: Setting
    jobs: int = 1
    executor: ProcessPoolExecutor | None = None

    def outcomes(self, wanted: Iterator[Bounded]) -> Iterator[tuple[float, Candidate, PlanOutcome]]:
        """Each candidate with its outcome, as they are ready; `wanted` is asked whenever a process is free."""
        if self.executor is None:
            for bound, c in wanted:
                yield bound, c, evaluate(self.setting, c)
            return
        running: dict[Future[PlanOutcome], Bounded] = {}
        while True:
            while len(running) < self.jobs and (found := next(wanted, None)) is not None:
                running[self.executor.submit(_evaluate, found[1])] = found
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                bound, c = running.pop(future)
                yield bound, c, future.result()

    def details(self, candidates: Iterable[Candidate]) -> dict[Candidate, Detail]:
        """Where the time of each candidate goes; their programs are verified and validated. Raises MismatchError."""
        rows = list(dict.fromkeys(candidates))
        if self.executor is None:
            return {c: examine(self.setting, c) for c in rows}
        return dict(zip(rows, self.executor.map(_examine, rows), strict=True))


@contextmanager
def simulators(setting: Setting, jobs: int) -> Iterator[Simulators]:
    """Simulators for a setting; their processes end with the context. Where none can be forked it is this process."""
    if jobs == 1 or "fork" not in get_all_start_methods():
        yield Simulators(setting)
        return
    global _setting
    _setting = setting
    executor = ProcessPoolExecutor(jobs, get_context("fork"), _ignore_interrupts)
    try:
        yield Simulators(setting, jobs, executor)
    finally:
        _setting = None
        executor.shutdown(cancel_futures=True)


_setting: Setting | None = None
"""What processes inherit: a model is not sent to them."""


def _inherited() -> Setting:
    if _setting is None:
        raise RuntimeError("a process without a setting")
    return _setting


def _evaluate(c: Candidate) -> PlanOutcome:
    return evaluate(_inherited(), c)


def _examine(c: Candidate) -> Detail:
    return examine(_inherited(), c)


def _ignore_interrupts() -> None:
    """Ctrl-C goes to all processes of a terminal: the parent ends these."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
