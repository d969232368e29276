"""Best-first search: plans in the order of their lower bounds, each simulated, until no bound is below what was found.

Bounds are refined lazily, in four levels. A candidate is first bounded by that of its relatives; when it comes up, its
profile (placed once for all candidates of equal tensor parallelism, sequence parallelism and recomputation) gives its
own; when that comes up, its cut does (`stage_bounds`); then it is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from distir.ir.errors import DistirError
from distir.ir.pause import no_collection
from distir.search.bounds import StepCost, bounded, compute_bound, groups_along, step_bound, step_cost
from distir.search.exact import PlanOutcome, Setting
from distir.search.memory_bounds import memory_bound
from distir.search.segments import Profile, profile_of
from distir.search.simulating import Refine, Simulate, Simulators, Task
from distir.search.space import Candidate
from distir.search.stage_bounds import alike
from distir.transforms.passes import PassContext, run_passes
from distir.transforms.plan import Plan


class Simulated(NamedTuple):
    """A simulated candidate, with its lower bound of seconds."""

    candidate: Candidate
    outcome: PlanOutcome
    bound: float


@dataclass
class Progressed:
    """How far a search is. `bound`: no candidate that was not simulated, and fits, takes less time."""

    found: list[Simulated] = field(default_factory=list)
    excluded_by_memory: int = 0
    bound: float = 0.0
    first_seconds: float | None = None
    """After how long the first plan that fits was there."""
    interrupted: bool = False
    violations: int = 0
    """Simulations that were below their bound: then bounds do not hold."""

    @property
    def fitting(self) -> list[Simulated]:
        """The plans that fit, quickest first."""
        return sorted([x for x in self.found if x.outcome.fits], key=by_seconds)


def by_seconds(found: Simulated) -> tuple[object, ...]:
    """The key of an order by seconds of a step."""
    return found.outcome.seconds, found.candidate


Relatives = tuple[int, bool, str]
"""Candidates that share a profile: tp, sequence_parallel, recompute."""


_NEAR = 1.1
"""Until plans that fit are known, bounds are refined with those of plans that are so much slower."""
NOTHING_KNOWN: Mapping[Candidate, Simulated] = MappingProxyType({})


class Bounds:
    """Lower bounds of the candidates of one setting; profiles and prices are kept."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.refines = bounded(setting.cost)
        """Whether cuts give bounds, too."""
        self.refined: dict[Candidate, tuple[float, float]] = {}
        """Bounds of candidates, seconds and bytes, by their cuts."""
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

    An entry is a candidate, all candidates of a profile and size of microbatch, or of a profile and all sizes up to
    one: the last two are replaced by what they stand for when they come up. A candidate that comes up first has its
    bound refined, with those of others of the same placed program that may come up, and is then an entry again.
    """

    def __init__(self, bounds: Bounds, candidates: Sequence[Candidate], memory: float, exact: Container[Candidate]):
        self.bounds, self.memory, self.exact = bounds, memory, exact
        self.excluded = 0
        self._groups: dict[Relatives, dict[int, list[Candidate]]] = {}
        for c in candidates:
            self._groups.setdefault(relatives(c), {}).setdefault(c.microbatch, []).append(c)
        self._count = itertools.count()
        self._heap: list[tuple[float, int, Candidate | tuple[Relatives, int, bool]]] = []
        self._rough: dict[Candidate, dict[Candidate, float]] = {}
        """Candidates that are alike, and whose bounds are not refined, with these."""
        self.away: dict[Candidate, float] = {}
        """Candidates that are being refined or simulated, with their bounds."""
        self.left = len(candidates)
        for key, sizes in sorted(self._groups.items()):
            self._push(0.0, (key, max(sizes), False))

    def _push(self, bound: float, what: Candidate | tuple[Relatives, int, bool]) -> None:
        heapq.heappush(self._heap, (bound, next(self._count), what))

    @property
    def bound(self) -> float:
        """No candidate that is left, and fits, takes less time."""
        return min([self._heap[0][0] if self._heap else math.inf, *self.away.values()])

    def pop(self, below: float) -> Task | None:
        """What to do next with the candidates of the lowest bound; None if there is none below that."""
        while self._heap and self._heap[0][0] < below:
            bound, _, what = heapq.heappop(self._heap)
            if isinstance(what, Candidate):
                rough = self._rough.get(alike(what), {})
                if what in rough:
                    most = bound * _NEAR if math.isinf(below) else below
                    group = tuple([c for c, x in rough.items() if x < most or c == what])
                    self.away |= {c: rough.pop(c) for c in group}
                    return Refine(group)
                if what in self.bounds.refined or not self.bounds.refines or what in self.exact:
                    self.left -= 1
                    self.away[what] = bound
                    return Simulate(what)
                continue  # it is away, and comes again
            key, size, priced = what
            mine = self._groups[key][size]
            if priced:
                for c in mine:
                    self._add(c, bound, *self.bounds.of(c))
                continue
            bound = max(bound, self.bounds.of_all(key, size, mine[0].devices))
            self._push(bound, (key, size, True))
            smaller = [n for n in self._groups[key] if n < size]
            if smaller:
                self._push(bound, (key, max(smaller), False))
        return None

    def _add(self, c: Candidate, bound: float, seconds: float, needed: float) -> None:
        if c in self.bounds.refined:
            more, memory = self.bounds.refined[c]
            seconds, needed = max(seconds, more), max(needed, memory)
        if needed > self.memory:
            self.excluded += 1
            self.left -= 1
            return
        bound = max(bound, seconds)
        if self.bounds.refines and c not in self.bounds.refined and c not in self.exact:
            self._rough.setdefault(alike(c), {})[c] = bound
        self._push(bound, c)

    def refine(self, task: Refine, found: Sequence[tuple[float, float]]) -> None:
        """Take the refined bounds, seconds and bytes, of a task."""
        for c, (seconds, needed) in zip(task.candidates, found, strict=True):
            self.bounds.refined[c] = seconds, needed
            self._add(c, self.away.pop(c), seconds, needed)


def search(
    bounds: Bounds,
    candidates: Sequence[Candidate],
    simulators: Simulators,
    first: Sequence[Candidate] = (),
    known: Mapping[Candidate, Simulated] = NOTHING_KNOWN,
    at_least: int = 1,
    limit: float = math.inf,
    on_step: Callable[[Progressed, int], None] | None = None,
) -> Progressed:
    """Simulate candidates until the quickest that fits is known, and `at_least` so many that fit; or `limit` in all.

    Those in `first` come before all others. What is `known` is not simulated again. `on_step` is called after each
    simulation with what was found and how many candidates are left. Ctrl-C ends the search with what was found.
    """
    begin = time.perf_counter()
    state, setting = Progressed(), bounds.setting
    topology = setting.cost.topology
    memory = max([topology.spec(d).memory for d in topology.devices]) - setting.reserve
    queue = _Queue(bounds, candidates, memory, known)
    best, fitting, asked = math.inf, 0, 0
    early = list(reversed(first))  # an answer before any bound is known

    def took(x: Simulated) -> None:
        nonlocal best, fitting
        state.found.append(x)
        queue.away.pop(x.candidate, None)
        if x.outcome.reason is None and x.outcome.seconds < x.bound:
            state.violations += 1
        if x.outcome.fits:
            if state.first_seconds is None:
                state.first_seconds = time.perf_counter() - begin
            best = min(best, x.outcome.seconds)
            fitting += 1

    def wanted() -> Task | None:
        nonlocal asked
        if early:
            asked += 1
            return Simulate(early.pop())
        while asked < limit and (task := queue.pop(best if fitting >= at_least else math.inf)) is not None:
            if isinstance(task, Refine):
                return task
            if (before := known.get(task.candidate)) is not None:
                took(before)
            elif task.candidate in first:
                del queue.away[task.candidate]
            else:
                asked += 1
                return task
        return None

    try:
        for task, answer in simulators.answers(wanted):
            if isinstance(task, Simulate) and isinstance(answer, PlanOutcome):
                took(Simulated(task.candidate, answer, queue.away.get(task.candidate, 0.0)))
                if on_step is not None:
                    on_step(state, queue.left)
            elif isinstance(task, Refine) and not isinstance(answer, PlanOutcome):
                queue.refine(task, answer)
    except KeyboardInterrupt:
        state.interrupted = True
    state.bound, state.excluded_by_memory = queue.bound, queue.excluded
    return state
