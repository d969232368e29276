"""The commands show, passes, opt and schedule: print programs and schedules."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from distir.api import Model, Plan
from distir.api.compilation import distribute
from distir.api.model import NO_LOSS
from distir.api.named_dims import named_cuts, named_dims
from distir.api.program_summary import summary_of
from distir.api.rewrites import rewritten
from distir.cli.commands import loss_of, model_of, plan_of
from distir.cli.output import Progress, print_json, print_program
from distir.ir import Device, verify
from distir.ir.errors import UsageError, did_you_mean
from distir.ir.files import written
from distir.ir.function import Function
from distir.transforms.parallel3d import source_of
from distir.transforms.passes import DISTRIBUTED, PASSES, SEQUENTIAL, PassContext, form_of, run_passes

IMPORTED, TRAINING, RANK = "import", "training", "rank"
"""States of a program before the first pass, and after the last."""


def show(args: argparse.Namespace) -> None:
    """`distir show`."""
    if args.messages:
        _messages(args)
        return
    planned = args.plan is not None or any(getattr(args, f.name) is not None for f in dataclasses.fields(Plan))
    of_rank = "--rank" if args.rank is not None else "--python" if args.python else None
    default = RANK if of_rank else PASSES[-1].name if planned else TRAINING if loss_of(args) else IMPORTED
    after = args.after or default
    states = [IMPORTED, TRAINING, *[p.name for p in PASSES], RANK]
    if after not in states:
        hint = did_you_mean(after, states, f"known are {', '.join(states)}")
        raise UsageError(f"--after: unknown pass {after!r}", hint)
    if after == TRAINING and not loss_of(args):
        raise UsageError("the training step needs a loss", "--loss cross-entropy, or mse")
    if of_rank and after != RANK:
        raise UsageError(f"{of_rank} shows a rank's program, not the program after {after}", f"--after {RANK}")
    if after == IMPORTED:
        args.loss = NO_LOSS
    with Progress("compiling"):
        model, plan = model_of(args, after), plan_of(args)
        shown = _python(model, plan, args.rank or 0) if args.python else _after(model, plan, after, args.rank or 0)
        changes = rewritten(_source(model, shown))
        summary = None if isinstance(shown, str) else summary_of(shown)
    if not args.json:
        for line in changes:  # on stderr: stdout has the program's text, which can be parsed
            print(line, file=sys.stderr)
    if isinstance(shown, str) or summary is None:
        print_json({"after": after, "python": shown, "rewrites": changes}) if args.json else print(shown, end="")
    else:
        if not args.json and not args.full:
            print("\n".join([f"# {line}" for line in summary.lines()]))
        fields = {"after": after, "summary": summary.to_json(), "rewrites": changes}
        _print_state(args, shown, fields, fold=not args.full)


def _messages(args: argparse.Namespace) -> None:
    """`distir show --messages`."""
    from distir.api.messages import messages, table

    given = {"--after": args.after, "--rank": args.rank, "--python": args.python or None}
    for flag, x in given.items():
        if x is not None:
            raise UsageError(f"--messages lists what all ranks send, and {flag} shows a program", "give one of them")
    with Progress("compiling"):
        found = messages(distribute(model_of(args), plan_of(args)))
    if args.json:
        print_json([m.to_json() for m in found])
    else:
        print("\n".join(table(found)))


def _source(model: Model, shown: Function | str) -> Function:
    """The rewritten sequential program from which the shown program was made."""
    if isinstance(shown, str) or form_of(model.function) != SEQUENTIAL:
        return model.function
    form = form_of(shown)
    return shown if form == SEQUENTIAL else source_of(shown, model.function)


def _print_state(args: argparse.Namespace, function: Function, fields: dict[str, Any], fold: bool = False) -> None:
    if not args.json:
        print_program(function, fold)
        return
    from distir.ir import pformat

    print_json({**fields, "program": pformat(function)})


def _python(model: Model, plan: Plan, rank: int) -> str:
    from distir.backends.lowering.engine import python_source

    return python_source(distribute(model, plan), rank)


def _after(model: Model, plan: Plan, name: str, rank: int) -> Function:
    """The model's program after a pass; after the last, the result of `distribute`."""
    if name in (IMPORTED, TRAINING):
        return model.function
    if name == PASSES[-1].name:
        return distribute(model, plan)
    if name == RANK:
        from distir.transforms.rank.rank_program import rank_program

        return rank_program(distribute(model, plan), rank).function
    names = [p.name for p in PASSES]
    names = names[: names.index(name) + 1] if name in names else [name]
    function = run_passes(model.function, names, _settings(model.function, plan))
    verify(function)
    return function


def _settings(function: Function, plan: Plan) -> PassContext:
    devices = [Device("cpu", i) for i in range(plan.size)]
    splits, cuts = named_dims(function, plan.split), named_cuts(function, plan)
    return PassContext(plan, devices, splits=splits, cuts=cuts)


def passes(args: argparse.Namespace) -> None:
    """`distir passes`."""
    rows = [
        {"pass": IMPORTED, "takes": "", "gives": SEQUENTIAL, "about": "the model as imported"},
        {
            "pass": TRAINING,
            "takes": SEQUENTIAL,
            "gives": SEQUENTIAL,
            "about": "with --loss: backward pass and optimizer",
        },
        *[{"pass": p.name, "takes": p.takes, "gives": p.gives, "about": p.about} for p in PASSES],
        {"pass": RANK, "takes": DISTRIBUTED, "gives": RANK, "about": "with --rank: the part of one rank"},
    ]
    if args.json:
        print_json(rows)
    else:
        widths = [max(len(row[key]) for row in rows) for key in ("pass", "takes", "gives")]
        head = {"pass": "pass", "takes": "takes", "gives": "gives", "about": "what it does"}
        for row in (head, *rows):
            cells = [row[key].ljust(w) for key, w in zip(("pass", "takes", "gives"), widths, strict=True)]
            print("  ".join([*cells, row["about"]]))


def opt(args: argparse.Namespace) -> None:
    """`distir opt`."""
    names = args.passes.split(",")
    with Progress("compiling"):
        model, plan = model_of(args), plan_of(args)
        function = run_passes(model.function, names, _settings(model.function, plan))
        verify(function)
    if args.output is None:
        _print_state(args, function, {"passes": names})
        return
    from distir.ir import pformat

    with written(args.output) as file:
        file.write_text(pformat(function) + "\n", encoding="utf-8")
    if args.json:
        print_json({"passes": names, "written": args.output})


def schedule(args: argparse.Namespace) -> None:
    """`distir schedule`."""
    from distir.transforms.pipeline.schedule import SCHEDULES, make_table
    from distir.transforms.pipeline.schedule_table import (
        cycles,
        format_csv,
        format_grid,
        format_table,
        in_flight,
        read_table,
        table_size,
    )

    if args.csv and args.json:
        raise UsageError("--csv and --json are mutually exclusive", "give one of them")
    found = (1, 1, 1)
    if args.schedule not in SCHEDULES and os.path.exists(args.schedule):
        found = table_size(read_table(args.schedule))
    ranks, microbatches, chunks = (
        x or y for x, y in zip((args.pp, args.microbatches, args.chunks), found, strict=True)
    )
    with Progress("checking the schedule"):
        table = make_table(args.schedule, ranks, microbatches, chunks, args.limit)
        steps, in_flight_by_rank = len(cycles(table)), in_flight(table)
    if args.csv:
        print(format_csv(table), end="")
        return
    if args.schedule == "interleaved" and chunks == 1:
        print("hint: with 1 chunk per rank, interleaved is 1f1b; give --chunks 2 or more", file=sys.stderr)
    idle = steps - 2 * microbatches * chunks
    if args.json:
        rows = [row.split() for row in format_table(table).splitlines()]
        print_json({"table": rows, "steps": steps, "idle_steps_per_rank": idle, "in_flight_by_rank": in_flight_by_rank})
        return
    print(format_grid(table))
    print(f"\nbubble: {idle} of {steps} steps per rank ({idle / steps:.1%}), if each cell takes one step")
    print(f"microbatches in flight, by rank: {' '.join(map(str, in_flight_by_rank))}")
