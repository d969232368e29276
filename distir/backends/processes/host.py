"""Run all ranks on this host: send them data, handle their messages, and detect failures."""

from __future__ import annotations

import os
import shutil
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from distir.backends.processes.spawn import Processes, end, start, supervisor_log
from distir.ir.errors import DistirError, WorkerError
from distir.ir.files import temporary
from distir.runtime.failure import GRACE_SECONDS, LOADING_SECONDS, Failure, died, failed, supervisor_died
from distir.runtime.job import Job, JobCallbacks
from distir.runtime.outcome import Outcome, Report
from distir.runtime.pieces import Pieces, gathered, ship
from distir.runtime.run_directory import scratch
from distir.runtime.samples import Samples

_AHEAD = 2
"""Number of steps whose data are sent ahead."""


def run_here(job: Job, callbacks: JobCallbacks) -> Outcome:
    """Start all ranks, handle their messages until they are done, and end them in any case. See `launch.run`."""
    started = time.monotonic()
    with temporary():
        folder, lock = scratch()
    locks = [n for n in (lock, job.saving and job.saving.lock) if n is not None]
    processes: Processes | None = None
    try:
        callbacks.on_phase("loading torch")
        with temporary():
            processes = start(job, folder, locks)
        ranks = _Ranks(job, callbacks, folder, processes, started)
        ranks.listen()
        return ranks.outcome
    finally:
        if processes is not None:
            end(processes)
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


class _Ranks:
    """The ranks of one run, and the state of their messages."""

    def __init__(self, job: Job, callbacks: JobCallbacks, folder: Path, processes: Processes, started: float) -> None:
        self.job, self.callbacks, self.folder, self.processes, self.started = job, callbacks, folder, processes, started
        self.world = len(processes.links)
        self.outcome = Outcome()
        self.fed = job.first
        self.files: dict[int, list[Path]] = {}
        """Those with data of steps that have not been completed, by step."""
        self.ready, self.timeout = 0, max(job.options.timeout, LOADING_SECONDS)
        self.last_message = dict.fromkeys(range(self.world), time.monotonic())
        self.reports: dict[int, dict[int, Report]] = {}
        self.ends: dict[int, Pieces] = {}
        self.failures: dict[int, Failure] = {}
        self.exits: dict[int, int] = {}

    def listen(self) -> None:
        """Handle messages until all ranks are done. Raises the error of a rank that fails."""
        for _ in range(_AHEAD):
            self._feed()
        control, links = self.processes.control, self.processes.links
        number = {link: rank for rank, link in enumerate(links)}
        open_ends: list[Connection] = [control, *links]
        last_message = failing_since = time.monotonic()
        while len(self.exits) < self.world:
            now = time.monotonic()
            limit = failing_since + GRACE_SECONDS if self._has_failures() else last_message + self.timeout
            ready = wait(open_ends, max(0.0, limit - now))
            if not ready and time.monotonic() >= limit:
                raise self._error()
            for link in ready:
                was_failing = self._has_failures()
                if (message := _received(link)) is None:
                    open_ends.remove(link)  # type: ignore[arg-type]
                    if link is control and len(self.exits) < self.world:
                        raise supervisor_died(supervisor_log(self.folder)) from None
                else:  # exceptions of callbacks propagate to the caller
                    if (rank := number.get(link)) is not None:  # type: ignore[arg-type]
                        self.last_message[rank] = time.monotonic()
                    self._handle(rank, message)
                last_message = time.monotonic()
                if self._has_failures() and not was_failing:
                    failing_since = last_message
        for rank, link in enumerate(links):  # ranks may have ended during a callback: read their last messages
            while link in open_ends and link.poll() and (message := _received(link)) is not None:
                self._handle(rank, message)
        if self._has_failures():
            raise self._error()

    def _has_failures(self) -> bool:
        return bool(self.failures) or any(self.exits.values())

    def _handle(self, rank: int | None, message: tuple[Any, ...]) -> None:
        match message:
            case ("exit", int(exited), int(code)):
                self.exits[exited] = code
            case ("error", Failure() as failure) if rank is not None:
                self.failures[rank] = failure
            case ("loaded",):
                self.outcome.load_seconds = time.monotonic() - self.started
            case ("doing", str(what)):  # also counts as progress
                if rank == 0:
                    self.callbacks.on_phase(what)
            case ("ready",):
                self.ready += 1
                if self.ready == self.world:
                    self.timeout, self.outcome.start_seconds = self.job.options.timeout, time.monotonic() - self.started
            case ("done", inputs, int(broken)) if rank is not None:
                self.ends[rank], self.outcome.broken = inputs, broken
                if len(self.ends) == self.world:
                    self.outcome.inputs = gathered(self.job.program, [], list(self.ends.values()))[1]
            case ("step", Report() as report) if rank is not None:
                self.reports.setdefault(report.step, {})[rank] = report
                if len(self.reports[report.step]) == self.world:
                    self._completed(report.step)
            case _:
                raise WorkerError(f"rank {rank} sent an unexpected message {message[0]!r}")

    def _completed(self, step: int) -> None:
        reports = [report for _, report in sorted(self.reports.pop(step).items())]
        self.outcome.add(self.job, reports)
        for file in self.files.pop(step, ()):
            file.unlink()
        self._feed()
        self.outcome.announce(self.job, self.callbacks, reports)

    def _feed(self) -> None:
        """Send all ranks the data of the next step that has not been sent."""
        step = self.fed
        if step == self.job.steps or isinstance(self.job.data, Samples):
            return
        self.fed += 1
        fresh = self.job.feed(step)
        files = {k: self.folder / f"data{k}.{step}" for k in fresh}
        with temporary():
            shipped = {k: ship(x, files[k]) for k, x in fresh.items()}
        self.files[step] = [file for k, file in files.items() if shipped[k].path == str(file)]
        message = ForkingPickler.dumps(shipped)
        for link in self.processes.links:
            try:
                link.send_bytes(message)
            except OSError:
                continue  # the rank has exited, which `listen` reports

    def _error(self) -> DistirError:
        """The error to raise: of a rank that died, else of one that failed outside communication, else of any."""
        step = self.job.first + len(self.outcome.seconds)
        dead = {r: c for r, c in self.exits.items() if c and r not in self.failures}
        if dead:
            return died(dead, self.folder, step)
        silent = [r for r in range(self.world) if r not in self.failures and r not in self.exits]
        if all(f.peer for f in self.failures.values()) and (silent or not self.failures):
            names = ", ".join(map(str, silent))
            where = f"in step {step}" if self.ready == self.world else "during start-up"
            waited = time.monotonic() - max(self.last_message[r] for r in silent)
            return WorkerError(f"rank{'s' * (len(silent) > 1)} {names} did not respond for {waited:.0f} s {where}")
        return failed(self.failures)


def _received(link: Any) -> tuple[Any, ...] | None:
    """The next message; None if the sender has exited."""
    try:
        return link.recv()
    except (EOFError, ConnectionError):
        return None
