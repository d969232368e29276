"""A proxy's messages are those of the real run: the same calls, with as many bytes, in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.backends.lowering.engine import TorchRank
from distir.backends.transport import torch_distributed as comm
from distir.backends.transport.mpi import Mpi
from distir.ir.function import Function
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.proxied import proxied

CASES = {
    "tables": (
        "dlrm:tables=2,rows=9,width=4,dense=3,top=5-1,batch=8",
        {"split": ("ep=2:dense.0,labels.0,tables.0,indices.1",)},
    ),
    "halos": ("cosmoflow:size=16,kernel=5,channels=2,filters=4-8,dense=8-4,batch=4", {"split": ("h=2:x.2", "w=2:x.3")}),
    "zero": ("gpt:layers=1,hidden=8,heads=2,vocab=16,seq=4,batch=8", {"dp": 2, "tp": 2, "zero": 3}),
    "stages": ("gpt:layers=2,hidden=8,heads=2,vocab=16,seq=4,batch=8", {"pp": 2, "dp": 2, "microbatches": 2}),
}


class _Done:
    def wait(self) -> None: ...


class Recorder(Mpi):
    """A transport that moves nothing, and notes what it is to move: the call, bytes, ranks."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def note(self, *call: Any) -> list[Any]:
        self.calls.append(call)
        return [_Done()]

    def all_reduce(self, x: torch.Tensor, line: Any, kind: str) -> Any:
        return self.note("reduce", x.nbytes, line.ranks, kind)[0]

    def all_reduce_into(self, out: torch.Tensor, x: torch.Tensor, line: Any, kind: str) -> Any:
        assert out.nbytes == x.nbytes
        return self.all_reduce(out, line, kind)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, line: Any) -> Any:
        assert out.nbytes == x.nbytes * len(line.ranks)
        return self.note("gather", x.nbytes, line.ranks)

    def reduce_scatter(self, rows: torch.Tensor, line: Any, kind: str, memory: Any) -> Any:
        assert len(rows) == len(line.ranks)
        out = rows[0].clone()
        return self.note("scatter", rows.nbytes, line.ranks, kind), lambda: out

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, line: Any) -> Any:
        assert out.shape[0] == rows.shape[0] == len(line.ranks)
        return self.note("all to all", rows.nbytes, out.nbytes, line.ranks)

    def exchange(self, sent: Any, received: Any, line: Any) -> Any:
        return self.note("exchange", *([(rank, x.nbytes) for rank, x in row] for row in (sent, received)))

    def send(self, x: torch.Tensor, to: int, message: int) -> Any:
        return self.note("send", x.nbytes, to)

    def receive(self, out: torch.Tensor, source: int, message: int) -> Any:
        out.zero_()
        return self.note("receive", out.nbytes, source)


def calls(program: Function, rank: int, grouped: bool, proxy: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What one step of a rank asks of its transport, and of the next step, too."""
    transport = Recorder()
    transport.grouped = grouped  # type: ignore[misc]
    monkeypatch.setattr(comm, "Gloo", lambda: transport)
    monkeypatch.setattr(comm, "_new_group", lambda ranks: None)
    engine = TorchRank(program, rank, proxy=proxy)
    if proxy:
        engine.reserve()
    else:
        whole = {k: np.zeros(v.type.global_shape, v.type.dtype.numpy) for k, v in enumerate(program.inputs)}  # type: ignore[union-attr]
        engine.load(whole)
    engine.step()
    engine.step()
    return transport.calls


@pytest.mark.parametrize("name", CASES)
def test_the_same_messages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, plan = CASES[name]
    model = distir.load(text)
    program = as_run(distir.distribute(model, distir.Plan(**plan)))
    hollow = proxied(program, lambda function, op: 0.0)
    for rank in (0, 3) if name != "tables" else (1,):
        for grouped in (True, False):
            real = calls(program, rank, grouped, False, monkeypatch)
            assert len(real) > 4
            assert calls(hollow, rank, grouped, True, monkeypatch) == real
