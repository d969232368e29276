"""Lower bounds from the real cut: a placed program's stages, in the order of the schedule, without what takes place
beside compute.

`bounds` asks what the best cut could reach. Here the cut is the one that the plan gets, so each stage's work is known:
for how long it keeps the compute stream, the path from what it receives to what it sends, what it saves, what it
reduces and gathers among replicas. A rank runs its cells one after another; a cell's result cannot be ready before its
stage's path has followed what it received. Placing is shared by plans that differ in the
numbers of replicas, pipeline ranks and microbatches, in schedule, chunks and order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from distir.api.named_dims import named_dims
from distir.api.stage_cost import OpSeconds, stage_cost
from distir.executor.cost_model import CostModel
from distir.ir.device import TIME, AxisNames
from distir.ir.errors import DistirError
from distir.ir.function import Op
from distir.ir.pause import no_collection
from distir.ir.type import Type
from distir.search.bounds import GroupsAlong, groups_along, slope
from distir.search.cut_stages import NOTHING, CellOp, CutStages, PlacedProgram, placed_program
from distir.search.exact import Setting
from distir.search.placed_sizes import Sized
from distir.search.schedule_bounds import CellWork, StageWork, schedule_bound
from distir.search.segments import COMPUTE, axis_of
from distir.search.space import Candidate
from distir.transforms.passes import PassContext, run_passes, stage_meshes
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, PROLOGUE, UPDATE, PhaseRules
from distir.transforms.pipeline.stages import forward_stages, staged


@no_collection()
def cut_bounds(setting: Setting, candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
    """Seconds and bytes below which none of these candidates is, 0 where nothing is known.

    They are of one template (see `placed_sizes`).
    """
    found: list[tuple[float, float]] = []
    cuts: _Cuts | None = None
    for c in candidates:
        try:
            cuts = cuts or _Cuts(setting, _place(setting, c))
            found.append(schedule_bound(c, setting.batch, setting.cost, cuts.works(c)))
        except DistirError:
            found.append((0.0, 0.0))
    return found


def _place(setting: Setting, c: Candidate) -> PlacedProgram:
    plan = c.plan(setting.batch)
    function, devices = setting.model.function, setting.cost.topology.devices[: plan.size]
    context = PassContext(plan, devices, splits=named_dims(function, plan.split))
    names = ("fuse", "decompose", "pad", "place", "join", "recompute")
    return placed_program(run_passes(function, names, context), PhaseRules(BACKWARD, c.zero == 3))


class _Cuts:
    """The cuts of a template's placed program; what plans share is kept."""

    def __init__(self, setting: Setting, placed: PlacedProgram) -> None:
        self.setting, self.placed = setting, placed
        self._sized: dict[tuple[int, int], Sized] = {}
        self._stages: dict[tuple[int, ...], CutStages] = {}
        self._seconds: dict[object, Sequence[_Taken]] = {}
        self._works: dict[object, list[StageWork]] = {}

    def works(self, c: Candidate) -> list[StageWork]:
        """The work of a candidate's stages. Raises InfeasibleError if it cannot be cut into these."""
        key = c.dp, c.microbatch, c.pp, c.chunks, c.order
        if key not in self._works:
            self._works[key] = self._of(c)
        return self._works[key]

    def _of(self, c: Candidate) -> list[StageWork]:
        sized = self._sizes(c)
        stages, seconds = self._cut(c, sized), self._prices(c, sized)

        def size(_: str, t: Type) -> float:
            return sized(t).bytes

        gathered, reduced = self._among_replicas(c, stages, sized)
        handed = {at: max(rows, key=lambda x: sized(x.type).bytes, default=None) for at, rows in stages.hands.items()}
        known: dict[object, CellWork] = {}

        def cell(word: str, s: int, before: int) -> CellWork:
            rows, given, out = stages.passes[word, s], handed.get((word, before)), handed[word, s]
            key = id(rows), given and given.used, out and out.made
            if key not in known:
                known[key] = _cell(rows, seconds, given and given.used, out and out.made)
            sent = 0.0 if out is None else float(sized(out.type).bytes)
            return known[key]._replace(sent=sent, gathered=gathered(word, s), reduced=reduced(word, s))

        found: list[StageWork] = []
        for s in range(c.pp * c.chunks):
            held, saved, sums = (rows.get(s, NOTHING).total(size) for rows in (stages.held, stages.saved, stages.sums))
            both = cell(FORWARD, s, s - 1), cell(BACKWARD, s, s + 1)
            found.append(StageWork(*both, held, saved, sums, gathered(PROLOGUE, s), reduced(UPDATE, s)))
        return found

    def _sizes(self, c: Candidate) -> Sized:
        """The types of the template at a candidate's sizes."""
        key = c.dp, c.microbatch
        if key not in self._sized:
            plan = c.plan(self.setting.batch)
            sizes = {TIME: plan.microbatches, **{axis.name: axis.size for axis in plan.axes}}
            self._sized[key] = Sized(sizes, self.setting.cost.topology.devices)
        return self._sized[key]

    def _cut(self, c: Candidate, sized: Sized) -> CutStages:
        placed, cost, parts = self.placed, self.setting.cost, c.pp * c.chunks
        plan = c.plan(self.setting.batch)
        forward: dict[Op, int] = {}
        if parts > 1:
            mesh = stage_meshes(plan, cost.topology.devices[: plan.size]).meshes[0]
            priced = stage_cost(cost, plan)._replace(op=OpSeconds(cost, mesh, sized))
            forward = forward_stages(placed.function, parts, plan.microbatches, priced, placed.rules)
        key = tuple(forward.values())
        if key not in self._stages:
            phase, stage = staged(placed.function, parts, placed.rules, forward)
            self._stages[key] = CutStages(placed, phase, stage, parts)
        return self._stages[key]

    def _prices(self, c: Candidate, sized: Sized) -> Sequence[_Taken]:
        """What the kinds of ops take at a plan's sizes and groups of devices."""
        groups = tuple([(axis, groups_along(c, self.setting.cost, axis)) for axis in self.placed.axes])
        key = c.dp, c.microbatch, groups
        if key not in self._seconds:
            along = dict(groups)
            self._seconds[key] = [_taken(op, self.setting.cost, along, sized) for op in self.placed.kinds]
        return self._seconds[key]

    def _among_replicas(
        self, c: Candidate, stages: CutStages, sized: Sized
    ) -> tuple[Callable[[str, int], float], Callable[[str, int], float]]:
        """The seconds of the replicas' stream by phase and stage: gathers of weights and reductions of gradients."""
        if c.dp == 1:
            return _nothing, _nothing
        sent = {axis: sum([n * sized(t).bytes for t, n in rows.items()]) for axis, rows in self.placed.sent.items()}
        axis = max(sent, key=lambda axis: sent[axis])  # each has a stream, of which only this one is followed
        groups = groups_along(c, self.setting.cost, axis)
        replicas = stages.replicas(axis)

        def seconds(name: str, t: Type) -> float:
            return slope(name, groups) * sized(t).bytes

        return (
            lambda word, s: replicas.gathered.get((word, s), NOTHING).total(seconds),
            lambda word, s: replicas.reduced.get((word, s), NOTHING).total(seconds),
        )


def _nothing(word: str, s: int) -> float:
    return 0.0


_Taken = tuple[AxisNames, float]
"""A stream, of compute or of an axis inside a replica, and seconds."""


def _taken(op: Op | None, cost: CostModel, along: GroupsAlong, sized: Sized) -> _Taken:
    """What an op takes; what becomes part of another op costs nothing of its own."""
    if op is None:
        return COMPUTE, 0.0
    axis = axis_of(op)
    ins, outs = ([sized(v.type) for v in values] for values in (op.inputs, op.outputs))
    if axis is not None and axis in along:
        return axis, min([cost.collective(op.spec, op.attributes, ins, outs, g) for g in along[axis]], default=0.0)
    if axis is not None or op.spec.comm is not None or cost.free(op.spec, op.attributes, ins):
        return COMPUTE, 0.0
    if cost.runtime is not None and not op.spec.kernel:  # it may be fused into a chain
        return COMPUTE, 0.0
    return COMPUTE, cost.compute(op.spec, op.attributes, ins, outs, cost.topology.devices[0])


def _cell(rows: Sequence[CellOp], seconds: Sequence[_Taken], given: int | None, out: int | None) -> CellWork:
    """The work of a pass that receives the operand numbered `given` and sends its result numbered `out`."""
    never = -math.inf
    clock: dict[AxisNames, float] = {COMPUTE: 0.0}
    after: dict[AxisNames, float] = {COMPUTE: 0.0}
    ready: list[float] = []
    follows: list[float] = []
    """When a result is there after what is received, at 0; never if it does not follow from that."""
    for kind, free, used, operands, results in rows:
        stream, x = seconds[kind]
        if stream and not used:
            x = 0.0  # nothing here waits for it
        end = never if free else clock.get(stream, never)
        path = never
        for k in operands:
            if k >= 0:
                end = max(end, ready[k])
                path = max(path, follows[k])
            elif k == given:
                path = max(path, 0.0)
        end += x
        if x:
            clock[stream] = end
            if path > never:
                path = after[stream] = max(after.get(stream, 0.0), path) + x
        ready += [end] * results
        follows += [path] * results
    made = 0.0 if out is None else max(0.0, ready[out])
    through = never if out is None else follows[out]
    return CellWork(clock[COMPUTE], made, through, never if given is None else after[COMPUTE], 0.0, 0.0, 0.0)
