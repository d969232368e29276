"""The process groups that a rank makes: its own alone, in an order in which nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import distir
from distir.backends.lowering.engine import TorchRank
from distir.backends.transport import torch_distributed as comm
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.device import Device, Mesh
from distir.ir.function import Function, FunctionMaker, Value
from distir.ir.type import Float64, Shard, Tensor
from distir.models.gpt import gpt
from distir.transforms.differentiation.training import training_step
from distir.transforms.rank.post_receives import posted_ahead
from distir.transforms.rank.project import project_all
from distir.transforms.rank.project import ranks as devices_of
from tests.backends.ranks import on_ranks

Group = tuple[int, ...]


def all_groups(program: Function, ranks: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Group]]:
    """The groups that each of these ranks makes, in order, with a backend that knows no numbers of messages."""
    devices, programs = devices_of(program), project_all(program)
    ahead = {p.function: posted_ahead(p).function for p in {p.function: p for p in programs}.values()}
    made: list[Group] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: made.append(tuple(ranks)))
    found: dict[int, list[Group]] = {}
    for r in ranks:
        made.clear()
        monkeypatch.setattr(comm, "_groups", {})
        comm.Network(ahead[programs[r].function], devices, r, torch.device("cpu"), numbered=False)
        found[r] = list(made)
    return found


def stuck(rows: dict[int, list[Group]]) -> list[int]:
    """The ranks that do not come to the end of their rows, if each waits at every group for all of its ranks."""
    at = dict.fromkeys(rows, 0)
    todo = list(rows)
    while todo:
        r = todo.pop()
        while at[r] < len(rows[r]):
            group = rows[r][at[r]]
            if any(at[k] == len(rows[k]) or rows[k][at[k]] != group for k in group):
                break
            for k in group:
                at[k] += 1
            todo += group
    return [r for r in rows if at[r] < len(rows[r])]


def test_a_rank_of_1024_makes_its_own_groups_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 16 x 8 x 8 devices: one of dp, one of tp, one with its counterpart on the first or last stage, which has the
    same tied weight, and a way in each direction to the stages before and after it.
    """
    model = gpt(layers=8, width=64, heads=8, vocabulary=64, sequence=4, batch=32)
    program = distir.distribute(training_step(model), distir.Plan(dp=16, tp=8, pp=8, microbatches=2), check=False)
    found = all_groups(program, range(1024), monkeypatch)
    everybodys = {(k, g) for groups in found.values() for k, g in enumerate(groups)}
    assert len(everybodys) > 1000
    for r, groups in found.items():
        assert all(r in group for group in groups)
        assert {len(g) for g in groups} == {16, 8, 2}
        assert len(groups) <= 2 + 2 + 4
    assert stuck(found) == []


def crossing() -> Function:
    """Overlapping groups, used by no two ranks in the same number."""
    devices = [Device("cpu", k) for k in range(8)]
    f = FunctionMaker("main")
    results: list[Value] = []
    for k, members in enumerate([(0, 1), (1, 2, 3), (2, 0), (3, 4, 5, 6), (6, 7), (7, 0), (5, 1), (0, 1)]):
        mesh = Mesh([devices[r] for r in members], {"a": len(members)}, f"m{k}")
        x = f.add_input_value("x", Tensor.whole(Float64, (2 * len(members),), mesh, (Shard(0),)))
        y = f.emit("MPIAllgather", x, axis="a")
        assert isinstance(y, Value)
        results.append(y)
    f.set_outputs(results)
    return f.finalize()


def test_ranks_in_overlapping_groups_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    found = all_groups(crossing(), range(8), monkeypatch)
    assert found[0] == [(0, 1), (0, 2), (0, 7)]
    assert found[7] == [(6, 7), (0, 7)]
    assert stuck(found) == []
    assert stuck({0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}) == [0, 1, 2]


def results(rank: int, n: int, program: Function, arrays: list[Any]) -> dict[int, list[float]]:
    """What a rank has of the outputs, twice made: a second engine finds the groups of the first."""
    for _ in range(2):
        engine = TorchRank(program, rank)
        engine.load(dict(enumerate(arrays)))
        found = {k: x.tolist() for k, x in engine.step().items()}
    return found


def test_eight_ranks_each_make_their_own() -> None:
    program = crossing()
    arrays = [np.arange(float(v.type.global_shape[0])) + k for k, v in enumerate(program.inputs)]  # type: ignore[union-attr]
    want = SequentialExecutor().compute(program, arrays)
    for rank, found in enumerate(on_ranks(8, results, program, arrays)):
        inside = [k for k, v in enumerate(program.outputs) if Device("cpu", rank) in v.type.device.devices]  # type: ignore[union-attr]
        assert found == {k: want[k].tolist() for k in inside}
