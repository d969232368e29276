"""The command line: a thin layer over `distir.api`. Results go to stdout, all else to stderr.

Every error is one line and, where there is one, a hint; the exit code says of which kind it is (`distir.ir.errors`).
Nothing here loads numpy, onnx, torch or networkx before a command runs.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TextIO

from distir import INTERRUPTED, end_interrupted
from distir.ir.errors import DistirError, ModelWarning


def console() -> NoReturn:
    """Run the command line of this process, and end it at once.

    Without that, with torch loaded, the interpreter looks for garbage for seconds before it ends, and a rank of
    torchrun's that was interrupted may be aborted in torch's own clean-up.
    """
    _open_streams()
    try:
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end_interrupted):
            signal.signal(signal.SIGINT, interrupt)
        code = main()
        for stream in (sys.stdout, sys.stderr):
            _say(stream, "")
    except KeyboardInterrupt:  # again, while the first is being dealt with
        code = INTERRUPTED
    os._exit(code)


def _open_streams() -> None:
    """What whoever started this process has closed leads nowhere: its number is not for the next file to be opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the least number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


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
    except BrokenPipeError:  # whoever read what is printed has enough
        return 0
    except Exception as e:
        if _interrupts:
            _complain("interrupted")
            return INTERRUPTED
        from distir.ir.files import no_room

        if (full := no_room(e, "the results")) is not None:  # files say so themselves: it is stdout that is full
            _complain(full.message)
            return full.exit_code
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

        _say(sys.stdout, json.dumps({"error": e.message, "hint": e.hint, "exit_code": e.exit_code}) + "\n")
    return e.exit_code


def _say(stream: TextIO, text: str) -> None:
    """Write all that there is to a stream; to nowhere, now and later, if it takes no more."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _note(others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Tell what distir warns of in a line; others' warnings as they do."""
    if not issubclass(category, ModelWarning):
        others(message, category, *where)
    elif os.environ.get("RANK", "0") == "0":
        print(f"distir: note: {message}", file=sys.stderr)


def _complain(message: str, hint: str | None = None) -> None:
    _say(sys.stdout, "")
    rank = os.environ.get("RANK", "0")  # torchrun's: all ranks say what is wrong, as each may be ended before it could
    said = f"distir: {'' if rank == '0' else f'rank {rank}: '}error: {message}\n"
    _say(sys.stderr, said + (f"hint: {hint}\n" if hint else ""))
