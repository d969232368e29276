"""Simulates plans, and refines bounds, several at a time, each in a process that has the model from its parent.

A task goes to a process that has placed the model for its axes before, if that is free soon: placing takes longer than
most of what follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from distir.runtime.forked import can_fork, forked
from distir.search.candidate_bounds import Bounds, Relatives, placing, relatives
from distir.search.exact import Detail, Setting, evaluate, examine
from distir.search.space import Candidate


class Price(NamedTuple):
    """To bound the seconds of all candidates of these profiles, each by the sizes of its microbatches: for each profile
    a list. The profiles are of one degree of tensor parallelism and of further axes: they are placed alike."""

    profiles: Sequence[tuple[Relatives, Sequence[int]]]
    devices: int


class Bound(NamedTuple):
    """To bound candidates of one profile, each in seconds and bytes; of seconds `enough` suffice."""

    candidates: Sequence[Candidate]
    enough: float = math.inf


class Refine(NamedTuple):
    """To bound candidates by their cuts, each in seconds and bytes; of seconds `enough` suffice. They are of one
    template; or of one profile, if what the `replicas` send is left out."""

    candidates: Sequence[Candidate]
    enough: float = math.inf
    replicas: bool = True


class Simulate(NamedTuple):
    """To simulate a candidate: a PlanOutcome."""

    candidate: Candidate


class Examine(NamedTuple):
    """To say where the time of a candidate goes, and verify and validate its program: a Detail."""

    candidate: Candidate


Task = Price | Bound | Refine | Simulate | Examine

_AHEAD = 4
"""How many tasks wait for each process that has placed the model for them, before another process takes one."""


class Simulators(NamedTuple):
    """As many tasks of one setting at a time as there are executors, each of one process; without any, one at a time in
    this process."""

    setting: Setting
    executors: Sequence[ProcessPoolExecutor] = ()

    def answers(self, wanted: Callable[[], Task | None], bounds: Bounds) -> Iterator[tuple[Task, Any]]:
        """Each task with its answer, as they are ready; `wanted` is asked whenever a process is free, until nothing
        runs and it has none."""
        if not self.executors:
            while (task := wanted()) is not None:
                yield task, _answer(bounds, task)
            return
        running: dict[Future[Any], tuple[int, Task]] = {}
        tasks = _Tasks(len(self.executors), wanted, lambda task: placed_for(task, bounds.template))
        while True:
            busy = {k for k, _ in running.values()}
            for k, executor in enumerate(self.executors):
                if k not in busy and (task := tasks.next(k)) is not None:
                    running[executor.submit(_answered, task)] = k, task
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future)[1], future.result()

    def details(self, candidates: Iterable[Candidate]) -> tuple[dict[Candidate, Detail], bool]:
        """Where the time of each candidate goes; their programs are verified and validated. Ctrl-C ends this with the
        details that are there; the second result says whether it did. Raises MismatchError."""
        left = [Examine(c) for c in dict.fromkeys(candidates)]
        found: dict[Candidate, Detail] = {}
        try:
            for task, detail in self.answers(lambda: left.pop(0) if left else None, Bounds(self.setting)):
                if isinstance(task, Examine):
                    found[task.candidate] = detail
        except KeyboardInterrupt:
            return found, True
        return found, False


class _Tasks:
    """The tasks of several processes: each takes those that it has placed the model for before others. `placed` says
    for which tasks that is the same."""

    def __init__(self, processes: int, wanted: Callable[[], Task | None], placed: Callable[[Task], object]) -> None:
        self._wanted, self._key = wanted, placed
        self._placed: list[set[object]] = [set() for _ in range(processes)]
        self._waiting: list[deque[Task]] = [deque() for _ in range(processes)]

    def next(self, k: int) -> Task | None:
        """The task of process k, which is free; None if there is none now."""
        mine = self._waiting[k]
        while not mine and sum(map(len, self._waiting)) < _AHEAD * len(self._waiting):
            task = self._wanted()
            if task is None:
                break
            know = [i for i, keys in enumerate(self._placed) if self._key(task) in keys]
            self._waiting[k if k in know or not know else know[0]].append(task)
        longest = mine or max(self._waiting, key=len)
        if not longest:
            return None
        task = longest.popleft()
        self._placed[k].add(self._key(task))
        return task


def placed_for(task: Task, template: Callable[[Candidate], object]) -> object:
    """What tasks have in common for which the model is placed once."""
    if isinstance(task, Price):
        return placing(task.profiles[0][0])
    if isinstance(task, Refine) and task.replicas:
        return template(task.candidates[0])
    return placing(relatives(task.candidates[0] if isinstance(task, Bound | Refine) else task.candidate))


@contextmanager
def simulators(setting: Setting, jobs: int) -> Iterator[Simulators]:
    """Simulators for a setting; their processes end with the context. Where none can be forked it is this process."""
    if jobs == 1 or not can_fork():
        yield Simulators(setting)
        return
    global _bounds
    _bounds = Bounds(setting)
    try:
        with ExitStack() as stack:
            yield Simulators(
                setting, [stack.enter_context(forked(1, "distir-plan", "the search")) for _ in range(jobs)]
            )
    finally:
        _bounds = None


_bounds: Bounds | None = None
"""What processes inherit: a model is not sent to them. Each keeps what it places."""


def _answer(bounds: Bounds, task: Task) -> Any:
    match task:
        case Price():
            return [[bounds.of_all(key, n, task.devices) for n in sizes] for key, sizes in task.profiles]
        case Bound():
            return [bounds.of(c, task.enough) for c in task.candidates]
        case Refine():
            return bounds.of_cuts(*task)
        case Simulate():
            return evaluate(bounds.setting, task.candidate)
        case Examine():
            return examine(bounds.setting, task.candidate)


def _answered(task: Task) -> Any:
    if _bounds is None:
        raise RuntimeError("a process without a setting")
    return _answer(_bounds, task)
