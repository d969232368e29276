"""Measure this machine with distir's own kernels, and write a cluster file of its figures.

Small training steps are run with a profile, which gives the seconds of each op at several sizes; the interconnect
benchmark gives those of collectives and transfers. Figures are fitted to these (`distir.executor.cost_model.fitting`).
Then whole steps are run under several plans on 1, 2 and 4 ranks, and compared with what the simulator predicts with
these figures: what compute takes longer in steps than alone, and how ranks share the cores of a host, is fitted to
them; the residuals remain, from which predictions have their interval. Of repeated steps the median counts.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from distir.api.calibration_runs import Profiled, TimedStep, Training, measure_ops, measure_step
from distir.api.compilation import simulated
from distir.api.results import aligned
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
from distir.hardware import MIB, among, host_cache, host_cores, load_cluster, load_runtime
from distir.ir.errors import UsageError, counted
from distir.ir.files import check_writable, written
from distir.ir.topology import CoreSharing, OpSpeed, Regular, Topology
from distir.runtime.options import RunOptions
from distir.transforms.plan import Plan

OnPhase = Callable[[str, int, int], None]
"""Called before each phase with what it does, the number of phases so far, and their count."""
_SHORTEST = 2
"""The training steps that are measured again at the end, on a CPU, and their ops: the first of a suite, on two ranks at
most. Short ones differ most from minute to minute, with what else the host runs."""
_FIT_PHASES = 12
"""On a CPU the fit takes as long as so many measurements."""
_HOST = 1e-5
"""The seconds of a call, or of an op that a host issues, from which their fit starts."""
_GAP = 1e-6
"""The seconds between kernels that are launched one by one, from which the fit of those in a graph starts."""
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
_DOUBTFUL = 1.3
"""How many times as long, or as short, as predicted steps are where a calibration is in doubt."""
_NOISE = 0.1
"""How far steps are from their predictions, as a logarithm: it says how much what is expected weighs against them."""
_NEAR = 0.1
"""On a CPU a step that is farther from its prediction, as a logarithm, counts less: Huber's loss."""


class Suite(NamedTuple):
    """What is measured: training steps with a profile, products by dtype, ranks, sizes; `spread`: which of the training
    steps are timed on several ranks, too."""

    trainings: Sequence[Training]
    products: Training | None
    dtypes: Sequence[str]
    ranks: Sequence[int]
    sizes: Sequence[int]
    spread: Sequence[int] = (0, 1, 2)


_CPU = (
    Training("40,64,32,8", 64, "adamw", 300),
    Training("gpt:layers=2,hidden=48,heads=4,vocab=600,seq=24", 8, "adamw", 200, microbatches=(1, 2)),
    Training("gpt:layers=2,hidden=256,heads=4,vocab=3000,seq=128", 8, "adamw", 12),
    Training("gpt:layers=1,hidden=384,heads=6,vocab=4000,seq=160", 8, "sgd", 7),
    Training("48,96,192,384,768,1024,512,64", 128, "sgd", 30),
    # few rows: weights are read for little work; gradients as large are accumulated, and few caches hold both
    Training("1024,1024,1024,1024,1024,1024,1024,1024,1024", 32, "sgd", 12, microbatches=(1, 2)),
)
_SPREAD = 0, 1, 2, 5
"""On a CPU decoders that mostly compute, and a perceptron whose weights the ranks read from the memory they share."""
_CUDA = (  # short and long sequences, weights and activations that fit in the cache and such that do not
    Training("64,128,64,16", 64, "adamw", 60),
    Training("gpt:layers=2,hidden=128,heads=4,vocab=2000,seq=64", 8, "adamw", 40, microbatches=(1, 2)),
    Training("gpt:layers=2,hidden=512,heads=8,vocab=8000,seq=256", 8, "adamw", 20),
    Training("gpt:layers=2,hidden=512,heads=8,vocab=8000,seq=256", 8, "adamw", 20, "bf16"),
    Training("gpt:layers=1,hidden=768,heads=12,vocab=4000,seq=200", 32, "adamw", 10),
    Training("gpt:layers=1,hidden=768,heads=12,vocab=4000,seq=200", 96, "adamw", 10, "bf16"),
    Training("gpt:layers=1,hidden=1024,heads=16,vocab=48000,seq=1024", 4, "adamw", 10),
    Training("gpt:layers=1,hidden=1024,heads=16,vocab=48000,seq=1024", 12, "adamw", 10, "bf16"),
    Training("gpt:layers=1,hidden=4096,heads=32,vocab=32000,seq=1024", 4, "adamw", 10, "bf16"),
    Training("llama:layers=1,hidden=1024,heads=16,kv_heads=4,ffn=2816,vocab=32000,seq=2048", 2, "adamw", 10),
    Training("llama:layers=1,hidden=1024,heads=16,kv_heads=4,ffn=2816,vocab=32000,seq=1024", 8, "adamw", 10, "bf16"),
    Training(
        "llama:layers=1,hidden=2048,heads=32,kv_heads=4,ffn=5632,vocab=32000,seq=4096,separate=1",
        3,
        "adamw",
        10,
        "bf16",
    ),
    Training("256,1024,4096,8192,2048", 4096, "sgd", 10, microbatches=(1, 2)),
)
_WIDTHS = Training("32,64,128,256,512,1024", 128, "sgd", 5)
_WIDE = Training("512,1024,2048,4096,8192", 4096, "sgd", 5)
_SIZES = 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25
"""Of collectives and transfers, in bytes."""


def suite(device: str, count: int) -> Suite:
    """What to measure on a device of this kind, of which the machine has `count` (cores or GPUs)."""
    if device == "cuda":
        return Suite(_CUDA, _WIDE, ("f64", "bf16", "f16"), [n for n in (1, 2, 4, 8) if n <= count], _SIZES)
    ranks = [n for n in (1, 2, 4) if n <= max(2, 2 * count)]
    return Suite(_CPU, _WIDTHS, ("f64", "bf16"), ranks, _SIZES, _SPREAD)


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


@dataclass(frozen=True)
class Calibration:
    """The figures of this machine, with their residuals. `rows`: figure, value, mean and worst error, measurements."""

    figures: Figures
    rows: list[tuple[str, ...]]
    text: str = field(repr=False)
    path: str | None = None

    @property
    def notes(self) -> list[str]:
        """Reasons to doubt that the figures are those of an idle machine."""
        found: list[str] = []
        for n, ratios in self.figures.ratios.items():
            low, high = min(ratios), max(ratios)
            if max(high, 1 / low) > _DOUBTFUL:
                found.append(
                    f"steps on {counted(n, 'rank')} took {low:.2f} to {high:.2f} times what these figures predict: if "
                    "other programs ran, calibrate again without them"
                )
        return found

    def lines(self) -> list[str]:
        """The table of figures, notes, and where they were written."""
        notes = [f"note: {x}" for x in self.notes]
        written_to = [f"written to {self.path}"] if self.path is not None else []
        return [*aligned(self.rows), *[f"\n{x}" for x in (*notes, *written_to)]]

    def to_json(self) -> dict[str, Any]:
        """JSON of the table, the numbers of ranks, and the file."""
        head, *rows = self.rows
        f = self.figures
        return {
            "figures": [dict(zip(head, row, strict=True)) for row in rows],
            "slower_in_steps": f.slower,
            "sharing": f.sharing and f.sharing._asdict(),
            "ratios": {str(n): list(found) for n, found in f.ratios.items()},
            "notes": self.notes,
            "file": self.path,
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())


def calibrate(
    device: str = "cpu",
    out: str | os.PathLike[str] | None = None,
    on_phase: OnPhase | None = None,
    what: Suite | None = None,
) -> Calibration:
    """Measure this machine's CPU cores or GPUs, fit the figures of a cluster, and write them to `out`, a .toml file.

    `what`: by default the `suite` of the device. Raises UsageError, before anything is measured, for an `out` that
    cannot be written or is no .toml file, and for device "cuda" without a GPU.
    """
    if out is not None:
        check_out(out)
    kind, count, memory = _machine(device)
    what = what or suite(device, count)
    options = RunOptions(device=device, allow_nonfinite=True)
    again = _again(what, device)
    phases = _Phases(on_phase, _count(what, again, device))
    profiled = _profile(what, options, phases)
    links = _links(what, device, phases)
    measured = _measure_steps((what, again), options, phases)
    profiled.samples.extend(_measure_ops(again, options, phases))
    usual = load_runtime("distir").communication
    issue, transfer = (median(x) if x else usual for x in (profiled.issues, profiled.sends))
    cache = host_cache() if kind == "cpu" else 0.0
    known = Figures(kind, count, memory, OpSpeed(), {}, {}, links, issue, transfer, cache=cache)
    fitted = fit_figures(profiled.samples, known)
    phases.next("fitting")
    figures = fit_steps(fitted, measured)
    if device == "cuda":
        from distir.backends.lowering.timing import overheads

        figures = replace(figures, **overheads()._asdict())
    name = "calibrated" if out is None else Path(out).stem
    text = to_toml(
        figures, name, f"distir calibrate --device {device}, {platform.machine()}, {platform.python_version()}"
    )
    if out is not None:
        with written(out) as path:
            path.write_text(text, encoding="utf-8")
    return Calibration(figures, _rows(figures, fitted, profiled.samples), text, None if out is None else os.fspath(out))


def check_out(out: str | os.PathLike[str]) -> None:
    """Raises UsageError if a cluster file cannot be written there."""
    path = Path(out)
    if path.suffix != ".toml":
        raise UsageError(f"cannot write {path}: a cluster file is a .toml file", f"--out {path.stem or 'mine'}.toml")
    check_writable(path)


class _Phases:
    """Counts measurements."""

    def __init__(self, on_phase: OnPhase | None, total: int) -> None:
        self.on_phase, self.total, self.done = on_phase, total, 0

    def next(self, what: str) -> None:
        if self.on_phase is not None:
            self.on_phase(what, self.done, self.total)
        self.done += 1


def _machine(device: str) -> tuple[str, int, float]:
    """The kind of device, how many there are, and the bytes of memory of each."""
    from distir.backends.processes.preflight import available_memory, gpus

    if device == "cpu":
        cores = host_cores()
        return "cpu", cores, (available_memory() or 8e9) / cores
    count, memory = gpus()
    if not count:
        raise UsageError("--device cuda needs a GPU, and there is none here", "--device cpu")
    return "gpu", count, memory


def plans_of(ranks: int, small: bool) -> list[Plan]:
    """The plans that are timed on so many ranks, of a small program or a large one."""
    if ranks == 1:
        return [Plan(), Plan(microbatches=2)][: 2 if small else 1]
    found = [Plan(dp=ranks), Plan(tp=ranks), Plan(pp=ranks, microbatches=2 * ranks)]
    if ranks == 2:
        return [*found, Plan(pp=2)]
    half = ranks // 2
    return [*found, Plan(dp=half, tp=2), Plan(dp=half, pp=2, microbatches=2), Plan(tp=half, pp=2, microbatches=2)]


def _timed(what: Suite, ranks: int) -> list[tuple[Training, list[Plan]]]:
    """The training steps that are timed on so many ranks, with their plans: not all of them on several."""
    every = range(len(what.trainings))
    chosen = every if ranks == 1 else [k for k in what.spread if k in every][0 if ranks == 2 else 1 :]
    return [(what.trainings[k], plans_of(ranks, k < 3)) for k in chosen]


def _again(what: Suite, device: str) -> Suite:
    """What is measured again: see `_SHORTEST`."""
    if device != "cpu":
        return what._replace(trainings=(), ranks=())
    return what._replace(trainings=what.trainings[:_SHORTEST], ranks=[n for n in what.ranks if n <= 2])


def _count(what: Suite, again: Suite, device: str) -> int:
    timed = [plans for part in (what, again) for n in part.ranks for _, plans in _timed(part, n)]
    ops = [t.microbatches for part in (what, again) for t in part.trainings]
    others = len(what.dtypes) if what.products is not None else 0
    several = 2 + len(_split(what)) if len(what.ranks) > 1 else 0
    return sum(map(len, [*timed, *ops])) + len(_launched(what, device)) + others + several + _FIT_PHASES


def _profile(what: Suite, options: RunOptions, phases: _Phases) -> Profiled:
    """Seconds of ops on one rank, at several sizes and in several dtypes, and of issuing communication on two."""
    found = Profiled(_measure_ops(what, options, phases), [], [])
    for dtype in what.dtypes if what.products is not None else ():
        phases.next(f"measuring products in {dtype}")
        found.samples.extend(measure_ops(what.products.model(dtype), Plan(), options).samples)  # type: ignore[union-attr]
    if len(what.ranks) > 1:
        phases.next("measuring the issue of communication")
        found.issues.extend(measure_ops(what.trainings[0].model(), Plan(tp=2), options).issues)
        found.sends.extend(measure_ops(what.trainings[0].model(), Plan(pp=2, microbatches=4), options).sends)
        known = {(s.op, s.dtype) for s in found.samples}
        for t, plan in _split(what):
            phases.next("measuring ops of split programs")
            samples = measure_ops(t.model(), plan, options).samples
            found.samples.extend(s for s in samples if (s.op, s.dtype) not in known)
    return found


def _measure_ops(what: Suite, options: RunOptions, phases: _Phases) -> list[Sample]:
    """Seconds of the ops of training steps on one rank."""
    found: list[Sample] = []
    for t in what.trainings:
        for n in t.microbatches:
            phases.next("measuring ops")
            found += measure_ops(t.model(), Plan(microbatches=n), options).samples
    return found


def _split(what: Suite) -> list[tuple[Training, Plan]]:
    """Programs on two ranks that have ops of their own: decoders, of those that are timed on several ranks."""
    decoders = [t for t, _ in _timed(what, 2) if t.decodes]
    return [(t, plan) for t in decoders for plan in (Plan(tp=2), Plan(pp=2))]


def _links(what: Suite, device: str, phases: _Phases) -> Links:
    """The links between two ranks; without a second device those of a loop within the first, which are never used."""
    if len(what.ranks) < 2:
        return Links(0.0, 1e10, 0.0, 0.0, 1e10)
    from distir.backends.processes.bench_collectives import bench_collectives

    phases.next("measuring collectives")
    backend = "nccl" if device == "cuda" else "gloo"
    rows = bench_collectives(2, backend, ["all-reduce", "send-recv"], what.sizes)
    return fit_links(*([(t.size, t.seconds) for t in rows if t.collective == c] for c in ("send-recv", "all-reduce")))


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
    return replace(known, general=general, peaks=peaks, ops=fit_speeds(samples, fit))


def _measure_steps(parts: Sequence[Suite], options: RunOptions, phases: _Phases) -> dict[int, list[TimedStep]]:
    """By numbers of ranks; of steps that are in several parts the geometric mean."""
    times: dict[tuple[int, Training, Plan], list[TimedStep]] = {}
    for what in parts:
        for n in what.ranks:
            for t, plans in _timed(what, n):
                for plan in plans:
                    phases.next(f"measuring steps on {counted(n, 'rank')}")
                    times.setdefault((n, t, plan), []).append(measure_step(t.model(), plan, t.steps, options))
    found: dict[int, list[TimedStep]] = {}
    for (n, _, _), same in times.items():
        found.setdefault(n, []).append(same[0]._replace(seconds=geometric_mean([s.seconds for s in same])))
    for t in _launched(parts[0], options.device):
        phases.next("measuring steps whose kernels the host launches")
        found.setdefault(1, []).append(measure_step(t.model(), Plan(), t.steps, options, launched=True))
    return found


def _launched(what: Suite, device: str | None) -> Sequence[Training]:
    """The training steps that also are timed with kernels that the host launches one by one: on GPUs small ones."""
    return what.trainings[:2] if device == "cuda" else ()


def fit_steps(figures: Figures, steps: dict[int, list[TimedStep]]) -> Figures:
    """The figures with what only whole steps show, by numbers of ranks; with the ratios of measured to predicted time.

    The sum of squared logarithms of these ratios is least, on a CPU of their Huber loss, as what else runs disturbs
    some steps: first over the steps of one rank, for compute and calls (on GPUs what the host takes to issue an op, and
    launches in a graph); then on a CPU over all, for compute, what a transfer takes of a rank beside what its profile
    says (a thread wakes up for it, and again when it is done), the latency of transfers and of collectives, and how
    ranks share the cores. There the squared logarithm of each number by what is expected of it counts, too (ridge
    regression): steps that say little of one leave it there.
    """

    def far(found: Figures, measured: Iterable[TimedStep]) -> list[float]:
        logarithms = [math.log(ratio) for ratio in ratios_of(found, measured)]
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
    found = alone(nearest(lambda x: far(alone(x), steps[1]), [1.0] * len(bounds), bounds))
    if inline and len(steps) > 1:
        every = [step for measured in steps.values() for step in measured]
        start, limits = [e.start for e in _SHARED.values()], [(e.least, e.most) for e in _SHARED.values()]
        found = shared(nearest(lambda x: [*far(shared(x), every), *unexpected(x)], start, limits))
    return replace(found, ratios={n: tuple(ratios_of(found, _in_runs(rows))) for n, rows in sorted(steps.items())})


def _in_runs(steps: Iterable[TimedStep]) -> list[TimedStep]:
    """Those that are as in runs."""
    return [s for s in steps if not s.launched]


def ratios_of(figures: Figures, measured: Iterable[TimedStep]) -> list[float]:
    """Of each step measured / predicted time."""
    r = regular_of(figures)
    most = max([r.per_node, *[s.plan.size for s in measured]])
    topology = Topology(replace(r, kind="cpu", per_node=most))  # programs that run here are placed on cpu:0, cpu:1, ...
    found: list[float] = []
    for s in measured:
        runtime = r.runtime if s.launched else among(r.runtime, s.plan.size, figures.kind)
        found.append(s.seconds / simulated(s.program, s.plan, CostModel(topology, runtime=runtime)).seconds)
    return found


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
        lines += [f"cold_us = {_number(c.cold * 1e6)}"] if c.cold else []
    for n, ratios in f.ratios.items():
        lines += ["", "[[residuals]]", f"ranks = {n}", f"steps = {len(ratios)}"]
        lines += [f"low = {_number(min(ratios))}", f"high = {_number(max(ratios))}"]
    return "\n".join(lines) + "\n"


def _number(x: float) -> str:
    """A number as TOML has it, of six digits."""
    return f"{x:.6g}"


def _rows(f: Figures, fitted: Figures, samples: Sequence[Sample]) -> list[tuple[str, ...]]:
    """The table of figures and residuals. `fitted`: the figures of ops in a profile, not in steps, as samples are."""
    rows: list[tuple[str, ...]] = [("figure", "value", "mean error", "worst", "measurements")]
    for dtype, fit in f.peaks.items():
        of = [s for s in samples if (s.kernel, s.dtype) == ("product", dtype)]
        text = f"{fit.launch * 1e6:.1f} us, {fit.flops / 1e9:.3g} GFLOP/s, half of it at {fit.half / 1e9:.2g} GFLOP"
        predicted = [fitted.peaks[dtype].seconds(s.flops) for s in of]
        rows.append((f"products {dtype}", text, *_error(errors(predicted, _seconds(of)))))
    of = [s for s in samples if (s.kernel, s.dtype) == ("", "f32")]
    rows.append(("other ops", _rate(f.general), *_error(_errors(fitted.general, of))))
    for (op, dtype), speed in f.ops.items():
        of = [s for s in samples if (s.op, s.dtype) == (op, dtype)]
        rows.append((f"{op} {dtype}", _rate(speed), *_error(_errors(fitted.ops[op, dtype], of))))
    links = f.links
    if links.error.count:
        text = f"{links.latency * 1e6:.1f} us, {links.bandwidth / 1e9:.3g} GB/s; ring {links.ring / 1e9:.3g} GB/s"
        rows.append(("links", text, *_error(links.error)))
    rows.append(("issue of a collective", f"{f.issue * 1e6:.1f} us", "-", "-", "-"))
    rows.append(("issue of a transfer", f"{f.transfer * 1e6:.1f} us", "-", "-", "-"))
    rows.append(("call of a function", f"{f.call * 1e6:.1f} us", "-", "-", "-"))
    if f.op:
        rows.append(("issue of an op", f"{f.op * 1e6:.1f} us", "-", "-", "-"))
    if f.sharing is not None:
        late, fed, cold = (f"{x * 1e6:.0f} us" for x in (f.sharing.jitter, f.sharing.feeding, f.sharing.cold))
        memory = f"memory {f.sharing.bandwidth / 1e9:.3g} GB/s, " if f.sharing.bandwidth < math.inf else ""
        text = (
            f"{memory}communication {f.sharing.communication:.0%} of a core, jitter {late}, feeding {fed}, cold {cold}"
        )
        rows.append((f"sharing of {f.count} cores", text, "-", "-", "-"))
    for n, ratios in f.ratios.items():
        text = f"compute x {f.slower:.2f}"
        rows.append((f"steps on {counted(n, 'rank')}", text, *_error(errors([1.0] * len(ratios), ratios))))
    return rows


def _rate(s: OpSpeed) -> str:
    parts = [f"{s.launch * 1e6:.1f} us"]
    parts += [f"{s.flops / 1e9:.3g} GFLOP/s"] if s.flops < math.inf else []
    parts += [f"{s.bandwidth / 1e9:.3g} GB/s"] if s.bandwidth < math.inf else []
    return ", ".join(parts)


def _seconds(samples: Sequence[Sample]) -> list[float]:
    return [s.seconds for s in samples]


def _errors(speed: OpSpeed, samples: Sequence[Sample]) -> Error:
    predicted = [speed.seconds(s.flops if s.kernel else 0.0, s.bytes) for s in samples]
    return errors(predicted, _seconds(samples))


def _error(e: Error) -> tuple[str, str, str]:
    return f"{e.mean:.0%}", f"{e.worst:.0%}", str(e.count)
