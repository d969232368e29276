"""A process that has loaded torch, from which the supervisors of several runs are forked: only the first waits for it.

In the context `preloaded`, `spawn` asks this server for its supervisors, where it would start a process for each. The
server ends with the context, or with the process that started it. Linux only: elsewhere the context changes nothing.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from distir.runtime.failure import LOADING_SECONDS
from distir.runtime.run_directory import request_file

OF_A_RUN = {"TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
"""Variables that may differ from the server's: they are not read while torch is loaded."""
_MOST_FILES = 250
"""File descriptors in one message; Linux passes 253 at most (SCM_MAX_FD)."""
_MOST_BYTES = 1 << 13
"""Of a message, which is a path."""


class Forked:
    """A supervisor that the server has forked, to be waited for like a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = os.pidfd_open(pid)

    def wait(self) -> None:
        """Wait until it has ended."""
        if self._process >= 0:
            select.select([self._process], [], [])
            os.close(self._process)
            self._process = -1


class ForkServer:
    """Starts the server with the first supervisor; `fork` returns None where it cannot serve."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._env: dict[str, str] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fork(
        self, folder: Path, env: dict[str, str], log: int, links: Sequence[int], locks: Sequence[int]
    ) -> Forked | None:
        """A supervisor for the run in `folder`, with environment `env`, that inherits the file descriptors `links`, to
        its parent and to each rank, and `locks`. `log`: that of its output.

        None if `env` is another than that of the first supervisor, with
        which torch has been loaded; if there are too many files; and if the server has ended.
        """
        with self._lock:
            if self._server is None:
                self._start(env)
            if self._socket is None or _lasting(env) != self._env or len(links) + len(locks) >= _MOST_FILES:
                return None
            request_file(folder).write_bytes(pickle.dumps((env, os.getcwd(), len(links))))
            answer = b""
            try:
                socket.send_fds(self._socket, [os.fsencode(folder)], [log, *links, *locks])
                answer = self._socket.recv(_MOST_BYTES)
            except OSError:
                return None
            finally:
                if not answer:  # it has ended, or a later answer would be taken for that of another request
                    self._end()
            return Forked(int(answer)) if answer else None

    def _start(self, env: dict[str, str]) -> None:
        self._env = _lasting(env)
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(LOADING_SECONDS)
        with its:
            command = [sys.executable, "-m", "distir.backends.processes.fork_server", str(its.fileno())]
            none = subprocess.DEVNULL  # what fails here does so again in a process of its own, whose output is kept
            self._server = subprocess.Popen(
                command,
                stdin=none,
                stdout=none,
                stderr=none,
                env=self._env,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )

    def end(self) -> None:
        """End the server."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._server.kill()
            self._server.wait()
        self._socket = None


def _lasting(env: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in env.items() if name not in OF_A_RUN}


_server: ForkServer | None = None


def server() -> ForkServer | None:
    """That of the context `preloaded`; None outside."""
    return _server


@contextmanager
def preloaded() -> Iterator[None]:
    """Context in which the runs that this process starts load torch once: all but the first start seconds sooner.

        with distir.preloaded():
            for plan in plans:
                distir.run(model, plan)

    A run whose environment variables differ from those of the first loads torch itself. In another such context it
    changes nothing, nor outside Linux.
    """
    global _server
    if _server is not None or sys.platform != "linux":
        yield
        return
    _server = ForkServer()
    try:
        yield
    finally:
        _server.end()
        _server = None


def _serve(its: socket.socket) -> None:
    """Fork a supervisor for each request, until the other end is closed."""
    from distir.backends.processes import worker

    worker.load_torch()
    gc.collect()
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(its, _MOST_BYTES, _MOST_FILES)
        if not message:
            return
        with suppress(ChildProcessError):  # only now: the pid of a supervisor is not given again during its run
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if (pid := os.fork()) == 0:
            its.close()
            _supervise(Path(os.fsdecode(message)), files)
        its.send(str(pid).encode())
        for file in files:
            os.close(file)


def _supervise(folder: Path, files: list[int]) -> None:
    """Be a supervisor as if just started by `spawn`; does not return."""
    code = 1
    try:
        env, cwd, links = pickle.loads(request_file(folder).read_bytes())
        os.setsid()
        os.chdir(cwd)
        log, *inherited = files
        for file in (1, 2):
            os.dup2(log, file)
        os.close(log)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        from distir.backends.processes import worker

        worker.main([str(folder), *map(str, inherited[:links])])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
