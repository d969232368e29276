"""Command lines with commands and flags that there are not."""

from __future__ import annotations

import pytest

from distir.cli.flags import parse
from distir.ir.errors import UsageError


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("simulte x", "distir has no command 'simulte'", "did you mean simulate?"),
        ("x --json", "distir has no command 'x'", "there are inspect, run, compare, simulate,"),
        ("bench colectives", "distir bench has no command 'colectives'", "did you mean collectives?"),
        # a flag that is required is missing because another is misspelt
        ("simulate m.onnx --clusterr dgx-a100", "unrecognized arguments: --clusterr", "did you mean --cluster?"),
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
