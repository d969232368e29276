"""Figures of results: functions that take a result and give a matplotlib figure. matplotlib is the extra `viz`.

    figure = timeline(prediction.simulation)
    figure.savefig("timeline.pdf")

Where a figure is the last line of a notebook's cell it shows. Nothing is drawn on a screen, and pyplot is not used.
"""

from distir.viz.draw import curves, grouped, memory, timeline

__all__ = ["curves", "grouped", "memory", "timeline"]
