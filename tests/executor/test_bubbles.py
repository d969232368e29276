"""Bubbles of schedules, simulated: those of the papers, where sends, sums, prologue and update take no time."""

from __future__ import annotations

import pytest

from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator.simulation import Simulation
from distir.ir import Function, FunctionMaker, Role, Topology
from distir.ir.spec import Attrs, Spec
from distir.ir.topology import DeviceSpec, Link
from distir.ir.type import Float, Tensor
from distir.transforms.differentiation.training import SGD, training_step
from distir.transforms.parallel3d import distribute
from distir.transforms.pipeline.schedule import Schedule, make_table
from distir.transforms.pipeline.stages import StageCost
from distir.transforms.plan import Plan


class OnlyRelu(CostModel):
    """A second for a Relu, `backward` for its gradient; all else is free. So a layer of an MLP is a layer."""

    def __init__(self, topology: Topology, backward: float) -> None:
        super().__init__(topology)
        self.seconds = {"Relu": 1.0, "ReluGrad": backward}

    def compute_seconds(self, spec: Spec, attrs: Attrs, ins: object, outs: object, what: DeviceSpec) -> float:
        return self.seconds.get(spec.name, 0.0)

    def transfer_seconds(self, size: float, link: Link) -> float:
        return 0.0


def mlp(layers: int, batch: int) -> Function:
    """The training step of a small MLP."""
    f = FunctionMaker("mlp")
    x = f.add_input_value("x", Tensor(Float(), (batch, 2)), Role("data", 0))
    for i in range(layers):
        x = f.emit("Relu", f.emit("MatMul", x, f.add_input_value(f"w{i}", Tensor(Float(), (2, 2)), Role("parameter"))))
    f.set_outputs([x])
    return training_step(f.finalize(), "mse", SGD())


def simulate(p: int, m: int, v: int, schedule: Schedule, backward: float = 1.0) -> Simulation:
    """An MLP of a layer a stage, v stages on each of p devices."""
    topology = Topology()
    devices = [topology.add_device("gpu", 1e9, 1e9, 0.0) for _ in range(p)]
    for a in devices:
        for b in devices[: a.index]:
            topology.set_bandwidth(a, b, 8)
    equal = StageCost(lambda op: float(op.spec.name == "Relu"), 0.0)
    plan = Plan(pp=p, microbatches=m, schedule=schedule, chunks=v)
    program = distribute(mlp(p * v, m), plan, devices, cost=equal).program
    return Simulator(OnlyRelu(topology, backward)).interpret(program)


def share(simulation: Simulation, ideal: float) -> float:
    """The bubble of a stage, which is every stage's, in parts of the ideal time."""
    assert {s.compute for s in simulation.stages} == {ideal}
    assert {s.bubble + s.communication for s in simulation.stages} == {simulation.seconds - ideal}
    return (simulation.seconds - ideal) / ideal


@pytest.mark.parametrize("backward", [1.0, 2.0])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (4, 8), (5, 2), (8, 16)])
def test_gpipe_and_1f1b(p: int, m: int, schedule: str, backward: float) -> None:
    ideal = m * (1 + backward)
    assert share(simulate(p, m, 1, schedule, backward), ideal) == (p - 1) / m


@pytest.mark.parametrize("backward", [1.0, 2.0])
@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 2), (2, 4, 2), (2, 8, 3), (2, 4, 4), (3, 6, 2), (3, 3, 3), (4, 4, 2), (4, 8, 2), (4, 8, 4)]
)
def test_interleaved(p: int, m: int, v: int, backward: float) -> None:
    ideal = m * v * (1 + backward)
    assert share(simulate(p, m, v, "interleaved", backward), ideal) == (p - 1) / (m * v)


@pytest.mark.parametrize(("p", "m", "v", "name"), [(3, 5, 1, "1f1b"), (3, 5, 1, "gpipe"), (2, 4, 3, "interleaved")])
def test_the_simulator_runs_the_table(p: int, m: int, v: int, name: str) -> None:
    """Each device goes forward and backward in the order of its row."""
    simulation = simulate(p, m, v, name)
    for rank, row in enumerate(make_table(name, p, m, v)):
        ran = [e for e in simulation.trace if e.pid == f"gpu:{rank}" and e.name in ("Relu", "ReluGrad")]
        assert ["F" if e.name == "Relu" else "B" for e in ran] == [slot.phase for slot in row]
