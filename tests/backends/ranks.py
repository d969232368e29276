"""Ranks for tests of what backends do between them: forked from a process that has loaded torch, joined over gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 30.0
"""Seconds that a rank waits for another."""
_SECONDS = 2 * TIMEOUT


def on_ranks(n: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(rank, n, *args)` gives on each of n ranks in a process group.

    `work` is a function of a module. Fails with the traceback of the first rank that fails, or if one does not answer.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["distir.backends.processes.rank_loop", __name__])
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes: list[Any] = []
        for rank in range(n):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, n, folder, theirs, work, args), daemon=True)
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        try:
            found = [_result(rank, end) for rank, end in enumerate(ends)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found


def _result(rank: int, end: Connection) -> Any:
    if not wait([end], _SECONDS):
        raise AssertionError(f"rank {rank} does not answer")
    try:
        ok, result = end.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} is gone") from None
    if not ok:
        raise AssertionError(f"rank {rank}: {result}")
    return result


def _rank(rank: int, n: int, folder: str, end: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from distir.backends.transport.torch_distributed import start_group

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        start_group("gloo", rank, n, torch.device("cpu"), FileStore(str(Path(folder) / "store"), n), TIMEOUT)
        end.send((True, work(rank, n, *args)))
        dist.barrier()  # others may still be at work
    except BaseException:
        end.send((False, traceback.format_exc()))
    os._exit(0)
