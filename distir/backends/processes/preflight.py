"""Preflight checks: backend, devices, memory and program, before a run starts; and errors of torch in plain terms."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from distir.ir.errors import DistirError, InfeasibleError, UsageError, counted
from distir.ir.files import no_room
from distir.ir.function import Function
from distir.runtime.launcher import MPIRUN, Launched, launched
from distir.runtime.options import STAGED


def joins(backend: str) -> Launched | None:
    """How this process was started, if as a rank that a run with this backend joins; None if the run starts its ranks.

    Raises UsageError if the backend does not run on ranks started so.
    """
    found = launched()
    if backend == MPI:
        if importlib.util.find_spec("mpi4py") is None:
            raise UsageError("backend mpi needs mpi4py, which is not installed", _MPI_PACKAGES)
        if found is None or found.by != MPIRUN:
            raise UsageError("backend mpi runs on ranks that mpirun has started", "mpirun -n RANKS distir ...")
    elif found is not None and found.by == MPIRUN:
        if found.world > 1:
            hint = "--backend mpi, or leave out mpirun"
            raise UsageError(f"mpirun has started {found.world} ranks, and backend {backend} starts its own", hint)
        return None
    return found


MPI = "mpi"
"""The backend that communicates over MPI, on CPUs."""
_MPI_PACKAGES = "pip install 'distir[mpi]' brings mpi4py, Open MPI and mpirun"
ON_CPUS = ("gloo", MPI)
LESS_MEMORY = (
    "more microbatches or a smaller batch need less for activations, zero, tp and pp less for weights and their state"
)
_NO_MEMORY = ("out of memory", "cublas_status_alloc_failed")
"""Phrases in the errors of a GPU that is out of memory."""


def rank_threads() -> int:
    """Threads per rank: OMP_NUM_THREADS, else one, as with torchrun, since idle threads would spin."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else 1


def check_backend(backend: str, here: int) -> None:
    """Raises UsageError for an unknown backend, or one that `here` ranks on this host cannot use."""
    if backend not in ("gloo", MPI, "nccl", STAGED):
        raise UsageError(f"unknown backend {backend!r}", "gloo and mpi run on CPUs, nccl on GPUs")
    if backend in ON_CPUS:
        return
    import torch

    have = torch.cuda.device_count()
    if backend == "nccl" and have < here:
        raise UsageError(
            f"backend nccl needs a GPU per rank: {counted(here, 'rank')}, {counted(have, 'GPU')} here",
            "use --backend gloo; with --device cuda ranks share GPUs"
            if have
            else "without --device cuda and --backend nccl ranks run on CPUs",
        )
    if not have:
        raise UsageError("device cuda needs a GPU, and there is none here", "without --device ranks run on CPUs")


def backend_and_device(backend: str, local_rank: int) -> tuple[str, str]:
    """The backend's name in torch, and the device of a rank: GPUs are assigned round-robin."""
    if backend in ON_CPUS:
        return backend, "cpu"
    import torch

    return backend.partition(":")[0], f"cuda:{local_rank % torch.cuda.device_count()}"


def gpus() -> tuple[int, float]:
    """The number of GPUs of this host, and the bytes of memory of the first; 0 without one."""
    import torch

    count = torch.cuda.device_count()
    return count, float(torch.cuda.get_device_properties(0).total_memory) if count else 0.0


def available_memory() -> int | None:
    """Bytes of memory available on this host, within the limit of a cgroup; None where unknown."""
    limits: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(rows["MemAvailable"].split()[0]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        limits.append(int(text) - int(used.read_text()))
    return min(limits, default=None)


def check_repeats(program: Function, steps: int) -> None:
    """Raises UsageError if steps cannot be repeated: an updated value is not placed as the input that it replaces."""
    moved = [old.name for new, old in program.updates.items() if new.type.device is not old.type.device]
    if steps > 1 and moved:
        raise UsageError(
            f"{program.name} cannot run {steps} steps: the next %{moved[0]} is not on the device of the input",
            "steady_state_transform leaves out what distributes the inputs from a host",
        )


def check_memory(bytes_per_rank: int, here: int, backend: str = "gloo") -> None:
    """Raises InfeasibleError if this host has less than `bytes_per_rank` for each of `here` ranks on CPUs.

    The memory of GPUs is not checked here: a rank that runs out of it fails (see `as_distir_error`).
    """
    if backend not in ON_CPUS:
        return
    have = available_memory()
    need = bytes_per_rank * here
    if have is not None and need > have:
        raise InfeasibleError(
            f"{counted(here, 'rank')} of {bytes_per_rank / 2**30:.1f} GiB need {need / 2**30:.1f} GiB, "
            f"{have / 2**30:.1f} GiB are available on this host",
            LESS_MEMORY,
        )


def out_of_memory(e: BaseException) -> InfeasibleError | None:
    """The error to raise if `e`, of torch, CUDA, its libraries or NCCL, means a GPU is out of memory; else None."""
    text = " ".join(str(e).split())
    if not isinstance(e, RuntimeError) or not any(words in text.lower() for words in _NO_MEMORY):
        return None
    sentences = text.split(". ")[:3]  # the request and the GPU's memory; torch's advice on its own settings follows
    return InfeasibleError(". ".join(sentences).rstrip("."), LESS_MEMORY)


def not_compiled(e: BaseException) -> UsageError | None:
    """The error to raise if `e` means that torch.compile failed, such as for want of a compiler; else None."""
    if not any(kind.__module__.startswith(("torch._dynamo.", "torch._inductor.")) for kind in type(e).__mro__):
        return None
    lines = str(e).strip().splitlines()
    text = f"torch.compile fails: {lines[0] if lines else type(e).__name__}"
    return UsageError(text, "on CPUs it needs a C++ compiler, on GPUs Triton; without --compile neither is needed")


def as_distir_error(e: BaseException) -> DistirError | None:
    """A plain error in place of one of torch or the system (out of memory, no compiler, disk full); else None."""
    return out_of_memory(e) or not_compiled(e) or no_room(e)
