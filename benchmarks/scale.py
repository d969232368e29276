"""Benchmark of planning and simulation at scale: GPT-3 175B, a prediction of it, and 200 plans of GPT-2 124M.

    python benchmarks/scale.py [--runs N] [--dp 8 512] [--microbatches 512] [--layers 96] [--json [FILE]]

GPT-3: 96 layers, hidden 12,288, 96 heads, sequence 2,048, vocabulary 51,200, bfloat16, AdamW; tp 8, pp 16. The total
has all phases but `validate` and the construction of the cluster, which are shown separately. GPT-2: 12 layers, hidden
768, sequence 1,024, on 64 devices, every (dp, tp, pp) with 9 numbers of microbatches, 1F1B and GPipe; plans share
cached analyses. CPU seconds, medians over the runs, with cold caches in each. Goals on a 2-core CPU: 1.5 s on 1,024
devices, within 20 % of that on 65,536; 20 s for the 200 plans.

The prediction has two phases, tp 8, pp 8, 64 microbatches, in the way of Megatron-LM: the step is built, checks
included; then it is predicted, first with its memory, then again with other constants. `command` is that of a shell,
start-up and all, but for the compilation of modules to bytecode. Goals: 50 ms for a prediction, 1 s for the command.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from laps import Laps, as_json, machine, medians, parser, table

from distir.api import distribute, load
from distir.api.compilation import simulated
from distir.api.stage_cost import stage_cost
from distir.executor.cost_model import CostModel
from distir.executor.simulator.simulation import Simulation, Simulator
from distir.hardware import load_cluster, load_runtime
from distir.ir import Function
from distir.ir.infer import forget
from distir.ir.type import BFloat16
from distir.ir.validate import validate
from distir.ir.verify import verify
from distir.models import gpt
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.parallel3d import parallel_transform_3d, source_of
from distir.transforms.plan import Plan

TP, PP = 8, 16
PLANS, DEVICES = 200, 64
CLUSTER, RUNTIME = "dgx-a100", "megatron"


def gpt3(dp: int, microbatches: int) -> tuple[dict[str, float], dict[str, float], Simulation]:
    """Seconds of the phases, of those not in the total, and the result. A replica's microbatch is one sequence."""
    forget()
    gc.collect()
    laps, apart = Laps(), Laps()
    cluster = load_cluster("dgx-a100", devices=dp * TP * PP)
    devices = cluster.devices[: dp * TP * PP]
    apart.lap("cluster")
    laps.start()
    model = gpt(96, 12288, 96, 51200, 2048, dp * microbatches, BFloat16)
    laps.lap("build")
    step = training_step(model, "cross-entropy", AdamW())
    laps.lap("training step")
    program = parallel_transform_3d(step, dp, TP, PP, devices, microbatches)
    laps.lap("transform")
    verify(program)
    laps.lap("verify")
    simulation = Simulator(CostModel(cluster)).interpret(program)
    laps.lap("simulate")
    apart.start()
    validate(program, source_of(program, step))
    apart.lap("validate")
    return laps.seconds, apart.seconds, simulation


def prediction(layers: int) -> dict[str, float]:
    """Seconds of the phases of a prediction of GPT-3's layers, and of the same as a command."""
    forget()
    gc.collect()
    laps = Laps()
    name, plan = f"gpt:layers={layers},hidden=12288,heads=96,seq=2048,batch=64", Plan(1, 8, 8, 64)
    model = load(name, loss="cross-entropy", optimizer="adamw", precision="bf16")
    cluster, runtime = load_cluster(CLUSTER, devices=plan.size), load_runtime(RUNTIME)
    cost = CostModel(cluster, runtime=runtime)
    program = distribute(model, plan, cluster.devices[: plan.size], cost=stage_cost(cost, plan))
    laps.lap("build")
    simulation = simulated(program, plan, cost)
    _ = simulation.seconds, max(simulation.peak_memory.values())
    laps.lap("first prediction")
    _ = simulated(program, plan, CostModel(cluster, runtime=runtime)).seconds
    laps.lap("next prediction")
    flags = ["--cluster", CLUSTER, "--runtime", RUNTIME, "--tp", "8", "--pp", "8", "--microbatches", "64"]
    flags += ["--loss", "cross-entropy", "--optimizer", "adamw", "--precision", "bf16"]
    return {**laps.seconds, "command": command(["simulate", name, *flags])}


def command(arguments: list[str]) -> float:
    """CPU seconds of a command of distir's, whose modules are compiled."""
    unset = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as compiled:
        for _ in range(2):  # the first compiles them
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, "-m", "distir", *arguments],
                check=True,
                stdout=subprocess.DEVNULL,
                env={**unset, "PYTHONPYCACHEPREFIX": compiled},
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def plans() -> list[tuple[int, int, int, int, str]]:
    """(dp, tp, pp, microbatches, schedule) on 64 devices."""
    found = [
        (DEVICES // tp // pp, tp, pp, 2**m, schedule)
        for m in range(9)
        for schedule in ("1f1b", "gpipe")
        for tp in (1, 2, 4)
        for pp in (1, 2, 4, 8)
    ]
    return found[:PLANS]


def gpt2() -> tuple[dict[str, float], int]:
    """Seconds of the phases over all plans, and the number of plans; the global batch is 16,384 sequences."""
    forget()
    gc.collect()
    cluster = load_cluster("dgx-a100", devices=DEVICES)
    devices = cluster.devices[:DEVICES]
    simulator = Simulator(CostModel(cluster))
    laps = Laps()
    model: Function = gpt(12, 768, 12, 50304, 1024, 16384)
    laps.lap("build")
    step = training_step(model, "cross-entropy", AdamW())
    laps.lap("training step")
    found = plans()
    for dp, tp, pp, microbatches, schedule in found:
        program = parallel_transform_3d(step, dp, tp, pp, devices, microbatches, schedule)
        laps.lap("transform")
        verify(program)
        laps.lap("verify")
        _ = simulator.interpret(program).seconds
        laps.lap("simulate")
    return laps.seconds, len(found)


def main() -> None:
    flags = parser(__doc__, 3)
    flags.add_argument("--dp", type=int, nargs="+", default=[8, 512])
    flags.add_argument("--microbatches", type=int, default=512)
    flags.add_argument("--layers", type=int, default=96, help="of the model that is predicted")
    flags.add_argument("--no-plans", action="store_true", help="skip the 200 plans of GPT-2")
    args = flags.parse_args()
    result: dict[str, Any] = {"machine": machine(), "GPT-3 175B": {}}
    for dp in args.dp:
        runs = [gpt3(dp, args.microbatches) for _ in range(args.runs)]
        laps, apart = medians([r[0] for r in runs]), medians([r[1] for r in runs])
        total = statistics.median(sum(r[0].values()) for r in runs)
        step = runs[0][2].seconds
        result["GPT-3 175B"][f"{dp * TP * PP} devices"] = {**laps, "total": total, **apart, "simulated step": step}
    result[f"prediction, {args.layers} layers"] = medians([prediction(args.layers) for _ in range(args.runs)])
    if not args.no_plans:
        several = [gpt2() for _ in range(args.runs)]
        laps = medians([laps for laps, _ in several])
        result[f"GPT-2 124M, {several[0][1]} plans"] = {**laps, "total": sum(laps.values())}
    if not as_json(args.json, result):
        print(shown(result, args.microbatches))


def shown(result: dict[str, Any], microbatches: int) -> str:
    """The result as text."""
    lines = [f"CPU seconds; {result['machine']}", ""]
    large = result["GPT-3 175B"]
    rows = [[phase, *(f"{column[phase]:.3f}" for column in large.values())] for phase in next(iter(large.values()))]
    lines.append(table([f"GPT-3 175B, tp {TP}, pp {PP}, {microbatches} microbatches", *large], rows))
    totals = [column["total"] for column in large.values()]
    lines.append(f"total: {', '.join(f'{t / totals[0]:.2f} x' for t in totals)}  (goals: 1.5 s, 1.20 x)")
    for name, laps in result.items():
        if isinstance(laps, dict) and laps is not large:
            goal = "goal: 20 s" if name.startswith("GPT-2") else "goals: 0.05 s a prediction, 1 s the command"
            lines += ["", table([name, "s"], [[phase, f"{s:.3f}"] for phase, s in laps.items()]), goal]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
