"""The flags of the command plan."""

from __future__ import annotations

import argparse
from typing import Any

from distir.cli.flag_groups import emit_flag, runtime_flag, size_flags
from distir.cli.flag_values import at_least, finite_number, numbers, positive

TEXT = "find the quickest plans for a model on a cluster, of those that fit in memory"
JSON = "plans, families and counts, in seconds, bytes and FLOP/s"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the command's parser."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="an ONNX file, a config.json of Hugging Face, or a name and sizes: gpt:layers=12,hidden=768,heads=12",
    )
    group = parser.add_argument_group("the task")
    group.add_argument("--cluster", required=True, metavar="NAME|FILE.toml", help="`distir clusters` lists names")
    group.add_argument(
        "--gpus",
        required=True,
        type=numbers,
        metavar="N,N,...",
        help="number of devices; several are planned for separately",
    )
    size_flags(group)
    group.add_argument("--loss", metavar="LOSS", help="default: that of the model's name, else cross-entropy")
    group.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw", help="default: adamw")
    group.add_argument("--clip-norm", type=positive, metavar="X", help="limit the norm of all gradients")
    group.add_argument(
        "--precision",
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="bf16",
        help="data type of matrix products; weights and statistics stay float32 (mixed precision); default: bf16",
    )
    group.add_argument(
        "--grad-dtype", choices=("fp32", "bf16", "fp16"), help="data type of summed gradients; default: fp32"
    )
    runtime_flag(group)
    group = parser.add_argument_group("the search")
    group.add_argument("--top", type=at_least(1), default=10, metavar="N", help="how many plans to list; default: 10")
    group.add_argument(
        "--vary",
        type=lambda text: [name.replace("-", "_") for name in text.split(",")],
        metavar="A,B,...",
        help="settings to vary: dp, tp, pp, cp (context parallelism), ep (expert parallelism), microbatch, schedule, "
        "chunks, zero, recompute, sequence_parallel, order; default: all, cp only where sequences are long",
    )
    group.add_argument(
        "--fix",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=X",
        help="fix one of these settings, such as tp=8; may be given several times",
    )
    group.add_argument(
        "--memory-reserve",
        type=finite_number,
        default=1.0,
        metavar="GIB",
        help="memory left free on each device, beyond what is predicted; default: 1",
    )
    group = parser.add_argument_group("the answer")
    emit_flag(group, "the best plan")
    group.add_argument(
        "--emit-rank", type=at_least(1), default=1, metavar="N", help="write the plan in row N of the table; default: 1"
    )
    group.add_argument(
        "--plot",
        metavar="FILE.pdf",
        help="draw time against memory of the simulated plans, with the Pareto front; the timeline of the best plan; "
        "memory over time on the devices on which it leaves least: .pdf, .png or .svg",
    )
    group.add_argument("--report", metavar="FILE.html", help="write a report, with figures, as one file")


def _setting(text: str) -> tuple[str, Any]:
    """A setting and its value: a number, true or false, a list of axes, or a word."""
    name, _, value = text.partition("=")
    name = name.replace("-", "_")
    if not value:
        raise argparse.ArgumentTypeError(f"expected NAME=X, such as tp=8, got {text!r}")
    if value.isdecimal():
        return name, int(value)
    if value in ("true", "false"):
        return name, value == "true"
    return name, tuple(value.split(",")) if name == "order" else value
