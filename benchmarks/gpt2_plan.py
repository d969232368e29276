"""Benchmark of planning, from an ONNX file to a checked, predicted program: GPT-2 124M, on 128 and on 16,384 devices.

    python benchmarks/gpt2_plan.py [--model FILE] [--runs N] [--json [FILE]]

Exports the model first if there is no such file. CPU seconds by phase, medians over the runs. Goals: 5 s for the first
plan on a 2-core CPU, the second within 20 % of it, with as many lines in the printed program.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from laps import as_json, machine, parser

from distir.executor.cost_model import CostModel
from distir.executor.simulator.simulation import Simulator
from distir.hardware import load_cluster
from distir.importer import import_from_onnx
from distir.ir.infer import forget
from distir.ir.text import pformat
from distir.ir.validate import validate
from distir.ir.verify import verify
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.parallel3d import parallel_transform_3d, source_of

PLANS = ((8, 4, 4), (1024, 4, 4))
BATCH, MICROBATCHES = 32768, 32


def plan(model: Path, dp: int, tp: int, pp: int) -> tuple[dict[str, float], int]:
    """CPU seconds by phase, with cold caches, and the number of lines of the printed program."""
    forget()
    gc.collect()
    laps: dict[str, float] = {}
    begin = time.process_time()

    def lap(phase: str) -> None:
        nonlocal begin
        now = time.process_time()
        laps[phase] = now - begin
        begin = now

    function, _ = import_from_onnx(model, dims={"batch": BATCH})
    lap("import")
    step = training_step(function, "cross-entropy", AdamW())
    lap("training step")
    cluster = load_cluster("dgx-h100", devices=dp * tp * pp)
    devices = cluster.devices[: dp * tp * pp]
    lap("cluster")
    program = parallel_transform_3d(step, dp, tp, pp, devices, MICROBATCHES)
    lap("parallel_transform_3d")
    verify(program)
    lap("verify")
    validate(program, source_of(program, step))
    lap("validate")
    Simulator(CostModel(cluster)).interpret(program)
    lap("compile + simulate")
    return laps, pformat(program).count("\n")


def main() -> None:
    flags = parser(__doc__, 5)
    flags.add_argument("--model", type=Path)
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "gpt2.onnx"
        if not model.exists():
            export = Path(__file__).parent.parent / "examples" / "export.py"
            subprocess.run([sys.executable, export, "gpt2", "--out", model], check=True, stdout=sys.stderr)
        plan(model, *PLANS[0])  # modules are imported, files in memory
        rows = {p: [plan(model, *p) for _ in range(args.runs)] for p in PLANS}
    result = {
        "machine": machine(),
        "plans": [
            {
                "dp, tp, pp": p,
                "seconds": {k: statistics.median(laps[k] for laps, _ in runs) for k in runs[0][0]},
                "total": statistics.median(sum(laps.values()) for laps, _ in runs),
                "lines": runs[0][1],
            }
            for p, runs in rows.items()
        ],
    }
    if not as_json(args.json, result):
        print(table(result))


def table(result: dict) -> str:
    lines = [f"GPT-2 124M, global batch {BATCH}, {MICROBATCHES} microbatches; CPU seconds; {result['machine']}"]
    small, large = result["plans"]
    lines.append(f"{'':24}{'(8, 4, 4)':>12}{'(1024, 4, 4)':>14}")
    for phase in small["seconds"]:
        lines.append(f"{phase:24}{small['seconds'][phase]:12.3f}{large['seconds'][phase]:14.3f}")
    ratio = large["total"] / small["total"]
    lines.append(f"{'total':24}{small['total']:12.3f}{large['total']:14.3f}   {ratio:.2f} x")
    lines.append(f"{'lines printed':24}{small['lines']:12}{large['lines']:14}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
