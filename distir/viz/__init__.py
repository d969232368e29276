"""Matplotlib figures of results. matplotlib is in the extra `viz`.

    figure = timeline(prediction.simulation)
    figure.savefig("timeline.pdf")

A figure that is the last line of a notebook's cell is displayed. pyplot is not used.
"""

from distir.viz.draw import against, curves, grouped, memory, stacked, timeline
from distir.viz.pareto import Choice, pareto

__all__ = ["Choice", "against", "curves", "grouped", "memory", "pareto", "stacked", "timeline"]
