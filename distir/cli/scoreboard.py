"""The command accuracy: a table of scores."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

from distir.api.accuracy import Accuracy, Scored, fits
from distir.api.accuracy import accuracy as predict_all
from distir.api.plot import accuracy_figure, format_of, save
from distir.api.results import aligned, seconds
from distir.api.scores import Scores
from distir.cli.output import Progress, print_json
from distir.ir.errors import UsageError, counted
from distir.ir.files import check_writable

_HEAD = ("source", "rows", "MAE", "p50", "p90", "worst", "bias", "Spearman", "regret", "memory error")
_ROW_HEAD = ("row", "runtime", "measured", "predicted", "error", "measured peak", "predicted peak")
_NONE = "-"
_SHOWN = 3
"""So many rows are named for each reason."""


def accuracy(args: argparse.Namespace) -> None:
    """`distir accuracy`. Raises UsageError, with the reasons, if no row can be predicted."""
    if args.plot is not None:  # before the predictions, which take time
        format_of(args.plot)
        check_writable(args.plot)
        accuracy_figure(Accuracy([], {}))
    with Progress("predicting") as progress:

        def on_row(k: int, rows: int) -> None:
            if k == 0:
                progress.phase("predicting", rows)
            progress.advance(k)

        found = predict_all(args.file, args.source, on_row)
    if args.plot is not None:
        save(accuracy_figure(found), args.plot)
    if all([scored.predicted is None for scored in found.rows]):
        error = UsageError(f"{args.file}: no row can be predicted", found.rows[0].reason)
        error.result = found.to_json()
        if not args.json:
            print("\n".join(_lines(found, args.rows)))
        raise error
    if args.json:
        print_json(found.to_json())
        return
    print("\n".join(_lines(found, args.rows)))
    if args.plot is not None:
        print(f"drawn: {args.plot}")


def _lines(found: Accuracy, each: bool) -> list[str]:
    total = {name: sum(scored.row.source == name for scored in found.rows) for name in found.sources}
    lines = [*aligned([_ROW_HEAD, *map(_row, found.rows)]), ""] if each else []
    lines += aligned([_HEAD, *[_cells(name, total[name], score) for name, score in found.sources.items()]])
    reasons: dict[str, list[str]] = {}
    for scored in found.rows:
        if scored.reason is not None:
            reasons.setdefault(scored.reason, []).append(scored.row.id)
    if reasons:
        lines += ["", "not predicted:", *[f"  {reason}: {_named(ids)}" for reason, ids in reasons.items()]]
    if large := [scored.row.id for scored in found.rows if not fits(scored)]:
        lines += ["", f"predicted, but to need more memory than the devices have: {_named(large)}"]
    done = [scored for scored in found.rows if scored.predicted is not None]
    if done:
        build, price = (
            median(times) for times in zip(*[(x.build_seconds, x.predict_seconds) for x in done], strict=True)
        )
        parts = f"{seconds(build)} to build the program, {seconds(price)} to simulate it"
        lines += ["", f"median time of a prediction: {parts}"]
    return lines


def _cells(name: str, total: int, score: Scores) -> tuple[str, ...]:
    """The row of a source; its number of rows is that of predicted ones, of how many if some are not."""
    rows = str(total) if score.rows == total else f"{score.rows} of {total}"
    errors = [_share(x) for x in (score.mean_absolute_error, score.p50, score.p90, score.worst)]
    bias = _NONE if score.bias is None else f"{score.bias:+.1%}"
    order = _NONE if score.spearman is None else f"{score.spearman:.3f}"
    return name, rows, *errors, bias, order, _share(score.regret), _share(score.memory_error)


def _row(scored: Scored) -> tuple[str, ...]:
    """The line of a row."""
    row = scored.to_json()
    measured, predicted = row["measured_step_s"], row["predicted_step_s"]
    error = None if scored.predicted is None else predicted / measured - 1
    return (
        scored.row.id,
        scored.row.runtime,
        *[_NONE if x is None else seconds(x) for x in (measured, predicted)],
        _NONE if error is None else f"{error:+.1%}",
        *[_NONE if x is None else f"{x:.1f} GiB" for x in (row["measured_peak_gib"], row["predicted_peak_gib"])],
    )


def _share(x: float | None) -> str:
    return _NONE if x is None else f"{x:.1%}"


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"{counted(len(ids), 'row')}, {', '.join(ids[:_SHOWN])}{more}"
