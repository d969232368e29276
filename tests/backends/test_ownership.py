"""Memory that is written to again: random programs, step after step, on ranks whose communication is as late as it may
be, compute what the sequential program does, and leave what was given to them alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from distir.backends.torch import TorchRank, own_array
from distir.executor.collectives import join
from distir.executor.sequential import SequentialExecutor, unfit
from distir.ir import Function
from distir.ir.device import Mesh
from distir.ir.errors import InfeasibleError
from distir.ir.type import Tensor
from tests.backends.threads import World
from tests.transforms.programs import (
    ADAMW,
    MOMENTUM,
    TOLERANCE,
    Plan,
    Program,
    distributed,
    error,
    small_gpt,
)
from tests.transforms.random_programs import BLOCKS, LARGE, random_plans, random_programs

STEPS = 3
PLANS = random_plans.map(lambda plan: plan._replace(host=False))  # weights that come from a host go nowhere


@pytest.fixture(autouse=True)
def doubles() -> Any:
    """Threads share the default dtype: it must not change under them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def sequential(program: Program) -> list[list[np.ndarray]]:
    """The outputs of each step."""
    f, arrays = program.function, list(program.arrays)
    rows: list[list[np.ndarray]] = []
    for _ in range(STEPS):
        rows.append(SequentialExecutor().compute(f, arrays))
        for v, x in zip(f.outputs, rows[-1], strict=True):
            if v in f.updates:
                arrays[f.inputs.index(f.updates[v])] = x
    return rows


def on_ranks(program: Program, main: Function, size: int) -> tuple[list[list[np.ndarray]], Counter[str]]:
    """The outputs of each step, whole, and what the Python of all ranks does how often."""
    world = World(size)
    with pytest.MonkeyPatch.context() as patch:
        world.install(patch)

        def work(rank: int) -> tuple[TorchRank, list[dict[int, np.ndarray]]]:
            engine = TorchRank(main, rank)
            engine.load(dict(enumerate(program.arrays)))
            held = dict(engine.values)
            given = {k: own_array(x) for k, x in held.items()}
            steps: list[dict[int, np.ndarray]] = []
            for _ in range(STEPS):
                outputs = engine.step()
                steps.append({k: own_array(x) for k, x in outputs.items()})
                for k in given.keys() - set(engine.updates.values()):
                    assert engine.values[k] is held[k]
                    np.testing.assert_array_equal(own_array(held[k]), given[k])
            return engine, steps

        ranks = world.run(work)
    seen = Counter[str]()
    for engine, _ in ranks:
        source = engine.source()
        seen.update({word: source.count(word) for word in ("out=", "_(", "bucket", "linear(", "sgd", "clone(")})
    return [
        [whole(main, k, [(e, s[n]) for e, s in ranks]) for k in range(len(main.outputs))] for n in range(STEPS)
    ], seen


def whole(main: Function, k: int, ranks: list[tuple[TorchRank, dict[int, np.ndarray]]]) -> np.ndarray:
    v = main.outputs[k]
    t = v.type
    assert isinstance(t, Tensor)
    pieces = {engine.coordinate(t): made[k] for engine, made in ranks if k in made}
    x = join(pieces, t) if isinstance(t.device, Mesh) else pieces[()]
    return unfit(x, main.sources.get(v))


def compared(program: Program, plan: Plan) -> Counter[str]:
    try:
        main = distributed(program, plan).program
    except InfeasibleError:
        return Counter()
    got, seen = on_ranks(program, main, len(plan.devices))
    for step, (a, b) in enumerate(zip(got, sequential(program), strict=True)):
        if max(np.abs(x).max(initial=0.0) for x in b) > 1e3:
            break  # it diverges, and so does rounding
        assert error(a, b) <= TOLERANCE * 10**step, f"{plan}, step {step}"
    return seen


def test_random_programs_on_random_plans() -> None:
    seen = Counter[str]()
    fixed = settings(
        max_examples=3,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=LARGE,
        deadline=None,
    )
    for block in BLOCKS:
        fixed(given(random_programs(block), PLANS)(lambda program, plan: seen.update(compared(program, plan))))()
    assert min(seen[word] for word in ("out=", "_(", "bucket", "linear(", "sgd")) >= 20, seen


@pytest.mark.parametrize("plan", [Plan(), Plan(microbatches=4), Plan(dp=2, microbatches=2, bucket_mb=0.001)], ids=str)
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
def test_optimizers(plan: Plan, optimizer: Any) -> None:
    seen = compared(small_gpt(optimizer=optimizer), plan)
    assert seen["clone("] == 0


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=LARGE, deadline=None)
@given(st.sampled_from(BLOCKS).flatmap(random_programs), PLANS)
def test_more_random_programs(program: Program, plan: Plan) -> None:
    compared(program, plan)
