"""Gathers and reductions to parts, as messages between ranks: large parts by themselves, small ones together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.backends.lowering.engine import TorchRank, python_source
from distir.backends.tensors.layout import split_front
from distir.backends.tensors.staging import DeviceMemory
from distir.backends.transport import exchange
from distir.backends.transport import torch_distributed as comm
from distir.backends.transport.exchange import Reductions, _whole, gather, reduce_parts
from distir.backends.transport.gloo import Gloo
from distir.backends.transport.interface import Line
from distir.ir.device import Device, Mesh
from distir.ir.function import FunctionMaker, Role
from distir.ir.type import REPLICATE, Float64, Tensor
from distir.transforms.differentiation.training import AdamW
from tests.backends.threads import World
from tests.transforms.programs import Plan, distributed, imported_mlp

CPU = torch.device("cpu")
Whole = tuple[tuple[int, ...], int, int]
"""A shape, and which dim is split, and how often it is split further out."""


@st.composite
def wholes(draw: st.DrawFn, n: int) -> Whole:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim, outer = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 2))
    shape[dim] *= outer * n
    return tuple(shape), dim, outer


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[Whole]]:
    """The ranks of a line, in its order, and tensors that are split along it."""
    n = draw(st.integers(1, 4))
    return draw(st.permutations(range(n))), draw(st.lists(wholes(n), min_size=1, max_size=4))


def on_ranks(ranks: list[int], work: Callable[[Line, DeviceMemory], Any]) -> list[Any]:
    """What each of a line's ranks gives, in its order."""
    world = World(len(ranks))
    with pytest.MonkeyPatch.context() as patch:
        world.install(patch)
        group = tuple(range(len(ranks)))
        got = world.run(lambda rank: work(Line(group, ranks, ranks.index(rank), None, Gloo()), DeviceMemory(CPU)))
    return [got[r] for r in ranks]


def tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def part_type(whole: Whole, n: int) -> Tensor:
    shape, dim, _ = whole
    return Tensor(Float64, (*shape[:dim], shape[dim] // n, *shape[dim + 1 :]))


def limits() -> st.SearchStrategy[int]:
    return st.sampled_from([0, 64, 1 << 20])


@settings(max_examples=60, deadline=None)
@given(cases(), limits(), st.booleans())
def test_gather(case: tuple[list[int], list[Whole]], limit: int, within: bool) -> None:
    ranks, rows = case
    n = len(ranks)
    want = [tensor(shape, k) for k, (shape, _, _) in enumerate(rows)]

    def work(line: Line, memory: DeviceMemory) -> list[torch.Tensor]:
        subdims = [(dim, outer, n) for _, dim, outer in rows]
        start = gather(memory, line, [part_type(w, n) for w in rows], subdims, [within] * len(rows))
        xs: list[torch.Tensor] = []
        for x, (_, dim, outer) in zip(want, rows, strict=True):
            parts = split_front(x, dim, outer, n)
            mine = parts.clone()  # a whole of which only its own part is right
            mine[:] = -1.0
            mine[line.index] = parts[line.index]
            at_front = within and (dim, outer) == (0, 1)
            xs.append(mine[line.index] if at_front else parts[line.index].clone())
        return start(xs)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_APART_BYTES", limit)
        for row in on_ranks(ranks, work):
            for x, y in zip(row, want, strict=True):
                assert torch.equal(x, y)


@settings(max_examples=60, deadline=None)
@given(cases(), limits(), st.sampled_from(["sum", "max", "mean"]))
def test_reduce_parts(case: tuple[list[int], list[Whole]], limit: int, kind: str) -> None:
    ranks, rows = case
    n = len(ranks)
    brought = [[tensor(shape, 10 * r + k) for k, (shape, _, _) in enumerate(rows)] for r in range(n)]
    stacked = [torch.stack(column) for column in zip(*brought, strict=True)]
    totals = [s.amax(0) if kind == "max" else s.mean(0) if kind == "mean" else s.sum(0) for s in stacked]
    reductions = [Reductions() for _ in range(n)]

    def work(line: Line, memory: DeviceMemory) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        subdims = [(dim, outer, n) for _, dim, outer in rows]
        parts = [part_type(w, n) for w in rows]
        start = reduce_parts(memory, line, parts, subdims, kind, reductions[line.index])
        xs = [x.clone() for x in brought[line.index]]
        return start(xs)(), xs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_APART_BYTES", limit)
        for index, (row, xs) in enumerate(on_ranks(ranks, work)):
            for x, y, (_, dim, outer) in zip(row, totals, rows, strict=True):
                torch.testing.assert_close(x, split_front(y, dim, outer, n)[index], rtol=1e-14, atol=1e-14)
            if n > 1:
                assert all(torch.equal(a, b) for a, b in zip(xs, brought[index], strict=True)), "an operand was changed"


def test_one_reduction_is_under_way() -> None:
    """When the next starts, the one before has ended, its operands are free, and its result waits to be taken."""

    def work(line: Line, memory: DeviceMemory) -> list[torch.Tensor]:
        parts = [Tensor(Float64, (2, 3))]
        start = reduce_parts(memory, line, parts, [(0, 1, 2)], "sum", Reductions())
        finishes = [start([torch.ones((4, 3), dtype=torch.float64)])]
        first: Any = finishes[0].__self__  # type: ignore[attr-defined]
        assert not first.taken
        assert first.finish is not None
        finishes.append(start([torch.full((4, 3), 2.0, dtype=torch.float64)]))
        assert not first.taken
        assert first.finish is None
        return [finish()[0] for finish in finishes]

    for row in on_ranks([0, 1], work):
        assert [float(x[0, 0]) for x in row] == [2.0, 4.0]


@pytest.mark.parametrize("zero", [1, 2])
def test_weights_are_gathered_where_they_were_cut(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay where they are, whether they go by themselves, from step to step."""
    monkeypatch.setattr(exchange, "_APART_BYTES", 0)
    program = imported_mlp(optimizer=AdamW(0.01))
    main = distributed(program, Plan(dp=2, zero=zero)).program
    world = World(2)
    world.install(monkeypatch)

    def work(rank: int) -> list[list[int]]:
        engine = TorchRank(main, rank)
        engine.load(dict(enumerate(program.arrays)))
        weights = [k for k, v in enumerate(main.inputs) if v.kind == "parameter" and math.prod(v.type.shape) > 1]  # type: ignore[union-attr]
        rows = []
        for _ in range(3):
            rows.append([engine.values[k].data_ptr() for k in weights])
            engine.step()
        return rows

    for rows in world.run(work):
        assert rows[0] == rows[1] == rows[2]
        assert len(rows[0]) > 4


@pytest.mark.parametrize(
    ("step", "also_used", "replaced", "want"),
    [
        (None, None, True, True),
        ("SGD", None, True, True),
        ("Neg", None, True, False),
        (None, None, False, False),
        ("SGD", None, False, False),
        (None, "weight", True, False),
        ("SGD", "weight", True, False),
        ("SGD", "part", True, False),
    ],
)
def test_when_a_weight_may_be_gathered_where_it_was_cut(
    step: str | None, also_used: str | None, replaced: bool, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"dp": 2}, "m")
    t = Tensor.whole(Float64, (4, 3), mesh, (REPLICATE,))
    f = FunctionMaker()
    weight, gradient = f.add_input_value("w", t, Role("parameter")), f.add_input_value("g", t, Role("constant"))
    part, slope = [f.emit("LocalSlice", v, axis="dp", dim=0) for v in (weight, gradient)]
    if step is not None:
        part = f.emit("SGD", part, slope, lr=0.1) if step == "SGD" else f.emit(step, part)
    whole = f.emit("MPIAllgather", part, axis="dp")
    used = {"weight": weight, "part": part}.get(also_used or "")
    f.set_outputs([whole] if used is None else [whole, f.emit("Exp", used)])
    f.updates = {whole: weight} if replaced else {}
    reported: list[bool] = []

    def seen(*args: Any) -> Any:
        reported.extend(args[-1])
        return gather(*args)

    monkeypatch.setattr(comm, "gather", seen)
    python_source(f.finalize(), 0)
    assert reported == [want]


def test_a_whole_is_found_only_where_it_is_of_one_piece() -> None:
    x = torch.arange(24.0).view(4, 6)
    whole = _whole(x[1:2], 4, 1)
    assert whole is not None
    assert whole.data_ptr() == x.data_ptr()
    assert torch.equal(whole, x.view(4, 1, 6))
    assert _whole(x[2:], 2, 1) is not None
    for part, n, index in (
        (x[1:2, :3], 4, 1),  # rows of more than is meant
        (x.t()[1:2], 6, 1),
        (x.as_strided((2, 2), (2, 12), 2), 2, 0),  # rows that are not of one piece themselves
        (x[1:2].clone(), 4, 1),  # it would begin before the memory does
        (x[1:2], 4, 2),
        (x[:2].clone(), 2, 0),  # it would end after it
        (x[:2], 4, 0),
    ):
        assert _whole(part, n, index) is None


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_part_keeps_no_more_memory_than_its_own(n: int) -> None:
    """Of all that was received to be added up."""

    def work(line: Line, memory: DeviceMemory) -> list[torch.Tensor]:
        part = part_type(((n, 8), 0, 1), n)
        start = reduce_parts(memory, line, [part], [(0, 1, n)], "sum", Reductions())
        return start([torch.ones(n, 8)])()

    for (x,) in on_ranks(list(range(n)), work):
        assert x.tolist() == [[float(n)] * 8]
        assert x.untyped_storage().nbytes() == x.nbytes
