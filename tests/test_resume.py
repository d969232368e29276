"""Runs that go on where another left off: by the same plan bit for bit, by another to rounding."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distir
from distir.api.metrics import read_metrics
from distir.api.run_result import RunResult
from distir.backends.storage.dcp import read_wholes
from distir.cli import main
from distir.ir.errors import UsageError
from distir.runtime.run_directory import lock_directory
from tests.runs import ROOT, free_port, small

pytestmark = pytest.mark.usefixtures("preloaded")

FOUR = distir.Plan(2, 2, 1)
MLP = ["run", str(ROOT / "examples" / "mlp.onnx"), "--dim", "batch=8", "--loss", "mse"]


def largest_error(a: RunResult, b: RunResult) -> float:
    assert a.weights.keys() == b.weights.keys()
    assert a.weights
    return max(float(np.max(np.abs(a.weights[k] - b.weights[k]))) for k in a.weights)


@pytest.fixture(scope="module")
def model() -> distir.Model:
    return small()


@pytest.fixture(scope="module")
def whole(model: distir.Model) -> RunResult:
    """Six steps on four ranks, without a break."""
    return distir.run(model, FOUR, steps=6)


@pytest.fixture(scope="module")
def made(model: distir.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the first four."""
    directory = tmp_path_factory.mktemp("made") / "checkpoints"
    result = distir.run(model, FOUR, steps=4, checkpoint=directory, every=1)
    assert [s.step for s in result.saved] == [1, 2, 3, 4]
    assert sorted(p.name for p in directory.iterdir()) == ["latest", "step-00000003", "step-00000004"]
    return directory


@pytest.fixture
def checkpoints(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "c"))


def test_the_same_plan_goes_on_bit_for_bit(model: distir.Model, whole: RunResult, checkpoints: Path) -> None:
    assert whole.summary.padded
    result = distir.run(model, FOUR, steps=6, checkpoint=checkpoints, resume=True)
    assert result.first == 4
    assert result.losses == whole.losses[4:]
    assert largest_error(result, whole) == 0
    assert result.row(0)[0] == "4"
    assert "checkpoint of " in "\n".join(result.lines())
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step-00000004", "step-00000006"]


@pytest.mark.parametrize(
    ("plan", "backend"),
    [
        (distir.Plan(), "gloo"),
        (distir.Plan(dp=2), "gloo"),
        (distir.Plan(1, 2, 2, 2), "gloo"),
        (distir.Plan(dp=2, zero=3), "gloo"),
        (distir.Plan(1, 3, 1), "numpy"),
    ],
    ids=str,
)
def test_another_plan_goes_on_to_rounding(
    plan: distir.Plan, backend: str, model: distir.Model, whole: RunResult, checkpoints: Path
) -> None:
    result = distir.run(model, plan, steps=6, backend=backend, checkpoint=checkpoints, resume=True, check=True)
    assert result.check is not None
    assert result.check.ok
    assert largest_error(result, whole) <= 1e-5
    np.testing.assert_allclose(result.losses, whole.losses[4:], rtol=1e-5)


def test_in_float64_another_plan_goes_on_to_1e_10(tmp_path: Path) -> None:
    model, ten = small("float64"), distir.Plan(2, 1, 2, 2)
    whole = distir.run(model, FOUR, steps=5, backend="numpy")
    distir.run(model, FOUR, steps=2, backend="numpy", checkpoint=tmp_path / "c")
    distir.run(model, ten, steps=4, checkpoint=tmp_path / "c", resume=True)
    result = distir.run(model, distir.Plan(tp=2), steps=5, checkpoint=tmp_path / "c", resume=True)
    assert result.first == 4
    assert largest_error(result, whole) <= 1e-10
    saved = read_wholes(tmp_path / "c" / "step-00000005", model.function)
    for k, v in enumerate(model.function.inputs):
        if v.name in result.weights:
            np.testing.assert_array_equal(saved[k], result.weights[v.name])


def test_padding_is_not_saved(tmp_path: Path) -> None:
    """With 14 classes for 13, then 13, then 14 in parts: checkpoints have 13."""
    model, padded = small("float64"), distir.Plan(pad_multiple=2)
    whole = distir.run(model, distir.Plan(), steps=6, backend="numpy")
    distir.run(model, padded, steps=2, backend="numpy", checkpoint=tmp_path / "c")
    distir.run(model, distir.Plan(), steps=4, backend="numpy", checkpoint=tmp_path / "c", resume=True)
    plan = distir.Plan(dp=2, zero=3, pad_multiple=7)
    result = distir.run(model, plan, steps=6, checkpoint=tmp_path / "c", resume=True, check=True)
    assert (result.first, result.check and result.check.ok) == (4, True)
    assert largest_error(result, whole) <= 1e-10
    assert result.weights["table"].shape == (13, 12)
    saved = read_wholes(tmp_path / "c" / "step-00000006", model.function)
    assert any(np.array_equal(x, result.weights["table"]) for x in saved.values())


def test_numpy_goes_on_bit_for_bit(model: distir.Model, tmp_path: Path) -> None:
    whole = distir.run(model, distir.Plan(dp=2), steps=4, backend="numpy")
    distir.run(model, distir.Plan(dp=2), steps=3, backend="numpy", checkpoint=tmp_path, every=2)
    result = distir.run(model, distir.Plan(dp=2), steps=4, backend="numpy", checkpoint=tmp_path, resume=True)
    assert result.losses == whole.losses[3:]
    assert largest_error(result, whole) == 0


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_is_sharded_along_dp_goes_on_bit_for_bit(zero: int, model: distir.Model, tmp_path: Path) -> None:
    plan = distir.Plan(dp=2, zero=zero)
    whole = distir.run(model, plan, steps=4)
    distir.run(model, plan, steps=3, checkpoint=tmp_path)
    files = [p.stat().st_size for p in (tmp_path / "step-00000003").glob("*.distcp")]
    assert min(files) > max(files) / 2  # both have written
    result = distir.run(model, plan, steps=4, checkpoint=tmp_path, resume=True)
    assert result.losses == whole.losses[3:]
    assert largest_error(result, whole) == 0


def test_in_the_middle_of_an_epoch(model: distir.Model, tmp_path: Path) -> None:
    """Samples are shuffled anew in each epoch: those that are left come in the order in which they would have come."""
    rng = np.random.default_rng(0)
    file = tmp_path / "samples.npz"
    np.savez(file, x=rng.integers(0, 13, (32, 4)), labels=rng.integers(0, 13, (32, 4)))

    def train(directory: Path, resume: bool = False, steps: int = 8, epochs: int = 2) -> RunResult:
        feed = {"data": file, "held_out": 0.0, "seed": 1, "metrics": directory.with_suffix(".json")}
        if steps < 8:  # broken off

            def on_step(step: int, *_: object) -> None:
                if step == steps - 1:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                distir.run(model, epochs=epochs, checkpoint=directory, every=1, on_step=on_step, **feed)
        return distir.run(model, epochs=epochs, checkpoint=directory, resume=resume, **feed)

    whole = train(tmp_path / "whole")
    assert len(whole.losses) == 8
    broken = train(tmp_path / "broken", resume=True, steps=6)
    assert broken.first in (6, 7)
    assert broken.losses == whole.losses[broken.first :]
    assert largest_error(broken, whole) == 0
    assert broken.metrics is not None
    assert [e.number for e in broken.metrics.epochs] == [1]
    (in_file,), (of_whole,) = (read_metrics(tmp_path / f"{name}.json") for name in ("broken", "whole"))
    assert [e["epoch"] for e in in_file["epochs"]] == [0, 1]
    assert in_file["measured"]["epochs"] == [1]
    assert in_file["epochs"][0]["loss"] == of_whole["epochs"][0]["loss"]
    again = train(tmp_path / "broken", resume=True)
    assert again.losses == []
    assert read_metrics(tmp_path / "broken.json") == [in_file]


def test_metrics_that_cannot_be_gone_on_with(model: distir.Model, tmp_path: Path) -> None:
    rest: dict[str, Any] = {"backend": "numpy", "epochs": 1, "resume": True, "metrics": tmp_path / "m.json"}
    for text, message in (("{}", "holds no metrics"), ("x", "is not JSON")):
        (tmp_path / "m.json").write_text(text)
        with pytest.raises(UsageError, match=message):
            distir.run(model, steps=2, checkpoint=tmp_path / "c", **rest)
        assert (tmp_path / "m.json").read_text() == text
    runs = [{"plan": {}, "predicted": {}, "measured": None, "epochs": []}] * 2
    (tmp_path / "m.json").write_text(json.dumps({"runs": runs}))
    with pytest.raises(UsageError, match="metrics of 2 runs"):
        distir.run(model, steps=2, checkpoint=tmp_path / "c", **rest)


def test_a_run_that_ends_early_leaves_nothing_half_written(model: distir.Model, tmp_path: Path) -> None:
    """Whatever ends it, what its ranks were writing then is removed."""
    part = tmp_path / "c" / ".step-00000002.part"

    def fail(step: int, *_: Any) -> None:
        if step == 1:
            part.mkdir(exist_ok=True)
            (part / "__0_0.distcp").write_bytes(b"0")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distir.run(model, distir.Plan(dp=2), steps=4, checkpoint=tmp_path / "c", every=1, on_step=fail)
    assert not part.exists()
    assert (tmp_path / "c" / "latest").exists()


def test_nothing_left_to_do(model: distir.Model, checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = distir.run(model, FOUR, steps=4, checkpoint=checkpoints, resume=True, check=True)
    assert result.losses == []
    assert result.weights.keys() == {"table", "up0", "down0", "up1", "down1"}
    assert result.lines() == ["nothing left to do: 4 steps already done"]
    assert capsys.readouterr().err == f"distir: resuming from {checkpoints / 'step-00000004'}\n"


def test_more_than_two_that_a_killed_run_has_left_are_two_again(model: distir.Model, checkpoints: Path) -> None:
    """Even if there is nothing left to do."""
    for step in (1, 2):
        shutil.copytree(checkpoints / "step-00000003", checkpoints / f"step-0000000{step}")
    distir.run(model, FOUR, steps=4, checkpoint=checkpoints, resume=True)
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step-00000003", "step-00000004"]


def test_resuming_where_there_is_nothing_begins(
    model: distir.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = distir.run(model, steps=1, backend="numpy", checkpoint=tmp_path / "c", resume=True)
    assert result.first == 0
    assert "there is no checkpoint in" in capsys.readouterr().err


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (flip, "is damaged: expected SHA-256"),
    (lambda file: os.truncate(file, 100), "is damaged: expected "),
    (Path.unlink, "is missing: expected "),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(
    damage: Callable[[Path], None],
    words: str,
    name: str,
    model: distir.Model,
    whole: RunResult,
    checkpoints: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(checkpoints / "step-00000004" / name)
    result = distir.run(model, distir.Plan(dp=2), steps=5, backend="numpy", checkpoint=checkpoints, resume=True)
    assert result.first == 3
    np.testing.assert_allclose(result.losses, whole.losses[3:5], rtol=1e-5)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("distir: warning: checkpoint skipped: ")
    assert f"step-00000004/{name} {words}" in first
    assert second == f"distir: resuming from {checkpoints / 'step-00000003'}"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step-00000003", "step-00000005"]


def test_when_all_are_damaged_it_ends(model: distir.Model, checkpoints: Path) -> None:
    for file in checkpoints.glob("*/__0_0.distcp"):
        flip(file)
    with pytest.raises(UsageError, match="2 damaged ones"):
        distir.run(model, FOUR, steps=6, checkpoint=checkpoints, resume=True)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (small(optimizer="sgd"), r"unexpected %table\.m, %table\.v, %up0\.m and 8 more"),
        (small(width=16), r"table: expected f32\[13, 16\], got f32\[13, 12\]"),
        (small("float64"), r"table: expected f64\[13, 12\], got f32\[13, 12\]"),
    ],
)
def test_another_model_or_optimizer_is_reported(other: distir.Model, words: str, checkpoints: Path) -> None:
    with pytest.raises(UsageError, match=f"step-00000004 is of another model or optimizer: {words}") as e:
        distir.run(other, steps=6, backend="numpy", checkpoint=checkpoints, resume=True)
    assert e.value.hint is not None
    assert "it was made of small with AdamW(" in e.value.hint


def test_an_optimizer_with_more_state_is_reported(tmp_path: Path) -> None:
    distir.run(small(optimizer="sgd"), backend="numpy", checkpoint=tmp_path)
    with pytest.raises(UsageError, match=r"missing %table\.m, %table\.v, %up0\.m and 8 more"):
        distir.run(small(), steps=2, backend="numpy", checkpoint=tmp_path, resume=True)


def test_what_may_lead_elsewhere_is_said(
    model: distir.Model, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distir.run(model, steps=5, seed=3, backend="numpy", checkpoint=checkpoints, resume=True)
    assert "distir: warning: seed was 0, is 3\n" in capsys.readouterr().err


def test_a_directory_is_not_shared(model: distir.Model, checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds checkpoints of an earlier run, step-00000004 the newest"):
        distir.run(model, steps=6, backend="numpy", checkpoint=checkpoints)
    number = lock_directory(checkpoints)
    assert number is not None
    with pytest.raises(UsageError, match="another run writes its checkpoints to"):
        distir.run(model, steps=6, backend="numpy", checkpoint=checkpoints, resume=True)
    os.close(number)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write checkpoints to .*file: File exists"):
        distir.run(model, backend="numpy", checkpoint=tmp_path / "file")


def test_processes_that_do_not_share_the_work_share_no_checkpoints(
    model: distir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="a run without torchrun"):
        distir.run(model, backend="numpy", checkpoint=tmp_path)


def test_a_full_disk_ends_the_run_and_the_checkpoint_before_serves(
    model: distir.Model, whole: RunResult, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses to let files grow beyond what the run itself needs: ranks see it as they see a full disk."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # Python 3.11 keeps what it has written by halves
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(UsageError, match=r"cannot write checkpoint .*step-00000005: rank \d: File too large") as e:
            distir.run(small(width=64), FOUR, steps=5, checkpoint=checkpoints.parent / "d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in e.value.message
    assert list((checkpoints.parent / "d").iterdir()) == []


# ---------------------------------------------------------------- the command line


def cli(capfd: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([*MLP, *map(str, args)])
    out, err = capfd.readouterr()
    return code, out, err


def test_flags(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    numpy = ["--backend", "numpy", "--checkpoint", tmp_path / "c"]
    code, out, err = cli(capfd, *numpy, "--steps", 3, "--every", 2)
    assert (code, err) == (0, "")
    assert "2 checkpoints of " in out
    code, out, err = cli(capfd, *numpy, "--steps", 5, "--resume", "--dp", 2)
    assert code == 0
    assert err == f"distir: resuming from {tmp_path / 'c' / 'step-00000003'}\n"
    assert [line.split()[0] for line in out.splitlines() if line[:1].isdecimal()] == ["3", "4", "1"]
    flip(tmp_path / "c" / "step-00000005" / "__0_0.distcp")
    flip(tmp_path / "c" / "step-00000003" / "__0_0.distcp")
    code, _, err = cli(capfd, *numpy, "--steps", 6, "--resume")
    assert code == 2
    assert err.splitlines()[-1].startswith("distir: error: no checkpoint in ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--every", "2"], "every needs a directory of checkpoints"),
        (["--resume"], "resume needs a directory of checkpoints"),
        (["--checkpoint", "c", "--every", "0"], "expected at least 1"),
    ],
)
def test_flags_that_do_not_fit(flags: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = cli(capfd, *flags)
    assert (code, out) == (2, "")
    assert words in err


def test_without_training_there_is_nothing_to_save(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*MLP[:-2], "--checkpoint", str(tmp_path)]) == 2
    assert "checkpoints need a training step" in capfd.readouterr().err


def torchrun(directory: Path, steps: int, *flags: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of two processes with torchrun's environment."""
    port = str(free_port())
    processes = []
    for rank in range(2):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        line = [
            sys.executable,
            "-m",
            "distir",
            *MLP,
            "--dp",
            "2",
            "--steps",
            str(steps),
            "--checkpoint",
            str(directory),
        ]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen([*line, *flags], env=env, stdout=pipe, stderr=pipe, text=True))
    outputs = [p.communicate(timeout=300) for p in processes]
    return [(p.returncode, *out) for p, out in zip(processes, outputs, strict=True)]


def test_torchrun_writes_and_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli(capfd, "--backend", "numpy", "--checkpoint", tmp_path, "--steps", 2, "--every", 1)[0] == 0
    flip(tmp_path / "step-00000002" / "__0_0.distcp")
    (code0, out, err), (code1, *silent) = torchrun(tmp_path, 3, "--resume", "--check")
    assert (code0, code1) == (0, 0), err
    assert "check passed" in out
    assert f"resuming from {tmp_path / 'step-00000001'}" in err
    assert silent == ["", ""]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]
