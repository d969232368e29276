"""Runs of proxies: real communication in its real order and size, with sleeps in place of compute."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distir.api.comparison import start_profile
from distir.api.compilation import ONE, Cluster, cost_model, distribute, plan_in_effect, predict
from distir.api.given_times import given_times
from distir.api.messages import Message, messages, most_sent
from distir.api.model import Model, loads
from distir.api.prediction import Prediction
from distir.api.results import seconds, size
from distir.api.stage_cost import OpSeconds, stage_cost
from distir.backends.processes.launch import run as launch
from distir.hardware import this_host
from distir.ir import verify
from distir.ir.errors import UsageError, counted
from distir.ir.function import Function, Op
from distir.runtime.job import Job, JobCallbacks
from distir.runtime.launcher import cores_of_ranks
from distir.runtime.options import RunOptions
from distir.transforms.plan import Plan
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.proxied import proxied

EMULATIONS = ("sleep", "spin", "none")


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """How a proxy is run.

    `emulate`: a rank's compute is slept ("sleep"), spent in a loop ("spin"), or left out ("none"). Its seconds are the
    cost model's, times `scale`; or those of `times`, a TOML file with microseconds of functions or layers, or the
    folder that a run with `profile` has written (`distir.api.given_times`). `iterations` are timed, after `warmup`
    others.

    Raises UsageError for values that are unknown or out of range.
    """

    emulate: str = "sleep"
    scale: float = 1.0
    iterations: int = 128
    warmup: int = 8
    times: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.emulate not in EMULATIONS:
            raise UsageError(f"emulate is {', '.join(EMULATIONS[:-1])} or {EMULATIONS[-1]}, got {self.emulate!r}")
        if not 0 <= self.scale < math.inf:
            raise UsageError(f"scale: expected a number from 0, got {self.scale!r}")
        for name, least in (("iterations", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}: expected at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class ProxyResult:
    """The seconds of each timed iteration, of its slowest rank, beside the prediction of the same proxy.

    `compute` is what the busiest rank sleeps in an iteration; the rest is communication that is not hidden, and
    waiting. `sent` is what ranks send in one.
    """

    options: ProxyOptions
    backend: str
    seconds: list[float]
    compute: float
    sent: list[Message]
    prediction: Prediction

    @property
    def median(self) -> float:
        """Seconds of an iteration."""
        return statistics.median(self.seconds)

    @property
    def exposed(self) -> float:
        """Seconds of an iteration in which the busiest rank does not compute."""
        return max(0.0, self.median - self.compute)

    @property
    def bytes(self) -> dict[str, int]:
        """What the rank that sends most sends of each op in an iteration, in bytes."""
        return most_sent(self.sent)

    def lines(self) -> list[str]:
        """The result in a few lines."""
        least, most = min(self.seconds), max(self.seconds)
        ratio = self.median / self.prediction.step_seconds if self.prediction.step_seconds else math.inf
        return [
            f"iteration {seconds(self.median)} (median of {counted(len(self.seconds), 'iteration')}; "
            f"{seconds(least)} to {seconds(most)}), on the slowest rank",
            f"compute {seconds(self.compute, self.median)}, "
            f"exposed communication and waiting {seconds(self.exposed, self.median)}",
            *[f"{op}: {size(n)} a rank" for op, n in self.bytes.items()],
            f"predicted {self.prediction.step()} on {self.prediction.cluster} ({ratio:.2f} times as long measured)",
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON of everything; times in seconds."""
        return {
            **self.prediction.summary.to_json(),
            "proxy": {**asdict(self.options), "times": self.options.times and os.fspath(self.options.times)},
            "backend": self.backend,
            "seconds": self.seconds,
            "iteration_seconds": self.median,
            "least_seconds": min(self.seconds),
            "most_seconds": max(self.seconds),
            "compute_seconds": self.compute,
            "exposed_seconds": self.exposed,
            "bytes": self.bytes,
            "predicted": self.prediction.to_json(),
        }

    def __str__(self) -> str:
        return "\n".join([*self.prediction.summary.lines(), "", *self.lines()])


@loads
def run_proxy(
    model: Model,
    plan: Plan = ONE,
    proxy: ProxyOptions | None = None,
    options: RunOptions | None = None,
    cluster: Cluster | None = None,
    callbacks: JobCallbacks | None = None,
) -> ProxyResult:
    """Run the proxy of a model's program under a plan, with a process per device.

    Of `options` backend, device, timeout and profile count. `cluster`: whose times are slept, and what to predict for;
    by default "cpu-2core" with this host's cores. Weights and data are never made.

    Raises as `distir.run`; UsageError for backend numpy, which has no ranks, and for a file of times that cannot be
    read or does not fit the program.
    """
    proxy, options = proxy or ProxyOptions(), options or RunOptions()
    if options.resolved_backend == "numpy":
        raise UsageError("backend numpy runs all ranks in one process, and so no proxy", "--backend gloo")
    plan = plan_in_effect(model, plan)
    cost = cost_model(this_host(plan.size, cores_of_ranks()) if cluster is None else cluster, plan)
    program = as_run(distribute(model, plan, cost.topology.devices[: plan.size], cost=stage_cost(cost, plan)))
    made = proxied(program, _seconds(model, program, proxy, OpSeconds(cost)), proxy.emulate == "spin")
    verify(made)
    prediction = predict(model, plan, made, cost)
    if options.profile is not None:
        start_profile(Path(options.profile), options.resolved_backend, prediction)
    steps = proxy.warmup + proxy.iterations
    settings = RunOptions(
        steps=steps,
        backend=options.backend,
        device=options.device,
        timeout=options.timeout,
        profile=options.profile,
        allow_nonfinite=True,
    )
    done = launch(Job(made, {}, None, steps, settings, proxy=True), callbacks or JobCallbacks())
    busiest = max([stage.compute for stage in prediction.simulation.stages], default=0.0)
    taken = done.seconds[proxy.warmup :]
    return ProxyResult(proxy, options.resolved_backend, taken, busiest, messages(made), prediction)


def _seconds(
    model: Model, program: Function, proxy: ProxyOptions, predicted: OpSeconds
) -> Callable[[Function, Op], float]:
    """What an op of a function is to take."""
    scale = 0.0 if proxy.emulate == "none" else proxy.scale
    given = {} if proxy.times is None else given_times(proxy.times, model, program, predicted)

    def seconds(function: Function, op: Op) -> float:
        known = given.get((function, op))
        return (predicted(op) if known is None else known) * scale

    return seconds
