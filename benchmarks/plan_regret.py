"""Benchmark of the choice of a plan: what `distir plan` chooses for this machine, against all plans, measured.

    python benchmarks/plan_regret.py [--runs N] [--cluster FILE.toml] [--vary A,B,...] [--json [FILE]]

`distir calibrate` runs first (or give its file with --cluster). For each model, on 1, 2 and 4 gloo ranks of one thread,
the quickest plan is searched for; then every plan that fits is run once. Its time is the median step. Steps of one
plan differ from run to run by a fifth and more, and of many plans the least is one that had luck; so the plans that
took at most 30 % longer than the least, and the chosen one, are run N times more, in turns, and their times are the
medians over these runs alone. Regret is the time of the chosen plan over the least of all, less 1; goal: 10 %. Beside
it stands the regret of one who takes the plan that was the quickest when each was run once.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from laps import as_json, machine, parser, table
from prediction import SMALL, model_named, say

import distir
from distir.api.calibrate import calibrate
from distir.hardware import load_cluster
from distir.search.space import space

VARY = ("dp", "tp", "pp", "microbatch")
STEPS = {"mlp": 8, "gpt2": 6, "llama": 6, "mlp-tiny": 20}
"""Steps of a run, after the first."""
NEAR = 0.30
"""How much longer than the least a plan may have taken, to be run again."""
GOAL = 0.10


@dataclass
class Choice:
    """One model on so many ranks: the chosen plan, its predicted milliseconds, those of all plans when each was run
    once, and those of the runs after that, of the plans that were near to the least."""

    model: str
    ranks: int
    chosen: str
    predicted_ms: float
    once_ms: dict[str, float] = field(default_factory=dict)
    again_ms: dict[str, list[float]] = field(default_factory=dict)

    def near(self) -> list[str]:
        """The plans to run again."""
        most = min(self.once_ms.values()) * (1 + NEAR)
        return [plan for plan, ms in self.once_ms.items() if ms <= most or plan == self.chosen]

    def median_ms(self, plan: str) -> float:
        return statistics.median(self.again_ms[plan])

    @property
    def best(self) -> str:
        return min(self.again_ms, key=self.median_ms)

    @property
    def regret(self) -> float:
        """How much longer the chosen plan takes than the quickest."""
        return self.median_ms(self.chosen) / self.median_ms(self.best) - 1

    @property
    def of_measuring(self) -> float:
        """The regret of choosing the plan that was the quickest when each was run once."""
        return self.median_ms(min(self.once_ms, key=self.once_ms.__getitem__)) / self.median_ms(self.best) - 1

    @property
    def cells(self) -> list[str]:
        return [
            self.model,
            str(self.ranks),
            str(len(self.once_ms)),
            str(len(self.again_ms)),
            self.chosen,
            f"{self.predicted_ms:.2f}",
            f"{self.median_ms(self.chosen):.2f}",
            f"{self.regret:.0%}",
            self.best,
            f"{self.median_ms(self.best):.2f}",
            f"{self.of_measuring:.0%}",
        ]


HEADER = ["model", "ranks", "plans", "near", "chosen", "predicted, ms", "ms", "regret", "quickest", "ms"]
HEADER += ["of measuring once"]


def training_step(name: str) -> distir.Model:
    """The models of `prediction.py`, and a Llama-like of the sizes of its GPT-2."""
    if name != "llama":
        return model_named(name)
    sizes = "llama:layers=4,hidden=256,heads=4,vocab=8192,seq=128"
    return distir.load(sizes, {"batch": 8}, loss="cross-entropy", optimizer="adamw")


def measure(names: Sequence[str], ranks: Sequence[int], runs: int, cluster: str, vary: Sequence[str]) -> list[Choice]:
    """Search for each model and number of ranks; then run all plans once, and those near to the least N times more."""
    choices: dict[tuple[str, int], Choice] = {}
    models = {name: training_step(name) for name in names}
    for name, model in models.items():
        for n in ranks:
            best = distir.plan(model, cluster, n, top=1, vary=vary).rows[0]
            choices[name, n] = Choice(name, n, str(best.plan), best.seconds * 1e3)
    plans: dict[tuple[str, int], dict[str, distir.Plan]] = {}
    for (name, n), choice in choices.items():
        model = models[name]
        every = space(model.function, model.batch, n, load_cluster(cluster, devices=n), vary).candidates
        plans[name, n] = {str(plan): plan for plan in [candidate.plan(model.batch) for candidate in every]}
        for text, plan in plans[name, n].items():
            try:
                choice.once_ms[text] = step_ms(name, model, plan, cluster)
            except distir.ir.errors.InfeasibleError as e:
                print(f"{name} {plan}: {e}", file=sys.stderr)
    for _ in range(runs):
        for (name, n), choice in choices.items():
            for text in choice.near():
                choice.again_ms.setdefault(text, []).append(step_ms(name, models[name], plans[name, n][text], cluster))
    return list(choices.values())


def step_ms(name: str, model: distir.Model, plan: distir.Plan, cluster: str) -> float:
    """Run a few steps: the median milliseconds of one. Raises InfeasibleError for a plan that does not fit."""
    done = distir.run(model, plan, steps=STEPS[name] + 1, cluster=cluster, timeout=120)
    found = statistics.median(done.seconds[1:]) * 1e3
    print(f"{name}: {plan}: {found:.2f} ms", file=sys.stderr)
    return found


def main() -> None:
    flags = parser(__doc__, runs=5)
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
        "worst": max([c.regret for c in choices]),
        "results": [asdict(c) | {"regret": c.regret, "of_measuring": c.of_measuring} for c in choices],
    }
    if as_json(args.json, found):
        return
    print(f"{machine()}\n\n{table(HEADER, [c.cells for c in choices])}")
    print(f"worst regret {found['worst']:.0%}, goal {GOAL:.0%}")


if __name__ == "__main__":
    main()
