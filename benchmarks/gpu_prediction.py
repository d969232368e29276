"""Predicted against measured time and memory of training steps on one GPU: GPT-2 124M, a Llama of 1.1B parameters with
4,096 tokens, a ViT-B, in bf16 and float32 at three batch sizes each.

    python benchmarks/gpu_prediction.py --export FOLDER     on any machine: the training steps, as .distir files
    python benchmarks/gpu_prediction.py --measure FOLDER    on a GPU: their seconds and peaks of memory
    python benchmarks/gpu_prediction.py                     on any machine: compares with the predictions

Measured figures are in benchmarks/results/gpu_steps.json, the comparison is written to gpu_prediction.json there.
Predictions are for h200 and h100, files of `distir calibrate --device cuda` on such GPUs; `--cluster` names another for
all. Seconds are the median of steps that a CUDA graph launches, memory is the peak of what torch's allocator has handed
out, without what the process had before. Goals: a mean error of 8 % in seconds, of 5 % in memory. `--small` does all
three with tiny models on the CPU, and writes nothing. Needs the `dev` extra to export.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuda import CASES, LEARNING_RATE, PADDED
from laps import as_json, machine, parser, table

RESULTS = Path(__file__).parent / "results"
MEASURED, COMPARED = RESULTS / "gpu_steps.json", RESULTS / "gpu_prediction.json"
BATCHES = {"gpt2": (4, 8, 16), "llama": (1, 2, 4), "vit": (32, 64, 128)}
PRECISIONS = ("bf16", "fp32")
GOALS = {"seconds": 0.08, "memory": 0.05}
CLUSTERS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}
"""The cluster that was calibrated on a device."""
STEPS = {"bf16": 9, "fp32": 2}
"""How many steps are timed."""
Row = dict[str, Any]


def cases(small: bool) -> Iterator[tuple[str, int, str]]:
    """All models, batches and precisions; those with small batches first."""
    if small:  # many CPUs take seconds to multiply by a vocabulary in bf16
        yield from (("gpt2", 1, "fp32"), ("llama", 1, "fp32"), ("vit", 1, "bf16"), ("vit", 1, "fp32"))
        return
    for k in range(3):
        for precision in PRECISIONS:
            for name, batches in BATCHES.items():
                yield name, batches[k], precision


def file_of(folder: Path, name: str, batch: int, precision: str) -> Path:
    return folder / f"{name}-{batch}-{precision}.distir"


def export(folder: Path, small: bool) -> None:
    """Write all training steps there."""
    import distir

    folder.mkdir(parents=True, exist_ok=True)
    for name in BATCHES:
        module, example = CASES[name].build(*((1, 16) if small else (None, None)))
        models: dict[int, distir.Model] = {}
        for _, batch, precision in [case for case in cases(small) if case[0] == name]:
            if batch not in models:
                models[batch] = distir.load(module.eval(), example, {"batch": batch})
            optimizer = distir.AdamW(lr=LEARNING_RATE, weight_decay=0.01)
            step = models[batch].training("cross-entropy", optimizer, "logits", precision)
            file_of(folder, name, batch, precision).write_text(distir.pformat(step.function) + "\n")


def plan() -> Any:
    import distir

    return distir.Plan(pad_multiple=PADDED)


def measure(folder: Path, small: bool, device: str) -> Iterator[Row]:
    """The measured seconds and bytes of each training step."""
    import torch

    import distir
    from distir.api.calibration_runs import drawn
    from distir.backends.lowering.timing import time_step

    where = torch.cuda.get_device_name() if device == "cuda" else machine()
    for name, batch, precision in cases(small):
        model = distir.load(file_of(folder, name, batch, precision))
        steps = 1 if small else STEPS[precision]
        found = time_step(distir.distribute(model, plan()), drawn(model), steps, device)
        row = {"model": name, "batch": batch, "precision": precision, **found._asdict()}
        yield row | {"device": where, "torch": torch.__version__}
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def compare(folder: Path, rows: list[Row], cluster: str) -> Row:
    """The rows of one device with their predictions, and mean errors."""
    import distir

    for row in rows:
        model = distir.load(file_of(folder, row["model"], row["batch"], row["precision"]))
        found = distir.simulate(model, plan(), cluster)
        row |= {"predicted_seconds": found.step_seconds, "predicted_peak": found.allocated_memory}
        row["seconds_error"] = found.step_seconds / row["seconds"] - 1
        row["memory_error"] = found.allocated_memory / row["peak"] - 1 if row["peak"] else 0.0
    errors = {key: statistics.fmean([abs(row[f"{key}_error"]) for row in rows]) for key in GOALS}
    worst = {key: max([abs(row[f"{key}_error"]) for row in rows]) for key in GOALS}
    device = rows[0]["device"]
    return {"device": device, "cluster": cluster, "mean_error": errors, "worst": worst, "goals": GOALS, "rows": rows}


def shown(found: Row) -> str:
    lines = [
        (
            f"{row['model']} {row['precision']}, batch {row['batch']}",
            f"{row['seconds'] * 1e3:.2f} ms",
            f"{row['predicted_seconds'] * 1e3:.2f} ms",
            f"{row['seconds_error']:+.1%}",
            f"{row['peak'] / 2**30:.2f} GiB",
            f"{row['predicted_peak'] / 2**30:.2f} GiB",
            f"{row['memory_error']:+.1%}",
        )
        for row in sorted(found["rows"], key=lambda row: (row["model"], row["precision"], row["batch"]))
    ]
    head = "step", "measured", "predicted", "error", "memory", "predicted", "error"
    means = ", ".join(f"{key} {found['mean_error'][key]:.1%} (goal {GOALS[key]:.0%})" for key in GOALS)
    return f"{found['device']}, predicted for {found['cluster']}\n{table(head, lines)}\nmean error: {means}"


def main() -> None:
    flags = parser(__doc__, 1)
    flags.add_argument("--export", metavar="FOLDER", type=Path)
    flags.add_argument("--measure", metavar="FOLDER", type=Path)
    flags.add_argument("--programs", metavar="FOLDER", type=Path, help="of --export; default: they are exported anew")
    flags.add_argument("--cluster", help="default: the one that was calibrated on the device")
    flags.add_argument("--small", action="store_true", help="tiny models, on the CPU")
    args = flags.parse_args()
    if args.export is not None:
        export(args.export, args.small)
        return
    if args.measure is not None:
        import torch

        if not torch.cuda.is_available():
            flags.error("--measure needs a GPU, and there is none here")
        device = torch.cuda.get_device_name()
        rows = [row for row in json.loads(MEASURED.read_text()) if row["device"] != device]
        for row in measure(args.measure, args.small, "cuda"):
            rows.append(row)
            MEASURED.write_text(json.dumps(rows, indent=2) + "\n")
        return
    from distir.hardware import known_clusters

    if args.cluster is not None and args.cluster not in known_clusters() and not Path(args.cluster).is_file():
        flags.error(f"no cluster {args.cluster}: expected one of distir clusters, or a file")
    with tempfile.TemporaryDirectory() as folder:
        programs = args.programs or Path(folder)
        if args.programs is None:
            export(programs, args.small)
        rows = list(measure(programs, True, "cpu")) if args.small else json.loads(MEASURED.read_text())
        devices: dict[str, list[Row]] = {}
        for row in rows:
            devices.setdefault(row["device"], []).append(row)
        used = {name: args.cluster or CLUSTERS.get(name, "nebius-h200") for name in devices}
        found = [compare(programs, devices[name], cluster) for name, cluster in used.items()]
    if not args.small:
        COMPARED.write_text(json.dumps(found, indent=2) + "\n")
    if not as_json(args.json, found):
        print("\n\n".join(map(shown, found)))


if __name__ == "__main__":
    main()
