"""`distir plan`: its table, JSON and exit codes."""

import json

import pytest

from distir.cli import main

LINE = ["plan", "gpt:layers=2,hidden=64,heads=4,vocab=64", "--seq", "32", "--cluster", "dgx-a100", "--batch", "4"]


def test_table(capsys):
    assert main([*LINE, "--gpus", "2", "--vary", "dp,tp,pp", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "MFU" in out
    assert "plans: " in out
    assert "the best plan is limited by" in out


def test_json(capsys):
    assert main([*LINE, "--gpus", "1,2", "--vary", "dp,tp", "--fix", "recompute=full", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [x["devices"] for x in found] == [1, 2]
    assert all(p["plan"]["recompute"] == "full" for x in found for p in x["plans"])
    assert all(p["bound_seconds"] <= p["step_seconds"] for x in found for p in x["plans"])


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        (["--gpus", "0"], 2, "at least 1"),
        (["--gpus", "2", "--fix", "tp"], 2, "NAME=X"),
        (["--gpus", "2", "--vary", "dp,dq"], 2, "dq"),
        (["--gpus", "2", "--memory-reserve", "79.9"], 4, "fits"),
        (["--gpus", "7", "--fix", "dp=7"], 4, "no plan for a batch of 4"),
        (["--gpus", "2", "--loss", "none"], 2, "training"),
    ],
)
def test_errors(capsys, more, code, word):
    assert main([*LINE, *more]) == code
    found = capsys.readouterr()
    assert found.out == ""
    assert word in found.err
    assert len(found.err.splitlines()) <= 2
