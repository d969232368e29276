"""`distir passes`, `opt`, `show --after`, plans in files, and programs as text where a model is expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distir.cli import main
from distir.ir import parse, same, verify
from distir.transforms.passes import PASSES
from distir.transforms.plan import Plan, load_plan

GPT = Path(__file__).parents[2] / "examples" / "gpt2-tiny.onnx"
MODEL = [str(GPT), "--dim", "batch=8", "--loss", "cross-entropy"]
PLAN = ["--dp", "2", "--tp", "2", "--pp", "2", "--microbatches", "2"]


def distir(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([str(x) for x in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_passes_are_listed_in_order(capsys):
    code, out, _ = distir(capsys, "passes")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["pass", "import", "training", *[p.name for p in PASSES], "rank"]
    rows = json.loads(distir(capsys, "passes", "--json")[1])
    assert [row["pass"] for row in rows] == names[1:]


def test_any_state_is_printed_and_goes_on_from_its_text(capsys, tmp_path):
    code, whole, _ = distir(capsys, "show", "--full", *MODEL, *PLAN)
    assert code == 0
    for name in ("fuse", "place", "schedule"):
        code, out, _ = distir(capsys, "show", "--full", *MODEL, *PLAN, "--after", name)
        assert code == 0
        verify(parse(out))
        file = tmp_path / f"{name}.distir"
        file.write_text(out)
        rest = [p.name for p in PASSES][[p.name for p in PASSES].index(name) + 1 :]
        code, again, err = distir(capsys, "opt", file, *PLAN, "--passes", ",".join(rest))
        assert code == 0, err
        assert again == whole


def test_opt_writes_a_file_that_simulates_and_runs(capsys, tmp_path):
    file = tmp_path / "gpt.distir"
    flat = ["--dp", "2", "--tp", "2", "--microbatches", "2"]  # stages would be balanced by the cluster
    passes = ",".join(p.name for p in PASSES)
    code, out, err = distir(capsys, "opt", *MODEL, *flat, "--passes", passes, "-o", file)
    assert (code, out) == (0, ""), err
    code, out, _ = distir(capsys, "simulate", file, "--cluster", "dgx-a100", "--json")
    assert code == 0
    found, plan = json.loads(out), ["simulate", *MODEL, *flat, "--cluster", "dgx-a100", "--json"]
    want = json.loads(distir(capsys, *plan)[1])
    assert found["step_seconds"] == want["step_seconds"]
    assert found["stages"] == want["stages"]
    assert (found["batch"], found["tokens"]) == (want["batch"], want["tokens"])
    code, out, _ = distir(capsys, "run", file, "--backend", "numpy", "--steps", 2, "--json")
    assert code == 0
    assert json.loads(out)["plan"]["devices"] == 4


def test_a_sequential_program_as_text_is_spread_as_a_model_is(capsys, tmp_path):
    file = tmp_path / "step.distir"
    file.write_text(distir(capsys, "show", "--full", *MODEL)[1])
    code, out, err = distir(capsys, "show", "--full", file, *PLAN)
    assert code == 0, err
    assert same(parse(out), parse(distir(capsys, "show", "--full", *MODEL, *PLAN)[1]))


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["opt", "{file}", "--passes", "plac"], 2, "unknown pass 'plac'"),
        (["opt", "{file}", "--passes", "schedule"], 2, "schedule takes a placed program"),
        (["show", "{file}", "--after", "nothing"], 2, "unknown pass 'nothing'"),
        (["show", "{file}", "--dim", "batch=8"], 2, "has no symbolic dimensions"),
        (["show", "none.distir"], 3, "cannot read none.distir"),
        (["show", "{bad}"], 3, "line 1: expected"),
        (["simulate", "{spread}", "--cluster", "dgx-a100", "--dp", "4"], 2, "is already distributed"),
        (["simulate", "{spread}", "--cluster", "dgx-a100", "--loss", "mse"], 2, "only a sequential program"),
        (["simulate", "{placed}", "--cluster", "dgx-a100"], 2, "is placed on a mesh, but not scheduled"),
        (["simulate", "{rank}", "--cluster", "dgx-a100"], 2, "is the program of one rank, which needs the others"),
        (["run", "{rank}", "--backend", "numpy"], 2, "is the program of one rank, which needs the others"),
        (["opt", "{rank}", "--passes", "bucket"], 2, "bucket takes a distributed program; main_graph is of one rank"),
        (["show", "{file}", "--plan", "none.toml"], 2, "cannot read none.toml"),
        (["show", "{file}", "--plan", "{bad}"], 2, "is no TOML"),
    ],
)
def test_what_is_wrong_is_reported_in_a_line(argv, code, said, capsys, tmp_path):
    files = {"file": tmp_path / "f.distir", "bad": tmp_path / "bad.distir"}
    files |= {"spread": tmp_path / "s.distir", "placed": tmp_path / "p.distir", "rank": tmp_path / "r.distir"}
    mlp = [str(GPT.with_name("mlp.onnx")), "--dim", "batch=8", "--loss", "mse"]
    files["file"].write_text(distir(capsys, "show", "--full", *mlp)[1])
    files["placed"].write_text(distir(capsys, "show", "--full", *mlp, "--dp", 2, "--after", "place")[1])
    files["spread"].write_text(distir(capsys, "show", "--full", *mlp, "--dp", 2)[1])
    files["rank"].write_text(distir(capsys, "show", "--full", *mlp, "--pp", 2, "--microbatches", 2, "--rank", 1)[1])
    files["bad"].write_text("this is = no program\n")
    found, out, err = distir(capsys, *[str(x).format(**files) for x in argv])
    assert (found, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_a_plan_is_saved_and_read(capsys, tmp_path):
    file = tmp_path / "plan.toml"
    code, first, _ = distir(capsys, "show", "--full", *MODEL, *PLAN, "--zero", 1, "--no-overlap", "--save-plan", file)
    assert code == 0
    assert Plan(**load_plan(file)) == Plan(2, 2, 2, 2, zero=1, overlap=False)
    assert distir(capsys, "show", "--full", *MODEL, "--plan", file)[1] == first
    changed = distir(capsys, "show", "--full", *MODEL, "--plan", file, "--zero", 0, "--overlap")[1]
    assert changed == distir(capsys, "show", "--full", *MODEL, *PLAN)[1]


@pytest.mark.parametrize("plan", [["--tp", "2", "--sequence-parallel"], ["--dp", "2", "--tp", "2", "--zero", "3"]])
def test_a_distributed_program_is_checked(capsys, tmp_path, plan):
    """In float32, with a padded vocabulary: what measures rounding moves replicas alike, and padding is no change."""
    file = tmp_path / "gpt.distir"
    passes = "fuse,decompose,pad,place,schedule,bucket,prefetch"
    code, _, err = distir(capsys, "opt", *MODEL, *plan, "--microbatches", 2, "--passes", passes, "-o", file)
    assert code == 0, err
    code, out, err = distir(capsys, "run", file, "--backend", "numpy", "--steps", 2, "--check")
    assert code == 0, err
    assert "check passed: 58 of 58 values" in out
