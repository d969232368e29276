"""The flags of all commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from distir import __version__
from distir.cli import planning_flags
from distir.cli.flag_groups import (
    cluster_flags,
    cluster_size_flags,
    data_flags,
    emit_flag,
    model_flags,
    plan_flags,
    running_flags,
    source_flags,
)
from distir.cli.flag_values import SCHEDULE, at_least, factors, finite_number, numbers, positive
from distir.hardware import known_clusters
from distir.ir.errors import UsageError, did_you_mean
from distir.ir.pause import no_collection
from distir.runtime.options import BACKENDS

_EXIT_CODES = (
    "exit codes: 0 success, 1 internal error, 2 bad flags or files, 3 bad model, 4 plan is infeasible (in run,\n\
also: does not fit in memory), 5 results differ or are not finite, 6 a rank failed or timed out"
)
_TABLE = """A schedule table has a line per pipeline rank, in text or CSV. A cell is stage, F or B (forward or backward
pass), microbatch, such as 0F3; idle cells are empty in CSV, dots in text. Only the order of cells in a line matters,
not their columns: each runs as soon as it can. A stage runs on the rank whose line has its cells.
"""
_NAMES = "1f1b, gpipe, interleaved or distir2021"
_SCORES = """The error of a row is predicted / measured - 1, of seconds of a step.
  MAE, p50, p90, worst  mean, median, 90th percentile and largest of the errors' magnitudes
  bias                  mean error: above 0 predictions are slow
  Spearman              rank correlation of predicted and measured within each model (equal layers, hidden, heads, seq,
                        vocab) of at least 3 rows, weighted by rows
  regret                among rows of one model, number of GPUs and batch (at least 2): measured time of the one
                        predicted quickest, over the best measured, minus 1; the mean
  memory error          mean of |predicted / measured - 1| of peaks of memory, where measured
"""
_UTILIZATION = """Model FLOPs utilization is the share of the devices' peak FLOP/s that the products, convolutions and
attention of the model use in a step; what a plan repeats does not count. Communication is exposed
while its device does not compute.
"""
_PARTS = """The parts of a stage add up to the step:
  ideal compute   products and attention at the device's peak, without what is recomputed
  below peak      what they take longer, and all other compute of the forward and backward passes
  recomputation   compute that the backward pass repeats
  optimizer       compute of the update
  dp, tp, pp ...  communication along an axis while the device does not compute
  warm-up         idle while the pipeline fills or drains
  imbalance       idle because another stage has more work
  dependency      idle otherwise: it waits for another stage, or for the host
"""
_EXAMPLES = """examples:
  distir run gpt2.onnx --dim batch=8 --loss cross-entropy --dp 2 --pp 2 --microbatches 4 --check
  distir simulate gpt2.onnx --dim batch=512 --loss cross-entropy --dp 8 --tp 4 --cluster dgx-a100
"""


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of exiting, and does not accept abbreviated flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        if "required" in message and "--cluster" in message:
            raise UsageError(message, f"known are {', '.join(known_clusters())}; or a .toml file")
        raise UsageError(message, f"{self.prog} --help lists the flags")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `command` of the result is the function to call. Raises UsageError for bad flags."""
    parser = _parser()
    try:
        args, unknown = parser.parse_known_args(argv)
    except UsageError:  # of what is missing, or of a command that there is not
        _check_spelling(parser, argv)
        raise
    if unknown:  # argparse would refer to the top-level --help, which does not list a command's flags
        _check_spelling(parser, argv)
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", f"{args.prog} --help lists the flags")
    if args.traceback:
        os.environ["DISTIR_TRACEBACK"] = "1"
    return args


def _check_spelling(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Raises UsageError for a command, or flags of one, that there are not, with those that are most like them."""
    words = list(argv)
    while commands := _commands(parser):
        while words and words[0].startswith("-"):
            del words[0]
        if not words:
            return
        name = words.pop(0)
        if name not in commands:
            hint = did_you_mean(name, commands, f"there are {', '.join(commands)}")
            raise UsageError(f"{parser.prog} has no command {name!r}", hint)
        parser = commands[name]
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    known = [flag for action in parser._actions for flag in action.option_strings]  # argparse has no other list
    if unknown := [flag for flag in flags if flag not in known]:
        hint = did_you_mean(unknown[0], known, f"{parser.prog} --help lists the flags")
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", hint)


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by their names; none if it has no commands."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0] if found else {}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="distir",
        description="Compile, predict and run distributed deep learning.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"distir {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _inspect(commands)
    _run(commands)
    _compare(commands)
    _simulate(commands)
    _explain(commands)
    _diff(commands)
    planning_flags.add(_command(commands, "plan", planning_flags.TEXT, "planning_command.plan", planning_flags.JSON))
    _accuracy(commands)
    _show(commands)
    _export(commands)
    text = "list the compiler passes in order"
    _command(commands, "passes", text, "programs.passes", "names, and the form each takes and gives")
    _opt(commands)
    _schedule(commands)
    text = "list the shipped clusters, or print one with the sources of its figures"
    listed = _command(commands, "clusters", text, "clusters", "bytes, FLOP/s, bytes/s; of a NAME its files")
    listed.add_argument("name", nargs="?", metavar="NAME", help="a shipped cluster, device, node or network")
    _bench(commands)
    _calibrate(commands)
    _plot(commands)
    return parser


def _command(
    commands: Any, name: str, text: str, function: str, json: str = "seconds, bytes"
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EXIT_CODES)

    def command(args: argparse.Namespace) -> int | None:
        """Runs the command; returns its exit code, if it gives one."""
        module, _, found = function.rpartition(".")
        with no_collection():
            loaded = import_module(f"distir.cli.{module or 'commands'}")
        return getattr(loaded, found)(args)

    parser.set_defaults(command=command, prog=parser.prog)
    parser.add_argument("--json", action="store_true", help=f"print JSON: {json}")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an internal error")
    return parser


def _inspect(commands: Any) -> None:
    text = "list a model's inputs, outputs, weights, work and losses, and all ops that are not supported"
    parser = _command(commands, "inspect", text, "inspecting.inspect", "FLOPs and bytes of a sample")
    source_flags(parser)


def _run(commands: Any) -> None:
    parser = _command(commands, "run", "run a distributed model, and compare its time with the prediction", "run")
    model_flags(parser)
    plan_flags(parser)
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--epochs", type=at_least(1), metavar="N", help="number of passes over the data, which is shuffled before each"
    )
    data_flags(group, "5, with --epochs all of --data")
    running_flags(group)
    group.add_argument(
        "--compile",
        dest="compiled",
        action="store_true",
        help="compile the ranks' computation with torch.compile, during the first step",
    )
    group.add_argument(
        "--check", action="store_true", help="compare the results with those of the sequential program on the same data"
    )
    group.add_argument(
        "--profile", metavar="DIR", help="write the predicted trace and one of each rank (see `distir compare`)"
    )
    group.add_argument(
        "--checkpoint", metavar="DIR", help="write checkpoints here, after the last step; the newest two are kept"
    )
    group.add_argument("--every", type=at_least(1), metavar="N", help="also write a checkpoint every N steps")
    group.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest undamaged checkpoint, up to that many steps or epochs in total",
    )
    group.add_argument("--save", metavar="FILE.onnx", help="write the model with the trained weights")
    group = parser.add_argument_group("a proxy")
    group.add_argument(
        "--proxy", action="store_true", help="communicate as the program does, but sleep where it computes"
    )
    group.add_argument(
        "--emulate", choices=("sleep", "spin", "none"), help="what a rank does in place of computing; default: sleep"
    )
    group.add_argument(
        "--scale", type=finite_number, metavar="X", help="multiply the times of compute by this; default: 1"
    )
    group.add_argument(
        "--times",
        metavar="FILE.toml|DIR",
        help="microseconds of functions, such as fwd0 = 1200, or of layers; or the directory of an earlier --profile",
    )
    group.add_argument("--iterations", type=at_least(1), metavar="N", help="iterations that are timed; default: 128")


def _compare(commands: Any) -> None:
    text = "compare the predicted and measured times of `run --profile` by op, stage and function, largest error first"
    parser = _command(commands, "compare", text, "compare", "seconds of a step on a rank")
    parser.add_argument("profile", metavar="DIR", help="the directory given to --profile")


def _simulate(commands: Any) -> None:
    parser = _command(commands, "simulate", "predict time and memory of a distributed model on a cluster", "simulate")
    parser.epilog = f"{_UTILIZATION}\n{_EXIT_CODES}"
    model_flags(parser)
    plan_flags(parser)
    cluster_flags(parser)
    parser.add_argument("--trace", metavar="FILE.json", help="write a trace that Perfetto opens")
    group = parser.add_argument_group("plans of other tools")
    group.add_argument(
        "--torchtitan",
        metavar="FILE.toml",
        help="read the plan, batch and precision from a file of torchtitan; other flags override it",
    )
    group.add_argument(
        "--megatron-args",
        metavar="FILE",
        help="read them from arguments of Megatron-LM, or from the script that starts it; other flags override them",
    )
    group.add_argument(
        "--gpus", type=at_least(1), metavar="N", help="the number of devices, for files that leave it open"
    )
    emit_flag(group, "the plan")


def _explain(commands: Any) -> None:
    text = "say where the time of a predicted step goes, by stage: compute, communication by axis, bubbles by cause"
    parser = _command(commands, "explain", text, "explaining.explain", "seconds")
    parser.epilog = f"{_PARTS}\n{_EXIT_CODES}"
    model_flags(parser)
    plan_flags(parser)
    cluster_flags(parser)
    parser.add_argument(
        "--what-if",
        type=factors,
        default={},
        metavar="FIGURE=2x,...",
        help="also predict the program on a cluster with this figure multiplied, for each one: compute, "
        "memory_bandwidth, link (in a node), network (between nodes), and the times latency, launch, host",
    )
    parser.add_argument("--plot", metavar="FILE.pdf", help="draw the parts of each stage: .pdf, .png or .svg")


def _diff(commands: Any) -> None:
    text = "say how the predicted steps of two plans of a model differ, by part of the step"
    parser = _command(commands, "diff", text, "explaining.diff", "seconds")
    parser.epilog = f"{_PARTS}\n{_EXIT_CODES}"
    model_flags(parser)
    parser.add_argument("before", metavar="BEFORE.toml", help="a plan, as --save-plan writes it")
    parser.add_argument("after", metavar="AFTER.toml", help="another plan")
    cluster_flags(parser)


def _accuracy(commands: Any) -> None:
    text = "predict measured training runs, and score the predictions of each source"
    parser = _command(commands, "accuracy", text, "scoreboard.accuracy", "errors as shares, seconds, GiB")
    parser.epilog = f"{_SCORES}\n{parser.epilog}"
    parser.add_argument("file", metavar="FILE.csv", help="the runs: docs/accuracy.md describes the columns")
    parser.add_argument(
        "--source", action="append", default=[], metavar="NAME", help="only rows of this source, repeatable"
    )
    parser.add_argument("--rows", action="store_true", help="also list each row, measured and predicted")
    parser.add_argument("--plot", metavar="FILE.pdf", help="draw predicted against measured: .pdf, .png or .svg")


def _show(commands: Any) -> None:
    parser = _command(
        commands, "show", "print a model's program", "programs.show", "the stage, and the program as text"
    )
    model_flags(parser)
    plan_flags(parser)
    parser.add_argument(
        "--after", metavar="PASS", help="print the program after this pass (see `distir passes`); default: the last one"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="print all of it, as text that distir reads; default: a summary, then the program without the rest of "
        "lists of more than 8 values",
    )
    parser.add_argument("--rank", type=at_least(0), metavar="N", help="print this rank's program")
    parser.add_argument(
        "--messages", action="store_true", help="list what each rank sends in a step: elements, bytes, and how often"
    )
    parser.add_argument("--python", action="store_true", help="print the generated Python of a rank, by default rank 0")


def _export(commands: Any) -> None:
    text = "write the ops of all ranks for network simulators: Chakra traces, or a GOAL schedule for LogGOPSim"
    parser = _command(commands, "export", text, "exporting_command.export", "ranks, steps, bytes and files")
    model_flags(parser)
    plan_flags(parser)
    group = parser.add_argument_group("the export")
    group.add_argument(
        "--format",
        required=True,
        choices=("chakra", "goal"),
        help="chakra: PREFIX.RANK.et of each rank, and PREFIX.groups.json; goal: PREFIX.goal",
    )
    group.add_argument("-o", "--output", required=True, metavar="PREFIX", help="the files' names begin with this")
    cluster_size_flags(group, "the cluster whose times are written; `distir clusters` lists names")


def _schedule(commands: Any) -> None:
    text = "check a pipeline schedule and print it as a grid: a row per pipeline rank, a column per time step"
    parser = _command(
        commands, "schedule", text, "programs.schedule", "the table, its steps, and the idle steps of a rank"
    )
    parser.epilog = f"{_TABLE}\n{parser.epilog}"
    parser.add_argument("schedule", metavar=SCHEDULE, help=f"{_NAMES}, or the file of a table")
    one = at_least(1)
    parser.add_argument("--pp", type=one, metavar="N", help="pipeline ranks; default: as in the file, else 1")
    parser.add_argument("--microbatches", type=one, metavar="N", help="default: as in the file, else 1")
    parser.add_argument(
        "--chunks", type=one, metavar="N", help="stages per pipeline rank; default: as in the file, else 1"
    )
    parser.add_argument("--limit", type=one, metavar="N", help="maximum number of microbatches in flight on a rank")
    parser.add_argument("--csv", action="store_true", help="print CSV in the format of torch.distributed.pipelining")


def _bench(commands: Any) -> None:
    text = "run a benchmark on this machine"
    parser = commands.add_parser("bench", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EXIT_CODES)
    kinds = parser.add_subparsers(metavar="WHAT", required=True, parser_class=_Parser)
    text = "measure collectives, on GPUs also copies: latency and bandwidth among processes here, of torchrun or mpirun"
    parser = _command(kinds, "collectives", text, "bench_collectives")
    parser.add_argument("--backend", choices=BACKENDS[:-1], default="gloo", help="default: gloo")
    parser.add_argument(
        "--nproc",
        type=at_least(1),
        metavar="N",
        help="processes; default: 2, with --backend nccl one per GPU, of which one is enough",
    )
    parser.add_argument(
        "--collective",
        action="append",
        metavar="NAME",
        help="collective to measure, repeatable, or with --backend nccl a copy: host-to-device, device-to-host or "
        "device-to-device; default: all",
    )
    parser.add_argument(
        "--size", type=at_least(1), action="append", metavar="BYTES", help="size to measure, repeatable"
    )
    parser.add_argument("--dtype", default="float32", metavar="TYPE", help="element type; default: float32")
    parser.add_argument(
        "--out",
        metavar="FILE.toml",
        help="with --backend mpi: write a cluster file of the collectives that programs use, which --cluster takes",
    )
    parser.add_argument(
        "--pause",
        type=at_least(0),
        default=1000,
        metavar="US",
        help="with --out: sleep before each call, as long as a step computes between them; default: 1000",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="S",
        help="end after so many seconds without progress; default: 600",
    )
    _scaling(kinds)


def _calibrate(commands: Any) -> None:
    text = "measure this machine, and write a cluster file for predictions of runs on it"
    parser = _command(commands, "calibrate", text, "calibrating.calibrate", "figures and residuals")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--out", metavar="FILE.toml", help="write the cluster there; default: only print its figures")


def _opt(commands: Any) -> None:
    text = "read a program, run passes on it, verify and print the result"
    parser = _command(commands, "opt", text, "programs.opt", "the passes, and the program as text")
    model_flags(parser)
    plan_flags(parser)
    group = parser.add_argument_group("the passes")
    group.add_argument("--passes", required=True, metavar="A,B,...", help="names of `distir passes`, in any order")
    group.add_argument("-o", "--output", metavar="FILE.distir", help="write the program there instead of printing it")


def _scaling(kinds: Any) -> None:
    text = "weak scaling: train data-parallel on more and more ranks, with the same batch per rank"
    parser = _command(kinds, "scaling", text, "scaling_commands.scaling", "the metrics of each run, and its efficiency")
    parser.description = f"{text[0].upper()}{text[1:]}: --dim gives the batch of one rank."
    model_flags(parser)
    group = parser.add_argument_group("the runs")
    group.add_argument(
        "--ranks", type=numbers, default=[1, 2], metavar="N,N,...", help="numbers of ranks; default: 1,2"
    )
    group.add_argument("--epochs", type=at_least(1), default=3, metavar="N", help="epochs of each run; default: 3")
    data_flags(group, "10, of --data all")
    running_flags(group)


def _plot(commands: Any) -> None:
    text = "plot predicted and measured training time and rate, of runs with --metrics or of bench scaling"
    parser = _command(commands, "plot", text, "scaling_commands.plot", "the files")
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files written by --metrics")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.pdf", help="the figure: .pdf, .png or .svg")
