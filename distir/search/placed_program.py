"""A placed program, with what bounds ask of it whatever its cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from distir.api.named_dims import named_dims
from distir.ir.device import AxisNames, names_of
from distir.ir.function import Function, Op, Value
from distir.ir.host_runtime import Runtime
from distir.ir.type import Type
from distir.search.bounds import adds_sums
from distir.search.exact import Setting
from distir.search.run_ops import RunOp, run_ops
from distir.search.segments import axis_of, is_free, made_once
from distir.search.space import Candidate
from distir.transforms.passes import PassContext, bucketed_axes, run_passes
from distir.transforms.pipeline.copies import copies
from distir.transforms.pipeline.phases import (
    BACKWARD,
    FORWARD,
    FREE,
    PROLOGUE,
    UPDATE,
    PhaseRules,
    ends_time,
    phases,
)
from distir.transforms.plan import Plan


class PlacedProgram(NamedTuple):
    """A placed program. `timed` are the ops of both passes; `kind` numbers these by what they take as the ranks run
    them; `kinds` has one of each, and None for what takes nothing of its own; `parts` maps ops that run as parts of
    another to that; `free` are views. `copied` maps what is recomputed to the original. Of each value that no pass
    makes, but uses: `once` is what `made_once` finds, `gathers` are the gathers among replicas that it comes from.
    `updates` are the parameters and the optimizer state that ops of the update use; `sums` complete sums over
    microbatches; `reducing` are all that communicate after the forward pass. Reductions along axes that are `bucketed`
    share buckets.
    """

    function: Function
    rules: PhaseRules
    bucketed: Collection[str]
    timed: Sequence[Op]
    free: Collection[Op]
    updates: Sequence[tuple[Sequence[Value], Collection[Value]]]
    sums: Sequence[Op]
    reducing: Sequence[Op]
    kind: Mapping[Op, int]
    kinds: Sequence[RunOp | None]
    parts: Mapping[Op, Op]
    copied: Mapping[Value, Value]
    maker: Mapping[Value, Op]
    once: Mapping[Value, tuple[Value | None, Value | None]]
    gathers: Mapping[Value, Sequence[Op]]
    axes: tuple[AxisNames, ...]
    """Along which its ops communicate, but replicas and those that are reduced with these."""
    sent: Mapping[AxisNames, Mapping[Type, int]]
    """What its ops make along axes of replicas: how many values of each type."""


def place(setting: Setting, plan: Plan) -> Function:
    """The setting's step as a plan places it. Raises InfeasibleError."""
    function, devices = setting.model.function, setting.cost.topology.devices[: plan.size]
    context = PassContext(plan, devices, splits=named_dims(function, plan.split))
    return run_passes(function, ("fuse", "decompose", "pad", "place", "join", "narrow", "group", "recompute"), context)


def place_template(setting: Setting, c: Candidate) -> PlacedProgram:
    """The program of a candidate, which is that of all of its template. Raises InfeasibleError."""
    plan = c.plan(setting.batch)
    rules = PhaseRules(BACKWARD, c.zero == 3)
    return placed_program(place(setting, plan), rules, bucketed_axes(plan), setting.cost.runtime)


def placed_program(
    function: Function, rules: PhaseRules, bucketed: Collection[str], runtime: Runtime | None
) -> PlacedProgram:
    """A program that is placed, but not cut."""
    maker = {v: op for op in function.ops for v in op.outputs}
    phase = phases(function, rules)
    timed = [op for op in function.ops if phase[op] in (FORWARD, BACKWARD)]
    as_run = run_ops(function, runtime and runtime.joins)
    made = {v for op in timed for v in op.outputs}
    given = dict.fromkeys([v for op in timed for v in op.inputs if v not in made])
    once = {v: made_once(v, maker, phase) for v in given}
    gathers = {v: found for v in given if (found := _gathers(v, maker, phase))}
    axes: dict[AxisNames, None] = {}
    sent: dict[AxisNames, Counter[Type]] = {"dp": Counter()}
    for op in function.ops:
        axis = axis_of(op)
        if axis is not None and of_replicas(axis):
            sent.setdefault(axis, Counter())[op.outputs[0].type] += 1
        elif axis is not None:
            axes[axis] = None
    updates = [
        ([v for v in op.inputs if v.kind == "parameter"], {v for v in op.inputs if v.kind == "state"})
        for op in function.ops
        if phase[op] == UPDATE
    ]
    reducing = [op for op in function.ops if op.spec.comm is not None and op.inputs and phase[op] in (BACKWARD, UPDATE)]
    return PlacedProgram(
        function,
        rules,
        bucketed,
        timed,
        {op for op in timed if is_free(as_run[op].op if op in as_run else op)},
        [(owned, state) for owned, state in updates if owned and state],
        [op for op in reducing if ends_time(op) and op.inputs[0] in made and not adds_sums(maker[op.inputs[0]])],
        reducing,
        *_kinds(timed, as_run),
        copies(function),
        maker,
        once,
        gathers,
        tuple(axes),
        sent,
    )


def of_replicas(axis: AxisNames) -> bool:
    """Whether replicas communicate along an axis, or along several."""
    return "dp" in names_of(axis)


def _kinds(timed: Sequence[Op], as_run: Mapping[Op, RunOp]) -> tuple[dict[Op, int], list[RunOp | None], dict[Op, Op]]:
    kinds: list[RunOp | None] = [None]
    known: dict[tuple[object, ...], int] = {}
    number: dict[Op, int] = {}
    for op in timed:
        run = as_run.get(op)
        if run is None or is_free(run.op) or adds_sums(run.op):
            number[op] = 0  # becomes part of another op, or costs nothing
            continue
        if run.form not in known:
            known[run.form] = len(kinds)
            kinds.append(run)
        number[op] = known[run.form]
    parts: dict[Op, Op] = {}
    user = {v: op for op in reversed(timed) for v in op.inputs}
    for op in reversed(timed):
        if op not in as_run and (whole := user.get(op.outputs[0])) is not None:
            parts[op] = parts.get(whole, whole)
    return number, kinds, parts


def _gathers(v: Value, maker: Mapping[Value, Op], phase: Mapping[Op, str]) -> list[Op]:
    """The gathers among replicas that a weight comes from."""
    found: list[Op] = []
    todo = [v]
    while todo:
        op = maker.get(todo.pop())
        if op is None or phase[op] not in (FREE, PROLOGUE):
            continue
        axis = axis_of(op)
        if op.spec.comm is not None and op.spec.comm.gathers and axis is not None and of_replicas(axis):
            found.append(op)
        elif len(op.inputs) == 1:
            todo += op.inputs
    return found
