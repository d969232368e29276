"""Benchmark of collectives on sizes that no figure was fitted to: figures are fitted again without them.

    python benchmarks/collective_folds.py [--json [FILE]]

The figures of the communication library's algorithms, which are shipped as fitted to all measured all-reduces of a
system in ../shared/accuracy (those of A100 with none of 64 KiB and more over 20 % off), are fitted again to those of
every second size, and, where several numbers of devices were measured, to those without 3, 5 and 7; each time the
others are predicted. A fit makes the sum of squared log(predicted / measured) least, searched from the shipped
figures, each times a random factor of up to 1.5 either way; the best of several counts. Errors are |predicted /
measured - 1|, of 32 KiB and more; `worst` of 64 KiB and more.

The bandwidth of the links stays as it is shipped, also where it differs among 2, 3, ... devices (the hybrid cube mesh
of V100).
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from laps import as_json, machine, parser, table

from distir.executor.cost_model.fitting import nearest
from distir.hardware import load_cluster
from distir.ir.topology import Algorithm, Topology

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.executor.cost_model.test_measured_collectives import CASES, SHARED, SMALL, ratios

Row = tuple[int, int, float]
"""Devices, bytes, seconds."""
FIELDS = "base", "intra", "inter", "share", "saturation"
STARTS = 4
"""Points from which a fit is searched."""
FACTOR = 1.5
"""How far these are from the shipped figures at most."""
LIMIT = 30.0
"""How far figures may be from the shipped ones."""


class System:
    """The shipped cluster of a case, with its figures as positive numbers."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        most = max([n for n, _, _ in rows])
        regular = load_cluster(name, devices=most).regular
        assert regular is not None
        self.regular, self.field = regular, "over_nodes" if most > regular.per_node else "algorithms"
        self.algorithms: tuple[Algorithm, ...] = getattr(regular, self.field)
        self.places = [(k, f) for k, a in enumerate(self.algorithms) for f in FIELDS if getattr(a, f) > 0]
        self.shipped = [getattr(self.algorithms[k], f) for k, f in self.places]

    def ratios(self, figures: Sequence[float], rows: Sequence[Row]) -> list[float]:
        """Predicted / measured, with these figures."""
        made = list(self.algorithms)
        for (k, f), x in zip(self.places, figures, strict=True):
            made[k] = made[k]._replace(**{f: x})
        return ratios(Topology(replace(self.regular, **{self.field: tuple(made)})), rows)

    def fitted(self, rows: Sequence[Row]) -> list[float]:
        """The figures with which these rows are predicted best."""

        def far(x: Sequence[float]) -> list[float]:
            return [math.log(r) for r in self.ratios(x, rows)]

        found: list[tuple[float, list[float]]] = []
        for seed in range(STARTS):
            draw = random.Random(seed)
            start = [x * FACTOR ** draw.uniform(-1, 1) for x in self.shipped]
            best = nearest(far, start, [(x / LIMIT, x * LIMIT) for x in self.shipped])
            found.append((sum([x * x for x in far(best)]), best))
        return min(found)[1]


def folds(rows: Sequence[Row]) -> dict[str, Callable[[Row], bool]]:
    """By name, which rows are left out."""
    sizes = sorted({size for _, size, _ in rows})
    second = set(sizes[1::2])
    found: dict[str, Callable[[Row], bool]] = {"every second size": lambda row: row[1] in second}
    if len({n for n, _, _ in rows}) > 1:
        found["3, 5 and 7 devices"] = lambda row: row[0] in (3, 5, 7)
    return found


def errors(found: Sequence[tuple[float, Row]]) -> tuple[float, float]:
    """The mean error, and the worst of 64 KiB and more, of (predicted / measured, row)."""
    off = [(abs(ratio - 1), size) for ratio, (_, size, _) in found]
    return sum([x for x, _ in off]) / len(off), max([x for x, size in off if size >= SMALL])


def main() -> None:
    args = parser(__doc__, 1).parse_args()
    if not SHARED.exists():
        raise SystemExit("no measurements: ../shared is absent")
    pairs: dict[str, dict[str, list[tuple[float, Row]]]] = {}
    for case, (cluster, measured) in CASES.items():
        rows = measured()
        system = System(cluster, rows)
        pairs[case] = {"shipped": list(zip(system.ratios(system.shipped, rows), rows, strict=True))}
        for name, left_out in folds(rows).items():
            figures = system.fitted([row for row in rows if not left_out(row)])
            held = [row for row in rows if left_out(row)]
            pairs[case][f"without {name}"] = list(zip(system.ratios(figures, held), held, strict=True))
    names = list(dict.fromkeys([name for found in pairs.values() for name in found]))
    pairs["all"] = {n: [pair for found in pairs.values() for pair in found.get(n, [])] for n in names}
    out = {case: {n: errors(x) for n, x in found.items()} for case, found in pairs.items()}
    if as_json(args.json, {"machine": machine(), "errors": out}):
        return
    cells = [
        [case, *[f"{found[n][0]:.1%} ({found[n][1]:.0%})" if n in found else "-" for n in names]]
        for case, found in out.items()
    ]
    print(table(["all-reduces: mean error (worst)", *names], cells))


if __name__ == "__main__":
    main()
