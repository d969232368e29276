"""Compile a model under a plan into a distributed program, validate it, and predict its cost on a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from distir.api.model import Model, loads
from distir.api.named_dims import named_cuts, named_dims
from distir.api.prediction import Prediction
from distir.api.results import Summary
from distir.api.rewrites import check_origins
from distir.api.stage_cost import stage_cost
from distir.executor.cost_model import CostModel
from distir.executor.reference.sequential import evaluate
from distir.executor.simulator.simulation import Simulation, Simulator
from distir.hardware import among, known_clusters, load_cluster, load_runtime
from distir.ir import Device, Function, Mesh, Topology, verify
from distir.ir import validate as compare_terms
from distir.ir.device import TIME
from distir.ir.errors import MismatchError, UsageError, counted
from distir.ir.pause import no_collection
from distir.transforms.parallel3d import distribute as spread
from distir.transforms.parallel3d import source_of
from distir.transforms.passes import DISTRIBUTED, ONE_RANK, PLACED, form_of
from distir.transforms.pipeline.schedule import SCHEDULES
from distir.transforms.pipeline.stages import PLAIN, StageCost
from distir.transforms.plan import AXES, STAGES, InputSplit, Plan
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.post_receives import receive_order
from distir.transforms.relocate import devices_of, homes_of, relocate
from distir.transforms.rewriting.claims import check_definition
from distir.transforms.rewriting.laws import origins

Cluster = CostModel | Topology | str | os.PathLike[str]
ONE = Plan()


@loads
@no_collection()
def distribute(
    model: Model,
    plan: Plan = ONE,
    devices: Sequence[Device] | None = None,
    check: bool = True,
    cost: StageCost = PLAIN,
) -> Function:
    """The model's program distributed over devices (default: `cpu:0`, `cpu:1`, ...), verified and validated.

    `cost` balances the pipeline stages: the default knows no cluster; `simulate` and `run` pass the cluster's.
    `check=False` skips verification and validation. Raises InfeasibleError for a plan that cannot be applied.
    """
    function = model.function
    if (form := form_of(function)) == DISTRIBUTED:
        plan_in_effect(model, plan)
        return function if devices is None else relocate(function, devices)
    if form == PLACED:
        hint = "distir opt FILE --passes schedule,bucket,prefetch"
        raise UsageError(f"{model.name} is placed on a mesh, but not scheduled", hint)
    if form == ONE_RANK:
        hint = "distir show without --rank prints the program of all ranks"
        raise UsageError(f"{model.name} is the program of one rank, which needs the others", hint)
    devices = [Device("cpu", i) for i in range(plan.size)] if devices is None else devices
    asked = (plan, tuple(devices), cost)
    last: _Distributed | None = function.cache.get(_LAST)
    named = isinstance(plan.schedule, str) and plan.schedule in SCHEDULES  # a file may have changed
    if named and last is not None and last.asked == asked and last.checked >= check:
        return last.program
    splits, cuts = named_dims(function, plan.split), named_cuts(function, plan)
    made = spread(function, plan, devices, cost=cost, splits=splits, cuts=cuts)
    if check:
        verify(made.program)
        _check_made_from(function, made.source)
        _check_equal(made.program, made.source)
    function.cache[_LAST] = _Distributed(asked, check, made.program)
    return made.program


class _Distributed(NamedTuple):
    """The program made of a function, the plan, devices and costs it was asked for, and whether it has been checked."""

    asked: tuple[Plan, tuple[Device, ...], StageCost]
    checked: bool
    program: Function


_LAST = object()
"""The key in a function's cache of what was made of it last: to simulate, explain and run a plan, it is built once."""


def plan_in_effect(model: Model, plan: Plan) -> Plan:
    """`plan`; for a program that is already distributed, the plan derived from its meshes.

    Raises UsageError if such a program is given a different plan: it cannot be distributed again.
    """
    function = model.function
    if form_of(function) != DISTRIBUTED:
        return plan
    homes = homes_of(function)
    sizes = {axis: n for home in homes if isinstance(home, Mesh) for axis, n in zip(home.axes, home.sizes, strict=True)}
    degrees = {f.name: sizes[f.name] for f in AXES if f.metadata["strategy"] != STAGES and f.name in sizes}
    own = [TIME, *[f.name for f in AXES]]
    further = tuple([InputSplit(axis, n, ()) for axis, n in sizes.items() if axis not in own])
    inside = replace(Plan(microbatches=sizes.get(TIME, 1), schedule=f"as in {model.name}", split=further), **degrees)
    count = len(devices_of(function))
    if count % inside.size:  # with a host, or meshes that differ: no product of axes
        inside = replace(Plan(microbatches=inside.microbatches, schedule=inside.schedule), split=(_every(count),))
    found = replace(inside, **{inside.stages.name: max(1, count // inside.size)})
    if plan not in (ONE, found):
        raise UsageError(f"{model.name} is already distributed: a plan cannot be applied to it", "leave the plan out")
    return found


def _every(count: int) -> InputSplit:
    """An axis of so many devices of which no more is known."""
    return InputSplit("devices", count, ())


def validate(distributed: Function, source: Function) -> None:
    """Check that a distributed program computes what its source computes, for all inputs.

    `source` is the program given to the transform. Every rewrite between the imported program and `source`, and between
    `source` and the program that was distributed (fused, padded), is checked by its law (`distir.api.rewrites`). Then
    the terms of the distributed program are compared with those of its source; an op that only one of them has is
    expanded to its definition.

    Raises MismatchError, naming the first output that differs and where the terms diverge, or the rewrite that is not
    equivalent.
    """
    _check_equal(distributed, source_of(distributed, source))


def _check_made_from(function: Function, source: Function) -> None:
    """Check that rewrites, which `_check_equal` checks, led from `function` to `source`."""
    if source is not function and all(origin.before is not function for origin, _ in origins(source)):
        raise MismatchError(f"{source.name} was not made from {function.name} by rewrites")


def _check_equal(distributed: Function, source: Function) -> None:
    check_origins(source)
    for definition in compare_terms(distributed, source):
        check_definition(definition, evaluate)


@loads
def simulate(
    model: Model,
    plan: Plan = ONE,
    cluster: Cluster = "cpu-2core",
    nodes: int | None = None,
    runtime: str | None = None,
) -> Prediction:
    """Predict a step on a cluster: a shipped one (`distir clusters`), a .toml file, a Topology or a CostModel.

    Without `nodes` the cluster has as many as the plan needs. `runtime` names the software that issues the ops
    (`distir.hardware.known_runtimes`); without it that takes no time, unless the cluster was calibrated with a runtime
    (`distir.api.calibrate`); a CostModel has its own. To compare many
    plans, pass the same Model and the same CostModel: what does not depend on the plan is then computed once.
    """
    plan = plan_in_effect(model, plan)
    cost = cost_model(cluster, plan, nodes, runtime)
    program = distribute(model, plan, cost.topology.devices[: plan.size], cost=stage_cost(cost, plan))
    return predict(model, plan, program, cost)


def cost_model(cluster: Cluster, plan: Plan, nodes: int | None = None, runtime: str | None = None) -> CostModel:
    """The cost model of a cluster, under a runtime.

    Raises InfeasibleError if the cluster has fewer devices than the plan, UsageError for an unknown name.
    """
    if isinstance(cluster, CostModel):
        return cluster
    if isinstance(cluster, str) and cluster in known_clusters():
        cost, made = _shipped(cluster, nodes, plan.size, runtime)
        if made != _figures(cost):  # somebody has changed it
            _shipped.cache_clear()
            cost, _ = _shipped(cluster, nodes, plan.size, runtime)
        return cost
    return _cost_model(cluster, nodes, plan.size, runtime)


@lru_cache(maxsize=8)
def _shipped(cluster: str, nodes: int | None, devices: int, runtime: str | None) -> tuple[CostModel, object]:
    """The cost model of a shipped cluster: one, so that what has been priced by it is known again; and its figures."""
    cost = _cost_model(cluster, nodes, devices, runtime)
    return cost, _figures(cost)


def _figures(cost: CostModel) -> object:
    """What is equal as long as nobody has changed a cost model."""
    return id(cost.topology), cost.topology.version, id(cost.topology.regular), id(cost.runtime), cost.tf32


def _cost_model(
    cluster: Topology | str | os.PathLike[str], nodes: int | None, devices: int, runtime: str | None
) -> CostModel:
    host = None if runtime is None else load_runtime(runtime)
    topology = cluster if isinstance(cluster, Topology) else load_cluster(os.fspath(cluster), nodes, devices)
    regular = topology.regular
    if host is None and regular is not None:
        host = regular.runtime
    kind = topology.devices[0].kind if topology.devices else ""
    return CostModel(topology, runtime=among(host, devices, kind, regular and regular.per_node))


def check_8_bits(model: Model, cost: CostModel) -> None:
    """Raises UsageError if the runtime runs products in 8 bits, and the model has none that it could."""
    if cost.runtime is None or not cost.runtime.fp8:
        return
    device = cost.topology.spec(cost.topology.devices[0])
    ops = (op for f in (model.function, *model.function.callees()) for op in f.ops)  # it may be distributed already
    if not any(cost.in_fp8(op.spec, [v.type for v in op.inputs], [v.type for v in op.outputs], device) for op in ops):
        raise UsageError(f"{cost.runtime.name}: {model.name} has no products of weights in 16 bits", "--precision bf16")


def predict(model: Model, plan: Plan, program: Function, cost: CostModel) -> Prediction:
    """The prediction for a distributed program, in the order in which its ranks run it."""
    check_8_bits(model, cost)
    simulation = simulated(program, plan, cost, model.batch, model.tokens)
    summary = Summary.of(model, plan, program)
    return Prediction(summary, describe(cost.topology), program, simulation, model.function)


def simulated(
    program: Function, plan: Plan, cost: CostModel, batch: int | None = None, tokens: int | None = None
) -> Simulation:
    """The simulation of a distributed program, in the order in which its ranks run it."""
    simulator = Simulator(cost, overlap=cost.overlap and plan.overlap)
    return simulator.interpret(as_run(program), batch=batch, tokens=tokens, order=receive_order)


def describe(topology: Topology) -> str:
    """A cluster in a few words."""
    r = topology.regular
    if r is None:
        n = len(topology.devices)
        return f"of {counted(n, 'device')}"
    return f"{r.name}, {counted(r.nodes, 'node')} of {r.per_node} {r.kind}"
