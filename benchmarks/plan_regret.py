"""Benchmark of the choice of a plan: what `distir plan` chooses for this machine, against all plans, measured.

    python benchmarks/plan_regret.py [--runs N] [--cluster FILE.toml] [--vary A,B,...] [--json [FILE]]

`distir calibrate` runs first (or give its file with --cluster). For each model, on 1, 2 and 4 gloo ranks of one thread,
the quickest plan is searched for; then every plan that fits is run, N times in turns. The measured time of a plan is
the median over these of the median step. Regret is that of the chosen plan over the least of all, less 1; goal: 10 %.
Steps of one plan differ from run to run, and of many plans the least is one that had luck; so beside it stands the
regret of one who measures all plans in half of the runs, takes the quickest, and is judged by the other half.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laps import machine, parser, table
from prediction import SMALL, model_named, say

import distir
from distir.api.calibrate import calibrate
from distir.hardware import load_cluster
from distir.search.space import space

VARY = ("dp", "tp", "pp", "microbatch")
STEPS = {"mlp": 8, "gpt2": 4, "llama": 4, "mlp-tiny": 20}
"""Steps of a run, after the first."""
GOAL = 0.10


@dataclass
class Choice:
    """One model on so many ranks: the chosen plan, its predicted milliseconds, and those of all plans, by run."""

    model: str
    ranks: int
    chosen: str
    predicted_ms: float
    measured_ms: dict[str, list[float]] = field(default_factory=dict)

    def best(self, runs: slice) -> str:
        """The plan of the least median over some of the runs."""
        return min(self.measured_ms, key=lambda plan: statistics.median(self.measured_ms[plan][runs]))

    def regret(self, plan: str, runs: slice = slice(None)) -> float:
        """How much longer a plan takes than the quickest, in some of the runs."""
        mine, least = (statistics.median(self.measured_ms[x][runs]) for x in (plan, self.best(runs)))
        return mine / least - 1

    @property
    def of_measuring(self) -> float | None:
        """The regret of choosing by one half of the runs, judged by the other half; None with one run."""
        runs = len(self.measured_ms[self.chosen])
        first, second = slice(0, runs // 2), slice(runs // 2, None)
        if runs < 2:
            return None
        return statistics.mean([self.regret(self.best(a), b) for a, b in ((first, second), (second, first))])

    @property
    def cells(self) -> list[str]:
        best, measuring = self.best(slice(None)), self.of_measuring
        return [
            self.model,
            str(self.ranks),
            str(len(self.measured_ms)),
            self.chosen,
            f"{self.predicted_ms:.2f}",
            f"{statistics.median(self.measured_ms[self.chosen]):.2f}",
            f"{self.regret(self.chosen):.0%}",
            best,
            f"{statistics.median(self.measured_ms[best]):.2f}",
            "-" if measuring is None else f"{measuring:.0%}",
        ]


HEADER = ["model", "ranks", "plans", "chosen", "predicted, ms", "ms", "regret", "quickest", "ms", "of measuring"]


def training_step(name: str) -> distir.Model:
    """The models of `prediction.py`, and a Llama-like of the sizes of its GPT-2."""
    if name != "llama":
        return model_named(name)
    sizes = "llama:layers=4,hidden=256,heads=4,vocab=8192,seq=128"
    return distir.load(sizes, {"batch": 8}, loss="cross-entropy", optimizer="adamw")


def measure(names: Sequence[str], ranks: Sequence[int], runs: int, cluster: str, vary: Sequence[str]) -> list[Choice]:
    """Search for each model and number of ranks; then run all plans, N times in turns."""
    choices: dict[tuple[str, int], Choice] = {}
    models = {name: training_step(name) for name in names}
    for name, model in models.items():
        for n in ranks:
            best = distir.plan(model, cluster, n, top=1, vary=vary).rows[0]
            choices[name, n] = Choice(name, n, str(best.plan), best.seconds * 1e3)
    for turn in range(runs):
        for (name, n), choice in choices.items():
            model = models[name]
            topology = load_cluster(cluster, devices=n)
            for candidate in space(model.function, model.batch, n, topology, vary).candidates:
                plan = candidate.plan(model.batch)
                try:
                    done = distir.run(model, plan, steps=STEPS[name] + 1, cluster=cluster, timeout=120)
                except distir.ir.errors.InfeasibleError as e:
                    print(f"{name} {plan}: {e}", file=sys.stderr)
                    continue
                milliseconds = statistics.median(done.seconds[1:]) * 1e3
                choice.measured_ms.setdefault(str(plan), []).append(milliseconds)
                print(f"run {turn + 1}: {name}: {plan}: {milliseconds:.2f} ms", file=sys.stderr)
    return list(choices.values())


def main() -> None:
    flags = parser(__doc__, runs=2, json_file=True)
    flags.add_argument("--cluster", metavar="FILE.toml", help="of `distir calibrate`; default: it runs first")
    flags.add_argument("--vary", default=",".join(VARY), metavar="A,B,...", help=f"default: {','.join(VARY)}")
    flags.add_argument("--small", action="store_true", help="a tiny model, to test the script")
    args = flags.parse_args()
    vary = args.vary.split(",")
    names, ranks = (["mlp-tiny"], [1, 2]) if args.small else (["mlp", "gpt2", "llama"], [1, 2, 4])
    with tempfile.TemporaryDirectory() as folder:
        file = args.cluster
        if file is None:
            file = os.path.join(folder, "host.toml")
            calibrate("cpu", file, say, SMALL if args.small else None)
        choices = measure(names, ranks, args.runs, file, vary)
    found: dict[str, Any] = {
        "machine": machine(),
        "goal": GOAL,
        "worst": max([c.regret(c.chosen) for c in choices]),
        "results": [asdict(c) | {"regret": c.regret(c.chosen), "of_measuring": c.of_measuring} for c in choices],
    }
    if args.json == "-":
        print(json.dumps(found, indent=2))
        return
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    print(f"{machine()}\n\n{table(HEADER, [c.cells for c in choices])}")
    print(f"worst regret {found['worst']:.0%}, goal {GOAL:.0%}")


if __name__ == "__main__":
    main()
