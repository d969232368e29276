"""The command inspect."""

from __future__ import annotations

import argparse

from distir.api.inspection import inspect as inspect_model
from distir.api.results import listed
from distir.cli.commands import dims_of
from distir.cli.output import Progress, print_json
from distir.ir.errors import ModelError


def inspect(args: argparse.Namespace) -> int:
    """`distir inspect`; returns the exit code. Raises ModelError, once all is printed, if something is not supported:
    JSON says that itself."""
    with Progress("inspecting"):
        found = inspect_model(args.model, dims_of(args), batch=args.batch_dim, loss=args.loss)
    if args.json:
        print_json(found.to_json())
        return 0 if found.ok else ModelError.exit_code
    print(found)
    if not found.ok:
        names = [f"{u.op} ({u.count:,})" for u in found.unsupported]
        by_size = found.assumed and any(u.is_node and not u.reason.startswith("op ") for u in found.unsupported)
        hint = f"some may only be due to the sizes assumed: give {found.needed()}" if by_size else None
        raise ModelError(f"{args.model}: not supported: {listed(names)}", hint)
    return 0
