"""The commands explain and diff."""

from __future__ import annotations

import argparse

from distir.api.explanation import diff as difference_of
from distir.api.explanation import explain as explain_step
from distir.api.plot import format_of, save
from distir.cli.commands import model_of, plan_of
from distir.cli.output import Progress, print_json
from distir.ir.files import check_writable
from distir.transforms.plan import Plan, load_plan


def explain(args: argparse.Namespace) -> None:
    """`distir explain`."""
    if args.plot is not None:
        format_of(args.plot)
        check_writable(args.plot)
    with Progress("loading") as progress:
        model, plan = model_of(args), plan_of(args)
        progress.phase("predicting")
        found = explain_step(model, plan, args.cluster, nodes=args.nodes, runtime=args.runtime, what_if=args.what_if)
        progress.phase("adding up")
        result = found.to_json() if args.json else str(found)
        if args.plot is not None:
            save(found.figure(), args.plot)
    if isinstance(result, dict):
        print_json(result | ({"figure": args.plot} if args.plot else {}))
    else:
        print("\n".join([result, *([f"drawn: {args.plot}"] if args.plot else [])]))


def diff(args: argparse.Namespace) -> None:
    """`distir diff`."""
    before, after = (Plan(**load_plan(path)) for path in (args.before, args.after))
    with Progress("loading") as progress:
        model = model_of(args)
        progress.phase("predicting")
        found = difference_of(model, before, after, args.cluster, nodes=args.nodes, runtime=args.runtime)
        result = found.to_json() if args.json else str(found)
    if isinstance(result, dict):
        print_json(result)
    else:
        print(result)
