"""The command line: a thin layer over `distir.api`. Results go to stdout, all else to stderr.

Every error is one line and, where there is one, a hint; the exit code says of which kind it is (`distir.ir.errors`).
Nothing here loads numpy, onnx, torch or networkx before a command runs.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from distir.ir.errors import DistirError, ModelWarning, UsageError

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def console() -> NoReturn:
    """Run the command line of this process, and end it at once.

    Without that, with torch loaded, the interpreter looks for garbage for seconds before it ends, and a rank of
    torchrun's that was interrupted may be aborted in torch's own clean-up.
    """
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except KeyboardInterrupt:  # again, while the first is being dealt with
        code = INTERRUPTED
    os._exit(code)


_interrupts: list[int] = []
"""The signals of Ctrl-C that came."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and remember it: a library that is just being loaded may make another error of it."""
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code."""
    try:
        from distir.cli.flags import parse

        args = parse(sys.argv[1:] if argv is None else argv)
        with warnings.catch_warnings():
            warnings.showwarning = partial(_note, warnings.showwarning)
            args.command(args)
        sys.stdout.flush()
    except DistirError as e:
        _complain(e.message, e.hint)
        return _told(e, argv)
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has enough
        _discard_stdout()
        return 0
    except Exception as e:
        if _interrupts:
            _complain("interrupted")
            return INTERRUPTED
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:  # files say so themselves: it is stdout that is full
            _discard_stdout()
            _complain(f"cannot write the results: {e.strerror}")
            return UsageError.exit_code
        # an error of distir's own
        if os.environ.get("DISTIR_TRACEBACK"):
            raise
        lines = str(e).strip().splitlines() or [""]
        _complain(f"internal error: {type(e).__name__}: {lines[0]}", "--traceback shows where")
        return 1
    return 0


def _told(e: DistirError, argv: Sequence[str] | None) -> int:
    """The exit code of an error, which with `--json` stands on stdout too; under torchrun rank 0's only."""
    if "--json" in (sys.argv[1:] if argv is None else argv) and os.environ.get("RANK", "0") == "0":
        import json

        print(json.dumps({"error": e.message, "hint": e.hint, "exit_code": e.exit_code}))
    return e.exit_code


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _note(others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Tell what distir warns of in a line; others' warnings as they do."""
    if not issubclass(category, ModelWarning):
        others(message, category, *where)
    elif os.environ.get("RANK", "0") == "0":
        print(f"distir: note: {message}", file=sys.stderr)


def _complain(message: str, hint: str | None = None) -> None:
    sys.stdout.flush()
    rank = os.environ.get("RANK", "0")  # torchrun's: all ranks say what is wrong, as each may be ended before it could
    print(f"distir: {'' if rank == '0' else f'rank {rank}: '}error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
