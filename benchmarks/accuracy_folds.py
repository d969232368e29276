"""Benchmark of accuracy on rows that no figure was fitted to: figures are fitted again without them.

    python benchmarks/accuracy_folds.py [--file FILE.csv] [--folds K] [--small] [--json [FILE]]

The fitted figures of devices, runtimes and networks (FIGURES) are fitted to the measured steps of the file: to all, to
all but those of each of K folds (every Kth row of a source), and to all but those of each source; each time the rows
that were left out are predicted with the figures found without them. A fit makes the sum of |log(predicted / measured)|
least, with sources weighted by the square root of their rows: by least squares with weights, in the logarithms of the
figures, with slopes at the shipped ones. A figure on which no row of a fit depends is not known there; rows that depend
on it are not predicted. Errors are predicted / measured - 1; the table has their mean magnitude and the worst.

Algorithms of collectives, and figures fitted to single kernels, were fitted to other measurements: they stay.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from laps import as_json, machine, parser, table

from distir import hardware
from distir.api.accuracy import cost_of, in_turn, predict, program_of
from distir.api.cases import Measurement, read_rows
from distir.executor.cost_model import CostModel
from distir.ir.errors import DistirError
from distir.ir.function import Function
from distir.ir.topology import Topology

EXAMPLE = Path(__file__).parents[1] / "examples" / "measured.csv"
STEP = 0.03
"""Of the logarithm of a figure, to measure slopes."""
FAR = 0.5
"""How far the logarithm of a figure may go from the shipped one."""
ROUNDS = 20
CLOSE = 0.01
"""Errors below are as good as none: weights 1 / |error| end there."""


class Figure(NamedTuple):
    """A fitted figure of a "runtime", "device" or "network": of those whose name begins with `of`."""

    kind: str
    of: str
    name: str

    def __str__(self) -> str:
        return f"{self.of} {self.name}"


FIGURES = (
    *[Figure("runtime", "megatron", name) for name in ("op", "member", "call", "skew", "gap")],
    Figure("runtime", "composer", "passes"),
    Figure("device", "a100", "memory_efficiency"),
    Figure("device", "h100-sxm", "early"),
    Figure("device", "b200", "compute_efficiency"),
    Figure("network", "infiniband-edr", "partial_share"),
)


class Rows:
    """The rows that can be predicted, with their programs, and the errors of predictions."""

    def __init__(self, rows: Sequence[Measurement], figures: Sequence[Figure]) -> None:
        self.rows: list[Measurement] = []
        self.programs: list[Function] = []
        self.figures = figures
        for row in rows:
            if row.setup is None or row.measured_seconds is None:
                continue
            try:
                self.programs.append(program_of(row))
            except DistirError:
                continue
            self.rows.append(row)
        self.sources = [row.source for row in self.rows]
        counts = {source: self.sources.count(source) for source in self.sources}
        self.weights = np.array([counts[source] ** -0.5 for source in self.sources])
        self.shipped = np.array([self.error(k, np.zeros(len(figures))) for k in range(len(self.rows))])
        self.slopes = np.array([[self.slope(k, n) for n in range(len(figures))] for k in range(len(self.rows))])

    def uses(self, k: int, figure: Figure) -> bool:
        """Whether a row's run had what a figure belongs to."""
        return part_of(self.rows[k], figure.kind).startswith(figure.of)

    def error(self, k: int, factors: np.ndarray) -> float:
        """log(predicted / measured) of a row, with the shipped figures times exp(`factors`)."""
        row, cost = self.rows[k], cost_of(self.rows[k])
        cluster, runtime = cost.topology.regular, cost.runtime
        assert cluster is not None
        assert runtime is not None
        assert row.measured_seconds is not None
        for figure, factor in zip(self.figures, np.exp(factors).tolist(), strict=True):
            if not self.uses(k, figure):
                continue
            if figure.kind == "runtime":
                runtime = replace(runtime, **{figure.name: getattr(runtime, figure.name) * factor})
            elif figure.kind == "device":
                given = {figure.name: getattr(cluster.spec, figure.name) * factor}
                cluster = replace(cluster, spec=replace(cluster.spec, **given))
            else:  # the share that groups of some devices of each node reach
                by = tuple([(n, bus * factor) for n, bus in cluster.inter.bus_by])
                cluster = replace(cluster, inter=cluster.inter._replace(bus_by=by))
        cost = CostModel(Topology(cluster), runtime=runtime)
        return math.log(predict(row, self.programs[k], cost).seconds / row.measured_seconds)

    def slope(self, k: int, n: int) -> float:
        """By how much a row's error changes with the logarithm of a figure, per one."""
        if not self.uses(k, self.figures[n]):
            return 0.0
        return (self.error(k, np.eye(len(self.figures))[n] * STEP) - self.shipped[k]) / STEP

    def fitted(self, here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By how much the logarithms of figures change when fitted to the rows `here`, and which of them are known."""
        slopes, errors, weights = self.slopes[here], self.shipped[here], self.weights[here]
        known = np.abs(slopes).max(axis=0, initial=0.0) > 0
        found = np.zeros(len(self.figures))
        for _ in range(ROUNDS):
            w = weights / np.maximum(np.abs(errors + slopes @ found), CLOSE)
            normal = slopes[:, known].T @ (w[:, None] * slopes[:, known])
            normal += 1e-3 * np.diag(np.diag(normal))
            found[known] = -np.linalg.solve(normal, slopes[:, known].T @ (w * errors))
            found = np.clip(found, -FAR, FAR)
        return found, known

    def held_out(self, without: Callable[[int], object]) -> list[float | None]:
        """The error of each row by figures fitted to rows of which `without` differs; None if some are not known."""
        groups = [without(k) for k in range(len(self.rows))]
        out: list[float | None] = [None] * len(self.rows)
        for group in dict.fromkeys(groups):
            found, known = self.fitted(np.array([g != group for g in groups]))
            for k in [k for k, g in enumerate(groups) if g == group]:
                needed = self.slopes[k] != 0
                if needed.any() and known[needed].all():
                    out[k] = math.expm1(self.error(k, found))
        return out


@cache
def _parts(cluster: str) -> dict[str, str]:
    """The names of a cluster's device and network; "" for one that its file writes out."""
    path = Path(cluster) if cluster.endswith(".toml") else Path(hardware.__file__).parent / f"{cluster}.toml"
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return {kind: name for kind in ("device", "network") if isinstance(name := found.get(kind, ""), str)}


def part_of(row: Measurement, kind: str) -> str:
    """The name of the runtime, device or network of a row's run."""
    assert row.setup is not None
    return row.runtime if kind == "runtime" else _parts(row.setup.cluster).get(kind, "")


def mean_and_worst(errors: Sequence[float | None]) -> tuple[float, float] | None:
    """Of the magnitudes; None if no row has an error."""
    sizes = [abs(e) for e in errors if e is not None]
    return (sum(sizes) / len(sizes), max(sizes)) if sizes else None


def measure(rows: Rows, folds: int) -> dict[str, dict[str, object]]:
    """Of each source the number of rows, and mean and worst error as shipped, of held-out folds, and if left out."""
    place = [rows.sources[:k].count(source) for k, source in enumerate(rows.sources)]
    errors = {
        "shipped": [math.expm1(e) for e in rows.shipped.tolist()],
        "fold held out": rows.held_out(lambda k: place[k] % folds),
        "source left out": rows.held_out(lambda k: rows.sources[k]),
    }
    found: dict[str, dict[str, object]] = {}
    for source in dict.fromkeys(rows.sources):
        here = [k for k, s in enumerate(rows.sources) if s == source]
        scores = {way: mean_and_worst([given[k] for k in here]) for way, given in errors.items()}
        found[source] = {"rows": len(here), **scores}
    return found


def text_of(found: dict[str, dict[str, object]]) -> str:
    """The table."""
    ways = "shipped", "fold held out", "source left out"
    lines: list[list[str]] = []
    for source, scores in found.items():
        cells = [f"{x[0]:.1%} ({x[1]:.0%})" if isinstance(x := scores[way], tuple) else "-" for way in ways]
        lines.append([source, str(scores["rows"]), *cells])
    return table(["source", "rows", *[f"{way}: mean (worst)" for way in ways]], lines)


def main() -> None:
    flags = parser(__doc__, 1)
    flags.add_argument(
        "--file", type=Path, default=EXAMPLE, help="measured runs (docs/accuracy.md); default: %(default)s"
    )
    flags.add_argument("--folds", type=int, default=5, metavar="K", help="default: 5")
    flags.add_argument("--small", action="store_true", help="few rows of each source, two figures, two folds")
    args = flags.parse_args()
    measured, figures, folds = read_rows(args.file), FIGURES, args.folds
    if args.small:
        measured, figures, folds = measured[:4], FIGURES[:2], 2
    rows = Rows(in_turn(measured), figures)
    found = measure(rows, folds)
    every, known = rows.fitted(np.ones(len(rows.rows), bool))
    fit = {str(f): float(x) for f, x in zip(figures, np.exp(every), strict=True)}
    if as_json(args.json, {"machine": machine(), "sources": found, "fitted_over_shipped": fit}):
        return
    print(text_of(found))
    print("\nfigures fitted to all rows, as multiples of the shipped ones:")
    for figure, factor, is_known in zip(figures, np.exp(every), known, strict=True):
        print(f"  {figure} {f'{factor:.3f}' if is_known else '-'}")


if __name__ == "__main__":
    main()
