"""Command lines with commands and flags that there are not, and flags that give sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from distir.cli.commands import dims_of
from distir.cli.flags import parse
from distir.ir.errors import UsageError

ONNX = "examples/gpt2-tiny.onnx"


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("simulte x", "distir has no command 'simulte'", "did you mean simulate?"),
        ("x --json", "distir has no command 'x'", "there are inspect, run, compare, simulate,"),
        ("bench colectives", "distir bench has no command 'colectives'", "did you mean collectives?"),
        # a flag that is required is missing because another is misspelt
        ("simulate m.onnx --clusterr dgx-a100", "unrecognized arguments: --clusterr", "did you mean --cluster?"),
        ("simulate m.onnx --dpp 2", "unrecognized arguments: --dpp", "did you mean --dp?"),
        ("run m.onnx --steps 3 --chekc", "unrecognized arguments: --chekc", "did you mean --check?"),
        ("bench collectives --nproc 2 --sise=4", "unrecognized arguments: --sise", "did you mean --size?"),
        ("run m.onnx --zzz", "unrecognized arguments: --zzz", "distir run --help lists the flags"),
        ("run m.onnx two", "unrecognized arguments: two", "distir run --help lists the flags"),
        ("simulate m.onnx", "the following arguments are required: --cluster", "known are "),
        ("run --steps", "argument --steps: expected one argument", "distir run --help lists the flags"),
        ("--json", "the following arguments are required: COMMAND", "distir --help lists the flags"),
    ],
)
def test_what_is_misspelt_is_named(line: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as e:
        parse(line.split())
    assert e.value.message == message
    assert (e.value.hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("line", "dims"),
    [
        (f"{ONNX} --batch 8", {"batch": 8}),
        (f"{ONNX} --batch 8 --dim batch=8", {"batch": 8}),
        ("gpt:layers=2 --batch 8 --seq 16 --dim vocab=32", {"batch": 8, "seq": 16, "vocab": 32}),
        ("model.distir --batch 8", {"batch": 8}),
        (f"{ONNX} --batch 8 --batch-dim rows", {"rows": 8}),
    ],
)
def test_sizes(line: str, dims: dict[str, int]) -> None:
    assert dims_of(parse(f"inspect {line}".split())) == dims


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{ONNX} --batch 8 --dim batch=4", "--batch 8, but --dim batch=4"),
        ("gpt:layers=2 --seq 8 --dim seq=4", "--seq 8, but --dim seq=4"),
        ("fixed.onnx --batch 8", "fixed.onnx has no symbolic dimension: its batch is fixed"),
    ],
)
def test_sizes_that_are_not_taken(line: str, message: str, tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 6]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "fixed", [x], [y])
    saved = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    (tmp_path / "fixed.onnx").write_bytes(saved.SerializeToString())
    model, *flags = line.split()
    path = str(tmp_path / model) if model == "fixed.onnx" else model
    with pytest.raises(UsageError) as e:
        dims_of(parse(["inspect", path, *flags]))
    assert e.value.message.endswith(message)
