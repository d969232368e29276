"""What is asked before a run starts: who starts the ranks, and that backend, memory and program allow it."""

from __future__ import annotations

import os
from pathlib import Path

from distir.ir.errors import DistirError, InfeasibleError, UsageError, counted
from distir.ir.files import no_room
from distir.ir.function import Function


def joined() -> tuple[int, int] | None:
    """(ranks in all, ranks on this host) where torchrun has started this process as one of them, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


_LESS = "more microbatches or a smaller batch need less"
_NO_MEMORY = ("out of memory", "cublas_status_alloc_failed")
"""What errors say of a GPU without memory."""
STAGED = "gloo:cuda"
"""Computing on GPUs, which ranks may share, and communicating through the host's memory: for tests."""
_ON = {("gloo", "cpu"): "gloo", ("gloo", "cuda"): STAGED, ("nccl", "cuda"): "nccl", ("numpy", "cpu"): "numpy"}


def backend_on(backend: str | None, device: str | None) -> str:
    """How ranks run: "gloo", "nccl", "gloo:cuda" or "numpy", from a backend and a device ("cpu" or "cuda").

    Of the two either is enough. Raises UsageError for what there is not, or does not go together.
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}", "choose from cpu, cuda")
    if backend is None:
        return "nccl" if device == "cuda" else "gloo"
    if backend not in ("gloo", "nccl", "numpy"):
        raise UsageError(f"unknown backend {backend!r}", "choose from gloo, nccl, numpy")
    if device is None:
        return backend
    if (backend, device) not in _ON:
        raise UsageError(f"backend {backend} does not run on {device}", "gloo runs on both, nccl on cuda, numpy on cpu")
    return _ON[backend, device]


def check_backend(backend: str, here: int) -> None:
    """Raises UsageError for a backend that there is not, or that `here` ranks on this host cannot use."""
    if backend not in ("gloo", "nccl", STAGED):
        raise UsageError(f"unknown backend {backend!r}", "gloo runs on CPUs, nccl on GPUs")
    if backend == "gloo":
        return
    import torch

    have = torch.cuda.device_count()
    if backend == "nccl" and have < here:
        raise UsageError(
            f"backend nccl needs a GPU a rank: {counted(here, 'rank')}, {counted(have, 'GPU')} here",
            "use --backend gloo, with --device cuda ranks share GPUs"
            if have
            else "with neither --device cuda nor --backend nccl ranks run on CPUs",
        )
    if not have:
        raise UsageError("device cuda needs a GPU, there is none here", "without --device ranks run on CPUs")


def place_of(backend: str, local_rank: int) -> tuple[str, str]:
    """The backend's name in torch, and the device of a rank: GPUs are taken in turn."""
    if backend == "gloo":
        return backend, "cpu"
    import torch

    return backend.partition(":")[0], f"cuda:{local_rank % torch.cuda.device_count()}"


def available_memory() -> int | None:
    """Bytes of memory that may still be used on this host, None where it cannot be known."""
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
    """Raises UsageError if a further step would not see what the first has made."""
    moved = [old.name for new, old in program.updates.items() if new.type.device is not old.type.device]
    if steps > 1 and moved:
        raise UsageError(
            f"{program.name} cannot run {steps} steps: the next %{moved[0]} is not made where it is held",
            "steady_state_transform leaves out what distributes the inputs from a host",
        )


def check_memory(bytes_per_rank: int, here: int, backend: str = "gloo") -> None:
    """Raises InfeasibleError if this host has not that many bytes for each of `here` ranks, which compute on CPUs.

    Those on GPUs need them there; what these have only the ranks find out: see `plainly`.
    """
    if backend != "gloo":
        return
    have = available_memory()
    need = bytes_per_rank * here
    if have is not None and need > have:
        raise InfeasibleError(
            f"{counted(here, 'rank')} of {bytes_per_rank / 2**30:.1f} GiB need {need / 2**30:.1f} GiB, "
            f"{have / 2**30:.1f} GiB are available on this host",
            _LESS,
        )


def out_of_memory(e: BaseException) -> InfeasibleError | None:
    """What there is to say if a GPU has no memory left, as torch, CUDA, its libraries or NCCL tell; else None."""
    text = " ".join(str(e).split())
    if not isinstance(e, RuntimeError) or not any(words in text.lower() for words in _NO_MEMORY):
        return None
    sentences = text.split(". ")[:3]  # what was asked for, and what the GPU has; torch goes on with advice on itself
    return InfeasibleError(". ".join(sentences).rstrip("."), _LESS)


def not_compiled(e: BaseException) -> UsageError | None:
    """What there is to say if torch.compile fails, for want of a compiler, say; else None."""
    if not any(kind.__module__.startswith(("torch._dynamo.", "torch._inductor.")) for kind in type(e).__mro__):
        return None
    lines = str(e).strip().splitlines()
    told = f"torch.compile fails: {lines[0] if lines else type(e).__name__}"
    return UsageError(told, "on CPUs it needs a C++ compiler, on GPUs Triton; without --compile neither is needed")


def plainly(e: BaseException) -> DistirError | None:
    """What there is to say of an exception of torch's or the system's; None of one that speaks for itself."""
    return out_of_memory(e) or not_compiled(e) or no_room(e)
