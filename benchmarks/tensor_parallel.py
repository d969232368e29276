"""Finding tensor parallelism in a training step of GPT-2's width, by depth: the goal is 2 s for 96 layers.

    python benchmarks/tensor_parallel.py [--layers N ...] [--tp N] [--runs N]

Times the search on the decomposed training step (CPU seconds, medians over the runs), and all of `place` (padding,
the batch over time, dp and the construction of the placed program). The search decides alike layers once.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from distir.ir import Device, Function, Mesh
from distir.ir.infer import forget
from distir.models.gpt import gpt
from distir.transforms.decompose import decompose
from distir.transforms.graph import Graph
from distir.transforms.roles import weights
from distir.transforms.seeds import tensor_parallel
from distir.transforms.spread import place
from distir.transforms.training import training_step

WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH, DP, MICROBATCHES = 768, 12, 50257, 1024, 64, 2, 4


def step(layers: int) -> Function:
    return decompose(training_step(gpt(layers, WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH), optimizer="adamw"))


def search(function: Function, tp: int) -> None:
    graph = Graph(function)
    tensor_parallel(graph, tp, [graph.index[v] for v in weights(function)])


def whole(function: Function, tp: int) -> None:
    axes = {"mb": MICROBATCHES, "dp": DP, "tp": tp}
    mesh = Mesh([Device("gpu", i) for i in range(DP * tp)], axes, "stage0")
    batch = {i: v.role.batch for i, v in enumerate(function.inputs) if v.role and v.role.batch is not None}
    place(function, batch, DP, tp, mesh)


def seconds(run: Callable[..., Any], *args: Any, runs: int) -> float:
    laps: list[float] = []
    for _ in range(runs):
        forget()
        begin = time.process_time()
        run(*args)
        laps.append(time.process_time() - begin)
    return statistics.median(laps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}; tp {args.tp}")
    print(f"{'layers':>6} {'ops':>7} {'search':>9} {'place':>9}")
    for layers in args.layers:
        function = step(layers)
        found, placed = (seconds(f, function, args.tp, runs=args.runs) for f in (search, whole))
        print(f"{layers:6} {len(function.ops):7} {found:7.2f} s {placed:7.2f} s")


if __name__ == "__main__":
    main()
