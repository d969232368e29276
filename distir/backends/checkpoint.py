"""Checkpoints on the disk: a directory each, which is whole or is not there.

    DIR/latest                       the name of the newest
    DIR/step-00000020/manifest.json  the step, every tensor's shape and type, every file's size and SHA-256
    DIR/step-00000020/.metadata      and __0_0.distcp, ...: written by torch.distributed.checkpoint
    DIR/.step-00000030.part          one that is being written

A checkpoint counts once `latest` names it. It is written under another name, its files and directories are forced to
the disk, then it is renamed, and `latest` is replaced last. What stands there is taken for good only after all its sums
have been compared. Loads no torch; what is in the files: `distir.backends.dcp`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distir.ir.errors import UsageError, counted
from distir.ir.function import Function, Value
from distir.ir.type import Tensor

MANIFEST, LATEST = "manifest.json", "latest"
Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape (without padding) and type of tensors by name."""
_FORMAT = 1
_PREFIX, _PART = "step-", ".part"


class Saving(NamedTuple):
    """What a run is told about its checkpoints.

    One is written after every `every` steps, if that is given, and after the last. `about` is what the manifest says
    of the run. The run goes on with the checkpoint called `resume`, written after `step` steps. `lock` is the file
    descriptor by which the directory is held.
    """

    directory: str
    every: int | None
    about: Mapping[str, Any]
    resume: str | None = None
    step: int = 0
    lock: int | None = None

    def due(self, done: int, steps: int) -> bool:
        """Whether to write one when `done` of `steps` steps are done."""
        return done == steps or bool(self.every and done % self.every == 0)


class Saved(NamedTuple):
    """A checkpoint that was written: after how many steps, in how many seconds, of how many bytes."""

    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint. `files`: size and SHA-256 of each."""

    step: int
    about: Mapping[str, Any]
    tensors: Tensors
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def text(self) -> str:
        """As a line of JSON, with its own sum."""
        body = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**body, "sha256": _sum_of(body)})

    @staticmethod
    def parse(text: str) -> Manifest:
        """Read back what `text` gives. Raises ValueError for anything else."""
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError("no object")
        if body.get("format") != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {body.get('format')}")
        said = body.pop("sha256", None)
        if said != (got := _sum_of(body)):
            raise ValueError(f"expected SHA-256 {said}, got {got}")
        tensors = {name: (tuple(shape), dtype) for name, (shape, dtype) in body["tensors"].items()}
        files = {name: (size, digest) for name, (size, digest) in body["files"].items()}
        return Manifest(body["step"], body["about"], tensors, files)


def renewed(program: Function) -> dict[int, Value]:
    """The inputs that a program renews, by position: what a checkpoint holds."""
    old = set(program.updates.values())
    return {k: v for k, v in enumerate(program.inputs) if v in old}


def described(program: Function) -> Tensors:
    """What the manifest says of the tensors that a program renews. Raises UsageError for a bundle."""
    return {v.name: (whole_shape(v), str(saved_type(v).dtype)) for v in renewed(program).values()}


def whole_shape(v: Value) -> tuple[int, ...]:
    """The shape of an input in the model, without padding."""
    return v.role.source if v.role and v.role.source else saved_type(v).global_shape


def saved_type(v: Value) -> Tensor:
    """The type of an input that is saved. Raises UsageError for a bundle."""
    if not isinstance(v.type, Tensor):
        raise UsageError(f"%{v.name} cannot be saved: it is no tensor, but {v.type}")
    return v.type


def _sum_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def name_of(step: int) -> str:
    """The name of the checkpoint written after `step` steps."""
    return f"{_PREFIX}{step:08}"


def part_of(directory: Path, step: int) -> Path:
    """Where the files of a checkpoint are written before it has its name."""
    return directory / f".{name_of(step)}{_PART}"


def file_sum(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def commit(directory: Path, manifest: Manifest, previous: str | None) -> None:
    """Give the checkpoint whose files are written its name, make it the latest, and remove all but `previous`.

    Raises OSError, with what was the latest still in its place.
    """
    name, part = name_of(manifest.step), part_of(directory, manifest.step)
    _write(part / MANIFEST, manifest.text())
    _force(part)
    target = directory / name
    if target.exists():  # one that was found to be damaged
        _put_aside(target)
    os.replace(part, target)
    _force(directory)
    pointer = directory / f".{LATEST}{_PART}"
    _write(pointer, f"{name}\n")
    os.replace(pointer, directory / LATEST)
    _force(directory)
    for other in _all(directory):
        if other not in (name, previous):
            _put_aside(directory / other)
    sweep(directory)


def _put_aside(folder: Path) -> None:
    """What is half removed must not look like a checkpoint: it gets a name that is swept up."""
    os.replace(folder, folder.with_name(f".{folder.name}.old{_PART}"))


def sweep(directory: Path) -> None:
    """Remove what a run that was ended in the middle of writing has left: parts, and what never was the latest."""
    for part in directory.glob(f".*{_PART}"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
    latest = _latest(directory)
    if latest is not None:
        for name in _all(directory):
            if _step(name) > _step(latest):
                shutil.rmtree(directory / name, ignore_errors=True)


def thin(directory: Path, good: str) -> None:
    """Of those older than `good`, which is undamaged, keep the newest: a run that was killed may have left more."""
    for name in sorted([name for name in _all(directory) if _step(name) < _step(good)], key=_step)[:-1]:
        _put_aside(directory / name)
    sweep(directory)


def candidates(directory: Path) -> list[str]:
    """The checkpoints to go on with, best first: the latest, then older ones."""
    latest, names = _latest(directory), sorted(_all(directory), key=_step, reverse=True)
    return names if latest is None else [latest, *[name for name in names if _step(name) < _step(latest)]]


def choose(
    directory: Path, fits: Callable[[str, Manifest], None], say: Callable[[str], None]
) -> tuple[str, Manifest] | None:
    """The newest checkpoint that is undamaged, and its manifest; None if there is none at all.

    `say` is told, in a line, of each that is damaged. Raises UsageError if all are, and what `fits` raises.
    """
    names = candidates(directory)
    if names and _latest(directory) is None:
        say(f"{directory / LATEST} is missing or damaged")
    for name in names:
        try:
            manifest = _manifest(directory / name)
        except UsageError as e:
            say(e.message)
            continue
        fits(name, manifest)
        try:
            verify(directory / name, manifest)
        except UsageError as e:
            say(e.message)
            continue
        return name, manifest
    if names:
        raise UsageError(f"no checkpoint in {directory} can be used: {counted(len(names), 'damaged one')}")
    return None


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file's size and sum. Raises UsageError that names the first file that differs, and how."""

    def check(item: tuple[str, tuple[int, str]]) -> str | None:
        name, (size, digest) = item
        path = folder / name
        try:
            have = path.stat().st_size
            if have != size:
                return f"{path} is damaged: expected {size:,} bytes, got {have:,}"
            got = file_sum(path)[1]
        except FileNotFoundError:
            return f"{path} is missing: expected {size:,} bytes"
        except OSError as e:
            return f"{path} cannot be read: {e.strerror or e}"
        return None if got == digest else f"{path} is damaged: expected SHA-256 {digest}, got {got}"

    with ThreadPoolExecutor() as pool:  # sums are computed without the interpreter's lock
        for message in pool.map(check, manifest.files.items()):
            if message:
                raise UsageError(message)


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UsageError(f"{folder} is missing, but {folder.parent / LATEST} names it")
    try:
        return Manifest.parse(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} is missing") from None
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UsageError(f"{path} is damaged: {e}") from None


def _all(directory: Path) -> list[str]:
    """The names of all checkpoints, in any order."""
    return [p.name for p in directory.glob(f"{_PREFIX}*") if _is_name(p.name) and p.is_dir()]


def _is_name(text: str) -> bool:
    return text.startswith(_PREFIX) and text.removeprefix(_PREFIX).isdecimal()


def _step(name: str) -> int:
    return int(name.removeprefix(_PREFIX))


def _latest(directory: Path) -> str | None:
    """What `latest` names; None if it is not there, or holds something else."""
    try:
        name = (directory / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if _is_name(name) else None


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _force(directory: Path) -> None:
    """Force a directory's entries to the disk."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
