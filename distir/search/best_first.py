"""Best-first search: plans in the order of their lower bounds, each simulated, until no bound is below what was found.

Bounds are refined lazily. A candidate is first bounded by that of its relatives; when it comes up, its profile (placed
once for all candidates of equal tensor parallelism, sequence parallelism and recomputation) gives its own.
"""

from __future__ import annotations

import heapq
import itertools
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distir.ir.errors import DistirError
from distir.ir.pause import no_collection
from distir.search.bounds import StepCost, bounded, compute_bound, groups_along, memory_bound, step_bound, step_cost
from distir.search.exact import Outcome, Setting, evaluate
from distir.search.segments import Profile, profile_of
from distir.search.space import Candidate
from distir.transforms.passes import PassContext, run_passes
from distir.transforms.plan import Plan


class Found(NamedTuple):
    """A simulated candidate, with its lower bound of seconds."""

    candidate: Candidate
    outcome: Outcome
    bound: float


@dataclass
class Progressed:
    """How far a search is. `bound`: no candidate that was not simulated, and fits, takes less time."""

    found: list[Found] = field(default_factory=list)
    excluded_by_memory: int = 0
    bound: float = 0.0
    first_seconds: float | None = None
    """After how long the first plan that fits was there."""
    interrupted: bool = False
    violations: int = 0
    """Simulations that were below their bound: then bounds do not hold."""

    @property
    def fitting(self) -> list[Found]:
        """The plans that fit, quickest first."""
        fits = [x for x in self.found if x.outcome.fits]
        return sorted(fits, key=lambda x: (x.outcome.seconds, x.candidate))


Relatives = tuple[int, bool, str]
"""Candidates that share a profile: tp, sequence_parallel, recompute."""


class Bounds:
    """Lower bounds of the candidates of one setting; profiles and prices are kept."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._profiles: dict[Relatives, Profile | None] = {}
        self._steps: dict[tuple[object, ...], StepCost] = {}

    def of(self, c: Candidate) -> tuple[float, float]:
        """Seconds and bytes; (0, 0) where nothing is known."""
        profile = self.profile(relatives(c))
        if profile is None:
            return 0.0, 0.0
        batch, cost = self.setting.batch, self.setting.cost
        groups = groups_along(c, cost, "tp")
        key = relatives(c), c.microbatch, groups
        if key not in self._steps:
            self._steps[key] = step_cost(profile, c.microbatch, cost, groups)
        step = self._steps[key]
        return step_bound(c, batch, step, cost), memory_bound(c, batch, step)

    def of_all(self, key: Relatives, microbatch: int, gpus: int) -> float:
        """Seconds below which no candidate of these is, with microbatches of at most that size."""
        profile = self.profile(key)
        if profile is None:
            return 0.0
        return compute_bound(profile, microbatch, self.setting.batch, gpus, key[0], self.setting.cost)

    def profile(self, key: Relatives) -> Profile | None:
        """The profile of these candidates, at one sample a microbatch; None where bounds are not known to hold."""
        if key not in self._profiles:
            try:
                self._profiles[key] = self._place(*key)
            except DistirError:
                self._profiles[key] = None
        return self._profiles[key]

    @no_collection()
    def _place(self, tp: int, sequence: bool, recompute: str) -> Profile | None:
        setting = self.setting
        if not bounded(setting.cost) or setting.batch < 2:
            return None
        plan = Plan(tp=tp, microbatches=setting.batch, sequence_parallel=sequence, recompute=recompute)
        context = PassContext(plan, setting.cost.topology.devices[: plan.size])
        names = ("fuse", "decompose", "pad", "place", "join", "recompute")
        return profile_of(run_passes(setting.model.function, names, context), 1)


def relatives(c: Candidate) -> Relatives:
    """What candidates of one profile share."""
    return c.tp, c.sequence_parallel, c.recompute


class _Queue:
    """Candidates in the order of their bounds, which are computed when they may matter.

    An entry is a candidate, all candidates of a profile and size of microbatch, or of a profile and all sizes up to one:
    the last two are replaced by what they stand for when they come up.
    """

    def __init__(self, bounds: Bounds, candidates: Sequence[Candidate], memory: float) -> None:
        self.bounds, self.memory = bounds, memory
        self.excluded = 0
        self._groups: dict[Relatives, dict[int, list[Candidate]]] = {}
        for c in candidates:
            self._groups.setdefault(relatives(c), {}).setdefault(c.microbatch, []).append(c)
        self._count = itertools.count()
        self._heap: list[tuple[float, int, Candidate | tuple[Relatives, int, bool]]] = []
        self.left = len(candidates)
        for key, sizes in sorted(self._groups.items()):
            self._push(0.0, (key, max(sizes), False))

    def _push(self, bound: float, what: Candidate | tuple[Relatives, int, bool]) -> None:
        heapq.heappush(self._heap, (bound, next(self._count), what))

    @property
    def bound(self) -> float:
        """No candidate that is left, and fits, takes less time."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self, below: float) -> tuple[float, Candidate] | None:
        """The candidate of the lowest bound; None if there is none below that."""
        while self._heap and self._heap[0][0] < below:
            bound, _, what = heapq.heappop(self._heap)
            if isinstance(what, Candidate):
                self.left -= 1
                return bound, what
            key, size, priced = what
            mine = self._groups[key][size]
            if priced:
                for c in mine:
                    seconds, needed = self.bounds.of(c)
                    if needed > self.memory:
                        self.excluded += 1
                        self.left -= 1
                    else:
                        self._push(max(bound, seconds), c)
                continue
            bound = max(bound, self.bounds.of_all(key, size, mine[0].devices))
            self._push(bound, (key, size, True))
            smaller = [n for n in self._groups[key] if n < size]
            if smaller:
                self._push(bound, (key, max(smaller), False))
        return None


def search(
    setting: Setting,
    candidates: Sequence[Candidate],
    certain: int = 1,
    jobs: int = 1,
    first: Sequence[Candidate] = (),
    on_step: Callable[[Progressed, int], None] | None = None,
) -> Progressed:
    """Simulate candidates until the best `certain` of those that fit are known; those in `first` before all others.

    `on_step` is called after each simulation with what was found and how many candidates are left. Ctrl-C ends the
    search with what was found.
    """
    begin = time.perf_counter()
    state = Progressed()
    topology = setting.cost.topology
    memory = max([topology.spec(d).memory for d in topology.devices]) - setting.reserve
    queue = _Queue(Bounds(setting), candidates, memory)
    known: set[Candidate] = set()
    best: list[float] = []
    """The seconds of the best so far, negated: the worst of them first."""

    def wanted() -> Iterator[tuple[float, Candidate]]:
        for c in first:
            known.add(c)
            yield 0.0, c
        while True:
            found = queue.pop(math.inf if len(best) < certain else -best[0])
            if found is None:
                return
            if found[1] not in known:
                yield found

    try:
        for bound, c, outcome in _evaluated(setting, wanted, jobs):
            state.found.append(Found(c, outcome, bound))
            if outcome.reason is None and outcome.seconds < bound:
                state.violations += 1
            if outcome.fits:
                if state.first_seconds is None:
                    state.first_seconds = time.perf_counter() - begin
                heapq.heappush(best, -outcome.seconds)
                if len(best) > certain:
                    heapq.heappop(best)
            if on_step is not None:
                on_step(state, queue.left)
    except KeyboardInterrupt:
        state.interrupted = True
    state.bound, state.excluded_by_memory = queue.bound, queue.excluded
    return state


_shared: Setting | None = None
"""What the processes that simulate inherit."""


def _work(c: Candidate) -> Outcome:
    if _shared is None:
        raise RuntimeError("a process without a setting")
    return evaluate(_shared, c)


def _evaluated(
    setting: Setting, wanted: Callable[[], Iterator[tuple[float, Candidate]]], jobs: int
) -> Iterator[tuple[float, Candidate, Outcome]]:
    """Each candidate with its outcome; `jobs` are simulated at a time, so some more than needed. `wanted` gives the next
    ones whenever it is asked."""
    if jobs == 1:
        for bound, c in wanted():
            yield bound, c, evaluate(setting, c)
        return
    global _shared
    _shared = setting
    with multiprocessing.get_context("fork").Pool(jobs, _ignore_interrupts) as pool:
        running: list[tuple[float, Candidate, Any]] = []
        source = wanted()
        while True:
            while len(running) < jobs and (found := next(source, None)) is not None:
                running.append((*found, pool.apply_async(_work, (found[1],))))
            if not running:
                return
            done = next((row for row in running if row[2].ready()), None)
            if done is None:
                running[0][2].wait(0.005)
                continue
            running.remove(done)
            yield done[0], done[1], done[2].get()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
