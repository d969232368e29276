"""Measure this machine with distir's own kernels, and write a cluster file of its figures.

Small training steps are run with a profile, which gives the seconds of each op at several sizes; the interconnect
benchmark gives those of collectives and transfers. Figures are fitted to these. Then whole steps are run under several
plans on 1, 2 and 4 ranks, and compared with what the simulator predicts with these figures: what compute takes longer
in steps than alone, and how ranks share the cores of a host, is fitted to them; the residuals remain, from which
predictions have their interval. What is measured is in `calibration_suite`, the fits in `calibration_fit`.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from distir.api.calibration_fit import Figures, Links, fit_figures, fit_links, fit_steps, to_toml
from distir.api.calibration_runs import Profiled, TimedStep, Training, measure_ops, measure_step
from distir.api.calibration_suite import Suite, launched, measured_again, split_programs, steps_on, suite, timed
from distir.api.results import aligned
from distir.backends.processes.fork_server import preloaded
from distir.executor.cost_model.fitting import Error, Sample, errors
from distir.hardware import host_cache, host_cores, load_runtime
from distir.ir.errors import UsageError, counted
from distir.ir.files import check_writable, written
from distir.ir.topology import OpSpeed
from distir.runtime.options import RunOptions
from distir.transforms.plan import Plan

OnPhase = Callable[[str, int, int], None]
"""Called before each phase with what it does, the number of phases so far, and their count."""
_FIT_PHASES = 12
"""On a CPU the fit takes as long as so many measurements."""


_DOUBTFUL = 1.3
"""How many times as long, or as short, as predicted steps are where a calibration is in doubt."""


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
    again = measured_again(what, device)
    phases = _Phases(on_phase, _count(what, again, device))
    with preloaded():
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


def _count(what: Suite, again: Suite, device: str) -> int:
    steps = [plans for part in (what, again) for n in part.ranks for _, plans in timed(part, n)]
    ops = [t.microbatches for part in (what, again) for t in part.trainings]
    others = len(what.dtypes) if what.products is not None else 0
    several = 2 + len(split_programs(what)) if len(what.ranks) > 1 else 0
    return sum(map(len, [*steps, *ops])) + len(launched(what, device)) + others + several + _FIT_PHASES


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
        for t, plan in split_programs(what):
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


def _links(what: Suite, device: str, phases: _Phases) -> Links:
    """The links between two ranks; without a second device those of a loop within the first, which are never used."""
    if len(what.ranks) < 2:
        return Links(0.0, 1e10, 0.0, 0.0, 1e10)
    from distir.backends.processes.bench_collectives import bench_collectives

    phases.next("measuring collectives")
    backend = "nccl" if device == "cuda" else "gloo"
    rows = bench_collectives(2, backend, ["all-reduce", "send-recv"], what.sizes)
    return fit_links(*([(t.size, t.seconds) for t in rows if t.collective == c] for c in ("send-recv", "all-reduce")))


def _measure_steps(parts: Sequence[Suite], options: RunOptions, phases: _Phases) -> dict[int, list[TimedStep]]:
    """By numbers of ranks; of steps that are in several parts the geometric mean."""
    times: dict[tuple[int, Training, Plan], list[TimedStep]] = {}
    for what in parts:
        for n in what.ranks:
            for t, plans in timed(what, n):
                for plan in plans:
                    phases.next(f"measuring steps on {counted(n, 'rank')}")
                    alone = min([s.seconds for s in times.get((1, t, Plan()), ())], default=None)
                    done = measure_step(t.model(), plan, steps_on(n, t, alone), options)
                    times.setdefault((n, t, plan), []).append(done)
    found: dict[int, list[TimedStep]] = {}
    for (n, _, _), same in times.items():
        found.setdefault(n, []).append(same[0]._replace(seconds=geometric_mean([s.seconds for s in same])))
    for t in launched(parts[0], options.device):
        phases.next("measuring steps whose kernels the host launches")
        found.setdefault(1, []).append(measure_step(t.model(), Plan(), t.steps, options, launched=True))
    return found


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
