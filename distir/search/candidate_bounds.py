"""Lower bounds of candidates: rough ones of a profile, that many candidates share, and those of their cuts.

Seconds and bytes; 0 where nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distir.api.interop.plan_settings import EXPERTS
from distir.executor.simulator.saved_in_8_bits import least_share
from distir.ir.errors import DistirError, InfeasibleError
from distir.ir.function import Function
from distir.ir.pause import no_collection
from distir.search.bounds import StepCost, bounded, compute_bound, groups_along, step_bound, step_cost
from distir.search.exact import Setting
from distir.search.memory_bounds import memory_bound
from distir.search.placed_program import place, place_template, placed_program
from distir.search.placed_sizes import Template, template_of
from distir.search.segments import Profile, profile_of
from distir.search.space import Candidate
from distir.search.stage_bounds import Cuts
from distir.transforms.passes import bucketed_axes
from distir.transforms.pipeline.phases import BACKWARD, PhaseRules
from distir.transforms.plan import InputSplit, Plan

Relatives = tuple[int, bool, str, tuple[InputSplit, ...]]
"""Candidates that share a profile: tp, sequence_parallel, recompute, further axes."""


CandidateBound = tuple[float, float]
"""Seconds of a step, and bytes of the rank that needs most."""

_MOST_OPS = 450_000
"""Of all templates that are kept: each op takes some hundred bytes, with its cuts."""


class Bounds:
    """Lower bounds of the candidates of one setting; profiles, prices and templates are kept."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self._room = setting, setting.room
        self.refines = bounded(setting.cost)
        """Whether seconds are bounded, and cuts give bounds, too; else bounds are of bytes alone."""
        self.rough: dict[Candidate, CandidateBound] = {}
        """Of those that were asked for, before their cuts."""
        self.shared: dict[tuple[Relatives, int], float] = {}
        """Seconds, of all candidates of a profile, by the size of their microbatch."""
        self.of_cut: tuple[dict[Candidate, CandidateBound], dict[Candidate, CandidateBound]] = {}, {}
        """By their cuts, of those for which that was asked: without what replicas send, and with it."""
        self._profiles: dict[Relatives, Profile | None] = {}
        self._steps: dict[tuple[object, ...], StepCost] = {}
        self._cuts: dict[Relatives | Template, Cuts] = {}

    def of(self, c: Candidate, enough: float = math.inf) -> CandidateBound:
        """Seconds and bytes; (0, 0) where nothing is known. Of a candidate that does not fit only the bytes are looked
        for, and no more than `enough` seconds."""
        profile = self.profile(relatives(c))
        if profile is None:
            return 0.0, 0.0
        batch, cost = self.setting.batch, self.setting.cost
        memory = memory_bound(c, batch, profile, least_share(cost.runtime))
        if memory > self._room or not self.refines:
            return 0.0, memory
        groups = tuple([(axis, groups_along(c, cost, axis)) for axis in profile.axes])
        repeated = c.microbatches(batch) > 1
        key = relatives(c), c.microbatch, groups, repeated
        if key not in self._steps:
            self._steps[key] = step_cost(profile, c.microbatch, cost, dict(groups), repeated)
        return step_bound(c, batch, self._steps[key], cost, enough), memory

    def of_all(self, key: Relatives, microbatch: int, gpus: int) -> float:
        """Seconds below which no candidate of these is, with microbatches of at most that size."""
        profile = self.profile(key) if self.refines else None
        if profile is None:
            return 0.0
        shards = key[0] * math.prod([x.size for x in key[3] if x.axis != EXPERTS])
        return compute_bound(profile, microbatch, self.setting.batch, gpus, shards, self.setting.cost)

    def template(self, c: Candidate) -> Template:
        """Candidates of one template are cut alike, from one placed program."""
        return template_of(c, self.setting.model.function, self.setting.batch)

    @no_collection()
    def of_cuts(
        self, candidates: Sequence[Candidate], enough: float = math.inf, replicas: bool = True
    ) -> list[CandidateBound]:
        """Seconds and bytes of candidates by their cuts, 0 where nothing is known. Of those that do not fit only the
        bytes are looked for, and where `enough` seconds are certain no more. Without `replicas` what these send is left
        out: then candidates share a placed program that are of one profile, else those of one template."""
        found: list[CandidateBound] = []
        for c in candidates:
            # if a step is one microbatch, more may be computed in the forward pass: on the whole batch
            other = not replicas and c.pp > 1 and c.microbatches(self.setting.batch) == 1
            try:
                found.append((0.0, 0.0) if other else self._cuts_of(c, replicas).bound(c, enough))
            except DistirError:
                found.append((0.0, 0.0))
        for cuts in self._cuts.values():
            cuts.release()
        return found

    def _cuts_of(self, c: Candidate, replicas: bool) -> Cuts:
        """The cuts of a candidate's placed program; those of the last programs are kept."""
        key, kept = self.template(c) if replicas else relatives(c), self._cuts
        cuts = kept.pop(key, None)
        if cuts is None:
            cuts = Cuts(self.setting, place_template(self.setting, c)) if replicas else self._alone(relatives(c))
        kept[key] = cuts
        while len(kept) > 1 and sum([x.size for x in kept.values()]) > _MOST_OPS:
            del kept[next(iter(kept))]
        return cuts

    def _alone(self, key: Relatives) -> Cuts:
        plan = self._plan(key)
        placed = placed_program(
            self._placed(plan), PhaseRules(BACKWARD, False), bucketed_axes(plan), self.setting.cost.runtime
        )
        return Cuts(self.setting, placed, False)

    def profile(self, key: Relatives) -> Profile | None:
        """The profile of these candidates, at one sample a microbatch; None where bounds are not known to hold."""
        if key not in self._profiles:
            try:
                plan = self._plan(key)
                self._profiles[key] = profile_of(self._placed(plan), 1, bucketed_axes(plan), self.setting.cost.runtime)
            except DistirError:
                self._profiles[key] = None
        return self._profiles[key]

    def _plan(self, key: Relatives) -> Plan:
        """A plan of these candidates, without replicas. Raises InfeasibleError."""
        tp, sequence, recompute, split = key
        microbatches = self.setting.batch // math.prod([x.size for x in split if x.axis == EXPERTS])
        if microbatches < 2:
            raise InfeasibleError("no bounds are known")
        return Plan(tp=tp, microbatches=microbatches, sequence_parallel=sequence, recompute=recompute, split=split)

    @no_collection()
    def _placed(self, plan: Plan) -> Function:
        return place(self.setting, plan)


def relatives(c: Candidate) -> Relatives:
    """What candidates of one profile share."""
    return c.tp, c.sequence_parallel, c.recompute, c.split


def placing(key: Relatives) -> tuple[int, tuple[InputSplit, ...]]:
    """What profiles have in common that are placed alike, but for sequence parallelism, replicas and recomputation."""
    tp, _, _, split = key
    return tp, split
