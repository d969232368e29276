"""The flags of every command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from distir import __version__
from distir.ir.errors import UsageError

_EXIT_CODES = "exit codes: 0 done, 1 internal error, 2 bad flags or files, 3 bad model, 4 a plan that cannot be\n\
carried out or does not fit, 5 results differ or are not finite, 6 a worker failed"
_TABLE = """A table is a line a pipeline rank, in text or CSV. Its cells are stage, F or B (forward or backward pass),
microbatch, such as 0F3; idle cells are empty in CSV, dots in text. Of a file only the order of a line's cells counts,
not their columns: each runs as soon as it can. Stage s stands on rank s modulo the ranks.
"""
_SCHEDULE = "NAME|FILE.csv"
_NAMES = "1f1b, gpipe, interleaved or distir2021"
_EXAMPLES = """examples:
  distir run gpt2.onnx --dim batch=8 --loss cross-entropy --dp 2 --pp 2 --microbatches 4 --check
  distir simulate gpt2.onnx --dim batch=512 --loss cross-entropy --dp 8 --tp 4 --cluster dgx-a100
"""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage; flags may not be abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"{self.prog} --help lists the flags")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line; `command` is what carries it out. Raises UsageError for bad ones."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:  # argparse would blame the whole program, whose --help has no flags of commands
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", f"{args.prog} --help lists the flags")
    if args.traceback:
        os.environ["DISTIR_TRACEBACK"] = "1"
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="distir",
        description="Predict or run distributed deep learning: the same program is predicted and run.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"distir {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _run(commands)
    _compare(commands)
    _simulate(commands)
    _show(commands)
    _schedule(commands)
    _command(commands, "clusters", "list the clusters that are shipped", "clusters", "bytes, FLOP/s, bytes/s")
    _bench(commands)
    _plot(commands)
    return parser


def _command(
    commands: Any, name: str, text: str, function: str, json: str = "seconds, bytes"
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EXIT_CODES)

    def command(args: argparse.Namespace) -> None:
        module, _, found = function.rpartition(".")
        getattr(import_module(f"distir.cli.{module or 'commands'}"), found)(args)

    parser.set_defaults(command=command, prog=parser.prog)
    parser.add_argument("--json", action="store_true", help=f"print JSON: {json}")
    parser.add_argument("--traceback", action="store_true", help="show where an internal error arose")
    return parser


def _run(commands: Any) -> None:
    parser = _command(commands, "run", "run a model spread over processes, and compare with the prediction", "run")
    _model_flags(parser)
    _plan_flags(parser)
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--epochs", type=_at_least(1), metavar="N", help="go through the data so often, each time in another order"
    )
    _data_flags(group, "5, with --epochs all of --data")
    _running_flags(group)
    group.add_argument(
        "--compile",
        action="store_true",
        help="put what ranks compute through torch.compile, in the first step, which then takes longer",
    )
    group.add_argument("--check", action="store_true", help="compare with the sequential program on the same data")
    group.add_argument(
        "--profile", metavar="DIR", help="write traces of what is predicted and of each rank (see `distir compare`)"
    )
    group.add_argument(
        "--checkpoint", metavar="DIR", help="keep the last two checkpoints here; one is written after the last step"
    )
    group.add_argument("--every", type=_at_least(1), metavar="N", help="and a checkpoint after every N steps")
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with the newest checkpoint that is undamaged, to as many steps in all",
    )
    group.add_argument("--save", metavar="FILE.onnx", help="write the model with the trained weights")


def _compare(commands: Any) -> None:
    text = "line up what `run --profile` has predicted and measured: by op, stage and function, the worst first"
    parser = _command(commands, "compare", text, "compare", "seconds of a step on a rank")
    parser.add_argument("profile", metavar="DIR", help="what was given to --profile")


def _simulate(commands: Any) -> None:
    parser = _command(commands, "simulate", "predict seconds and bytes of a model spread over a cluster", "simulate")
    _model_flags(parser)
    _plan_flags(parser)
    group = parser.add_argument_group("the cluster")
    group.add_argument("--cluster", required=True, metavar="NAME|FILE.toml", help="`distir clusters` lists names")
    group.add_argument("--nodes", type=_at_least(1), metavar="N", help="default: as many as the plan needs")
    group.add_argument("--trace", metavar="FILE.json", help="write a trace that Perfetto opens")


def _show(commands: Any) -> None:
    parser = _command(commands, "show", "print a model's program", "show", "the stage, and the program as text")
    _model_flags(parser)
    _plan_flags(parser)
    stages = ("imported", "training", "distributed", "rank")
    parser.add_argument("--stage", choices=stages, help="default: as far as the other flags say")
    parser.add_argument("--rank", type=_at_least(0), metavar="N", help="what this rank runs")
    parser.add_argument(
        "--python", action="store_true", help="the Python that a rank runs over torch; default: rank 0's"
    )


def _schedule(commands: Any) -> None:
    text = "print a pipeline schedule as a grid, and check it: a row a pipeline rank, a column a time step"
    parser = _command(commands, "schedule", text, "schedule", "the table; steps, and how many of them a rank is idle")
    parser.epilog = f"{_TABLE}\n{parser.epilog}"
    parser.add_argument("schedule", metavar=_SCHEDULE, help=f"{_NAMES}, or a table's file")
    one = _at_least(1)
    parser.add_argument("--pp", type=one, metavar="N", help="pipeline ranks; default: a file's, else 1")
    parser.add_argument("--microbatches", type=one, metavar="N", help="default: a file's, else 1")
    parser.add_argument("--chunks", type=one, metavar="N", help="stages a pipeline rank has; default: a file's, else 1")
    parser.add_argument("--limit", type=one, metavar="N", help="the most microbatches that a rank may hold saved")
    parser.add_argument("--csv", action="store_true", help="print CSV, as torch.distributed.pipelining reads it")


def _bench(commands: Any) -> None:
    text = "measure how quick something is on this machine"
    parser = commands.add_parser("bench", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EXIT_CODES)
    kinds = parser.add_subparsers(metavar="WHAT", required=True, parser_class=_Parser)
    text = "latency and bandwidth of each collective at each size, among processes of this host or torchrun's"
    parser = _command(kinds, "collectives", text, "bench_collectives")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="default: gloo")
    parser.add_argument("--nproc", type=_at_least(2), default=2, metavar="N", help="processes; default: 2")
    parser.add_argument("--collective", action="append", metavar="NAME", help="one of them only; may be given again")
    parser.add_argument("--size", type=_at_least(1), action="append", metavar="BYTES", help="likewise a size")
    parser.add_argument("--dtype", default="float32", metavar="TYPE", help="of the elements; default: float32")
    parser.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="S", help="seconds without a sign of life; default: 600"
    )
    _scaling(kinds)


def _data_flags(group: Any, steps: str) -> None:
    group.add_argument(
        "--steps", type=_at_least(1), metavar="N", help=f"of an epoch, if there are any, at most; default: {steps}"
    )
    group.add_argument(
        "--data",
        metavar="FILE",
        help="a text; or FILE.npz, an array for each input, by name, and labels (cross-entropy) or target (mse); "
        "default: drawn",
    )
    group.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of data and order; default: 0")
    group.add_argument("--val-fraction", type=_share, metavar="X", help="of --data held out of epochs; default: 0.1")
    group.add_argument(
        "--tokenizer", metavar="FILE.json", help="of a text: read if it is there, else trained on the text and written"
    )


def _running_flags(group: Any) -> None:
    group.add_argument("--metrics", metavar="FILE.json", help="write times, rates and losses to it after each epoch")
    group.add_argument(
        "--backend",
        choices=("gloo", "nccl", "numpy"),
        help="gloo: a process a CPU rank; nccl: a GPU a rank; numpy: all in this process; default: gloo, on cuda nccl",
    )
    group.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: that of the backend; with gloo ranks share GPUs, for tests"
    )
    group.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="S", help="seconds without a sign of life; default: 600"
    )
    group.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="go on where the loss or weights are not finite, instead of ending; of such weights no checkpoint is kept",
    )
    group.add_argument(
        "--cluster", metavar="NAME|FILE.toml", help="to predict for; default: cpu-2core, with this host's cores"
    )


def _scaling(kinds: Any) -> None:
    text = "weak scaling: train on more and more ranks, data-parallel, with the same batch a rank"
    parser = _command(kinds, "scaling", text, "training.scaling", "the metrics of each run, and its efficiency")
    parser.description = f"{text[0].upper()}{text[1:]}: --dim gives the batch of one rank."
    _model_flags(parser)
    group = parser.add_argument_group("the runs")
    group.add_argument("--ranks", type=_numbers, default=[1, 2], metavar="N,N,...", help="default: 1,2")
    group.add_argument("--epochs", type=_at_least(1), default=3, metavar="N", help="of each run; default: 3")
    _data_flags(group, "10, of --data all")
    _running_flags(group)


def _plot(commands: Any) -> None:
    text = "draw training time and rate, predicted beside measured, of runs with --metrics or of bench scaling"
    parser = _command(commands, "plot", text, "training.plot", "the files")
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="what --metrics wrote")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.pdf", help="ends in .pdf, .png or .svg")


def _model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.onnx", help="opset 13 or later; its weights beside it or in it")
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--dim", type=_size, action="append", default=[], metavar="NAME=N", help="size of a symbolic dimension"
    )
    group.add_argument(
        "--batch-dim", metavar="NAME", help="the symbolic dimension that is the batch's, if not the first"
    )
    group.add_argument(
        "--loss", metavar="LOSS", help="train with cross-entropy, mse or an output that is the loss; else forward only"
    )
    group.add_argument("--optimizer", choices=("sgd", "adamw"), help="default: sgd")
    group.add_argument("--lr", type=_positive, metavar="X", help="default: 0.001")
    group.add_argument("--momentum", type=_number, metavar="X", help="of sgd; default: 0")
    group.add_argument("--weight-decay", type=_number, metavar="X", help="default: 0, adamw 0.01")
    group.add_argument("--dtype", metavar="TYPE", help="float32, float64, bfloat16 or float16; default: the model's")


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the plan")
    one = _at_least(1)
    group.add_argument("--dp", type=one, metavar="N", help="replicas (data parallelism); default: 1")
    group.add_argument("--tp", type=one, metavar="N", help="shards of each weight (tensor parallelism); default: 1")
    group.add_argument("--pp", type=one, metavar="N", help="pipeline ranks; default: 1")
    group.add_argument(
        "--microbatches", type=one, metavar="N", help="pieces of the batch, one after the other; default: 1"
    )
    group.add_argument(
        "--schedule",
        metavar=_SCHEDULE,
        help="of the pipeline: a name, or a table (see `distir schedule`); default: 1f1b",
    )
    group.add_argument("--chunks", type=one, metavar="N", help="stages a pipeline rank has, if interleaved; default: 1")
    group.add_argument(
        "--no-overlap",
        action="store_const",
        const=False,
        dest="overlap",
        help="communication waits for compute, and reductions of gradients for the last microbatch",
    )
    group.add_argument(
        "--bucket-mb",
        type=_bucket,
        metavar="X",
        help="MiB of gradients that are reduced at once: 0 for one each, inf for one in all; default: 25",
    )
    group.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="replicas split among them: nothing (0, the default), the optimizer's state (1), gradients too (2), "
        "parameters too (3)",
    )
    group.add_argument(
        "--order", type=_order, metavar="A,B,C", help="how device numbers run, fastest first; default: tp,dp,pp"
    )


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return number


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return value


def _bucket(text: str) -> float:
    return float("inf") if text == "inf" else _number(text)


def _share(text: str) -> float:
    value = _number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a share below 1, got {text}")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise argparse.ArgumentTypeError("expected a number above 0, got 0")
    return value


def _numbers(text: str) -> list[int]:
    return [_at_least(1)(x) for x in text.split(",")]


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME=N, such as batch=8, got {text!r}")
    return name, _at_least(1)(size)


def _order(text: str) -> tuple[str, ...]:
    order = tuple(text.split(","))
    if sorted(order) != ["dp", "pp", "tp"]:
        raise argparse.ArgumentTypeError(f"expected tp, dp and pp in some order, such as tp,dp,pp, got {text!r}")
    return order
