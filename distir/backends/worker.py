"""The processes of a run on this host: one supervisor, which loads torch once and forks the ranks.

Started by `launch` as `python -m distir.backends.worker FOLDER CONTROL RANK0 RANK1 ...`; the numbers are
inherited ends of socket pairs. The supervisor tells over CONTROL how each rank ended. If whoever started it
goes away, it kills the ranks and removes FOLDER and what they had half written; if it goes away itself, the kernel
kills the ranks.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.backends.checkpoint import Saving, sweep
from distir.backends.epochs import Epochs
from distir.backends.limits import place_of, plainly
from distir.backends.pieces import Coord, Shipped, ship
from distir.backends.samples import Samples
from distir.ir.errors import DistirError
from distir.ir.function import Function

if TYPE_CHECKING:
    import numpy as np


class Job(NamedTuple):
    """What the ranks of a run share."""

    program: Function
    world: int
    arrays: dict[int, Shipped]
    steps: int
    backend: str
    timeout: float
    threads: int
    every: bool
    final: bool
    record: str | None = None
    profile: str | None = None
    samples: Samples | None = None
    epochs: Epochs | None = None
    first: int = 0
    saving: Saving | None = None
    compiled: bool = False
    gradients: bool = False
    finite: bool = False


class Failure(NamedTuple):
    """How a rank failed: `kind` is that of the DistirError, or the exception's; `peer`: in communicating."""

    kind: str
    message: str
    hint: str | None
    peer: bool
    trace: str


def ending(code: int) -> str:
    """How a process ended, from its exit code."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def job_file(folder: Path) -> Path:
    return folder / "job.pickle"


def log_file(folder: Path, rank: int) -> Path:
    """Where a rank's stdout and stderr go."""
    return folder / f"rank{rank}.log"


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_POLL_SECONDS = 0.02


def supervise(folder: Path, control: Connection, links: list[Connection]) -> None:
    """Fork a rank for each link; tell over `control` that torch is loaded, and how each ended; return when all have."""
    with _watched(folder, control):
        from distir.backends import comm, rank  # noqa: F401  (loads torch before the fork: once for all)
    control.send(("loaded",))
    job: Job = pickle.loads(job_file(folder).read_bytes())
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    numbers: dict[int, int] = {}
    for k in range(len(links)):
        pid = os.fork()
        if pid == 0:
            die_with(parent, f"distir-rank{k}")
            control.close()
            for other in (*links[:k], *links[k + 1 :]):
                other.close()
            _rank(job, k, folder, links[k])
        numbers[pid] = k
    for link in links:
        link.close()
    try:
        while numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                control.send(("exit", numbers.pop(pid), os.waitstatus_to_exitcode(status)))
            elif control.poll(_POLL_SECONDS):
                control.recv()  # nothing is ever sent here: it ends when whoever started this ends
    except (EOFError, OSError):
        _kill(list(numbers))
        shutil.rmtree(folder, ignore_errors=True)
        if job.saving is not None:
            sweep(Path(job.saving.directory))


@contextmanager
def _watched(folder: Path, control: Connection) -> Iterator[None]:
    """Loading torch takes a while: if whoever started this goes away in it, FOLDER is removed and this process ends.

    The thread that sees to it has ended before there is a fork.
    """
    loaded = threading.Event()

    def watch() -> None:
        while not loaded.is_set():
            if control.poll(_POLL_SECONDS):  # nothing is ever sent here
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loaded.set()
        thread.join()


def _kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def die_with(parent: int, name: str) -> None:
    """Ask the kernel to kill this process when its parent ends, and to call it `name`; on Linux only."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, name.encode())
        if os.getppid() != parent:
            os._exit(1)


def _rank(job: Job, rank: int, folder: Path, link: Connection) -> None:
    """The life of one rank; does not return."""
    code = 1
    try:
        log = os.open(log_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _run(job, rank, folder, link)
        code = 0
    except BaseException as e:  # whatever it is, whoever started the run is told
        link.send(("error", _failure(e)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        link.close()
        os._exit(code)  # no clean-up of what was inherited from the supervisor


def _failure(e: BaseException) -> Failure:
    told = plainly(e) or e
    message, hint = (told.message, told.hint) if isinstance(told, DistirError) else (str(e), None)
    peer = told is e and _in_communication(e.__traceback__)
    return Failure(type(told).__name__, message, hint, peer, traceback.format_exc())


def _in_communication(trace: TracebackType | None) -> bool:
    """Whether an exception arose in a call to torch.distributed, most often because another rank is gone."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    from distir.backends import comm, nearby, transfers

    ours = (comm.__file__, nearby.__file__, transfers.__file__)
    return bool(files) and (files[-1] in ours or f"{os.sep}distributed{os.sep}" in files[-1])


def _run(job: Job, rank: int, folder: Path, link: Connection) -> None:
    import torch
    from torch._C._distributed_c10d import FileStore

    from distir.backends.comm import leave_group, start_group
    from distir.backends.rank import Pieces, Report, execute

    torch.set_num_threads(job.threads)
    backend, where = place_of(job.backend, rank)
    device = torch.device(where)
    store = FileStore(str(folder / "store"), job.world)
    start_group(backend, rank, job.world, device, store, job.timeout)
    link.send(("ready",))

    samples = job.samples and job.samples.received()
    epochs = job.epochs and job.epochs.received()

    def feed(step: int) -> Mapping[int, Any]:
        if samples is not None:
            return samples.step(step)
        return {k: x.array() for k, x in link.recv().items()}  # they come in order

    def shipped(name: str, pieces: Pieces) -> dict[int, tuple[Coord, Shipped]]:
        return {k: (coord, ship(x, folder / f"{name}{k}.{rank}")) for k, (coord, x) in pieces.items()}

    def report(r: Report) -> bool:
        outputs = shipped(f"{r.step}.out", r.outputs)
        link.send(("step", r.step, r.seconds, outputs, r.lap, r.saved, r.memory, r.gradients))
        return False

    def keep_gradient(weight: int, x: np.ndarray) -> Shipped:
        return ship(x, folder / f"gradient{weight}.{rank}")  # at once: it takes no memory of this process

    def doing(what: str) -> None:
        link.send(("doing", what))

    told = job.every, job.final, job.record, job.profile, epochs, doing, job.first, job.saving, job.compiled, job.finite
    kept = keep_gradient if job.gradients else None
    end = execute(job.program, rank, device, job.arrays, feed, job.steps, report, *told, keep_gradient=kept)
    link.send(("done", shipped("in", end.inputs), end.broken))
    leave_group(True)


def main() -> None:
    folder, control, *links = sys.argv[1:]
    supervise(Path(folder), Connection(int(control)), [Connection(int(fd)) for fd in links])


if __name__ == "__main__":
    # pickles name this module by its real name
    from distir.backends import worker

    worker.main()
