"""Best-first search: plans in the order of their lower bounds, each simulated, until no bound is below what was found.

Bounds are refined lazily, in five levels. A candidate is first bounded by that of its relatives; when it comes up, its
profile (placed once for all candidates of equal tensor parallelism, sequence parallelism and recomputation) gives its
own; when that comes up, its cut does (`stage_bounds`), first without what replicas send, then, of a program that is
placed for fewer candidates, with that; then it is simulated.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from distir.search.candidate_bounds import Bounds, CandidateBound, Relatives, placing, relatives
from distir.search.exact import PlanOutcome
from distir.search.placed_sizes import Template
from distir.search.simulating import Bound, Price, Refine, Simulate, Simulators, Task
from distir.search.space import Candidate


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


_NEAR = 1.2
"""Bounds are refined together with those of plans of the same placed program that are at most so much slower: placing
takes longer than refining some more."""
_LIKELY = 1.05
"""By how much the plans that are looked for may be slower than the bounds of as many are."""
_MOST_TOGETHER = 96
"""How many bounds are refined together at most: placed programs are kept, and another process may take the next."""
NOTHING_KNOWN: Mapping[Candidate, Simulated] = MappingProxyType({})


class Unpriced(NamedTuple):
    """All candidates of several profiles, which are placed alike."""

    profiles: tuple[Relatives, ...]


class Several(NamedTuple):
    """Candidates that share a profile, of one size of microbatch."""

    relatives: Relatives
    microbatch: int


_Entry = Candidate | Several | Unpriced
_Rough = dict[Relatives | Template, dict[Candidate, float]]
"""Candidates with their bounds, by what those share whose bounds are refined together."""


class _Queue:
    """Candidates in the order of their bounds, which are computed when they may matter.

    An entry is a candidate, or several, which are replaced by what they stand for when they come up. A candidate that
    comes up first has its bound refined, with those of others of the same placed program that may come up, and is then
    an entry again.
    """

    def __init__(
        self, bounds: Bounds, candidates: Sequence[Candidate], memory: float, exact: Container[Candidate], at_least: int
    ):
        self.bounds, self.memory, self.exact = bounds, memory, exact
        self._least = [math.inf] * at_least
        """The least refined bounds of plans that fit, ascending."""
        self.excluded = 0
        self._groups: dict[Relatives, dict[int, list[Candidate]]] = {}
        for c in candidates:
            self._groups.setdefault(relatives(c), {}).setdefault(c.microbatch, []).append(c)
        self._count = itertools.count()
        self._heap: list[tuple[float, int, _Entry]] = []
        self._latest: dict[_Entry, int] = {}
        """The number of each entry; those before it, of the same, are void."""
        self._rough: tuple[_Rough, _Rough] = {}, {}
        """The candidates whose bounds are to be refined next, with these: without replicas, and with them."""
        self._sizes: dict[Relatives, dict[int, float]] = {}
        """The bounds of those that have none of their own, by relatives and size of microbatch."""
        self.away: dict[_Entry, float] = {}
        """What is being bounded or simulated, with its bound."""
        self.left = len(candidates)
        alike: dict[object, list[Relatives]] = {}
        for key in sorted(self._groups):
            alike.setdefault(placing(key), []).append(key)
        for keys in alike.values():
            self._push(0.0, Unpriced(tuple(keys)))

    def _push(self, bound: float, what: _Entry) -> None:
        number = next(self._count)
        self._latest[what] = number
        heapq.heappush(self._heap, (bound, number, what))

    @property
    def bound(self) -> float:
        """No candidate that is left, and fits, takes less time."""
        return min([self._heap[0][0] if self._heap else math.inf, *self.away.values()])

    def pop(self, below: float) -> Task | None:
        """What to do next with the candidates of the lowest bound; None if there is none below that."""
        while self._heap and self._heap[0][0] < below:
            bound, number, what = heapq.heappop(self._heap)
            if self._latest.get(what) != number:
                continue
            if isinstance(what, Several):
                return Bound(self._several(what, min(below, bound * _NEAR)), below)
            if not isinstance(what, Candidate):
                self.away[what] = bound
                sizes = self._groups[what.profiles[0]]
                devices = sizes[max(sizes)][0].devices
                return Price(tuple([(key, tuple(sorted(self._groups[key]))) for key in what.profiles]), devices)
            for replicas in (False, True):
                rough = self._rough[replicas].get(self._shared(what, replicas), {})
                if what in rough:
                    most = min(below, bound * _NEAR, max(bound, self._least[-1]) * _LIKELY)
                    return Refine(self._near(what, rough, most), most, replicas)
            self.left -= 1
            self.away[what] = bound
            return Simulate(what)
        return None

    def _shared(self, c: Candidate, replicas: bool) -> Relatives | Template:
        """What candidates share that are refined together."""
        return self.bounds.template(c) if replicas else relatives(c)

    def _near(self, what: Candidate, rough: dict[Candidate, float], most: float) -> tuple[Candidate, ...]:
        """A candidate, with those of `rough` whose bounds are below `most`."""
        near = sorted([(x, c) for c, x in rough.items() if x < most and c != what])
        group = (what, *[c for _, c in near[: _MOST_TOGETHER - 1]])
        for c in group:
            self.away[c] = rough.pop(c)
            del self._latest[c]
        return group

    def _several(self, what: Several, below: float) -> tuple[Candidate, ...]:
        """The candidates of an entry, with their relatives of other sizes of microbatch whose bounds are `below`: they
        are then refined together."""
        sizes = self._sizes[what.relatives]
        chosen = [n for n, x in sizes.items() if n == what.microbatch or x < below]
        for n in chosen:
            entry = Several(what.relatives, n)
            self.away[entry] = sizes.pop(n)
            del self._latest[entry]
        return tuple([c for n in chosen for c in self._groups[what.relatives][n]])

    def _add(self, c: Candidate, bound: float, found: CandidateBound) -> None:
        known = [of_cut[c] for of_cut in self.bounds.of_cut if c in of_cut]
        seconds, needed = (max(each) for each in zip(found, *known, strict=True))
        if needed > self.memory:
            self.excluded += 1
            self.left -= 1
            return
        bound = max(bound, seconds)
        if self.bounds.refines and c not in self.exact and c not in self.bounds.of_cut[True]:
            replicas = c in self.bounds.of_cut[False]
            self._rough[replicas].setdefault(self._shared(c, replicas), {})[c] = bound
        self._push(bound, c)

    def remembered(self, task: Price | Bound) -> Any:
        """The answer to a task, if another search of the same setting had it."""
        if isinstance(task, Bound):
            rows = [self.bounds.rough.get(c) for c in task.candidates]
            return None if None in rows else rows
        found = [[self.bounds.shared.get((key, n)) for n in sizes] for key, sizes in task.profiles]
        return None if any([None in rows for rows in found]) else found

    def priced(self, task: Price, found: Sequence[Sequence[float]]) -> None:
        """Take the bounds of profiles' candidates, by the sizes of their microbatches."""
        before = self.away.pop(Unpriced(tuple([key for key, _ in task.profiles])))
        for (key, sizes), bounds in zip(task.profiles, found, strict=True):
            for size, bound in zip(sizes, bounds, strict=True):
                self.bounds.shared[key, size] = bound
                self._sizes.setdefault(key, {})[size] = max(before, bound)
                self._push(max(before, bound), Several(key, size))

    def bounded(self, task: Bound, found: Sequence[CandidateBound]) -> None:
        """Take the bounds of candidates of one profile."""
        entries = [Several(relatives(c), c.microbatch) for c in task.candidates]
        before = {entry: self.away.pop(entry) for entry in dict.fromkeys(entries)}
        for c, entry, one in zip(task.candidates, entries, found, strict=True):
            self.bounds.rough[c] = one
            self._add(c, before[entry], one)

    def refined(self, task: Refine, found: Sequence[CandidateBound]) -> None:
        """Take the bounds of candidates by their cuts."""
        for c, one in zip(task.candidates, found, strict=True):
            seconds, needed = one
            before = self.away.pop(c)
            if seconds < task.enough or seconds <= before or needed > self.memory:
                self.bounds.of_cut[task.replicas][c] = one
            else:  # more is looked for if it comes up again
                self.bounds.rough[c] = one
            if task.replicas and needed <= self.memory:
                bisect.insort(self._least, seconds)
                self._least.pop()
            self._add(c, before, one)


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
    """Simulate candidates until the `at_least` quickest that fit are known; or `limit` in all.

    Those in `first` come before all others. What is `known` is not simulated again. `on_step` is called after each
    simulation with what was found and how many candidates are left. Ctrl-C ends the search with what was found.
    """
    begin = time.perf_counter()
    state, setting = Progressed(), bounds.setting
    queue = _Queue(bounds, candidates, setting.room, known, at_least)
    quickest, asked = [math.inf] * at_least, len(first)  # seconds, ascending, of the plans that fit

    def took(x: Simulated) -> None:
        state.found.append(x)
        queue.away.pop(x.candidate, None)
        if x.outcome.reason is None and x.outcome.seconds < x.bound:
            state.violations += 1
        if x.outcome.fits and x.candidate not in known:
            if state.first_seconds is None:
                state.first_seconds = time.perf_counter() - begin
            rank(x)

    def rank(x: Simulated) -> None:
        bisect.insort(quickest, x.outcome.seconds)
        quickest.pop()

    for x in [known[c] for c in candidates if c in known]:
        if x.outcome.fits:
            rank(x)

    def wanted() -> Task | None:
        nonlocal asked
        while asked < limit and (task := queue.pop(quickest[-1])) is not None:
            if isinstance(task, Price | Bound) and (answer := queue.remembered(task)) is not None:
                answered(task, answer)
            elif not isinstance(task, Simulate):
                return task
            elif (before := known.get(task.candidate)) is not None:
                took(before)
            elif task.candidate in first:
                del queue.away[task.candidate]
            else:
                asked += 1
                return task
        return None

    def answered(task: Task, answer: Any) -> None:
        if isinstance(task, Price):
            queue.priced(task, answer)
        elif isinstance(task, Bound):
            queue.bounded(task, answer)
        elif isinstance(task, Refine):
            queue.refined(task, answer)
        else:
            took(Simulated(task.candidate, answer, queue.away.get(task.candidate, 0.0)))
            if on_step is not None:
                on_step(state, queue.left)

    try:
        early = [Simulate(c) for c in reversed(first)]
        for task, answer in simulators.answers(lambda: early.pop() if early else None, bounds):
            answered(task, answer)  # a plan, before any bound is known
        for task, answer in simulators.answers(wanted, bounds):
            answered(task, answer)
    except KeyboardInterrupt:
        state.interrupted = True
    state.bound, state.excluded_by_memory = queue.bound, queue.excluded
    return state
