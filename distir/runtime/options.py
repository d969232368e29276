"""The options of a run: one value, made by `distir.run` or from the command line, and passed to every rank.

Loads no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from distir.ir.errors import UsageError

STAGED = "gloo:cuda"
"""Compute on GPUs, which ranks may share, and communicate through host memory: for tests."""
BACKENDS = ("gloo", "mpi", "nccl", "numpy")
_ON = {("gloo", "cuda"): STAGED, ("nccl", "cuda"): "nccl"} | {(name, "cpu"): name for name in ("gloo", "mpi", "numpy")}
_PATHS = ("tokenizer", "metrics", "save", "profile", "checkpoint")


def backend_on(backend: str | None, device: str | None) -> str:
    """The resolved backend, one of `BACKENDS` or "gloo:cuda", from a backend and a device ("cpu" or "cuda").

    Either may be None. Raises UsageError for an unknown name, or a backend that does not run on the device.
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}", "choose from cpu, cuda")
    if backend is None:
        return "nccl" if device == "cuda" else "gloo"
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}", f"choose from {', '.join(BACKENDS)}")
    if device is None:
        return backend
    if (backend, device) not in _ON:
        raise UsageError(
            f"backend {backend} does not run on {device}", "gloo runs on both, nccl on cuda, mpi and numpy on cpu"
        )
    return _ON[backend, device]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run. To add one: a field here, a line below, a flag with the field's name, and its use.

    `steps`: optimizer steps of the run, default 1; with `epochs` the limit per epoch, by default all of the data.
    `epochs`: passes over the samples, shuffled in each by `seed`; the last batch is dropped if it is not full.
    `held_out`: share of the samples, rounded up to whole batches, that is used for validation after each epoch.
    `tokenizer`: file of a text's BPE; read if it exists, else trained on the text and written.
    `metrics`: JSON file of times, rates and losses, written after each epoch (without `epochs` the run is one epoch).
    `save`: ONNX file for the model with the trained weights, written after the last step.
    `seed`: of random data, initial weights and the order of samples.
    `backend`: "gloo" (a CPU process per rank), "mpi" (those that mpirun has started), "nccl" (a GPU per rank) or
    "numpy" (all ranks in this process).
    `device`: "cpu" or "cuda"; by default the backend's. With gloo on cuda ranks share GPUs, for tests.
    `compiled`: ranks compile their computation with torch.compile in the first step; the prediction ignores this.
    `check`: compare losses, first gradients, weights and optimizer state with the sequential program on the same data.
    `timeout`: seconds without progress after which the run is aborted.
    `profile`: folder for traces: of the prediction, and of each rank's ops (see `distir.compare`).
    `checkpoint`: directory for weights and optimizer state, saved after the last step; the newest two are kept.
    `every`: also save a checkpoint after every so many steps.
    `resume`: continue from the newest undamaged checkpoint, of any plan and backend, up to that many steps in total.
    `allow_nonfinite`: continue if the loss or weights are not finite; checkpoints with such values are not written.

    Raises UsageError for values that are unknown, out of range or conflicting.
    """

    steps: int | None = None
    epochs: int | None = None
    held_out: float = 0.1
    tokenizer: str | os.PathLike[str] | None = None
    metrics: str | os.PathLike[str] | None = None
    save: str | os.PathLike[str] | None = None
    seed: int = 0
    backend: str | None = None
    device: str | None = None
    compiled: bool = False
    check: bool = False
    timeout: float = 600.0
    profile: str | os.PathLike[str] | None = None
    checkpoint: str | os.PathLike[str] | None = None
    every: int | None = None
    resume: bool = False
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        backend = self.resolved_backend
        for name in ("steps", "epochs", "every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"{name}: expected at least 1, got {number}")
        if not 0 <= self.held_out < 1:
            raise UsageError(f"held_out: expected a share of at least 0 and below 1, got {self.held_out:g}")
        if self.checkpoint is None and (self.resume or self.every is not None):
            what = "resume" if self.resume else "every"
            raise UsageError(f"{what} needs a directory of checkpoints", "--checkpoint DIR")
        if self.compiled and backend == "numpy":
            raise UsageError("backend numpy does not support torch.compile", "--backend gloo")
        if self.compiled and self.profile is not None:
            raise UsageError("a profile times single ops, which torch.compile fuses", "leave out --compile")
        for name in _PATHS:  # as strings, which every process can unpickle
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.fspath(path))

    @property
    def resolved_backend(self) -> str:
        """See `backend_on`."""
        return backend_on(self.backend, self.device)
