"""What is published of four workloads, against `distir show MODEL --messages --json` at full size; nothing is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from distir.cli import main

Row = dict[str, Any]


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> list[Row]:
    assert main(["show", *flags, "--messages", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def elements(rows: Sequence[Row], op: str, over: str, of: str) -> list[int]:
    """Of an op over axes in functions whose names begin so, in order; what is sent again counts as often."""
    found = [m for m in rows if (m["op"], m["over"]) == (op, over) and m["function"].startswith(of)]
    return [n for m in found for n in [m["elements"]] * m["times"]]


def cut(layers: Sequence[int]) -> tuple[str, str]:
    return "--cut", ",".join([f"{k}.norm1.weight" for k in layers])


def test_gpt2_large(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--dp", "8", "--pp", "4", "--microbatches", "8", "--schedule", "gpipe", *cut([12, 24, 36])]
    rows = shown(capsys, "gpt2-large:batch=64", *plan, "--bucket-mb", "0")
    assert {(m["elements"], m["times"]) for m in rows if m["op"] == "Send"} == {(808_960, 8)}
    reduced = [elements([m for m in rows if m["ranks"] == r], "MPIAllreduce", "dp", "bwd") for r in _runs(4, 8)]
    assert list(map(sum, reduced)) == [301_768_960, 236_129_280, 236_129_280, 300_460_800]
    assert list(map(len, reduced)) == [146, 144, 144, 147]


def test_gpt3(capsys: pytest.CaptureFixture[str]) -> None:
    """With two replicas, whose gradients are those of a shard of a layer."""
    plan = ["--dp", "2", "--tp", "4", "--pp", "96", "--microbatches", "8", *cut(range(1, 96)), "--bucket-mb", "0"]
    rows = shown(capsys, "gpt3-175b:batch=16", *plan)
    sends = {(m["elements"], m["times"]) for m in rows if m["op"] == "Send"}
    assert sends == {(25_165_824, 8), (-(-50_257 // 4) * 12_288, 1)}  # and once a step the tied table
    for k, ranks in list(enumerate(_runs(96, 8)))[1:-1]:  # the first stage has the embedding, too, the last the head
        here = [m for m in rows if m["ranks"] == ranks]
        for way in ("fwd", "bwd"):
            assert elements(here, "MPIAllreduce", "tp", f"{way}{k}") == [25_165_824] * 2 * 8
        matrices = [n for n in elements(here, "MPIAllreduce", "dp", f"bwd{k}") if n > 12_288 * 4]
        assert sum(matrices) == 452_984_832


def test_gpt3_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, "gpt3-moe:batch=16", "--split", "ep=16:input_ids.0,labels.0,*.experts.*.0")
    for way in ("fwd", "bwd"):
        assert elements(rows, "MPIAlltoall", "ep", way) == [25_165_824] * 2 * 96
    reduced = [n for m in rows if m["op"] == "MPIAllreduce" for n in m["members"]]
    assert 12_288 * 12_288 in reduced  # of attention
    assert 12_288 * 3_072 not in reduced  # of an expert
    assert sum(n == 12_288 * 3_072 * 16 for n in reduced) == 0


def test_cosmoflow(capsys: pytest.CaptureFixture[str]) -> None:
    splits = [f"{axis}=2:x.{dim},dense.*.weight.1" for axis, dim in (("h", 2), ("w", 3))]
    flags = ["cosmoflow:batch=16", "--dp", "2", "--split", splits[0], "--split", splits[1]]
    rows = shown(capsys, *flags)
    assert elements(rows, "HaloExchange", "h", "fwd") == [524_288, 262_144, 131_072, 65_536]
    assert elements(rows, "HaloExchange", "h", "bwd") == [131_072, 262_144, 524_288, 1_048_576]
    assert elements(rows, "MPIAllreduce", "dp", "bwd") == [1_050_737]
    gathered = [(m["over"], m["elements"]) for m in rows if m["op"] == "MPIAllgather" and m["function"] == "fwd0"]
    assert gathered[0] == ("h", 65_536)  # then along w, of what was gathered
    assert gathered[2:] == [("h+w", 256), ("h+w", 128)]
    (of_all,) = [m for m in rows if m["over"] == "dp+h+w" and m["function"] == "bwd0"]
    layers = [a + b for a, b in list(pairwise(of_all["members"]))[::2]]  # a weight and its bias each
    assert sorted(layers) == [3_488, 55_360, 221_312, 884_992, 3_539_456]


def test_dlrm(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, "dlrm", "--split", "ep=4:dense.0,labels.0,tables.0,indices.1", "--bucket-mb", "2.6")
    assert [m["elements"] for m in rows if m["op"] == "MPIAlltoall" and m["times"] == 1] == [262_144, 262_144]
    assert elements(rows, "MPIAllreduce", "ep", "bwd") == [728_065, 49_536]


def _runs(stages: int, ranks: int) -> list[str]:
    """The ranks of each stage, as the table says them."""
    return [f"{k * ranks}-{(k + 1) * ranks - 1}" for k in range(stages)]
