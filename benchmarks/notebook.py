"""Benchmark of the founding notebook's studies: an MLP swept over (data, horizontal, pipeline, microbatches) plans.

    python benchmarks/notebook.py [--runs N] [--json [FILE]]

CPU seconds by phase, medians over the runs, with cold caches in each run; within a run the model is built once per
study (or once per size), and plans share cached analyses. The construction of the topology is not timed. Goals on a
2-core CPU, with one `verify` per plan: grid 0.7 s, data 0.5, horizontal 0.7, pipeline 0.3; the original took 139.7, 53,
72 and 8 s.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from laps import Laps, as_json, machine, medians, parser, table

from distir.executor import Simulator, infer_types
from distir.executor.cost_model import CostModel
from distir.ir import Function, FunctionMaker, Topology, verify
from distir.ir.infer import forget
from distir.ir.type import Float, Tensor
from distir.transforms import parallel_transform_3d, steady_state_transform

SEQUENTIAL_LAYERS = 4096


class Plan(NamedTuple):
    """An MLP and its plan."""

    layers: int
    batch: int
    width: int
    d: int
    h: int
    p: int
    microbatches: int


def grid() -> Iterator[Plan]:
    """All 52 (d, h, p, microbatches) on 16 GPUs: 2 to 32 microbatches per plan, at most 64 over all replicas."""
    for d in (1, 2, 4, 8, 16):
        for h in (1, 2, 4, 8, 16):
            if 16 % (d * h) == 0:
                p = 16 // (d * h)
                for m in (2, 4, 8, 16, 32) if p > 1 else (1,):
                    if m * d <= 128 and not (d >= 4 and m > 16):
                        yield Plan(64, 8192, 8192, d, h, p, m)


def data() -> Iterator[Plan]:
    """28 plans: 2 to 128 GPUs, four batches."""
    for batch in (1024, 2048, 4096, 8192):
        for k in range(1, 8):
            yield Plan(64, batch, 8192, 2**k, 1, 1, 1)


def horizontal() -> Iterator[Plan]:
    """24 plans: 2 to 128 GPUs, four widths, at least 64 columns per GPU."""
    for width in (1024, 4096, 8192, 16384):
        for k in range(1, 8):
            if width >> k >= 64:
                yield Plan(64, 8192, width, 1, 2**k, 1, 1)


def pipeline() -> Iterator[Plan]:
    """24 plans: 2 to 64 GPUs (one layer each), four numbers of microbatches."""
    for m in (2, 4, 8, 16):
        for k in range(1, 7):
            yield Plan(64, 8192, 8192, 1, 1, 2**k, m)


STUDIES = {"grid": (grid, 0.7), "data": (data, 0.5), "horizontal": (horizontal, 0.7), "pipeline": (pipeline, 0.3)}


def mlp(layers: int, batch: int, width: int) -> Function:
    """Forward and backward pass, written by hand as in the notebook."""
    function = FunctionMaker(name="mlp")
    x = function.add_input_value("x", Tensor(dtype=Float(), shape=(batch, width)))
    z = function.add_input_value("z", Tensor(dtype=Float(), shape=(batch, width)))
    square = Tensor(dtype=Float(), shape=(width, width))
    weights = [function.add_input_value(f"w{chr(ord('A') + i)}", square) for i in range(layers)]
    a = x
    for i, w in enumerate(weights):
        y = function.add_op("MatMul", name=f"MatMul{i}", inputs=[a, w], output_names=[f"y{i}"])
        a = function.add_op("Relu", name=f"Relu{i}", inputs=[y], output_names=[f"a{i}"])
    function.add_op("Loss", name="Loss", inputs=[a, z], attributes={"N": batch}, output_names=["l"])
    d = function.add_op("LossGrad", name="LossGrad", inputs=[a, z], attributes={"N": batch}, output_names=["dl"])
    for i in reversed(range(layers)):
        y, a = function.ops[2 * i + 1].inputs[0], function.ops[2 * i].inputs[0]
        d = function.add_op("ReluGrad", name=f"ReluGrad{i}", inputs=[y, d], output_names=[f"dy{i}"])
        names = [f"da{i}", f"d{weights[i].name}"]
        d, _ = function.add_op("MatMulGrad", name=f"MatMulGrad{i}", inputs=[a, weights[i], d], output_names=names)
    return function.finalize()


def study(plans: list[Plan], simulator: Simulator, topology: Topology) -> dict[str, float]:
    """Seconds of each phase over the plans."""
    forget()
    gc.collect()
    laps = Laps()
    models: dict[tuple[int, int, int], Function] = {}
    for layers, batch, width, d, h, p, m in plans:
        function = models.get((layers, batch, width))
        if function is None:
            laps.start()
            function = mlp(layers, batch, width)
            laps.lap("build")
            function = models[layers, batch, width] = infer_types(function, function.inputs)
            laps.lap("infer")
        program = parallel_transform_3d(function, d, h, p, topology.devices[: d * h * p + 1], m)
        laps.lap("transform")
        verify(program)
        laps.lap("verify")
        program, types = steady_state_transform(program)
        laps.lap("steady state")
        program = infer_types(program, types)
        laps.lap("infer again")
        _ = simulator.interpret(program, (v.type for v in types)).timestamps[topology.devices[1]]
        laps.lap("simulate")
    return laps.seconds


def sequential(simulator: Simulator) -> tuple[dict[str, float], int]:
    """Seconds of each phase for 4,096 layers on one device, and the number of ops."""
    forget()
    gc.collect()
    laps = Laps()
    function = mlp(SEQUENTIAL_LAYERS, 8192, 8192)
    laps.lap("build")
    function = infer_types(function, function.inputs)
    laps.lap("infer")
    _ = simulator.interpret(function, (v.type for v in function.inputs)).seconds
    laps.lap("simulate")
    return laps.seconds, len(function.ops)


def cluster(gpus: int) -> Topology:
    """A host and its GPUs, 200 gigabits per second between any two."""
    topology = Topology()
    for _ in range(gpus + 1):
        topology.add_device("gpu", throughput=1e14, dram_bandwidth=1.2e12, kernel_launch_overhead=0)
    for i, a in enumerate(topology.devices):
        for b in topology.devices[:i]:
            topology.set_bandwidth(a, b, 200)
    return topology


def main() -> None:
    flags = parser(__doc__, 5)
    args = flags.parse_args()
    topology = cluster(128)
    simulator = Simulator(CostModel(topology))
    study(list(grid())[:3], simulator, topology)  # modules are imported
    result: dict[str, dict[str, float]] = {}
    for name, (plans, goal) in STUDIES.items():
        found = list(plans())
        runs = [study(found, simulator, topology) for _ in range(args.runs)]
        total = statistics.median(sum(run.values()) for run in runs)
        result[name] = {"plans": len(found), **medians(runs), "total": total, "goal": goal}
    several = [sequential(simulator) for _ in range(args.runs)]
    laps = medians([laps for laps, _ in several])
    ops = several[0][1]
    large = {"ops": ops, **laps, "total": sum(laps.values()), "simulated ops/s": ops / laps["simulate"]}
    if as_json(args.json, {"machine": machine(), **result, "sequential": large}):
        return
    print(f"CPU seconds; {machine()}\n")
    rows = [
        [k, *(f"{column[k]:.3f}" if k != "plans" else f"{column[k]}" for column in result.values())]
        for k in result["grid"]
    ]
    print(table(["study", *result], rows))
    cells = [[k, f"{v:,.0f}" if v > 1000 else f"{v:.3f}"] for k, v in large.items()]
    print("\n" + table([f"{SEQUENTIAL_LAYERS:,} layers in sequence", ""], cells))


if __name__ == "__main__":
    main()
