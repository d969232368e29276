"""Training that leaves the finite numbers ends there, on all ranks, and no checkpoint is written of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distir
from distir.api.run_result import RunResult
from distir.backends.storage.dcp import WholeKeeper, read_wholes
from distir.cli import main
from distir.ir.errors import DivergedError, UsageError
from distir.ir.function import FunctionMaker, Role
from distir.ir.type import Float32, Tensor
from distir.runtime.checkpoint import Saving, updated_inputs
from distir.runtime.finite import ALL_FINITE, FiniteWatch, is_finite
from tests.runs import ROOT
from tests.test_torchrun import exit_codes, said, torchrun

pytestmark = pytest.mark.usefixtures("preloaded")

MLP = str(ROOT / "examples" / "mlp.onnx")
MSE = ["--dim", "batch=8", "--loss", "mse"]
STAGES = distir.Plan(pp=2)
TINY, HUGE = 1e-60, 1e20
"""Learning rates: weights of `two_layers` stay what they are, or w1 alone leaves the finite numbers in one step."""


def two_layers(lr: float) -> distir.Model:
    """x w1 w2, trained towards 0. With `data()` the gradients are about 1e20 of w1, 1e5 of w2."""
    f = FunctionMaker("two_layers")
    x = f.add_input_value("x", Tensor(Float32, (4, 4)), Role("data", 0))
    w1 = f.add_input_value("w1", Tensor(Float32, (4, 4)), Role("parameter"))
    w2 = f.add_input_value("w2", Tensor(Float32, (4, 4)), Role("parameter"))
    f.set_outputs([f.emit("MatMul", f.emit("MatMul", x, w1), w2)])
    model = distir.Model(f.finalize()).training("mse", distir.SGD(lr=lr))
    scales = {"w1": 1e-20, "w2": 1e-5}
    eye = {v: scales[v.name] * np.eye(4, dtype=np.float32) for v in model.function.inputs if v.name in scales}
    return distir.Model(model.function, eye, optimizer=model.optimizer)


def data() -> dict[str, np.ndarray]:
    return {"x": 1e25 * np.eye(4, dtype=np.float32), "target": np.zeros((4, 4), np.float32)}


def train(lr: float, plan: distir.Plan, **settings: Any) -> RunResult:
    return distir.run(two_layers(lr), plan, data=data(), **settings)


def first_lost(lr: str, steps: int) -> tuple[int, list[float]]:
    """The first step whose loss is not finite, and the losses, on the reference backend."""
    model = distir.load(MLP, {"batch": 8}, loss="mse", optimizer=distir.SGD(lr=float(lr)))
    losses = distir.run(model, steps=steps, backend="numpy", allow_nonfinite=True).losses
    return next(k for k, x in enumerate(losses) if not np.isfinite(x)), losses


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Any:
    def call(*args: object) -> tuple[int, str, str]:
        code, (out, err) = main([*map(str, args)]), capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize(
    "flags",
    [
        ["--backend", "numpy"],
        ["--backend", "numpy", "--epochs", "2", "--metrics", "METRICS"],
        ["--dp", "2", "--epochs", "2"],
        ["--pp", "2", "--microbatches", "2"],
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run_in_its_step(flags: list[str], cli: Any, tmp_path: Path) -> None:
    step, losses = first_lost("100", 40)
    assert step == 2
    arguments = [str(tmp_path / x) if x == "METRICS" else x for x in flags]
    code, out, err = cli("run", MLP, *MSE, "--lr", "100", "--steps", "40", *arguments)
    assert (code, err.splitlines()[0]) == (5, f"distir: error: the loss, %loss, is not finite in step {step}")
    if "--epochs" not in flags:
        rows = [line.split() for line in out.splitlines() if line[:1].isdecimal()]
        assert [int(row[0]) for row in rows] == list(range(step + 1))
        np.testing.assert_allclose([float(row[1]) for row in rows[:step]], losses[:step], rtol=1e-4)


@pytest.mark.parametrize(("plan", "backend"), [(distir.Plan(), "numpy"), (STAGES, "gloo")])
def test_weights_that_are_not_finite_replace_no_checkpoint(plan: distir.Plan, backend: str, tmp_path: Path) -> None:
    """Those of one rank only, while the loss is finite: the ranks agree."""
    train(TINY, plan, steps=2, backend="numpy", checkpoint=tmp_path, every=1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(DivergedError, match=r"^%w1 is not finite in step 2 "):
        train(HUGE, plan, steps=6, backend=backend, checkpoint=tmp_path, every=1, resume=True)
    left = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert left == before
    going = train(TINY, plan, steps=3, backend="numpy", checkpoint=tmp_path, resume=True)
    assert going.first == 2


@pytest.mark.parametrize(("plan", "backend"), [(distir.Plan(), "numpy"), (STAGES, "gloo")])
def test_weights_after_the_last_step(plan: distir.Plan, backend: str) -> None:
    with pytest.raises(DivergedError, match="%w1 is not finite in step 0"):
        train(HUGE, plan, steps=1, backend=backend)
    assert not is_finite(train(HUGE, plan, steps=1, backend=backend, allow_nonfinite=True).weights["w1"])


@pytest.mark.parametrize(("plan", "backend"), [(distir.Plan(), "numpy"), (STAGES, "gloo")])
def test_going_on_leaves_the_last_finite_checkpoint(plan: distir.Plan, backend: str, tmp_path: Path) -> None:
    train(TINY, plan, steps=1, backend="numpy", checkpoint=tmp_path)
    settings: dict[str, Any] = {"backend": backend, "checkpoint": tmp_path, "every": 1, "resume": True}
    found = train(HUGE, plan, steps=4, allow_nonfinite=True, **settings)
    assert len(found.seconds) == 3
    assert found.saved == []
    assert "no checkpoint after 4 steps: %w1 is not finite" in found.lines()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    values = read_wholes(tmp_path / "step-00000001", two_layers(1.0).function)
    assert all(map(is_finite, values.values()))


@pytest.mark.parametrize(("backend", "steps"), [("numpy", 3), ("gloo", 2), ("gloo", 3)])
def test_a_checkpoint_that_is_not_finite_is_refused(backend: str, steps: int, tmp_path: Path) -> None:
    """As there may be one of an earlier version; also where no step is left to do."""
    function = two_layers(1.0).function
    values = {
        k: np.full((4, 4), np.nan if v.name == "w2" else 1.0, np.float32) for k, v in updated_inputs(function).items()
    }
    WholeKeeper(function, Saving(str(tmp_path), None, {})).save(2, values)
    settings: dict[str, Any] = {"steps": steps, "backend": backend, "checkpoint": tmp_path, "resume": True}
    with pytest.raises(UsageError, match=r"step-00000002: %w2 is not finite .*--allow-nonfinite"):
        train(TINY, STAGES, **settings)
    assert train(TINY, STAGES, allow_nonfinite=True, **settings).first == 2


def test_what_is_finite_is_checked(cli: Any) -> None:
    step, _ = first_lost("100", 40)
    for flags in (["--backend", "numpy", "--dp", "2"], ["--dp", "2"]):
        code, _, err = cli("run", MLP, *MSE, "--lr", "100", "--steps", "40", "--check", *flags)
        assert code == 5
        assert err.startswith(f"distir: error: the loss, %loss, is not finite in step {step}; check passed")


def test_all_ranks_of_torchrun_end() -> None:
    done = torchrun("--dp", 2, "--lr", "1e9", "--steps", 12, "--json")
    assert exit_codes(done) <= {5, -15}
    assert 5 in exit_codes(done)
    lines = [line for line in said(done) if "error" in line]
    assert all(line.endswith("error: the loss, %loss, is not finite in step 1") for line in lines), lines
    assert json.loads(done.stdout)["exit_code"] == 5


def test_without_a_loss_nothing_is_looked_at(cli: Any, tmp_path: Path) -> None:
    model = distir.load(MLP, {"batch": 8})
    (x,) = [v for v in model.function.inputs if v.kind == "data"]
    found = distir.run(model, data={x.name: np.full(x.type.global_shape, np.inf, np.float32)}, backend="numpy")  # type: ignore[union-attr]
    assert not all(map(is_finite, found.outputs.values()))


def test_what_was_not_finite_at_the_beginning_is_not_watched() -> None:
    """A mask of -inf among the weights stays what it is."""
    function = two_layers(1.0).function
    values = {k: np.zeros((4, 4), np.float32) for k in updated_inputs(function)}
    first, second = sorted(values)
    values[first][0, 0] = -np.inf
    watch = FiniteWatch(function, values)
    assert watch.initial == first + 1
    assert watch.first(values) == ALL_FINITE
    values[second][3, 3] = np.nan
    assert watch.first(values) == second + 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_is_finite(dtype: str) -> None:
    import torch

    for shape in [(), (1,), (0, 3), (7, 11)]:
        x = torch.zeros(shape, dtype=getattr(torch, dtype))
        assert is_finite(x)
        if not x.numel():
            continue
        for bad in (np.nan, np.inf, -np.inf):
            y = x.clone()
            y.view(-1)[-1] = bad
            assert not is_finite(y)
            assert not is_finite(y.t() if y.ndim == 2 else y)
