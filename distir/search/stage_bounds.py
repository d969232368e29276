"""Lower bounds from the real cut: a placed program's stages, in the order of the schedule, without what takes place
beside compute.

`bounds` asks what the best cut could reach. Here the cut is the one that the plan gets, so each stage's work is known:
for how long it keeps the compute stream, the path from what it receives to what it sends, what it saves, what it
reduces and gathers among replicas. A rank runs its cells one after another; a cell's result cannot be ready before its
stage's path has followed what it received. Placing is shared by plans that differ in schedule, chunks and order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from distir.api.stage_cost import OpSeconds, stage_cost
from distir.executor.cost_model import CostModel
from distir.ir.errors import DistirError
from distir.ir.function import Function, Op, Value
from distir.ir.pause import no_collection
from distir.ir.topology import Group
from distir.ir.type import Tensor
from distir.search.bounds import adds_sums, groups_along, slope
from distir.search.exact import Setting
from distir.search.schedule_bounds import CellWork, StageWork, schedule_bound
from distir.search.segments import COMPUTE, axis_of, is_free, made_once
from distir.search.space import Candidate
from distir.transforms.passes import PassContext, run_passes, stage_meshes
from distir.transforms.pipeline.copies import copies
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, FREE, PROLOGUE, UPDATE, PhaseRules, ends_time, phases
from distir.transforms.pipeline.stages import timed_stages
from distir.transforms.rank.recompose import recompose


def alike(c: Candidate) -> Candidate:
    """The same for all candidates of one placed program, but for which devices it is on."""
    return c._replace(schedule="1f1b", chunks=1, order=Candidate._field_defaults["order"])


@no_collection()
def cut_bounds(setting: Setting, candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
    """Seconds and bytes below which none of these candidates is, which are `alike`; 0 where nothing is known."""
    found: list[tuple[float, float]] = []
    placed: _Placed | None = None
    known: dict[tuple[object, ...], list[StageWork]] = {}
    seconds: dict[object, _Seconds] = {}
    for c in candidates:
        try:
            placed = placed or _place(setting, c)
            key = c.order, c.chunks
            if key not in known:
                groups = groups_along(c, setting.cost, "tp")
                seconds.setdefault(groups, _Seconds(setting.cost, groups, placed.as_run))
                known[key] = _works(placed, setting, c, seconds[groups])
            found.append(schedule_bound(c, setting.batch, setting.cost, known[key]))
        except DistirError:
            found.append((0.0, 0.0))
    return found


class _Placed(NamedTuple):
    """A placed program. `as_run` are its ops as the ranks run them, by their first results; `copied` maps what is
    recomputed to the original. Of each value that no pass makes, but uses: `once` is what `made_once` finds, `gathers`
    are the gathers among replicas that it comes from."""

    function: Function
    rules: PhaseRules
    microbatches: int
    as_run: Mapping[Value, Op]
    copied: Mapping[Value, Value]
    maker: Mapping[Value, Op]
    once: Mapping[Value, tuple[Value | None, Value | None]]
    gathers: Mapping[Value, Sequence[Op]]


def _place(setting: Setting, c: Candidate) -> _Placed:
    plan = c.plan(setting.batch)
    context = PassContext(plan, setting.cost.topology.devices[: plan.size])
    names = ("fuse", "decompose", "pad", "place", "join", "recompute")
    placed = run_passes(setting.model.function, names, context)
    as_run = {op.outputs[0]: op for op in recompose(placed).ops if op.outputs}
    maker = {v: op for op in placed.ops for v in op.outputs}
    rules = PhaseRules(BACKWARD, c.zero == 3)
    phase = phases(placed, rules)
    timed = [op for op in placed.ops if phase[op] in (FORWARD, BACKWARD)]
    made = {v for op in timed for v in op.outputs}
    given = dict.fromkeys([v for op in timed for v in op.inputs if v not in made])
    once = {v: made_once(v, maker, phase) for v in given}
    gathers = {v: found for v in given if (found := _gathers(v, maker, phase))}
    return _Placed(placed, rules, plan.microbatches, as_run, copies(placed), maker, once, gathers)


def _works(placed: _Placed, setting: Setting, c: Candidate, seconds: _Seconds) -> list[StageWork]:
    cost, parts = setting.cost, c.pp * c.chunks
    plan = c.plan(setting.batch)
    mesh = stage_meshes(plan, cost.topology.devices[: plan.size]).meshes[0]
    priced = stage_cost(cost, plan)
    if parts > 1:
        priced = priced._replace(op=OpSeconds(cost, mesh))
    phase, stage = timed_stages(placed.function, parts, placed.microbatches, priced, placed.rules)
    cells = _Cells(placed, phase, stage)
    replicas = _replicas(placed, cells, c, cost)
    held, saved, sums = _held(placed, cells), _saved(placed, cells), _sums(placed, cells)
    sent = {word: _sent(cells, word, parts) for word in (FORWARD, BACKWARD)}
    found: list[StageWork] = []
    for s in range(parts):
        forward, backward = (
            _cell(cells.ops[word, s], seconds, sent[word].get(s + before), sent[word].get(s), cells)._replace(
                gathered=replicas.gathered[word, s], reduced=replicas.reduced[word, s]
            )
            for word, before in ((FORWARD, -1), (BACKWARD, 1))
        )
        once = replicas.gathered[PROLOGUE, s], replicas.reduced[UPDATE, s]
        found.append(StageWork(forward, backward, held[s], saved[s], sums[s], *once))
    return found


class _Cells:
    """The ops of each pass and stage, in program order, as the stages run them: without copies that only others use."""

    def __init__(self, placed: _Placed, phase: Mapping[Op, str], stage: Mapping[Op, int]) -> None:
        self.phase, self.stage = phase, stage
        self.ops: dict[tuple[str, int], list[Op]] = defaultdict(list)
        self.inputs: dict[Op, list[Value]] = {}
        """Of each of these ops, with originals in place of other stages' copies."""
        copied, maker = placed.copied, placed.maker
        used: set[Value] = set()
        for op in reversed(placed.function.ops):
            if op.outputs[0] in copied and used.isdisjoint(op.outputs):
                continue
            here = stage.get(op)
            ins = [copied[v] if v in copied and stage.get(maker[v]) != here else v for v in op.inputs]
            used.update(ins)
            if phase[op] not in (FORWARD, BACKWARD) or here is None:
                continue
            self.inputs[op] = ins
            self.ops[phase[op], here].append(op)
        for ops in self.ops.values():
            ops.reverse()
        self.maker = maker

    def of(self, v: Value) -> tuple[str, int] | None:
        """The pass and stage that make a value; None if neither pass does."""
        op = self.maker.get(v)
        return (self.phase[op], self.stage[op]) if op in self.inputs else None  # type: ignore[index]


class _Seconds:
    """Seconds of ops on the streams of compute and of tensor parallelism; at a plan's groups of devices."""

    def __init__(self, cost: CostModel, groups: Sequence[Group], as_run: Mapping[Value, Op]) -> None:
        self.cost, self.groups, self.as_run = cost, groups, as_run
        self._known: dict[object, tuple[str, float]] = {}
        self._of_op: dict[Op, tuple[str, float]] = {}

    def __call__(self, op: Op) -> tuple[str, float]:
        """The stream and the seconds; what becomes part of another op costs nothing of its own."""
        found = self._of_op.get(op)
        if found is None:
            found = self._of_op[op] = self._looked_up(op)
        return found

    def _looked_up(self, op: Op) -> tuple[str, float]:
        run = self.as_run.get(op.outputs[0])
        if run is None or is_free(op) or adds_sums(op):
            return COMPUTE, 0.0
        key = run.spec, run.attributes or None, *[v.type for v in run.inputs]
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._of(run)
        return found

    def _of(self, op: Op) -> tuple[str, float]:
        cost, axis = self.cost, axis_of(op)
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        if axis == "tp":
            return "tp", min([cost.collective(op.spec, op.attributes, ins, outs, g) for g in self.groups], default=0.0)
        if axis is not None or op.spec.comm is not None or cost.free(op.spec, op.attributes, ins):
            return COMPUTE, 0.0
        if cost.runtime is not None and not op.spec.kernel:  # it may be fused into a chain
            return COMPUTE, 0.0
        return COMPUTE, cost.compute(op.spec, op.attributes, ins, outs, cost.topology.devices[0])


def _sent(cells: _Cells, word: str, parts: int) -> dict[int, Value]:
    """By stage the largest value that a pass gives to the next stage, in the direction of the pass."""
    found: dict[int, Value] = {}
    for s in range(parts):
        before = s - 1 if word == FORWARD else s + 1
        for op in cells.ops[word, s]:
            for v in cells.inputs[op]:
                if cells.of(v) != (word, before) or not isinstance(v.type, Tensor) or not v.type.moves:
                    continue
                if before not in found or v.type.bytes > found[before].type.bytes:
                    found[before] = v
    return found


def _cell(
    ops: Sequence[Op], seconds: Callable[[Op], tuple[str, float]], given: Value | None, out: Value | None, cells: _Cells
) -> CellWork:
    needed = {v for op in ops for v in cells.inputs[op]}
    never = -math.inf
    clock, after = {COMPUTE: 0.0}, {COMPUTE: 0.0}
    ready: dict[Value, float] = {}
    follows: dict[Value, float] = {} if given is None else {given: 0.0}
    for op in ops:
        stream, x = seconds(op)
        if stream and needed.isdisjoint(op.outputs):
            x = 0.0  # nothing here waits for it
        ins = cells.inputs[op]
        end = max([clock.get(stream, never), *[ready[v] for v in ins if v in ready]]) + x
        paths = [follows[v] for v in ins if v in follows]
        if x:
            clock[stream] = end
        for v in op.outputs:
            ready[v] = end
        if paths:
            later = max([after.get(stream, 0.0), *paths]) + x if x else max(paths)
            if x:
                after[stream] = later
            for v in op.outputs:
                follows[v] = later
    made = max(0.0, ready.get(out, 0.0)) if out is not None else 0.0
    through = follows.get(out, never) if out is not None else never
    ends = never if given is None else after[COMPUTE]
    return CellWork(clock[COMPUTE], made, through, ends, 0.0 if out is None else float(out.type.bytes), 0.0, 0.0)


class _Replicas(NamedTuple):
    """Seconds of the replicas' stream by phase and stage: gathers of weights and reductions of gradients."""

    gathered: Mapping[tuple[str, int], float]
    reduced: Mapping[tuple[str, int], float]


def _replicas(placed: _Placed, cells: _Cells, c: Candidate, cost: CostModel) -> _Replicas:
    gathered: dict[tuple[str, int], float] = defaultdict(float)
    reduced: dict[tuple[str, int], float] = defaultdict(float)
    if c.dp == 1:
        return _Replicas(gathered, reduced)
    groups = groups_along(c, cost, "dp")
    stage: dict[Value, int] = {}  # of gradients and of their sums
    for (word, s), ops in cells.ops.items():
        if word == BACKWARD:
            stage.update({v: s for op in ops for v in op.outputs})
    for op in placed.function.ops:
        comm, phase = op.spec.comm, cells.phase[op]
        if comm is None or not op.inputs or phase not in (BACKWARD, UPDATE) or op.inputs[0] not in stage:
            continue
        s = stage[op.inputs[0]]
        if axis_of(op) == "dp" and comm.sums:
            reduced[phase, s] += slope(op.spec.name, groups) * op.inputs[0].type.bytes
        if axis_of(op) == "dp" or ends_time(op):
            stage.update(dict.fromkeys(op.outputs, s))
    for (word, s), ops in cells.ops.items():
        for gather in {g for op in ops for v in cells.inputs[op] for g in placed.gathers.get(v, ())}:
            if cells.phase[gather] == FREE:
                gathered[word, s] += slope(gather.spec.name, groups) * gather.outputs[0].type.bytes
            elif word == FORWARD:
                gathered[PROLOGUE, s] += slope(gather.spec.name, groups) * gather.outputs[0].type.bytes
    return _Replicas(gathered, reduced)


def _gathers(v: Value, maker: Mapping[Value, Op], phase: Mapping[Op, str]) -> list[Op]:
    """The gathers among replicas that a weight comes from."""
    found: list[Op] = []
    todo = [v]
    while todo:
        op = maker.get(todo.pop())
        if op is None or phase[op] not in (FREE, PROLOGUE):
            continue
        if op.spec.comm is not None and op.spec.comm.gathers and axis_of(op) == "dp":
            found.append(op)
        elif len(op.inputs) == 1:
            todo += op.inputs
    return found


def _held(placed: _Placed, cells: _Cells) -> dict[int, float]:
    """By stage the bytes of parameters and optimizer state, and of what is made of weights once a step and used until
    the last backward pass."""
    found: dict[int, float] = defaultdict(float)
    home: dict[Value, int] = {}
    for word in (FORWARD, BACKWARD):
        for s in sorted({s for _, s in cells.ops}):
            kept: set[Value] = set()
            for op in cells.ops[word, s]:
                for v in cells.inputs[op]:
                    root, source = placed.once.get(v, (None, None))
                    if root is not None and word == BACKWARD:
                        kept.add(root)
                    if source is not None and word == FORWARD:
                        home.setdefault(source, s)
            found[s] += sum([v.type.bytes for v in kept])
    for v, s in home.items():
        found[s] += v.type.bytes if v.kind == "parameter" else 0
    counted: set[Value] = set()
    for op in placed.function.ops:
        if cells.phase[op] == UPDATE:
            mine = [home[v] for v in op.inputs if v in home and v.kind == "parameter"]
            state = {v for v in op.inputs if v.kind == "state"} - counted
            if mine and state:
                counted |= state
                found[max(mine)] += sum([v.type.bytes for v in state])
    return found


def _saved(placed: _Placed, cells: _Cells) -> dict[int, float]:
    """By stage the bytes that a device keeps of a microbatch between its forward and its backward pass."""
    found: dict[int, float] = {}
    for s in {s for _, s in cells.ops}:
        here = {v for op in cells.ops[FORWARD, s] for v in (*cells.inputs[op], *op.outputs)}
        kept: set[Value] = set()
        for op in cells.ops[BACKWARD, s]:
            for v in cells.inputs[op]:
                while (made := placed.maker.get(v)) in cells.inputs and made.spec.alias and cells.of(v) == (FORWARD, s):  # type: ignore[union-attr]
                    v = made.inputs[0]  # type: ignore[union-attr]
                at = cells.of(v)
                if at is not None and at[0] == FORWARD and v in here and isinstance(v.type, Tensor) and v.type.moves:
                    kept.add(v)
        found[s] = float(sum([v.type.bytes for v in kept]))
    return found


def _sums(placed: _Placed, cells: _Cells) -> dict[int, float]:
    """By stage the bytes of sums over microbatches."""
    found: dict[int, float] = defaultdict(float)
    for op in placed.function.ops:
        if op.spec.comm is not None and ends_time(op):
            at = cells.of(op.inputs[0])
            if at is not None and at[0] == BACKWARD and not adds_sums(placed.maker[op.inputs[0]]):
                found[at[1]] += op.outputs[0].type.bytes
    return found
