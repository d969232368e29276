"""The interconnect benchmark: latency and bandwidth of each collective at each size, over the transports of a run, and
of copies between a GPU and its host.

Sizes and bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md there): the size is one rank's buffer before a
broadcast, reduction, all-reduce, all-to-all, reduce-scatter, scatter or send, and after a gather or all-gather.
Algorithm bandwidth is size / seconds; bus bandwidth multiplies it by 2 (n-1)/n for an all-reduce, 1 for broadcast,
reduction and send, (n-1)/n for the others, so that it can be compared with the links' whatever n is. One GPU has no
links: its bus bandwidth is 0, and its times are those of NCCL's calls, which copy within the GPU or, in place
(all-reduce, broadcast, reduce), move nothing.

All ranks copy at once, each on its own GPU; the host's memory is pinned. Both bandwidths of a copy are size / seconds.
A copy from device to device stays in a GPU, which reads as many bytes as it writes: its memory moves twice the size.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.ir.errors import UsageError, WorkerError, counted
from distir.ir.files import temporary
from distir.ir.type import DType, Tensor
from distir.runtime.emulate import sleeper
from distir.runtime.failure import ending
from distir.runtime.parent import die_with
from distir.runtime.run_directory import scratch_folder

if TYPE_CHECKING:
    import torch

_PARTS = ("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter")
"""Collectives in which a rank's own part, 1/n of the size, is not transferred."""
_PAIRS = ("send-recv", "send")
"""What a rank does with another one."""
COLLECTIVES = ("all-reduce", *_PARTS, "broadcast", "reduce", *_PAIRS)
COPIES = ("host-to-device", "device-to-host", "device-to-device")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
SIZES = tuple(4**k for k in range(5, 14))
"""1 KiB to 64 MiB."""
_SECONDS = 0.1
"""Target duration of one measurement; `_LEAST` and `_MOST` limit its repetitions."""
_LEAST, _MOST = 3, 200
_MEASUREMENTS = 3
"""Number of measurements, of which the median is taken."""


class Timing(NamedTuple):
    """One collective or copy at one size (bytes): seconds, and bandwidths in bytes/s. `over`: the transport, "gloo",
    "mpi", "nccl" or "memory" (shared memory between ranks of one host); of a copy "copy".
    """

    collective: str
    size: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    over: str
    ranks: int
    """In each of the groups that run it at once."""


def default_names(backend: str, ranks: int) -> tuple[str, ...]:
    """The collectives and copies that are measured if none are named."""
    collectives = [c for c in COLLECTIVES if ranks > 1 or c not in _PAIRS]
    return (*collectives, *(COPIES if backend == "nccl" else ()))


def bus_factor(collective: str, n: int) -> float:
    """Bus bandwidth over algorithm bandwidth among n ranks."""
    if n == 1 and collective not in COPIES:
        return 0.0
    if collective == "all-reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if collective in _PARTS else 1.0


def bench_collectives(
    nproc: int | None = None,
    backend: str = "gloo",
    collectives: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    timeout: float = 600.0,
    on_timing: Callable[[Timing], None] | None = None,
    dtype: str = "float32",
    loops: Loops | None = None,
) -> list[Timing]:
    """Measure on `nproc` ranks (2; with backend nccl by default one per GPU of this host), which are started here and
    ended with the call; under torchrun, or mpirun with backend mpi, as one of its ranks.

    `collectives`: some of `COLLECTIVES` and, with backend nccl, of `COPIES`; by default `default_names`.
    `timeout`: seconds without a new timing. Raises UsageError for arguments that do not fit, WorkerError, naming the
    rank, if one fails or does not respond.
    """
    from distir.backends.processes.preflight import check_backend, joins

    for name in collectives or ():
        if name not in COLLECTIVES + COPIES:
            raise UsageError(f"unknown collective {name!r}", f"known are {', '.join(COLLECTIVES + COPIES)}")
        if name in COPIES and backend != "nccl":
            raise UsageError(f"{name} needs a GPU, which ranks of backend {backend} do not use", "use --backend nccl")
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", f"known are {', '.join(DTYPES)}")
    if min(sizes, default=0) < 1:
        raise UsageError(f"sizes are at least 1 byte, got {list(sizes)}")
    launched = joins(backend)
    world = launched.world if launched else _ranks_here(backend) if nproc is None else nproc
    least = 1 if backend == "nccl" else 2  # among CPUs one rank has nothing to measure
    more = "start more ranks" if launched else "use --nproc 2"
    if world < least:
        raise UsageError(f"collectives need at least {counted(least, 'rank')}, got {world}", more)
    names = default_names(backend, world) if collectives is None else collectives
    if world == 1 and (pairs := [name for name in names if name in _PAIRS]):
        raise UsageError(f"{pairs[0]} needs at least 2 ranks, got 1", more)
    check_backend(backend, launched.here if launched else world)
    loops = loops or Loops((world,))
    if any([world % n or (n != world and backend != "mpi") for n in loops.groups]):
        raise UsageError(f"{world} ranks of backend {backend} cannot measure in groups of {list(loops.groups)}")
    timings: list[Timing] = []

    def add(t: Timing) -> None:
        timings.append(t)
        if on_timing is not None:
            on_timing(t)

    if launched:
        settings = Settings(world, backend, names, sizes, timeout, dtype, loops)
        _measure_all(launched.rank, launched.local_rank, settings, None, add)
    else:
        with scratch_folder() as folder:
            settings = Settings(world, backend, names, sizes, timeout, dtype, loops)
            with closing(_run(folder, settings)) as rows:  # end the ranks also if `on_timing` raises
                for row in rows:
                    add(Timing(*row))
    return timings


def _ranks_here(backend: str) -> int:
    """How many ranks are started if no number is given."""
    if backend != "nccl":
        return 2
    import torch

    return max(1, torch.cuda.device_count())  # without a GPU `check_backend` says what one rank needs


class Loops(NamedTuple):
    """How collectives are measured: among so many ranks, in all groups of neighbours at once; after `pause` seconds of
    sleep before each call, which are not counted; for some `seconds` each time.
    """

    groups: Sequence[int]
    pause: float = 0.0
    seconds: float = _SECONDS


class Settings(NamedTuple):
    """The settings of a benchmark, for all ranks."""

    world: int
    backend: str
    collectives: Sequence[str]
    sizes: Sequence[int]
    timeout: float
    dtype: str
    loops: Loops


def _run(folder: Path, settings: Settings) -> Generator[list[Any]]:
    """Start the ranks, and yield rank 0's rows as they arrive."""
    job = folder / "job.json"
    with temporary():
        job.write_text(json.dumps(settings))
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    found = folder / "timings"
    found.touch()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(settings.world):
            with open(folder / f"rank{rank}.log", "wb") as log:
                command = [
                    sys.executable,
                    "-m",
                    "distir.backends.processes.bench_collectives",
                    str(folder),
                    str(rank),
                    str(os.getpid()),
                ]
                ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env))
        read = 0
        last_message = time.monotonic()
        while True:
            ended = [p.poll() for p in ranks]
            rows = found.read_text().splitlines(keepends=True)
            rows = [row for row in rows if row.endswith("\n")]
            yield from map(json.loads, rows[read:])
            last_message = time.monotonic() if len(rows) > read else last_message
            read = len(rows)
            failed = {r: code for r, code in enumerate(ended) if code}
            if failed:
                rank = min(failed, key=lambda r: (failed[r] > 0, r))  # a killed rank is the likeliest cause
                if failed[rank] < 0:
                    raise WorkerError(f"rank {rank} {ending(failed[rank])}")
                log = (folder / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
                raise WorkerError(f"rank {rank} failed{f': {log[-1]}' if log else ''}")
            if all(code == 0 for code in ended):
                return
            if time.monotonic() - last_message > settings.timeout:
                raise WorkerError(f"no rank has answered for {settings.timeout:g} s")
            time.sleep(0.02)
    finally:
        for p in ranks:
            p.kill()
            p.wait()


def _measure_all(rank: int, local_rank: int, settings: Settings, store: Any, report: Callable[[Timing], None]) -> None:
    """Measure everything as one rank; rank 0 reports."""
    import torch

    from distir.backends.processes.preflight import backend_and_device
    from distir.backends.transport.torch_distributed import leave_group, start_group

    torch.set_num_threads(1)
    name, where = backend_and_device(settings.backend, local_rank)
    world, device, dtype = settings.world, torch.device(where), getattr(torch, settings.dtype)
    start_group(name, rank, world, device, store, settings.timeout)
    done = False
    failures: list[Exception] = []
    try:
        for n, collective, size in itertools.product(settings.loops.groups, settings.collectives, settings.sizes):
            size, over, call = _prepare(collective, size, rank, n, device, dtype)
            seconds = _measure(call, device, settings.loops)
            if rank == 0:
                bandwidth = size / seconds
                bus = bandwidth * bus_factor(collective, n)
                try:
                    report(Timing(collective, size, seconds, bandwidth, bus, over, n))
                except Exception as e:  # broadcast by `_enough`, or the other ranks would wait for this one
                    failures.append(e)
            if _enough(failures, device):
                break
        done = True
    finally:
        leave_group(done)
    if failures:
        raise failures[0]


def _enough(failures: Sequence[Exception], device: torch.device) -> bool:
    """Whether rank 0 has a failure; on all ranks."""
    import torch
    import torch.distributed as dist

    failed = torch.full((1,), float(bool(failures)), device=device)
    dist.broadcast(failed, 0)
    return bool(failed.item())


def _prepare(
    collective: str, size: int, rank: int, world: int, device: torch.device, dtype: torch.dtype
) -> tuple[int, str, Callable[[], None]]:
    """(size in bytes, rounded to fit dtype and ranks; transport; function that runs the collective or copy once).

    Over MPI it is one of `world` neighbours, which may be some of all ranks.
    """
    import torch
    import torch.distributed as dist

    from distir.backends.tensors.staging import DeviceMemory
    from distir.backends.tensors.torch_namespace import torch_dtype
    from distir.backends.transport.exchange import Reductions, gather, reduce_parts
    from distir.backends.transport.interface import Line, to_next, wait_all
    from distir.backends.transport.nccl import all_gather, reduce_scatter
    from distir.backends.transport.shared_memory.shared import SharedMemory
    from distir.backends.transport.torch_distributed import over_mpi, peer_memory

    if collective in COPIES:
        return _prepare_copy(collective, size, device, dtype)
    elements = max(1, size // (dtype.itemsize * world)) * world
    whole, other = (torch.zeros(elements, device=device, dtype=dtype) for _ in range(2))
    part = torch.zeros(elements // world, device=device, dtype=dtype)
    parts = list(whole.chunk(world)) if rank == 0 else None
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: all_gather(whole, part),
        "reduce-scatter": lambda: reduce_scatter(part, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "gather": lambda: dist.gather(part, parts),
        "scatter": lambda: dist.scatter(part, parts),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "send-recv": lambda: _pass_on(whole, other, rank, world),
        "send": lambda: wait_all(
            to_next(lambda to: [dist.isend(whole, to)], lambda source: [dist.irecv(other, source)], rank, world)
        ),
    }
    if (mpi := over_mpi()) is not None:
        return dtype.itemsize * elements, "mpi", mpi.benchmark(collective, whole, other, part, world)
    peers, ranks = peer_memory(), list(range(world))
    if peers is not None and peers.reaches(ranks):
        near = SharedMemory(peers)
        line, memory = Line(None, ranks, rank, None, near), DeviceMemory(device)
        types = [Tensor(next(t for t in DType.all.values() if torch_dtype(t) is dtype), part.shape)]
        gathers = gather(memory, line, types, [(0, 1, world)], [False])
        reduces = reduce_parts(memory, line, types, [(0, 1, world)], "sum", Reductions())
        rows, others = whole.view(world, -1), other.view(world, -1)
        near_calls: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda: near.all_reduce(whole, line, "sum").wait(),
            "all-gather": lambda: gathers([part])(),
            "reduce-scatter": lambda: reduces([whole])(),
            "all-to-all": lambda: wait_all(near.all_to_all(others, rows, line)),
            "send-recv": lambda: wait_all(
                near.send(whole, (rank + 1) % world, 0) + near.receive(other, (rank - 1) % world, 0)
            ),
            "send": lambda: wait_all(
                to_next(lambda to: near.send(whole, to, 0), lambda source: near.receive(other, source, 0), rank, world)
            ),
        }
        if collective in near_calls:
            return dtype.itemsize * elements, "memory", near_calls[collective]
    return dtype.itemsize * elements, dist.get_backend(), calls[collective]


def _prepare_copy(
    name: str, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[int, str, Callable[[], None]]:
    """As `_prepare`, for a copy."""
    import torch

    def buffer(on_host: bool) -> torch.Tensor:
        elements = max(1, size // dtype.itemsize)
        if on_host:
            return torch.zeros(elements, dtype=dtype, pin_memory=device.type == "cuda")
        return torch.zeros(elements, dtype=dtype, device=device)

    source, target = buffer(name == "host-to-device"), buffer(name == "device-to-host")

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return source.nbytes, "copy", copy


def _pass_on(x: torch.Tensor, received: torch.Tensor, rank: int, world: int) -> None:
    """Every rank sends to the next and receives from the one before."""
    import torch.distributed as dist

    both = dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)
    for work in dist.batch_isend_irecv(list(both)):  # unbatched, NCCL would deadlock: all send, none receives
        work.wait()


def _measure(call: Callable[[], None], device: torch.device, loops: Loops) -> float:
    """Seconds of one call on the slowest rank: the median of several loops, each started at a barrier."""
    import statistics

    import torch
    import torch.distributed as dist

    sleep = sleeper(loops.pause, False)

    def loop(times: int) -> float:
        dist.barrier()
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(times):
            sleep()
            call()
        _synchronize(device)
        each = (time.perf_counter() - begin) / times - loops.pause
        took = torch.tensor([each], dtype=torch.float64, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    loop(1)
    times = int(min(_MOST, max(_LEAST, loops.seconds / max(loop(_LEAST) + loops.pause, 1e-9))))
    return statistics.median(loop(times) for _ in range(_MEASUREMENTS))


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """The process of one rank, started by `bench_collectives`."""
    from torch._C._distributed_c10d import FileStore

    from distir.backends.processes.cores import bind
    from distir.backends.processes.preflight import ON_CPUS

    folder, rank, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with(parent, f"distir-rank{rank}")
    settings = Settings(*json.loads((folder / "job.json").read_text()))
    settings = settings._replace(loops=Loops(*settings.loops))
    with open(folder / "timings", "a", buffering=1) as out:
        store = FileStore(str(folder / "store"), settings.world)

        def report(t: Timing) -> None:
            out.write(json.dumps(t) + "\n")

        try:
            if settings.backend in ON_CPUS:
                bind(rank, settings.world)
            _measure_all(rank, rank, settings, store, report)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # no clean-up that would wait for other ranks


if __name__ == "__main__":
    main()
