"""`--split`: plans with further axes on the command line, on ranks, and the exit codes of what names nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from distir.cli import main
from tests.importer.models import model, node

pytestmark = pytest.mark.usefixtures("preloaded")

GPT = str(Path(__file__).parents[2] / "examples" / "gpt2-tiny.onnx")
TEXTS = [GPT, "--dim", "batch=8", "--loss", "cross-entropy"]
CHECKED = ["--dtype", "float64", "--optimizer", "adamw", "--steps", "2", "--check"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two convolutions with pools and a dense layer, with the flags of training it."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 3).astype(np.float32)

    nodes = [
        node("Conv", "x w0 b0", "h0", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Tanh", "h0", "h1"),
        node("MaxPool", "h1", "h2", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", "h2 w1 b1", "h3", kernel_shape=[5, 3], pads=[1, 1, 3, 1]),
        node("Tanh", "h3", "h4"),
        node("AveragePool", "h4", "h5", kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", "h5", "h6"),
        node("MatMul", "h6 dense", "y"),
    ]
    weights = {"w0": weight(4, 2, 3, 3), "b0": weight(4), "w1": weight(6, 4, 5, 3), "b1": weight(6)}
    x = rng.standard_normal((8, 2, 16, 16)).astype(np.float32)
    proto = model(nodes, {"x": x}, ["y"], {**weights, "dense": weight(96, 3)})
    path = tmp_path_factory.mktemp("images") / "net.onnx"
    onnx.save(proto, path)
    return [str(path), "--loss", "mse"]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def call(*args: object) -> tuple[int, str, str]:
        code = main([str(x) for x in args])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize(
    ("code", "text", "words", "hint"),
    [
        (2, "cp=2:*.9", "split: cp names *.9: no input matches and has a dim 9", "data inputs are input_ids"),
        (2, "cp=2:input_id.1", "no input is called 'input_id'", "did you mean input_ids?"),
        (2, "cp=2:labels.2", "the shape of %labels is (8, 16)", "its dims are 0 to 1"),
        (2, "cp=2:labels.1,labels.0", "cp splits dims 1 and 0 of %labels", "another dim takes another axis"),
        (2, "dp=2:labels.1", "the plan has an axis dp already", "choose another name"),
        (2, "compute=2:labels.1", "an axis cannot be named compute", "choose another name"),
        (2, "cp=2", "expected AXIS=N:INPUT.DIM,..., got 'cp=2'", "--help lists the flags"),
        (4, "cp=3:labels.1", "cp 3: dim 1 of %labels, 16, does not divide by 3", "use cp=2 or 4 or 8"),
        (4, "cp=8:labels.0", "cp 8: dim 0 of %labels, 8, does not divide by 2 x 8", "use cp=2 or 4"),
    ],
)
@pytest.mark.parametrize("command", ["show", "simulate"])
def test_errors(cli, command: str, code: int, text: str, words: str, hint: str) -> None:
    more = ["--cluster", "dgx-a100"] if command == "simulate" else []
    got, out, err = cli(command, *TEXTS, "--dp", 2, "--split", text, *more)
    lines = err.splitlines()
    assert (got, out) == (code, ""), err
    assert len(lines) == 2
    assert lines[0].startswith("distir: error: ")
    assert words in lines[0]
    assert lines[1].startswith("hint: ")
    assert hint in lines[1]


def test_several_axes_multiply_the_devices(cli, images: list[str]) -> None:
    code, out, err = cli(
        "simulate", *images, "--dp", 2, "--split", "h=2:x.2", "--split", "w=2:x.3", "--cluster", "dgx-a100"
    )
    assert code == 0, err
    assert "h 2" in out
    assert "w 2" in out
    assert "dp 2" in out


def test_a_plan_file_says_it_too(cli, images: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('dp = 2\nsplit = ["h=2:x.2"]\n')
    flags = ["--dp", 2, "--split", "h=2:x.2"]
    assert cli("show", *images, "--plan", path) == cli("show", *images, *flags)


SMALL = ["--microbatches", 2]


@pytest.mark.parametrize(
    "flags",
    [
        [*SMALL, "--split", "h=2:x.2", "--split", "w=2:x.3"],
        pytest.param(["--split", "h=4:x.2"], marks=pytest.mark.slow),
        pytest.param(["--dp", 2, *SMALL, "--zero", 2, "--split", "w=2:x.3"], marks=pytest.mark.slow),
        pytest.param(["--tp", 2, "--split", "h=2:x.2"], marks=pytest.mark.slow),
        pytest.param(["--pp", 2, *SMALL, "--split", "h=2:x.2"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_images_on_ranks(cli, images: list[str], flags: list[object]) -> None:
    code, out, err = cli("run", *images, *flags, *CHECKED)
    assert code == 0, err
    assert "check passed" in out


@pytest.mark.parametrize(
    "flags",
    [
        ["--dp", 2, *SMALL, "--split", "cp=2:*.1"],
        pytest.param(["--split", "cp=4:*.1"], marks=pytest.mark.slow),
        ["--tp", 2, "--split", "cp=2:*.1", "--sequence-parallel"],
        pytest.param(["--tp", 2, "--split", "cp=2:*.1", "--recompute", "full"], marks=pytest.mark.slow),
        pytest.param(["--pp", 2, *SMALL, "--split", "cp=2:*.1"], marks=pytest.mark.slow),
        pytest.param(["--dp", 2, "--zero", 3, "--split", "cp=2:*.1", "--clip-norm", 0.1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_texts_on_ranks(cli, flags: list[object]) -> None:
    code, out, err = cli("run", *TEXTS, *flags, *CHECKED)
    assert code == 0, err
    assert "check passed" in out
