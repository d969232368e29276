"""`plan`: the quickest plans for a model on a cluster, of all that fit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distir.api.compilation import Cluster, check_8_bits, cost_model, describe
from distir.api.figures import product_flops, seconds_at_peak
from distir.api.interop.plan_settings import CONTEXT, EXPERTS
from distir.api.model import Model, loads
from distir.api.results import size
from distir.hardware import host_cores
from distir.ir.errors import InfeasibleError, UsageError, counted
from distir.search.best_first import Progressed, Simulated, by_seconds, search
from distir.search.candidate_bounds import Bounds
from distir.search.exact import Detail, Setting
from distir.search.plan_table import PlanPoint, PlanRow, PlanTable, StepWork, short_of, what_binds
from distir.search.simulating import Simulators, simulators
from distir.search.space import Candidate, Space, space
from distir.transforms.passes import SEQUENTIAL, form_of
from distir.transforms.plan import Plan
from distir.transforms.roles import weights

GIB = 1 << 30
RESERVE_GIB = 1.0
"""For what is not predicted, such as holes between the allocator's blocks."""
_FAMILY_TRIES = 6
"""The most simulations to find the best of a family."""
_SHORT_TRIES = 8
_AXIS_NAMES = {CONTEXT: "context parallelism", EXPERTS: "expert parallelism"}
_BYTES = 16
"""Of a parameter in training: the weight, its gradient and AdamW's two moments, in float32."""


class Family(NamedTuple):
    """Plans that have something in common, such as not to use a kind of parallelism."""

    name: str
    has: Callable[[Candidate], bool]


BestOf = tuple[Family, Simulated, bool]
"""A family, the quickest of it that was found, and whether none can be quicker."""
FAMILIES: tuple[Family, ...] = (
    Family("no tensor parallelism", lambda c: c.tp == 1),
    Family("no context parallelism", lambda c: c.cp == 1),
    Family("no expert parallelism", lambda c: c.ep == 1),
    Family("no pipeline", lambda c: c.pp == 1),
    Family("no recomputation", lambda c: c.recompute == "none"),
    Family("no ZeRO", lambda c: c.zero == 0),
    Family("ZeRO 3 alone", lambda c: c.zero == 3 and c.dp == c.devices),
    Family("data parallelism alone", lambda c: c.zero == 0 and c.dp == c.devices),
)


@loads
def plan(
    model: Model,
    cluster: Cluster,
    gpus: int,
    *,
    top: int = 10,
    vary: Sequence[str] | None = None,
    fix: Mapping[str, Any] | None = None,
    memory_reserve: float = RESERVE_GIB,
    on_step: Callable[[Progressed, int], None] | None = None,
) -> PlanTable:
    """The quickest plans for a training step on `gpus` devices of a cluster, of those that fit in their memory.

    Plans are ranked by simulated step time: what `simulate` says. The settings in `vary`, by default all that the model
    has, vary, but for those in `fix`, which have that value (`SETTINGS` lists them; `microbatch` is the samples of one
    on a device; "cp" varies by default only where sequences are long: `space`). `memory_reserve`, in GiB, is left free
    on each device. The `top` best are shown. As many plans are simulated at a time as there are cores. `on_step` is
    called after each simulation with what was found and how many plans are left. Ctrl-C ends the search early, with the
    best so far; of rows that are not examined then `detail` and `binds` are None.

    Raises UsageError for a model that is not trained, an unknown setting or value, or an axis that the model does not
    have; InfeasibleError where there is no plan, none fits (the message says which is least short, and what would make
    it fit), or the cluster is smaller.
    """
    begin = time.perf_counter()
    _check(model, gpus, top, memory_reserve)
    cost = cost_model(cluster, Plan(dp=gpus))
    check_8_bits(model, cost)
    if len(cost.topology.devices) < gpus:
        raise InfeasibleError(
            f"{describe(cost.topology)} has {counted(len(cost.topology.devices), 'device')}, {gpus} are asked for",
            f"plan for at most {len(cost.topology.devices)}",
        )
    setting = Setting(model, model.batch, cost, memory_reserve * GIB)
    if setting.reserve and setting.room <= 0:
        capacity = max([cost.topology.spec(d).capacity for d in cost.topology.devices])
        taken = f"{size(setting.reserve)}, beside what a process takes before it begins,"
        text = f"a reserve of {taken} leaves nothing of the {size(capacity)} of a device"
        raise InfeasibleError(text, "a smaller memory_reserve")
    all_plans = space(model.function, model.batch, gpus, cost.topology, vary, fix)
    bounds = Bounds(setting)
    with simulators(setting, host_cores()) as several:
        first = _likely(setting, all_plans)
        state = search(bounds, all_plans.candidates, several, first, at_least=top, on_step=on_step)
        if not state.fitting:
            if state.interrupted:
                raise KeyboardInterrupt  # nothing to show
            raise _nothing_fits(bounds, all_plans, state, several, gpus)
        families: list[BestOf] = []
        try:
            if not state.interrupted:
                families = _families(all_plans, state, bounds, several)
        except KeyboardInterrupt:
            state.interrupted = True
        shown = [x.candidate for x in (*state.fitting[:top], *[found for _, found, _ in families])]
        short = _quicker_but_short(state)
        details, stopped = several.details([*shown, *([short.candidate] if short else [])])
        state.interrupted |= stopped
    result = _Result(setting, all_plans, state, families, details, short)
    return result.table(gpus, top, time.perf_counter() - begin)


def _check(model: Model, gpus: int, top: int, reserve: float) -> None:
    if form_of(model.function) != SEQUENTIAL:
        raise UsageError(f"{model.name} is distributed already", "plan for a sequential program")
    if not model.function.updates:
        raise UsageError(f"{model.name} is not trained: plans are of training steps", "a loss, such as cross-entropy")
    for name, x in (("gpus", gpus), ("top", top)):
        if type(x) is not int or x < 1:
            raise UsageError(f"{name} is a whole number of at least 1, got {x!r}")
    if not 0 <= reserve < math.inf:
        raise UsageError(f"memory_reserve is a number of GiB of at least 0, got {reserve}")


def _likely(setting: Setting, found: Space) -> list[Candidate]:
    """A plan that probably fits, for an early answer: small microbatches, recomputed, as few shards as seem enough."""
    topology = setting.cost.topology
    per_node = topology.uniform.per_node if topology.uniform is not None else 1
    need = _BYTES * sum([math.prod(v.type.global_shape) for v in weights(setting.model.function) if v.kind != "state"])  # type: ignore[union-attr]
    have = topology.spec(topology.devices[0]).capacity - setting.reserve

    def rank(c: Candidate) -> tuple[object, ...]:
        enough = need / (c.tp * c.pp) < have / 2
        few = c.pp if enough else -c.tp * c.pp
        return (
            not enough,
            c.tp > per_node,
            c.schedule != "1f1b",
            few,
            c.tp if enough else 0,
            c.cp * c.ep,
            c.recompute != "full",
            c.zero != 1,
            c.microbatch,
            c.sequence_parallel,
        )

    return [min(found.candidates, key=rank)]


def _families(
    found: Space, state: Progressed, bounds: Bounds, several: Simulators
) -> list[tuple[Family, Simulated, bool]]:
    """The best of each family, and whether none can be quicker; it is looked for with a few simulations more, which are
    added to what was found."""
    known = {x.candidate: x for x in state.found}
    best: list[BestOf] = []
    for family in FAMILIES:
        mine = [c for c in found.candidates if family.has(c)]
        if not mine or len(mine) == len(found.candidates):
            continue
        more = search(bounds, mine, several, known=known, limit=_FAMILY_TRIES)
        state.interrupted |= more.interrupted
        state.found += [x for x in more.found if x.candidate not in known]
        known |= {x.candidate: x for x in more.found}
        fits = sorted([x for c, x in known.items() if family.has(c) and x.outcome.fits], key=by_seconds)
        if fits:
            best.append((family, fits[0], more.bound >= fits[0].outcome.seconds))
        if state.interrupted:
            break
    return best


def _quicker_but_short(state: Progressed) -> Simulated | None:
    """The quickest plan that does not fit, if it is quicker than all that do."""
    short = [x for x in state.found if x.outcome.reason is None and not x.outcome.fits]
    found = min(short, key=lambda x: x.outcome.seconds, default=None)
    return found if found is not None and found.outcome.seconds < state.fitting[0].outcome.seconds else None


class _Result(NamedTuple):
    setting: Setting
    space: Space
    state: Progressed
    families: Sequence[BestOf]
    details: Mapping[Candidate, Detail]
    short: Simulated | None

    def table(self, gpus: int, top: int, elapsed: float) -> PlanTable:
        """The `top` best and the families, after a search of so many seconds."""
        setting, state, short = self.setting, self.state, self.short
        work = setting.model.function, setting.cost
        done = StepWork(setting.batch, setting.model.tokens, product_flops(*work), seconds_at_peak(*work))
        bound = state.bound if not state.violations else 0.0  # a bound that did not hold says nothing of others

        def row(x: Simulated, family: str | None, certain: bool) -> PlanRow:
            detail, outcome = self.details.get(x.candidate), x.outcome
            made = x.candidate.plan(setting.batch)
            binds = detail and what_binds(detail, made, short is not None and family is None)
            figures = outcome.seconds, x.bound, outcome.memory, -outcome.over
            return PlanRow(made, *figures, detail, done, binds, family, certain, self.space.held)

        return PlanTable(
            setting.model.name,
            describe(setting.cost.topology),
            gpus,
            setting.reserve,
            [row(x, None, x.outcome.seconds <= bound) for x in state.fitting[:top]],
            [row(x, family.name, certain) for family, x, certain in self.families],
            len(self.space.candidates),
            len(state.found),
            state.excluded_by_memory,
            bound,
            elapsed,
            state.first_seconds,
            dict(self.space.left_out),
            short_of(short, detail, setting.batch) if short and (detail := self.details.get(short.candidate)) else None,
            state.interrupted,
            [
                PlanPoint(x.candidate.plan(setting.batch), *x.outcome[:2], x.outcome.over)
                for x in state.found
                if x.outcome.reason is None
            ],
            setting,
        )


def _nothing_fits(bounds: Bounds, found: Space, state: Progressed, several: Simulators, gpus: int) -> InfeasibleError:
    """An error that names the least short plan, and what would make it fit."""
    setting = bounds.setting
    known = [x for x in state.found if x.outcome.reason is None]
    simulated = {x.candidate for x in known}
    lean = sorted([c for c in found.candidates if c not in simulated], key=lambda c: bounds.of(c)[1])[:_SHORT_TRIES]
    more = search(bounds, (), several, lean)
    known += [x for x in more.found if x.outcome.reason is None]
    if not known:
        why = next(x.outcome for x in (*state.found, *more.found))
        return InfeasibleError(
            f"none of {counted(len(found.candidates), 'plan')} can be applied: {why.reason}", why.hint
        )
    least = min(known, key=lambda x: x.outcome.over)
    details, stopped = several.details([least.candidate])
    if stopped:
        raise KeyboardInterrupt  # nothing fits, and what is short is not known
    detail = details[least.candidate]
    have = least.outcome.memory - least.outcome.over
    said = short_of(least, detail, setting.batch)
    needed = gpus * 2 ** math.ceil(math.log2(max(2.0, least.outcome.memory / have)))
    c = least.candidate
    more_of = {
        "recompute": ("recomputation", c.recompute != "full"),
        "zero": ("ZeRO", c.zero < 3 and c.owners > 1),
        "microbatch": ("smaller microbatches", c.microbatch > 1),
    }
    names = {name: what for name, (what, helps) in more_of.items() if helps and name in found.held}
    names |= {name: _AXIS_NAMES[name] for name in found.unused if gpus > 1}
    ways = [f"more GPUs: {needed} may do", *[f"{what}: let {name} vary" for name, what in names.items()]]
    message = f"none of {counted(len(found.candidates), 'plan')} fits in {size(have)} a device; least short is {said}"
    return InfeasibleError(message, "; or ".join(ways))
