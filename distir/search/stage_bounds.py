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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distir.api.named_dims import named_dims
from distir.api.stage_cost import OpSeconds, stage_cost
from distir.executor.cost_model import CostModel
from distir.ir.device import TIME, AxisNames
from distir.ir.function import Op
from distir.search.bounds import ROUNDING, GroupsAlong, groups_along, lane, slope
from distir.search.cut_stages import CellOp, CutStages, Handed, Replicas, StagePrograms
from distir.search.exact import Setting
from distir.search.placed_program import PlacedProgram, placed_program
from distir.search.placed_sizes import Sized
from distir.search.schedule_bounds import CellWork, StageWork, row_memory, row_seconds, schedule_rows
from distir.search.segments import COMPUTE, axis_of
from distir.search.space import Candidate
from distir.search.stage_sums import NumberedCut, StageSums
from distir.transforms.passes import PassContext, run_passes, stage_meshes
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, PROLOGUE, UPDATE, PhaseRules, phases
from distir.transforms.pipeline.stages import (
    Follows,
    backward_stages,
    balanced_stages,
    following,
    stage_ways,
    to_price,
)


def place_template(setting: Setting, c: Candidate) -> PlacedProgram:
    """The placed program of a candidate's template. Raises InfeasibleError."""
    plan = c.plan(setting.batch)
    function, devices = setting.model.function, setting.cost.topology.devices[: plan.size]
    context = PassContext(plan, devices, splits=named_dims(function, plan.split))
    names = ("fuse", "decompose", "pad", "place", "join", "recompute")
    return placed_program(run_passes(function, names, context), PhaseRules(BACKWARD, c.zero == 3))


class _Cut(NamedTuple):
    """A cut of a placed program, and its stages as programs."""

    numbered: NumberedCut
    programs: CutStages


class Cuts:
    """The cuts of a template's placed program, which is not kept, but what is asked of it in numbers; what plans share
    is kept."""

    def __init__(self, setting: Setting, placed: PlacedProgram) -> None:
        self.setting, self._room = setting, setting.room
        self._kinds, self._axes, self._sent = placed.kinds, placed.axes, placed.sent
        self.size = len(placed.timed)
        """How many ops it has."""
        function, rules = placed.function, placed.rules
        phase = phases(function, rules)
        self._sums, self._programs = StageSums(placed, phase), StagePrograms(placed, phase)
        number = {op: i for i, op in enumerate(placed.timed)}
        self._ways, self._to_price = stage_ways(function, rules), to_price(function, rules)
        self._forward = [number[op] for op in self._ways.ops]
        self._following = [_numbered(x, number) for x in following(function, rules)]
        self._sized: dict[tuple[int, int], Sized] = {}
        self._cuts: dict[bytes, _Cut] = {}
        self._asked: dict[object, _Cut] = {}
        self._seconds: dict[object, Sequence[_Taken]] = {}
        self._works: dict[object, list[StageWork]] = {}

    def bound(self, c: Candidate, enough: float = math.inf) -> tuple[float, float]:
        """Seconds and bytes of a candidate; 0 where its schedule is too long to be followed, or seconds of what does
        not fit. The schedule is not followed where compute alone takes `enough` seconds.

        Raises InfeasibleError if the program cannot be cut into its stages.
        """
        m = c.microbatches(self.setting.batch)
        rows = schedule_rows(c.schedule, c.pp, m, c.chunks)
        if rows is None:
            return 0.0, 0.0
        sized, cut = self._sizes(c), self._cut(c).numbered
        memories = self._sums.memory(cut, lambda t: sized(t).bytes)
        memory = max([row_memory(row, memories, m) for row in rows]) * ROUNDING
        if memory > self._room:
            return 0.0, memory
        seconds = np.array([0.0 if stream else x for stream, x in self._prices(c, sized)])
        by_rank = self._sums.compute(cut, seconds).reshape(c.chunks, c.pp).sum(axis=0)
        alone = m * float(by_rank.max()) * ROUNDING
        if alone >= enough:
            return alone, memory
        return row_seconds(rows, self._work(c), m, lane(c, self.setting.cost)) * ROUNDING, memory

    def _work(self, c: Candidate) -> list[StageWork]:
        key = c.dp, c.microbatch, c.pp, c.chunks, c.order
        if key not in self._works:
            self._works[key] = self._of(c)
        return self._works[key]

    def _of(self, c: Candidate) -> list[StageWork]:
        sized = self._sizes(c)
        (cut, stages), seconds = self._cut(c), self._prices(c, sized)
        gathered, reduced = self._among_replicas(c, cut, sized)
        handed = _followed(stages, seconds, sized)
        known: dict[object, CellWork] = {}

        def cell(word: str, s: int, before: int) -> CellWork:
            rows, given, out = stages.passes[word, s], handed.get((word, before)), handed[word, s]
            key = id(rows), given and given.used, out and out.made
            if key not in known:
                known[key] = _cell(rows, seconds, given and given.used, out and out.made)
            sent = 0.0 if out is None else float(sized(out.type).bytes)
            return known[key]._replace(
                sent=sent, gathered=gathered.get((word, s), 0.0), reduced=reduced.get((word, s), 0.0)
            )

        found: list[StageWork] = []
        for s in range(c.pp * c.chunks):
            both = cell(FORWARD, s, s - 1), cell(BACKWARD, s, s + 1)
            found.append(StageWork(*both, gathered.get((PROLOGUE, s), 0.0), reduced.get((UPDATE, s), 0.0)))
        return found

    def _sizes(self, c: Candidate) -> Sized:
        """The types of the template at a candidate's sizes."""
        key = c.dp, c.microbatch
        if key not in self._sized:
            plan = c.plan(self.setting.batch)
            sizes = {TIME: plan.microbatches, **{axis.name: axis.size for axis in plan.axes}}
            self._sized[key] = Sized(sizes, self.setting.cost.topology.devices)
        return self._sized[key]

    def _cut(self, c: Candidate) -> _Cut:
        """The stages of a candidate; schedules are not asked, and equal cuts are one object."""
        asked = c.dp, c.microbatch, c.pp, c.chunks, c.order
        if asked not in self._asked:
            parts, forward = c.pp * c.chunks, self._forward_stages(c)
            key = np.array(forward, np.int32).tobytes()
            if key not in self._cuts:
                cut = self._sums.cut(self._stages(forward, parts), parts)
                self._cuts[key] = _Cut(cut, CutStages(self._programs, cut))
            self._asked[asked] = self._cuts[key]
        return self._asked[asked]

    def _forward_stages(self, c: Candidate) -> Sequence[int]:
        """The stages of the forward ops. Raises InfeasibleError if there are fewer of these than stages."""
        cost, parts = self.setting.cost, c.pp * c.chunks
        if parts == 1:
            return [0] * len(self._forward)
        plan = c.plan(self.setting.batch)
        mesh = stage_meshes(plan, cost.topology.devices[: plan.size]).meshes[0]
        priced = stage_cost(cost, plan)._replace(op=OpSeconds(cost, mesh, self._sizes(c)))
        return balanced_stages(self._ways, self._to_price, parts, plan.microbatches, priced)

    def _stages(self, forward: Sequence[int], parts: int) -> Sequence[int]:
        """The stages of the ops of both passes."""
        if parts == 1:
            return [0] * self.size
        stage = dict(zip(self._forward, forward, strict=True))
        backward_stages(self._following, stage, parts)
        return [stage[i] for i in range(self.size)]

    def _prices(self, c: Candidate, sized: Sized) -> Sequence[_Taken]:
        """What the kinds of ops take at a plan's sizes and groups of devices."""
        groups = tuple([(axis, groups_along(c, self.setting.cost, axis)) for axis in self._axes])
        key = c.dp, c.microbatch, groups
        if key not in self._seconds:
            along = dict(groups)
            self._seconds[key] = [_taken(op, self.setting.cost, along, sized) for op in self._kinds]
        return self._seconds[key]

    def _among_replicas(self, c: Candidate, cut: NumberedCut, sized: Sized) -> Replicas:
        """The seconds of the replicas' stream: gathers of weights and reductions of gradients."""
        if c.dp == 1:
            return Replicas({}, {})
        sent = {axis: sum([n * sized(t).bytes for t, n in rows.items()]) for axis, rows in self._sent.items()}
        axis = max(sent, key=lambda axis: sent[axis])  # each has a stream, of which only this one is followed
        groups = groups_along(c, self.setting.cost, axis)
        return self._programs.replicas(cut, axis, lambda name, t: slope(name, groups) * sized(t).bytes)


def _numbered(x: Follows[Op], number: Mapping[Op, int]) -> Follows[int]:
    of = None if x.of is None else number[x.of]
    above, saved = [number[p] for p in x.above], [[number[f] for f in ops] for ops in x.saved]
    return Follows(number[x.op], of, x.with_of, above, saved)


def _followed(stages: CutStages, seconds: Sequence[_Taken], sized: Sized) -> dict[tuple[str, int], Handed | None]:
    """Of the values that each pass hands on the one that most of the next pass waits for."""
    known: dict[tuple[int, int], float] = {}

    def waits(later: Sequence[CellOp], x: Handed) -> tuple[float, int]:
        key = id(later), x.used
        if key not in known:
            known[key] = _cell(later, seconds, x.used, None).after
        return known[key], sized(x.type).bytes

    found: dict[tuple[str, int], Handed | None] = {}
    for (word, s), rows in stages.hands.items():
        found[word, s] = rows[0] if rows else None
        if len(rows) > 1:
            later = stages.passes[word, s + 1 if word == FORWARD else s - 1]
            found[word, s] = max(rows, key=lambda x: waits(later, x))
    return found


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
