"""Running a distributed program on this host, or as one of torchrun's processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from distir.backends.checkpoint import Saved, Saving
from distir.backends.epochs import Epoch, Epochs, OnEpoch, end_epoch
from distir.backends.finite import ALL_FINITE
from distir.backends.held import scratch
from distir.backends.limits import check_backend, check_memory, check_repeats, joined
from distir.backends.pieces import Arrays, Pieces, Whole, by_position, gathered, gathered_gradients, ship
from distir.backends.samples import Samples
from distir.backends.worker import Failure, Job, ending, job_file, log_file
from distir.ir import errors
from distir.ir.errors import DistirError, UsageError, WorkerError, counted
from distir.ir.files import temporary
from distir.ir.function import Function
from distir.transforms.order import check_programs
from distir.transforms.project import project_all, ranks

Data = Callable[[int], Mapping[Any, Any]]
OnStep = Callable[[int, float, Whole], None]

_START_SECONDS = 60.0
"""Ranks may take so long to be ready, whatever the timeout: that of a busy host to load torch."""
_GRACE_SECONDS = 1.0
"""How long after a first failure to wait for others that may say more about the cause."""
_AHEAD = 2
"""Steps whose data are written before they are needed."""


@dataclass
class RunResult:
    """What a run gave. Arrays are whole, in source shapes (padding cut off).

    `seconds[k]`: step k, by the slowest rank, all having begun together; the data were already there.
    `outputs[k]`: of step k, by position among the program's outputs: those of one element, after the last
    step all that are not updates. `inputs`: after the last step, by position, the inputs that the program
    updates where they are held. `saved`: the checkpoints that were written. `memory`: the most bytes that each rank has
    held over what it began with, None where nobody counts. Under torchrun only rank 0 has arrays, `epochs`, `saved`
    and `memory`.
    """

    world: int
    rank: int
    backend: str
    start_seconds: float = 0.0
    """From the call until the last rank that was started here had joined."""
    load_seconds: float = 0.0
    """Of these, until torch was loaded, once for all ranks."""
    seconds: list[float] = field(default_factory=list)
    outputs: list[dict[int, np.ndarray]] = field(default_factory=list)
    inputs: dict[int, np.ndarray] = field(default_factory=dict)
    gradients: dict[int, np.ndarray] = field(default_factory=dict)
    """If asked for, those of the first step, as optimizers took them, by the position of the weight."""
    epochs: list[Epoch] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    memory: list[int | None] = field(default_factory=list)
    broken: int = ALL_FINITE
    """The number of what is not finite after the last step, if it was looked for (see `distir.backends.finite`)."""

    @property
    def warm_up(self) -> int:
        """How many of the first steps are not counted in `step_seconds`: one, unless there is no other."""
        return min(1, len(self.seconds) - 1)

    @property
    def step_seconds(self) -> float:
        """The median time of a step, in seconds."""
        return statistics.median(self.seconds[self.warm_up :])


def run(
    program: Function,
    arrays: Arrays,
    steps: int = 1,
    *,
    data: Data | Samples | None = None,
    backend: str = "gloo",
    nproc: int | None = None,
    timeout: float = 600.0,
    threads: int | None = None,
    bytes_per_rank: int = 0,
    every: bool = False,
    final: bool = True,
    on_step: OnStep | None = None,
    record: Path | None = None,
    profile: Path | None = None,
    epochs: Epochs | None = None,
    on_epoch: OnEpoch | None = None,
    alone: bool = False,
    first: int = 0,
    saving: Saving | None = None,
    compiled: bool = False,
    gradients: bool = False,
    on_phase: Callable[[str], None] | None = None,
    finite: bool = False,
) -> RunResult:
    """Run steps `first` to `steps` - 1 of a distributed program, with a process for each of its devices.

    `arrays`: one whole array an input, in order, or a mapping from input Values or positions; inputs that
    change from step to step come from `data(step)`, or are samples, which the ranks read themselves. An output
    that is an update replaces its input before the next step. Where the environment is torchrun's, this process
    joins as its rank; else all ranks are started here and ended with the call, whatever happens. `timeout`: seconds
    without any sign of progress; `threads` of a rank, without it OMP_NUM_THREADS or 1; `bytes_per_rank` of memory
    needed, checked before anything starts; `every`: report all outputs after each step; `final`: and the updated
    inputs after the last; `on_step(k, seconds, outputs)` is called after each, `on_epoch` at the end of each of
    `epochs`. `record` is a folder in which to keep every value that is made (see `distir.backends.record`); under
    torchrun nothing is kept. `profile` is one in which each rank writes a trace of when its ops ran (see
    `distir.backends.profile`). `alone`: start all ranks here even if torchrun has started this process. `saving` says
    which checkpoints to write, and which to begin with (see `distir.backends.checkpoint`). `compiled`: ranks put what
    they compute through torch.compile. `gradients`: keep those of the first step. `on_phase` is told what is being done
    where that is not a step. `finite`: the run ends with the first step after which the loss is not finite, or after
    the last the weights.

    Raises UsageError for arguments that do not fit, or a checkpoint that cannot be written or read, InfeasibleError if
    memory does not suffice, WorkerError, naming the rank, if one fails, is killed or does not answer in time, and
    whatever DistirError a rank raises.
    """
    from distir.ir.verify import verify

    world = max(1, len(ranks(program)))
    torchrun = None if alone else joined()
    started = torchrun[0] if torchrun else nproc
    if started is not None and started != world:
        what = "torchrun started" if torchrun else "nproc asks for"
        raise UsageError(f"the plan has {counted(world, 'rank')}, {what} {started}")
    if steps <= first:
        raise UsageError(f"steps: expected at least {first + 1}, got {steps}")
    here = torchrun[1] if torchrun else world
    check_backend(backend, here)
    check_memory(bytes_per_rank, here, backend)
    verify(program)
    check_repeats(program, steps - first)
    check_programs(project_all(program))
    if epochs is not None and epochs.evaluation is not None:
        verify(epochs.evaluation)
        check_programs(project_all(epochs.evaluation))
    given = by_position(program, arrays)
    threads = threads or _threads()
    folder = None if profile is None else str(profile.absolute())
    if torchrun:
        from distir.backends.torchrun import join

        told = on_step, epochs, on_epoch, folder, first, saving, compiled, gradients, on_phase, finite
        return join(program, given, steps, data, backend, timeout, threads, every, final, *told)
    told = on_step, epochs, on_epoch, record, folder, first, saving, compiled, gradients, on_phase, finite
    return _Run(program, given, steps, data, backend, world, timeout, threads, every, final, *told).run()


def _threads() -> int:
    """Threads of a rank: one, as with torchrun, unless the environment says more: idle ones would only spin."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else 1


class _Run:
    """One run on this host, and what it has heard from its ranks."""

    def __init__(
        self,
        program: Function,
        given: dict[int, Any],
        steps: int,
        data: Data | Samples | None,
        backend: str,
        world: int,
        timeout: float,
        threads: int,
        every: bool,
        final: bool,
        on_step: OnStep | None,
        epochs: Epochs | None,
        on_epoch: OnEpoch | None,
        record: Path | None,
        profile: str | None,
        first: int,
        saving: Saving | None,
        compiled: bool,
        gradients: bool,
        on_phase: Callable[[str], None] | None,
        finite: bool,
    ) -> None:
        self.record, self.profile, self.saving, self.compiled, self.finite = record, profile, saving, compiled, finite
        self.gradients = gradients
        self.program, self.given, self.first, self.steps = program, given, first, steps
        self.data, self.samples = (None, data) if isinstance(data, Samples) else (data, None)
        self.epochs, self.on_epoch = epochs, on_epoch
        self.world, self.timeout, self.threads = world, timeout, threads
        self.every, self.final, self.on_step = every, final, on_step
        self.on_phase = on_phase or (lambda what: None)
        self.result = RunResult(world, 0, backend)
        self.fed = first
        self.reports: dict[int, dict[int, tuple[Any, ...]]] = {}
        self.ends: dict[int, Pieces] = {}
        self.failures: dict[int, Failure] = {}
        self.exits: dict[int, int] = {}

    def run(self) -> RunResult:
        self.begun = time.monotonic()
        self.ready, self.patience = 0, max(self.timeout, _START_SECONDS)
        with temporary():
            self.folder, held = scratch()
        self.held = [n for n in (held, self.saving and self.saving.lock) if n is not None]
        supervisor: subprocess.Popen[bytes] | None = None
        self.on_phase("loading torch")
        try:
            with temporary():
                self._write_job()
            supervisor = self._start()
            self._listen()
        finally:
            if supervisor is not None:
                _end(supervisor, [self.control, *self.links])
            shutil.rmtree(self.folder, ignore_errors=True)
            if held is not None:
                os.close(held)
        return self.result

    def _write_job(self) -> None:
        arrays = {k: ship(x, self.folder / f"array{k}") for k, x in self.given.items()}
        patience = max(1.0, self.timeout - 2 * _GRACE_SECONDS)  # ranks notice before the whole run is given up
        job = Job(
            self.program,
            self.world,
            arrays,
            self.steps,
            self.result.backend,
            patience,
            self.threads,
            self.every,
            self.final,
            None if self.record is None else str(self.record),
            self.profile,
            self.samples and self.samples.shipped(self.folder, "samples"),
            self.epochs and self.epochs.shipped(self.folder),
            self.first,
            self.saving,
            self.compiled,
            self.gradients,
            self.finite,
        )
        job_file(self.folder).write_bytes(pickle.dumps(job, pickle.HIGHEST_PROTOCOL))

    def _start(self) -> subprocess.Popen[bytes]:
        pairs = [socket.socketpair() for _ in range(self.world + 1)]
        theirs = [b.fileno() for _, b in pairs]
        command = [sys.executable, "-m", "distir.backends.worker", str(self.folder), *map(str, theirs)]
        env = dict(os.environ, OMP_NUM_THREADS=str(self.threads), MKL_NUM_THREADS=str(self.threads))
        env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
        if any(name == "lo" for _, name in socket.if_nameindex()):
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no name need be resolved
        # what torch and compilers leave behind when they are killed goes with the run; what they have made is kept
        if self.compiled:
            env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")))
        env["TMPDIR"] = str(self.folder)
        # a session of its own: Ctrl-C reaches this process only, which then ends the others
        with open(self.folder / "supervisor.log", "wb") as log:
            supervisor = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=[*theirs, *self.held],  # what this run holds is held until the last of its processes ends
                start_new_session=True,
            )
        ends = [Connection(a.detach()) for a, _ in pairs]
        for _, b in pairs:
            b.close()
        self.control, self.links = ends[0], ends[1:]
        return supervisor

    def _listen(self) -> None:
        """Until all ranks are done. Raises for the first of them that fails."""
        for _ in range(_AHEAD):
            self._feed()
        number = {link: rank for rank, link in enumerate(self.links)}
        open_ends: list[Connection] = [self.control, *self.links]
        heard = failed = time.monotonic()
        self.heard = dict.fromkeys(range(self.world), heard)
        while len(self.exits) < self.world:
            now = time.monotonic()
            limit = failed + _GRACE_SECONDS if self._failed() else heard + self.patience
            ready = wait(open_ends, max(0.0, limit - now))
            if not ready and time.monotonic() >= limit:
                raise self._error()
            for end in ready:
                was_failing = self._failed()
                if (message := _received(end)) is None:
                    open_ends.remove(end)  # type: ignore[arg-type]
                    if end is self.control and len(self.exits) < self.world:
                        raise self._supervisor_error() from None
                else:  # what callbacks raise, of whatever kind, is their caller's
                    if (rank := number.get(end)) is not None:  # type: ignore[arg-type]
                        self.heard[rank] = time.monotonic()
                    self._hear(rank, message)
                heard = time.monotonic()
                if self._failed() and not was_failing:
                    failed = heard
        for rank, link in enumerate(self.links):  # a callback may take longer than all that ranks had left to do
            while link in open_ends and link.poll() and (message := _received(link)) is not None:
                self._hear(rank, message)
        if self._failed():
            raise self._error()

    def _failed(self) -> bool:
        return bool(self.failures) or any(self.exits.values())

    def _hear(self, rank: int | None, message: tuple[Any, ...]) -> None:
        match message:
            case ("exit", int(who), int(code)):
                self.exits[who] = code
            case ("error", Failure() as failure) if rank is not None:
                self.failures[rank] = failure
            case ("loaded",):
                self.result.load_seconds = time.monotonic() - self.begun
            case ("doing", str(what)):  # also a sign of life
                if rank == 0:
                    self.on_phase(what)
            case ("ready",):
                self.ready += 1
                if self.ready == self.world:
                    self.patience, self.result.start_seconds = self.timeout, time.monotonic() - self.begun
            case ("done", inputs, int(broken)) if rank is not None:
                self.ends[rank], self.result.broken = inputs, broken
                if len(self.ends) == self.world:
                    self.result.inputs = gathered(self.program, [], list(self.ends.values()))[1]
            case ("step", int(step), *told) if rank is not None:
                self.reports.setdefault(step, {})[rank] = tuple(told)
                if len(self.reports[step]) == self.world:
                    self._completed(step)
            case _:
                raise WorkerError(f"rank {rank} sent {message[0]!r}, which nobody expects")

    def _completed(self, step: int) -> None:
        times, of_outputs, laps, saved, memory, of_gradients = zip(
            *[report for _, report in sorted(self.reports.pop(step).items())], strict=True
        )
        seconds = max(times)
        outputs = gathered(self.program, of_outputs, [])[0]
        self.result.seconds.append(seconds)
        self.result.outputs.append(outputs)
        self.result.gradients.update(gathered_gradients(self.program, of_gradients))
        self.result.saved += [s for s in saved[:1] if s is not None]
        self.result.memory = list(memory)
        for file in self.folder.glob(f"data*.{step}"):
            file.unlink()
        self._feed()
        if self.on_step is not None:
            self.on_step(step, seconds, outputs)
        end_epoch(self.result.epochs, step, self.epochs, laps, self.on_epoch)

    def _feed(self) -> None:
        """Send all ranks the data of the next step that has none yet."""
        step = self.fed
        if step == self.steps or self.samples is not None:
            return
        self.fed += 1
        fresh = by_position(self.program, self.data(step)) if self.data else {}
        with temporary():
            shipped = {k: ship(x, self.folder / f"data{k}.{step}") for k, x in fresh.items()}
        for link in self.links:
            try:
                link.send(shipped)
            except OSError:
                continue  # it is gone, and `_listen` will hear of it

    def _error(self) -> DistirError:
        """The failure that says most about the cause: a death, else an error of its own, else of
        communicating.
        """
        killed = {r: c for r, c in self.exits.items() if c and r not in self.failures}
        if killed:
            rank = min(killed, key=lambda r: (killed[r] > 0, r))
            return WorkerError(f"rank {rank} {ending(killed[rank])}{self._last_line(rank)}", _STEP_HINT % self._step())
        own = {r: f for r, f in self.failures.items() if not f.peer}
        silent = [r for r in range(self.world) if r not in self.failures and r not in self.exits]
        if not own and (silent or not self.failures):
            names = ", ".join(map(str, silent))
            where = f"in step {self._step()}" if self.ready == self.world else "while all were starting"
            waited = time.monotonic() - max(self.heard[r] for r in silent)
            return WorkerError(f"rank{'s' * (len(silent) > 1)} {names} did not answer for {waited:.0f} s {where}")
        rank, failure = min((own or self.failures).items())
        kind = getattr(errors, failure.kind, None)
        if isinstance(kind, type) and issubclass(kind, DistirError):
            alike = all(f.message == failure.message for f in self.failures.values()) and len(self.failures) > 1
            return kind(failure.message if alike else f"rank {rank}: {failure.message}", failure.hint)
        error = WorkerError(f"rank {rank} failed: {failure.kind}: {_one_line(failure.message)}")
        error.add_note(failure.trace)
        return error

    def _step(self) -> int:
        return self.first + len(self.result.seconds)

    def _supervisor_error(self) -> WorkerError:
        log = self.folder / "supervisor.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return WorkerError(f"the process that starts the ranks was ended{f': {lines[-1]}' if lines else ''}")

    def _last_line(self, rank: int) -> str:
        log = log_file(self.folder, rank)
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return f"; its last words: {lines[-1]}" if lines else ""


_STEP_HINT = "it was in step %d; a rank that is killed without a word may have run out of memory"


def _one_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


def _received(end: Any) -> tuple[Any, ...] | None:
    """The next message; None if whoever sent them is gone."""
    try:
        return end.recv()
    except (EOFError, ConnectionError):
        return None


def _end(supervisor: subprocess.Popen[bytes], links: Sequence[Connection]) -> None:
    """End the supervisor and all ranks, which are in its session, and wait until they are gone."""
    with contextlib.suppress(ProcessLookupError):  # all have ended by themselves
        os.killpg(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    for link in links:
        with contextlib.suppress(EOFError, OSError):  # its other end is closed: that process is gone
            while link.poll(_GRACE_SECONDS):
                link.recv_bytes()
        link.close()
