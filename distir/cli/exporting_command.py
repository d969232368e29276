"""The command export."""

from __future__ import annotations

import argparse

from distir.api.exporting import export as export_model
from distir.cli.commands import model_of, plan_of
from distir.cli.output import Progress, print_json


def export(args: argparse.Namespace) -> None:
    """`distir export`."""
    with Progress("compiling") as progress:
        model, plan = model_of(args), plan_of(args)

        def on_rank(rank: int, ranks: int) -> None:
            if rank == 0:
                progress.phase("writing ranks", ranks)
            progress.advance(rank)

        done = export_model(model, plan, args.output, args.format, args.cluster, args.nodes, on_rank)
    if args.json:
        print_json(done._asdict())
    else:
        print(done)
