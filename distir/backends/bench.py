"""The interconnect benchmark: latency and bandwidth of each collective at each size, as a run has them.

Sizes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md there): the size is what one rank has before a
broadcast, reduction, all-reduce, all-to-all, reduce-scatter, scatter or send, and after a gather or all-gather.
Algorithm bandwidth is size / seconds; bus bandwidth multiplies it by 2 (n-1)/n for an all-reduce, 1 for broadcast,
reduction and send, (n-1)/n for the others, so that it can be compared with the links' whatever n is.
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

from distir.backends.held import scratch_folder
from distir.backends.worker import die_with, ending
from distir.ir.errors import UsageError, WorkerError
from distir.ir.files import temporary
from distir.ir.type import DType, Tensor

if TYPE_CHECKING:
    import torch

_PARTS = ("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter")
"""Those in which what a rank keeps does not go anywhere."""
COLLECTIVES = ("all-reduce", *_PARTS, "broadcast", "reduce", "send-recv")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
SIZES = tuple(4**k for k in range(5, 14))
"""1 KiB to 64 MiB."""
_SECONDS = 0.1
"""What one measurement should take, and how many repetitions are at least and at most made for it."""
_LEAST, _MOST = 3, 200
_MEASUREMENTS = 3
"""Of so many the median counts."""


class Timing(NamedTuple):
    """One collective at one size (bytes): seconds, and bandwidths in bytes/s. `over`: "gloo", "nccl", or "memory" where
    ranks of one host read and write each other's.
    """

    collective: str
    size: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    over: str


def bus_factor(collective: str, n: int) -> float:
    """Bus bandwidth over algorithm bandwidth among n ranks."""
    if collective == "all-reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if collective in _PARTS else 1.0


def bench_collectives(
    nproc: int,
    backend: str = "gloo",
    collectives: Sequence[str] = COLLECTIVES,
    sizes: Sequence[int] = SIZES,
    timeout: float = 600.0,
    on_timing: Callable[[Timing], None] | None = None,
    dtype: str = "float32",
) -> list[Timing]:
    """Measure on `nproc` ranks, started here and ended with the call; as torchrun's rank where the environment says so.

    `timeout`: seconds without any timing. Raises UsageError for arguments that do not fit, WorkerError, naming the
    rank, if one fails or does not answer.
    """
    from distir.backends.limits import check_backend, joined

    unknown = [c for c in collectives if c not in COLLECTIVES]
    if unknown:
        raise UsageError(f"unknown collective {unknown[0]!r}", f"known are {', '.join(COLLECTIVES)}")
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", f"known are {', '.join(DTYPES)}")
    if min(sizes, default=0) < 1:
        raise UsageError(f"sizes are at least 1 byte, got {list(sizes)}")
    torchrun = joined()
    world = torchrun[0] if torchrun else nproc
    if world < 2:
        raise UsageError(f"collectives need at least 2 ranks, got {world}", "use --nproc 2")
    check_backend(backend, torchrun[1] if torchrun else world)
    timings: list[Timing] = []

    def add(t: Timing) -> None:
        timings.append(t)
        if on_timing is not None:
            on_timing(t)

    if torchrun:
        _measure_all(int(os.environ["RANK"]), Settings(world, backend, collectives, sizes, timeout, dtype), None, add)
    else:
        with scratch_folder() as folder:
            settings = Settings(world, backend, collectives, sizes, timeout, dtype)
            with closing(_run(folder, settings)) as rows:  # whatever `on_timing` raises, the ranks end first
                for row in rows:
                    add(Timing(*row))
    return timings


class Settings(NamedTuple):
    """What all ranks must know."""

    world: int
    backend: str
    collectives: Sequence[str]
    sizes: Sequence[int]
    timeout: float
    dtype: str


def _run(folder: Path, settings: Settings) -> Generator[list[Any]]:
    """Start the ranks, and give rank 0's rows as they come."""
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
                command = [sys.executable, "-m", "distir.backends.bench", str(folder), str(rank), str(os.getpid())]
                ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env))
        read = 0
        heard = time.monotonic()
        while True:
            ended = [p.poll() for p in ranks]
            rows = found.read_text().splitlines(keepends=True)
            rows = [row for row in rows if row.endswith("\n")]
            yield from map(json.loads, rows[read:])
            heard = time.monotonic() if len(rows) > read else heard
            read = len(rows)
            failed = {r: code for r, code in enumerate(ended) if code}
            if failed:
                rank = min(failed, key=lambda r: (failed[r] > 0, r))  # a death says most
                if failed[rank] < 0:
                    raise WorkerError(f"rank {rank} {ending(failed[rank])}")
                log = (folder / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
                raise WorkerError(f"rank {rank} failed{f': {log[-1]}' if log else ''}")
            if all(code == 0 for code in ended):
                return
            if time.monotonic() - heard > settings.timeout:
                raise WorkerError(f"no rank has answered for {settings.timeout:g} s")
            time.sleep(0.02)
    finally:
        for p in ranks:
            p.kill()
            p.wait()


def _measure_all(rank: int, settings: Settings, store: Any, report: Callable[[Timing], None]) -> None:
    """What one rank does; rank 0 reports."""
    import torch

    from distir.backends.comm import leave_group, start_group
    from distir.backends.limits import place_of

    torch.set_num_threads(1)
    name, where = place_of(settings.backend, int(os.environ.get("LOCAL_RANK", rank)))
    world, device, dtype = settings.world, torch.device(where), getattr(torch, settings.dtype)
    start_group(name, rank, world, device, store, settings.timeout)
    done = False
    failures: list[Exception] = []
    try:
        for collective, size in itertools.product(settings.collectives, settings.sizes):
            size, over, call = _prepare(collective, size, rank, world, device, dtype)
            seconds = _measure(call, device)
            if rank == 0:
                bandwidth = size / seconds
                bus = bandwidth * bus_factor(collective, world)
                try:
                    report(Timing(collective, size, seconds, bandwidth, bus, over))
                except Exception as e:  # the other ranks are told, else they would wait for this one
                    failures.append(e)
            if _enough(failures, device):
                break
        done = True
    finally:
        leave_group(done)
    if failures:
        raise failures[0]


def _enough(failures: Sequence[Exception], device: torch.device) -> bool:
    """Whether rank 0 has any."""
    import torch
    import torch.distributed as dist

    told = torch.full((1,), float(bool(failures)), device=device)
    dist.broadcast(told, 0)
    return bool(told.item())


def _prepare(
    collective: str, size: int, rank: int, world: int, device: torch.device, dtype: torch.dtype
) -> tuple[int, str, Callable[[], None]]:
    """The size in bytes, made to fit the dtype and the ranks, over what it goes, and what runs the collective once."""
    import torch
    import torch.distributed as dist

    from distir.backends.comm import all_gather, nearby, reduce_scatter
    from distir.backends.exchange import Reductions, exchange, gather, reduce_parts
    from distir.backends.memory import Memory
    from distir.backends.namespace import torch_dtype
    from distir.backends.transfers import Line, wait_all

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
    }
    near, ranks = nearby(), list(range(world))
    if near is not None and near.reaches(ranks):
        line, memory = Line(None, ranks, rank, None, near), Memory(device)
        types = [Tensor(next(t for t in DType.all.values() if torch_dtype(t) is dtype), part.shape)]
        gathers = gather(memory, line, types, [(0, 1, world)], [False])
        reduces = reduce_parts(memory, line, types, [(0, 1, world)], "sum", Reductions())
        rows, others = whole.view(world, -1), other.view(world, -1)
        quick: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda: near.allreduce(whole, ranks, "sum").wait(),
            "all-gather": lambda: gathers([part])(),
            "reduce-scatter": lambda: reduces([whole])(),
            "all-to-all": lambda: wait_all(exchange(others, rows.unbind(), line)),
            "send-recv": lambda: wait_all(
                [near.send(whole, (rank + 1) % world, 0), near.receive(other, (rank - 1) % world, 0)]
            ),
        }
        if collective in quick:
            return dtype.itemsize * elements, "memory", quick[collective]
    return dtype.itemsize * elements, dist.get_backend(), calls[collective]


def _pass_on(x: torch.Tensor, received: torch.Tensor, rank: int, world: int) -> None:
    """Every rank sends to the next and receives from the one before."""
    import torch.distributed as dist

    both = dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)
    for work in dist.batch_isend_irecv(list(both)):  # on NCCL all would else send, and none receive
        work.wait()


def _measure(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, by the slowest rank: the median of several loops that all ranks begin together."""
    import statistics

    import torch
    import torch.distributed as dist

    def loop(times: int) -> float:
        dist.barrier()
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(times):
            call()
        _synchronize(device)
        took = torch.tensor([(time.perf_counter() - begin) / times], dtype=torch.float64, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    loop(1)
    times = int(min(_MOST, max(_LEAST, _SECONDS / max(loop(_LEAST), 1e-9))))
    return statistics.median(loop(times) for _ in range(_MEASUREMENTS))


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """One rank that `bench_collectives` has started."""
    from torch._C._distributed_c10d import FileStore

    folder, rank, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with(parent, f"distir-rank{rank}")
    settings = Settings(*json.loads((folder / "job.json").read_text()))
    with open(folder / "timings", "a", buffering=1) as out:
        store = FileStore(str(folder / "store"), settings.world)

        def report(t: Timing) -> None:
            out.write(json.dumps(t) + "\n")

        try:
            _measure_all(rank, settings, store, report)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # no clean-up that would wait for other ranks


if __name__ == "__main__":
    main()
