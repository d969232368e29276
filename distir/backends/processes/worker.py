"""The supervisor of a run on this host, which loads torch once and forks the ranks; and the main function of a rank.

Started by `spawn` as `python -m distir.backends.processes.worker FOLDER CONTROL RANK0 RANK1 ...`; the numbers are
inherited file descriptors of sockets. The supervisor reports over CONTROL how each rank ended. If its parent exits,
it kills the ranks and removes FOLDER and incomplete checkpoints; if it exits itself, the kernel kills the ranks.
"""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distir.backends.processes.preflight import as_distir_error, backend_and_device, rank_threads
from distir.ir.errors import DistirError
from distir.runtime.checkpoint import remove_incomplete
from distir.runtime.failure import GRACE_SECONDS, Failure
from distir.runtime.job import Job
from distir.runtime.outcome import Report
from distir.runtime.parent import die_with
from distir.runtime.pieces import Coord, Pieces, Shipped, ship
from distir.runtime.run_directory import job_file, log_file

if TYPE_CHECKING:
    import numpy as np

_POLL_SECONDS = 0.02


def supervise(folder: Path, control: Connection, links: list[Connection]) -> None:
    """Fork a rank for each link; report over `control` when torch is loaded and how each rank ended, until all have."""
    with _watched(folder, control):
        load_torch()  # before the fork: once for all ranks
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
                control.recv()  # nothing is ever sent here: EOF when the parent exits
    except (EOFError, OSError):
        _kill(list(numbers))
        shutil.rmtree(folder, ignore_errors=True)
        if job.saving is not None:
            remove_incomplete(Path(job.saving.directory))


def load_torch() -> None:
    """Load torch, and what else a rank needs."""
    from distir.backends.processes import rank_loop  # noqa: F401
    from distir.backends.transport import torch_distributed  # noqa: F401


@contextmanager
def _watched(folder: Path, control: Connection) -> Iterator[None]:
    """Context in which torch is loaded: if the parent exits meanwhile, FOLDER is removed and this process ends.

    The watching thread ends with the context, before any fork.
    """
    loaded = threading.Event()

    def watch() -> None:
        while not loaded.is_set():
            if control.poll(_POLL_SECONDS):  # nothing is ever sent here: EOF
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


def _rank(job: Job, rank: int, folder: Path, link: Connection) -> None:
    """The main function of a rank's process; does not return."""
    code = 1
    try:
        log = os.open(log_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _run(job, rank, folder, link)
        code = 0
    except BaseException as e:  # of any kind: reported to the parent
        link.send(("error", _failure(e)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        link.close()
        os._exit(code)  # no clean-up of what was inherited from the supervisor


def _failure(e: BaseException) -> Failure:
    short = as_distir_error(e) or e
    message, hint = (short.message, short.hint) if isinstance(short, DistirError) else (str(e), None)
    peer = short is e and _in_communication(e.__traceback__)
    return Failure(type(short).__name__, message, hint, peer, traceback.format_exc())


def _in_communication(trace: TracebackType | None) -> bool:
    """Whether an exception was raised in communication, usually because another rank has exited."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    from distir.backends.transport import gloo, interface, nccl
    from distir.backends.transport import torch_distributed as comm
    from distir.backends.transport.shared_memory import peer_memory

    ours = tuple(m.__file__ for m in (comm, gloo, interface, peer_memory, nccl))
    return bool(files) and (files[-1] in ours or f"{os.sep}distributed{os.sep}" in files[-1])


def _run(job: Job, rank: int, folder: Path, link: Connection) -> None:
    import torch
    from torch._C._distributed_c10d import FileStore

    from distir.backends.processes.cores import bind
    from distir.backends.processes.rank_loop import execute
    from distir.backends.transport.torch_distributed import leave_group, start_group

    torch.set_num_threads(rank_threads())
    backend, where = backend_and_device(job.options.resolved_backend, rank)
    device, world = torch.device(where), job.world
    if where == "cpu":
        bind(rank, world)
    store = FileStore(str(folder / "store"), world)
    patience = max(1.0, job.options.timeout - 2 * GRACE_SECONDS)  # ranks time out before the parent does
    start_group(backend, rank, world, device, store, patience)
    link.send(("ready",))
    job = job.received()

    def feed(step: int) -> Mapping[int, Any]:
        if job.data is not None:
            return job.feed(step)
        return {k: x.array() for k, x in link.recv().items()}  # they come in order

    def shipped(name: str, pieces: Pieces) -> dict[int, tuple[Coord, Shipped]]:
        return {k: (coord, ship(x, folder / f"{name}{k}.{rank}")) for k, (coord, x) in pieces.items()}

    def report(r: Report) -> bool:
        link.send(("step", r._replace(outputs=shipped(f"{r.step}.out", r.outputs))))
        return False

    def keep_gradient(weight: int, x: np.ndarray) -> Shipped:
        return ship(x, folder / f"gradient{weight}.{rank}")  # written at once, to free this process's memory

    def doing(what: str) -> None:
        link.send(("doing", what))

    end = execute(job, rank, device, feed, report, doing, keep_gradient)
    link.send(("done", shipped("in", end.inputs), end.broken))
    leave_group(True)


def main(arguments: Sequence[str]) -> None:
    """Be the supervisor: see the module. `arguments`: FOLDER CONTROL RANK0 RANK1 ..."""
    folder, control, *links = arguments
    supervise(Path(folder), Connection(int(control)), [Connection(int(fd)) for fd in links])


if __name__ == "__main__":
    main(sys.argv[1:])
