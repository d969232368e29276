"""The command line, on top of `distir.api`. Results go to stdout, everything else to stderr.

An error prints one line and possibly a hint; the exit code gives its kind (`distir.ir.errors`). numpy, onnx, torch and
networkx are not loaded before a command runs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TextIO

from distir import INTERRUPTED, end_interrupted
from distir.ir.errors import DistirError, ModelWarning
from distir.ir.pause import no_collection
from distir.runtime.launcher import MPIRUN, launched, this_rank

_RANK_0_FIRST_SECONDS = 1.0
"""How long ranks of mpirun other than 0 wait before they print an error, which is mostly that of rank 0."""


def console() -> NoReturn:
    """Run the command line, and exit without the interpreter's clean-up.

    With torch loaded, garbage collection at exit takes seconds, and an interrupted rank of torchrun may be aborted in
    torch's clean-up.
    """
    _open_streams()
    try:
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end_interrupted):
            signal.signal(signal.SIGINT, interrupt)
        code = main()
        for stream in (sys.stdout, sys.stderr):
            _write(stream, "")
        if code == 0 and (mpi := sys.modules.get("distir.backends.transport.mpi")) is not None:
            mpi.finish()  # this process leaves without running exit functions
    except KeyboardInterrupt:  # a second one, while the first is handled
        code = INTERRUPTED
    os._exit(code)


def _open_streams() -> None:
    """Redirect closed standard streams to /dev/null, so that the next file opened does not get their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


_INTERRUPTED = "interrupted"
_interrupts: list[int] = []
"""The SIGINTs received."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and record it: a library that is being loaded may turn it into another exception."""
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    try:
        with no_collection():  # modules make objects that live on
            from distir.cli.flags import parse

            args = parse(sys.argv[1:] if argv is None else argv)
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            code = args.command(args)
        sys.stdout.flush()
    except DistirError as e:
        _print_error(e.message, e.hint)
        return _said(argv, e.exit_code, e.message, e.hint, e.result)
    except KeyboardInterrupt:
        _print_error(_INTERRUPTED)
        return _said(argv, INTERRUPTED, _INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has closed it
        return 0
    except Exception as e:
        if _interrupts:
            _print_error(_INTERRUPTED)
            return _said(argv, INTERRUPTED, _INTERRUPTED)
        from distir.ir.files import no_room

        if (
            full := no_room(e, "the results")
        ) is not None:  # errors of files are reported where they are written: this one is stdout's
            _print_error(full.message)
            return full.exit_code
        # a bug in distir
        if os.environ.get("DISTIR_TRACEBACK"):
            raise
        lines = str(e).strip().splitlines() or [""]
        message, hint = f"internal error: {type(e).__name__}: {lines[0]}", "--traceback shows where"
        _print_error(message, hint)
        return _said(argv, 1, message, hint)
    return code or 0


def _said(argv: Sequence[str] | None, code: int, message: str, hint: str | None = None, result: object = None) -> int:
    """The exit code of an error; with `--json` also prints the error to stdout (of several ranks only rank 0)."""
    if "--json" in (sys.argv[1:] if argv is None else argv) and this_rank() == 0:
        import json

        said = {"error": message, "hint": hint, "exit_code": code}
        found = {} if result is None else {"result": result}
        _write(sys.stdout, json.dumps(said | found) + "\n")
    return code


def _write(stream: TextIO, text: str) -> None:
    """Write to a stream and flush it; if that fails, redirect it to /dev/null."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show_warning(others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Print distir's own warnings as one line; pass others on."""
    if not issubclass(category, ModelWarning):
        others(message, category, *where)
    elif this_rank() == 0:
        print(f"distir: note: {message}", file=sys.stderr)


def _print_error(message: str, hint: str | None = None) -> None:
    _write(sys.stdout, "")
    rank = this_rank()  # under torchrun every rank prints: rank 0 may be killed first
    if rank and (found := launched()) is not None and found.by == MPIRUN:
        time.sleep(_RANK_0_FIRST_SECONDS)  # mpirun ends this process if rank 0 fails, too, and prints its error
    line = message.replace("\n", "\\n")  # as in the name of a file
    text = f"distir: {f'rank {rank}: ' if rank else ''}error: {line}\n"
    _write(sys.stderr, text + (f"hint: {hint}\n" if hint else ""))
