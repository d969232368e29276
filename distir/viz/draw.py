"""Draw the figures. matplotlib is loaded with the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from distir.executor.simulator.categories import CATEGORIES
from distir.executor.simulator.simulation import Simulation
from distir.executor.simulator.work_kinds import BACKWARD, COMPUTE, FORWARD, UPDATE
from distir.ir.errors import UsageError
from distir.viz.drawing import Drawing, empty_figure, one_below_another
from distir.viz.spans import COLLECTIVE, KINDS, TRANSFER, bars, coarse, highest, live

if TYPE_CHECKING:
    from distir.viz.drawing import Canvas
    from distir.viz.figure import Figure

# The colours of Okabe and Ito, which colour-blind people tell apart.
_COLOUR = {
    COMPUTE: "#0072B2",
    FORWARD: "#0072B2",
    BACKWARD: "#E69F00",
    UPDATE: "#009E73",
    COLLECTIVE: "#D55E00",
    TRANSFER: "#CC79A7",
}
_OF_CATEGORY = dict(zip(CATEGORIES, ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#999999"), strict=True))
_COLOURS = [f"C{k}" for k in range(10)] + ["#000000", "#F0E442", "#009E73", "#56B4E9", "#882255", "#44AA99"]
"""Of names, one after the other."""
_MARKERS = "osD^"
"""Of points, where there are more names than colours."""
_NARROW = 0.012
"""Bars narrower than this share of the timeline have no number."""
_FEW_DECADES = 1e3
"""The ratio of its ends up to which a logarithmic axis has three labels a decade."""
_CROWDED = 200
"""From so many bars a row of a timeline has no edges between them: they would cover most of it."""
PIXEL = 1 / 600
"""The share of the width of a figure that is a pixel or so."""
TIMES = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
SIZES = (("GiB", 2**-30), ("MiB", 2**-20), ("KiB", 2**-10), ("bytes", 1.0))
"""Units of seconds and of bytes, with how many one is."""


def timeline(simulation: Simulation, grain: float = 0.0, compute_only: bool = False) -> Figure:
    """A timeline: a row for each stream of each device class, bars coloured by kind and numbered by microbatch.

    Narrow bars, and bars not of a single microbatch (prologues, updates), have no number. `grain` is the share of the
    time below which bars are not told apart (`distir.viz.spans.coarse`): they are as high as the stream is busy.
    `compute_only`: without communication.
    """
    return one_below_another([timeline_drawing(simulation, grain, compute_only)])


def timeline_drawing(
    simulation: Simulation, grain: float = 0.0, compute_only: bool = False, title: str = ""
) -> Drawing:
    """A timeline as a part of a figure."""
    rows = bars(simulation, compute_only)
    if grain:
        rows = coarse(rows, grain * simulation.seconds)
    unit, scale = largest_unit(simulation.seconds, TIMES)

    def draw(figure: Canvas) -> None:
        axes = figure.add_subplot()
        for y, (name, row) in enumerate(rows):
            edge = 0.4 if len(row) < _CROWDED else 0.0
            alike: dict[tuple[str, float], list[tuple[float, float]]] = {}
            for b in row:
                alike.setdefault((b.kind, b.busy), []).append((b.start * scale, b.duration * scale))
            for (kind, busy), ranges in sorted(alike.items()):
                label = f"{name}: {kind}" + (f", {busy:.1%} busy" if busy < 1 else "")
                where, colour = (y + 0.4 - 0.8 * busy, 0.8 * busy), _COLOUR[kind]
                axes.broken_barh(ranges, where, color=colour, edgecolor="white", linewidth=edge, label=label)
            for b in row:
                if b.microbatch is not None and b.duration > _NARROW * simulation.seconds:
                    middle = (b.start + b.duration / 2) * scale
                    axes.text(middle, y, str(b.microbatch), color="white", ha="center", va="center", fontsize=8)
        axes.set_title(title, fontsize="medium")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, simulation.seconds * scale or 1)
        axes.set_xlabel(f"time ({unit})")
        used = {b.kind for _, row in rows for b in row}
        _legend(figure, {kind: _COLOUR[kind] for kind in KINDS if kind in used})

    return Drawing(0.9 + 0.34 * len(rows) + (0.25 if title else 0), draw)


def memory(simulation: Simulation, classes: Sequence[str] | None = None, grain: float = PIXEL) -> Figure:
    """The live memory of each device class over time, by category: a panel per class, or per one of those named.

    Of each `grain`, a share of the time, only the highest memory is shown.
    """
    return one_below_another([memory_drawing(simulation, classes, grain)])


def memory_drawing(
    simulation: Simulation, classes: Sequence[str] | None = None, grain: float = PIXEL, title: str = ""
) -> Drawing:
    """Memory over time as a part of a figure. `title` precedes that of each class."""
    curves = live(simulation, classes)
    if grain:
        curves = [(name, highest(points, grain * simulation.seconds)) for name, points in curves]
    most = max((sum(size) for _, points in curves for _, size in points), default=0)
    unit, scale = largest_unit(simulation.seconds, TIMES)
    size_unit, size_scale = largest_unit(most, SIZES)

    def draw(figure: Canvas) -> None:
        panels = figure.subplots(len(curves), 1, sharex=True, sharey=True, squeeze=False)[:, 0] if curves else []
        used: dict[str, str] = {}
        for axes, (name, points) in zip(panels, curves, strict=True):
            peak = max(sum(size) for _, size in points) * size_scale
            # drop points of zero duration
            points = [*[p for p, after in pairwise(points) if after[0] > p[0]], points[-1]]
            times = [t * scale for t, _ in points]
            below = [0.0] * len(points)
            for k, category in enumerate(CATEGORIES):
                above = [b + size[k] * size_scale for b, (_, size) in zip(below, points, strict=True)]
                if above != below:
                    used[category] = _OF_CATEGORY[category]
                    steps = _changes(times, below, above)
                    axes.fill_between(*steps, step="post", color=used[category], linewidth=0, label=category)
                below = above
            axes.set_title(f"{title}{name}: peak {peak:.3g} {size_unit}", fontsize="medium")
            axes.set_ylabel(f"live memory ({size_unit})")
            axes.set_xlim(0, times[-1] or 1)
        if len(panels):
            panels[-1].set_xlabel(f"time ({unit})")
        _legend(figure, used)

    return Drawing(0.9 + 1.9 * len(curves), draw)


def _changes(*columns: Sequence[float]) -> list[tuple[float, ...]]:
    """Columns of numbers over time, the first one, where others than it change, and at the end."""
    rows = list(zip(*columns, strict=True))
    changed = [row for before, row in pairwise(rows) if row[1:] != before[1:]]
    return list(zip(*[rows[0], *changed, rows[-1]], strict=True))


def curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    x: str,
    y: str,
    log: Sequence[str] = (),
) -> Figure:
    """Lines side by side: {title of a panel: {name of a line: [(x, y), ...]}}.

    `x` and `y` are the labels of the axes, with units; `log` names the logarithmic axes ("x" base 2, "y" base 10). All
    panels share the axes. Lines of one name have one colour; if no two panels have a line in common each has its own
    legend.
    """
    if unknown := set(log) - {"x", "y"}:
        raise UsageError(f"log names the axes x and y, got {min(unknown)!r}")
    names = [name for lines in panels.values() for name in lines]
    shared = len(set(names)) < len(names)
    figure = empty_figure(max(4.5, (2.6 if shared else 3.4) * len(panels)), 3.2 if shared else 3.6)
    found = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0] if panels else []
    colours: dict[str, str] = {}
    for axes, (title, lines) in zip(found, panels.items(), strict=True):
        if not shared:
            colours = {}
        for name, points in lines.items():
            colour = colours.setdefault(name, f"C{len(colours)}")
            axes.plot(
                [a for a, _ in points], [b for _, b in points], marker="o", markersize=4, color=colour, label=name
            )
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel(x)
        axes.grid(alpha=0.3)
        if "x" in log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if "y" in log:
            axes.set_yscale("log")
        if len(lines) > 1 and not shared:
            axes.legend(fontsize="small")
    if len(found):
        found[0].set_ylabel(y)
    if shared:
        _legend(figure, colours)
    return figure


def against(points: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, within: float = 0.2) -> Figure:
    """Points of two positive quantities in one unit, on logarithmic axes: {name: [(x, y), ...]}, each name a colour.

    Lines mark where both are equal, and where `y` is larger or smaller by the share `within`. Where names are more
    than colours, those of one colour have markers of their own.
    """
    figure = empty_figure(6.4, 4.8)  # first: it says what to do where there is no matplotlib
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    numbers = [v for pairs in points.values() for pair in pairs for v in pair] or [1.0]
    ends = [min(numbers) / 1.5, max(numbers) * 1.5]
    for share, style in ((0.0, "-"), (within, ":"), (-within, ":")):
        label = f"{share:+.0%}" if share else "equal"
        axes.plot(ends, [v * (1 + share) for v in ends], style, color="grey", linewidth=1, label=label)
    for k, (name, pairs) in enumerate(points.items()):
        colour = _COLOURS[k % len(_COLOURS)]
        marker, xs, ys = _MARKERS[k // len(_COLOURS) % len(_MARKERS)], [a for a, _ in pairs], [b for _, b in pairs]
        axes.plot(xs, ys, marker, markersize=4, alpha=0.8, color=colour, label=name)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    few = ends[1] / ends[0] < _FEW_DECADES
    for axis in (axes.xaxis, axes.yaxis):  # by default minor ticks of few decades have labels, too, which overlap
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
        axis.set_major_formatter(lambda x, _: three_figures(x))
        axis.set_minor_formatter(NullFormatter())
    axes.set_box_aspect(1)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize="small")
    return figure


def grouped(panels: Mapping[str, tuple[str, Mapping[str, Sequence[float]]]], groups: Sequence[str]) -> Figure:
    """Bars side by side: {title of a panel: (what its axis shows, {name of a bar: its height in each group})}.

    `groups` are the names below the bars, the same in all panels. Bars of one name have one colour.
    """
    figure = empty_figure(max(3.6, 1.2 + 1.1 * len(groups)) * max(1, len(panels)), 3.6)
    found = figure.subplots(1, len(panels), squeeze=False)[0] if panels else []
    names = list(dict.fromkeys(name for _, bars in panels.values() for name in bars))
    colours = dict(zip(names, _OF_CATEGORY.values(), strict=False))
    width = 0.8 / max(1, len(names))
    for axes, (title, (label, heights)) in zip(found, panels.items(), strict=True):
        for name, row in heights.items():
            offset = (names.index(name) - (len(names) - 1) / 2) * width
            drawn = axes.bar([k + offset for k in range(len(groups))], row, width, color=colours[name], label=name)
            axes.bar_label(drawn, fmt=three_figures, fontsize="x-small", padding=1)
        axes.set_title(title, fontsize="medium")
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(lambda x, _: three_figures(x))
        axes.set_xticks(range(len(groups)), groups)
        axes.margins(y=0.1)
    _legend(figure, colours)
    return figure


def stacked(rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """Horizontal bars of seconds, each divided into parts: {name of a bar: {part: seconds}}, from the top."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    colours = dict(zip(parts, _COLOURS, strict=False))
    longest = max((sum(row.values()) for row in rows.values()), default=0.0)
    unit, scale = largest_unit(longest, TIMES)
    figure = empty_figure(9, 1.4 + 0.3 * len(rows))
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for part in parts:
        widths = [row.get(part, 0.0) * scale for row in rows.values()]
        axes.barh(range(len(rows)), widths, left=left, height=0.8, color=colours[part], label=part)
        left = [a + w for a, w in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, longest * scale or 1)
    axes.set_xlabel(f"time ({unit})")
    _legend(figure, colours)
    return figure


def three_figures(x: float) -> str:
    """A label: three significant figures, or all digits before the decimal point."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def largest_unit(most: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit, with its scale, in which `most` is at least 1; else the smallest."""
    return next((u for u in units if most * u[1] >= 1), units[-1])


def _legend(figure: Canvas, colours: Mapping[str, str]) -> None:
    """One legend for all panels, above them."""
    from matplotlib.patches import Patch

    if colours:
        patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
        figure.legend(
            handles=patches, loc="outside upper center", ncols=min(len(patches), 6), frameon=False, fontsize="small"
        )
