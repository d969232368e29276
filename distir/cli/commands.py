"""The commands run, compare, simulate, clusters and bench collectives."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
import tomllib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from distir.api import Model, Plan, RunOptions, load
from distir.api import simulate as simulate_model
from distir.api.model import NO_LOSS, TEXT, Precision
from distir.api.results import aligned
from distir.cli.output import Progress, columns, first_rank, print_json
from distir.ir.errors import UsageError
from distir.ir.pause import no_collection
from distir.models.config_file import is_config
from distir.models.named import is_named, own_loss
from distir.transforms.differentiation.training import LearningRate, optimizer_named
from distir.transforms.plan import load_plan

if TYPE_CHECKING:
    from distir.api import RunResult

T = TypeVar("T")

_OF_TRAINING = ("check", "save", "checkpoint", "every", "resume", "epochs", "data", "tokenizer", "metrics", "compiled")
"""What a proxy has no use for."""
_PEAKS = (("f32",), ("bf16", "f16"))
"""The dtypes whose peaks `distir clusters` lists."""


def run(args: argparse.Namespace) -> None:
    """`distir run`."""
    from distir.api.proxy import ProxyOptions

    if args.proxy:
        _proxy(args)
        return
    for name in _given(args, ProxyOptions):
        if name != "warmup":
            raise UsageError(f"--{name} is for proxies", "--proxy")
    with Progress("loading") as progress:
        result = _run(args, progress)
    if not first_rank():
        return
    written = {name: path for name, path in (("saved", args.save), ("profile", args.profile)) if path}
    if args.json:
        print_json(result.to_json() | written)
    else:
        labels = {"saved": "saved {}", "profile": "profile written: distir compare {}"}
        print("\n".join(["", *result.lines(), *[labels[name].format(path) for name, path in written.items()]]))


def _proxy(args: argparse.Namespace) -> None:
    """`distir run --proxy`."""
    from distir.api.proxy import ProxyOptions, run_proxy
    from distir.runtime.job import JobCallbacks

    if args.steps:
        raise UsageError("a proxy takes no steps: --steps does not fit --proxy", f"--iterations {args.steps}")
    for name in _OF_TRAINING:
        if getattr(args, name):
            flag = {"compiled": "compile"}.get(name, name)
            raise UsageError(f"a proxy computes nothing: --{flag} does not fit --proxy", f"leave --{flag} out")
    with Progress("loading") as progress:
        callbacks = JobCallbacks(on_phase=progress.phase)
        proxy, options = ProxyOptions(**_given(args, ProxyOptions)), options_of(args)
        args.warmup = None  # of iterations, here, not of the learning rate
        result = run_proxy(model_of(args), plan_of(args), proxy, options, args.cluster, callbacks)
    if first_rank():
        if args.json:
            print_json(result.to_json())
        else:
            print(result)


def _run(args: argparse.Namespace, progress: Progress) -> RunResult:
    from distir.api import run
    from distir.cli.watching import run_callbacks

    model, plan, options = model_of(args), plan_of(args), options_of(args)
    if options.steps is None and not (options.epochs and args.data):
        options = dataclasses.replace(options, steps=5)
    prints = not args.json and first_rank()
    progress.phase("compiling")
    callbacks = run_callbacks(model.function, options, progress, prints)
    return run(model, plan, options, data=args.data, cluster=args.cluster, callbacks=callbacks)


def options_of(args: argparse.Namespace) -> RunOptions:
    """The options of a run, each from the flag of its name. Raises UsageError for a flag that needs another."""
    if args.held_out is not None and args.data is None:
        raise UsageError("--val-fraction is a share of the samples in a file", "--data FILE")
    return RunOptions(**_given(args, RunOptions))


def _given(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """The fields of a dataclass that are set by flags."""
    found = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(kind)}
    return {k: v for k, v in found.items() if v is not None}


def compare(args: argparse.Namespace) -> None:
    """`distir compare`."""
    from distir.api import compare

    with Progress("reading traces"):
        comparison = compare(args.profile)
    if args.json:
        print_json(comparison.to_json())
    else:
        print(comparison)


@no_collection(collect=False)  # the process ends after it
def simulate(args: argparse.Namespace) -> None:
    """`distir simulate`."""
    from distir.cli.other_tools import (
        check_layers,
        check_targets,
        note_differences,
        read_other_plan,
        settings_of,
        write_plans,
        written_lines,
    )

    check_targets(args)
    with Progress("loading") as progress:
        read = read_other_plan(args)
        model = model_of(args)
        check_layers(args, read, model)
        plan = plan_of(args)
        note_differences(args, read, model)
        progress.phase("compiling and simulating")
        prediction = simulate_model(model, plan, args.cluster, args.nodes, args.runtime)
        if args.trace is not None:
            progress.phase("writing the trace")
            prediction.save_trace(args.trace)
        emitted = write_plans(args.emit, prediction.summary.plan, settings_of(args, model)) if args.emit else []
        progress.phase("adding up")
        found = prediction.to_json() if args.json else str(prediction)
    if isinstance(found, dict):
        print_json(found | ({"trace": args.trace} if args.trace else {}) | ({"emitted": emitted} if emitted else {}))
    else:
        traced = [f"trace written to {args.trace}"] if args.trace else []
        print("\n".join([found, *traced, *written_lines(emitted)]))


def clusters(args: argparse.Namespace) -> None:
    """`distir clusters`."""
    from distir.hardware import descriptions, device_of, known_clusters, known_parts, load_cluster

    if args.name is not None:
        files = descriptions(args.name)
        if args.json:
            print_json({what: tomllib.loads(text) for what, text in files.items()})
        else:
            print("\n".join([f"### {what}\n\n{text}" for what, text in files.items()]), end="")
        return
    rows: list[dict[str, Any]] = []
    for name in known_clusters():
        topology = load_cluster(name)
        r = topology.regular
        if r is not None:
            peaks = dict(r.spec.throughput)
            rows.append(
                {
                    "name": name,
                    "device": device_of(name),
                    "kind": r.kind,
                    "devices_per_node": r.per_node,
                    "memory": r.spec.memory,
                    "memory_bandwidth": r.spec.dram_bandwidth,
                    "peak_flops": peaks,
                    "link_bandwidth": r.intra.bandwidth,
                    "network_bandwidth": r.inter.bandwidth,
                }
            )
    if args.json:
        print_json(rows)
        return
    head = ("cluster", "device", "a node", "memory", "f32", "16 bits", "link", "network")
    table = [
        (
            row["name"],
            row["device"],
            str(row["devices_per_node"]),
            f"{row['memory'] / 1e9:.0f} GB",
            *[_teraflops(max(row["peak_flops"].get(t, 0.0) for t in types)) for types in _PEAKS],
            f"{row['link_bandwidth'] / 1e9:.3g} GB/s",
            f"{row['network_bandwidth'] / 1e9:.3g} GB/s",
        )
        for row in rows
    ]
    lines = aligned([head, *table])
    lines += ["", "for cluster files of your own (`distir clusters NAME` prints any of these, with its sources):"]
    lines += [textwrap.fill(f"{key}s {', '.join(x)}", 118, subsequent_indent="  ") for key, x in known_parts().items()]
    print("\n".join(lines))


def _teraflops(x: float) -> str:
    return f"{float(f'{x / 1e12:.3g}'):,g} TFLOP/s"


def bench_collectives(args: argparse.Namespace) -> None:
    """`distir bench collectives`."""
    from distir.api.network_file import measure_network
    from distir.backends.processes.bench_collectives import (
        COLLECTIVES,
        COPIES,
        SIZES,
        Timing,
        bench_collectives,
        default_names,
    )

    head = ("collective", "ranks", "size", "latency", "algorithm bandwidth", "bus bandwidth", "over")
    widths = [max(map(len, COLLECTIVES + COPIES)), 5, 12, 14, *map(len, head[4:6]), len("memory")]
    prints = not args.json and first_rank()
    sizes = args.size or SIZES
    if args.out is not None and (args.collective or args.size or args.dtype != "float32"):
        raise UsageError("--out measures what programs use", "leave --collective, --size and --dtype out")
    rows: list[Timing] = []

    with Progress("starting") as progress:

        def on_timing(t: Timing) -> None:
            if not rows:
                names = args.collective or default_names(args.backend, t.ranks)
                progress.phase("measuring", None if args.out else len(names) * len(sizes))
                if prints:
                    print(columns(head, widths))
            rows.append(t)
            progress.advance(len(rows) - 1)
            if prints:
                rates = [f"{x / 1e9:.3g} GB/s" if x else "-" for x in (t.algorithm_bandwidth, t.bus_bandwidth)]
                cells = [t.collective, str(t.ranks), f"{t.size:,} B", f"{t.seconds * 1e6:,.1f} us", *rates, t.over]
                print(columns(cells, widths), flush=True)

        if args.out is not None:
            measure_network(args.out, args.backend, args.pause * 1e-6, timeout=args.timeout, on_timing=on_timing)
        else:
            bench_collectives(args.nproc, args.backend, args.collective, sizes, args.timeout, on_timing, args.dtype)
    if prints and args.out is not None:
        print(f"\nwritten to {args.out}; distir run --cluster {args.out} predicts with it")
    if args.json and first_rank():
        print_json({"backend": args.backend, "dtype": args.dtype, "timings": [t._asdict() for t in rows]})


def model_of(args: argparse.Namespace, stage: str | None = None) -> Model:
    """The model given by the flags. Raises UsageError for optimizer settings without a loss, or that do not fit."""
    settings = {k: getattr(args, k) for k in ("lr", "momentum", "weight_decay", "clip_norm", "decay_vectors")}
    schedule = {k: getattr(args, k) for k in ("warmup", "lr_decay", "decay_steps", "min_lr")}
    precisions = {k: getattr(args, k) for k in ("precision", "grad_dtype")}
    training = {"optimizer": args.optimizer, **settings, **schedule, **precisions}
    given = [f"--{k.replace('_', '-')}" for k, v in training.items() if v is not None]
    if loss_of(args) is None and given and stage is None:
        raise UsageError(f"{given[0]} needs a loss", "--loss cross-entropy, or mse")
    dims = dims_of(args)
    if getattr(args, "local_batchnorm", False):
        if is_named(args.model) or is_config(args.model):
            raise UsageError(f"{args.model} has no batch norms", "leave --local-batchnorm out")
        dims["batchnorm_groups"] = plan_of(args).sharding.pieces
    settings["dropout_seed"] = getattr(args, "seed", None)
    optimizer = optimizer_named(args.optimizer or "sgd", schedule=_learning_rate(schedule), **settings)
    precision = Precision(args.precision or "fp32", args.grad_dtype or "fp32")
    return load(
        args.model,
        dims,
        loss=args.loss,
        optimizer=optimizer,
        dtype=args.dtype,
        batch=args.batch_dim,
        precision=precision,
    )


def dims_of(args: argparse.Namespace) -> dict[str, int]:
    """The sizes that `--dim`, `--batch` and `--seq` give. Raises UsageError for two that differ, or a batch for a model
    that has a fixed one."""
    dims = given_once("--dim", args.dim)
    if args.batch is not None:
        name = batch_dim(args)
        if name is None:
            raise UsageError(f"{args.model} has no symbolic dimension: its batch is fixed", "export it with one")
        if dims.setdefault(name, args.batch) != args.batch:
            raise UsageError(f"--batch {args.batch}, but --dim {name}={dims[name]}")
    if args.seq is not None and dims.setdefault("seq", args.seq) != args.seq:
        raise UsageError(f"--seq {args.seq}, but --dim seq={dims['seq']}")
    return dims


def is_onnx(model: str) -> bool:
    """Whether it is the path of an ONNX file."""
    return not (is_named(model) or is_config(model) or model.endswith(TEXT))


def batch_dim(args: argparse.Namespace) -> str | None:
    """The name of the model's batch dim; None for an ONNX file without symbolic dims."""
    if not is_onnx(args.model):
        return "batch"
    if args.batch_dim is not None:
        return args.batch_dim
    from distir.importer import symbolic_dims

    return next(iter(symbolic_dims(args.model)), None)


def given_once(flag: str, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """What a flag gives that may be repeated. Raises UsageError for a name with two values."""
    found: dict[str, T] = {}
    for name, x in pairs:
        if found.setdefault(name, x) != x:
            raise UsageError(f"{flag} {name} is given twice: {found[name]} and {x}")
    return found


def loss_of(args: argparse.Namespace) -> str | None:
    """The loss that the flags ask for, or that the model's name comes with; None for a model that is not trained."""
    loss = args.loss or own_loss(args.model)
    return None if loss == NO_LOSS else loss


def _learning_rate(given: dict[str, Any]) -> LearningRate | None:
    """The schedule of the learning rate that the flags give. Raises UsageError for flags that do not fit together."""
    if all(x is None for x in given.values()):
        return None
    if given["warmup"] == 0:  # which is for proxies alone
        raise UsageError("argument --warmup: expected at least 1, got 0")
    if given["lr_decay"] is None:
        for name in ("decay_steps", "min_lr"):
            if given[name] is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs --lr-decay", "--lr-decay linear, or cosine")
    elif given["decay_steps"] is None:
        raise UsageError("--lr-decay needs --decay-steps", "the step at which the learning rate has fallen")
    fields = {"warmup": given["warmup"], "decay": given["lr_decay"], "steps": given["decay_steps"]}
    return LearningRate(**{k: x for k, x in {**fields, "least": given["min_lr"]}.items() if x is not None})


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan of `--plan`, overridden by the other flags; with `--save-plan` also written to a file."""
    read = load_plan(args.plan) if args.plan is not None else {}
    plan = Plan(**{**read, **_given(args, Plan)})
    if args.save_plan is not None and first_rank():
        plan.save(args.save_plan)
    return plan
