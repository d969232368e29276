"""Benchmark of the simulator: its loop and `compile` on a flat program of 16,386 ops; replay of a pipeline's calls.

    python benchmarks/simulate.py [--runs N] [--json [FILE]]

CPU seconds, medians over the runs. `plain` is a lower bound for plain Python on the same program: one loop over tuples
(duration, stream, inputs) that visits every dependence. Goals on a 2-core CPU: 3 million ops per second in the loop,
0.5 million with `compile`, 60 million op instances per second replaying stages.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

from laps import as_json, machine, parser

from distir.executor.cost_model import CostModel
from distir.executor.simulator.busy import busy_times
from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.lifetimes import Lifetimes
from distir.executor.simulator.memory import LiveMemory
from distir.executor.simulator.trace import Run
from distir.hardware import load_cluster
from distir.ir import Device, Function, FunctionMaker, Mesh, Topology, Value
from distir.ir.type import NOW, REPLICATE, SUM, BFloat16, Float, Shard, Tensor, Tuple

LAYERS = 4096
GOALS = {"loop": 3e6, "compile and loop": 5e5, "replay": 6e7}
UNITS = {
    **dict.fromkeys(("loop", "compile and loop", "plain loop"), "ops/s"),
    "replay": "op instances/s",
    **dict.fromkeys(("compile", "loop once", "busy", "memory"), "s"),
    "ratio to plain": "times as fast",
}


def mlp(device: Device) -> Function:
    """Forward and backward of an MLP of 4,096 layers: 16,386 ops."""
    f = FunctionMaker("mlp")
    t = Tensor(Float(), (8192, 8192), device)
    x, z = f.add_input_value("x", t), f.add_input_value("z", t)
    saved: list[tuple[Value, Value, Value]] = []
    for i in range(LAYERS):
        w = f.add_input_value(f"w{i}", t)
        y = f.emit("MatMul", x, w)
        saved.append((x, w, y))
        x = f.emit("Relu", y)
    f.emit("Loss", x, z, N=8192)
    d = f.emit("LossGrad", x, z, N=8192)
    for x, w, y in reversed(saved):
        d = f.emit("ReluGrad", y, d)
        d, _ = f.emit("MatMulGrad", x, w, d)
    return f.finalize()


def plain(program: CompiledProgram) -> Callable[[], list[float]]:
    """The same work in plain Python: visits every input of every op."""
    number: dict[Value, int] = {}
    for v in program.function.inputs:
        number[v] = len(number)
    rows: list[tuple[float, int, list[int], int]] = []
    for op, d, s in zip(program.function.ops, program.main.duration, program.main.stream, strict=True):
        rows.append((d, s, [number[v] for v in op.inputs], len(op.outputs)))
        for v in op.outputs:
            number[v] = len(number)

    def run() -> list[float]:
        clock = [0.0] * len(program.streams)
        ready = [0.0] * len(program.function.inputs)
        for d, s, ins, outs in rows:
            t = clock[s]
            for j in ins:
                if ready[j] > t:
                    t = ready[j]
            t += d
            clock[s] = t
            for _ in range(outs):
                ready.append(t)
        return clock

    return run


def pipeline(devices: list[Device], stages: int, microbatches: int, dp: int, tp: int, layers: int) -> Function:
    """1F1B over `stages` of `layers` tensor-parallel layers each: one call per stage, microbatch and direction."""
    meshes = [
        Mesh(devices[i * dp * tp : (i + 1) * dp * tp], {"mb": microbatches, "dp": dp, "tp": tp}, f"stage{i}")
        for i in range(stages)
    ]
    bodies = [_bodies(mesh, layers) for mesh in meshes]
    main = FunctionMaker("pipeline")
    weights = [main.add_input_value("w", bodies[i][0].inputs[0].type) for i in range(stages)]
    first = bodies[0][0].inputs[1].type
    ahead = {(0, k): main.add_input_value("x", first.at(k)) for k in range(microbatches)}
    back: dict[tuple[int, int], Value] = {}
    saved: dict[tuple[int, int], Value] = {}
    total: dict[int, Value] = {}

    def run(i: int, phase: str, k: int) -> bool:
        forward, start, more = bodies[i]
        if phase == "F" and (i, k) in ahead:
            y, saved[i, k] = main.add_op("Call", None, [weights[i], ahead.pop((i, k))], {"mb": k}, [forward])
            to, key = (ahead, (i + 1, k)) if i < stages - 1 else (back, (i, k))
            to[key] = main.emit("Send", y, to=meshes[i + 1]) if i < stages - 1 else y
        elif phase == "B" and (i, k) in back:
            operands = [weights[i], saved.pop((i, k)), back.pop((i, k))]
            operands += [total[i]] if i in total else []
            d, total[i] = main.add_op("Call", None, operands, {"mb": k}, [more if len(operands) > 3 else start])
            if i:
                back[i - 1, k] = main.emit("Send", d, to=meshes[i - 1])
        else:
            return False
        return True

    orders = [_one_forward_one_backward(stages - i - 1, microbatches) for i in range(stages)]
    while any(orders):
        for i, cells in enumerate(orders):
            if cells and run(i, *cells[-1]):
                cells.pop()
    main.set_outputs(total.values())
    return main.finalize()


def _one_forward_one_backward(warm: int, m: int) -> list[tuple[str, int]]:
    """A stage's order, last first."""
    warm = min(warm, m)
    cells = [("F", k) for k in range(warm)]
    for k in range(m - warm):
        cells += [("F", warm + k), ("B", k)]
    return (cells + [("B", k) for k in range(m - warm, m)])[::-1]


def _bodies(mesh: Mesh, layers: int) -> tuple[Function, Function, Function]:
    h, tokens = 12288, 2048 * mesh.sizes[0] * mesh.sizes[1]
    x = Tensor.whole(BFloat16(), (tokens, h), mesh, (Shard(0), Shard(0, mesh.sizes[0]), REPLICATE))
    pair = [Tensor.whole(BFloat16(), (h, 4 * h), mesh, (REPLICATE, REPLICATE, Shard(1)))]
    pair += [Tensor.whole(BFloat16(), (4 * h, h), mesh, (REPLICATE, REPLICATE, Shard(0)))]
    weights = Tuple(pair * 2 * layers)
    forward = FunctionMaker("forward")
    w, a = forward.emit("Unpack", forward.add_input_value("w", weights)), forward.add_input_value("x", x)
    saved: list[Value] = []
    for up, down in zip(w[::2], w[1::2], strict=True):
        for _ in range(8):
            a = forward.emit("Tanh", a)
        b = forward.emit("MatMul", a, up)
        c = forward.emit("Relu", b)
        saved += [a, b, c]
        a = forward.emit("Add", a, forward.emit("MPIAllreduce", forward.emit("MatMul", c, down), axis="tp"))
    residuals = forward.emit("Pack", *saved)
    forward.set_outputs([a, residuals])
    start, more = (_backward(x, weights, residuals.type, accumulate) for accumulate in (False, True))
    return forward.finalize(), start, more


def _backward(x: Tensor, weights: Tuple, residuals: Tuple, accumulate: bool) -> Function:
    f = FunctionMaker("backward")
    w, saved = f.add_input_value("w", weights), f.add_input_value("residuals", residuals)
    d, w, saved = f.add_input_value("d", x), f.emit("Unpack", w), f.emit("Unpack", saved)
    gradients: list[Value] = []
    for k in reversed(range(len(w) // 2)):
        a, b, c = saved[3 * k : 3 * k + 3]
        up, down = [f.emit("Transpose", v, perm=(1, 0)) for v in w[2 * k : 2 * k + 2]]
        db = f.emit("ReluGrad", b, f.emit("MatMul", d, down))
        gradients.insert(0, f.emit("MatMul", f.emit("Transpose", c, perm=(1, 0)), d))
        gradients.insert(0, f.emit("MatMul", f.emit("Transpose", a, perm=(1, 0)), db))
        e = f.emit("MPIAllreduce", f.emit("MatMul", db, up), axis="tp")
        for _ in range(8):
            e = f.emit("ReluGrad", a, e)
        d = f.emit("Add", d, e)
    total = f.emit("Pack", *gradients)
    if accumulate:
        before = Tuple([t.placed("mb", SUM, (0, NOW)) for t in total.type.types])
        total = f.emit("Accumulate", f.add_input_value("sum", before), total)
    f.set_outputs([d, total])
    return f.finalize()


def median(runs: int, what: Callable[[], object]) -> float:
    """CPU seconds, with the garbage collector off."""
    times: list[float] = []
    for _ in range(runs):
        gc.collect()
        gc.disable()
        start = time.process_time()
        what()
        times.append(time.process_time() - start)
        gc.enable()
    return statistics.median(times)


def loop(program: CompiledProgram) -> Run:
    """One run of a compiled program."""
    ready: list[float] = []
    return Run(program.main, ready, program.main.run([0.0] * len(program.streams), ready))


def flat(runs: int) -> dict[str, float]:
    """Ops per second on the flat program."""
    topology = Topology()
    function = mlp(topology.add_device("gpu", 1e14, 1.2e12, 0.0))
    cost, n = CostModel(topology), len(function.ops)
    program = CompiledProgram(function, cost)
    slow = plain(program)
    seconds = median(runs, lambda: loop(program))
    return {
        "ops": n,
        "loop": n / seconds,
        "compile and loop": n / median(runs, lambda: loop(CompiledProgram(function, cost))),
        "plain loop": n / median(runs, slow),
        "ratio to plain": median(runs, slow) / seconds,
    }


def replayed(runs: int, devices: int) -> dict[str, float]:
    """Op instances per second, and seconds of each part, at GPT-3's shapes: 16 stages, 512 microbatches, tp 8."""
    cluster = load_cluster("dgx-a100", devices=devices)
    function = pipeline(cluster.devices, 16, 512, devices // 128, 8, 6)
    program = CompiledProgram(function, CostModel(cluster))
    instances = sum(len(op.callee.ops) if op.callee else 1 for op in function.ops)
    run = loop(program)
    seconds = median(runs, lambda: loop(program))
    classes = range(len(program.classes.sizes))
    return {
        "devices": devices,
        "op instances": instances,
        "replay": instances / seconds,
        "compile": median(runs, lambda: CompiledProgram(function, CostModel(cluster))),
        "loop once": seconds,
        "busy": median(runs, lambda: busy_times(run, len(classes))),
        "memory": median(runs, lambda: list(map(LiveMemory(Lifetimes(program)).use, classes))),
    }


def main() -> None:
    flags = parser(__doc__.splitlines()[0] if __doc__ else None, 7)
    args = flags.parse_args()
    result = {
        "machine": machine(),
        "flat": flat(args.runs),
        "pipeline": [replayed(args.runs, n) for n in (1024, 65536)],
    }
    if as_json(args.json, result):
        return
    print(result["machine"])
    for row in (result["flat"], *result["pipeline"]):
        print()
        for name, value in row.items():
            goal = f"  (goal {GOALS[name]:,.0f})" if name in GOALS else ""
            figure = f"{value:,.3f}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"
            print(f"{name:18} {figure:>16} {UNITS.get(name, '')}{goal}".rstrip())


if __name__ == "__main__":
    main()
