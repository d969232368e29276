"""The command plan."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

from distir.api import Model, Plan, load
from distir.api.compilation import cost_model
from distir.api.interop.conversion import emit
from distir.api.interop.plan_settings import TrainingSettings
from distir.api.metrics import finite
from distir.api.model import NO_LOSS, Precision
from distir.api.plot import format_of, save
from distir.cli.commands import batch_dim, dims_of, given_once, is_onnx
from distir.cli.other_tools import check_targets, training_settings, write_plans, written_lines
from distir.cli.output import Progress, print_json
from distir.ir.errors import DistirError, InfeasibleError, UsageError, counted
from distir.models.named import own_loss
from distir.search.best_first import Progressed
from distir.search.plan_report import plan_figure, save_report
from distir.search.plan_table import PlanTable
from distir.search.planning import plan as search_plans
from distir.transforms.differentiation.training import optimizer_named
from distir.viz.drawing import empty_figure


def plan(args: argparse.Namespace) -> None:
    """`distir plan`."""
    _check_files(args)
    fix: dict[str, Any] = given_once("--fix", args.fix)
    vary = None if args.vary is None else tuple(args.vary)
    found: list[PlanTable] = []
    errors: dict[int, InfeasibleError] = {}
    with Progress("loading") as progress:
        model = _model(args)
        for gpus in args.gpus:
            progress.phase(f"simulating plans for {gpus} devices")

            def on_step(state: Progressed, left: int) -> None:
                best = state.fitting[:1]
                text = f", best {best[0].outcome.seconds:.4g} s" if best else ""
                # how many of those that are left bounds exclude is not known before the end
                progress.phase(f"{counted(len(state.found), 'plan')} simulated, {left:,} left{text}")

            try:
                cost = cost_model(args.cluster, Plan(dp=gpus), runtime=args.runtime)
                search = {"top": args.top, "vary": vary, "fix": fix, "memory_reserve": args.memory_reserve}
                found.append(search_plans(model, cost, gpus, **search, on_step=on_step))
            except InfeasibleError as e:
                errors[gpus] = e
            if found and found[-1].interrupted:
                break
    if not found:
        raise next(iter(errors.values()))
    if not args.json:  # before files, of which one may fail
        failed = [f"{n} devices: {e.message}{f' ({e.hint})' if e.hint else ''}" for n, e in errors.items()]
        with suppress(BrokenPipeError):  # files are written though the reader has gone
            print("\n\n".join([str(table) for table in found] + failed), flush=True)
    try:
        with Progress("writing") as progress:
            files = _write(args, found, model, progress)
    except DistirError as e:
        e.result = finite(_json(args, found, errors, {}))
        raise
    if args.json:
        print_json(_json(args, found, errors, files))
    elif files:
        drawn = [f"{name} written to {files[name]}" for name in ("figure", "report") if name in files]
        print("\n".join(["", *written_lines(files.get("emitted", [])), *drawn]))
    if found[-1].interrupted:
        raise KeyboardInterrupt


def _json(
    args: argparse.Namespace, found: list[PlanTable], errors: dict[int, InfeasibleError], files: dict[str, Any]
) -> Any:
    """JSON of the answer: a list for several numbers of devices."""
    rows = [table.to_json() | files for table in found]
    rows += [{"devices": n, "plans": [], "error": e.message, "hint": e.hint} for n, e in errors.items()]
    return rows[0] if len(args.gpus) == 1 else rows


def _check_files(args: argparse.Namespace) -> None:
    """Raises UsageError, before the search, for files of the answer that cannot be written."""
    check_targets(args)
    if args.emit and len(args.gpus) > 1:
        raise UsageError("--emit writes one plan, --gpus asks for several", "one number of devices")
    if args.emit_rank > args.top:
        raise UsageError(f"--emit-rank {args.emit_rank}, but the table has {args.top} rows", "--top lists more")
    if args.plot is not None:
        format_of(args.plot)
    if args.plot is not None or args.report is not None:
        empty_figure(1, 1)  # whether there is matplotlib


def _write(args: argparse.Namespace, found: list[PlanTable], model: Model, progress: Progress) -> dict[str, Any]:
    """Write the files that are asked for; returns JSON of them. Raises InfeasibleError for a plan that a tool cannot
    express, UsageError for a rank that the table has not."""
    files: dict[str, Any] = {}
    if args.emit:
        rows = found[0].rows
        if args.emit_rank > len(rows):
            raise UsageError(f"--emit-rank {args.emit_rank}, but the table has {counted(len(rows), 'row')}")
        settings = training_settings(args, model, _precision(args))
        try:
            files["emitted"] = write_plans(args.emit, rows[args.emit_rank - 1].plan, settings)
        except InfeasibleError as e:
            able = next((k for k, row in enumerate(rows, 1) if _expressed(args, row.plan, settings)), None)
            if able is None:
                raise
            hint = f"--emit-rank {able}: the first row that can be expressed"
            raise InfeasibleError(e.message, "; or ".join([*([e.hint] if e.hint else []), hint])) from None
    if args.plot is not None or args.report is not None:
        progress.phase("explaining the best plan")
    if args.plot is not None:
        save(plan_figure(found), args.plot)
        files["figure"] = args.plot
    if args.report is not None:
        save_report(found, args.report)
        files["report"] = args.report
    return files


def _expressed(args: argparse.Namespace, plan: Plan, settings: TrainingSettings) -> bool:
    """Whether all tools of --emit can express the plan."""
    try:
        for tool, _ in args.emit:
            emit(plan, tool, settings)
    except InfeasibleError:
        return False
    return True


def _precision(args: argparse.Namespace) -> Precision:
    return Precision(args.precision, args.grad_dtype or "fp32")


def _model(args: argparse.Namespace) -> Model:
    """The training step of the batch that is asked for."""
    dims = dims_of(args)
    if args.batch is None and is_onnx(args.model) and (name := batch_dim(args)) is not None and name not in dims:
        raise UsageError(f"{args.model}: how many samples a step has is not given", "--batch 64")
    loss = args.loss or own_loss(args.model) or "cross-entropy"
    if loss == NO_LOSS:
        raise UsageError("plans are of training steps", "leave --loss none out")
    settings: dict[str, Any] = {"clip_norm": args.clip_norm}
    optimizer = optimizer_named(args.optimizer, **settings)
    return load(args.model, dims, loss=loss, optimizer=optimizer, batch=args.batch_dim, precision=_precision(args))
