"""Measure the models of `published_models` as exported by torch, and write the table in `docs/models.md`.

    python -m tests.importer.model_table                    all models: an hour
    python -m tests.importer.model_table --only GPT-2 T5    some of them; the other rows stay as they are
    python -m tests.importer.model_table --only             none: only write the table again
    python -m tests.importer.model_table --no-gloo ...      without the runs on gloo, whose results stay as they are

Both exports of each model, with the exporter's optimizer and without, are measured in a process of their own, and kept
in `model_table.json` beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import distir
from distir.api.model import Model, load
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.errors import DistirError
from distir.ir.files import written
from distir.transforms.differentiation.training import training_step
from tests.importer.published_models import CASES, B, Case, built, exported

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("model_table.json")
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table of models: tests/importer/model_table.py -->", "<!-- end of the table -->"
PLANS = {
    "dp": distir.Plan(dp=2),
    "tp": distir.Plan(tp=2),
    "pp": distir.Plan(pp=2, microbatches=2),
    "ZeRO": distir.Plan(dp=2, zero=3),
}
"""Compared with the sequential program in float64."""
GLOO = ("dp", "tp", "pp")
"""The plans that run on gloo, too."""
FORWARD, GRADIENTS = 1e-4, 1e-4
"""The largest errors allowed: of outputs in float32, of gradients in float64 of a module that computes parts in 32."""
EXPORTS = {False: "raw", True: "optimized"}
SECONDS = 2400
"""Time limit for one export of one model."""
LIMIT = 600.0
"""Seconds in which a run must start, and its ranks answer: a busy machine starts processes slowly."""


class Gradients(NamedTuple):
    """Of how many of the module's parameters gradients were compared, of how many, and the largest error."""

    error: float
    compared: int
    of: int


def forward_error(case: Case, model: Model, path: Path, arrays: Mapping[str, np.ndarray]) -> float:
    """The largest difference of the first output from onnxruntime's, relative to the largest element."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    want = np.asarray(onnxruntime.InferenceSession(path, options).run(None, {k: arrays[k] for k in case.inputs})[0])
    given = {v: model.arrays[v] if v in model.arrays else arrays[v.name] for v in model.function.inputs}
    got = SequentialExecutor().compute(model.function, given)[0]
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())


def gradients_error(case: Case, model: Model, arrays: Mapping[str, np.ndarray]) -> Gradients:
    """The largest error of a parameter's gradient against autograd, in float64, relative to its norm, or to a
    thousandth of the norm of all gradients where that is larger: some are zero but for rounding.

    An initializer is the parameter of its name, or one that the exporter may have transposed or reshaped: both have the
    same random numbers, which say what became of which. Where there are several copies, their gradients are added.
    """
    want = autograd(case, arrays)
    function = training_step(model.function, case.loss, "sgd", gradients=True)
    updated = set(function.updates.values())
    trained = [v for v in function.inputs if v in updated and v.kind == "parameter"]
    given = {v: np.asarray(model.arrays[v] if v in model.arrays else arrays[v.name]) for v in function.inputs}
    results = SequentialExecutor().compute(function, given)[1 : 1 + len(trained)]
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    keys = {key(x): name for name, (x, _) in want.items()}
    for v, gradient in zip(trained, results, strict=True):
        numbers = key(given[v])  # folded ones may keep their name
        name = v.name if v.name in want and key(want[v.name][0]) == numbers else keys.get(numbers)
        if name is not None:
            found.setdefault(name, []).append((given[v], gradient))
    whole = float(np.sqrt(sum(np.sum(g**2) for _, g in want.values())))
    errors: list[float] = []
    for name, copies in found.items():
        x, g = want[name]
        if all(np.array_equal(copy, x) for copy, _ in copies):
            got = sum((part for _, part in copies), np.zeros(()))
        else:
            got, g = sum((by_number(*copy) for copy in copies), np.zeros(())), by_number(x, g)
        errors.append(float(np.linalg.norm(got - g) / max(np.linalg.norm(g), 1e-3 * whole)))
    return Gradients(float(np.max(errors, initial=0.0)), len(found), len(want))  # nan, where one is


def key(x: np.ndarray) -> bytes:
    """The numbers of an array, whatever their order and shape."""
    return np.sort(x.astype(np.float32), axis=None).tobytes()


def by_number(x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """The gradient of each different number in `x`, ascending: an order that transposing `x` does not change."""
    _, position = np.unique(x.astype(np.float32), return_inverse=True)
    return np.bincount(position.ravel(), gradient.ravel())


def autograd(case: Case, arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each parameter that the loss depends on its numbers and, in float64, its gradient."""
    import torch

    module = case.module.double()
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in case.inputs.items()}
    out = module(**inputs)
    if case.loss == "mse":
        loss = torch.nn.functional.mse_loss(out, torch.as_tensor(arrays["target"]).double())
    else:
        labels = torch.as_tensor(arrays["labels"]).flatten()
        loss = torch.nn.functional.cross_entropy(out.flatten(0, -2), labels)
    loss.backward()
    rows = {name: p for name, p in module.named_parameters() if p.grad is not None}
    return {name: (p.detach().float().numpy(), p.grad.numpy()) for name, p in rows.items()}  # type: ignore[union-attr]


def data_of(case: Case, model: Model) -> dict[str, np.ndarray]:
    """The inputs of the example, and labels."""
    arrays = {name: x.numpy() for name, x in case.inputs.items()}
    shape = model.function.outputs[0].type.global_shape  # type: ignore[union-attr]
    rng = np.random.default_rng(0)
    if case.loss == "mse":
        return {**arrays, "target": rng.standard_normal(shape)}
    return {**arrays, "labels": rng.integers(0, shape[-1], shape[:-1])}


def holds(step: Model, plan: distir.Plan, backend: str, data: Mapping[str, np.ndarray]) -> tuple[str, Any]:
    """("", the result) if a step under the plan equals the sequential one, else (the reason, None)."""
    try:
        done = distir.run(step, plan, steps=1, backend=backend, check=True, data=data, timeout=LIMIT)
    except DistirError as e:
        return f"{type(e).__name__}: {e.message.splitlines()[0]}", None
    assert done.check is not None
    return ("", done) if done.check.ok else (done.check.verdict, None)


def measure(name: str, optimize: bool, gloo: bool, path: Path) -> dict[str, Any]:
    """The row of an export: what is not reached is left out, and `refused` says why."""
    case = built(name)
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in case.module.parameters())}
    try:
        exported(case.module, case.inputs, path, optimize)
    except Exception as e:  # torch's exporter raises all kinds
        return {**row, "refused": f"torch's exporter: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}"}
    try:
        model = load(path, {"batch": B})
        data = data_of(case, model)
        row["forward"] = forward_error(case, model, path, data)
        row["gradients"] = gradients_error(case, load(path, {"batch": B}, dtype="float64"), data)._asdict()
        step = load(path, {"batch": B}, loss=case.loss, dtype="float64")
    except DistirError as e:
        return {**row, "refused": e.message.splitlines()[0].replace(f"{path}: ", "")}
    for backend, plans in (("numpy", tuple(PLANS)), ("gloo", GLOO if gloo else ())):
        for plan in plans:
            reason, done = holds(step, PLANS[plan], backend, data)
            row.setdefault(backend, {})[plan] = reason
            if plan == "tp" and backend == "numpy" and done is not None:
                row["tp_flops"] = done.prediction.summary.split.flops
    return row


def in_process(name: str, optimize: bool, gloo: bool) -> dict[str, Any]:
    """`measure` in a process of its own: torch's exporter keeps memory, and may hang."""
    flags = ["--one", name, EXPORTS[optimize], *([] if gloo else ["--no-gloo"])]
    command = [sys.executable, "-m", "tests.importer.model_table", *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"refused": f"not done after {SECONDS} s"}
    if done.returncode:
        return {"refused": f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"}
    return json.loads(done.stdout.splitlines()[-1])


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table of these results in Markdown, models in the order of `CASES`."""
    head = "| model | export | parameters | forward | gradients | float64 | gloo | FLOPs tp splits |"
    lines = [head, "|---|---|--:|--:|--:|---|---|--:|"]
    for name in CASES:
        for kind in EXPORTS.values():
            row = results.get(name, {}).get(kind)
            if row is not None:
                lines.append(f"| {name} | {kind} | {' | '.join(cells(row))} |")
    return lines


def cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a row after the model and the export."""
    gradients = row.get("gradients")
    errors = [f"{row['forward']:.0e}" if "forward" in row else "", ""]
    if gradients:
        part = "" if gradients["compared"] == gradients["of"] else f" ({gradients['compared']} of {gradients['of']})"
        errors[1] = f"{gradients['error']:.0e}{part}"
    if "refused" in row:
        return [f"{row.get('parameters', 0):,}", *errors, row["refused"].replace("|", "/"), "", ""]
    plans = [", ".join(p for p in PLANS if row.get(b, {}).get(p) == "") for b in ("numpy", "gloo")]
    share = f"{row['tp_flops']:.1%}" if "tp_flops" in row else ""
    return [f"{row['parameters']:,}", *errors, *plans, share]


def write(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the results, and the table on the page between its marks."""
    texts = {RESULTS: json.dumps(results, indent=1, sort_keys=True) + "\n"}
    texts[PAGE] = with_table(PAGE.read_text(encoding="utf-8"), table(results))
    for path, text in texts.items():
        with written(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def with_table(page: str, lines: Sequence[str]) -> str:
    """The page with these lines between the marks."""
    before, rest = page.split(BEGIN)
    return "\n".join([before + BEGIN, "", *lines, "", END + rest.split(END)[1]])


def read() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=[*CASES], metavar="MODEL")
    parser.add_argument("--no-gloo", action="store_true", help="leave out the runs on gloo")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "EXPORT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        name, kind = options.one
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(name, kind == "optimized", not options.no_gloo, Path(folder, "model.onnx"))))
        return 0
    for name in options.only:
        for optimize, kind in EXPORTS.items():
            begin = time.monotonic()
            row = in_process(name, optimize, not options.no_gloo)
            results = read()
            before = results.get(name, {}).get(kind, {})
            if options.no_gloo and "gloo" in before:
                row["gloo"] = before["gloo"]
            results.setdefault(name, {})[kind] = row
            write(results)
            print(f"{name}, {kind}: {' | '.join(cells(row))} ({time.monotonic() - begin:.0f} s)", file=sys.stderr)
    write(read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
