"""Benchmark of training steps against DDP, FSDP2 and torch.distributed.pipelining, on 2 gloo ranks of one thread.

    python benchmarks/execution.py [--only mlp|gpt2|ddp|fsdp|pipeline|model-parallel ...] [--runs N] [--seconds S]
                                   [--json [FILE]] [--sweep]

All competitors of a table are started first, and then alternate in turns of about S seconds, for N rounds. They have
the same initial weights, data, optimizer (torch's fused SGD, except FSDP2, whose tensors do not support it), types and
number of threads; the losses of their first steps are compared and printed. Times are per step: all ranks start
together, and the slower counts. A ratio is the median over rounds of the peer's time divided by distir's in the same
round. The peers' scripts and settings are in benchmarks/peers; `--sweep` times all candidate settings. `--only` selects
the rows that have all the words given.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laps import as_json, machine, parser, table
from peers import settings
from peers.teams import CHECKED_STEPS, Entry, Team, alternate, started

SIZES = {
    "mlp": {"layers": 8, "width": 1024},
    "gpt2": {"layers": 4, "width": 256, "heads": 4, "vocab": 8192, "seq": 128},
}
SMALL = {
    "mlp": {"layers": 8, "width": 32},
    "gpt2": {"layers": 4, "width": 16, "heads": 2, "vocab": 64, "seq": 8},
}
BATCH = {"mlp": 256, "gpt2": 8}
"""Samples per step, over both ranks."""
RATE = {"mlp": 0.05, "gpt2": 0.5}
"""Learning rate: high enough that a few steps change the loss by more than rounding does."""
MICROBATCHES = 8
SAME_LOSS = 1e-4
"""Relative tolerance of the losses of the first steps: all compute in float32, in different orders."""


@dataclass
class Row:
    """A comparison of two teams, by name; `goal` is the speed-up that distir should reach, None if there is no goal."""

    words: tuple[str, ...]
    ours: str
    peer: str
    goal: float | None


class Plans:
    """The teams of one model, by name, and the rows of its table."""

    def __init__(self, model: str, small: bool, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.sizes = (SMALL if small else SIZES)[model]
        self.file = folder / f"{model}.onnx"
        self.entries: dict[str, Entry] = {}
        self.rows: list[Row] = []

    def entry(self, script: str, options: Mapping[str, Any]) -> Entry:
        work = {"model": self.model, "sizes": self.sizes, "batch": BATCH[self.model], "lr": RATE[self.model]}
        return Entry(script, work, options)

    def ours(self, name: str, mkl: bool = False, **plan: Any) -> str:
        """A plan of distir; `mkl`: with matrix products by MKL, like the peers."""
        self.entries[name] = self.entry("ours", {"model": str(self.file), "plan": plan, "mkl": mkl})
        return name

    def peer(self, name: str, script: str, options: Mapping[str, Any]) -> str:
        self.entries[name] = self.entry(script, options)
        return name

    def row(self, words: str, ours: str, peer: str, goal: float | None) -> None:
        self.rows.append(Row((self.model, *words.split()), ours, peer, goal))

    def export(self) -> None:
        """Write the ONNX file for distir."""
        from peers.models import Work, export

        work = Work(self.model, self.sizes, 1, 0.0)
        export.export(work.exported, self.file, work.ids_only, **self.sizes)

    def only(self, words: Sequence[str]) -> None:
        """Remove the rows without all of these words, and the teams that are in no row."""
        self.rows = [row for row in self.rows if set(words) <= set(row.words)]
        used = {name for row in self.rows for name in (row.ours, row.peer)}
        self.entries = {name: entry for name, entry in self.entries.items() if name in used}


def data_parallel(plans: Plans) -> None:
    """Comparisons with DDP and FSDP2."""
    model = plans.model
    ours = plans.ours("dp 2", dp=2)
    default = plans.peer("DDP", "ddp", settings.DDP_DEFAULT[model])
    tuned = plans.peer("DDP tuned", "ddp", settings.DDP[model][0])
    plans.row("ddp", ours, default, 1.15 if model == "mlp" else None)
    same = plans.ours("dp 2, bucket 4", dp=2, bucket_mb=settings.TUNED["bucket_cap_mb"])
    plans.row("ddp", same, tuned, 1.08 if model == "mlp" else 1.0)
    plans.row("ddp", ours, tuned, None)
    plans.row("ddp", plans.ours("dp 2, MKL", mkl=True, dp=2), tuned, None)
    zero = plans.ours("dp 2, zero 3", dp=2, zero=3)
    plans.row("fsdp", zero, plans.peer("FSDP2", "fsdp", settings.FSDP[model][0]), 1.3)


def pipelines(plans: Plans) -> None:
    """Comparisons with torch.distributed.pipelining."""
    for schedule, name in settings.SCHEDULES.items():
        chunks = 2 if schedule == "interleaved" else 1
        plan = {"pp": 2, "microbatches": MICROBATCHES, "schedule": schedule, "chunks": chunks}
        options = settings.PIPELINE[plans.model, schedule][0]
        peer = plans.peer(name, "pipelining", {"schedule": name, "microbatches": MICROBATCHES, **options})
        plans.row("pipeline", plans.ours(schedule, **plan), peer, 1.15 if plans.model == "mlp" else 1.0)
        if schedule == "1f1b":
            plans.row("pipeline", plans.ours("1f1b, MKL", mkl=True, **plan), peer, None)


def model_parallel(plans: Plans) -> None:
    """distir without microbatches compared with distir pipelined."""
    whole = plans.ours("pp 2, m 1", pp=2)
    for m in (4, 8):
        plans.row("model-parallel", plans.ours(f"pp 2, m {m}", pp=2, microbatches=m), whole, None)


def candidates(model: str, small: bool, folder: Path) -> Iterator[Plans]:
    """For each peer the teams of its candidate settings, compared with the first, which the other tables use."""
    kinds = [("ddp", settings.DDP[model]), ("fsdp", settings.FSDP[model])]
    for schedule, name in settings.SCHEDULES.items():
        common = {"schedule": name, "microbatches": MICROBATCHES}
        kinds.append(("pipelining", [common | options for options in settings.PIPELINE[model, schedule]]))
    for script, tried in kinds:
        plans = Plans(model, small, folder)
        names = [plans.peer(f"{script} {json.dumps(options)}", script, options) for options in tried]
        for name in names[1:]:
            plans.row(script.replace("pipelining", "pipeline"), names[0], name, None)
        yield plans


@dataclass
class Result:
    """The result of one row: milliseconds per step of distir and the peer, by round; `ratio` is their median."""

    words: tuple[str, ...]
    ours: str
    peer: str
    ours_ms: list[float]
    peer_ms: list[float]
    ratio: float
    goal: float | None

    @property
    def cells(self) -> list[str]:
        ratios = [p / o for p, o in zip(self.peer_ms, self.ours_ms, strict=True)]
        goal = "" if self.goal is None else f"{self.goal:.2f}"
        met = "" if self.goal is None else "yes" if self.ratio >= self.goal else "no"
        ms = [f"{statistics.median(x):.1f}" for x in (self.ours_ms, self.peer_ms)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return [self.words[0], self.ours, self.peer, *ms, f"{self.ratio:.2f}", spread, goal, met]


HEADER = ["model", "ours", "peer", "ours, ms", "peer, ms", "ratio", "of rounds", "goal", "met"]


def measure(plans: Plans, runs: int, seconds: float) -> tuple[list[Result], dict[str, list[float]]]:
    """The results of the rows, and each team's losses in its first steps. Raises SystemExit if these differ."""
    with started(plans.entries, plans.folder) as teams:
        print(f"{plans.model}: {', '.join(team.name for team in teams)}", file=sys.stderr)
        times = alternate(teams, runs, seconds)
        losses = same_losses(teams)
    results: list[Result] = []
    for row in plans.rows:
        ours, peer = ([s * 1e3 for s in times[name]] for name in (row.ours, row.peer))
        ratio = statistics.median(p / o for p, o in zip(peer, ours, strict=True))
        results.append(Result(row.words, row.ours, row.peer, ours, peer, ratio, row.goal))
        print(f"  {row.ours}: {ratio:.2f} times as quick as {row.peer}", file=sys.stderr)
    return results, losses


def same_losses(teams: Sequence[Team]) -> dict[str, list[float]]:
    losses = {team.name: team.losses[:CHECKED_STEPS] for team in teams}
    first = teams[0]
    for team in teams:
        for k, (a, b) in enumerate(zip(losses[first.name], losses[team.name], strict=True)):
            if not abs(a - b) <= SAME_LOSS * abs(a):
                raise SystemExit(
                    f"step {k}: {first.name} has the loss {a}, {team.name} {b}: they compute different things"
                )
    return losses


def predictions(plans: Plans) -> list[list[str]]:
    """The simulator's predictions for the plans without and with microbatches."""
    import distir
    from distir.transforms.differentiation.training import SGD

    model = distir.load(plans.file, {"batch": BATCH[plans.model]}, loss="cross-entropy", optimizer=SGD())
    found = [distir.simulate(model, distir.Plan(pp=2, microbatches=m)).step_seconds * 1e3 for m in (1, 4, 8)]
    return [[f"pp 2, m {m}", f"{ms:.1f}", f"{found[0] / ms:.2f}"] for m, ms in zip((1, 4, 8), found, strict=True)]


def main() -> None:
    flags = parser(__doc__, 5)
    words = ["mlp", "gpt2", "ddp", "fsdp", "pipeline", "model-parallel"]
    flags.add_argument("--only", nargs="+", default=[], choices=words, metavar="WORD", help=", ".join(words))
    flags.add_argument("--seconds", type=float, default=1.0, metavar="S", help="length of a turn; default: 1")
    flags.add_argument("--sweep", action="store_true", help="time all candidate settings of the peers")
    flags.add_argument("--small", action="store_true", help="tiny models, to test the script")
    args = flags.parse_args()
    results: list[Result] = []
    losses: dict[str, Any] = {}
    predicted: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="distir-") as name:
        for plans in _all(args, Path(name)):
            plans.only(args.only)
            if plans.rows:
                plans.export()
                found, losses_here = measure(plans, args.runs, args.seconds)
                results += found
                losses[" ".join(plans.rows[0].words)] = losses_here
                predicted += predictions(plans) if "model-parallel" in plans.rows[0].words else []
    _tell(args, results, losses, predicted)


def _all(args: Any, folder: Path) -> Iterator[Plans]:
    for model in SIZES:
        if args.sweep:
            yield from candidates(model, args.small, folder)
            continue
        for build in (data_parallel, pipelines, *([model_parallel] if model == "gpt2" else [])):
            plans = Plans(model, args.small, folder)
            build(plans)
            yield plans


def _tell(args: Any, results: Sequence[Result], losses: Mapping[str, Any], predicted: list[list[str]]) -> None:
    import torch

    where = f"{machine()}, torch {torch.__version__}, 2 gloo ranks, one thread each"
    found = {
        "machine": where,
        "results": [asdict(r) for r in results],
        "losses": losses,
        "predicted": predicted,
    }
    if as_json(args.json, found):
        return
    print(f"{where}\n\n{table(HEADER, [r.cells for r in results])}")
    checked = [
        [f"{group}: {name}", f"{row[0]:.5f}", f"{row[-1]:.5f}"]
        for group, teams in losses.items()
        for name, row in teams.items()
    ]
    print(f"\n{table(['loss', 'first step', f'step {CHECKED_STEPS}'], checked)}")
    if predicted:
        print(f"\n{table(['predicted', 'ms', 'speed-up'], predicted)}")


if __name__ == "__main__":
    main()
