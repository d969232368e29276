"""Ranks that put what they compute through torch.compile: they compute the same, and compile each function once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distir
from distir.api.data import Data
from distir.backends.lowering.engine import TorchRank, double_scalars, replaced
from distir.backends.lowering.generate import RankLowering
from distir.backends.processes.preflight import as_distir_error
from distir.backends.transport.torch_distributed import Network
from distir.ir.errors import UsageError
from distir.transforms.rank.project import ranks
from distir.transforms.rank.rank_program import RankOptions, rank_program

EXAMPLES = Path(__file__).parents[3] / "examples"


def model_of(name: str, optimizer: Any = "sgd") -> distir.Model:
    loss = "mse" if name == "mlp" else "cross-entropy"
    file = "gpt:layers=1,hidden=16,heads=4,vocab=64,seq=8" if name == "gpt" else EXAMPLES / f"{name}.onnx"
    return distir.load(file, {"batch": 8}, loss=loss, optimizer=optimizer, dtype="float64")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """torch.compile captures whole functions, and runs them as they are. Gives how many ops are in each."""
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        sizes.append(sum(node.op not in ("placeholder", "output") for node in graph.graph.nodes))
        return graph.forward

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: plain(f, backend=backend, fullgraph=True, **how))
    torch._dynamo.reset()
    yield sizes
    torch._dynamo.reset()


def stepped(model: distir.Model, compiled: bool, plan: distir.Plan, steps: int = 3) -> list[dict[int, np.ndarray]]:
    arrays = model.initial()
    data = Data(model.function, arrays)
    rank = TorchRank(distir.distribute(model, plan), 0, compiled=compiled)
    rank.load({k: x for k, v in enumerate(model.function.inputs) if (x := (arrays | data.fixed()).get(v)) is not None})
    found: list[dict[int, np.ndarray]] = []
    for k in range(steps):
        rank.load({i: x for i, v in enumerate(model.function.inputs) if (x := data.step(k).get(v)) is not None})
        found.append({i: x.numpy().copy() for i, x in rank.step().items()})
    return found


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("name", "optimizer"), [("mlp", distir.SGD(momentum=0.9)), ("gpt", "adamw")])
def test_each_function_is_captured_whole_and_once(
    name: str, optimizer: Any, microbatches: int, captured: list[int]
) -> None:
    """Not again in later steps, nor for each microbatch."""
    model, plan = model_of(name, optimizer), distir.Plan(microbatches=microbatches)
    want = stepped(model, False, plan)
    assert captured == []
    got = stepped(model, True, plan, 1)
    first = len(captured)
    assert 2 <= first <= 6  # at most a prologue, and twice two functions: with the sums over microbatches and without
    got = stepped(model, True, plan)
    assert len(captured) == 2 * first
    assert max(captured) > 10
    for a, b in zip(got, want, strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in b)


def test_compiled_functions_are_told_apart_from_python_s(captured: list[int]) -> None:
    """What is compiled changes nothing in place, and takes no memory of ours; optimizers do, outside of it."""
    rank = TorchRank(distir.distribute(model_of("gpt2-tiny", "adamw")), 0, compiled=True)
    functions = rank.source().split("def ")[1:]
    parts = [f for f in functions if "_part" in f.splitlines()[0]]
    rest = [f for f in functions if f not in parts]
    assert len(parts) >= 2
    assert not any(re.search(r"\b(allocate|adamw|add_)\(", f) for f in parts)
    assert sum("adamw(" in f for f in rest) == 1
    assert not any("mm(" in f for f in rest)


def test_what_is_on_its_way_is_waited_for_outside() -> None:
    """What is compiled is given tensors, and not functions that wait for them."""
    program = distir.distribute(model_of("gpt2-tiny"), distir.Plan(tp=2))
    cpu = torch.device("cpu")
    mine = rank_program(program, 0, RankOptions(compiled=True)).function
    lowering = RankLowering(Network(mine, ranks(program), 0, cpu, connect=False), cpu, compiling=True)
    with double_scalars():
        lowering(mine, replaced(mine))
    functions = lowering.source().split("def ")[1:]
    waiting = [f.splitlines()[0] for f in functions if re.search(r"\bh\d+\(\)", f)]
    assert waiting
    assert not [f for f in waiting if "_part" in f]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"backend": "numpy"}, "does not support torch.compile"), ({"profile": "p"}, "a profile times single ops")],
)
def test_what_does_not_go_with_it_is_reported_first(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "profile" in settings:
        settings = {"profile": tmp_path / "p"}
    with pytest.raises(UsageError, match=message):
        distir.run(model_of("mlp"), compiled=True, **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_lack_of_a_compiler_is_reported_in_one_line() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        raise InvalidCxxCompiler
    except RuntimeError as e:
        error = as_distir_error(e)
    assert isinstance(error, UsageError)
    assert error.message.startswith("torch.compile fails: No working C++ compiler found")
    assert error.hint is not None
    assert "--compile" in error.hint
    assert as_distir_error(RuntimeError("No working C++ compiler found")) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [("gpt", distir.Plan(tp=2)), ("mlp", distir.Plan(dp=2, pp=2, microbatches=2, zero=1, bucket_mb=0.005))],
    ids=str,
)
def test_compiled_ranks_are_the_sequential_program(name: str, plan: distir.Plan) -> None:
    """By torch's own compiler."""
    result = distir.run(model_of(name), plan, steps=2, check=True, compiled=True)
    assert result.check is not None
    assert result.check.ok
