"""Admissible lower bounds: no plan is simulated to take less time, or less memory on its worst rank.

With F and B the seconds for which the forward and the backward pass of one microbatch of the whole model keep compute
streams from other work, added over the stages (`segments`), m microbatches and p pipeline ranks:

- some rank is kept for at least (m (F + B) + updates) / p; and some host, by the calls and the ops that it issues;
- under 1F1B rank r begins its first backward pass when the first microbatch has gone through all stages, and has then
  done at most w = min(m, p - r) forward passes; the last microbatch's gradient has to go through the stages before it.
  So step >= chain + (m - 1) B_r + (m - w) F_r, where the chain is the time of a microbatch through all stages and back.
  The bound is the least maximum over r that any cut reaches. GPipe: step >= chain + (m - 1) (max F_r + max B_r);
- gradients are reduced after the last backward pass has begun (ZeRO 0 and 1), or in each microbatch; weights that are
  sharded (ZeRO 3) are gathered in each: the stream of the replicas' axis is busy that long on some rank. With further
  axes some gradients are reduced along these, too, on streams of their own: one of the streams has its share.

A cut loses at each border what one segment contributes to the waits and to the chain: that is subtracted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from distir.executor.cost_model import CostModel
from distir.executor.cost_model.collective_cost import collective
from distir.executor.cost_model.seconds import wire_of
from distir.ir.device import TIME, AxisNames, Mesh, names_of
from distir.ir.function import Op
from distir.ir.spec import lookup
from distir.ir.topology import Group, Regular, regular_group
from distir.ir.type import SUM, Tensor, Type
from distir.search.run_ops import least_seconds, with_others
from distir.search.segments import COMPUTE, Kind, Profile, Segment, axis_of, is_free
from distir.search.space import Candidate, spacing_of, starts
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, PROLOGUE, UPDATE

_HUGE = 1e18
"""Bytes of a collective whose latency is nothing beside its transfer."""
ROUNDING = 1 - 1e-6
"""Of what is added up in another order than the simulator does, or is a limit."""
_NEVER = -math.inf


class PassCost(NamedTuple):
    """The forward or the backward pass of a microbatch through the whole model, in seconds.

    `compute`: of all ops, `lifted`: of those of them that a pipeline does once a step. `waits`: for collectives inside
    segments, `chain`: through the segments from first to last value, each with the most of one segment; `excess`: by
    how much chains are longer than segments keep the compute stream.
    """

    compute: float
    lifted: float
    waits: float
    most_waits: float
    chain: float
    most_chain: float
    excess: float


@dataclass(frozen=True)
class StepCost:
    """The seconds of a model at one degree of tensor parallelism and of further axes, and size of microbatch.

    `once`: of prologue and update. `unit`: of the longest forward op with the backward ops that stay on its stage.
    `issued`: of hosts, for the compute ops of a microbatch. `profile` has the bytes.
    """

    forward: PassCost
    backward: PassCost
    once: float
    unit: float
    issued: float
    profile: Profile


def bounded(cost: CostModel) -> bool:
    """Whether there are bounds of time for a cluster: of equal nodes. Ranks that share cores take longer: bounds hold
    for them, too."""
    return cost.topology.uniform is not None and type(cost) is CostModel


GroupsAlong = Mapping[AxisNames, Sequence[Group]]
"""The kinds of groups of devices along the axes of a profile."""


def step_cost(
    profile: Profile, microbatch: int, cost: CostModel, groups: GroupsAlong, repeated: bool = False
) -> StepCost:
    """The seconds of a profile with another size of microbatch; `repeated`: of steps of several."""
    scale = microbatch // profile.samples
    seconds = [_seconds(kind, scale, cost, groups, repeated) for kind in profile.kinds]
    forward = _pass(profile, FORWARD, profile.forward, seconds)
    backward = _pass(profile, BACKWARD, profile.backward, seconds)
    what = cost.topology.spec(cost.topology.devices[0])
    rows = [(profile.kinds[k], n) for word in (PROLOGUE, UPDATE) for k, n in profile.every[word].items()]
    each = [(n, _seconds(kind, scale, cost, groups, False)) for kind, n in rows if not kind.axis]
    once = sum([n * max(0.0, x - what.kernel_launch_overhead) for n, x in each])
    compute = [0.0 if kind.axis else x for kind, x in zip(profile.kinds, seconds, strict=True)]
    unit = max([sum([compute[k] for k in kinds]) for kinds in profile.units], default=0.0)
    timed = [(k, n) for word in (FORWARD, BACKWARD) for k, n in profile.every[word].items()]
    issued = sum([n * _issued(profile.kinds[k], cost, repeated) for k, n in timed])
    # measured ops have launches of their own, which ops in groups share
    return StepCost(forward, backward, 0.0 if what.ops else once, unit, issued, profile)


def _seconds(kind: Kind, scale: int, cost: CostModel, groups: GroupsAlong, repeated: bool) -> float:
    """Of an op of a kind, less what it does not move where a runtime runs it with others. `repeated`: it certainly is
    done for each of several microbatches."""
    op = kind.op
    if not kind.priced:
        return 0.0
    ins, outs = ([scaled(v.type, scale) for v in values] for values in (op.inputs, op.outputs))
    if cost.free(op.spec, op.attributes, ins):
        return 0.0
    if kind.axis is not None:
        along = groups.get(kind.axis, ())
        return min([cost.least(op.spec, op.attributes, ins, outs, group) for group in along], default=0.0)
    if op.spec.comm is not None:
        return 0.0
    return least_seconds(kind.run, cost, lambda t: scaled(t, scale), repeated)


def _issued(kind: Kind, cost: CostModel, repeated: bool) -> float:
    """Seconds in which a host issues a compute op of a kind, at least, where that keeps it from others."""
    op, r = kind.op, cost.runtime
    if r is None or r.inline or not kind.priced or op.spec.comm is not None or adds_sums(op):
        return 0.0
    if cost.free(op.spec, op.attributes, [v.type for v in op.inputs]):
        return 0.0
    return cost.issue(op.spec, fused=with_others(kind.run, r, repeated))


def scaled(t: Type, scale: int) -> Type:
    """The type with `scale` times as many samples a microbatch, of as many times fewer microbatches."""
    if scale == 1 or not isinstance(t, Tensor) or (dim := t.over_time.dim) is None:
        return t
    shape = [n * scale if i == dim else n for i, n in enumerate(t.shape)]
    return Tensor(t.dtype, shape, _fewer_microbatches(t.mesh, scale), t.placements)


@cache
def _fewer_microbatches(mesh: Mesh, scale: int) -> Mesh:
    sizes = {a: max(1, n // scale) if a == TIME else n for a, n in zip(mesh.axes, mesh.sizes, strict=True)}
    return Mesh(mesh.devices, sizes, mesh.name)


def _pass(profile: Profile, word: str, segments: Mapping[Segment, int], seconds: Sequence[float]) -> PassCost:
    every = profile.every[word].items()
    compute = sum([n * seconds[k] for k, n in every if profile.kinds[k].axis is None])
    lifted = sum([n * seconds[k] for k, n in every if adds_sums(profile.kinds[k].op)])
    waits = chain = excess = most_waits = most_chain = 0.0
    for segment, n in segments.items():
        kept, through = _kept(segment, profile.kinds, seconds), _through(segment, profile.kinds, seconds)
        idle = kept - sum([seconds[row.kind] for row in segment.rows if profile.kinds[row.kind].axis is None])
        if segment.waits:
            waits += n * idle
            most_waits = max(most_waits, idle)
        chain += n * through
        most_chain = max(most_chain, through)
        excess += n * max(0.0, through - (kept if segment.waits else kept - idle))
    return PassCost(compute, lifted, waits, most_waits, chain, most_chain, excess)


def adds_sums(op: Op) -> bool:
    """Whether an op may be done once a step in a pipeline: it adds sums over microbatches (`lift_sums`)."""
    types = [v.type for v in op.inputs]
    return axis_of(op) is None and sum([isinstance(t, Tensor) and t.over_time is SUM for t in types]) > 1


def _stream(kind: Kind) -> AxisNames | None:
    """The stream that an op takes its turn on; None of a view: it is there when what it shows is."""
    return None if is_free(kind.op) else kind.axis or COMPUTE


def _kept(segment: Segment, kinds: Sequence[Kind], seconds: Sequence[float]) -> float:
    """For how long a segment keeps the compute stream: with what it waits for inside."""
    clock: dict[object, float] = {COMPUTE: 0.0}
    ready: list[float] = []
    for row in segment.rows:
        stream = _stream(kinds[row.kind])
        begin = max([_NEVER if stream is None else clock.get(stream, _NEVER), *[ready[k] for k in row.needs]])
        ready.append(begin + seconds[row.kind])
        if seconds[row.kind]:
            clock[stream] = ready[-1]
    return clock[COMPUTE]


def _through(segment: Segment, kinds: Sequence[Kind], seconds: Sequence[float]) -> float:
    """The time from a segment's first value to its last."""
    if segment.last is None:
        return 0.0
    clock: dict[object, float] = {}
    ready: list[float] = []
    for row in segment.rows[: segment.last + 1]:
        stream = _stream(kinds[row.kind])
        begin = max([0.0 if stream is None else clock.get(stream, 0.0), *[ready[k] for k in row.needs]])
        ready.append(begin + seconds[row.kind] if row.follows else 0.0)
        if row.follows and seconds[row.kind]:
            clock[stream] = ready[-1]
    return ready[-1]


# ---- of a candidate


def groups_along(c: Candidate, cost: CostModel, axis: AxisNames) -> tuple[Group, ...]:
    """The kinds of groups of devices along an axis, or along several, on a regular cluster."""
    r = cost.topology.uniform
    axes = names_of(axis)
    sizes = [getattr(c, name) for name in axes]
    if r is None or math.prod(sizes) == 1:
        return ()
    firsts = tuple(starts(c, c.order, axes, r.per_node))
    spacings = [spacing_of(c, c.order, name) for name in axes]
    return _groups_from(r, firsts, tuple(zip(spacings, sizes, strict=True)))


@cache
def _groups_from(r: Regular, firsts: Sequence[int], along: Sequence[tuple[int, int]]) -> tuple[Group, ...]:
    """`along`: the spacing and the size of each axis."""
    found = dict.fromkeys([regular_group(r, _numbers(d, along)) for d in firsts])
    # a bucket must not take less than its last member
    return tuple([group._replace(measured=tuple([x.rising() for x in group.measured])) for group in found])


def _numbers(first: int, along: Sequence[tuple[int, int]]) -> Sequence[int]:
    """The numbers of a group's devices: a range where they are evenly spaced, however many they are."""
    step, reach = 1, 1
    several = sorted([(spacing, size) for spacing, size in along if size > 1])
    for k, (spacing, size) in enumerate(several):
        if k and spacing != reach:
            ranges = [range(0, spacing * size, spacing) for spacing, size in along]
            return [first + sum(at) for at in itertools.product(*ranges)]
        step, reach = step if k else spacing, spacing * size
    return range(first, first + reach, step)


def compute_bound(profile: Profile, microbatch: int, batch: int, gpus: int, shards: int, cost: CostModel) -> float:
    """Seconds below which no step is of `batch` samples, on `gpus` devices with that profile, `shards` of which share a
    sample, and microbatches of at most so many samples: that of compute alone, for a sample takes no less in a smaller
    microbatch."""
    scale = microbatch // profile.samples
    found = 0.0
    for word in (FORWARD, BACKWARD):
        for k, n in profile.every[word].items():
            kind = profile.kinds[k]
            if kind.axis is None and not adds_sums(kind.op):
                found += n * _seconds(kind, scale, cost, {}, False)
    return found * batch * shards / (microbatch * gpus) * ROUNDING


def step_bound(c: Candidate, batch: int, step: StepCost, cost: CostModel, enough: float = math.inf) -> float:
    """Seconds below which the step of a candidate cannot be; no more than `enough` are looked for."""
    m, p, borders = c.microbatches(batch), c.pp, c.pp * c.chunks - 1
    forward, backward = (_busy(x, borders) for x in (step.forward, step.backward))
    once = step.once / (c.owners if c.zero else 1)
    issued = step.issued
    if m > 1 and p == 1 and issued:  # a call counts with the first op that is issued: a stage may have none
        issued += 2 * cost.enter()
    found = max((m * (forward + backward) + once) / p, m * step.unit, m * issued / p)
    if found * ROUNDING >= enough:
        return found * ROUNDING
    found = max(found, _replica_bound(c, m, step, cost, forward, backward))
    if p > 1 and c.schedule in ("1f1b", "gpipe"):
        excess = step.forward.excess + step.backward.excess
        chain = _chain(step.forward, borders) + _chain(step.backward, borders) - excess
        found = max(found, chain + _after_first(c.schedule, m, p, forward, backward))
    return found * ROUNDING


def lane(c: Candidate, cost: CostModel) -> Callable[[float, int, int], float]:
    """The seconds that bytes take at least from one pipeline rank to another, on the lane of devices on which most
    neighbours are on different nodes; 0 where transfers are measured: one of all bytes may take longer than several."""
    r = cost.topology.uniform
    if r is None or r.measured:
        return lambda size, a, b: 0.0
    spacing, per_node = spacing_of(c, c.order, "pp"), r.per_node
    lanes = [[d + k * spacing for k in range(c.pp)] for d in starts(c, c.order, ("pp",), per_node)]
    at = max(lanes, key=lambda lane: sum([a // per_node != b // per_node for a, b in itertools.pairwise(lane)]))
    pieces = c.tp if cost.runtime is not None and cost.runtime.scatters else 1

    def seconds(size: float, a: int, b: int) -> float:
        alike = at[a] // per_node == at[b] // per_node
        return cost.transfer_seconds(size / pieces, (r.inside if alike else r.between)((at[a], at[b])))

    return seconds


def _busy(x: PassCost, borders: int) -> float:
    compute = x.compute - (x.lifted if borders else 0.0)
    return compute + max(0.0, x.waits - borders * x.most_waits)


def _chain(x: PassCost, borders: int) -> float:
    return max(0.0, x.chain - borders * x.most_chain)


@cache
def _after_first(schedule: str, m: int, p: int, forward: float, backward: float) -> float:
    """The least time, over all cuts, that some rank is busy besides the first microbatch's way through the stages."""
    if schedule == "gpipe":
        return (m - 1) * (forward + backward) / p
    rows = sorted([m - min(m, p - r) for r in range(p)])
    work = (m - 1) * backward

    def fits(most: float) -> bool:
        left, room = forward, p * most
        for a in rows:  # forward passes where they count least
            part = left if not a else min(left, most / a)
            left -= part
            room -= a * part
        return left <= 0 and room >= work

    low, high = work / p, work + m * forward
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def _replica_bound(c: Candidate, m: int, step: StepCost, cost: CostModel, forward: float, backward: float) -> float:
    """A bound from the reduction of gradients, and the gathering of parameters, along the axis of replicas."""
    if c.dp == 1:
        return 0.0
    along = replica_axes(c)
    groups = tuple(dict.fromkeys([group for axis in along for group in groups_along(c, cost, axis)]))
    byte = slope("MPIReduceScatter" if c.zero else "MPIAllreduce", groups) / len(along)
    sums = step.profile.reduced(c.dp, c.zero)
    total = byte * sums.total
    found = (m * forward + (m - 1) * backward + total) / c.pp
    if c.zero > 1:
        gathered = sums.gathered * slope("MPIAllgather", groups) / len(along) if c.zero == 3 else 0.0
        found = max(found, m * (total + gathered) / c.pp)
    return found


def replica_axes(c: Candidate) -> list[AxisNames]:
    """What gradients may be reduced along: the replicas, alone or with further axes; each is a stream."""
    further = [x.axis for x in c.split]
    some = [rest for n in range(1, len(further) + 1) for rest in itertools.combinations(further, n)]
    return ["dp", *[("dp", *rest) for rest in some]]


@cache
def slope(name: str, groups: tuple[Group, ...]) -> float:
    """Seconds a byte below which no collective of that name is; 0 where these are measured."""
    return least_seconds_of(name, _HUGE, groups) / _HUGE


@cache
def least_seconds_of(name: str, size: float, groups: tuple[Group, ...]) -> float:
    """Seconds that a collective of that name takes at least for a whole value of so many bytes; 0 where it is
    measured."""
    if any([group.measured for group in groups]):
        return 0.0
    wire = wire_of(lookup(name))
    return min([collective(wire, size, group) for group in groups], default=0.0) * ROUNDING
