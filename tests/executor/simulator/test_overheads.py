"""Memory beside tensors: against the rules of the software it describes, and groups of devices counted one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.api.compilation import distribute
from distir.api.model import Model, load
from distir.executor.cost_model import CostModel
from distir.executor.simulator.categories import CATEGORIES
from distir.executor.simulator.overheads import MIB, OVERHEADS, Overheads, allocated, communicators
from distir.executor.simulator.simulation import Simulation, Simulator
from distir.hardware import load_cluster, load_runtime
from distir.ir.device import Device, Mesh
from distir.ir.function import Function
from distir.ir.parse import parse
from distir.ir.topology import Topology
from distir.transforms.plan import Plan

PLANS = {
    "one device": Plan(),
    "data": Plan(dp=4),
    "data and tensor": Plan(dp=2, tp=2),
    "sequence": Plan(tp=2, sequence_parallel=True),
    "stages": Plan(pp=2, microbatches=4),
    "all, sharded": Plan(dp=2, tp=2, pp=2, microbatches=2, zero=2),
    "interleaved": Plan(dp=2, pp=2, microbatches=4, schedule="interleaved", chunks=2),
}


@pytest.fixture(scope="module")
def model() -> Model:
    text = "gpt:layers=4,hidden=64,heads=4,seq=32,batch=16,vocab=128"
    return load(text, loss="cross-entropy", optimizer="adamw", precision="bf16")


def simulated(model: Model, plan: Plan, topology: Topology, runtime: str | None = None) -> Simulation:
    program = distribute(model, plan, topology.devices[: plan.size], check=False)
    host = load_runtime(runtime) if runtime else None
    return Simulator(CostModel(topology, runtime=host)).interpret(program)


@given(st.one_of(st.integers(0, 64 * MIB), st.integers(0, 64).map(lambda n: n * MIB)), st.integers(-513, 513))
def test_a_block_is_what_is_split_off_a_new_segment(size: int, more: int) -> None:
    """The rules of PyTorch's allocator, one after the other: round, choose a segment, split it if enough is left."""
    size = max(1, size + more)
    block = size + (-size) % 512
    small = block <= MIB
    segment = 2 * MIB if small else 20 * MIB if block < 10 * MIB else block + (-block) % (2 * MIB)
    left = segment - block
    is_split = left >= 512 if small else left > MIB
    assert allocated(size) == (block if is_split or not left else segment)


def groups(f: Function, device: Device) -> set[object]:
    """The groups of devices in which one communicates, and "transfers" if it sends or receives."""
    found: set[object] = set()
    for op in [op for g in (f, *f.callees()) for op in g.ops]:
        homes = [v.type.device for v in (*op.inputs, *op.outputs)]
        here = [h for h in homes if isinstance(h, Mesh) and device in h.devices]
        if op.spec.route == "axis" and here:
            mesh = here[0]
            group = frozenset(mesh.group(op.attributes["axis"], mesh.devices.index(device)))
            found |= {group} if len(group) > 1 else set()
        if op.spec.route == "send" and here:
            found.add("transfers")
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_communicator_for_each_group(model: Model, plan: Plan) -> None:
    simulation = simulated(model, plan, load_cluster("selene-a100"))
    program = simulation.program
    for c, device in enumerate(program.classes.first):
        assert len(communicators(program, c)) == len(groups(program.function, device))
        got = simulation.overheads(device).communication
        assert got == len(groups(program.function, device)) * 576 * MIB


def test_a_group_of_one_device_needs_no_communicator() -> None:
    program = parse(
        """mesh m(dp=1, tp=2) = gpu:0..1
fn f(%x: f32[4]+dp @ m, %y: f32[4]+tp @ m) {
  %a: f32[4] @ m = MPIAllreduce(%x, axis="dp")
  %b: f32[4] @ m = MPIAllreduce(%y, axis="tp")
  return %a, %b
}
"""
    )
    simulation = Simulator(CostModel(load_cluster("selene-a100"))).interpret(program)
    assert communicators(simulation.program, 0) == {"tp"}


@pytest.mark.parametrize("overlap", [True, False])
def test_the_peak_is_the_sum_of_its_categories(model: Model, overlap: bool) -> None:
    topology, plan = load_cluster("dgx-h100"), PLANS["all, sharded"]
    program = distribute(model, plan, topology.devices[: plan.size], check=False)
    simulation = Simulator(CostModel(topology), overlap=overlap).interpret(program)
    for device in simulation.program.classes.first:
        at_peak = simulation.memory_at_peak(device)
        assert list(at_peak) == [*CATEGORIES, *OVERHEADS]
        assert simulation.peak_memory[device] == sum(at_peak.values())
        tensors = sum(at_peak[k] for k in CATEGORIES)
        assert simulation.allocated_memory[device] == tensors + at_peak["workspace"] == tensors + 32 * MIB
        assert simulation.reserved_memory[device] == tensors + (32 + 22) * MIB
        assert at_peak["context"] == 942 * MIB


def test_a_workspace_for_each_thread_that_issues_products(model: Model) -> None:
    """8 MiB and 128 KiB on A100, twice where autograd issues backward passes."""
    for runtime, threads in ((None, 1), ("distir", 1), ("torch-eager", 2), ("megatron", 2)):
        simulation = simulated(model, Plan(), load_cluster("selene-a100"), runtime)
        (device,) = simulation.program.classes.first
        assert simulation.overheads(device).workspace == threads * (8 * MIB + 128 * 1024)


def test_cpus_have_nothing_beside_tensors(model: Model) -> None:
    plan = Plan(dp=2)
    simulation = simulated(model, plan, load_cluster("cpu-2core"))
    (device,) = simulation.program.classes.first
    assert simulation.overheads(device) == Overheads()
    assert simulation.peak_memory[device] == simulation.allocated_memory[device] == simulation.memory(device).total


def test_tensors_are_rounded_where_there_is_an_allocator(model: Model) -> None:
    """By less than 512 bytes each, as all are smaller than 10 MiB; on CPUs not at all."""
    gpu, cpu = (simulated(model, Plan(), load_cluster(name)) for name in ("selene-a100", "cpu-2core"))
    rounded, exact = ([p.after for p in s.memory(s.program.classes.first[0]).curve] for s in (gpu, cpu))
    values = len(gpu.program.function.inputs) + sum(len(op.outputs) for op in gpu.program.function.ops)
    assert all(sum(a) % 512 == 0 and 0 <= sum(a) - sum(b) < 512 * values for a, b in zip(rounded, exact, strict=True))
    assert any(sum(a) > sum(b) for a, b in zip(rounded, exact, strict=True))


def test_what_is_beside_tensors_must_fit_too(model: Model) -> None:
    regular = load_cluster("selene-a100").regular
    assert regular is not None
    tensors = simulated(model, Plan(), Topology(regular))
    (device,) = tensors.program.classes.first
    need = tensors.peak_memory[device]
    for spare, fits in ((0, True), (-1, False)):
        spec = replace(regular.spec, usable=need + spare)
        assert simulated(model, Plan(), Topology(replace(regular, spec=spec))).fits().ok is fits
    assert tensors.memory(device).total < need / 10
    assert replace(regular.spec, usable=0.0).capacity == regular.spec.memory < regular.spec.capacity
