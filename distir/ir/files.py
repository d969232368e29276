"""Files: written to a temporary name first, then renamed; clear errors for a full disk and for bad TOML."""

from __future__ import annotations

import errno
import os
import tempfile
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from distir.ir.errors import UsageError


def no_room(e: BaseException, what: str = "temporary files") -> UsageError | None:
    """The UsageError for an OSError of a full disk or quota; None for any other error."""
    if not isinstance(e, OSError) or e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    hint = f"TMPDIR names another folder than {tempfile.gettempdir()}" if what == "temporary files" else None
    return UsageError(f"cannot write {what}: {e.strerror}", hint)


@contextmanager
def temporary() -> Generator[None]:
    """While temporary files are written. Raises UsageError if there is no room for them."""
    try:
        yield
    except OSError as e:
        raise no_room(e) or e from None


def printable(text: str) -> str:
    """The text with what is no UTF-8, as names of files may have, as escapes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def check_writable(*paths: str | os.PathLike[str]) -> None:
    """Raises UsageError for a path at which no file can be written: a folder, something else that is no file, or one in
    no folder that takes it; and for two paths of one file."""
    targets: list[Path] = []
    for path in paths:
        target = Path(os.path.realpath(path))
        folder = Path(path).parent
        if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
            why = "it is a folder" if target.is_dir() else f"{folder} is no folder that can be written to"
            raise UsageError(f"cannot write {fspath(path) or repr('')}: {why}")
        _check_replaceable(target, path)
        if target in targets:
            raise UsageError(f"{fspath(path)} is to be written twice", "another name for one of the files")
        targets.append(target)


def _check_replaceable(target: Path, path: str | os.PathLike[str]) -> None:
    """Raises UsageError, which names `path`, if something else than a file is at `target`."""
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write {fspath(path)}: it is there and is no regular file")


@contextmanager
def written(path: str | os.PathLike[str]) -> Generator[Path]:
    """The path at which to write what is to be at `path`, in a folder of its own.

    When the context ends all files in that folder take their place beside `path`, its own last: it may refer to them.
    A symbolic link stays one, its target is written. Raises UsageError if `path`, or the place of another of the files,
    is something else than a file, or cannot be written.
    """
    target = Path(os.path.realpath(path))
    _check_replaceable(target, path)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            yield Path(folder, target.name)
            files = sorted(Path(folder).iterdir(), key=lambda f: (f.name == target.name, f.name))
            for file in files:  # all of them first: none is to be replaced if one cannot be
                _check_replaceable(target.parent / file.name, Path(path).parent / file.name)
            for file in files:
                os.replace(file, target.parent / file.name)
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror or e}") from None


def read_toml(path: str | PathLike[str], hint: str) -> dict[str, Any]:
    """What a TOML file holds. Raises UsageError for one that cannot be read, or, with the hint, is no TOML."""
    name = fspath(path)
    try:
        with open(name, "rb") as file:
            return tomllib.load(file)
    except OSError as e:
        raise UsageError(f"cannot read {name}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{name} is no TOML: {e}", hint) from e
