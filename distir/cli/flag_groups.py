"""Groups of flags that several commands have: the model, the plan, the cluster, the data, the run."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from distir.cli.flag_values import KINDS, at_least, finite_number, named_size, positive, share_below_one
from distir.runtime.options import BACKENDS
from distir.transforms.plan import Plan, default_of


def source_flags(parser: argparse.ArgumentParser) -> Any:
    """The model, its sizes and its loss; returns the group of flags."""
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
        type=named_size,
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
    return group


def model_flags(parser: argparse.ArgumentParser) -> None:
    group = source_flags(parser)
    group.add_argument("--optimizer", choices=("sgd", "adamw"), help="default: sgd")
    group.add_argument("--lr", type=positive, metavar="X", help="learning rate; default: 0.001")
    group.add_argument("--momentum", type=finite_number, metavar="X", help="momentum of sgd; default: 0")
    group.add_argument("--weight-decay", type=finite_number, metavar="X", help="default: 0, adamw 0.01")
    group.add_argument(
        "--clip-norm", type=positive, metavar="X", help="limit the norm of all gradients together; default: no limit"
    )
    group.add_argument(
        "--decay-vectors",
        action=argparse.BooleanOptionalAction,
        help="whether weights of fewer than two dims, as of norms and biases, decay; default: they do",
    )
    group.add_argument(
        "--warmup",
        type=at_least(0),
        metavar="N",
        help="steps in which the learning rate rises from 0, default: none; of a proxy, iterations before those that "
        "are timed, default: 8",
    )
    group.add_argument(
        "--lr-decay", choices=("linear", "cosine"), help="how the learning rate falls after that; default: it does not"
    )
    group.add_argument("--decay-steps", type=at_least(1), metavar="N", help="the step at which it has fallen")
    group.add_argument("--min-lr", type=finite_number, metavar="X", help="the learning rate from then on; default: 0")
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


def cluster_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster")
    group.add_argument("--cluster", required=True, metavar="NAME|FILE.toml", help="`distir clusters` lists names")
    group.add_argument(
        "--nodes", type=at_least(1), metavar="N", help="number of nodes; default: as many as the plan needs"
    )
    group.add_argument(
        "--runtime",
        metavar="NAME",
        help="the software whose host issues the ops: distir, distir-compiled, distir-2021, torch-eager, "
        "torch-compiled or megatron; "
        "default: none, issuing takes no time",
    )


def data_flags(group: Any, steps: str) -> None:
    group.add_argument(
        "--steps",
        type=at_least(1),
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
        "--seed", type=at_least(0), metavar="N", help="seed of random data, weights, dropout and shuffling; default: 0"
    )
    group.add_argument(
        "--val-fraction",
        type=share_below_one,
        dest="held_out",
        metavar="X",
        help="share of --data for validation; default: 0.1",
    )
    group.add_argument(
        "--tokenizer",
        metavar="FILE.json",
        help="BPE of a text: read if it exists, else trained on the text and written",
    )


def running_flags(group: Any) -> None:
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
    group.add_argument("--timeout", type=positive, metavar="S", help="seconds without progress; default: 600")
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
