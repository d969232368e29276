"""The commands bench scaling and plot."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from distir.api import Model
from distir.api.metrics import Metrics
from distir.api.plot import plot as draw
from distir.api.scaling import HEADER, rows, to_json, weak_scaling
from distir.cli.commands import batch_dim, dims_of, model_of, options_of
from distir.cli.output import Progress, columns, print_json
from distir.cli.watching import run_callbacks
from distir.ir.errors import UsageError

_WIDTHS = (8, 6, 10, 15, 18, 18, 10, 9)


def scaling(args: argparse.Namespace) -> None:
    """`distir bench scaling`."""
    name, batch = _batch(args)
    others = [(d, size) for d, size in args.dim if d != name]
    with Progress("loading") as progress:

        def on_run(runs: list[Metrics]) -> None:
            if not args.json:
                if len(runs) == 1:
                    print(columns(HEADER, _WIDTHS))
                print(columns(rows(runs)[-1], _WIDTHS), flush=True)

        options = options_of(args)
        if options.steps is None and args.data is None:
            options = replace(options, steps=10)

        def model(n: int) -> Model:
            progress.phase(f"compiling for a batch of {n}")
            return model_of(argparse.Namespace(**{**vars(args), "dim": [*others, (name, n)], "batch": None}))

        watching = run_callbacks(None, replace(options, epochs=args.epochs), progress, prints=False)
        runs = weak_scaling(
            model,
            args.ranks,
            batch,
            options,
            data=args.data,
            cluster=args.cluster,
            on_run=on_run,
            **{f.name: getattr(watching, f.name) for f in fields(watching)},
        )
    if args.json:
        print_json(to_json(runs))
    elif args.metrics is not None:
        print(f"\nwritten to {args.metrics}; distir plot {args.metrics} -o FILE.pdf draws it")


def _batch(args: argparse.Namespace) -> tuple[str, int]:
    """The name of the batch dim, and the samples per rank that the flags give for it."""
    name = batch_dim(args)
    if name is None:
        raise UsageError(f"{args.model} has no symbolic dimension: its batch cannot grow with the ranks")
    size = dims_of(args).get(name)
    if size is None:
        raise UsageError(f"{args.model}: symbolic dimension is not given: {name}", "--batch 64, per rank")
    return name, size


def plot(args: argparse.Namespace) -> None:
    """`distir plot`."""
    draw(args.files, args.output)
    if args.json:
        print_json({"files": args.files, "figure": args.output})
    else:
        print(f"drawn: {args.output}")
