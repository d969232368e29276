"""The command plan."""

from __future__ import annotations

import argparse
from typing import Any

from distir.api import Model, Plan, load
from distir.api.compilation import cost_model
from distir.api.model import NO_LOSS, TEXT, Precision
from distir.cli.output import Progress, print_json
from distir.importer import symbolic_dims
from distir.ir.errors import InfeasibleError, UsageError
from distir.models.config_file import is_config
from distir.models.named import is_named, own_loss
from distir.search.best_first import Progressed
from distir.search.plan_table import PlanTable
from distir.search.planning import plan as search_plans
from distir.search.space import SETTINGS
from distir.transforms.differentiation.training import optimizer_named


def plan(args: argparse.Namespace) -> None:
    """`distir plan`."""
    fix = dict(args.fix)
    vary = SETTINGS if args.vary is None else tuple(args.vary)
    found: list[PlanTable] = []
    errors: list[InfeasibleError] = []
    with Progress("loading") as progress:
        model = _model(args)
        for gpus in args.gpus:
            progress.phase(f"simulating plans for {gpus} devices")

            def on_step(state: Progressed, left: int) -> None:
                best = state.fitting[:1]
                text = f", best {best[0].outcome.seconds:.4g} s" if best else ""
                progress.phase(f"{len(state.found)} plans simulated, {left:,} left{text}", len(state.found) + left)
                progress.advance(len(state.found) - 1)

            try:
                cost = cost_model(args.cluster, Plan(dp=gpus), runtime=args.runtime)
                search = {"top": args.top, "vary": vary, "fix": fix, "memory_reserve": args.memory_reserve}
                found.append(search_plans(model, cost, gpus, **search, on_step=on_step))
            except InfeasibleError as e:
                if len(args.gpus) == 1:
                    raise
                errors.append(InfeasibleError(f"on {gpus} devices {e.message}", e.hint))
            if found and found[-1].interrupted:
                break
    if not found:
        raise errors[0]
    _print(args, found, errors)
    if found[-1].interrupted:
        raise KeyboardInterrupt


def _print(args: argparse.Namespace, found: list[PlanTable], errors: list[InfeasibleError]) -> None:
    if args.json:
        rows = [table.to_json() for table in found]
        print_json(rows[0] if len(args.gpus) == 1 else rows)
        return
    print("\n\n".join([str(table) for table in found] + [e.message for e in errors]))


def _model(args: argparse.Namespace) -> Model:
    """The training step of the batch that is asked for."""
    dims: dict[str, int] = dict(args.dim)
    if is_named(args.model) or is_config(args.model) or args.model.endswith(TEXT):
        names = ("batch", "seq")
    else:
        free = symbolic_dims(args.model)
        names = (args.batch_dim or (free[0] if free else None), "seq")
    for name, flag, size in zip(names, ("--batch", "--seq"), (args.batch, args.seq), strict=True):
        if size is None:
            continue
        if name is None:
            raise UsageError(f"{args.model} has no symbolic dimension: its batch is fixed", "export it with one")
        if dims.setdefault(name, size) != size:
            raise UsageError(f"{flag} {size}, but --dim {name}={dims[name]}")
    loss = args.loss or own_loss(args.model) or "cross-entropy"
    if loss == NO_LOSS:
        raise UsageError("plans are of training steps", "leave --loss none out")
    settings: dict[str, Any] = {"clip_norm": args.clip_norm}
    optimizer = optimizer_named(args.optimizer, **settings)
    precision = Precision(args.dtype, args.grad_dtype or "fp32")
    return load(args.model, dims, loss=loss, optimizer=optimizer, batch=args.batch_dim, precision=precision)
