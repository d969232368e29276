"""The command export; and that it is quick at full size."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time

import pytest

from distir.api import Plan
from distir.api.exporting import export
from distir.cli import main
from distir.ir.errors import UsageError
from tests.export.clusters import flat, model

MODEL = "gpt:layers=2,hidden=8,heads=2,vocab=16,seq=4,batch=4"
FLAGS = [MODEL, "--loss", "cross-entropy", "--dp", "2", "--cluster", "dgx-a100"]


def test_files_and_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "x")
    assert main(["export", *FLAGS, "--format", "chakra", "-o", prefix, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.0.et", "x.1.et", "x.groups.json"]
    assert done["files"] == [f"{prefix}.0.et", f"{prefix}.1.et", f"{prefix}.groups.json"]
    assert (done["format"], done["ranks"]) == ("chakra", 2)
    assert done["bytes"] == sum(p.stat().st_size for p in tmp_path.iterdir())
    assert main(["export", *FLAGS, "--format", "goal", "-o", prefix]) == 0
    assert capsys.readouterr().out.endswith(f" bytes: {prefix}.goal\n")


def test_a_run_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "x.goal").write_text("before")

    def stop(rank: int, ranks: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(model(), Plan(dp=2), tmp_path / "x", "goal", flat(2), on_rank=stop)
    assert (tmp_path / "x.goal").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_ranks_are_counted(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    export(model(), Plan(dp=2, tp=2), tmp_path / "x", "goal", flat(4), on_rank=lambda *pair: seen.append(pair))
    assert seen == [(k, 4) for k in range(4)]


def test_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *FLAGS, "--format", "goal", "-o", str(tmp_path / "none" / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err
    for prefix in ("", f"{tmp_path}/"):
        assert main(["export", *FLAGS, "--format", "chakra", "-o", prefix]) == 2
        assert f"names that begin with {prefix!r}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["export", *FLAGS, "--format", "csv", "-o", "x"]) == 2
    with pytest.raises(UsageError, match="unknown format 'csv'"):
        export(model(), Plan(), tmp_path / "x", "csv", flat(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chakra", "goal"])
def test_gpt3_on_1536_ranks(kind: str, tmp_path: Path) -> None:
    began = process_time()
    model = "gpt:layers=96,hidden=12288,heads=96,vocab=50257,seq=2048,tied=0,batch=128"
    plan = ["--dp", "4", "--tp", "4", "--pp", "96", "--microbatches", "8"]
    plan += ["--cut", ",".join([f"{k}.norm1.weight" for k in range(1, 96)])]
    flags = ["--cluster", "dgx-a100", "--format", kind, "-o", str(tmp_path / "x")]
    assert main(["export", model, "--loss", "cross-entropy", *plan, *flags]) == 0
    assert process_time() - began < 60
    assert len(list(tmp_path.iterdir())) == (1537 if kind == "chakra" else 1)
