"""The command calibrate."""

from __future__ import annotations

import argparse

from distir.api.calibrate import calibrate as measure
from distir.cli.output import Progress, print_json


def calibrate(args: argparse.Namespace) -> None:
    """`distir calibrate`."""
    with Progress("starting") as progress:

        def on_phase(what: str, number: int, total: int) -> None:
            progress.phase(what, total)
            progress.advance(number - 1)

        found = measure(args.device, args.out, on_phase)
    if args.json:
        print_json(found.to_json())
    else:
        print(found)
