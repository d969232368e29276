"""The class of all figures: matplotlib's Figure with access to its data. Loads matplotlib."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plain

MIME = "application/vnd.distir.figure+json"
"""MIME type of a figure's data in a notebook, beside its image."""


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
