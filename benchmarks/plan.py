"""Benchmark of the search for plans: GPT-2 124M on 64 devices, Llama-3 8B on 64, Llama 70B on 1,024.

    python benchmarks/plan.py [--runs N] [--small] [--known] [--only NAME] [--runtime NAME]
                              [--json [FILE]] [--tables FILE]

Wall-clock seconds, as a search uses all cores: until a first plan that fits is known, and of loading and the whole
search, verifying the plans that are shown included; and CPU seconds of all processes; medians over the runs. Memory is
the most that was resident: of this process and, for each core, of the largest that it started. Goals, on 2 cores: a
first plan in 3 s; GPT-2 in 20 s, of at least 1,000 plans; Llama 70B in 60 s, of at least 5,000; less than 2 GB.

With --runtime the hosts and kernels of that software count, as in `distir plan --runtime`. With --known the models and
clusters are those of which others have published steps; --tables writes what `distir plan` prints for each.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from laps import as_json, machine, parser, table

from distir.api.compilation import cost_model
from distir.api.model import load
from distir.hardware import host_cores
from distir.search.plan_table import PlanTable
from distir.search.planning import plan
from distir.transforms.plan import Plan


class Task(NamedTuple):
    model: str
    batch: int
    gpus: int
    cluster: str = "dgx-h100"


TASKS = {
    "gpt2-124m": Task("gpt:layers=12,hidden=768,heads=12", 512, 64),
    "llama3-8b": Task("llama:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,seq=8192", 128, 64),
    "llama-70b": Task("llama:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256,seq=8192", 1024, 1024),
}
LLAMA_8B, LLAMA_70B = TASKS["llama3-8b"].model, TASKS["llama-70b"].model
GPT_175B = "gpt:layers=96,hidden=12288,heads=96,vocab=51200,seq=2048"
KNOWN = {
    "llama3-8b-8": Task(LLAMA_8B, 16, 8, "grand-teton-h100-96gb"),
    "llama3-8b-64": TASKS["llama3-8b"],
    "llama-70b-64": Task(LLAMA_70B, 128, 64),
    "llama-70b-256": Task(LLAMA_70B, 512, 256),
    "llama-70b-1024": TASKS["llama-70b"],
    "gpt3-175b-1024": Task(GPT_175B, 1536, 1024, "selene-a100"),
}
SMALL = {"tiny": Task("gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32", 8, 2)}


def cpu_seconds() -> float:
    """Of this process and of those that have ended."""
    return sum([sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)])


def resident_mib() -> float:
    """The most memory that was resident: of this process and, for each core, of the largest that has ended."""
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + host_cores() * child) / 1024


def measure(task: Task, runtime: str | None) -> tuple[float, float, PlanTable]:
    """Wall-clock and CPU seconds of loading and searching, and what was found."""
    begin, cpu = time.perf_counter(), cpu_seconds()
    model = load(task.model, {"batch": task.batch}, loss="cross-entropy", optimizer="adamw", precision="bf16")
    cost = cost_model(task.cluster, Plan(dp=task.gpus), runtime=runtime)
    found = plan(model, cost, task.gpus)
    return time.perf_counter() - begin, cpu_seconds() - cpu, found


def main() -> None:
    flags = parser(__doc__, runs=1)
    flags.add_argument("--small", action="store_true", help="a tiny model, to test the script")
    flags.add_argument("--known", action="store_true", help="models and clusters with published steps")
    flags.add_argument("--only", choices=sorted({*TASKS, *KNOWN}))
    flags.add_argument("--runtime", metavar="NAME", help="the software that launches the ops; default: none")
    flags.add_argument("--tables", metavar="FILE", help="write what `distir plan` prints")
    args = flags.parse_args()
    tasks = SMALL if args.small else KNOWN if args.known else TASKS
    if args.only is not None:
        tasks = {args.only: (TASKS | KNOWN)[args.only]}
    rows: list[dict[str, Any]] = []
    tables: list[str] = []
    for name, task in tasks.items():
        runs = [measure(task, args.runtime) for _ in range(args.runs)]
        found = runs[0][2]
        row = {
            "task": name,
            "devices": task.gpus,
            "plans": found.plans,
            "simulated": found.simulated,
            "first_s": statistics.median([x.first or 0.0 for _, _, x in runs]),
            "seconds": statistics.median([seconds for seconds, _, _ in runs]),
            "cpu_s": statistics.median([cpu for _, cpu, _ in runs]),
            "certain": sum([row.certain for row in found.rows]),
            "memory_mib": resident_mib(),
            "best": str(found.rows[0].plan),
            "step_ms": found.rows[0].seconds * 1e3,
        }
        rows.append(row)
        tables += [f"{task.model}, batch {task.batch}: searched for {found.elapsed:.0f} s", str(found), ""]
        if args.tables:
            Path(args.tables).write_text("\n".join(tables))
    if as_json(args.json, {"machine": machine(), "results": rows}):
        return
    print(machine())
    cells = [[f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    print(table(list(rows[0]), cells))


if __name__ == "__main__":
    main()
