"""Run the commands in the README and the pages of `docs/`, and regenerate the outputs that the pages show.

    python -m tests.docs.console README.md docs/*.md

A block of kind `console` holds commands, each after `$ `, and what they print. A line `$ NAME="..."` sets a variable. A
command is `distir ...`, run in this process, optionally piped into a shell command. A block of kind `python` is run, in
one namespace per page; a block of kind `text` right after it is what it prints. A block of kind `bash` holds command
lines whose output is not shown (`shell`).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.backends.mpi import MPIRUN, SETTINGS

ROOT = Path(__file__).parent.parent.parent
LINKED = ("README.md", "benchmarks", "docs", "examples", "notebooks")
"""What commands read; they run in a folder that has links to these, so that nothing they write stays in the tree."""
NOT_RUN = ("pip", "jupyter", "pytest")
"""Commands that need the network or a browser, or run the tests themselves."""
PROGRAMS = {
    "distir": ("-m", "distir"),
    "torchrun": ("-m", "torch.distributed.run"),
    "python": (),
}
"""How this interpreter runs them."""


class Block(NamedTuple):
    """A fenced block: its kind, and the lines in it from `begin` to `end` (not included) of the page."""

    kind: str
    begin: int
    end: int


def blocks(lines: list[str]) -> Iterator[Block]:
    """All fenced blocks of a page."""
    fences = [k for k, line in enumerate(lines) if line.startswith("```")]
    for begin, end in zip(fences[::2], fences[1::2], strict=True):
        yield Block(lines[begin].removeprefix("```"), begin + 1, end)


def workspace(folder: Path) -> Path:
    """An empty folder, with what the pages' commands read."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    return folder


def commands(line: str) -> list[tuple[str, ...]]:
    """The commands of a line of shell, joined by `&&`: the words of each, those that are not run left out."""
    found: list[list[str]] = [[]]
    for word in shlex.split(line):
        if word == "&&":
            found.append([])
        else:
            found[-1].append(word)
    return [tuple(words) for words in found if words[0] not in NOT_RUN]


def in_this_process(words: tuple[str, ...]) -> bool:
    """Whether a command starts no processes: it can run here, in a moment."""
    program, command, *flags = words
    if program != "distir" or command == "bench":
        return False
    return command != "run" or ("--backend", "numpy") in pairwise(flags)


def shell(words: tuple[str, ...], folder: Path) -> None:
    """Run one command in a folder, in a process of its own. Raises AssertionError if it fails."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if words[0] == "mpirun":
        line = [MPIRUN or "mpirun", *[sys.executable if word == "python" else word for word in words[1:]]]
        env |= SETTINGS
    else:
        line = [sys.executable, *PROGRAMS[words[0]], *words[1:]]
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder, env=env, timeout=300)
    assert done.returncode == 0, f"{shlex.join(words)}: exit code {done.returncode}\n{done.stderr}"


@cache
def output_of(words: tuple[str, ...]) -> str:
    """What a `distir` command prints on stdout."""
    from distir.cli import main

    assert words[0] == "distir", f"{shlex.join(words)} is no command of distir"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words[1:])
    assert code == 0, f"{shlex.join(words)}: exit code {code}\n{err.getvalue()}"
    return out.getvalue()


def run(command: str) -> list[str]:
    """The lines that a command prints."""
    first, pipe, rest = command.partition(" | ")
    text = output_of(tuple(shlex.split(first)))
    if pipe:
        done = subprocess.run(["bash", "-c", rest], input=text, capture_output=True, text=True, timeout=300)
        assert not done.stderr, f"{command}: {done.stderr}"
        assert done.stdout, f"{command}: prints nothing"
        text = done.stdout
    return [line.rstrip() for line in text.rstrip("\n").split("\n")]


def session(lines: list[str], variables: dict[str, str]) -> list[str]:
    """A console block with what its commands print now. `variables` grows."""
    new: list[str] = []
    for line in lines:
        if not line.startswith("$ "):
            continue  # printed before
        new.append(line)
        command = line.removeprefix("$ ")
        if found := re.fullmatch(r'([A-Z]+)="(.*)"', command):
            variables[found[1]] = found[2]
        else:
            new += run(re.sub(r"\$([A-Z]+)", lambda m: variables[m[1]], command))
    return new


def regenerated(page: str) -> str:
    """A page with what its commands and its Python print now."""
    lines = page.split("\n")
    variables: dict[str, str] = {}
    names: dict[str, Any] = {}
    changes: list[tuple[Block, list[str]]] = []
    printed: list[str] | None = None
    before = -1
    for block in blocks(lines):
        body = lines[block.begin : block.end]
        if block.kind == "console":
            changes.append((block, session(body, variables)))
        elif block.kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n".join(body), "page", "exec"), names)
            printed, before = out.getvalue().rstrip("\n").split("\n"), block.end
        elif block.kind == "text" and printed is not None and block.begin - before <= 3:
            changes.append((block, printed))
            printed = None
    for block, new in reversed(changes):
        lines[block.begin : block.end] = new
    return "\n".join(lines)


if __name__ == "__main__":
    pages = [Path(name).absolute() for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(workspace(Path(folder)))
        for page in pages:
            page.write_text(regenerated(page.read_text()))
