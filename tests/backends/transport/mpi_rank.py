"""One rank of mpirun in `test_mpi.py`: compares all that it runs, and prints on rank 0 what it has done."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distir.backends.processes.bench_collectives import COLLECTIVES, _prepare
from distir.backends.tensors.staging import Staged
from distir.backends.transport.interface import Line, wait, wait_all
from distir.backends.transport.mpi import Mpi
from distir.backends.transport.torch_distributed import leave_group, over_mpi, start_group
from distir.cli import main
from distir.ir.errors import WorkerError
from distir.runtime.launcher import launched
from tests.backends.transport.test_transports import compared, run_chained

ROUNDED = 4097
"""Numbers in reductions of 16 bits: more than an internal segment of many algorithms."""


@contextlib.contextmanager
def joined(rank: int, n: int) -> Iterator[Mpi]:
    """In a group of n ranks, as a run is."""
    start_group("mpi", rank, n, torch.device("cpu"), None, 60.0)
    mpi = over_mpi()
    assert mpi is not None
    try:
        yield mpi
    finally:
        leave_group(True)


def rounded(mpi: Mpi, rank: int, n: int) -> None:
    """Sums of 16 bits are exact to a rounding of each sum of two; a sum in 16 bits of any order is."""
    line = Line(None, list(range(n)), rank, None, mpi)
    for dtype, epsilon in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        xs = torch.randn((n, ROUNDED), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
        out = torch.empty(ROUNDED, dtype=dtype)
        wait(mpi.all_reduce_into(out, xs[rank].contiguous(), line, "sum"))
        error = (out.double() - xs.double().sum(0)).abs()
        assert (error <= n * epsilon * xs.double().abs().sum(0)).all()
        assert not torch.equal(out, torch.zeros_like(out))
        wait(mpi.all_reduce_into(out, xs[rank].contiguous(), line, "max"))
        assert torch.equal(out, xs.amax(0))


def silent(mpi: Mpi, rank: int, n: int) -> None:
    """A rank that waits for one that sends nothing says so in time."""
    out, sent, mpi.timeout = torch.zeros(3), torch.ones(3), 0.2
    received = mpi.receive(out, (rank + 1) % n, 7)
    with pytest.raises(WorkerError, match=r"other ranks have not taken part in communication for 0\.2 s"):
        received[0].wait()
    mpi.timeout = 60.0
    mpi.least([0])
    wait_all(mpi.send(sent, (rank - 1) % n, 7))
    while not out.all():
        mpi.beside.progress()


GPT = "gpt:layers=2,hidden=8,heads=2,vocab=16,seq=4,batch=8"
CUBES = "cosmoflow:size=8,channels=2,filters=4-8,dense=8-4,batch=4"
TABLES = "dlrm:tables=2,rows=9,width=4,dense=3,top=5-1,batch=8"
PLANS = {
    2: [
        [TABLES, "--split", "ep=2:dense.0,labels.0,tables.0,indices.1"],
        [CUBES, "--split", "h=2:x.2"],
    ],
    4: [
        [GPT, "--tp", "2", "--pp", "2", "--microbatches", "2"],
        [GPT, "--dp", "2", "--pp", "2", "--microbatches", "2", "--zero", "1"],
        [CUBES, "--split", "h=2:x.2", "--split", "w=2:x.3"],
    ],
}
"""Of each number of ranks."""


def command(*words: str) -> dict[str, Any]:
    """What `distir run` says as JSON, on rank 0."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["run", *words, "--backend", "mpi", "--json"]) == 0
    return json.loads(out.getvalue() or "{}")


def errors(found: dict[str, Any]) -> list[float]:
    """The largest errors against the sequential program: of outputs, gradients (not with ZeRO), changes of weights."""
    kinds = [found["check"][kind] for kind in ("outputs", "gradients", "weights")]
    return [kind["error"] for kind in kinds if kind is not None]


def everything(rank: int, n: int) -> dict[str, Any]:
    with joined(rank, n) as mpi:
        values = [compared(rank, n), compared(rank, n, memory=Staged(torch.device("cpu")))]
        rounded(mpi, rank, n)
        silent(mpi, rank, n)
        chain = run_chained(rank, n)
        timed = {c: bool(_prepare(c, 64, rank, n, torch.device("cpu"), torch.float32)[2]()) for c in COLLECTIVES}
        for c in COLLECTIVES if n == 4 else ():  # in groups of neighbours
            _prepare(c, 64, rank, 2, torch.device("cpu"), torch.float32)[2]()
    assert chain == [[k, k + 1] for k in (rank - 1, rank) if 0 <= k < n - 1]
    checked = [command(*plan, "--dtype", "float64", "--steps", "2", "--check") for plan in PLANS[n]]
    proxies = [command(*plan, "--proxy", "--iterations", "3", "--warmup", "1") for plan in PLANS[n]]
    if rank:
        assert not any([*checked, *proxies])
        return {}
    return {
        "values": values,
        "collectives": list(timed),
        "errors": [errors(found) for found in checked],
        "ok": [found["check"]["ok"] for found in checked],
        "iterations": [len(found["seconds"]) for found in proxies],
        "backends": [found["backend"] for found in checked + proxies],
    }


if __name__ == "__main__":
    place = launched()
    assert place is not None
    found = everything(place.rank, place.world)
    if place.rank == 0:
        print(json.dumps(found))
