"""Where a run begins: with its first step, or with what a checkpoint of an earlier run holds."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distir.api.data import Data
from distir.api.model import Model
from distir.api.plan import Plan
from distir.backends.checkpoint import Manifest, Saving, candidates, choose, described, sweep, thin
from distir.backends.held import hold
from distir.backends.pieces import digest
from distir.ir.errors import UsageError
from distir.ir.function import Function

_PATIENCE_SECONDS = 2.0
"""How long to wait for the last processes of a run that was killed, before another begins..."""
_TIDY_SECONDS = 1.0
"""... and to remove what it has left: who interrupts it waits for that."""
_SHOWN = 3
"""More names than these are counted."""


def check_settings(
    model: Model, directory: str | os.PathLike[str] | None, every: int | None, resume: bool, backend: str
) -> None:
    """Raises UsageError for settings of checkpoints that do not fit."""
    if directory is None:
        if every is not None or resume:
            raise UsageError(f"{'resume' if resume else 'every'} needs a directory of checkpoints", "--checkpoint DIR")
        return
    if backend == "numpy" and "RANK" in os.environ:
        raise UsageError("with backend numpy each of torchrun's processes does all: they cannot share checkpoints")
    if every is not None and every < 1:
        raise UsageError(f"every: expected at least 1, got {every}")
    if not model.function.updates:
        raise UsageError(
            "checkpoints are of what is trained: they need a loss to train with", "--loss cross-entropy, or mse"
        )


@contextlib.contextmanager
def beginning(
    model: Model, plan: Plan, data: Data, directory: str | os.PathLike[str] | None, every: int | None, resume: bool
) -> Iterator[Saving | None]:
    """What a run is to save, and what it goes on with; the directory is the run's alone until the context ends.

    What is left of a checkpoint that was never finished is removed. With `resume` the newest that is undamaged is gone
    on with; those that are damaged are named on stderr. Without a directory nothing is saved.

    Raises UsageError for a directory that cannot be written or is in use, checkpoints that stand there already if they
    are not to be resumed, or none of which can be used, or of another model or optimizer.
    """
    if directory is None:
        yield None
        return
    path = Path(directory).absolute()
    lock = _open(path)
    try:
        about = {
            "model": model.name,
            "optimizer": repr(model.optimizer),
            "batch": model.batch,
            "data": None if data.path is None else os.fspath(data.path),
            "seed": data.seed,
            "program": digest(model.function).hex(),
            "plan": plan.to_json(),
        }
        saving = Saving(str(path), every, about, lock=lock)
        yield _resumed(saving, model.function) if resume else _fresh(saving)
    finally:
        if lock is not None:
            os.close(lock)
            _tidy(path)


def _open(path: Path) -> int | None:
    """Make the directory, hold it and tidy it up; under torchrun rank 0 does so for all."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not _first_rank():
            return None
        if not os.access(path, os.W_OK):
            raise UsageError(f"cannot write checkpoints to {path}")
    except OSError as e:
        raise UsageError(f"cannot write checkpoints to {path}: {e.strerror or e}") from None
    try:
        lock = hold(path, _PATIENCE_SECONDS)
    except OSError:  # a file system without locks
        lock = None
    else:
        if lock is None:
            raise UsageError(f"another run writes its checkpoints to {path}", "wait for its end, or use another")
    sweep(path)
    return lock


def _tidy(path: Path) -> None:
    """Remove what was being written when the run ended, if soon nobody writes any more."""
    with contextlib.suppress(OSError):
        if (lock := hold(path, _TIDY_SECONDS)) is not None:
            sweep(path)
            os.close(lock)


def _fresh(saving: Saving) -> Saving:
    if found := candidates(Path(saving.directory)):
        raise UsageError(
            f"{saving.directory} holds checkpoints of an earlier run, {found[0]} the newest",
            "--resume goes on with it; a new run needs another directory",
        )
    return saving


def _resumed(saving: Saving, function: Function) -> Saving:
    directory = Path(saving.directory)
    chosen = choose(
        directory,
        lambda name, manifest: _check_fits(directory / name, manifest, function),
        lambda text: _note(f"warning: checkpoint skipped: {text}"),
    )
    if chosen is None:
        _note(f"there is no checkpoint in {directory} yet: beginning with step 0")
        return saving
    name, manifest = chosen
    if _first_rank():
        thin(directory, name)
    _note(f"going on with {directory / name}")
    for text in _changed(manifest.about, saving.about):
        _note(f"warning: {text}")
    return saving._replace(resume=name, step=manifest.step)


def _check_fits(folder: Path, manifest: Manifest, function: Function) -> None:
    """Raises UsageError, naming what differs, if a checkpoint holds other tensors than a program renews."""
    wanted = described(function)
    lacks = [name for name in wanted if name not in manifest.tensors]
    more = [name for name in manifest.tensors if name not in wanted]
    parts = [f"it lacks {_names(lacks)}"] if lacks else []
    if more:
        parts.append(f"it has also {_names(more)}")
    for name, (shape, dtype) in wanted.items():
        if name in manifest.tensors and (got := manifest.tensors[name]) != (shape, dtype):
            parts.append(f"{name}: expected {_said(shape, dtype)}, got {_said(*got)}")
            break
    if parts:
        made = f"made of {manifest.about.get('model')} with {manifest.about.get('optimizer')}"
        raise UsageError(f"{folder} is of another model or optimizer: {'; '.join(parts)}", f"it was {made}")


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is another than it was, and so may lead elsewhere than the earlier run would have."""
    names = ("optimizer", "batch", "data", "seed")
    found = [f"{k} was {then.get(k)}, is {now[k]}" for k in names if then.get(k) != now[k]]
    if not found and then.get("program") != now["program"]:
        found.append("the model computes something else than it did")
    return found


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(f"%{name}" for name in names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _said(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _first_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def _note(text: str) -> None:
    if _first_rank():
        print(f"distir: {text}", file=sys.stderr, flush=True)
