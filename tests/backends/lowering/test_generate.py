"""Generated Python: what it looks like, when it frees, waits and refuses."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distir.backends.lowering.engine import TorchRank, python_source
from distir.backends.lowering.generate import RankLowering
from distir.backends.transport.torch_distributed import Network
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError, UsageError
from distir.ir.function import Function, FunctionMaker, Op
from distir.ir.type import SUM, Float64, Shard, Tensor

CPU = torch.device("cpu")
ONE = Mesh([Device("cpu", 0)], {"mb": 4}, "stage0")


def lowered(function: Function) -> str:
    return python_source(function, 0)


def body() -> Function:
    """Its own microbatch of x (8, 2), times w (2,)."""
    f = FunctionMaker("body")
    x = f.add_input_value("x", Tensor(Float64, (8, 2), ONE))
    w = f.add_input_value("w", Tensor(Float64, (2,), ONE))
    part = f.emit("LocalSlice", x, axis="mb", dim=0)
    y = f.emit("Mul", part, w)
    f.set_outputs([f.emit("ReduceSum", y, axes=(0,), keepdims=0), y])
    return f.finalize()


def caller() -> Function:
    """Two microbatches' sums accumulated, and two of the results gathered."""
    callee, f = body(), FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float64, (8, 2), ONE))
    w = f.add_input_value("w", Tensor(Float64, (2,), ONE))
    calls = [f.add_op("Call", None, [x, w], {"mb": k}, [callee]) for k in range(4)]
    total, parts = calls[0][0], [y for _, y in calls]
    for s, _ in calls[1:]:
        total = f.emit("Accumulate", total, s)
    f.set_outputs([f.emit("MPIAllreduce", total, axis="mb"), f.emit("MPIAllgather", *parts, axis="mb")])
    return f.finalize()


def test_microbatches_are_cut_summed_and_gathered():
    main = caller()
    arrays = [np.arange(16.0).reshape(8, 2), np.array([2.0, 3.0])]
    rank = TorchRank(main, 0)
    rank.load(dict(enumerate(arrays)))
    want = SequentialExecutor().compute(main, arrays)
    for _ in range(2):
        got = rank.step()
        for k, x in enumerate(want):
            np.testing.assert_array_equal(got[k].numpy(), x)


def test_a_running_sum_is_added_to_in_place_only_if_nothing_else_sees_it():
    def run(keep: bool) -> list[torch.Tensor]:
        callee, f = body(), FunctionMaker("main")
        x = f.add_input_value("x", Tensor(Float64, (8, 2), ONE))
        w = f.add_input_value("w", Tensor(Float64, (2,), ONE))
        s = [f.add_op("Call", None, [x, w], {"mb": k}, [callee])[0] for k in range(4)]
        sums = [s[0]]
        for k in range(1, 4):
            sums.append(f.emit("Accumulate", sums[-1], s[k]))
        for s in sums[:-1] if keep else ():
            f.emit("Neg", s)
        f.set_outputs([f.emit("MPIAllreduce", sums[-1], axis="mb")])
        rank = TorchRank(f.finalize(), 0)
        rank.load({0: np.ones((8, 2)), 1: np.ones(2)})
        in_place.append(rank.source().count("out="))
        return list(rank.step().values())

    in_place: list[int] = []
    assert [x.tolist() for x in run(keep=True)] == [[8.0] * 2]
    assert [x.tolist() for x in run(keep=False)] == [[8.0] * 2]
    assert in_place == [0, 3]


def test_source_is_straight_line_and_each_body_stands_once():
    source = lowered(caller())
    assert source.count("def body(") == 1
    assert source.count("= body(args, ") == 4
    assert not re.search(r"\b(for|if|while)\b", source)
    compile(source, "source", "exec")


def test_values_are_freed_at_their_last_use():
    seen: list[int] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def watch() -> Callable[..., Any]:
        def double(x: torch.Tensor) -> torch.Tensor:
            seen.append(sum(r() is not None for r in alive))
            y = x * 2
            alive.append(weakref.ref(y))
            return y

        return double

    f = FunctionMaker("chain")
    v = f.add_input_value("x", Tensor(Float64, (4,)))
    for _ in range(5):
        v = f.emit("Sin", v)
    f.set_outputs([v])
    network = Network(f.finalize(), [], 0, CPU)
    lowering = RankLowering(network, CPU)
    function = lowering(f.finalize())
    function.call.__globals__["sin"] = watch()
    argument = torch.ones(4)
    args = [argument]
    given = weakref.ref(argument)
    del argument
    (result,) = function.call(args, None)
    assert args == []
    assert given() is None
    assert result.tolist() == [32.0] * 4
    assert seen == [0, 1, 1, 1, 1]


def test_communication_is_waited_for_at_first_use():
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"dp": 2})
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor.whole(Float64, (4, 4), mesh, (Shard(0),)))
    part = f.emit("ReduceSum", x, axes=(0,), keepdims=0)
    assert part.type.placements == (SUM,)
    total = f.emit("MPIAllreduce", part, axis="dp")
    other = f.emit("Exp", x)
    used = f.emit("Add", total, total)
    unused = f.emit("MPIAllgather", x, axis="dp")
    f.set_outputs([other, used, f.emit("MPIAllgather", other, axis="dp")])
    lines = [line.strip() for line in lowered(f.finalize()).splitlines()]
    issued = next(k for k, line in enumerate(lines) if "allreduce_dp(" in line)
    waited = next(k for k, line in enumerate(lines) if line.startswith("v2 = h2()"))
    computed = next(k for k, line in enumerate(lines) if "exp(" in line)
    assert issued < computed < waited
    assert "add(v2, v2)" in lines[waited + 1]
    assert unused not in f.finalize().outputs
    assert lines[-2].endswith("(); del h5")  # never used, and yet it ends
    assert re.fullmatch(r"return \(v3, v4, h6,\)", lines[-1])  # still under way: whoever uses it waits


def test_a_program_that_is_not_scheduled_is_refused():
    f = FunctionMaker("flat")
    x = f.add_input_value("x", Tensor(Float64, (8, 2), ONE))
    f.emit("LocalSlice", x, axis="mb", dim=0)
    with pytest.raises(UsageError, match="varies in time, but the program is not scheduled"):
        TorchRank(f.finalize(), 0)


def test_an_input_that_was_never_loaded():
    rank = TorchRank(caller(), 0)
    rank.load({0: np.zeros((8, 2))})
    with pytest.raises(UsageError, match="no array for input %w"):
        rank.step()
    with pytest.raises(UsageError, match=r"expected shape \(2,\), got \(3,\)"):
        rank.load({1: np.zeros(3)})


def test_what_runs_is_verified(monkeypatch: pytest.MonkeyPatch):
    """A pass of one rank that loses a sum over devices: no matter that all ranks lose it."""

    def program() -> Function:
        f = FunctionMaker("main")
        mesh = Mesh([Device("cpu", 0), Device("cpu", 1)], {"dp": 2}, "m")
        total = f.emit("MPIAllreduce", f.add_input_value("x", Tensor(Float64, (4,), mesh, [SUM])), axis="dp")
        f.set_outputs([f.emit("Exp", total)])
        return f.finalize()

    assert "allreduce_dp(" in lowered(program())

    def lossy(f: Function) -> Function:
        ops = tuple([Op(op.spec, f.inputs, op.attributes, op.outputs) for op in f.ops if op.op_type == "Exp"])
        return Function(f.name, f.inputs, ops, f.outputs)

    monkeypatch.setattr("distir.transforms.rank.as_run.recompose", lossy)
    with pytest.raises(IRTypeError, match=r"Exp: on mesh axis 'dp': operand 0 .%x.: expected Replicate, got Partial"):
        lowered(program())


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_sum_of_many_values(shape: tuple[int, ...]):
    """Such as a norm over all weights: as one expression it would be nested too deep for Python."""
    f, mesh = FunctionMaker("main"), Mesh([Device("cpu", 0)], {"mb": 1}, "stage0")
    xs = [f.add_input_value(f"x{k}", Tensor(Float64, shape, mesh)) for k in range(500)]
    f.set_outputs([f.emit("Sum", *[f.emit("Exp", x) for x in xs])])
    main = f.finalize()
    arrays = [np.full(shape, k / 1000) for k in range(500)]
    rank = TorchRank(main, 0)
    rank.load(dict(enumerate(arrays)))
    np.testing.assert_allclose(rank.step()[0].numpy(), SequentialExecutor().compute(main, arrays)[0], rtol=1e-14)
