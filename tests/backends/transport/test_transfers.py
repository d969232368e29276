"""Sends and receives between ranks: none blocks, batches go together, and what was sent is let go."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distir.backends.lowering.engine import python_source
from distir.backends.tensors.staging import DeviceMemory, Staged
from distir.backends.transport import transfers
from distir.backends.transport.transfers import Transfers, directions
from distir.ir.device import Device, Mesh
from distir.ir.function import Function, FunctionMaker
from distir.ir.type import Float32, Shard, Tensor
from distir.transforms.rank.post_receives import posted_ahead
from distir.transforms.rank.project import project_all
from tests.backends.ranks import on_ranks

ROW = Tensor(Float32, (4,))
CPU = torch.device("cpu")


def pass_on(rank: int, n: int) -> list[list[float]]:
    """Everybody sends to the next before anybody receives; twice under one number, which go in order."""
    t = Transfers(rank, DeviceMemory(CPU))
    for k in range(2):
        t.send(torch.full((4,), 10.0 * rank + k), (rank + 1) % n, 7)
    t.post()
    pending = [t.receive(ROW, (rank - 1) % n, 7) for _ in range(2)]
    found = [wait().tolist() for wait in pending]
    t.drain()
    return found


def test_all_send_first() -> None:
    assert on_ranks(3, pass_on) == [[[10.0 * r + k] * 4 for k in range(2)] for r in (2, 0, 1)]


def sends_of_limit(rank: int, n: int, stays: bool) -> tuple[int, int]:
    """How many of five sends of rank 0 are not waited for yet, and how many of their tensors are still there."""
    transfers._IN_FLIGHT_BYTES = 0  # type: ignore[attr-defined]
    t = Transfers(rank, DeviceMemory(CPU))
    if rank == 1:
        pending = [t.receive(ROW, 0, k) for k in range(5)]
        t.post()
        assert [wait()[0].item() for wait in pending] == [0, 1, 2, 3, 4]
        dist.barrier()
        return 0, 0
    there: list[Any] = []
    for k in range(5):
        x = torch.full((4,), float(k))
        there.append(weakref.ref(x))
        t.send(x, 1, k, stays)
        del x
        t.post()
    found = len(t._sent), sum(x() is not None for x in there)
    t.drain()
    dist.barrier()
    return found


@pytest.mark.parametrize(("stays", "left"), [(False, 2), (True, 5)])
def test_what_was_sent_is_let_go_beyond_a_limit(stays: bool, left: int) -> None:
    assert on_ranks(2, sends_of_limit, stays)[0] == (left, left)


def memory_seen(rank: int, n: int) -> bool:
    """That the backend is given, and gives, only what stands in staged memory."""
    memory = Staged(CPU)
    made: list[int] = []
    empty = memory.empty
    memory.empty = lambda shape, dtype: made.append((x := empty(shape, dtype)).data_ptr()) or x  # type: ignore[method-assign]
    given: list[int] = []
    for name in ("isend", "irecv"):
        send = getattr(dist, name)
        setattr(dist, name, lambda x, *a, send=send, **k: given.append(x.data_ptr()) or send(x, *a, **k))
    t = Transfers(rank, memory)
    x = torch.arange(4.0)
    t.send(x, 1 - rank, 0)
    got = t.receive(ROW, 1 - rank, 0)()
    t.drain()
    return got.tolist() == [0, 1, 2, 3] and len(given) == 2 and set(given) == set(made) and got.data_ptr() not in made


def test_staged_memory_is_all_that_the_backend_sees() -> None:
    assert on_ranks(2, memory_seen) == [True, True]


def two_stages() -> Function:
    """Two values of one stage go to another, and one comes back."""
    a, b = (Mesh([Device("cpu", 2 * s + k) for k in range(2)], {"dp": 2}, f"m{s}") for s in range(2))
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor.whole(Float32, (4,), a, (Shard(0),)))
    y = f.emit("Neg", x)
    sent = f.emit("Unpack", f.emit("Send", f.emit("Pack", x, y), to=b))
    f.set_outputs([f.emit("Send", f.emit("Add", *sent), to=a)])
    return f.finalize()


def test_directions_in_which_a_program_sends() -> None:
    number = {Device("cpu", k): k for k in range(4)}
    for p in project_all(two_stages()):
        r = p.rank
        there, back = ((r, r + 2), (r + 2, r)) if r < 2 else ((r - 2, r), (r, r - 2))
        assert directions(posted_ahead(p).function, p.device, number) == [there, back]


def test_what_is_sent_together_is_posted_together() -> None:
    lines = [line.strip() for line in python_source(two_stages(), 0).splitlines()]
    posts = [k for k, line in enumerate(lines) if line == "post()"]
    sends = [k for k, line in enumerate(lines) if line.startswith("send")]
    receives = [k for k, line in enumerate(lines) if "= receive" in line]
    assert len(sends) == 2
    assert len(receives) == 1
    assert len(posts) == 1  # all three follow one another
    assert posts[0] > max(*sends, *receives)
