"""A process that has loaded torch, from which the supervisors of runs are forked: in most tests of runs, loading it
takes longer than the run. Tests of how processes start and end do without."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
OF_A_RUN = {"TMPDIR", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
"""Variables that torch, which sets some of them itself, does not read as it is loaded."""
_MOST_BYTES, _MOST_FILES = 1 << 17, 64


class Supervisor(NamedTuple):
    """What `spawn` needs of a process."""

    pid: int

    def wait(self) -> None:
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        select.select([process], [], [])
        os.close(process)


class Warm:
    """In the place of `subprocess.Popen`; a process of its own where the environment is another than the first."""

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.mine: socket.socket | None = None

    def start(self, env: dict[str, str]) -> socket.socket:
        if self.mine is None:
            self.env = env
            self.mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line = [sys.executable, "-m", "tests.warm", str(its.fileno())]
            self.process = subprocess.Popen(line, env=env, cwd=ROOT, pass_fds=[its.fileno()], start_new_session=True)
            its.close()
        return self.mine

    def __call__(self, command: list[str], *, env: dict[str, str], pass_fds: list[int], stdout: Any, **how: Any) -> Any:
        plain = {name: text for name, text in env.items() if name not in OF_A_RUN}
        mine = self.start(plain)
        if plain != self.env:
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, stdout=stdout, **how)
        _, _, _, folder, *links = command
        request = pickle.dumps((env, os.getcwd(), folder, len(links)))
        assert len(request) <= _MOST_BYTES
        socket.send_fds(mine, [request], [stdout.fileno(), *pass_fds])
        return Supervisor(int(mine.recv(_MOST_BYTES)))

    def end(self) -> None:
        if self.mine is not None and self.process is not None:
            self.mine.close()
            self.process.wait()


def serve(its: socket.socket) -> None:
    """Fork a supervisor for each request, until nobody asks any more."""
    from distir.backends.processes import rank_loop, worker  # noqa: F401  (loads torch)
    from distir.backends.transport import torch_distributed  # noqa: F401

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone at once
    while True:
        request, files, _, _ = socket.recv_fds(its, _MOST_BYTES, _MOST_FILES)
        if not request:
            return
        if (pid := os.fork()) == 0:
            its.close()
            code = 1
            try:
                become(request, files)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        its.send(str(pid).encode())
        for file in files:
            os.close(file)


def become(request: bytes, files: list[int]) -> None:
    """Be the supervisor that is asked for, as if it had been started anew."""
    from distir.backends.processes import worker

    env, cwd, folder, links = pickle.loads(request)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(cwd)
    log, *passed = files
    for k, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, k)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.argv = ["worker", folder, *map(str, passed[:links])]
    worker.main()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
