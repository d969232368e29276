"""The command line: a thin layer over `distir.api`. Results go to stdout, all else to stderr.

Every error is one line and, where there is one, a hint; the exit code says of which kind it is (`distir.ir.errors`).
Nothing here loads numpy, onnx, torch or networkx before a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from distir.ir.errors import DistirError

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code."""
    from distir.cli.flags import parse

    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        args.command(args)
        sys.stdout.flush()
    except DistirError as e:
        _complain(e.message, e.hint)
        return e.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:  # an error of distir's own
        if os.environ.get("DISTIR_TRACEBACK"):
            raise
        lines = str(e).strip().splitlines() or [""]
        _complain(f"internal error: {type(e).__name__}: {lines[0]}", "--traceback shows where")
        return 1
    return 0


def _complain(message: str, hint: str | None = None) -> None:
    sys.stdout.flush()
    print(f"distir: error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
