"""`distir run --proxy`: ranks communicate as those of the program, and sleep where these compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distir.cli import main

pytestmark = pytest.mark.usefixtures("preloaded")

EXAMPLES = Path(__file__).parents[2] / "examples"
Cli = Callable[..., tuple[int, str, str]]
MLP = [str(EXAMPLES / "mlp.onnx"), "--dim", "batch=8", "--loss", "mse"]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a command; returns the exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        code = main([str(a) for a in args])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_an_iteration_takes_what_is_slept(cli: Cli, tmp_path: Path) -> None:
    times = tmp_path / "times.toml"
    times.write_text("fwd0 = 4000\nbwd0 = 10000\nupdate0 = 1000\n")
    plan = ["--dp", 2, "--proxy", "--times", times, "--iterations", 4, "--warmup", 1, "--profile", tmp_path / "traces"]
    code, out, err = cli("run", *MLP, *plan, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert len(found["seconds"]) == 4
    assert found["compute_seconds"] == pytest.approx(0.015, rel=1e-3)
    assert found["least_seconds"] >= 0.015
    assert found["least_seconds"] <= found["iteration_seconds"] <= found["most_seconds"]
    elements = 8 * (32 * 32 + 32) + 1  # of the gradients, and the loss
    assert found["bytes"] == {"MPIAllreduce": 4 * elements}
    assert {p.name for p in (tmp_path / "traces").iterdir()} == {"predicted.json", "rank0.json", "rank1.json"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--warmup", 0], "argument --warmup: expected at least 1, got 0"),
        (["--emulate", "spin"], "--emulate is for proxies"),
        (["--iterations", 4], "--iterations is for proxies"),
        (["--proxy", "--check"], "a proxy computes nothing"),
        (["--proxy", "--checkpoint", "here"], "a proxy computes nothing"),
        (["--proxy", "--compile"], "leave --compile out"),
        (["--proxy", "--metrics", "here"], "leave --metrics out"),
        (["--proxy", "--steps", 3], "--iterations 3"),
        (["--proxy", "--backend", "numpy"], "and so no proxy"),
        (["--proxy", "--times", "none.toml"], "cannot read none.toml"),
        (["--proxy", "--emulate", "loud"], "--emulate"),
    ],
)
def test_flags_that_do_not_fit(cli: Cli, flags: list[object], said: str) -> None:
    code, out, err = cli("run", *MLP, *flags)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "said"),
    [("fwd9 = 1", "has no function 'fwd9'"), ("fwd0 = -1", "expected microseconds"), ("fwd0", "is no TOML")],
)
def test_times_that_do_not_fit(cli: Cli, tmp_path: Path, text: str, said: str) -> None:
    times = tmp_path / "times.toml"
    times.write_text(text)
    code, out, err = cli("run", *MLP, "--dp", 2, "--proxy", "--times", times)
    assert (code, out) == (2, "")
    assert said in err
