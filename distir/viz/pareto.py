"""Time against memory of plans, with the Pareto front. matplotlib is loaded with the first figure."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.viz.draw import SIZES, TIMES, largest_unit, three_figures
from distir.viz.drawing import Drawing, one_below_another

if TYPE_CHECKING:
    from distir.viz.drawing import Canvas
    from distir.viz.figure import Figure

_FITS, _SHORT, _FRONT, _LIMIT = "#0072B2", "#999999", "#D55E00", "#CC79A7"
_WIDE = 4.0
"""The ratio of the largest to the smallest value from which an axis is logarithmic."""
_NUMBERED = 15
"""The most plans of a front that have a number."""
_LINE = 122
"""The characters of a line below a plot."""
_PLACES = tuple(itertools.product((11.5, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0), (225, 205, 245, 185, 265)))
"""Where the number of a point may be: how far away, in points, and at which angle. All plans are on the other side."""


class Choice(NamedTuple):
    """A plan that may be chosen: its seconds, and the bytes of the device that needs most. `front`: of the plans that
    fit none other is at least as good in both."""

    name: str
    seconds: float
    memory: float
    fits: bool
    front: bool


def pareto(title: str, plans: Sequence[Choice], limits: Sequence[float], *, listed: bool = True) -> Figure:
    """Time against memory of plans, with the Pareto front; `limits`: the bytes that devices have.

    Plans of the front have numbers, from the quickest; `listed`: below the plot is what they are. Of a front of many
    some have none. An axis is logarithmic where its values differ by a factor of 4 or more.
    """
    return one_below_another([pareto_drawing(title, plans, limits, listed=listed)])


def pareto_drawing(title: str, plans: Sequence[Choice], limits: Sequence[float], *, listed: bool = True) -> Drawing:
    """Time against memory as a part of a figure."""
    front = numbered_front(plans)
    lines = _lines(front) if listed else []
    heights = [4.3, 0.15 * len(lines) + 0.15] if listed else [4.3]

    def draw(figure: Canvas) -> None:
        axes, *below = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        x, y = _scatter(axes, plans, limits)
        axes.set_title(title, fontsize="medium")
        for other in below:
            other.set_axis_off()
            style = {"va": "top", "family": "monospace", "fontsize": 7.5}
            text = other.text(0, 1, "\n".join(lines), transform=other.transAxes, **style)
            text.set_in_layout(False)
        figure.figure.draw_without_rendering()  # places the points: their numbers must not overlap
        _number(axes, [(k, plan.memory * x, plan.seconds * y) for k, plan in front])

    return Drawing(sum(heights), draw)


def numbered_front(plans: Sequence[Choice]) -> list[tuple[int, Choice]]:
    """The plans of a front that have a number, quickest first: all, or of many the ends and some between."""
    front = sorted([x for x in plans if x.front], key=lambda x: (x.seconds, x.memory))
    if len(front) > _NUMBERED:
        front = [front[round(k * (len(front) - 1) / (_NUMBERED - 1))] for k in range(_NUMBERED)]
    return list(enumerate(front, 1))


def _lines(front: Sequence[tuple[int, Choice]]) -> list[str]:
    """What the numbers stand for."""
    unit, scale = largest_unit(max((x.seconds for _, x in front), default=1.0), TIMES)
    found: list[str] = []
    for k, x in front:
        size_unit, size_scale = largest_unit(x.memory, SIZES)
        text = f"{k:>2} {x.seconds * scale:>8.2f} {unit}  {x.memory * size_scale:>6.1f} {size_unit}  "
        found += textwrap.wrap(x.name, _LINE, initial_indent=text, subsequent_indent=" " * len(text))
    return found


def _scatter(axes: Any, plans: Sequence[Choice], limits: Sequence[float]) -> tuple[float, float]:
    """Draw the plans, the line of the front, and the limits of memory. Returns the factors of bytes and seconds."""
    times, sizes = [x.seconds for x in plans] or [1.0], [*[x.memory for x in plans], *limits] or [1.0]
    (unit, scale), (size_unit, size_scale) = largest_unit(max(times), TIMES), largest_unit(max(sizes), SIZES)

    def points(some: Sequence[Choice]) -> tuple[list[float], list[float]]:
        some = sorted(some, key=lambda x: (x.memory, -x.seconds))
        return [x.memory * size_scale for x in some], [x.seconds * scale for x in some]

    front = [x for x in plans if x.front]
    axes.plot(*points(front), drawstyle="steps-post", color=_FRONT, linewidth=1.2, zorder=3, label="_front")
    for label, some, marker, style in (
        ("fits", [x for x in plans if x.fits and not x.front], "o", {"color": _FITS, "alpha": 0.6, "zorder": 2}),
        ("does not fit", [x for x in plans if not x.fits], "x", {"color": _SHORT, "zorder": 2}),
        ("Pareto front", front, "o", {"color": _FRONT, "zorder": 4}),
    ):
        if some:
            width = 0.0 if marker == "o" else 1.0
            name = f"{label} ({len(some):,})"
            axes.plot(*points(some), marker, markersize=5, markeredgewidth=width, label=name, **style)
    for k, limit in enumerate(limits):
        have = f"{three_figures(limit * size_scale)} {size_unit} of a device, less the reserve"
        label = "_memory" if k else have
        axes.axvline(limit * size_scale, color=_LIMIT, linestyle="--", linewidth=1.4, zorder=1, label=label)
    _scale(axes, "x", [v * size_scale for v in sizes])
    _scale(axes, "y", [v * scale for v in times])
    axes.set_xlabel(f"peak memory of the device that needs most ({size_unit})")
    axes.set_ylabel(f"step ({unit})")
    axes.grid(alpha=0.3)
    if plans or limits:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False, fontsize="small")
    return size_scale, scale


def _scale(axes: Any, which: str, values: Sequence[float]) -> None:
    """Limits of an axis, with room for numbers; logarithmic, with ticks of few digits, if the values differ much."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = min(values), max(values)
    axis = axes.xaxis if which == "x" else axes.yaxis
    if low > 0 and high / low >= _WIDE:
        room = (high / low) ** 0.08
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / room, high * room)})
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axis.set_minor_locator(NullLocator())
    else:
        room = 0.08 * (high - low) or 0.05 * high
        axes.set(**{f"{which}lim": (low - room, high + room)})
    axis.set_major_formatter(lambda x, _: three_figures(x))


def _number(axes: Any, front: Sequence[tuple[int, float, float]]) -> None:
    """Numbers at the points of a front, (number, x, y), apart from each other."""
    to_points = 72 / axes.figure.dpi
    points = [axes.transData.transform((x, y)) * to_points for _, x, y in front]
    offsets = [(r * math.cos(math.radians(a)), r * math.sin(math.radians(a))) for r, a in _PLACES]
    taken: list[tuple[float, float, float]] = [(x, y, 8.0) for x, y in points]  # with how far away in x others are

    def free(x: float, y: float) -> bool:
        return all(abs(x - a) >= wide or abs(y - b) >= 8 for a, b, wide in taken)

    for (k, x, y), at in zip(front, points, strict=True):
        dx, dy = next((d for d in offsets if free(at[0] + d[0], at[1] + d[1])), offsets[0])
        taken.append((at[0] + dx, at[1] + dy, 12.0))
        line = {"arrowstyle": "-", "color": _FRONT, "linewidth": 0.5, "shrinkA": 3, "shrinkB": 1}
        axes.annotate(
            str(k), (x, y), (dx, dy), textcoords="offset points", ha="center", va="center", fontsize=8, arrowprops=line
        )
