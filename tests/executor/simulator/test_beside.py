"""Compute that runs beside a collective of the same device is slower; `test_simulator` and `test_exact` compare what
the simulator makes of it with the plain loop, on random clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.seconds import quantize
from distir.executor.simulator.beside import beside_compute
from distir.executor.simulator.simulation import Simulation
from distir.hardware import load_cluster
from distir.ir import Function, FunctionMaker, Mesh, Topology, Value
from distir.ir.type import SUM, Float, Tensor

SHARE = 0.25


def cluster(share: float, nodes: int = 1) -> Topology:
    """Nodes of 8 devices, whose collectives take that share of compute, between nodes half of it."""
    regular = load_cluster("dgx-a100", nodes=nodes).regular
    assert regular is not None
    return Topology(
        replace(regular, intra=regular.intra._replace(slows=share), inter=regular.inter._replace(slows=share / 2))
    )


def program(mesh: Mesh, waits: bool) -> tuple[Function, Value]:
    """A sum over devices and a long chain of compute that needs it, or does not; and the sum."""
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (4096, 4096), mesh, [SUM]))
    y = maker.add_input_value("y", Tensor.whole(Float(), (4096, 4096), mesh))
    total = maker.emit("MPIAllreduce", x, axis="dp")
    z = maker.emit("Add", total, y) if waits else y
    for _ in range(20):
        z = maker.emit("MatMul", z, y)
    maker.set_outputs([z, maker.emit("Transpose", total, perm=(1, 0))])
    return maker.finalize(), total


def simulated(share: float, waits: bool, nodes: int = 1, overlap: bool = True) -> tuple[Simulation, float]:
    """The simulation, and the seconds of the sum."""
    topology = cluster(share, nodes)
    mesh = Mesh(topology.devices, {"dp": 8 * nodes}, "m")
    found = Simulator(CostModel(topology), overlap=overlap).interpret(program(mesh, waits)[0])
    return found, next(e.dur for e in found.trace if e.name == "MPIAllreduce")


@pytest.mark.parametrize("nodes", [1, 2])
def test_compute_beside_a_collective_loses_a_share_of_its_time(nodes: int) -> None:
    """Over nodes the network limits the rate at which the links inside of them are used."""
    regular = cluster(0.0).regular
    assert regular is not None
    share = SHARE if nodes == 1 else SHARE * 8 * regular.inter.collective(8) / regular.intra.collective(8)
    assert SHARE / 2 < share <= SHARE
    before, seconds = simulated(0.0, waits=False, nodes=nodes)
    after, same = simulated(SHARE, waits=False, nodes=nodes)
    assert seconds == same > 0
    assert after.seconds == before.seconds + quantize(share * seconds)
    assert after.stages[0].compute == before.stages[0].compute  # what is lost counts as communication
    assert [e.dur for e in after.trace] == [e.dur for e in before.trace]


@pytest.mark.parametrize(("waits", "overlap"), [(True, True), (False, False)])
def test_a_collective_beside_which_nothing_runs_costs_nothing_more(waits: bool, overlap: bool) -> None:
    assert simulated(SHARE, waits, overlap=overlap)[0].seconds == simulated(0.0, waits, overlap=overlap)[0].seconds


def test_a_collective_is_waited_for_where_its_result_is_first_used() -> None:
    mesh = Mesh(cluster(0.0).devices, {"dp": 8}, "m")
    for waits in (True, False):
        function, total = program(mesh, waits)
        found = [v for op in beside_compute(function) for v in op.outputs]
        assert found == ([] if waits else [total])


def test_a_share_is_read_from_the_cluster() -> None:
    """Whole nodes, and one device of each."""
    topology = load_cluster("dgx-h100", nodes=2)
    regular = topology.regular
    assert regular is not None
    assert (regular.intra.slows, regular.inter.slows) == (0.15, 0.02)
    cost = CostModel(topology)
    d = topology.devices
    groups = [topology.group(devices) for devices in (d[:8], d, [*d[:2], *d[8:10]], d[::8])]
    two = 0.15 * 2 * regular.inter.collective(2) / regular.intra.collective(2)
    assert 0.02 < two < 0.15
    assert [cost.beside(1.0, group) for group in groups] == pytest.approx([0.15, 0.15, two, 0.02])
