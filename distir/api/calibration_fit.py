"""The figures of a machine, fitted to what was measured of it, and the cluster file that they make."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from distir.api.calibration_runs import TimedStep
from distir.api.compilation import simulated
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.fitting import (
    Error,
    ProductFit,
    Sample,
    by_size,
    errors,
    fit_products,
    fit_robust,
    fit_speeds,
    fit_transfer,
    huber,
    nearest,
    nonnegative,
)
from distir.hardware import MIB, among, host_cores, load_cluster
from distir.ir.topology import CoreSharing, OpSpeed, Regular, Topology
from distir.runtime.forked import can_fork, forked

_HOST = 1e-5
"""The seconds of a call, or of an op that a host issues, from which their fit starts."""
_GAP = 1e-6
"""The seconds between kernels that are launched one by one, from which the fit of those in a graph starts."""
_FASTER = 1.25
"""How many times as many FLOP/s as all products together, or the quickest, one of them may have beside its bytes."""
_LEAST, _MOST = 0.25, 100.0
"""Limits of the factors that are fitted to steps."""


class _Expected(NamedTuple):
    """What a number that is fitted to steps on several ranks is expected to be, before they are seen: `start`, within a
    factor of `spread`; its limits."""

    start: float
    spread: float
    least: float = _LEAST
    most: float = _MOST


_SHARED = {
    "slower": _Expected(1.0, 2.0),
    "transfer": _Expected(1.0, 2.0),
    "latency": _Expected(1.0, 1.25),  # of benchmarks: they differ by a quarter from run to run
    "step": _Expected(1.0, 1.25),
    "bandwidth": _Expected(1.0, 2.0, 0.02, _MOST),
    "communication": _Expected(0.7, 2.0, 0.1, 1.0),
    "jitter": _Expected(5e-4, 10.0, 1e-6, 1.0),
    "feeding": _Expected(5e-5, 10.0, 1e-6, 1e-2),
    # after 5 ms of compute a rank took 70 to 120 us of a core to send 256 KiB and 70 to receive, after 0.2 ms 20 and 16
    "cold": _Expected(1.5e-4, 2.0, 1e-6, 1e-2),
}
"""Of `fit_steps`: factors of compute, of what a transfer takes of a rank, and of the latencies of transfers and of a
ring's step; then what `CoreSharing` has, its bandwidth as a multiple of that of ops that only move bytes, on a core.
The search starts there: from 300 us of feeding it has ended where small steps are predicted 65 % too long."""
_NOISE = 0.1
"""How far steps are from their predictions, as a logarithm: it says how much what is expected weighs against them."""
_NEAR = 0.1
"""On a CPU a step that is farther from its prediction, as a logarithm, counts less: Huber's loss."""

_LITTLE = 0.005
"""The search ends with a step that lowers the sum of squares by a smaller share: each takes seconds."""


class Links(NamedTuple):
    """Latencies in seconds, bandwidths in bytes/s: of transfers between two ranks, and of the ring of an all-reduce, of
    which `base` is the start and `step` the latency of each step."""

    latency: float
    bandwidth: float
    base: float
    step: float
    ring: float
    error: Error = Error(0.0, 0.0, 0)

    def delayed(self, transfers: float, rings: float) -> Links:
        """The links with so many times the seconds of small messages, in transfers and in collectives."""
        return self._replace(latency=self.latency * transfers, base=self.base * rings, step=self.step * rings)


@dataclass(frozen=True)
class Figures:
    """The fitted figures of a machine, in SI units. `general` is the speed of ops that have none of their own."""

    kind: str
    count: int
    memory: float
    general: OpSpeed
    peaks: dict[str, ProductFit]
    ops: dict[tuple[str, str], OpSpeed]
    links: Links
    issue: float
    """Of a collective; `transfer` of a transfer."""
    transfer: float
    call: float = 0.0
    op: float = 0.0
    slower: float = 1.0
    """How many times as long as alone compute takes in steps: the figures are of steps."""
    cache: float = 0.0
    """Bytes of a core's own cache."""
    sharing: CoreSharing | None = None
    ratios: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """By numbers of ranks: of the steps on so many measured / predicted."""
    context: float = 0.0
    """Bytes of a GPU that its driver and kernels take; `workspace` those that matrix products do."""
    workspace: float = 0.0

    def slowed(self, factor: float, less: float = 0.0) -> Figures:
        """The figures with launches `less` seconds shorter, then compute and calls `factor` times as long."""

        def launch(seconds: float) -> float:
            return max(0.0, seconds - less) * factor

        def speed(x: OpSpeed) -> OpSpeed:
            return OpSpeed(launch(x.launch), x.flops / factor, x.bandwidth / factor)

        peaks = {k: x._replace(launch=launch(x.launch), flops=x.flops / factor) for k, x in self.peaks.items()}
        ops = {k: speed(x) for k, x in self.ops.items()}
        call, op, slower = (x * factor for x in (self.call, self.op, self.slower))
        return replace(self, general=speed(self.general), peaks=peaks, ops=ops, call=call, op=op, slower=slower)


def fit_links(transfers: Sequence[tuple[float, float]], reductions: Sequence[tuple[float, float]]) -> Links:
    """Links from (bytes, seconds) of transfers and of all-reduces between two ranks, in a ring of two steps.

    A step of the ring has the latency of a transfer; but where an all-reduce takes less than two (in shared memory each
    rank reads what it needs, and all are told once), half of the all-reduce.
    """
    latency, bandwidth = fit_transfer(*zip(*transfers, strict=True))
    both, ring = fit_transfer(*zip(*reductions, strict=True))
    pairs = [(latency + n / bandwidth, s) for n, s in transfers] + [(both + n / ring, s) for n, s in reductions]
    step = min(latency, both / 2)
    return Links(latency, bandwidth, both - 2 * step, step, ring, errors(*zip(*pairs, strict=True)))


def fit_figures(samples: Sequence[Sample], known: Figures) -> Figures:
    """The figures with the speeds fitted to samples: of single ops, of products by dtype, of all other ops together."""
    samples = by_size(samples)
    fit = nonnegative if known.kind == "gpu" else fit_robust
    pointwise = [s for s in samples if not s.kernel and s.dtype == "f32"]
    products: dict[str, list[Sample]] = {}
    for s in samples:
        if s.kernel == "product":
            products.setdefault(s.dtype, []).append(s)
    launch, _, byte = fit(
        [[1.0] * len(pointwise), [0.0] * len(pointwise), [s.bytes for s in pointwise]], [s.seconds for s in pointwise]
    )
    general = OpSpeed(launch, math.inf, 1 / byte if byte else 1e10)
    peaks = {dtype: fit_products(found, fit) for dtype, found in products.items()}
    fastest = {
        dtype: _FASTER * max([peaks[dtype].flops, *[s.flops / s.seconds for s in found]])
        for dtype, found in products.items()
    }
    ops = fit_speeds(samples, fit, fastest=fastest)
    for (_, dtype), x in ops.items():
        if dtype in peaks and x.flops < math.inf:
            peaks[dtype] = peaks[dtype]._replace(flops=max(peaks[dtype].flops, x.flops))
    return replace(known, general=general, peaks=peaks, ops=ops)


def fit_steps(figures: Figures, steps: dict[int, list[TimedStep]]) -> Figures:
    """The figures with what only whole steps show, by numbers of ranks; with the ratios of measured to predicted time.

    The sum of squared logarithms of these ratios is least, on a CPU of their Huber loss, as what else runs disturbs
    some steps: first over the steps of one rank, for compute and calls (on GPUs what the host takes to issue an op, and
    launches in a graph); then on a CPU over all, for compute, what a transfer takes of a rank beside what its profile
    says (a thread wakes up for it, and again when it is done), the latency of transfers and of collectives, and how
    ranks share the cores. There the squared logarithm of each number by what is expected of it counts, too (ridge
    regression): steps that say little of one leave it there.
    """

    def far(ratios: Iterable[float]) -> list[float]:
        logarithms = [math.log(ratio) for ratio in ratios]
        return [huber(x, _NEAR) for x in logarithms] if inline else logarithms

    inline = figures.kind == "cpu"
    sharing = CoreSharing(figures.count, communication=1.0 if inline else 0.0, cache=figures.cache)

    def alone(x: Sequence[float]) -> Figures:
        host = {"call" if inline else "op": x[1] * _HOST}
        return replace(figures, **host, sharing=sharing).slowed(x[0], *[less * _GAP for less in x[2:]])

    def shared(x: Sequence[float]) -> Figures:
        given = dict(zip(_SHARED, x, strict=True))
        slower, transfer, latency, step = (given.pop(k) for k in ("slower", "transfer", "latency", "step"))
        given["bandwidth"] *= figures.general.bandwidth
        links, cores = figures.links.delayed(latency, step), sharing._replace(**given)
        return replace(found.slowed(slower), transfer=figures.transfer * transfer, links=links, sharing=cores)

    def unexpected(x: Sequence[float]) -> list[float]:
        return [_NOISE * math.log(v / e.start) / math.log(e.spread) for v, e in zip(x, _SHARED.values(), strict=True)]

    # in a graph kernels follow each other more closely than with timestamps between them
    bounds = [(_LEAST, _MOST), (_LEAST, _MOST), *([] if inline else [(0.1, 10.0)])]
    found = alone(nearest(lambda x: far(ratios_of(alone(x), steps[1])), [1.0] * len(bounds), bounds))
    if inline and len(steps) > 1:
        every = [step for measured in steps.values() for step in measured]
        start, limits = [e.start for e in _SHARED.values()], [(e.least, e.most) for e in _SHARED.values()]
        with side_by_side(every) as ratios:
            found = shared(nearest(lambda x: [*far(ratios(shared(x))), *unexpected(x)], start, limits, _LITTLE))
    return replace(found, ratios={n: tuple(ratios_of(found, _in_runs(rows))) for n, rows in sorted(steps.items())})


def _in_runs(steps: Iterable[TimedStep]) -> list[TimedStep]:
    """Those that are as in runs."""
    return [s for s in steps if not s.launched]


@contextmanager
def side_by_side(measured: Sequence[TimedStep]) -> Iterator[Callable[[Figures], list[float]]]:
    """Context with `ratios_of` these steps: a process for each core predicts some of them, and has their programs from
    this one. Where none can be forked it is this process."""
    jobs = min(host_cores(), len(measured))
    if jobs == 1 or not can_fork():
        yield lambda figures: ratios_of(figures, measured)
        return
    global _measured
    _measured = measured
    try:
        with forked(jobs, "distir-fit", "the fit") as pool:
            yield lambda figures: list(
                pool.map(partial(_ratio_of, _cluster_for(figures, measured)), range(len(measured)))
            )
    finally:
        _measured = ()


_measured: Sequence[TimedStep] = ()
"""What the processes of `side_by_side` inherit."""


def _ratio_of(cluster: Regular, k: int) -> float:
    return _ratio(cluster, _measured[k])


def ratios_of(figures: Figures, measured: Sequence[TimedStep]) -> list[float]:
    """Of each step measured / predicted time."""
    cluster = _cluster_for(figures, measured)
    return [_ratio(cluster, s) for s in measured]


def _cluster_for(figures: Figures, measured: Iterable[TimedStep]) -> Regular:
    """The cluster of figures, with devices enough for these steps."""
    r = regular_of(figures)
    return replace(r, per_node=max([r.per_node, *[s.plan.size for s in measured]]))


def _ratio(cluster: Regular, s: TimedStep) -> float:
    runtime = cluster.runtime if s.launched else among(cluster.runtime, s.plan.size, cluster.kind)
    topology = Topology(replace(cluster, kind="cpu"))  # programs that run here are placed on cpu:0, cpu:1, ...
    return s.seconds / simulated(s.program, s.plan, CostModel(topology, runtime=runtime)).seconds


def regular_of(figures: Figures) -> Regular:
    """The cluster of figures."""
    with tempfile.TemporaryDirectory(prefix="distir-") as folder:
        file = Path(folder, "cluster.toml")
        file.write_text(to_toml(figures, "cluster", ""))
        regular = load_cluster(file).regular
    if regular is None:
        raise AssertionError("a cluster file describes a regular cluster")
    return regular


def to_toml(figures: Figures, name: str, source: str) -> str:
    """The cluster file of figures: `load_cluster` reads it."""
    f, links = figures, figures.links
    peaks = {dtype: x for dtype, x in f.peaks.items() if x.flops < math.inf}
    half = peaks["f32"].half if "f32" in peaks else 0.0
    lines = [
        f"name = {json.dumps(name, ensure_ascii=False)}",
        "",
        "[device]",
        f'kind = "{f.kind}"',
        f"memory_gb = {_number(f.memory / 1e9)}",
        f"memory_gbs = {_number(f.general.bandwidth / 1e9)}",
        f"launch_us = {_number(f.general.launch * 1e6)}",
        f"half_gflop = {_number(half / 1e9)}",
        *[f"{key}_mib = {_number(x / 2**20)}" for key, x in (("context", f.context), ("workspace", f.workspace)) if x],
        f"source = {json.dumps(source, ensure_ascii=False)}",
        "",
        "[device.peak_tflops]",
        *[f"{dtype} = {_number(x.flops / 1e12)}" for dtype, x in peaks.items()],
        *([] if "f32" in peaks else ["f32 = 0.001"]),
    ]
    for (op, dtype), x in f.ops.items():
        lines += ["", f"[device.ops.{dtype}.{op}]", f"launch_us = {_number(x.launch * 1e6)}"]
        lines += [f"tflops = {_number(x.flops / 1e12)}"] if x.flops < math.inf else []
        lines += [f"gbs = {_number(x.bandwidth / 1e9)}"] if x.bandwidth < math.inf else []
    link = [f"link_gbs = {_number(links.bandwidth / 1e9)}", f"link_us = {_number(links.latency * 1e6)}"]
    link += [f"bus_gbs = {_number(links.ring / 1e9)}"]
    lines += ["", "[node]", f"devices = {f.count}", *link, "", "[[node.collective]]", 'kind = "ring"']
    lines += [f"base_us = {_number(links.base * 1e6)}"]
    lines += [f"{k}_us = {_number(links.step * 1e6)}" for k in ("intra", "inter")]
    lines += ["", "[network]", *link, "note = 'As the node: other machines were not measured'"]
    lines += ["", "[runtime]", f"op_us = {_number(f.op * 1e6)}", f"communication_us = {_number(f.issue * 1e6)}"]
    lines += [f"transfer_us = {_number(f.transfer * 1e6)}", f"call_us = {_number(f.call * 1e6)}"]
    lines += ["inline = true" if f.kind == "cpu" else "graphs = true"]
    if (c := f.sharing) is not None:
        lines += ["", "[sharing]", f"cores = {c.cores}", f"communication = {_number(c.communication)}"]
        lines += [f"bandwidth_gbs = {_number(c.bandwidth / 1e9)}"] if c.bandwidth < math.inf else []
        lines += [f"cache_mib = {_number(c.cache / MIB)}"]
        lines += [f"jitter_us = {_number(c.jitter * 1e6)}", f"feeding_us = {_number(c.feeding * 1e6)}"]
        lines += [f"cold_us = {_number(c.cold * 1e6)}"]
    for n, ratios in f.ratios.items():
        lines += ["", "[[residuals]]", f"ranks = {n}", f"steps = {len(ratios)}"]
        lines += [f"low = {_number(min(ratios))}", f"high = {_number(max(ratios))}"]
    return "\n".join(lines) + "\n"


def _number(x: float) -> str:
    """A number as TOML has it, of six digits."""
    return f"{x:.6g}"
