"""The pass pipeline from a sequential to a distributed program; each pass is a function from Function to Function.

The result of every pass prints, parses and verifies, so each can be inspected, and a test can start from it:
`distir show --after NAME`, `distir opt FILE.distir --passes NAME,NAME`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from distir.ir.cached import cached
from distir.ir.device import TIME, Device, Mesh
from distir.ir.errors import InfeasibleError, UsageError, did_you_mean
from distir.ir.function import Attributes, Function, Op
from distir.ir.type import Tensor
from distir.transforms.pipeline.bodies import Cut, cut_bodies
from distir.transforms.pipeline.bucket import GATHERS, SUMS, bucket, maker_like, reductions_first
from distir.transforms.pipeline.emission import Stages, pipeline
from distir.transforms.pipeline.group_queries import group_queries
from distir.transforms.pipeline.join_axes import join_axes
from distir.transforms.pipeline.keep_whole import keep_whole
from distir.transforms.pipeline.phases import PHASES, PhaseRules
from distir.transforms.pipeline.prefetch import gathered_along, prefetch
from distir.transforms.pipeline.recompute import recompute
from distir.transforms.pipeline.schedule import make_table
from distir.transforms.pipeline.schedule_table import rank_of_stage
from distir.transforms.pipeline.send_narrow import send_narrow
from distir.transforms.pipeline.stages import PLAIN, StageCost, cut_stages
from distir.transforms.plan import BATCH, EVEN, INPUTS, MIB, WEIGHTS, Plan
from distir.transforms.rewriting.decompose import decompose
from distir.transforms.rewriting.fuse import fuse
from distir.transforms.rewriting.part_constants import part_constants
from distir.transforms.roles import batch_dims
from distir.transforms.sharding.spread import SplitDims, padded, place

SEQUENTIAL, PLACED, DISTRIBUTED, ONE_RANK = "sequential", "placed", "distributed", "of one rank"
"""The forms of a program: without devices; on a mesh, each op once; scheduled, each stage on its own mesh; and the part
of it that one rank of a pipeline runs."""


class PassContext(NamedTuple):
    """The parameters of passes: the plan, its devices (if there is one more, the first is a host), the cost by which
    stages are balanced. `batch` maps positions of data inputs to their batch dim, and overrides roles. `splits` are
    the dims that the plan's further axes split, by axis: (position of an input, dim). `cuts` are the positions of the
    inputs at whose first use the plan's stages begin.
    """

    plan: Plan
    devices: Sequence[Device]
    cost: StageCost = PLAIN
    batch: Mapping[int, int] | None = None
    splits: Mapping[str, Sequence[tuple[int, int]]] = MappingProxyType({})
    cuts: tuple[int, ...] = ()


class Pass(NamedTuple):
    """A pass, with the forms of program that it takes and returns."""

    name: str
    takes: str
    gives: str
    run: Callable[[Function, PassContext], Function]
    about: str


def _fuse(function: Function, settings: PassContext) -> Function:
    return fuse(function)


def _decompose(function: Function, settings: PassContext) -> Function:
    split = bool(settings.plan.sharding.along(WEIGHTS))
    parts = decompose(function, split)
    return part_constants(parts) if split or settings.plan.pad_multiple > 1 else parts


def _pad(function: Function, settings: PassContext) -> Function:
    return padded(function, _dims(function, settings), settings.plan.sharding)


def _place(function: Function, settings: PassContext) -> Function:
    plan = settings.plan
    mesh = stage_meshes(plan, settings.devices).meshes[0]
    return place(function, _dims(function, settings), plan.sharding, mesh)


def _dims(function: Function, settings: PassContext) -> SplitDims:
    """The batch dim of each data input, and the dims that further axes split. Raises UsageError for an axis without."""
    batch = settings.batch
    if batch is None:
        found = batch_dims(function)
        batch = {i: found[v] for i, v in enumerate(function.inputs) if v in found}
    for axis in settings.plan.sharding.along(INPUTS):
        if axis.name not in settings.splits:
            raise UsageError(f"{axis.name}: no dims of inputs are given", "distir.api resolves their names")
    return SplitDims(tuple(batch.items()), tuple([(axis, tuple(dims)) for axis, dims in settings.splits.items()]))


def _narrow(function: Function, settings: PassContext) -> Function:
    return send_narrow(function) if settings.plan.sharding.along(INPUTS) else function


def _group(function: Function, settings: PassContext) -> Function:
    return group_queries(function)


def _join(function: Function, settings: PassContext) -> Function:
    several = len(settings.plan.sharding.axes) > 1
    return join_axes(function) if several else function


def _recompute(function: Function, settings: PassContext) -> Function:
    return recompute(function, settings.plan.recompute, settings.plan.stage_count)


def _schedule(function: Function, settings: PassContext) -> Function:
    return scheduled(function, settings)


def scheduled(placed: Function, settings: PassContext, bodies: BodyPasses | None = None) -> Function:
    """A placed program cut into stages and phases, which are called in the order of the plan's schedule.

    `bodies` are applied to each body when it is built, which is faster than separate passes over the program.
    """
    plan = settings.plan
    ranks = stage_meshes(plan, settings.devices)
    table = make_table(plan.schedule, plan.stages.size, plan.microbatches, plan.chunks)
    where = rank_of_stage(table)
    stages = ranks._replace(meshes=[ranks.meshes[where[s]] for s in range(len(where))])
    loss_gradient = next(phase.letter for phase in PHASES.values() if phase.word == plan.loss_gradient)
    kept: frozenset[Op] = frozenset()
    if plan.zero == 3 and plan.gathered_again == "blocks":
        placed, kept = keep_whole(placed)
    rules = PhaseRules(loss_gradient, plan.zero == 3, kept)
    if plan.cut and not settings.cuts and (len(where) > 1 or plan.cut != (EVEN,)):
        raise UsageError("cut: the inputs of these names are not given", "distir.api resolves them")
    cut = _cut(placed, len(where), plan.microbatches, settings.cost, plan.overlap, rules, settings.cuts)
    return pipeline(cut, stages, table, bodies)


@cached
def _cut(
    placed: Function,
    parts: int,
    microbatches: int,
    cost: StageCost,
    overlap: bool,
    rules: PhaseRules,
    cut: tuple[int, ...],
) -> Cut:
    return cut_bodies(*cut_stages(placed, parts, microbatches, cost, rules, cut), overlap, rules)


class BodyPasses(NamedTuple):
    """Passes over bodies, each along axes of devices, with buckets of `limit` bytes."""

    steps: tuple[tuple[str, tuple[str, ...]], ...]
    """(pass, axes)"""
    limit: float

    @staticmethod
    def of(plan: Plan, *names: str) -> BodyPasses:
        """The passes of a plan: those named, or all."""
        axes = {"bucket": bucketed_axes(plan), "prefetch": sharding_axes(plan)}
        return BodyPasses(tuple([(name, axes[name]) for name in names or BODY_PASSES]), plan.bucket_mb * MIB)

    def __call__(self, body: Function, timed: bool) -> Function:
        """The transformed body; it is called once a microbatch (`timed`) or once a step."""
        for name, axes in self.steps:
            body = BODY_PASSES[name](body, axes, self.limit, timed)
        return body


def bucketed_axes(plan: Plan) -> tuple[str, ...]:
    """The axes along which reductions share buckets."""
    replicas, shards, further = (tuple([a.name for a in plan.sharding.along(s)]) for s in (BATCH, WEIGHTS, INPUTS))
    # with sequence parallelism gradients of norms and biases are also summed over the shards
    return replicas + further + (shards if plan.sequence_parallel else ())


def sharding_axes(plan: Plan) -> tuple[str, ...]:
    """The axes along which weights of ZeRO 3 are sharded."""
    return tuple([a.name for strategy in (BATCH, INPUTS) for a in plan.sharding.along(strategy)])


def _bucket(body: Function, axes: Sequence[str], limit: float, timed: bool) -> Function:
    """Bucket reductions of gradients; in bodies that are not timed (the update) also gathers of weights."""
    if timed:
        return bucket(body, axes, limit, SUMS)
    if limit > 0:
        body = bucket(reductions_first(body, axes), axes, limit, SUMS)
    return bucket(body, axes, limit, GATHERS)


def _prefetch(body: Function, axes: Sequence[str], limit: float, timed: bool) -> Function:
    for axis in gathered_along(body, axes) if timed else ():
        body = prefetch(body, axis, limit)
    return body


BODY_PASSES: dict[str, Callable[[Function, Sequence[str], float, bool], Function]] = {
    "bucket": _bucket,
    "prefetch": _prefetch,
}
"""The passes over each body of a program, in this order."""


def _on_bodies(name: str) -> Callable[[Function, PassContext], Function]:
    """The pass of that name, over all bodies of a scheduled program."""

    def run(program: Function, settings: PassContext) -> Function:
        done = BodyPasses.of(settings.plan, name)
        new: dict[tuple[Function, bool], Function] = {}
        ops: list[Op] = []
        for op in program.ops:
            if op.callee is not None:
                key = op.callee, "mb" in op.attributes
                if key not in new:
                    new[key] = done(*key)
                if new[key] is not op.callee:
                    attributes = Attributes({**op.attributes, "callee": new[key]})
                    op = Op(op.spec, op.inputs, attributes, op.outputs, op.of)
            ops.append(op)
        maker = maker_like(program)
        maker.ops.extend(ops)
        return maker.finalize()

    return run


PASSES: tuple[Pass, ...] = (
    Pass(
        "fuse", SEQUENTIAL, SEQUENTIAL, _fuse, "attention, Gelu and SiLU that are written out, fused into one op each"
    ),
    Pass(
        "decompose",
        SEQUENTIAL,
        SEQUENTIAL,
        _decompose,
        "ops replaced by their parts where they could not be split as a whole",
    ),
    Pass(
        "pad", SEQUENTIAL, SEQUENTIAL, _pad, "dims padded to a multiple of the axis that splits them, or of the plan's"
    ),
    Pass("place", SEQUENTIAL, PLACED, _place, "values placed on a mesh, collectives inserted"),
    Pass("join", PLACED, PLACED, _join, "collectives along one axis after another made one, along several"),
    Pass("narrow", PLACED, PLACED, _narrow, "what is expanded gathered before, what is summed up scattered after"),
    Pass("group", PLACED, PLACED, _group, "attention of keys and values that queries share given them as they are"),
    Pass("recompute", PLACED, PLACED, _recompute, "values recomputed in the backward pass instead of saved"),
    Pass("schedule", PLACED, DISTRIBUTED, _schedule, "cut into stages and phases, called microbatch by microbatch"),
    Pass(
        "bucket", DISTRIBUTED, DISTRIBUTED, _on_bodies("bucket"), "gradients reduced, and weights gathered, in buckets"
    ),
    Pass("prefetch", DISTRIBUTED, DISTRIBUTED, _on_bodies("prefetch"), "sharded weights gathered one unit ahead"),
)
"""From a sequential program to a distributed one."""


def run_passes(function: Function, names: Sequence[str], settings: PassContext) -> Function:
    """Run these passes, in the order given.

    Raises UsageError for an unknown pass, or one that takes another form of program.
    """
    known = {p.name: p for p in PASSES}
    form: str | None = None
    for name in names:
        if name not in known:
            raise UsageError(f"unknown pass {name!r}", did_you_mean(name, known, f"known are {', '.join(known)}"))
        form = form or form_of(function)
        if form != known[name].takes:
            before = [p.name for p in PASSES if p.gives == known[name].takes]
            hint = f"run {before[0]} first" if form == SEQUENTIAL and before else None
            raise UsageError(f"{name} takes a {known[name].takes} program; {function.name} is {form}", hint)
        function, form = known[name].run(function, settings), known[name].gives
    return function


@cached
def form_of(function: Function) -> str:
    """The form of a program: SEQUENTIAL, PLACED, DISTRIBUTED or ONE_RANK."""
    if any([op.spec.comm is not None and op.spec.comm.route in ("outgoing", "incoming") for op in function.ops]):
        return ONE_RANK
    types = [v.type for v in (*function.inputs, *[v for op in function.ops for v in op.outputs])]
    homes = {t.device for t in types if isinstance(t, Tensor) and t.device is not None}
    if len(homes) < 2 and not any(
        [isinstance(home, Mesh) for home in homes]
    ):  # a sequential program may be on one device
        return SEQUENTIAL
    calls = any([op.callee is not None for op in function.ops])
    timed = any([isinstance(home, Mesh) and TIME in home.axes for home in homes])
    return PLACED if timed and not calls else DISTRIBUTED


def stage_meshes(plan: Plan, devices: Sequence[Device]) -> Stages:
    """One mesh per pipeline rank, and the host if there is one. Raises InfeasibleError for a wrong number of devices,
    or one that occurs twice."""
    if len(devices) not in (plan.size, plan.size + 1):
        axes = " x ".join([f"{a.name} {a.size}" for a in plan.axes])
        raise InfeasibleError(f"{axes} needs {plan.size} devices (or one more, a host), got {len(devices)}")
    if len(set(devices)) < len(devices):
        again = next(d for d, n in Counter(devices).items() if n > 1)
        raise InfeasibleError(f"a plan needs {len(devices)} different devices, got {again} more than once")
    host = devices[0] if len(devices) > plan.size else None
    first = 0 if host is None else 1
    inside = plan.sharding.axes
    apart = plan.spacing(plan.stages.name)
    steps = [plan.spacing(a.name) for a in inside]
    offsets = [range(0, a.size * step, step) for a, step in zip(inside, steps, strict=True)]
    places = [sum(at) for at in itertools.product(*offsets)]
    sizes = {TIME: plan.microbatches, **{a.name: a.size for a in inside}}
    meshes = [
        Mesh([devices[first + s * apart + k] for k in places], sizes, f"stage{s}") for s in range(plan.stages.size)
    ]
    return Stages(meshes, plan.stages.name, host)
