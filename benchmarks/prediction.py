"""Benchmark of predictions: calibrate this machine, then compare predicted with measured step times.

    python benchmarks/prediction.py [--runs N] [--cluster FILE.toml] [--json [FILE]]

`distir calibrate` runs first (or give its file with --cluster). Then each model is trained under each plan, on gloo
ranks of one thread; this is repeated N times. The measured time of a step is the median over these of the medians
of the steps after the first; beside it stands the fastest step of all, which other programs on the machine disturb
least. The error is predicted / measured - 1, its magnitude is averaged. On 4 ranks the order of plans counts: Kendall's
tau between predicted and measured times of one model; beside it stands that between the first run and the last, which
says how far the measured order is one, and tau over the pairs of plans that all runs measured in the same order.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laps import as_json, machine, parser, table

import distir
from distir.api.calibrate import calibrate
from distir.api.calibration_runs import Training, perceptron
from distir.api.calibration_suite import Suite
from distir.backends.processes.fork_server import preloaded
from distir.ir.type import Float32

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = {"mlp-tiny": 60, "gpt2-tiny": 40, "mlp": 10, "gpt2": 4}
"""Steps of a run, after the first."""
PLANS = {
    1: [distir.Plan()],
    2: [distir.Plan(dp=2), distir.Plan(tp=2), distir.Plan(pp=2, microbatches=4)],
    4: [
        distir.Plan(dp=4),
        distir.Plan(tp=4),
        distir.Plan(dp=2, tp=2),
        distir.Plan(dp=2, pp=2, microbatches=2),
        distir.Plan(tp=2, pp=2, microbatches=2),
        distir.Plan(pp=4, microbatches=4),
    ],
}
SMALL = Suite(
    [Training("16,32,32,8", 16, "sgd", 3), Training("8,16,16,8", 16, "sgd", 3, microbatches=(1, 2))],
    None,
    (),
    (1, 2),
    (64, 4096),
)
"""For tests of this script."""
GOALS = {"mean": 0.15, "worst": 0.30, "tau": 0.8}


def model_named(name: str) -> distir.Model:
    """The training step of a model: an MLP of 8 layers of 1,024, GPT-2 of 4 layers of 256, both tiny examples."""
    if name == "mlp":
        return distir.Model(perceptron([1024] * 9, 256, Float32)).training("mse", "sgd")
    if name == "gpt2":
        sizes = "gpt:layers=4,hidden=256,heads=4,vocab=8192,seq=128"
        return distir.load(sizes, {"batch": 8}, loss="cross-entropy", optimizer="adamw")
    if name == "mlp-tiny":
        return distir.load(EXAMPLES / "mlp.onnx", {"batch": 64}, loss="mse", optimizer="adamw")
    return distir.load(EXAMPLES / "gpt2-tiny.onnx", {"batch": 8}, loss="cross-entropy", optimizer="adamw")


@dataclass
class Result:
    """One model under one plan: milliseconds of a step, predicted with interval, and measured in each run."""

    model: str
    plan: str
    ranks: int
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: list[float]
    fastest_ms: float = float("inf")

    @property
    def median_ms(self) -> float:
        return statistics.median(self.measured_ms)

    @property
    def error(self) -> float:
        return self.predicted_ms / self.median_ms - 1

    @property
    def least_error(self) -> float:
        """The error if the fastest step counts."""
        return self.predicted_ms / self.fastest_ms - 1

    @property
    def cells(self) -> list[str]:
        interval = f"{self.low_ms:.2f} .. {self.high_ms:.2f}"
        spread = f"{min(self.measured_ms):.2f} to {max(self.measured_ms):.2f}"
        return [
            f"{self.model}: {self.plan}",
            f"{self.predicted_ms:.2f}",
            interval,
            f"{self.median_ms:.2f}",
            spread,
            f"{self.error:+.0%}",
            f"{self.fastest_ms:.2f}",
            f"{self.least_error:+.0%}",
        ]


HEADER = ["model and plan", "predicted, ms", "interval", "measured, ms", "of runs", "error", "fastest, ms", "error"]


def measure(names: Sequence[str], ranks: Sequence[int], runs: int, cluster: str) -> list[Result]:
    """Predict and measure all models under all plans, N times in turn."""
    found: dict[tuple[str, str], Result] = {}
    for turn in range(runs):
        for name, n in itertools.product(names, ranks):
            model = model_named(name)
            for plan in PLANS[n]:
                try:
                    done = distir.run(model, plan, steps=STEPS[name] + 1, cluster=cluster, timeout=120)
                except distir.ir.errors.InfeasibleError as e:
                    print(f"{name} {plan}: {e}", file=sys.stderr)
                    continue
                prediction = done.prediction
                assert prediction is not None
                low, high = prediction.interval or (prediction.step_seconds, prediction.step_seconds)
                middle, low, high = (x * 1e3 for x in (prediction.step_seconds, low, high))
                result = found.setdefault((name, str(plan)), Result(name, str(plan), n, middle, low, high, []))
                result.measured_ms.append(statistics.median(done.seconds[1:]) * 1e3)
                result.fastest_ms = min(result.fastest_ms, min(done.seconds[1:]) * 1e3)
                print(f"run {turn + 1}: {'  '.join(result.cells)}", file=sys.stderr)
    return list(found.values())


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: concordant pairs less discordant ones, as a share of all."""
    signs = [
        (a > c) - (a < c) if b == d else ((a > c) - (a < c)) * ((b > d) - (b < d))
        for (a, b), (c, d) in itertools.combinations(pairs, 2)
    ]
    return sum(signs) / len(signs) if signs else 1.0


def settled(results: Sequence[Result]) -> tuple[float, int]:
    """Kendall's tau over the pairs that all runs measured in the same order, and how many these are."""
    signs: list[int] = []
    for a, b in itertools.combinations(results, 2):
        orders = {(x > y) - (x < y) for x, y in zip(a.measured_ms, b.measured_ms, strict=True)}
        if len(orders) == 1 and 0 not in orders:
            signs.append(orders.pop() * ((a.predicted_ms > b.predicted_ms) - (a.predicted_ms < b.predicted_ms)))
    return (sum(signs) / len(signs) if signs else 1.0), len(signs)


def scores(results: Sequence[Result]) -> dict[str, Any]:
    """Mean and worst error on 1 and 2 ranks, also by model; tau on 4 ranks; the share within the interval."""
    few = [r for r in results if r.ranks <= 2]
    out: dict[str, Any] = {"goals": GOALS}
    for name in ("all", *dict.fromkeys(r.model for r in few)):
        of = [r for r in few if name in ("all", r.model)]
        errors, least = [abs(r.error) for r in of], [abs(r.least_error) for r in of]
        out[name] = {"mean": statistics.mean(errors), "worst": max(errors)}
        out[name] |= {"mean_of_fastest": statistics.mean(least), "worst_of_fastest": max(least)}
    taus: dict[str, list[float]] = {}
    again: dict[str, float] = {}
    alike: dict[str, tuple[float, int]] = {}
    for name in dict.fromkeys(r.model for r in results if r.ranks == 4):
        of = [r for r in results if r.ranks == 4 and r.model == name]
        pairs = [[(r.predicted_ms, x) for r, x in zip(of, xs, strict=True)] for xs in _measured(of)]
        taus[name] = [kendall(x) for x in pairs]
        again[name] = kendall([(r.measured_ms[0], r.measured_ms[-1]) for r in of])
        alike[name] = settled(of)
    within = [[r.low_ms <= x <= r.high_ms for r, x in zip(results, xs, strict=True)] for xs in _measured(results)]
    out |= {"tau": taus, "tau_of_runs": again, "tau_of_settled": alike}
    return out | {"within_interval": [statistics.mean(x) for x in within]}


def _measured(results: Sequence[Result]) -> list[list[float]]:
    """The medians, and the fastest."""
    return [[r.median_ms for r in results], [r.fastest_ms for r in results]]


def main() -> None:
    flags = parser(__doc__, 3)
    flags.add_argument("--cluster", metavar="FILE.toml", help="of distir calibrate; default: calibrate now")
    flags.add_argument("--small", action="store_true", help="a tiny model on one rank, to test the script")
    args = flags.parse_args()
    names, ranks = (["mlp-tiny"], [1]) if args.small else (list(STEPS), list(PLANS))
    calibration: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="distir-") as folder:
        cluster = args.cluster
        if cluster is None:
            cluster = str(Path(folder, "calibrated.toml"))
            done = calibrate("cpu", cluster, say, SMALL if args.small else None)
            print(done, file=sys.stderr)
            calibration = done.to_json() | {"file": None}
        with preloaded():
            results = measure(names, ranks, args.runs, cluster)
    _tell(args.json, results, calibration)


def say(what: str, number: int, total: int) -> None:
    """Progress of a calibration, on stderr."""
    print(f"calibrating, {number + 1} of {total}: {what}", file=sys.stderr)


def _tell(file: str | None, results: Sequence[Result], calibration: Mapping[str, Any]) -> None:
    import torch

    where = f"{machine()}, torch {torch.__version__}, gloo ranks of one thread each"
    found = scores(results)
    rows = [asdict(r) | {"error": r.error, "error_of_fastest": r.least_error} for r in results]
    out = {"machine": where, "load": os.getloadavg(), "scores": found, "results": rows, "calibration": calibration}
    if as_json(file, out):
        return
    print(f"{where}\n\n{table(HEADER, [r.cells for r in results])}\n")
    for name, x in found.items():
        if name not in ("goals", "tau", "tau_of_runs", "tau_of_settled", "within_interval"):
            fastest = f"of the fastest step {x['mean_of_fastest']:.0%}, worst {x['worst_of_fastest']:.0%}"
            print(f"{name}, 1 and 2 ranks: mean error {x['mean']:.0%}, worst {x['worst']:.0%}; {fastest}")
    for name, (tau, least) in found["tau"].items():
        runs, (same, pairs) = found["tau_of_runs"][name], found["tau_of_settled"][name]
        text = f"{name}, 4 ranks: Kendall tau {tau:.2f}; of the fastest step {least:.2f}; between runs {runs:.2f}"
        print(f"{text}; of the {pairs} pairs that all runs measured in one order {same:.2f}")
    inside, least = found["within_interval"]
    print(f"within the interval: {inside:.0%}; of the fastest step {least:.0%}")


if __name__ == "__main__":
    main()
