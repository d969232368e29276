"""The options of a run: one value, by name from Python, by flags from the command line, and the same on every rank."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import distir
from distir.api.scaling import weak_scaling
from distir.cli.flags import parse
from distir.ir.errors import UsageError
from distir.ir.function import Function, FunctionMaker
from distir.ir.type import Float32, Tensor
from distir.runtime.job import Job
from distir.runtime.options import RunOptions
from distir.runtime.outcome import Outcome

NAMES = [f.name for f in fields(RunOptions)]


@pytest.mark.parametrize("name", NAMES)
def test_an_option_is_documented_and_has_a_flag(name: str):
    assert f"    `{name}`: " in inspect.getdoc(RunOptions).replace("\n", "\n    ")  # type: ignore[union-attr]
    assert hasattr(parse(["run", "model.onnx"]), name)


@pytest.mark.parametrize("function", [distir.run, weak_scaling])
def test_what_completes_names_shows_options_and_callbacks(function):
    shown = inspect.signature(function).parameters
    assert {*NAMES, *[f.name for f in fields(distir.RunCallbacks)]} <= set(shown)
    assert "changes" not in shown
    assert shown["timeout"].default == RunOptions().timeout


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("stpes", "did you mean steps?"),
        ("clsuter", "cluster"),
        ("on_steps", "on_step"),
        ("?", "there are data, cluster, steps,"),
    ],
)
def test_a_name_that_is_no_option(name: str, hint: str):
    """Told before the model is read."""
    with pytest.raises(UsageError, match="a run has no option") as e:
        distir.run("there-is-no-such-file.onnx", **{name: 3})  # type: ignore[arg-type]
    assert hint in (e.value.hint or "")


def test_names_change_what_is_given_whole(monkeypatch: pytest.MonkeyPatch):
    """And what is asked for is what the ranks are given."""
    jobs: list[Job] = []

    def launched(job: Job, callbacks: object) -> Outcome:
        jobs.append(job)
        return Outcome(seconds=[1.0], outputs=[{}])

    monkeypatch.setattr("distir.api.running.launch", launched)
    f = FunctionMaker("double")
    x = f.add_input_value("x", Tensor(Float32, (2,)))
    f.set_outputs([f.emit("Add", x, x)])
    options = RunOptions(steps=2, timeout=7.0, profile=None)
    distir.run(f.finalize(), options=options, data={"x": np.ones(2, np.float32)}, steps=3)
    (job,) = jobs
    assert job.options == RunOptions(steps=3, timeout=7.0)
    assert job.steps == 3


def test_options_come_to_ranks_as_they_are(tmp_path: Path):
    options = RunOptions(steps=2, checkpoint=tmp_path, every=1, seed=3, backend="gloo", device="cuda")
    job = Job(Function("f", (), (), ()), {}, options=options)
    assert pickle.loads(pickle.dumps(job.shipped(tmp_path))).received().options == options
    assert options.checkpoint == str(tmp_path)
    assert options.resolved_backend == "gloo:cuda"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"epochs": -1}, "epochs: expected at least 1"),
        ({"every": 0, "checkpoint": "c"}, "every: expected at least 1"),
        ({"every": 1}, "every needs a directory"),
        ({"resume": True}, "resume needs a directory"),
        ({"held_out": 1.0}, "held_out: expected a share"),
        ({"compiled": True, "backend": "numpy"}, "does not support torch.compile"),
        ({"compiled": True, "profile": "p"}, "a profile times"),
        ({"backend": "ucc"}, "unknown backend"),
    ],
)
def test_options_that_do_not_fit(settings, message):
    with pytest.raises(UsageError, match=message):
        RunOptions(**settings)
