"""Lower bounds of candidates: rough ones of a profile, that many candidates share, and those of their cuts.

Seconds and bytes; 0 where nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distir.api.interop.plan_settings import EXPERTS
from distir.api.named_dims import named_dims
from distir.api.stage_cost import stage_cost
from distir.ir.errors import DistirError
from distir.ir.pause import no_collection
from distir.search.balanced_memory import (
    Stageable,
    balance,
    balanced_memory,
    first_stages,
    op_seconds,
    stageable,
)
from distir.search.bounds import StepCost, bounded, compute_bound, groups_along, step_bound, step_cost
from distir.search.exact import Setting
from distir.search.memory_bounds import memory_bound
from distir.search.placed_sizes import Template, template_of
from distir.search.segments import Profile, profile_of
from distir.search.space import Candidate, spacing_of
from distir.search.stage_bounds import Cuts, place_template
from distir.transforms.passes import PassContext, run_passes
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
        """Whether cuts give bounds, too."""
        self.rough: dict[Candidate, CandidateBound] = {}
        """Of those that were asked for, before their cuts."""
        self.shared: dict[tuple[Relatives, int], float] = {}
        """Seconds, of all candidates of a profile, by the size of their microbatch."""
        self.known: dict[Candidate, CandidateBound] = {}
        """By their cuts, of those for which that was asked."""
        self._stageable: dict[Relatives, Stageable] = {}
        self._op_seconds: dict[object, np.ndarray] = {}
        self._balances: dict[object, list[int]] = {}
        self._profiles: dict[Relatives, Profile | None] = {}
        self._steps: dict[tuple[object, ...], StepCost] = {}
        self._templates: dict[Template, Cuts] = {}

    def of(self, c: Candidate, enough: float = math.inf) -> CandidateBound:
        """Seconds and bytes; (0, 0) where nothing is known. Of a candidate that does not fit only the bytes are looked
        for, and no more than `enough` seconds."""
        profile = self.profile(relatives(c))
        if profile is None:
            return 0.0, 0.0
        batch, cost = self.setting.batch, self.setting.cost
        memory = memory_bound(c, batch, profile)
        if memory > self._room:
            return 0.0, memory
        groups = tuple([(axis, groups_along(c, cost, axis)) for axis in profile.axes])
        key = relatives(c), c.microbatch, groups
        if key not in self._steps:
            self._steps[key] = step_cost(profile, c.microbatch, cost, dict(groups))
        return step_bound(c, batch, self._steps[key], cost, enough), memory

    def of_all(self, key: Relatives, microbatch: int, gpus: int) -> float:
        """Seconds below which no candidate of these is, with microbatches of at most that size."""
        profile = self.profile(key)
        if profile is None:
            return 0.0
        shards = key[0] * math.prod([x.size for x in key[3] if x.axis != EXPERTS])
        return compute_bound(profile, microbatch, self.setting.batch, gpus, shards, self.setting.cost)

    def template(self, c: Candidate) -> Template:
        """Candidates of one template are cut alike, from one placed program."""
        return template_of(c, self.setting.model.function, self.setting.batch)

    @no_collection()
    def of_cuts(self, candidates: Sequence[Candidate], enough: float = math.inf) -> list[CandidateBound]:
        """Seconds and bytes of candidates of one template by their cuts, 0 where nothing is known. Of those that do not
        fit only the bytes are looked for, and where `enough` seconds are certain no more."""
        found: list[CandidateBound] = []
        for c in candidates:
            try:
                memory = self._balanced(c)
                found.append((0.0, memory) if memory > self._room else self._cuts(c).bound(c, enough))
            except DistirError:
                found.append((0.0, 0.0))
        for cuts in self._templates.values():
            cuts.release()
        return found

    def _balanced(self, c: Candidate) -> float:
        """Bytes that it has at least, as its stages are balanced: found without placing it."""
        if c.split or c.pp == 1 or self.profile(relatives(c)) is None:
            return 0.0
        given, batch, cost = self._stageable[relatives(c)], self.setting.batch, self.setting.cost
        key = relatives(c), c.microbatch, spacing_of(c, c.order, "tp")
        if key not in self._op_seconds:
            self._op_seconds[key] = op_seconds(c, batch, given, cost)
        each, sent, parts = self._op_seconds[key], stage_cost(cost, c.plan(batch)).sent, c.pp * c.chunks
        shared = *key, parts, sent
        if shared not in self._balances:
            self._balances[shared] = balance(given, each, sent, parts)
        return balanced_memory(c, batch, first_stages(c, batch, given, each, sent, self._balances[shared], cost))

    def _cuts(self, c: Candidate) -> Cuts:
        """The template's cuts; those of the last templates are kept."""
        template, kept = self.template(c), self._templates
        cuts = kept.pop(template, None) or Cuts(self.setting, place_template(self.setting, c))
        kept[template] = cuts
        while len(kept) > 1 and sum([x.size for x in kept.values()]) > _MOST_OPS:
            del kept[next(iter(kept))]
        return cuts

    def profile(self, key: Relatives) -> Profile | None:
        """The profile of these candidates, at one sample a microbatch; None where bounds are not known to hold."""
        if key not in self._profiles:
            try:
                self._profiles[key] = self._place(*key)
            except DistirError:
                self._profiles[key] = None
        return self._profiles[key]

    @no_collection()
    def _place(self, tp: int, sequence: bool, recompute: str, split: tuple[InputSplit, ...]) -> Profile | None:
        setting = self.setting
        microbatches = setting.batch // math.prod([x.size for x in split if x.axis == EXPERTS])
        if not bounded(setting.cost) or microbatches < 2:
            return None
        function = setting.model.function
        plan = Plan(tp=tp, microbatches=microbatches, sequence_parallel=sequence, recompute=recompute, split=split)
        devices = setting.cost.topology.devices[: plan.size]
        context = PassContext(plan, devices, splits=named_dims(function, split))
        names = ("fuse", "decompose", "pad", "place", "join", "recompute")
        placed = run_passes(function, names, context)
        self._stageable[tp, sequence, recompute, split] = stageable(placed)
        return profile_of(placed, 1)


def relatives(c: Candidate) -> Relatives:
    """What candidates of one profile share."""
    return c.tp, c.sequence_parallel, c.recompute, c.split


def placing(key: Relatives) -> tuple[int, tuple[InputSplit, ...]]:
    """What profiles have in common that are placed alike, but for sequence parallelism, replicas and recomputation."""
    tp, _, _, split = key
    return tp, split
