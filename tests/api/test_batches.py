"""Runs in epochs: what steps are fed, the losses, what is measured and written; on gloo, numpy and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import distir
from distir.api.data import Data
from distir.api.metrics import Metrics, read_metrics
from distir.api.model import Model
from distir.api.steps import compute_steps
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.errors import UsageError
from distir.ir.type import Float64
from distir.models import gpt
from distir.runtime.epochs import Epoch, Epochs
from distir.runtime.job import Job
from distir.transforms.differentiation.training import SGD, training_step

pytestmark = pytest.mark.usefixtures("preloaded")
ROOT = Path(__file__).parents[2]
WORDS = "".join(f"{k} bottles of beer on the wall, {k} bottles of beer\n" for k in range(120))


def small(batch: int = 8) -> Model:
    step = training_step(gpt(2, 16, 4, 300, 8, batch, Float64), "cross-entropy", SGD(0.5))
    return Model(step, optimizer=SGD(0.5))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(WORDS)
    return path


def sequential(model: Model, corpus: Path, epochs: int, share: float) -> tuple[list[float], list[float], Data]:
    """The losses of every step, and those on what is held out after each epoch, by the plainest of loops."""
    function = model.function
    arrays = dict(model.initial(0))
    data = Data(function, arrays, corpus)
    train, held_out = data.samples(epochs=True, share=share)
    assert held_out is not None
    values = {k: arrays[v] for k, v in enumerate(function.inputs) if v in arrays}
    values |= {data.number[v]: x for v, x in data.fixed().items()}
    losses, validation = [], []
    for k in range(epochs * train.steps):
        values |= train.step(k)
        results = SequentialExecutor().compute(function, [values[i] for i in range(len(function.inputs))])
        losses.append(float(results[0]))
        values |= {
            function.inputs.index(function.updates[v]): x
            for v, x in zip(function.outputs, results, strict=True)
            if v in function.updates
        }
        if (k + 1) % train.steps == 0:
            rows = []
            for j in range(held_out.steps):
                values |= held_out.step(j)
                outputs = SequentialExecutor().compute(function, [values[i] for i in range(len(function.inputs))])
                rows.append(float(outputs[0]))
            validation.append(float(np.mean(rows)))
    return losses, validation, data


@pytest.mark.parametrize(
    ("plan", "backend"),
    [
        (distir.Plan(dp=2, pp=2, microbatches=2), "gloo"),
        (distir.Plan(dp=2, zero=3), "gloo"),
        (distir.Plan(tp=2), "gloo"),
        (distir.Plan(dp=2, tp=2), "numpy"),
    ],
    ids=str,
)
def test_epochs_are_the_sequential_ones(corpus: Path, tmp_path: Path, plan: distir.Plan, backend: str):
    model, file = small(), tmp_path / "metrics.json"
    seen: list[int] = []

    def on_epoch(metrics: Metrics) -> None:
        found = json.loads(file.read_text())
        assert found == json.loads(json.dumps(metrics.to_json()))
        seen.append(len(found["epochs"]))

    result = distir.run(
        model, plan, epochs=3, data=corpus, held_out=0.2, metrics=file, backend=backend, on_epoch=on_epoch
    )
    losses, validation, data = sequential(model, corpus, 3, 0.2)
    assert seen == [0, 1, 2, 3]
    assert result.losses == pytest.approx(losses, rel=1e-10)
    (found,) = read_metrics(file)
    each = [row["validation_loss"] for row in found["epochs"]]
    assert each == pytest.approx(validation, rel=1e-10)
    assert each == sorted(each, reverse=True)  # it learns
    steps = found["steps"]
    means = [np.mean(losses[k * steps : (k + 1) * steps]) for k in range(3)]
    assert [row["loss"] for row in found["epochs"]] == pytest.approx(means)
    ranks = 1 if backend == "numpy" else plan.size
    assert all(len(row["seconds_by_rank"]) == ranks for row in found["epochs"])
    assert found["plan"]["dp"] == plan.dp
    assert found["samples"] == {"training": data.samples(True, 0.2)[0].count, "held_out": 48}
    assert found["data"] == str(corpus)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_averages_name_the_epochs_they_are_of(tmp_path: Path):
    reported: list[str] = []
    for epochs in (2, 4, 7):  # each goes on with the one before
        result = distir.run(
            small(), epochs=epochs, steps=2, backend="numpy", checkpoint=tmp_path / "c", resume=epochs > 2
        )
        assert result.metrics is not None
        reported.append(result.metrics.lines()[0].split("(")[1].split(")")[0])
    assert reported == ["epoch 1", "epoch 3", "mean of epochs 5 to 6"]


def test_samples_of_an_npz_file(tmp_path: Path):
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, 300, (2, 26, 8))
    np.savez(tmp_path / "data.npz", input_ids=ids.astype(np.int32), labels=labels)
    model, plan = small(4), distir.Plan(dp=2)
    result = distir.run(model, plan, epochs=2, data=tmp_path / "data.npz", held_out=0.0, seed=3)
    assert len(result.losses) == 12  # 26 samples are 6 batches of 4, and 2 are left over
    assert result.metrics is not None
    assert result.metrics.validation == [None, None]
    again = distir.run(model, plan, epochs=2, data=tmp_path / "data.npz", held_out=0.0, seed=3, backend="numpy")
    assert again.losses == pytest.approx(result.losses, rel=1e-10)


def test_fewer_steps_and_drawn_data(corpus: Path):
    result = distir.run(small(), epochs=2, steps=3, data=corpus, backend="numpy")
    assert len(result.losses) == 6
    drawn = distir.run(small(), epochs=2, steps=3, backend="numpy")
    assert len(drawn.losses) == 6
    assert drawn.metrics is not None
    assert drawn.metrics.validation == [None, None]
    assert [row[0] for row in drawn.table()] == ["epoch", "0", "1"]
    with_check = distir.run(small(), distir.Plan(dp=2), epochs=2, steps=3, data=corpus, backend="numpy", check=True)
    assert with_check.check is not None
    assert with_check.check.ok


def test_only_metrics_is_one_epoch(tmp_path: Path):
    result = distir.run(small(), steps=4, metrics=tmp_path / "m.json", backend="numpy")
    (found,) = read_metrics(tmp_path / "m.json")
    assert len(found["epochs"]) == 1
    assert found["epochs"][0]["steps"] == len(result.losses) == 4
    assert "without its first step" in str(result)


def test_a_forward_pass_in_epochs(tmp_path: Path):
    np.savez(tmp_path / "data.npz", input_ids=np.zeros((16, 8), int))
    model = Model(gpt(1, 16, 4, 300, 8, 4, Float64))
    result = distir.run(model, epochs=2, data=tmp_path / "data.npz", backend="numpy", metrics=tmp_path / "m.json")
    assert result.losses == []
    (found,) = read_metrics(tmp_path / "m.json")
    assert [(row["steps"], row["loss"], row["validation_loss"]) for row in found["epochs"]] == [(4, None, None)] * 2


def test_samples_that_are_no_sequences():
    model = distir.load(ROOT / "examples" / "mlp.onnx", {"batch": 8}, loss="mse")
    result = distir.run(model, epochs=2, backend="numpy")
    assert result.metrics is not None
    assert result.metrics.to_json()["measured"]["tokens_per_second"] is None
    assert result.table()[0] == ("epoch", "loss", "time", "samples/s")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs: expected at least 1"),
        ({"steps": 0}, "steps: expected at least 1"),
        ({"epochs": 1, "held_out": 1.0}, "below 1"),
        ({"epochs": 1, "held_out": 0.999}, "held out, a step needs 8"),
        ({"epochs": 1, "metrics": "no/such/folder/m.json"}, "cannot write"),
    ],
)
def test_what_cannot_be_run(corpus: Path, settings: dict, words: str):
    with pytest.raises(UsageError, match=words):
        distir.run(small(), data=corpus, backend="numpy", **settings)


# ---------------------------------------------------------------- averages


def epoch(number: int, seconds: list[float], first: list[float], steps: int = 10) -> Epoch:
    return Epoch(number, steps, seconds, first, [0.0] * len(seconds), {0: np.array(1.5)})


@pytest.fixture(scope="module")
def prediction():
    return distir.simulate(small(), distir.Plan(dp=2), "cpu-2core")  # 64 tokens a step


def test_the_first_epoch_is_not_counted(prediction):
    metrics = Metrics(prediction, 10)
    metrics.add(epoch(0, [100.0, 100.0], [50.0, 50.0]), [2.0, 4.0])
    metrics.add(epoch(1, [1.0, 2.0], [0.5, 0.5]), [2.0])
    metrics.add(epoch(2, [3.0, 2.0], [0.5, 0.5]), [2.0])
    found = metrics.measured
    assert found is not None
    assert found.seconds == pytest.approx(2.0)  # of ranks and epochs
    assert found.tokens == pytest.approx([20 * 64 / 2 / 4.0] * 2)
    assert found.tokens_per_second == pytest.approx(320.0)
    assert found.samples_per_second == pytest.approx(40.0)
    assert metrics.losses == [3.0, 2.0, 2.0]
    assert metrics.to_json()["measured"]["epochs"] == [1, 2]


def test_the_first_step_of_an_only_epoch_is_not_counted(prediction):
    metrics = Metrics(prediction, 10)
    assert metrics.to_json()["measured"] is None
    metrics.add(epoch(0, [10.0, 10.0], [1.0, 1.0]), [])
    found = metrics.measured
    assert found is not None
    assert found.seconds == pytest.approx(10.0)
    assert found.samples_per_second == pytest.approx(8.0)
    only = Metrics(prediction, 1)
    only.add(epoch(0, [4.0, 4.0], [4.0, 4.0], 1), [])
    assert only.measured is not None
    assert only.measured.seconds == pytest.approx(4.0)


def test_numbers_that_json_lacks(prediction, tmp_path: Path):
    metrics = Metrics(prediction, 10)
    metrics.add(epoch(0, [1.0], [0.1])._replace(means={0: np.array(np.inf)}), [float("nan")])
    metrics.save(tmp_path / "m.json")
    row = json.loads((tmp_path / "m.json").read_text())["epochs"][0]
    assert row["loss"] is None
    assert row["validation_loss"] is None


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "holds no metrics"), ('{"runs": [{}]}', "holds no metrics"), (None, "cannot read")],
)
def test_files_that_are_no_metrics(tmp_path: Path, text: str | None, words: str):
    if text is not None:
        (tmp_path / "m.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_metrics(tmp_path / "m.json")


def test_metrics_before_the_first_epoch(prediction, tmp_path: Path):
    Metrics(prediction, 10).save(tmp_path / "m.json")
    with pytest.raises(UsageError, match="no epoch was measured yet"):
        read_metrics(tmp_path / "m.json")


# ---------------------------------------------------------------- a run that is resumed, torchrun


def test_an_epoch_that_begins_in_the_middle_ends_where_it_must():
    from distir.runtime.epochs import EpochTimer

    timer = EpochTimer(Epochs(4), None)
    assert [timer.add(k, 1.0, 0.25) for k in (6,)] == [None]
    epoch = timer.add(7, 2.0, 0.25)
    assert epoch is not None
    assert epoch[:4] == (2, 3.0, 1.0, 0.5)


TORCHRUN = """
import sys
from tests.api.test_batches import small
import distir
result = distir.run(small(), distir.Plan(dp=2), epochs=2, steps=3, data=sys.argv[1], metrics=sys.argv[2], timeout=300)
"""


@pytest.mark.parametrize("same", [True, False])
def test_under_torchrun(tmp_path: Path, same: bool):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    file, processes = tmp_path / "m.json", []
    for rank in range(2):
        corpus = tmp_path / f"corpus{rank}.txt"
        corpus.write_text(WORDS if same or rank == 0 else WORDS.replace("beer", "milk"))
        env = dict(os.environ, PYTHONPATH=str(ROOT), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-c", TORCHRUN, str(corpus), str(file)]
        processes.append(subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True, cwd=ROOT))
    errors = [p.communicate(timeout=300)[1] for p in processes]
    if not same:
        assert all("rank 1 would read other data than rank 0" in e for e in errors)
        return
    assert [p.returncode for p in processes] == [0, 0], errors
    (found,) = read_metrics(file)
    want = distir.run(small(), distir.Plan(dp=2), epochs=2, steps=3, data=tmp_path / "corpus0.txt", backend="numpy")
    assert want.metrics is not None
    assert [row["validation_loss"] for row in found["epochs"]] == pytest.approx(want.metrics.validation, rel=1e-10)
    assert [len(row["seconds_by_rank"]) for row in found["epochs"]] == [2, 2]


def test_compute_steps_without_a_listener(corpus: Path):
    model = small()
    arrays = dict(model.initial(0))
    data = Data(model.function, arrays, corpus)
    given = {k: arrays[v] for k, v in enumerate(model.function.inputs) if v in arrays}
    given |= {data.number[v]: x for v, x in data.fixed().items()}
    samples = data.samples(True)[0]
    done = compute_steps(Job(model.function, given, samples, 2, epochs=Epochs(1)))
    assert len(done.seconds) == 2
