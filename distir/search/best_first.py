"""Best-first search: plans in the order of their lower bounds, each simulated, until no bound is below what was found.

Bounds are refined lazily. A candidate is first bounded by that of its relatives; when it comes up, its profile (placed
once for all candidates of equal tensor parallelism, sequence parallelism and recomputation) gives its own.
"""

from __future__ import annotations

import heapq
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distir.executor.cost_model import CostModel
from distir.ir.errors import DistirError
from distir.ir.pause import no_collection
from distir.search.bounds import StepCost, bounded, memory_bound, step_bound, step_cost, tensor_groups
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


class Bounds:
    """Lower bounds of the candidates of one setting; profiles and prices are kept."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._profiles: dict[tuple[object, ...], Profile | None] = {}
        self._steps: dict[tuple[object, ...], StepCost | None] = {}

    def of(self, c: Candidate) -> tuple[float, float]:
        """Seconds and bytes; (0, 0) where nothing is known."""
        step = self._step(c)
        if step is None:
            return 0.0, 0.0
        batch, cost = self.setting.batch, self.setting.cost
        return step_bound(c, batch, step, cost), memory_bound(c, batch, step)

    def _step(self, c: Candidate) -> StepCost | None:
        groups = tuple(tensor_groups(c, self.setting.cost))
        key = c.tp, c.sequence_parallel, c.recompute, c.microbatch, groups
        if key not in self._steps:
            profile = self._profile(c)
            self._steps[key] = profile and step_cost(profile, c.microbatch, self.setting.cost, groups)
        return self._steps[key]

    def _profile(self, c: Candidate) -> Profile | None:
        """The profile of a candidate, at one sample a microbatch; None where bounds are not known to hold."""
        key = c.tp, c.sequence_parallel, c.recompute
        if key not in self._profiles:
            try:
                self._profiles[key] = self._place(c)
            except DistirError:
                self._profiles[key] = None
        return self._profiles[key]

    @no_collection()
    def _place(self, c: Candidate) -> Profile | None:
        setting = self.setting
        if not bounded(setting.cost) or setting.batch < 2:
            return None
        plan = Plan(
            tp=c.tp, microbatches=setting.batch, sequence_parallel=c.sequence_parallel, recompute=c.recompute
        )
        context = PassContext(plan, setting.cost.topology.devices[: plan.size])
        names = ("fuse", "decompose", "pad", "place", "join", "recompute")
        return profile_of(run_passes(setting.model.function, names, context), 1)


Score = Callable[[Found], Any]


def search(
    setting: Setting,
    candidates: Sequence[Candidate],
    top: int,
    jobs: int = 1,
    on_step: Callable[[Progressed, int], None] | None = None,
) -> Progressed:
    """Simulate candidates until the best `top` that fit are known.

    `on_step` is called after each simulation with what was found and how many candidates are left. Ctrl-C ends the
    search with what was found.
    """
    begin = time.perf_counter()
    state, bounds = Progressed(), Bounds(setting)
    spare = setting.cost.topology
    memory = max([spare.spec(d).memory for d in spare.devices[:1]]) - setting.reserve
    queue: list[tuple[float, int, Candidate]] = []
    for k, c in enumerate(candidates):
        seconds, needed = bounds.of(c)
        if needed > memory:
            state.excluded_by_memory += 1
        else:
            queue.append((seconds, k, c))
    heapq.heapify(queue)
    best: list[float] = []
    """The seconds of the best so far, negated: the worst of them first."""

    def wanted() -> Iterator[tuple[float, Candidate]]:
        while queue and (len(best) < top or queue[0][0] < -best[0]):
            seconds, _, c = heapq.heappop(queue)
            yield seconds, c

    try:
        for seconds, c, outcome in _evaluated(setting, wanted(), jobs):
            state.found.append(Found(c, outcome, seconds))
            if outcome.reason is None and outcome.seconds < seconds:
                state.violations += 1
            if outcome.fits:
                if state.first_seconds is None:
                    state.first_seconds = time.perf_counter() - begin
                heapq.heappush(best, -outcome.seconds)
                if len(best) > top:
                    heapq.heappop(best)
            if on_step is not None:
                on_step(state, len(queue))
    except KeyboardInterrupt:
        state.interrupted = True
    state.bound = queue[0][0] if queue else math.inf
    return state


_shared: Setting | None = None
"""What the processes that simulate inherit."""


def _work(c: Candidate) -> Outcome:
    if _shared is None:
        raise RuntimeError("a process without a setting")
    return evaluate(_shared, c)


def _evaluated(
    setting: Setting, wanted: Iterator[tuple[float, Candidate]], jobs: int
) -> Iterator[tuple[float, Candidate, Outcome]]:
    """Each candidate with its outcome; some are simulated at a time, so a few more than needed."""
    if jobs == 1:
        for seconds, c in wanted:
            yield seconds, c, evaluate(setting, c)
        return
    global _shared
    _shared = setting
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        running: list[tuple[float, Candidate, Any]] = []
        while True:
            for seconds, c in itertools.islice(wanted, jobs - len(running)):
                running.append((seconds, c, pool.apply_async(_work, (c,))))
            if not running:
                return
            done = next((row for row in running if row[2].ready()), None)
            if done is None:
                running[0][2].wait(0.005)
                continue
            running.remove(done)
            yield done[0], done[1], done[2].get()
