"""Figures of parts that are drawn one below another. matplotlib is loaded with the first figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from distir.ir.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

    from distir.viz.figure import Figure

    Canvas = Figure | SubFigure

_WIDTH = 9
"""Of a figure, in inches."""


class Drawing(NamedTuple):
    """A part of a figure, as wide as the figure: its height in inches, and what draws it."""

    height: float
    draw: Callable[[Canvas], None]


def one_below_another(drawings: Sequence[Drawing]) -> Figure:
    """A figure of these parts, from the top. Raises UsageError without matplotlib."""
    figure = empty_figure(_WIDTH, sum([x.height for x in drawings]) or 1)
    parts: list[Canvas] = [figure]
    if len(drawings) > 1:
        parts = list(
            figure.subfigures(len(drawings), 1, squeeze=False, height_ratios=[x.height for x in drawings])[:, 0]
        )
    for drawing, part in zip(drawings, parts, strict=False):
        drawing.draw(part)
    return figure


def empty_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. Raises UsageError without matplotlib."""
    try:
        from distir.viz.figure import Figure
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] != "matplotlib":
            raise
        raise UsageError("figures need matplotlib, which is not installed", "pip install 'distir[viz]'") from None
    return Figure(figsize=(width, height), layout="constrained")
