"""The class of all figures: matplotlib's Figure with access to its data. Loads matplotlib."""

from __future__ import annotations

import base64
import html
import io
import re
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plain
from matplotlib.text import Text

from distir.ir.files import printable

MIME = "application/vnd.distir.figure+json"
"""MIME type of a figure's data in a notebook, beside its image."""


_INHERITED = 'fill="currentColor" stroke-linejoin="round"'
_FOR_HTML = [
    (re.compile(pattern, re.DOTALL), new)
    for pattern, new in (
        (r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", ""),
        (r'(?<=<svg) .*?(viewBox="[^"]*")[^>]*', r" \1"),
        ("xlink:href", "href"),
        (r'<g id="[^"]*"', "<g"),
        (r"font-family: [^;\"]*;? ?", ""),
        ("#000000", "currentColor"),
        ("stroke: #ffffff", "stroke: var(--paper)"),
        (r"(\.\d\d)\d+", r"\1"),
        (r"\s*\n\s*", "\n"),
    )
]
"""What is replaced in matplotlib's SVG, in order: what HTML does not need, fonts and colours, digits, indentation."""


class Figure(Plain):
    """A matplotlib figure that displays in a notebook without pyplot, and gives access to its data."""

    def numbers(self) -> list[dict[str, Any]]:
        """For each panel its title and labels, and by name points of lines, vertices of areas and heights of bars."""
        return [
            {
                "title": axes.get_title(),
                "x": axes.get_xlabel(),
                "y": axes.get_ylabel(),
                "lines": {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.lines},
                "areas": {
                    str(area.get_label()): [np.asarray(path.vertices).tolist() for path in area.get_paths()]
                    for area in axes.collections
                },
                **({"bars": _heights(axes)} if axes.containers else {}),
            }
            for axes in self.axes
        ]

    def draw(self, renderer: Any) -> None:
        """As matplotlib's, with texts as they are: no part of a name is mathematics, nor UTF-8 where it is none."""
        for text in self.findobj(Text):
            text.set_parse_math(False)
            text.set_text(printable(text.get_text()))
        super().draw(renderer)

    def inline_svg(self, title: str, salt: str) -> str:
        """An SVG element to put into HTML, with a title for readers that do not see it; it refers to no file.

        Text has the font of the page, and what is black its colour; white edges have that of its variable `--paper`.
        Ids are made with `salt`, so that a page may have several such elements, each with its own.
        """
        drawn = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
            self.savefig(drawn, format="svg", transparent=True)
        text = drawn.getvalue()
        text = text[text.index("<svg") :]
        for pattern, new in _FOR_HTML:
            text = pattern.sub(new, text)
        return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}" {_INHERITED}', 1)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        image = io.BytesIO()
        self.savefig(image, format="png", dpi=80)
        return {
            "image/png": base64.b64encode(image.getvalue()).decode(),
            "text/plain": repr(self),
            MIME: self.numbers(),
        }


def _heights(axes: Axes) -> dict[str, list[float]]:
    return {str(bars.get_label()): [float(bar.get_height()) for bar in bars] for bars in axes.containers}
