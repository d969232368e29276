"""`distir explain` and `distir diff`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import distir
from distir.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
Cli = Callable[..., tuple[int, str, str]]
MLP = [str(EXAMPLES / "mlp.onnx"), "--dim", "batch=8", "--loss", "mse", "--cluster", "dgx-a100"]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a command; returns the exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        code = main([str(a) for a in args])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_parts_of_each_stage_add_up(cli: Cli, tmp_path: Path) -> None:
    figure = tmp_path / "parts.svg"
    code, out, err = cli(
        "explain", *MLP, "--dp", 2, "--pp", 2, "--what-if", "link=2x,latency=0", "--plot", figure, "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert [row["devices"] for row in found["parts"]] == [2, 2]
    for row in found["parts"]:
        parts = [x for kind in ("compute", "exposed", "bubble") for x in row[kind].values()]
        assert math.fsum(parts) == pytest.approx(found["step_seconds"], rel=1e-9)
    assert math.fsum(found["mean"].values()) == pytest.approx(found["step_seconds"], rel=1e-9)
    assert [x["change"] for x in found["what_if"]] == ["link=2x", "latency=0x", "link=2x, latency=0x"]
    each = [x["step_seconds"] for x in found["what_if"]]
    assert each[2] <= min(each) < found["step_seconds"]
    assert figure.read_text().startswith("<?xml")


def test_what_is_communicated_and_how(cli: Cli) -> None:
    """A row for each kind of collective, and of what is sent between stages; none on one device."""
    args = *MLP, "--dp", 2, "--pp", 2
    found = json.loads(cli("explain", *args, "--json")[1])["communication"]
    assert {(row["axis"], row["collective"], row["devices"], row["nodes"]) for row in found} >= {
        ("dp", "all-reduce", 2, 1),
        ("send", "transfer", 2, 1),
    }
    assert all(row["times"] > 0 and row["least"] <= row["most"] and row["seconds"] > 0 for row in found)
    out = cli("explain", *args)[1]
    begin = out.index("communication  ")
    head, *rows = out[begin:].split("\n\n")[0].splitlines()
    assert head.split()[1:6] == ["axis", "devices", "nodes", "algorithm", "times"]
    assert len(rows) == len(found)
    assert [row.endswith(" -") for row in rows] == [row["bus_bandwidth"] < 1e6 for row in found]
    assert any(row.endswith("GB/s") for row in rows)
    assert any(row.endswith(" -") for row in rows)
    assert ["transfer", "pp", "2", "1", "-"] in [row.split()[:5] for row in rows]
    out = cli("explain", *MLP)[1]
    assert not any(line.startswith("communication") for line in out.splitlines())


def test_memory_of_each_stage_by_category(cli: Cli) -> None:
    """As simulate has it; the table leaves out what no stage has."""
    args = *MLP, "--dp", 2, "--pp", 2
    explained, simulated = (json.loads(cli(command, *args, "--json")[1]) for command in ("explain", "simulate"))
    assert [row["memory_at_peak"] for row in explained["parts"]] == [s["memory_at_peak"] for s in simulated["stages"]]
    out = cli("explain", *args)[1]
    begin = out.index("memory  ")
    head, *rows = out[begin:].split("\n\n")[0].splitlines()
    assert "context" in head
    assert "optimizer state" not in head
    assert [row.split()[0] for row in rows] == ["stage0", "stage1"]
    on_cpus = cli("explain", *MLP[:-2], "--dp", 2, "--cluster", "cpu-2core")[1]
    assert "memory  parameters  gradients" in on_cpus
    assert "context" not in on_cpus


def test_the_table_names_the_stage_axis(cli: Cli) -> None:
    code, out, _ = cli("explain", *MLP, "--pp", 2)
    assert code == 0
    head = next(line for line in out.splitlines() if line.startswith("stage"))
    assert head.split() == "stage devices ideal compute below peak optimizer pp warm-up".split()  # noqa: SIM905
    assert "model FLOPs utilization" in out


def test_diff_adds_up_to_the_difference_of_the_steps(cli: Cli, tmp_path: Path) -> None:
    before, after = tmp_path / "a.toml", tmp_path / "b.toml"
    distir.Plan(dp=2).save(before)
    distir.Plan(pp=2, microbatches=2).save(after)
    args = [MLP[0], before, after, *MLP[1:]]
    code, out, err = cli("diff", *args, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["settings"] == {
        "dp": {"before": 2, "after": 1},
        "pp": {"before": 1, "after": 2},
        "microbatches": {"before": 1, "after": 2},
    }
    for plan in ("before", "after"):
        assert math.fsum(found[plan]["mean"].values()) == pytest.approx(found[plan]["step_seconds"], rel=1e-9)
    code, out, _ = cli("diff", *args)
    assert code == 0
    assert "dp: 2 -> 1" in out
    code, out, _ = cli("diff", MLP[0], before, before, *MLP[1:])
    assert "the plans are equal" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["explain", *MLP, "--what-if", "links=2x"], "unknown figure 'links'"),
        (["explain", *MLP, "--what-if", "link"], "expected FIGURE=FACTOR"),
        (["explain", *MLP, "--what-if", "link=2x,link=3x"], "link is given twice"),
        (["explain", *MLP, "--what-if", "link=0"], "link: expected a factor from 1e-09 to 1e+09, got 0"),
        (["explain", *MLP, "--what-if", "link=1e-308"], "link: expected a factor from 1e-09 to 1e+09, got 1e-308"),
        (["explain", *MLP, "--what-if", "latency=-1"], "latency: expected a factor from 1e-09 to 1e+09, or 0, got -1"),
        (["explain", *MLP, "--plot", "none/parts.svg"], "cannot write none/parts.svg: none is no folder"),
        (["explain", *MLP, "--cut", ""], "argument --cut: expected names, such as A,B, got ''"),
        (["explain", *MLP, "--plot", "parts.txt"], "parts.txt"),
        (["diff", MLP[0], "none.toml", "none.toml", *MLP[1:]], "none.toml"),
    ],
)
def test_flags_that_do_not_fit(cli: Cli, args: list[str], said: str) -> None:
    code, _, err = cli(*args)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
