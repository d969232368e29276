"""A flat cluster: one node, links that are all alike, and no algorithms but the ring; and programs to export."""

from __future__ import annotations

from distir.api import Plan
from distir.api.compilation import simulate
from distir.api.model import AnyModel
from distir.executor.simulator.simulation import Simulation
from distir.ir import Device, Function, FunctionMaker, Mesh, Topology
from distir.ir.placement import SUM, Shard
from distir.ir.topology import DeviceSpec, Link, Regular
from distir.ir.type import Float32, Tensor
from distir.models.gpt import gpt
from distir.transforms.differentiation.training import training_step
from distir.transforms.plan import InputSplit

BANDWIDTH, LATENCY = 1e9, 3e-6


def flat(size: int) -> Topology:
    """`size` devices, all linked alike."""
    spec = DeviceSpec((("f32", 1e11),), 1e10, 1e-6, 1e12)
    link = Link(BANDWIDTH, LATENCY)
    return Topology(Regular("flat", "cpu", spec, 1, size, link, link))


def model() -> Function:
    """The training step of a small GPT."""
    return training_step(gpt(4, 64, 4, 96, 32, 16), "cross-entropy")


PLANS = [
    Plan(),
    Plan(dp=2, tp=2, pp=2, microbatches=4, schedule="gpipe"),
    Plan(dp=4, pp=2, microbatches=2, zero=3, bucket_mb=0.05),
    Plan(tp=4, pp=2, microbatches=4, sequence_parallel=True),
    Plan(dp=2, pp=2, microbatches=4, chunks=2, schedule="interleaved"),
    Plan(dp=2, tp=2, pp=2, microbatches=2, overlap=False),
    Plan(dp=2, microbatches=2, split=(InputSplit.parse("cp=2:input_ids.1,labels.1"),), bucket_mb=0.0),
    Plan(dp=2, tp=2, pp=2, microbatches=2, order=("pp", "dp", "tp")),
]


def exchanges() -> Function:
    """All collectives on a mesh of 2 x 3, with computation between them, and a transfer to a mesh beside it."""
    mesh = Mesh([Device("cpu", k) for k in range(6)], {"a": 2, "b": 3}, "m")
    other = Mesh([Device("cpu", k) for k in range(6, 12)], {"a": 2, "b": 3}, "n")
    f = FunctionMaker("exchanges")
    x = f.add_input_value("x", Tensor.whole(Float32, (120, 600, 3), mesh, (Shard(0), SUM)))
    y = f.emit("MPIReduceScatter", x, axis="b", dim=1)
    y = f.emit("MPIAlltoall", f.emit("Relu", y), axis="b", dim=2)
    y = f.emit("MPIPermute", f.emit("Relu", y), axis="b", shift=2)
    y = f.emit("MPIPermute", f.emit("Relu", y), axis="b", shift=-2)
    y = f.emit("MPIAllgather", f.emit("Relu", y), axis="b")
    y = f.emit("Send", f.emit("Relu", y), to=other)
    z = f.emit("MPIAllreduce", x, axis="b")
    f.set_outputs([f.emit("Relu", y), f.emit("Relu", z)])
    return f.finalize()


def simulated(program: AnyModel, plan: Plan, size: int) -> Simulation:
    return simulate(program, plan, flat(size)).simulation
