"""Benchmark of the startup of the command line and of a run's ranks.

    python benchmarks/startup.py [--runs N] [--json [FILE]]

Wall-clock seconds, medians, alternating: of the processes `distir --help` and an interpreter that does nothing; and
from a call of `run`, with a program on 8 devices, until the last of its 8 ranks on this machine has joined the process
group. `distir.backends.processes.launch` is imported before; the time includes the import of torch by the process that
the ranks are forked from.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import numpy as np
from laps import as_json, machine, parser, table

from distir.ir.device import Device, Mesh
from distir.ir.function import FunctionMaker
from distir.ir.type import Float32, Shard, Tensor
from distir.runtime.job import Job

COMMANDS = {"python -c pass": ["-c", "pass"], "distir --help": ["-m", "distir", "--help"]}
RANKS = 8
READY = f"{RANKS} ranks ready"
LOADED = "  of that, loading torch"
GOALS = {"distir --help": 0.3, READY: 2.0}


def seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def ready_seconds() -> tuple[float, float]:
    """Seconds until all ranks have joined, and, as part of these, until torch was loaded."""
    from distir.backends.processes.launch import run

    mesh = Mesh([Device("cpu", k) for k in range(RANKS)], {"dp": RANKS})
    f = FunctionMaker()
    x = f.add_input_value("x", Tensor.whole(Float32, (RANKS,), mesh, (Shard(0),)))
    f.set_outputs([f.emit("MPIAllgather", x, axis="dp")])
    main = f.finalize()
    result = run(Job(main, {0: np.zeros(RANKS, np.float32)}))
    return result.start_seconds, result.load_seconds


def main() -> None:
    flags = parser(__doc__, 11)
    args = flags.parse_args()
    times: dict[str, list[float]] = {name: [] for name in (*COMMANDS, READY, LOADED)}
    ready_seconds()  # imports, and reads files for the first time
    for _ in range(args.runs):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
        for name, found in zip((READY, LOADED), ready_seconds(), strict=True):
            times[name].append(found)
    medians = {name: statistics.median(found) for name, found in times.items()}
    where = machine()
    if as_json(args.json, {"machine": where, "seconds": medians, "goals": GOALS}):
        return
    print(f"wall-clock seconds, median of {args.runs}; {where}")
    rows = [
        [name, f"{median:.3f}", *([f"{GOALS[name]:.1f}", f"{median / GOALS[name]:.2f}"] if name in GOALS else ["", ""])]
        for name, median in medians.items()
    ]
    print(table(["", "seconds", "goal", "ratio"], rows))


if __name__ == "__main__":
    main()
