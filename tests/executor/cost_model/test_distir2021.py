"""DistIR's cost model and order of work against its published figures (../shared/reference), and its formulas."""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from distir.executor import Simulation, Simulator, infer_types
from distir.executor.cost_model import CostModel
from distir.ir import Device, Function, FunctionMaker, Mesh, Topology, verify
from distir.ir.type import REPLICATE, SUM, BFloat16, Float, Shard, Tensor
from distir.transforms import parallel_transform_3d, steady_state_transform

REFERENCE = Path(__file__).parents[4] / "shared" / "reference"
Key = tuple[int, int, int, int]
Row = dict[str, str]
LAYERS, BATCH = 64, 8192
T, M, GBPS = 1e14, 1.2e12, 200


def rows(name: str) -> dict[Key, Row]:
    """The rows of a reference file by (d, h, p, microbatches); none where it is absent."""
    path = REFERENCE / name
    if not path.exists():
        return {}
    with path.open() as file:
        found = list(csv.DictReader(file))
    return {(int(r["d"]), int(r["h"]), int(r["p"]), int(r["mb"])): r for r in found}


def golden() -> dict[Key, Row]:
    """The plans of the published grid with correct groups, and those with the groups fixed."""
    published = {k: r for k, r in rows("grid_as_published.csv").items() if not (k[0] > 1 and k[1] > 1)}
    return published | rows("grid_fixed_groups.csv")


GOLDEN = golden()
needs_reference = pytest.mark.skipif(not REFERENCE.exists(), reason="needs ../shared/reference")


@cache
def mlp() -> Function:
    """The notebook's model: no roles, equal shapes, a hand-written backward pass, no declared outputs."""
    f = FunctionMaker(name="mlp")
    square = Tensor(Float(), (BATCH, BATCH))
    x, z = f.add_input_value("x", square), f.add_input_value("z", square)
    weights = [f.add_input_value(f"w{chr(ord('A') + i)}", square) for i in range(LAYERS)]
    a = x
    for w in weights:
        a = f.emit("Relu", f.emit("MatMul", a, w))
    f.emit("Loss", a, z, N=BATCH)
    d = f.emit("LossGrad", a, z, N=BATCH)
    for i in reversed(range(LAYERS)):
        d = f.emit("ReluGrad", f.ops[2 * i + 1].inputs[0], d)
        d, _ = f.emit("MatMulGrad", f.ops[2 * i].inputs[0], weights[i], d)
    return infer_types(f.finalize(), f.inputs)


def cluster(gpus: int, launch: float = 0.0) -> Topology:
    topology = Topology()
    for _ in range(gpus + 1):
        topology.add_device("gpu", throughput=T, dram_bandwidth=M, kernel_launch_overhead=launch)
    for i, a in enumerate(topology.devices):
        for b in topology.devices[:i]:
            topology.set_bandwidth(a, b, GBPS)
    return topology


@cache
def simulator() -> Simulator:
    return Simulator(CostModel.distir2021(cluster(16)))


def iteration(key: Key, topology: Topology, schedule: str, overlap: bool = True) -> Function:
    """One training iteration of a plan."""
    d, h, p, m = key
    devices = topology.devices[: d * h * p + 1]
    old = {"overlap": False, "loss_gradient": "forward"} if schedule == "distir2021" else {"overlap": overlap}
    program = parallel_transform_3d(mlp(), d, h, p, devices, m, schedule, **old)
    verify(program)
    return steady_state_transform(program)[0]


def communication(simulation: Simulation) -> float:
    """The share of communication in the total duration of events, as the notebook counts it."""
    total = share = 0.0
    for event in simulation.trace:
        total += event.dur
        if event.name == "Send" or "MPI" in event.name:
            share += event.dur
    return share / total


# ---- golden figures


@needs_reference
def test_all_rows_are_there() -> None:
    assert len(GOLDEN) == 52
    assert len(rows("grid_fixed_groups.csv")) == 17


@needs_reference
def test_sequential_time() -> None:
    device = simulator().cost_model.topology.devices[0]
    on_device = infer_types(mlp(), [Tensor(v.type.dtype, v.type.shape, device) for v in mlp().inputs])  # type: ignore[union-attr]
    assert simulator().interpret(on_device).seconds == pytest.approx(2.15436096, rel=1e-6)


@needs_reference
@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_throughput_and_communication_as_published(key: Key) -> None:
    simulation = simulator().interpret(iteration(key, simulator().cost_model.topology, "distir2021"))
    row = GOLDEN[key]
    assert simulation.seconds == pytest.approx(float(row["dist_time_s"]), rel=1e-6)
    assert BATCH / simulation.seconds == pytest.approx(float(row["throughput"]), rel=1e-6)
    assert communication(simulation) == pytest.approx(float(row["comm_overhead"]), rel=1e-6)


@needs_reference
@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_1f1b_is_as_quick(key: Key) -> None:
    """distir's own 1F1B and cut under the same formulas."""
    topology = simulator().cost_model.topology
    seconds = simulator().interpret(iteration(key, topology, "1f1b", overlap=False)).seconds
    assert seconds == pytest.approx(float(GOLDEN[key]["dist_time_s"]), rel=0.005)


@needs_reference
def test_own_formulas_rank_plans_as_the_last_version_did() -> None:
    """Spearman's rank correlation of throughput over the 52 plans, on the same device figures, overlap off."""
    topology = cluster(16, launch=1e-5)
    own = Simulator(CostModel(topology), overlap=False)
    theirs = rows("grid_main.csv")
    seconds = [own.interpret(iteration(key, topology, "1f1b", overlap=False)).seconds for key in theirs]
    mine, reference = (np.argsort(np.argsort(x)) for x in (seconds, [float(r["latency"]) for r in theirs.values()]))
    assert len(theirs) == len(set(seconds)) == 52  # no ties, so that by the definition
    assert 1 - 6 * np.sum((mine - reference) ** 2) / (52 * (52**2 - 1)) >= 0.9


# ---- formulas


def one(op_type: str, *types: Tensor, **attributes: object) -> float:
    """Seconds of an op on one device, or of a collective over its mesh, or of a Send."""
    f = FunctionMaker()
    f.emit(op_type, *[f.add_input_value("x", t) for t in types], **attributes)
    return simulator().interpret(f.finalize()).seconds


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=2**-43, rel=1e-12)


def test_formulas_of_compute() -> None:
    a, w, d = Tensor(Float(), (64, 128)), Tensor(Float(), (128, 32)), Tensor(Float(), (64, 32))
    product = 2 * (64 * 128 + 128 * 32) / M + 2 * 64 * 128 * 32 / T
    assert one("MatMul", a, w) == near(product)
    half = [Tensor(BFloat16(), t.shape) for t in (a, w)]
    assert one("MatMul", *half) == near(product)  # 2 bytes whatever the dtype
    to_x = 2 * (64 * 32 + 32 * 128) / M + 2 * 64 * 32 * 128 / T
    to_w = 2 * (128 * 64 + 64 * 32) / M + 2 * 128 * 64 * 32 / T
    assert one("MatMulGrad", a, w, d) == near(to_x + to_w)
    assert one("MatMulGradWeight", a, d) == near(to_w)
    big = Tensor(Float(), (4096, 4096))
    for op_type, operands in (("Add", 2), ("Relu", 1), ("ReluGrad", 2)):
        assert one(op_type, *[big] * operands) == near(4 * 4096 * 4096 / T)
    for op_type in ("Loss", "LossGrad"):
        assert one(op_type, big, big, N=4096) == near(4 * 4096 * 4096 / T)
    assert one("Identity", big) == one("Concat", big, big, axis=0) == 0


def mesh(n: int, first: int = 1) -> Mesh:
    return Mesh([Device("gpu", first + i) for i in range(n)], {"tp": n}, f"m{first}")


def test_formulas_of_communication() -> None:
    size = 4 * 1024 * 1024
    whole = Tensor(Float(), (1024, 1024), mesh(4), (REPLICATE,))
    partial = Tensor(Float(), (1024, 1024), mesh(4), (SUM,))
    reduced = 2 * size * 3 / 4 / 8e9 / GBPS
    assert one("MPIAllreduce", partial, axis="tp") == near(reduced)
    part = Tensor.whole(Float(), (1024, 1024), mesh(4), (Shard(0),))
    assert one("MPIAllgather", part, axis="tp") == near(reduced / 2)
    assert one("MPIReduceScatter", partial, axis="tp", dim=0) == near(reduced / 2)
    assert one("Send", whole, to=mesh(4, 5)) == near(4 * size / 8e9 / GBPS)
    halves = Tensor(BFloat16(), (1024, 1024), mesh(4), (REPLICATE,))
    assert one("Send", halves, to=mesh(4, 5)) == near(2 * (size / 2) / 8e9 / GBPS)
    here = Tensor(Float(), (1024, 1024), Device("gpu", 0))
    assert one("MPIBroadcast", here, to=mesh(4)) == 0
    assert one("MPIScatter", here, to=mesh(4), placements=(Shard(0),)) == 0


def test_a_device_does_one_thing_at_a_time() -> None:
    """By default `Simulator(CostModel.distir2021(topology))` has no overlap; it can be enabled."""
    assert not simulator().overlap
    cost = CostModel.distir2021(cluster(2))
    assert Simulator(cost, overlap=True).overlap
    assert Simulator(CostModel(cluster(2))).overlap


def test_the_topology_may_grow() -> None:
    topology = Topology()
    late = Simulator(CostModel.distir2021(topology))
    topology.add_device("gpu", throughput=T, dram_bandwidth=M, kernel_launch_overhead=0.0)
    f = FunctionMaker()
    f.emit("Relu", f.add_input_value("x", Tensor(Float(), (1024, 1024))))
    assert math.isclose(late.interpret(f.finalize()).seconds, 4 * 1024 * 1024 / T, rel_tol=1e-4)
