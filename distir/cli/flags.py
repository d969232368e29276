"""The flags of all commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, NoReturn

from distir import __version__
from distir.cli import planning_flags
from distir.ir.errors import UsageError
from distir.runtime.options import BACKENDS
from distir.transforms.plan import InputSplit, Plan, default_of

_EXIT_CODES = (
    "exit codes: 0 success, 1 internal error, 2 bad flags or files, 3 bad model, 4 plan is infeasible (in run,\n\
also: does not fit in memory), 5 results differ or are not finite, 6 a rank failed or timed out"
)
_TABLE = """A schedule table has a line per pipeline rank, in text or CSV. A cell is stage, F or B (forward or backward
pass), microbatch, such as 0F3; idle cells are empty in CSV, dots in text. Only the order of cells in a line matters,
not their columns: each runs as soon as it can. A stage runs on the rank whose line has its cells.
"""
_SCHEDULE = "NAME|FILE.csv"
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
        raise UsageError(message, f"{self.prog} --help lists the flags")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `command` of the result is the function to call. Raises UsageError for bad flags."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:  # argparse would refer to the top-level --help, which does not list a command's flags
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", f"{args.prog} --help lists the flags")
    if args.traceback:
        os.environ["DISTIR_TRACEBACK"] = "1"
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="distir",
        description="Compile, predict and run distributed deep learning.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"distir {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
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
    _command(commands, "clusters", "list the shipped clusters", "clusters", "bytes, FLOP/s, bytes/s")
    _bench(commands)
    _calibrate(commands)
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
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an internal error")
    return parser


def _run(commands: Any) -> None:
    parser = _command(commands, "run", "run a distributed model, and compare its time with the prediction", "run")
    _model_flags(parser)
    _plan_flags(parser)
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--epochs", type=_at_least(1), metavar="N", help="number of passes over the data, shuffled in each"
    )
    _data_flags(group, "5, with --epochs all of --data")
    _running_flags(group)
    group.add_argument(
        "--compile",
        dest="compiled",
        action="store_true",
        help="compile the ranks' computation with torch.compile, during the first step",
    )
    group.add_argument("--check", action="store_true", help="compare with the sequential program on the same data")
    group.add_argument(
        "--profile", metavar="DIR", help="write the predicted trace and one of each rank (see `distir compare`)"
    )
    group.add_argument(
        "--checkpoint", metavar="DIR", help="write checkpoints here, after the last step; the newest two are kept"
    )
    group.add_argument("--every", type=_at_least(1), metavar="N", help="also write a checkpoint every N steps")
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
    group.add_argument("--emulate", choices=("sleep", "spin", "none"), help="what stands for compute; default: sleep")
    group.add_argument("--scale", type=_number, metavar="X", help="factor of the times of compute; default: 1")
    group.add_argument(
        "--times",
        metavar="FILE.toml|DIR",
        help="microseconds of functions, such as fwd0 = 1200, or of layers; or the directory of an earlier --profile",
    )
    group.add_argument("--iterations", type=_at_least(1), metavar="N", help="iterations that are timed; default: 128")


def _compare(commands: Any) -> None:
    text = "compare the predicted and measured times of `run --profile` by op, stage and function, largest error first"
    parser = _command(commands, "compare", text, "compare", "seconds of a step on a rank")
    parser.add_argument("profile", metavar="DIR", help="the directory given to --profile")


def _simulate(commands: Any) -> None:
    parser = _command(commands, "simulate", "predict time and memory of a distributed model on a cluster", "simulate")
    _model_flags(parser)
    _plan_flags(parser)
    _cluster_flags(parser)
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
        help="read them from arguments of Megatron-LM, or the script that starts it; other flags override them",
    )
    group.add_argument(
        "--gpus", type=_at_least(1), metavar="N", help="the number of devices, where such a file does not say it"
    )
    group.add_argument(
        "--emit",
        nargs=2,
        action="append",
        default=[],
        metavar=("TOOL", "FILE"),
        help="write the plan for distir, torchtitan or megatron; may be given several times",
    )


def _explain(commands: Any) -> None:
    text = "say where the time of a predicted step goes, by stage: compute, communication by axis, bubbles by cause"
    parser = _command(commands, "explain", text, "explaining.explain", "seconds")
    parser.epilog = f"{_PARTS}\n{_EXIT_CODES}"
    _model_flags(parser)
    _plan_flags(parser)
    _cluster_flags(parser)
    parser.add_argument(
        "--what-if",
        type=_factors,
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
    _model_flags(parser)
    parser.add_argument("before", metavar="BEFORE.toml", help="a plan, as --save-plan writes it")
    parser.add_argument("after", metavar="AFTER.toml", help="another plan")
    _cluster_flags(parser)


def _cluster_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster")
    group.add_argument("--cluster", required=True, metavar="NAME|FILE.toml", help="`distir clusters` lists names")
    group.add_argument(
        "--nodes", type=_at_least(1), metavar="N", help="number of nodes; default: as many as the plan needs"
    )
    group.add_argument(
        "--runtime",
        metavar="NAME",
        help="the software whose host issues the ops: distir, distir-compiled, distir-2021, torch-eager, "
        "torch-compiled or megatron; "
        "default: none, issuing takes no time",
    )


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
    _model_flags(parser)
    _plan_flags(parser)
    parser.add_argument(
        "--after", metavar="PASS", help="print the program after this pass (see `distir passes`); default: the last one"
    )
    parser.add_argument("--rank", type=_at_least(0), metavar="N", help="print this rank's program")
    parser.add_argument(
        "--messages", action="store_true", help="list what each rank sends in a step: elements, bytes, and how often"
    )
    parser.add_argument("--python", action="store_true", help="print the generated Python of a rank, by default rank 0")


def _export(commands: Any) -> None:
    text = "write what all ranks do for simulators of networks: Chakra traces, or a GOAL schedule of LogGOPSim"
    parser = _command(commands, "export", text, "exporting_command.export", "ranks, steps, bytes and files")
    _model_flags(parser)
    _plan_flags(parser)
    group = parser.add_argument_group("the export")
    group.add_argument(
        "--format",
        required=True,
        choices=("chakra", "goal"),
        help="chakra: PREFIX.RANK.et of each rank, and PREFIX.groups.json; goal: PREFIX.goal",
    )
    group.add_argument("-o", "--output", required=True, metavar="PREFIX", help="the files' names begin with this")
    group.add_argument(
        "--cluster", required=True, metavar="NAME|FILE.toml", help="of the times; `distir clusters` lists names"
    )
    group.add_argument(
        "--nodes", type=_at_least(1), metavar="N", help="number of nodes; default: as many as the plan needs"
    )


def _schedule(commands: Any) -> None:
    text = "check a pipeline schedule and print it as a grid: a row per pipeline rank, a column per time step"
    parser = _command(
        commands, "schedule", text, "programs.schedule", "the table, its steps, and the idle steps of a rank"
    )
    parser.epilog = f"{_TABLE}\n{parser.epilog}"
    parser.add_argument("schedule", metavar=_SCHEDULE, help=f"{_NAMES}, or the file of a table")
    one = _at_least(1)
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
    text = "measure latency and bandwidth of collectives, on processes of this host, or of torchrun or mpirun"
    parser = _command(kinds, "collectives", text, "bench_collectives")
    parser.add_argument("--backend", choices=BACKENDS[:-1], default="gloo", help="default: gloo")
    parser.add_argument("--nproc", type=_at_least(2), default=2, metavar="N", help="processes; default: 2")
    parser.add_argument(
        "--collective", action="append", metavar="NAME", help="collective to measure, repeatable; default: all"
    )
    parser.add_argument(
        "--size", type=_at_least(1), action="append", metavar="BYTES", help="size to measure, repeatable"
    )
    parser.add_argument("--dtype", default="float32", metavar="TYPE", help="element type; default: float32")
    parser.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="S", help="seconds without progress; default: 600"
    )
    _scaling(kinds)


def _calibrate(commands: Any) -> None:
    text = "measure this machine, and write a cluster file with which runs on it are predicted"
    parser = _command(commands, "calibrate", text, "calibrating.calibrate", "figures and residuals")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--out", metavar="FILE.toml", help="write the cluster there; default: only print its figures")


def _opt(commands: Any) -> None:
    text = "read a program, run passes on it, verify and print the result"
    parser = _command(commands, "opt", text, "programs.opt", "the passes, and the program as text")
    _model_flags(parser)
    _plan_flags(parser)
    group = parser.add_argument_group("the passes")
    group.add_argument("--passes", required=True, metavar="A,B,...", help="names of `distir passes`, in any order")
    group.add_argument("-o", "--output", metavar="FILE.distir", help="write the program there instead of printing it")


def _data_flags(group: Any, steps: str) -> None:
    group.add_argument(
        "--steps",
        type=_at_least(1),
        metavar="N",
        help=f"number of steps, with epochs at most so many per epoch; default: {steps}",
    )
    group.add_argument(
        "--data",
        metavar="FILE",
        help="a text; or FILE.npz with an array for each input, by name, and labels (cross-entropy) or target (mse); "
        "default: random",
    )
    group.add_argument(
        "--seed", type=_at_least(0), metavar="N", help="seed of random data, weights, dropout and shuffling; default: 0"
    )
    group.add_argument(
        "--val-fraction", type=_share, dest="held_out", metavar="X", help="share of --data for validation; default: 0.1"
    )
    group.add_argument(
        "--tokenizer",
        metavar="FILE.json",
        help="BPE of a text: read if it exists, else trained on the text and written",
    )


def _running_flags(group: Any) -> None:
    group.add_argument(
        "--metrics", metavar="FILE.json", help="write times, rates and losses to this file after each epoch"
    )
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="gloo: a CPU process per rank; mpi: those that mpirun has started; nccl: a GPU per rank; numpy: all ranks "
        "in this process; default: gloo, on cuda nccl",
    )
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: the backend's; with gloo on cuda ranks share GPUs, for tests",
    )
    group.add_argument("--timeout", type=_positive, metavar="S", help="seconds without progress; default: 600")
    group.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="continue if the loss or weights are not finite; checkpoints with such values are not written",
    )
    group.add_argument(
        "--cluster",
        metavar="NAME|FILE.toml",
        help="cluster of the prediction; default: cpu-2core with this host's cores",
    )


def _scaling(kinds: Any) -> None:
    text = "weak scaling: train data-parallel on more and more ranks, with the same batch per rank"
    parser = _command(kinds, "scaling", text, "scaling_commands.scaling", "the metrics of each run, and its efficiency")
    parser.description = f"{text[0].upper()}{text[1:]}: --dim gives the batch of one rank."
    _model_flags(parser)
    group = parser.add_argument_group("the runs")
    group.add_argument(
        "--ranks", type=_numbers, default=[1, 2], metavar="N,N,...", help="numbers of ranks; default: 1,2"
    )
    group.add_argument("--epochs", type=_at_least(1), default=3, metavar="N", help="epochs of each run; default: 3")
    _data_flags(group, "10, of --data all")
    _running_flags(group)


def _plot(commands: Any) -> None:
    text = "plot predicted and measured training time and rate, of runs with --metrics or of bench scaling"
    parser = _command(commands, "plot", text, "scaling_commands.plot", "the files")
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files written by --metrics")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.pdf", help="the figure: .pdf, .png or .svg")


def _model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL.onnx",
        help="ONNX of opset 13 or later, weights in it or beside it; a Hugging Face config.json, or its folder; "
        "FILE.distir, a program as text; or a model by its name and sizes: gpt:layers=12,hidden=768,heads=12, "
        "llama:..., gpt2-large, gpt3-175b, gpt3-moe, dlrm or cosmoflow; or a proxy, which is distributed already: "
        "proxy-dlrm, proxy-cosmoflow, proxy-gpt2-large, ...",
    )
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--dim",
        type=_size,
        action="append",
        default=[],
        metavar="NAME=N",
        help="size of a symbolic dimension; of a config, or a model by its name: batch, seq or another of its sizes",
    )
    group.add_argument("--batch-dim", metavar="NAME", help="the symbolic dimension of the batch; default: the first")
    group.add_argument(
        "--loss",
        metavar="LOSS",
        help="train with cross-entropy, mse or the output of that name; none: forward only; default: none, but for "
        "gpt2-large, gpt3-175b, gpt3-moe, dlrm and cosmoflow, which have their own, and a config's model: "
        "cross-entropy",
    )
    group.add_argument("--optimizer", choices=("sgd", "adamw"), help="default: sgd")
    group.add_argument("--lr", type=_positive, metavar="X", help="learning rate; default: 0.001")
    group.add_argument("--momentum", type=_number, metavar="X", help="momentum of sgd; default: 0")
    group.add_argument("--weight-decay", type=_number, metavar="X", help="default: 0, adamw 0.01")
    group.add_argument(
        "--clip-norm", type=_positive, metavar="X", help="limit the norm of all gradients together; default: no limit"
    )
    group.add_argument(
        "--decay-vectors",
        action=argparse.BooleanOptionalAction,
        help="whether weights of fewer than two dims, as of norms and biases, decay; default: they do",
    )
    group.add_argument(
        "--warmup",
        type=_at_least(0),
        metavar="N",
        help="steps in which the learning rate rises from 0, default: none; of a proxy, iterations before those that "
        "are timed, default: 8",
    )
    group.add_argument(
        "--lr-decay", choices=("linear", "cosine"), help="how the learning rate falls after that; default: it does not"
    )
    group.add_argument("--decay-steps", type=_at_least(1), metavar="N", help="the step at which it has fallen")
    group.add_argument("--min-lr", type=_number, metavar="X", help="the learning rate from then on; default: 0")
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="of products; weights and statistics stay float32 (mixed precision); default: fp32",
    )
    group.add_argument(
        "--grad-dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of gradients while they are accumulated and reduced: fp32, or as --precision; default: fp32",
    )
    group.add_argument("--dtype", metavar="TYPE", help="float32, float64, bfloat16 or float16; default: the model's")


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of a plan."""
    group = parser.add_argument_group("the plan")
    group.add_argument("--plan", metavar="FILE.toml", help="read the plan from a file; other flags override it")
    group.add_argument("--save-plan", metavar="FILE.toml", help="write the plan to a file")
    for f in fields(Plan):
        flag, text = f"--{f.name.replace('_', '-')}", f.metadata["help"]
        if isinstance(f.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        kind = f.metadata.get("kind", type(f.default).__name__)
        parse, metavar = _KINDS[kind]
        if kind == "split":
            group.add_argument(flag, type=parse, action="append", metavar=metavar, help=text)
            continue
        choices = f.metadata.get("choices")
        usual = default_of(f)
        default = ",".join(usual) if isinstance(usual, tuple) else f"{usual:g}" if kind == "float" else usual
        group.add_argument(
            flag,
            type=parse if choices is None else type(f.default),
            choices=choices,
            metavar=None if choices else metavar,
            help=f"{text}; default: {default}" if default != "" else text,
        )


def _factors(text: str) -> dict[str, float]:
    """Factors of figures, such as "link=2x,latency=0"."""
    found: dict[str, float] = {}
    for item in text.split(","):
        name, _, factor = (x.strip() for x in item.partition("="))
        try:
            value = float(factor.removesuffix("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected FIGURE=FACTOR, such as link=2x, got {item!r}") from None
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        found[name] = value
    return found


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


def _number(text: str, above: bool = False) -> float:
    """A finite number of at least 0, or above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not 0 <= value < float("inf") or (above and value == 0):
        raise argparse.ArgumentTypeError(f"expected a number {'above' if above else 'of at least'} 0, got {text}")
    return value


def _size_or_inf(text: str) -> float:
    return float("inf") if text == "inf" else _number(text)


def _share(text: str) -> float:
    value = _number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a share below 1, got {text}")
    return value


def _positive(text: str) -> float:
    return _number(text, above=True)


def _numbers(text: str) -> list[int]:
    return [_at_least(1)(x) for x in text.split(",")]


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME=N, such as batch=8, got {text!r}")
    return name, _at_least(1)(size)


def _order(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _input_split(text: str) -> InputSplit:
    try:
        return InputSplit.parse(text)
    except UsageError as e:
        raise argparse.ArgumentTypeError(e.message.partition(": ")[2]) from None


_KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (_at_least(1), "N"),
    "float": (_size_or_inf, "X"),
    "str": (str, "NAME"),
    "schedule": (str, _SCHEDULE),
    "tuple": (_order, "A,B,C"),
    "names": (_order, "W,W,..."),
    "split": (_input_split, "AXIS=N:INPUT.DIM,..."),
}
"""By the type of a field's default: the function that parses its flag, and the flag's metavar."""
