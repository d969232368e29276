"""What searches found as figures, and as a report in one HTML file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from distir.api.explanation import Explanation
from distir.api.results import html_table, paragraphs, seconds, size
from distir.ir.errors import counted
from distir.ir.files import printable, written
from distir.search.plan_table import PlanTable
from distir.viz import Choice, pareto
from distir.viz.draw import PIXEL, memory_drawing, timeline_drawing
from distir.viz.drawing import Drawing, one_below_another
from distir.viz.pareto import numbered_front, pareto_drawing

if TYPE_CHECKING:
    from distir.viz.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --muted: #5b6570; --line: #d9dee4; --card: #f5f7f9;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e4e8ec; --muted: #9aa5b1; --line: #323a43; --card: #1d2228; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 60rem; }
.note, .card span { color: var(--muted); }
article + article { margin-top: 5rem; border-top: 3px solid var(--line); padding-top: 2.5rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: .82rem; }
.best { border-left: 4px solid var(--accent); padding-left: .9rem; font-size: 1.1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; min-width: 40%; }
th, td { padding: .3rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; }
th:first-child, td:first-child, .ends th:last-child, .ends td:last-child { text-align: left; padding-left: 0; }
.ends th:last-child, .ends td:last-child { padding-left: .6rem; }
.best-first tbody tr:first-child td { font-weight: 600; }
.best-first td:first-child { white-space: normal; min-width: 16rem; }
svg { display: block; width: 100%; height: auto; max-width: 55rem; margin: .8rem 0; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem;
  overflow-x: auto; font-size: .82rem; }
summary { cursor: pointer; color: var(--accent); margin: .6rem 0; }
footer { margin-top: 3rem; color: var(--muted); font-size: .82rem; }
@media print { details { display: none; } h2 { break-after: avoid; } svg { break-inside: avoid; } }
"""

_FOOTER = (
    "Predicted by distir plan. Times are of one training step, simulated. Memory over time is that of live tensors; "
    "elsewhere it has what the driver and libraries take, too."
)
_STAGES = 4
"""Of more stages the timeline shows compute alone."""


def plan_figure(tables: Sequence[PlanTable]) -> Figure:
    """Of each search: time against memory of the plans that were simulated, with what the numbers of the Pareto front
    stand for; the timeline of the best plan; memory over time on the devices on which it leaves least. Raises
    UsageError without matplotlib."""
    drawings: list[Drawing] = []
    for table in tables:
        explained = table.explain()
        name, devices = least_room(explained)
        drawings += [
            pareto_drawing(table.head(), choices(table), limits(table)),
            best_timeline(explained, f"timeline of {table.rows[0].plan}"),
            worst_memory(explained, name, f"memory of {counted(devices, 'device')} of "),
        ]
    return one_below_another(drawings)


def choices(table: PlanTable) -> list[Choice]:
    """The plans that were simulated."""
    front = table.front()
    return [Choice(str(x.plan), x.seconds, x.memory, x.fits, x in front) for x in table.points]


def limits(table: PlanTable) -> list[float]:
    """The bytes that devices have, less the reserve: one number, if they are alike."""
    return sorted({x.memory - x.over for x in table.points})


def shows_compute_alone(explained: Explanation) -> bool:
    """Whether there are too many stages for a row for each of their streams."""
    return len(explained.prediction.simulation.stages) > _STAGES


def best_timeline(explained: Explanation, title: str = "") -> Drawing:
    """The timeline of a step; of many stages compute alone."""
    return timeline_drawing(explained.prediction.simulation, PIXEL, shows_compute_alone(explained), title)


def worst_memory(explained: Explanation, name: str, title: str = "") -> Drawing:
    """Memory over time on one kind of devices."""
    return memory_drawing(explained.prediction.simulation, [name], title=title)


def least_room(explained: Explanation) -> tuple[str, int]:
    """The kind of devices with least room at their peak, and how many they are."""
    simulation = explained.prediction.simulation
    classes, topology = simulation.program.classes, simulation.program.cost.topology
    worst = max(
        range(len(classes.first)),
        key=lambda k: simulation.peak_memory[classes.first[k]] - topology.spec(classes.first[k]).capacity,
    )
    return classes.label(worst), classes.sizes[worst]


def save_report(tables: Sequence[PlanTable], path: str | os.PathLike[str]) -> None:
    """Write a report of searches. Raises UsageError if it cannot be written, or without matplotlib."""
    text = report(tables)
    with written(path) as file:
        file.write_text(printable(text), encoding="utf-8")


def report(tables: Sequence[PlanTable]) -> str:
    """A report of searches, one after another, as HTML that refers to no other file. Raises UsageError without
    matplotlib."""
    title = f"Plans for {tables[0].model}"
    articles = "\n".join([_article(table, f"s{k}") for k, table in enumerate(tables)])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{articles}
<footer>{_FOOTER}</footer>
</body>
</html>
"""


def _article(table: PlanTable, prefix: str) -> str:
    """The sections of one search."""
    explained = table.explain()
    parts = [f"<h1>{escape(table.model)} on {escape(counted(table.gpus, 'device'))}</h1>"]
    for name, title, body in (
        ("question", "", _question(table)),
        ("answer", "The best plan", _answer(table)),
        ("search", "The search", _search(table)),
        ("plans", "Best plans", _wide("best-first", table.table())),
        ("families", "What a choice costs", _families(table)),
        ("front", "Time against memory", _front(table, prefix)),
        ("parts", "Where the step goes", _parts(explained, prefix)),
        ("timeline", "Timeline of the best plan", _timeline(explained, prefix)),
        ("memory", "Memory over time", _memory(explained, prefix)),
    ):
        if body:
            heading = f"<h2>{title}</h2>\n" if title else ""
            parts.append(f'<section id="{prefix}-{name}">\n{heading}{body}\n</section>')
    return "<article>\n" + "\n".join(parts) + "\n</article>"


def _question(table: PlanTable) -> str:
    """What was asked."""
    have, step = " or ".join([size(x + table.reserve) for x in limits(table)]), table.step()
    lines = [
        f"Which plan trains {table.model} quickest on {counted(table.gpus, 'device')} of {table.cluster}?",
        f"{step[0].upper()}{step[1:]}.",
        f"Each device has {have} of memory, {size(table.reserve)} of it in reserve.",
    ]
    return paragraphs(lines)


def _answer(table: PlanTable) -> str:
    """The best plan, its figures, and what to change next."""
    best = table.rows[0]
    unit = "tokens" if best.work.tokens else "samples"
    rate = best.tokens_per_second
    found = best.detail
    limit = ""
    if best.limit is not None:
        binds, change = best.limit
        limit = f"<p>It <b>{escape(binds)}</b>. Next: {escape(change)}.</p>\n"
    cards = (
        (seconds(best.seconds), "a step"),
        (f"{rate:,.0f}", f"{unit} a second, {rate / best.plan.size:,.0f} a device"),
        (f"{best.mfu:.1%}", f"model FLOPs utilisation, {best.flops_per_device / 1e12:,.0f} TFLOP/s a device"),
        (size(best.memory), f"on the device that needs most; {size(best.headroom)} free"),
        *([(f"{found.bubble:.1%}", "of the step is the pipeline's bubble")] if found is not None else []),
    )
    made = "".join([f'<div class="card"><b>{escape(x)}</b><span>{escape(text)}</span></div>' for x, text in cards])
    return (
        f'<p class="best">{escape(str(best.plan))}</p>\n<div class="cards">{made}</div>\n'
        f"{limit}"
        f"<details><summary>The plan as a file for --plan</summary><pre>{escape(best.plan.to_toml())}</pre></details>"
    )


def _search(table: PlanTable) -> str:
    """How many plans there were, what is certain, and what was left out."""
    rows = [(f"{n:,}", reason) for reason, n in table.left_out.items()]
    left = f'<div class="wide ends">{html_table([("left out", "because"), *rows])}</div>'
    more = f"<details><summary>What rules left out before</summary>{left}</details>" if rows else ""
    return paragraphs([*table.lines()[1:], f"The search took {seconds(table.elapsed)}."]) + more


def _families(table: PlanTable) -> str:
    if not table.families:
        return ""
    note = "The quickest plan of each family that fits."
    return f'<p class="note">{note}</p>\n' + _wide("ends", table.family_table())


def _front(table: PlanTable, prefix: str) -> str:
    plans = choices(table)
    numbered = numbered_front(plans)
    figure = pareto("", plans, limits(table), listed=False)
    rows = [(str(k), seconds(x.seconds), size(x.memory), x.name) for k, x in numbered]
    note = (
        "Each point is a plan that was simulated. A search simulates what may be quick: slower plans that need less "
        "memory may be missing."
    )
    svg = figure.inline_svg("Time against memory of the simulated plans", f"{prefix}f")
    return f'<p class="note">{note}</p>\n{svg}\n' + _wide("ends", [("front", "step", "memory", "plan"), *rows])


def _parts(explained: Explanation, prefix: str) -> str:
    svg = explained.figure().inline_svg("Parts of the step, by stage", f"{prefix}p")
    return f"{svg}\n{_wide('', explained.table())}"


def _timeline(explained: Explanation, prefix: str) -> str:
    what = "stage" if shows_compute_alone(explained) else "stream of each stage"
    note = (
        f"A row for each {what}; numbers are microbatches. Where ops are too short to be seen, a bar is as high as the "
        "share of the time that is busy."
    )
    figure = one_below_another([best_timeline(explained)])
    return f'<p class="note">{note}</p>\n' + figure.inline_svg("Timeline of a step", f"{prefix}t")


def _memory(explained: Explanation, prefix: str) -> str:
    """Of the kind of devices with least room."""
    name, devices = least_room(explained)
    figure = one_below_another([worst_memory(explained, name)])
    note = f"Of {counted(devices, 'device')} of {name}, where least is left."
    return f'<p class="note">{escape(note)}</p>\n' + figure.inline_svg(f"Memory of {name} over time", f"{prefix}m")


def _wide(kind: str, rows: Sequence[Sequence[str]]) -> str:
    """A table that may be wider than the page."""
    return f'<div class="wide {kind}">{html_table(rows)}</div>'
