"""Benchmark of proxies over MPI against the same sequences in plain C++ and MPI (benchmarks/mpi).

    python benchmarks/proxies.py [--only dlrm|gpt2|cosmoflow|verbatim|plan|2|4 ...] [--runs N] [--iterations N]
                                 [--poll] [--json [FILE]]

Needs the extra `mpi`, whose mpirun and mpicxx it uses. "verbatim": `distir run proxy-NAME --proxy`, the published
sequence; "plan": our own plan of the model, which sleeps as long as the sequence's layers or passes. distir and C++
take turns of N iterations each, for so many rounds. An iteration begins at a barrier, and its slowest rank counts; the
figure of a turn is the median of its iterations, the ratio the median over rounds of distir's divided by C++'s. "least"
is the quickest iteration of all, which other programs on the machine disturb least. Both sleep to the microsecond;
with `--poll` C++, too, lets MPI progress while it sleeps.

Before each round the network is measured (`distir bench collectives --out`), with pauses where the sequence computes;
"predicted" is the simulator's time with it, and the error the median of predicted / measured - 1.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from laps import as_json, machine, parser, table

HERE = Path(__file__).parent
ROOT = HERE.parent
GOAL = 1.05
"""What verbatim sequences may take, relative to C++; our own plans 1."""
FORWARD = 6567, 13135, 6567, 3283, 1641, 5, 3, 1
BACKWARD = 2, 6, 10, 3283, 6567, 13135, 26270, 13135
TIMES = {
    "dlrm": """
prologue0 = 0
[layers]
bottom = {forward = 341, backward = 682, update = 0}
tables = {forward = 304, backward = 209, update = 190}  # with the products of their rows: 95 + 209
top = {forward = 455, backward = 910, update = 0}
""",
    "cosmoflow": f"prologue0 = 0\nfwd0 = {sum(FORWARD)}\nbwd0 = {sum(BACKWARD)}\nupdate0 = 0\n",
}
"""Microseconds of the sequences' compute, as our own plans take it."""
SECONDS = 600


class Case(NamedTuple):
    """Two programs on `ranks` ranks: the words of `distir run`, and the sequence in C++ with its flags."""

    name: str
    kind: str
    ranks: int
    ours: Sequence[str]
    peer: Sequence[str]
    pause: int = 1000
    """Microseconds of compute between communication, as a rule."""


def tables(ranks: int) -> list[str]:
    """Our own plan, with the sequence's messages: its all-to-all is that of a batch of 2,048 on 4 ranks, and a bucket
    holds the gradients of the top network."""
    split = f"ep={ranks}:dense.0,labels.0,tables.0,indices.1"
    return [f"dlrm:batch={512 * ranks}", "--split", split, "--bucket-mb", "2.6"]


VOLUMES = ["--split", "h=2:x.2,dense.*.weight.1", "--split", "w=2:x.3,dense.*.weight.1"]
CASES = [
    Case("dlrm", "verbatim", 2, ["proxy-dlrm:ranks=2"], ["dlrm"]),
    Case("gpt2", "verbatim", 2, ["proxy-gpt2-large:layers=8,stages=2,dp=1"], ["gpt2", "layers=8", "stages=2"], 0),
    Case("dlrm", "verbatim", 4, ["proxy-dlrm:ranks=4"], ["dlrm"]),
    Case("cosmoflow", "verbatim", 4, ["proxy-cosmoflow:dp=1,h=2,w=2"], ["cosmoflow", "h=2", "w=2"]),
    Case("dlrm", "plan", 2, tables(2), ["dlrm"]),
    Case("dlrm", "plan", 4, tables(4), ["dlrm"]),
    Case("cosmoflow", "plan", 4, ["cosmoflow", *VOLUMES], ["cosmoflow", "h=2", "w=2"]),
]


@dataclass
class Result:
    """Milliseconds of an iteration by round, and the least of all; ratios are distir's by C++'s."""

    name: str
    kind: str
    ranks: int
    ours_ms: list[float]
    peer_ms: list[float]
    ours_least_ms: float
    peer_least_ms: float
    predicted: list[tuple[float, float]]
    """(predicted, measured) ms of each round."""

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours_ms, self.peer_ms, strict=True)]

    @property
    def cells(self) -> list[str]:
        ratio, goal = statistics.median(self.ratios), GOAL if self.kind == "verbatim" else 1.0
        ms = [f"{statistics.median(x):.3f}" for x in (self.ours_ms, self.peer_ms)]
        least = [f"{x:.3f}" for x in (self.ours_least_ms, self.peer_least_ms)]
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"
        least_ratio = f"{self.ours_least_ms / self.peer_least_ms:.2f}"
        error = statistics.median([p / m - 1 for p, m in self.predicted])
        prediction = [f"{statistics.median([p for p, _ in self.predicted]):.3f}", f"{error:+.0%}"]
        goals = [f"{goal:.2f}", "yes" if ratio <= goal else "no"]
        return [
            f"{self.name} {self.kind}",
            str(self.ranks),
            *ms,
            f"{ratio:.2f}",
            spread,
            *least,
            least_ratio,
            *goals,
            *prediction,
        ]


HEADER = [
    "sequence",
    "ranks",
    "ours, ms",
    "C++, ms",
    "ratio",
    "of rounds",
    "ours, least",
    "C++, least",
    "ratio",
    "goal",
    "met",
    "predicted, ms",
    "error",
]


class Bench:
    """The programs, compiled, and the flags of the turns."""

    def __init__(self, folder: Path, iterations: int, poll: bool) -> None:
        self.folder, self.iterations, self.poll = folder, iterations, poll
        self.mpirun, compiler = (_tool(name) for name in ("mpirun", "mpicxx"))
        for source in sorted((HERE / "mpi").glob("*.cpp")):
            subprocess.run([compiler, "-std=c++17", "-O2", "-o", folder / source.stem, source], check=True)
        for name, times in TIMES.items():
            (folder / f"{name}.toml").write_text(times)

    def launched(self, ranks: int, line: Sequence[object]) -> str:
        """What rank 0 of a program on so many ranks prints."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env["PRTE_MCA_hwloc_default_binding_policy"] = "none"
        if ranks > (os.cpu_count() or 1):
            env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        # to a file of each rank: on a busy machine mpirun was seen to lose the end of what a rank prints
        script = f"exec {shlex.join(map(str, line))} > {shlex.quote(str(self.folder))}/out.$OMPI_COMM_WORLD_RANK"
        words = [self.mpirun, "-n", str(ranks), "sh", "-c", script]
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=SECONDS)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
        return (self.folder / "out.0").read_text()

    def network(self, case: Case) -> None:
        """Measure it, for the predictions of the turns that follow."""
        line = [sys.executable, "-m", "distir", "bench", "collectives", "--backend", "mpi"]
        self.launched(case.ranks, [*line, "--out", self.folder / "network.toml", "--pause", case.pause])

    def ours(self, case: Case) -> tuple[list[float], float]:
        """Seconds of the iterations of a turn, and those predicted of one."""
        line = [sys.executable, "-m", "distir", "run", *case.ours, "--proxy", "--backend", "mpi", "--json"]
        line += ["--iterations", str(self.iterations), "--cluster", str(self.folder / "network.toml")]
        if case.kind == "plan":
            line += ["--times", str(self.folder / f"{case.name}.toml")]
        found = json.loads(self.launched(case.ranks, line))
        return found["seconds"], found["predicted"]["step_seconds"]

    def peer(self, case: Case) -> list[float]:
        name, *flags = case.peer
        flags += [f"iterations={self.iterations}", f"poll={int(self.poll)}"]
        return [float(x) for x in self.launched(case.ranks, [self.folder / name, *flags]).split()]


def _tool(name: str) -> str:
    """A program beside this Python, else of the path."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise SystemExit(f"{name} is not here: pip install 'distir[mpi]'")
    return found


def measure(bench: Bench, case: Case, runs: int) -> Result:
    ours: list[list[float]] = []
    peers: list[list[float]] = []
    predicted: list[tuple[float, float]] = []
    for k in range(runs):
        bench.network(case)
        seconds, prediction = bench.ours(case)
        ours.append(seconds)
        predicted.append((prediction * 1e3, statistics.median(seconds) * 1e3))
        peers.append(bench.peer(case))
        print(f"  {case.name} {case.kind} on {case.ranks}: round {k + 1} of {runs}", file=sys.stderr)
    ours_ms, peer_ms = ([statistics.median(turn) * 1e3 for turn in turns] for turns in (ours, peers))
    ours_least, peer_least = (min(map(min, turns)) * 1e3 for turns in (ours, peers))
    return Result(case.name, case.kind, case.ranks, ours_ms, peer_ms, ours_least, peer_least, predicted)


def known(case: Case) -> bool:
    """Whether this distir has the model."""
    from distir.models.named import is_named

    return is_named(case.ours[0])


def main() -> None:
    flags = parser(__doc__, 9)
    words = ["dlrm", "gpt2", "cosmoflow", "verbatim", "plan", "2", "4"]
    flags.add_argument("--only", nargs="+", default=[], choices=words, metavar="WORD", help=", ".join(words))
    flags.add_argument("--iterations", type=int, default=32, metavar="N", help="of a turn; default: 32")
    flags.add_argument("--poll", action="store_true", help="C++ lets MPI progress while it sleeps")
    args = flags.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="distir-") as name:
        bench = Bench(Path(name), args.iterations, args.poll)
        for case in CASES:
            if set(args.only) <= {case.name, case.kind, str(case.ranks)} and known(case):
                results.append(measure(bench, case, args.runs))
    _tell(args, results)


def _tell(args: Any, results: Sequence[Result]) -> None:
    version = subprocess.run([_tool("mpirun"), "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    where = f"{machine()}, {version}"
    if as_json(args.json, {"machine": where, "poll": args.poll, "results": [asdict(r) for r in results]}):
        return
    print(f"{where}\n\n{table(HEADER, [r.cells for r in results])}")


if __name__ == "__main__":
    main()
