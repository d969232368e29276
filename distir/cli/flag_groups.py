"""Groups of flags that several commands have: the model, the plan, the cluster, the data, the run."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from distir.cli.flag_values import KINDS, at_least, finite_number, named_size, positive, share_below_one
from distir.hardware import known_runtimes
from distir.models.named import model_names
from distir.runtime.options import BACKENDS
from distir.transforms.plan import Plan, default_of


def emit_flag(group: Any, what: str) -> None:
    group.add_argument(
        "--emit",
        nargs=2,
        action="append",
        default=[],
        metavar=("TOOL", "FILE"),
        help=f"write {what} for distir, torchtitan or megatron; may be given several times",
    )


def source_flags(parser: argparse.ArgumentParser) -> Any:
    """The model, its sizes and its loss; returns the group of flags."""
    parser.add_argument(
        "model",
        metavar="MODEL.onnx",
        help="an ONNX file; a Hugging Face config.json, or its folder; FILE.distir, a program as text; or a model by "
        "its name and sizes, such as gpt:layers=12,hidden=768,heads=12. "
        f"Names: {', '.join(model_names())}",
    )
    group = parser.add_argument_group("the model")
    size_flags(group)
    group.add_argument(
        "--loss",
        metavar="LOSS",
        help="train: cross-entropy, mse, or the name of an output that is the loss; none: forward pass only. default: "
        "none for ONNX files; cross-entropy for a config.json; models that are given by name may have their own",
    )
    return group


def size_flags(group: Any) -> None:
    """The sizes of a model."""
    group.add_argument(
        "--batch", type=at_least(1), metavar="SAMPLES", help="samples of a step, on all devices together"
    )
    group.add_argument("--seq", type=at_least(1), metavar="N", help="length of the sequences; default: the model's")
    group.add_argument(
        "--dim",
        type=named_size,
        action="append",
        default=[],
        metavar="NAME=N",
        help="size of a symbolic dimension of an ONNX file; for other models batch, seq or another of their sizes "
        "(`distir inspect MODEL` lists them)",
    )
    group.add_argument("--batch-dim", metavar="NAME", help="the symbolic dimension of the batch; default: the first")


def model_flags(parser: argparse.ArgumentParser) -> None:
    group = source_flags(parser)
    group.add_argument("--optimizer", choices=("sgd", "adamw"), help="default: sgd")
    group.add_argument("--lr", type=positive, metavar="X", help="learning rate; default: 0.001")
    group.add_argument("--momentum", type=finite_number, metavar="X", help="momentum of sgd; default: 0")
    group.add_argument("--weight-decay", type=finite_number, metavar="X", help="default: 0, adamw 0.01")
    group.add_argument(
        "--clip-norm",
        type=positive,
        metavar="X",
        help="clip gradients to this global norm; default: they are not clipped",
    )
    group.add_argument(
        "--decay-vectors",
        action=argparse.BooleanOptionalAction,
        help="whether weight decay also applies to weights of one dim, such as biases and those of norms; default: "
        "it does",
    )
    group.add_argument(
        "--warmup",
        type=at_least(0),
        metavar="N",
        help="steps during which the learning rate rises from 0, default: none; with --proxy: iterations before those "
        "that are timed, default: 8",
    )
    group.add_argument(
        "--lr-decay",
        choices=("linear", "cosine"),
        help="how the learning rate falls after the warm-up; default: it stays constant",
    )
    group.add_argument(
        "--decay-steps", type=at_least(1), metavar="N", help="the step at which the decay of the learning rate ends"
    )
    group.add_argument(
        "--min-lr", type=finite_number, metavar="X", help="the learning rate after the decay; default: 0"
    )
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="mixed precision: the type of matrix products; weights and statistics stay float32; default: fp32",
    )
    group.add_argument(
        "--grad-dtype",
        choices=("fp32", "bf16", "fp16"),
        help="the type in which gradients are accumulated and reduced: fp32, or that of --precision; default: fp32",
    )
    group.add_argument(
        "--dtype",
        metavar="TYPE",
        help="the type of the whole program: float32, float64, bfloat16 or float16; default: the model's",
    )


def plan_flags(parser: argparse.ArgumentParser) -> None:
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
        parse, metavar = KINDS[kind]
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
    group.add_argument(
        "--local-batchnorm",
        action="store_true",
        help="batch norms in training mode take statistics of each replica's part of a microbatch, not of the batch: "
        "the model is then another one",
    )


def cluster_size_flags(group: Any, what: str) -> None:
    group.add_argument("--cluster", required=True, metavar="NAME|FILE.toml", help=what)
    group.add_argument(
        "--nodes", type=at_least(1), metavar="N", help="number of nodes; default: as many as the plan needs"
    )


def runtime_flag(group: Any) -> None:
    group.add_argument(
        "--runtime",
        metavar="NAME",
        help=f"the software that launches the ops, which takes host time: {', '.join(known_runtimes())}; with +fp8 "
        "behind it products of weights are in 8 bits, with +flash2 fused attention is FlashAttention-2, with +sync no "
        "collective of activations runs beside compute; default: none, launching takes no time",
    )


def cluster_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster")
    cluster_size_flags(group, "the cluster to predict on: a name of `distir clusters`, or a file")
    runtime_flag(group)


def data_flags(group: Any, steps: str) -> None:
    group.add_argument(
        "--steps",
        type=at_least(1),
        metavar="N",
        help=f"number of steps; of a run in epochs at most so many per epoch; default: {steps}",
    )
    group.add_argument(
        "--data",
        metavar="FILE",
        help="training data: a text file; or FILE.npz with an array for each input, by name, and labels "
        "(cross-entropy) or target (mse); default: random",
    )
    group.add_argument(
        "--seed", type=at_least(0), metavar="N", help="seed of random data, weights, dropout and shuffling; default: 0"
    )
    group.add_argument(
        "--val-fraction",
        type=share_below_one,
        dest="held_out",
        metavar="X",
        help="share of --data that is kept for validation; default: 0.1",
    )
    group.add_argument(
        "--tokenizer",
        metavar="FILE.json",
        help="tokenizer (BPE) of a text file: read if it exists, else trained on the text and written there",
    )


def running_flags(group: Any) -> None:
    group.add_argument(
        "--metrics", metavar="FILE.json", help="write times, rates and losses to this file after each epoch"
    )
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="gloo: a CPU process per rank; mpi: the processes that mpirun has started; nccl: a GPU per rank; numpy: "
        "all ranks in this process; default: gloo, on cuda nccl",
    )
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where ranks compute; default: what the backend is for; gloo on cuda lets ranks share GPUs, for tests",
    )
    group.add_argument(
        "--timeout", type=positive, metavar="S", help="end the run after so many seconds without progress; default: 600"
    )
    group.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="continue if the loss or weights are not finite; checkpoints with such values are not written",
    )
    group.add_argument(
        "--cluster",
        metavar="NAME|FILE.toml",
        help="the cluster that the run is predicted on; default: cpu-2core with this host's cores",
    )
