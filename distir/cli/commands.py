"""What each command does with its flags."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from distir.api import Model, Plan, load
from distir.api import run as run_model
from distir.api import simulate as simulate_model
from distir.api.metrics import Metrics
from distir.api.results import Prediction, RunResult, aligned, step_header, step_row
from distir.api.road import distribute, loss_of
from distir.backends.limits import joined
from distir.cli.output import Progress, columns, first_rank, print_json, print_program
from distir.ir.errors import UsageError
from distir.ir.function import Function
from distir.transforms.training import optimizer_named


def run(args: argparse.Namespace) -> None:
    """`distir run`."""
    with Progress("loading") as progress:
        result = _run(args, progress)
        if args.save is not None and result.weights:
            result.save(args.save)
    if not first_rank():
        return
    written = {name: path for name, path in (("saved", args.save), ("profile", args.profile)) if path}
    if args.json:
        print_json(result.to_json() | written)
    else:
        said = {"saved": "saved {}", "profile": "profile written: distir compare {}"}
        print("\n".join(["", *result.lines(), *[said[name].format(path) for name, path in written.items()]]))


def _run(args: argparse.Namespace, progress: Progress) -> RunResult:
    model, plan = model_of(args), _plan(args)
    if args.save is not None:
        _check_save(args.save, model)
    speaks = not args.json and first_rank()

    def on_plan(prediction: Prediction) -> None:
        progress.phase("starting")
        if not speaks:
            return
        try:
            print("\n".join(prediction.summary.lines()), flush=True)
        except BrokenPipeError:
            if joined() is None:
                raise  # else the other ranks must meet this one first: what is printed later raises it again

    steps = args.steps or (None if args.epochs and args.data else 5)
    in_epochs = bool(args.epochs or args.metrics)
    total = steps
    begun = False

    def on_step(step: int, time: float, outputs: dict[int, Any]) -> None:
        nonlocal begun
        progress.phase("running", total)
        progress.advance(step)
        if not speaks or in_epochs:
            return
        loss = loss_of(model.function, outputs)
        widths = [len(x) for x in step_row(max(steps or 0, 1000), None if loss is None else 100.0, 0.1)]
        if not begun:
            print(f"\n{columns(step_header(loss is not None), widths)}")
            begun = True
        print(columns(step_row(step, loss, time), widths), flush=True)

    def on_epoch(metrics: Metrics) -> None:
        nonlocal total
        total = metrics.steps * (args.epochs or 1)
        if not speaks or not metrics.epochs:
            return
        head, *rows = metrics.table()
        widths = [
            max(map(len, column)) for column in zip(head, ("1000", *["100.000000"] * (len(head) - 1)), strict=True)
        ]
        if len(rows) == 1:
            print(f"\n{columns(head, widths)}")
        print(columns(rows[-1], widths), flush=True)

    def on_check(step: int, time: float, outputs: dict[int, Any]) -> None:
        progress.phase("checking", total)
        progress.advance(step)

    return run_model(
        model,
        plan,
        steps=steps,
        epochs=args.epochs,
        data=args.data,
        held_out=share_of(args),
        tokenizer=args.tokenizer,
        metrics=args.metrics,
        seed=args.seed,
        backend=args.backend,
        device=args.device,
        compiled=args.compile,
        check=args.check,
        cluster=args.cluster,
        timeout=args.timeout,
        profile=args.profile,
        checkpoint=args.checkpoint,
        every=args.every,
        resume=args.resume,
        allow_nonfinite=args.allow_nonfinite,
        on_plan=on_plan,
        on_step=on_step,
        on_check=on_check,
        on_epoch=on_epoch,
        on_phase=progress.phase,
    )


def share_of(args: argparse.Namespace) -> float:
    """Of the samples, what is held out of epochs."""
    if args.val_fraction is None:
        return 0.1
    if args.data is None:
        raise UsageError("--val-fraction is a share of the samples in a file", "--data FILE")
    return args.val_fraction


def compare(args: argparse.Namespace) -> None:
    """`distir compare`."""
    from distir.api import compare

    comparison = compare(args.profile)
    if args.json:
        print_json(comparison.to_json())
    else:
        print(comparison)


def simulate(args: argparse.Namespace) -> None:
    """`distir simulate`."""
    with Progress("loading") as progress:
        model, plan = model_of(args), _plan(args)
        progress.phase("simulating")
        prediction = simulate_model(model, plan, args.cluster, args.nodes)
        if args.trace is not None:
            prediction.save_trace(args.trace)
    if args.json:
        print_json(prediction.to_json() | ({"trace": args.trace} if args.trace else {}))
    else:
        print("\n".join([str(prediction), *([f"trace written to {args.trace}"] if args.trace else [])]))


def show(args: argparse.Namespace) -> None:
    """`distir show`."""
    planned = any(getattr(args, f.name) is not None for f in dataclasses.fields(Plan))
    of_rank = "--rank" if args.rank is not None else "--python" if args.python else None
    default = "rank" if of_rank else "distributed" if planned else "training" if args.loss else "imported"
    stage = args.stage or default
    if stage == "training" and not args.loss:
        raise UsageError("the training step needs a loss", "--loss cross-entropy, or mse")
    if of_rank and stage != "rank":
        raise UsageError(f"{of_rank} is for --stage rank, not {stage}")
    if stage == "imported":
        args.loss = None
    with Progress("compiling"):
        model, plan = model_of(args, stage), _plan(args)
        shown = _python(model, plan, args.rank or 0) if args.python else _stage(model, plan, stage, args.rank or 0)
    if args.json:
        from distir.ir import pformat

        found = {"python": shown} if isinstance(shown, str) else {"program": pformat(shown)}
        print_json({"stage": stage, **found})
    elif isinstance(shown, str):
        print(shown, end="")
    else:
        print_program(shown)


def _python(model: Model, plan: Plan, rank: int) -> str:
    from distir.backends.torch import python_source

    return python_source(distribute(model, plan), rank)


def _stage(model: Model, plan: Plan, stage: str, rank: int) -> Function:
    if stage in ("imported", "training"):
        return model.function
    program = distribute(model, plan)
    if stage == "distributed":
        return program
    from distir.transforms.project import project

    return project(program, rank).function


def schedule(args: argparse.Namespace) -> None:
    """`distir schedule`."""
    from distir.transforms.schedule import SCHEDULES, make_table
    from distir.transforms.table import cycles, format_csv, format_grid, format_table, in_flight, read_table, table_size

    if args.csv and args.json:
        raise UsageError("--csv and --json are two formats", "give one of them")
    found = (1, 1, 1)
    if args.schedule not in SCHEDULES and os.path.exists(args.schedule):
        found = table_size(read_table(args.schedule))
    ranks, microbatches, chunks = (
        x or y for x, y in zip((args.pp, args.microbatches, args.chunks), found, strict=True)
    )
    table = make_table(args.schedule, ranks, microbatches, chunks, args.limit)
    if args.csv:
        print(format_csv(table), end="")
        return
    if args.schedule == "interleaved" and chunks == 1:
        print("hint: with 1 chunk a rank, interleaved is 1f1b; give --chunks 2 or more", file=sys.stderr)
    steps, held = len(cycles(table)), in_flight(table)
    idle = steps - 2 * microbatches * chunks
    if args.json:
        rows = [row.split() for row in format_table(table).splitlines()]
        print_json({"table": rows, "steps": steps, "idle_steps_per_rank": idle, "in_flight_by_rank": held})
        return
    print(format_grid(table))
    print(f"\nbubble: {idle} of {steps} steps a rank ({idle / steps:.1%}), if each cell takes one")
    print(f"microbatches in flight, by rank: {' '.join(map(str, held))}")


def clusters(args: argparse.Namespace) -> None:
    """`distir clusters`."""
    from distir.hardware import known_clusters, load_cluster

    rows: list[dict[str, Any]] = []
    for name in known_clusters():
        topology = load_cluster(name)
        r = topology.regular
        if r is not None:
            peaks = dict(r.spec.throughput)
            rows.append(
                {
                    "name": name,
                    "device": r.kind,
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
    head = ("cluster", "device", "a node", "memory", "f32", "link", "network")
    table = [
        (
            row["name"],
            row["device"],
            str(row["devices_per_node"]),
            f"{row['memory'] / 1e9:.0f} GB",
            f"{row['peak_flops'].get('f32', 0) / 1e12:.3g} TFLOP/s",
            f"{row['link_bandwidth'] / 1e9:.3g} GB/s",
            f"{row['network_bandwidth'] / 1e9:.3g} GB/s",
        )
        for row in rows
    ]
    print("\n".join(aligned([head, *table])))


def bench_collectives(args: argparse.Namespace) -> None:
    """`distir bench collectives`."""
    from distir.backends.bench import COLLECTIVES, SIZES, Timing, bench_collectives

    head = ("collective", "size", "latency", "algorithm bandwidth", "bus bandwidth", "over")
    widths = [max(map(len, COLLECTIVES)), 12, 14, *map(len, head[3:5]), len("memory")]
    speaks = not args.json and first_rank()
    names, sizes = args.collective or COLLECTIVES, args.size or SIZES
    rows: list[Timing] = []

    with Progress("starting") as progress:

        def on_timing(t: Timing) -> None:
            if not rows:
                progress.phase("measuring", len(names) * len(sizes))
                if speaks:
                    print(columns(head, widths))
            rows.append(t)
            progress.advance(len(rows) - 1)
            if speaks:
                rates = [f"{x / 1e9:.3g} GB/s" for x in (t.algorithm_bandwidth, t.bus_bandwidth)]
                cells = [t.collective, f"{t.size:,} B", f"{t.seconds * 1e6:,.1f} us", *rates, t.over]
                print(columns(cells, widths), flush=True)

        bench_collectives(args.nproc, args.backend, names, sizes, args.timeout, on_timing, args.dtype)
    if args.json and first_rank():
        print_json({"backend": args.backend, "dtype": args.dtype, "timings": [t._asdict() for t in rows]})


def model_of(args: argparse.Namespace, stage: str | None = None) -> Model:
    """The model the flags describe. Raises UsageError for settings of an optimizer that there is not."""
    settings = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
    given = [f"--{k.replace('_', '-')}" for k, v in {"optimizer": args.optimizer, **settings}.items() if v is not None]
    if args.loss is None and given and stage is None:
        raise UsageError(f"{given[0]} needs a loss to train with", "--loss cross-entropy, or mse")
    dims: dict[str, int] = {}
    for name, size in args.dim:
        if dims.setdefault(name, size) != size:
            raise UsageError(f"--dim {name} is given twice: {dims[name]} and {size}")
    optimizer = optimizer_named(args.optimizer or "sgd", **settings)
    return load(args.model, dims, loss=args.loss, optimizer=optimizer, dtype=args.dtype, batch=args.batch_dim)


def _plan(args: argparse.Namespace) -> Plan:
    fields = {f.name: getattr(args, f.name) for f in dataclasses.fields(Plan)}
    return Plan(**{k: v for k, v in fields.items() if v is not None})


def _check_save(path: str, model: Model) -> None:
    """Before hours of training: whether there will be something to save, and where to."""
    if not model.function.updates:
        raise UsageError("--save writes trained weights: it needs a loss to train with", "--loss cross-entropy, or mse")
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}")
