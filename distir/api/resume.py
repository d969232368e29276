"""The checkpoint directory of a run: lock it, and choose the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distir.api.data import Data
from distir.api.model import Model
from distir.ir.errors import UsageError
from distir.ir.function import Function
from distir.runtime.checkpoint import (
    Manifest,
    Saving,
    candidates,
    choose,
    remove_incomplete,
    remove_older,
    tensor_table,
)
from distir.runtime.launcher import launched, this_rank
from distir.runtime.options import RunOptions
from distir.runtime.pieces import digest
from distir.runtime.run_directory import lock_directory
from distir.transforms.plan import Plan

_PATIENCE_SECONDS = 2.0
"""How long a new run waits for the last processes of a killed run to release the lock."""
_TIDY_SECONDS = 1.0
"""How long a run waits at its end for its processes to release the lock, before it removes incomplete files."""
_SHOWN = 3
"""Names listed in a message; the rest is counted."""


def check_settings(model: Model, options: RunOptions) -> None:
    """Raises UsageError for checkpoint options that the model, or the way ranks are started, does not support."""
    if options.checkpoint is None:
        return
    if options.resolved_backend == "numpy" and (found := launched()) is not None:
        raise UsageError(
            f"checkpoints with backend numpy need a run without {found.by}, whose processes would conflict"
        )
    if not model.function.updates:
        raise UsageError("checkpoints need a training step, and no loss was given", "--loss cross-entropy, or mse")


@contextlib.contextmanager
def checkpointing(model: Model, plan: Plan, data: Data, options: RunOptions) -> Iterator[Saving | None]:
    """Context in which a run owns its checkpoint directory; gives its `Saving`, or None without a directory.

    Incomplete checkpoints are removed. With `resume` the run continues from the newest undamaged checkpoint; damaged
    ones are reported on stderr.

    Raises UsageError for a directory that cannot be written, is locked by another run, or holds checkpoints although
    `resume` is false; and if no checkpoint is undamaged, or the chosen one is of another model or optimizer.
    """
    if options.checkpoint is None:
        yield None
        return
    path = Path(options.checkpoint).absolute()
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
        saving = Saving(str(path), options.every, about, lock=lock)
        yield _resumed(saving, model.function) if options.resume else _fresh(saving)
    finally:
        if lock is not None:
            os.close(lock)
            _tidy(path)


def _open(path: Path) -> int | None:
    """Make the directory, lock it and remove incomplete checkpoints; under torchrun or mpirun on rank 0. Returns the
    lock.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not _first_rank():
            return None
        if not os.access(path, os.W_OK):
            raise UsageError(f"cannot write checkpoints to {path}")
    except OSError as e:
        raise UsageError(f"cannot write checkpoints to {path}: {e.strerror or e}") from None
    try:
        lock = lock_directory(path, _PATIENCE_SECONDS)
    except OSError:  # a file system without locks
        lock = None
    else:
        if lock is None:
            raise UsageError(f"another run writes its checkpoints to {path}", "wait for its end, or use another")
    remove_incomplete(path)
    return lock


def _tidy(path: Path) -> None:
    """Remove incomplete checkpoints at the end of a run, unless ranks still hold the lock."""
    with contextlib.suppress(OSError):
        if (lock := lock_directory(path, _TIDY_SECONDS)) is not None:
            remove_incomplete(path)
            os.close(lock)


def _fresh(saving: Saving) -> Saving:
    if found := candidates(Path(saving.directory)):
        raise UsageError(
            f"{saving.directory} holds checkpoints of an earlier run, {found[0]} the newest",
            "--resume continues from it; a new run needs another directory",
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
        _note(f"there is no checkpoint in {directory} yet: starting at step 0")
        return saving
    name, manifest = chosen
    if _first_rank():
        remove_older(directory, name)
    _note(f"resuming from {directory / name}")
    for text in _changed(manifest.about, saving.about):
        _note(f"warning: {text}")
    return saving._replace(resume=name, step=manifest.step)


def _check_fits(folder: Path, manifest: Manifest, function: Function) -> None:
    """Raises UsageError, naming the difference, unless a checkpoint has exactly the tensors that a program updates."""
    expected = tensor_table(function)
    lacks = [name for name in expected if name not in manifest.tensors]
    more = [name for name in manifest.tensors if name not in expected]
    parts = [f"missing {_names(lacks)}"] if lacks else []
    if more:
        parts.append(f"unexpected {_names(more)}")
    for name, (shape, dtype) in expected.items():
        if name in manifest.tensors and (got := manifest.tensors[name]) != (shape, dtype):
            parts.append(f"{name}: expected {_format_type(shape, dtype)}, got {_format_type(*got)}")
            break
    if parts:
        made = f"made of {manifest.about.get('model')} with {manifest.about.get('optimizer')}"
        raise UsageError(f"{folder} is of another model or optimizer: {'; '.join(parts)}", f"it was {made}")


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines about settings that differ from the earlier run's, so that results may differ from continuing it."""
    names = ("optimizer", "batch", "data", "seed")
    found = [f"{k} was {then.get(k)}, is {now[k]}" for k in names if then.get(k) != now[k]]
    if not found and then.get("program") != now["program"]:
        found.append("the model's program has changed")
    return found


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(f"%{name}" for name in names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _format_type(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _first_rank() -> bool:
    return this_rank() == 0


def _note(text: str) -> None:
    if _first_rank():
        print(f"distir: {text}", file=sys.stderr, flush=True)
