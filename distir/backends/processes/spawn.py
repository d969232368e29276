"""Start and end the processes of a run on this host: a supervisor, from which the ranks are forked."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from distir.backends.processes.fork_server import Forked, server
from distir.backends.processes.preflight import rank_threads
from distir.runtime.failure import GRACE_SECONDS
from distir.runtime.job import Job
from distir.runtime.run_directory import job_file

Supervisor = subprocess.Popen[bytes] | Forked


class Processes(NamedTuple):
    """The supervisor process, the connection to it, and one to each rank."""

    supervisor: Supervisor
    control: Connection
    links: list[Connection]


def start(job: Job, folder: Path, locks: Sequence[int]) -> Processes:
    """Start the supervisor, which starts the ranks. All of them inherit the file descriptors `locks`."""
    job_file(folder).write_bytes(pickle.dumps(job.shipped(folder), pickle.HIGHEST_PROTOCOL))
    pairs = [socket.socketpair() for _ in range(job.world + 1)]
    theirs = [b.fileno() for _, b in pairs]
    supervisor = _supervisor(job, folder, theirs, locks)
    ends = [Connection(a.detach()) for a, _ in pairs]
    for _, b in pairs:
        b.close()
    return Processes(supervisor, ends[0], ends[1:])


def _supervisor(
    job: Job, folder: Path, theirs: Sequence[int], locks: Sequence[int]
) -> subprocess.Popen[bytes] | Forked:
    env = _environment(job, folder)
    with open(supervisor_log(folder), "wb") as log:
        forked = (fork_server := server()) and fork_server.fork(folder, env, log.fileno(), theirs, locks)
        # a new session: Ctrl-C reaches only this process, which then ends the others
        return forked or subprocess.Popen(
            [sys.executable, "-m", "distir.backends.processes.worker", str(folder), *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            pass_fds=[*theirs, *locks],
            start_new_session=True,
        )


def _environment(job: Job, folder: Path) -> dict[str, str]:
    threads = str(rank_threads())
    env = dict(os.environ, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no host name has to be resolved
    # temporary files of killed processes are removed with the run; the compile cache is kept
    if job.options.compiled:
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")))
    env["TMPDIR"] = str(folder)
    return env


def supervisor_log(folder: Path) -> Path:
    """The file with the supervisor's stdout and stderr."""
    return folder / "supervisor.log"


def end(processes: Processes) -> None:
    """Kill the supervisor and all ranks, which are in its session, and wait until they have ended."""
    with contextlib.suppress(ProcessLookupError):  # all have already ended
        os.killpg(processes.supervisor.pid, signal.SIGKILL)
    processes.supervisor.wait()
    for link in (processes.control, *processes.links):
        with contextlib.suppress(EOFError, OSError):  # the other end is closed: the process has ended
            while link.poll(GRACE_SECONDS):
                link.recv_bytes()
        link.close()
