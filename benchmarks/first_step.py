"""Benchmark of the time to the first step of GPT-2 (124M parameters) on two ranks.

    python benchmarks/first_step.py [--model FILE] [--batch N] [--runs N] [--json [FILE]]

Wall-clock seconds, medians: from the start of `distir run` with the loss cross-entropy and `--dp 2` until the plan is
printed, and until the first step is; of this step, and of the next one; and, alternating, of an interpreter that only
imports torch, which every such command must do. The ratio is that of the time to the first step to the latter. The
default model is the file that `python examples/export.py gpt2` writes; run this before.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from laps import as_json, machine, parser, table

MODEL = Path(__file__).parents[1] / "examples" / "gpt2.onnx"
FIRST = "first step printed"
TORCH = "python -c 'import torch'"
GOALS = {FIRST: 20.0}
_STEP = re.compile(r"^(\d+) +\S+ +([\d.]+) (\w+)$")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def seconds(model: Path, batch: int) -> dict[str, float]:
    """Seconds of the phases of one command, from the lines it printed."""
    flags = ["--dim", f"batch={batch}", "--loss", "cross-entropy", "--dp", "2", "--steps", "2"]
    found: dict[str, float] = {}
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "distir", "run", str(model), *flags], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            found.setdefault("plan printed", time.perf_counter() - begin)
            if (step := _STEP.match(line.strip())) is not None:
                if step[1] == "0":
                    found[FIRST] = time.perf_counter() - begin
                which = "  of that, the step itself" if step[1] == "0" else "the next step"
                found[which] = float(step[2]) * _UNITS[step[3]]
    if process.returncode:
        raise SystemExit(process.returncode)
    return found


def loading_torch() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def main() -> None:
    flags = parser(__doc__, 5)
    flags.add_argument("--model", type=Path, default=MODEL, metavar="FILE")
    flags.add_argument("--batch", type=int, default=2, metavar="N")
    args = flags.parse_args()
    if not args.model.exists():
        flags.error(f"there is no {args.model}: python examples/export.py gpt2 writes it")
    loading_torch()  # reads files for the first time
    runs: list[dict[str, float]] = []
    for _ in range(args.runs):
        runs.append(seconds(args.model, args.batch) | {TORCH: loading_torch()})
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    where, ratio = machine(), medians[FIRST] / medians[TORCH]
    if as_json(args.json, {"machine": where, "seconds": medians, "ratio": ratio, "goals": GOALS}):
        return
    print(f"{args.model.name}, wall-clock seconds, median of {args.runs}; {where}")
    rows = [[name, f"{found:.2f}", f"{GOALS[name]:.0f}" if name in GOALS else ""] for name, found in medians.items()]
    print(table(["", "seconds", "goal"], rows))
    print(f"{FIRST}: {ratio:.1f} times as long as torch takes to load")


if __name__ == "__main__":
    main()
