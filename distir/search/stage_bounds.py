"""Lower bounds from the real cut: a placed program's stages, in the order of the schedule, without what takes place
beside compute.

`bounds` asks what the best cut could reach. Here the cut is the one that the plan gets, so each stage's work is
known: the way of a pass through two streams, that of compute and that of what replicas gather and reduce, from what
it receives to what it sends; and what it saves. A rank runs its cells one after another. Gathers of weights are
issued in units, one ahead of their use (`prefetch`); a gradient is reduced when it is ready; what is added to a sum
over microbatches after it is reduced is waited for at the end of a pass. Placing is shared by plans that differ in
the numbers of replicas, pipeline ranks and microbatches, in schedule, chunks and order; without what replicas do, in
ZeRO, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from distir.api.stage_cost import stage_cost
from distir.executor.cost_model import CostModel
from distir.executor.simulator.saved_in_8_bits import least_share
from distir.ir.device import TIME, AxisNames
from distir.ir.function import Op
from distir.ir.topology import Group
from distir.ir.type import Type
from distir.search.bounds import ROUNDING, GroupsAlong, groups_along, lane, least_seconds_of, slope
from distir.search.cut_stages import CellOp, CutStages, Handed, Moves, Replicas, StagePrograms
from distir.search.exact import Setting
from distir.search.placed_program import PlacedProgram
from distir.search.placed_sizes import Sized
from distir.search.run_ops import RunOp, least_seconds
from distir.search.schedule_bounds import CellWork, Reach, StageWork, followed, rank_memory, step_seconds
from distir.search.segments import COMPUTE, axis_of
from distir.search.space import Candidate, spacing_of
from distir.search.stage_sums import WHOLE, HeldShares, NumberedCut, StageSums
from distir.transforms.passes import stage_meshes
from distir.transforms.pipeline.partition import balanced, choices
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, PROLOGUE, UPDATE, phases
from distir.transforms.pipeline.stages import (
    Follows,
    backward_stages,
    following,
    stage_ways,
    to_price,
)
from distir.transforms.plan import BUCKET_MB, INPUTS, MIB, WEIGHTS


class Cuts:
    """The cuts of a placed program, which is not kept, but what is asked of it in numbers; what plans share is kept.

    The program is that of a template; or, not `replicated`, one without replicas, that serves all plans that differ in
    what replicas do: for the stages of these are the same. What they send is left out then.
    """

    def __init__(self, setting: Setting, placed: PlacedProgram, replicated: bool = True) -> None:
        self.setting, self._room, self._replicated = setting, setting.room, replicated
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
        self._cuts: dict[bytes, NumberedCut] = {}
        self._costs: dict[object, Sequence[float]] = {}
        self._balanced: dict[object, Sequence[int]] = {}
        self._as_programs: dict[NumberedCut, CutStages] = {}
        """Of cuts, until `release`."""
        self._seconds: dict[object, Sequence[_Taken]] = {}
        self._works: dict[object, list[StageWork]] = {}
        self._steps: dict[object, float] = {}

    def bound(self, c: Candidate, enough: float = math.inf) -> tuple[float, float]:
        """Seconds and bytes of a candidate; 0 where its schedule is too long to be followed, or seconds of what does
        not fit. Nothing is followed where compute alone takes `enough` seconds: then nothing is said of bytes.

        Raises InfeasibleError if the program cannot be cut into its stages.
        """
        m, sized, cut = c.microbatches(self.setting.batch), self._sizes(c), self._cut(c)
        seconds = np.array([0.0 if stream else x for stream, x in self._prices(c)])
        by_rank = self._sums.compute(cut, seconds).reshape(c.chunks, c.pp).sum(axis=0)
        alone = m * float(by_rank.max()) * ROUNDING
        if alone >= enough:
            return alone, 0.0
        schedule = followed(c.schedule, c.pp, m, c.chunks)
        if schedule is None:
            return alone, 0.0
        shares = WHOLE if self._replicated else _least_shares(c)
        shares = shares._replace(saved=least_share(self.setting.cost.runtime))
        memories = self._sums.memory(cut, lambda t: sized(t).bytes, shares)
        memory = rank_memory(schedule, memories, split=c.zero > 0) * ROUNDING
        if memory > self._room:
            return 0.0, memory
        works = self._works_of(c, cut)
        key = c.schedule, c.pp, m, c.chunks, spacing_of(c, c.order, "pp"), id(works)
        if key not in self._steps:
            self._steps[key] = step_seconds(schedule, works, lane(c, self.setting.cost)) * ROUNDING
        return self._steps[key], memory

    def release(self) -> None:
        """Give back what is only needed again for a cut that has another size of microbatch, or replicas."""
        self._as_programs.clear()
        self._programs.known.clear()

    def _works_of(self, c: Candidate, cut: NumberedCut) -> list[StageWork]:
        repeated = c.microbatches(self.setting.batch) > 1
        key = cut, self._groups(c), c.microbatch, repeated, (c.dp, c.order) if self._replicated else None
        if key not in self._works:
            self._works[key] = self._of(c, cut)
        return self._works[key]

    def _of(self, c: Candidate, cut: NumberedCut) -> list[StageWork]:
        sized, seconds = self._sizes(c), self._prices(c)
        if cut not in self._as_programs:
            self._as_programs[cut] = CutStages(self._programs, cut)
        stages = self._as_programs[cut]
        replicas, groups = self._among_replicas(c, stages, sized)
        handed = _followed(stages, seconds, sized)
        known: dict[object, CellWork] = {}

        def cell(
            word: str, s: int, once: _Moves, gathered: _Moves, reduced: _Moves = (), adds: bool = False
        ) -> CellWork:
            before, adds = s - 1 if word == FORWARD else s + 1, adds and any([x.summed for _, x in reduced])
            rows, given, out = stages.passes[word, s], handed.get((word, before)), handed[word, s]
            key = id(rows), given and given.used, out and out.made, once, gathered, reduced, adds
            if key not in known:
                moves = _stream(once, gathered, reduced, adds, groups)
                known[key] = _cell(rows, seconds, moves, given and given.used, out and out.made)
            return known[key]._replace(sent=0.0 if out is None else float(sized(out.type).bytes))

        gathered, reduced = replicas
        found: list[StageWork] = []
        for s in range(c.pp * c.chunks):
            ahead, back = gathered.get((FORWARD, s), ()), gathered.get((BACKWARD, s), ())
            often, late = reduced.get((BACKWARD, s), ()), reduced.get((UPDATE, s), ())
            if back:  # cells of other stages may gather before what is reduced in the update is
                late = ()
            all_reduced = tuple(sorted((*often, *late), key=itemgetter(0)))
            found.append(
                StageWork(
                    (cell(FORWARD, s, gathered.get((PROLOGUE, s), ()), ahead), cell(FORWARD, s, (), ahead)),
                    (
                        cell(BACKWARD, s, (), back, often),
                        cell(BACKWARD, s, (), back, often, True),
                        cell(BACKWARD, s, (), back, all_reduced, c.microbatches(self.setting.batch) > 1),
                    ),
                )
            )
        return found

    def _sizes(self, c: Candidate) -> Sized:
        """The types of the template at a candidate's sizes."""
        key = c.dp, c.microbatch
        if key not in self._sized:
            plan = c.plan(self.setting.batch)
            without = 1 if self._replicated else c.dp
            sizes = {TIME: plan.microbatches * without, **{axis.name: axis.size for axis in plan.axes}}
            self._sized[key] = Sized(sizes, self.setting.cost.topology.devices)
        return self._sized[key]

    def _cut(self, c: Candidate) -> NumberedCut:
        """The stages of a candidate; schedules are not asked, and equal cuts are one object."""
        forward, parts = self._forward_stages(c), c.pp * c.chunks
        key = np.array(forward, np.int32).tobytes()
        if key not in self._cuts:
            self._cuts[key] = self._sums.cut(self._stages(forward, parts), parts)
        return self._cuts[key]

    def _forward_stages(self, c: Candidate) -> Sequence[int]:
        """The stages of the forward ops. Raises InfeasibleError if there are fewer of these than stages."""
        cost, parts = self.setting.cost, c.pp * c.chunks
        if parts == 1:
            return [0] * len(self._forward)
        plan = c.plan(self.setting.batch)
        inside = c.microbatch, *[plan.spacing(axis.name) for axis in plan.axes if axis.strategy in (WEIGHTS, INPUTS)]
        price = stage_cost(cost, plan)
        key = inside, price.sent, price.message, parts
        if key not in self._balanced:
            if inside not in self._costs:
                mesh = stage_meshes(plan, cost.topology.devices[: plan.size]).meshes[0]
                self._costs[inside] = self._to_price.costs(stage_cost(cost, plan, mesh, self._sizes(c)).op)
            given = choices(self._ways, self._costs[inside], price.sent, price.message)
            self._balanced[key] = balanced(given, parts)
        return self._balanced[key]

    def _stages(self, forward: Sequence[int], parts: int) -> Sequence[int]:
        """The stages of the ops of both passes."""
        if parts == 1:
            return [0] * self.size
        stage = dict(zip(self._forward, forward, strict=True))
        backward_stages(self._following, stage, parts)
        return [stage[i] for i in range(self.size)]

    def _groups(self, c: Candidate) -> tuple[tuple[AxisNames, Sequence[Group]], ...]:
        """The groups of devices along each axis inside a replica."""
        return tuple([(axis, groups_along(c, self.setting.cost, axis)) for axis in self._axes])

    def _prices(self, c: Candidate) -> Sequence[_Taken]:
        """What the kinds of ops take at a plan's sizes and groups of devices."""
        groups = self._groups(c)
        repeated = c.microbatches(self.setting.batch) > 1
        key = c.microbatch, groups, repeated
        if key not in self._seconds:
            along, sized = dict(groups), self._sizes(c)
            self._seconds[key] = [_taken(kind, self.setting.cost, along, sized, repeated) for kind in self._kinds]
        return self._seconds[key]

    def _among_replicas(
        self, c: Candidate, stages: CutStages, sized: Sized
    ) -> tuple[Replicas[_Move], tuple[Group, ...]]:
        """What the replicas' stream gathers and reduces, and the groups that do."""
        if c.dp == 1 or not self._replicated:
            return Replicas({}, {}), ()
        sent = {axis: sum([n * sized(t).bytes for t, n in rows.items()]) for axis, rows in self._sent.items()}
        axis = max(sent, key=lambda axis: sent[axis])  # each has a stream, of which only this one is followed
        groups = groups_along(c, self.setting.cost, axis)

        def move(name: str, t: Type, summed: bool) -> _Move:
            known = sized(t)
            return _Move(slope(name, groups) * known.bytes, known, summed, name)

        return stages.replicas(axis, move), tuple(groups)


def _least_shares(c: Candidate) -> HeldShares:
    """What each device has at least."""
    each = 1 / c.owners
    return HeldShares(each if c.zero else 1.0, 0.0 if c.zero == 3 else 1.0, 1 / c.owners_of_sums)


def _numbered(x: Follows[Op], number: Mapping[Op, int]) -> Follows[int]:
    of = None if x.of is None else number[x.of]
    above, saved = [number[p] for p in x.above], [[number[f] for f in ops] for ops in x.saved]
    return Follows(number[x.op], of, x.with_of, above, saved, x.gathers)


def _followed(stages: CutStages, seconds: Sequence[_Taken], sized: Sized) -> dict[tuple[str, int], Handed | None]:
    """Of the values that each pass hands on the one that most of the next pass waits for."""
    known: dict[tuple[int, int], float] = {}

    def waits(later: Sequence[CellOp], x: Handed) -> tuple[float, int]:
        key = id(later), x.used
        if key not in known:
            known[key] = _reach(later, seconds, _STILL, x.used, None, _NEVER, _NEVER)[0]
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


def _taken(kind: RunOp | None, cost: CostModel, along: GroupsAlong, sized: Sized, repeated: bool) -> _Taken:
    """What an op takes; what becomes part of another op costs nothing of its own. `repeated`: it is done for each of
    several microbatches."""
    if kind is None:
        return COMPUTE, 0.0
    op = kind.op
    axis = axis_of(op)
    ins, outs = ([sized(v.type) for v in values] for values in (op.inputs, op.outputs))
    if axis is not None and axis in along:
        return axis, min([cost.least(op.spec, op.attributes, ins, outs, g) for g in along[axis]], default=0.0)
    if axis is not None or op.spec.comm is not None or cost.free(op.spec, op.attributes, ins):
        return COMPUTE, 0.0
    return COMPUTE, least_seconds(kind, cost, sized, repeated)


class _Move(NamedTuple):
    """The seconds that a gather or a reduction takes, the type of what it moves, whether the result of each microbatch
    is added to a sum, and the name of the op."""

    seconds: float
    type: Type
    summed: bool
    name: str


_Moves = Moves[_Move]


class _Stream(NamedTuple):
    """What a pass has the stream of the replicas do: the seconds of units of gathers, before ops at some places, and
    which of the units, in order, ops at some places wait for; the seconds of what is reduced, by place, and of what of
    that compute waits for at the end, to add it to sums. The seconds before place -1 are of what is gathered before the
    pass."""

    issued: Mapping[int, Sequence[float]]
    needs: Mapping[int, int]
    reduced: Sequence[tuple[int, float]]
    added: Sequence[tuple[int, float]]


_STILL = _Stream({}, {}, (), ())


def _stream(once: _Moves, gathered: _Moves, reduced: _Moves, adds: bool, groups: tuple[Group, ...]) -> _Stream:
    """As `prefetch` has it: gathers in units, each issued before the first op that needs the unit before it."""
    needs = {place: k for k, (place, _) in enumerate(once)}
    issued = {-1: [x.seconds for _, x in once]} if once else {}
    units: list[tuple[int, float, int, str]] = []
    """Place, seconds of its gathers one by one at full speed, bytes, the name of the op."""
    kind: object = None
    size = math.inf
    for place, (seconds, t, _, name) in gathered:
        new = t.dtype, t.device  # type: ignore[union-attr]
        if size >= BUCKET_MB * MIB or new != kind:
            units.append((place, 0.0, 0, name))
            kind, size = new, 0
        units[-1] = units[-1][0], units[-1][1] + seconds, units[-1][2] + t.bytes, name
        needs[place] = len(once) + len(units) - 1
        size += t.bytes
    for k, (_, x, n, name) in enumerate(units):
        unit = max(x, least_seconds_of(name, n, groups))
        issued.setdefault(units[max(0, k - 1)][0], []).append(unit)
    added = [(place, x.seconds) for place, x in reduced if adds and x.summed]
    return _Stream(issued, needs, [(place, x.seconds) for place, x in reduced], added)


def _cell(
    rows: Sequence[CellOp], seconds: Sequence[_Taken], stream: _Stream, given: int | None, out: int | None
) -> CellWork:
    """The work of a pass that receives the operand numbered `given` and sends its result numbered `out`."""
    added, reduced = sum([x for _, x in stream.added]), sum([x for _, x in stream.reduced])
    moved = sum([x for some in stream.issued.values() for x in some]) + reduced
    from_compute = _reach(rows, seconds, stream, None, out, 0.0, _NEVER)
    from_replicas = _reach(rows, seconds, stream, None, out, _NEVER, 0.0) if stream.issued else _NOWHERE
    from_received = _NOWHERE if given is None else _reach(rows, seconds, stream, given, out, _NEVER, _NEVER)
    (a, b, c), (d, e, f), (g, h, i) = from_compute, from_replicas, from_received
    d = max(d, added) if added else d
    return CellWork(Reach(a, d, g), Reach(b, max(e, moved), h), Reach(max(0.0, c), f, i), 0.0)


_NEVER = -math.inf
_NOWHERE = _NEVER, _NEVER, _NEVER


def _reach(
    rows: Sequence[CellOp],
    seconds: Sequence[_Taken],
    stream: _Stream,
    given: int | None,
    out: int | None,
    begin: float,
    free: float,
) -> tuple[float, float, float]:
    """When compute has ended, the stream of the replicas is free again, and the result `out` is made, if compute may
    begin at `begin`, that stream is free at `free`, and the operand `given` is there at 0."""
    issued, needs, reduced, added = stream
    units: list[float] = []
    for x in issued.get(-1, ()):
        free += x
        units.append(free)
    clock: dict[AxisNames, float] = {COMPUTE: begin}
    ready: list[float] = []
    ends: list[float] = []
    reached = _NEVER
    """When what was computed last is there, at least."""
    for place, (kind, is_free, fused, used, operands, results) in enumerate(rows):
        stream_of, x = seconds[kind]
        if place in issued:
            for each in issued[place]:
                free = max(free, reached) + each
                units.append(free)
        end = _NEVER if is_free else clock.get(stream_of, _NEVER)
        for k in operands:
            if k >= 0:
                if ready[k] > end:
                    end = ready[k]
            elif k == given and end < 0.0:
                end = 0.0
        if place in needs and not fused:
            end = max(end, units[needs[place]])
        if x and (used or not stream_of):  # else nothing here waits for it
            end += x
            if place in needs and fused:  # where a gather is issued among its parts, these run one by one
                end = max(end, units[needs[place]])
            clock[stream_of] = reached = end
        elif end < reached:
            reached = end
        ready += [end] * results
        ends.append(end)
    compute, free = max(clock[COMPUTE], _all_moved(added, ends)), max(free, _all_moved(reduced, ends))
    return compute, free, _NEVER if out is None else ready[out]


def _all_moved(moves: Sequence[tuple[int, float]], ends: Sequence[float]) -> float:
    """When all is reduced that is ready at the `ends` of ops at some places: after each, what is ready later."""
    found, left = _NEVER, sum([x for _, x in moves])
    for place, x in moves:
        found = max(found, ends[place] + left)
        left -= x
    return found
