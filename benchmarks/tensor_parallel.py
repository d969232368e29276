"""Benchmark of the search for tensor parallelism in a training step of GPT-2's width. Goal: 2 s for 96 layers.

    python benchmarks/tensor_parallel.py [--layers N ...] [--tp N] [--runs N] [--json [FILE]]

Times the search on the decomposed training step (CPU seconds, medians over the runs), and all of `place` (padding, the
batch over time, dp and the construction of the placed program). The search decides once for all equal layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from laps import as_json, machine, parser, table

from distir.ir import Device, Function, Mesh
from distir.ir.infer import forget
from distir.models.gpt import gpt
from distir.transforms.differentiation.training import training_step
from distir.transforms.plan import Plan
from distir.transforms.rewriting.decompose import decompose
from distir.transforms.roles import weights
from distir.transforms.sharding.graph import Graph
from distir.transforms.sharding.seeds import tensor_parallel
from distir.transforms.sharding.spread import SplitDims, padded, place

WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH, DP, MICROBATCHES = 768, 12, 50257, 1024, 64, 2, 4


def step(layers: int) -> Function:
    return decompose(training_step(gpt(layers, WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH), optimizer="adamw"))


def search(function: Function, tp: int) -> None:
    graph = Graph(function)
    tensor_parallel(graph, tp, [graph.index[v] for v in weights(function)])


def whole(function: Function, tp: int) -> None:
    axes = {"mb": MICROBATCHES, "dp": DP, "tp": tp}
    mesh = Mesh([Device("gpu", i) for i in range(DP * tp)], axes, "stage0")
    batch = [(i, v.role.batch) for i, v in enumerate(function.inputs) if v.role and v.role.batch is not None]
    dims = SplitDims(tuple(batch))
    sharding = Plan(DP, tp, microbatches=MICROBATCHES).sharding
    place(padded(function, dims, sharding), dims, sharding, mesh)


def seconds(run: Callable[[Function, int], None], layers: int, tp: int, runs: int) -> float:
    """The median over the runs, each with its own function, since analyses are cached with it."""
    laps: list[float] = []
    for _ in range(runs):
        function = step(layers)
        forget()
        begin = time.process_time()
        run(function, tp)
        laps.append(time.process_time() - begin)
    return statistics.median(laps)


def main() -> None:
    flags = parser(__doc__, 3)
    flags.add_argument("--layers", type=int, nargs="+", default=[12, 96])
    flags.add_argument("--tp", type=int, default=4)
    args = flags.parse_args()
    rows: list[dict[str, float]] = []
    for layers in args.layers:
        found, placed = (seconds(f, layers, args.tp, args.runs) for f in (search, whole))
        rows.append({"layers": layers, "ops": len(step(layers).ops), "search": found, "place": placed})
    if as_json(args.json, {"machine": machine(), "tp": args.tp, "seconds": rows}):
        return
    print(f"CPU seconds, tp {args.tp}; {machine()}\n")
    cells = [[str(r["layers"]), str(r["ops"]), f"{r['search']:.2f}", f"{r['place']:.2f}"] for r in rows]
    print(table(["layers", "ops", "search", "place"], cells))


if __name__ == "__main__":
    main()
