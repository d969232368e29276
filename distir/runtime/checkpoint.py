"""Checkpoints on disk: atomic directories, each with a manifest.

    DIR/latest                       the name of the newest
    DIR/step-00000020/manifest.json  the step, every tensor's shape and type, every file's size and SHA-256
    DIR/step-00000020/.metadata      and __0_0.distcp, ...: written by torch.distributed.checkpoint
    DIR/.step-00000030.part          one that is being written

A checkpoint is valid once `latest` names it. It is written under a temporary name, its files and directories are
fsynced, then it is renamed, and `latest` is replaced last. Before a checkpoint is read all its checksums are verified.
Loads no torch; the contents of the files are in `distir.backends.storage.dcp`.
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
    """The checkpoint settings of a run.

    A checkpoint is written after the last step and, if given, every `every` steps. `about`: the manifest's description
    of the run. `resume`: name of the checkpoint to resume from, written after `step` steps. `lock`: the file
    descriptor that holds the lock on the directory.
    """

    directory: str
    every: int | None
    about: Mapping[str, Any]
    resume: str | None = None
    step: int = 0
    lock: int | None = None

    def due(self, done: int, steps: int) -> bool:
        """Whether to write a checkpoint when `done` of `steps` steps are done."""
        return done == steps or bool(self.every and done % self.every == 0)


class Saved(NamedTuple):
    """A checkpoint that was written: number of steps before it, seconds to write it, size in bytes."""

    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. `files`: size and SHA-256 of each."""

    step: int
    about: Mapping[str, Any]
    tensors: Tensors
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def text(self) -> str:
        """A line of JSON that includes its own SHA-256."""
        body = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**body, "sha256": _sum_of(body)})

    @staticmethod
    def parse(text: str) -> Manifest:
        """The inverse of `text`. Raises ValueError for malformed text."""
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError("not a JSON object")
        if body.get("format") != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {body.get('format')}")
        expected = body.pop("sha256", None)
        if expected != (got := _sum_of(body)):
            raise ValueError(f"expected SHA-256 {expected}, got {got}")
        tensors = {name: (tuple(shape), dtype) for name, (shape, dtype) in body["tensors"].items()}
        files = {name: (size, digest) for name, (size, digest) in body["files"].items()}
        return Manifest(body["step"], body["about"], tensors, files)


def updated_inputs(program: Function) -> dict[int, Value]:
    """The inputs that a program updates, by position: the contents of a checkpoint."""
    old = set(program.updates.values())
    return {k: v for k, v in enumerate(program.inputs) if v in old}


def tensor_table(program: Function) -> Tensors:
    """Shape and type of the tensors that a program updates, by name. Raises UsageError for a bundle."""
    return {v.name: (whole_shape(v), str(saved_type(v).dtype)) for v in updated_inputs(program).values()}


def whole_shape(v: Value) -> tuple[int, ...]:
    """The global shape of an input, without padding."""
    return v.role.source if v.role and v.role.source else saved_type(v).global_shape


def saved_type(v: Value) -> Tensor:
    """The type of an input, which must be a tensor. Raises UsageError for a bundle."""
    if not isinstance(v.type, Tensor):
        raise UsageError(f"%{v.name} cannot be saved: expected a tensor, got {v.type}")
    return v.type


def _sum_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def name_of(step: int) -> str:
    """The name of the checkpoint written after `step` steps."""
    return f"{_PREFIX}{step:08}"


def part_of(directory: Path, step: int) -> Path:
    """The temporary directory in which a checkpoint is written before it is renamed."""
    return directory / f".{name_of(step)}{_PART}"


def file_sum(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def commit(directory: Path, manifest: Manifest, previous: str | None) -> None:
    """Rename the checkpoint whose files are written, make it the latest, and remove all others except `previous`.

    Raises OSError; then the earlier latest checkpoint is still in place.
    """
    name, part = name_of(manifest.step), part_of(directory, manifest.step)
    _write(part / MANIFEST, manifest.text())
    _fsync_directory(part)
    target = directory / name
    if target.exists():  # a damaged one that was skipped on resume
        _put_aside(target)
    os.replace(part, target)
    _fsync_directory(directory)
    pointer = directory / f".{LATEST}{_PART}"
    _write(pointer, f"{name}\n")
    os.replace(pointer, directory / LATEST)
    _fsync_directory(directory)
    for other in _all(directory):
        if other not in (name, previous):
            _put_aside(directory / other)
    remove_incomplete(directory)


def _put_aside(folder: Path) -> None:
    """Rename a checkpoint that is to be removed, so that a partial removal does not leave what looks like one."""
    os.replace(folder, folder.with_name(f".{folder.name}.old{_PART}"))


def remove_incomplete(directory: Path) -> None:
    """Remove incomplete checkpoints of an interrupted run: temporary directories, and any newer than the latest."""
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


def remove_older(directory: Path, good: str) -> None:
    """Remove checkpoints older than `good`, which is undamaged, except the newest of them: a killed run may have left
    several.
    """
    for name in sorted([name for name in _all(directory) if _step(name) < _step(good)], key=_step)[:-1]:
        _put_aside(directory / name)
    remove_incomplete(directory)


def candidates(directory: Path) -> list[str]:
    """The checkpoints to resume from in order of preference: the latest, then older ones."""
    latest, names = _latest(directory), sorted(_all(directory), key=_step, reverse=True)
    return names if latest is None else [latest, *[name for name in names if _step(name) < _step(latest)]]


def choose(
    directory: Path, fits: Callable[[str, Manifest], None], report: Callable[[str], None]
) -> tuple[str, Manifest] | None:
    """The newest undamaged checkpoint and its manifest; None if there are no checkpoints.

    `report` gets a line for each damaged one. Raises UsageError if all are damaged, and whatever `fits` raises.
    """
    names = candidates(directory)
    if names and _latest(directory) is None:
        report(f"{directory / LATEST} is missing or damaged")
    for name in names:
        try:
            manifest = _manifest(directory / name)
        except UsageError as e:
            report(e.message)
            continue
        fits(name, manifest)
        try:
            verify(directory / name, manifest)
        except UsageError as e:
            report(e.message)
            continue
        return name, manifest
    if names:
        raise UsageError(f"no checkpoint in {directory} can be used: {counted(len(names), 'damaged one')}")
    return None


def verify(folder: Path, manifest: Manifest) -> None:
    """Verify every file's size and SHA-256. Raises UsageError that names the first file that differs, and how."""

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

    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
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
    """The names of all checkpoints, unordered."""
    return [p.name for p in directory.glob(f"{_PREFIX}*") if _is_name(p.name) and p.is_dir()]


def _is_name(text: str) -> bool:
    return text.startswith(_PREFIX) and text.removeprefix(_PREFIX).isdecimal()


def _step(name: str) -> int:
    return int(name.removeprefix(_PREFIX))


def _latest(directory: Path) -> str | None:
    """The name in `latest`; None if the file is missing or malformed."""
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


def _fsync_directory(directory: Path) -> None:
    """Write a directory's entries to disk."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
