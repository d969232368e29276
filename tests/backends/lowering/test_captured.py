"""Steps as CUDA graphs: they compute what steps do that are launched one kernel after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.api.data import Data
from distir.backends.lowering import captured
from distir.backends.lowering.engine import TorchRank, to_numpy
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker
from distir.ir.type import Float64, Tensor
from tests.backends.lowering.test_cuda import gpt

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def test_updates_are_moved_after_all_are_read() -> None:
    """Two that change places, one that is a part of another, and one that is in place."""
    a, b, c, d = (torch.full((3,), float(k)) for k in range(4))
    given = {0: a, 1: b, 2: c, 3: d}
    captured._move({10: b, 11: a, 12: torch.stack([a, b]).t()[:, 1], 13: d, 14: c}, given, {10: 0, 11: 1, 12: 2, 13: 3})
    assert [float(x[0]) for x in (a, b, c, d)] == [1.0, 0.0, 1.0, 3.0]


def test_an_update_that_is_its_own_input_turned_is_moved() -> None:
    x = torch.arange(4.0).reshape(2, 2)
    captured._move({5: x.t()}, {0: x}, {5: 0})
    assert x.tolist() == [[0.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize("anew", [True, False])
def test_values_that_are_given_anew_are_copied(anew: bool) -> None:
    """What `load` has put in the place of an input; the graph here is none, so that it shows what its inputs are."""
    x, y = torch.zeros(2), torch.ones(2)

    class Graph:
        def replay(self) -> None:
            y.add_(x)

    step = captured.Captured(Graph(), {0: x, 1: y}, {5: y, 6: y}, {5: 1})  # type: ignore[arg-type]
    values = {0: torch.full((2,), 3.0) if anew else x.fill_(3.0), 1: y}
    found = step(values)
    assert values[0] is x
    assert found[5] is y
    assert found[6] is not y
    assert found[6].tolist() == [4.0, 4.0]


def swapped() -> Function:
    """Two states that change places in each step, and one that grows by what is given."""
    f = FunctionMaker("swapped")
    x, a, b, total = (f.add_input_value(n, Tensor(Float64, (4,))) for n in ("x", "a", "b", "total"))
    grown = f.emit("Add", total, x)
    right, left = f.emit("Identity", b), f.emit("Identity", a)
    f.set_outputs([f.emit("Mul", grown, b), right, left, grown])
    f.updates = {right: a, left: b, grown: total}
    return f.finalize()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_states_that_change_places(device: str) -> None:
    function = swapped()
    rank = TorchRank(function, 0, device)
    arrays = {k: np.arange(4.0) + 10 * k for k in range(4)}
    rank.load(arrays)
    for k in range(6):
        data = np.full(4, k + 0.5)
        rank.load({0: data})
        want = SequentialExecutor().compute(function, [data, *[arrays[j] for j in (1, 2, 3)]])
        got = rank.step()
        arrays |= {1: want[1], 2: want[2], 3: want[3]}
        for j, x in enumerate(want):
            np.testing.assert_allclose(to_numpy(got[j], Float64), x)
    assert (rank._captured is not None) is (device == "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(("microbatches", "compiled"), [(2, False), (1, True)])
def test_a_captured_step_is_the_sequential_program(microbatches: int, compiled: bool) -> None:
    """Six steps with other data each; the third is captured."""
    model = gpt("float64")
    arrays = model.initial()
    data = Data(model.function, arrays)
    inputs = model.function.inputs
    fixed = arrays | data.fixed()
    rank = TorchRank(distir.distribute(model, distir.Plan(microbatches=microbatches)), 0, "cuda", compiled=compiled)
    rank.load({k: fixed[v] for k, v in enumerate(inputs) if v in fixed})
    state = dict(fixed)
    for step in range(6):
        given = data.step(step)
        rank.load({k: given[v] for k, v in enumerate(inputs) if v in given})
        want = SequentialExecutor().compute(model.function, [(state | given)[v] for v in inputs])
        got = rank.step()
        for k, (v, x) in enumerate(zip(model.function.outputs, want, strict=True)):
            old = model.function.updates.get(v)
            y = to_numpy(got[k], v.type.dtype)  # type: ignore[union-attr]
            change = np.asarray(x) - (0 if old is None else np.asarray(state[old]))
            found = y - (0 if old is None else np.asarray(state[old]))
            scale = float(np.abs(change).max(initial=0.0))
            np.testing.assert_allclose(found, change, rtol=1e-9, atol=1e-9 * scale)
        state |= {
            model.function.updates[v]: x
            for v, x in zip(model.function.outputs, want, strict=True)
            if v in model.function.updates
        }
    assert rank._captured is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_step_for_which_the_host_needs_a_result_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = TorchRank(swapped(), 0, "cuda")
    rank.load({k: np.arange(4.0) for k in range(4)})
    call = rank.lowered.call

    def waits(args: list[Any], t: int | None) -> Any:
        args[0].sum().item()
        return call(args, t)

    monkeypatch.setattr(rank.lowered, "call", waits)
    for k in range(4):
        assert rank.step()[3].tolist() == [x * (k + 2) for x in range(4)]
    assert rank._captured is None
