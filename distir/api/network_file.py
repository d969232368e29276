"""A cluster file of this host's network, of collectives as they were measured: runs on the same ranks, right after, are
predicted with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from distir.api.calibrate import check_out
from distir.api.calibration_fit import fit_links
from distir.backends.processes.bench_collectives import Loops, Timing, bench_collectives
from distir.backends.processes.preflight import joins
from distir.hardware import host_cores, this_host
from distir.ir.errors import UsageError
from distir.ir.files import written

COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send-recv", "send"
SIZES = tuple(8**k for k in range(1, 5)) + tuple(4**k for k in range(7, 10)) + tuple(2**k for k in range(20, 25))
"""8 B to 16 MiB."""
PAUSE = 1e-3
"""Seconds of sleep before each call: what lay idle takes longer to begin, and so it is in a step that computes."""
_SECONDS = 0.03
"""Of a loop: what comes next is to find the machine as it was."""


def measure_network(
    out: str | os.PathLike[str],
    backend: str = "mpi",
    pause: float = PAUSE,
    sizes: Sequence[int] = SIZES,
    timeout: float = 600.0,
    on_timing: Callable[[Timing], None] | None = None,
) -> list[Timing]:
    """Measure the collectives that programs use, among the ranks that mpirun has started and in smaller groups of
    neighbours, each call after `pause` seconds of sleep; rank 0 writes a cluster file of one node of so many devices,
    whose cores are those of `this_host`.

    Raises UsageError for another backend, for one rank, and for a file that cannot be written.
    """
    if backend != "mpi":
        raise UsageError(
            f"a cluster file is written for backend mpi, not for {backend}", "distir calibrate measures for the others"
        )
    check_out(out)
    started = joins(backend)
    world = started.world if started else 1
    if world == 1:
        raise UsageError("a cluster file is of times among ranks, and there is 1", "mpirun -n 2 distir ...")
    groups = [n for n in range(2, world + 1) if world % n == 0]
    loops = Loops(groups, pause, _SECONDS)
    rows = bench_collectives(world, backend, COLLECTIVES, sizes, timeout, on_timing, loops=loops)
    if started is None or started.rank == 0:
        with written(out) as path:
            path.write_text(to_toml(rows, world, Path(out).stem), encoding="utf-8")
    return rows


def to_toml(rows: Sequence[Timing], ranks: int, name: str) -> str:
    """The cluster file of these measurements."""
    host = this_host(ranks).regular
    if host is None:
        raise AssertionError("a host is regular")
    spec, least = host.spec, min(t.ranks for t in rows)
    pairs = {c: [(t.size, t.seconds) for t in rows if (t.collective, t.ranks) == (c, least)] for c in COLLECTIVES}
    links = fit_links(pairs["send-recv"], pairs["all-reduce"])
    link = [f"link_gbs = {links.bandwidth / 1e9:.6g}", f"link_us = {links.latency * 1e6:.6g}"]
    lines = [
        f"name = {json.dumps(name, ensure_ascii=False)}",
        "",
        "[device]",
        f'kind = "{host.kind}"',
        f"memory_gb = {spec.memory / 1e9:.6g}",
        f"memory_gbs = {spec.dram_bandwidth / 1e9:.6g}",
        f"memory_efficiency = {spec.memory_efficiency:.6g}",
        f"launch_us = {spec.kernel_launch_overhead * 1e6:.6g}",
        f"source = {json.dumps('not measured: ' + host.name)}",
        "",
        "[device.peak_tflops]",
        *[f"{dtype} = {flops / 1e12:.6g}" for dtype, flops in spec.throughput],
        *["", "[node]", f"devices = {ranks}", *link, f"bus_gbs = {links.ring / 1e9:.6g}", "in_turn = true"],
        'source = "distir bench collectives --out"',
        *["", "[network]", *link, 'note = "As the node: other machines were not measured"'],
    ]
    if ranks > (cores := host_cores()):  # collectives were measured so
        lines += ["", "[sharing]", f"cores = {cores}", "communication = 0"]
    for n in sorted({t.ranks for t in rows}):
        for collective in COLLECTIVES:
            points = {t.size: t.seconds for t in rows if (t.collective, t.ranks) == (collective, n)}
            lines += ["", "[[node.measured]]", f'collective = "{collective}"', f"ranks = {n}"]
            lines += [f"bytes = {sorted(points)}"]
            lines += [f"us = [{', '.join([f'{points[size] * 1e6:.6g}' for size in sorted(points)])}]"]
    return "\n".join(lines) + "\n"
