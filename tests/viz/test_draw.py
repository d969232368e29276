"""Figures show the numbers they are given, and say what is missing where matplotlib is."""

import base64
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.simulator.categories import CATEGORIES
from distir.hardware import load_cluster
from distir.ir.errors import UsageError
from distir.models import mlp
from distir.transforms import parallel_transform_3d
from distir.viz import against, curves, grouped, memory, timeline
from distir.viz.figure import MIME
from distir.viz.spans import bars, live

ROOT = Path(__file__).parent.parent.parent
PANELS = {"2 replicas": {"4": [(1, 2.5), (2, 3.5)], "8": [(1, 3.0)]}, "4 replicas": {"4": [(1, 5.0)]}}


@pytest.fixture(scope="module")
def simulation():
    topology = load_cluster("dgx-a100", devices=4)
    program = parallel_transform_3d(mlp(4, 32, 32), 2, 1, 2, topology.devices[:4], 4)
    return Simulator(CostModel(topology)).interpret(program)


def spans(panel):
    """From first to last along x, of each bar of a timeline."""
    corners = [[x for x, _ in bar] for found in panel["areas"].values() for bar in found]
    return sorted((min(xs), max(xs)) for xs in corners)


def test_a_timeline_has_every_bar(simulation):
    (panel,) = timeline(simulation).numbers()
    scale = {"time (ms)": 1e3, "time (us)": 1e6}[panel["x"]]
    want = sorted((b.start * scale, (b.start + b.duration) * scale) for _, row in bars(simulation) for b in row)
    assert spans(panel) == [pytest.approx(x, rel=1e-9, abs=1e-9) for x in want]


def test_no_empty_band_above_and_below_a_timeline(simulation):
    figure = timeline(simulation)
    assert figure.axes[0].get_ylim() == (len(bars(simulation)) - 0.5, -0.5)


def test_memory_is_stacked_up_to_all_of_it(simulation):
    found = memory(simulation, grain=0.0).numbers()
    assert [p["title"].split(":")[0] for p in found] == [s.name for s in simulation.stages]
    for panel, (_, points) in zip(found, live(simulation), strict=True):
        top = max(y for areas in panel["areas"].values() for area in areas for _, y in area)
        lasting = [sum(size) for (t, size), (after, _) in pairwise(points) if after > t]
        assert top == pytest.approx(max(lasting) / 1024)
        assert "KiB" in panel["title"]


def test_areas_of_memory_cover_what_is_live(simulation):
    """At every time each category is from where the ones before it end, and as high as it is."""
    figure = memory(simulation, grain=0.0)
    for axes, (_, points) in zip(figure.axes, live(simulation), strict=True):
        areas = {str(area.get_label()): area.get_paths() for area in axes.collections}
        unit = {"time (ms)": 1e3, "time (us)": 1e6}[figure.axes[-1].get_xlabel()]
        for (t, sizes), (after, _) in pairwise(points):
            below = 0.0
            for category, size in zip(CATEGORIES, sizes, strict=True):
                middle, height = (t + after) / 2 * unit, size / 1024
                if after > t and height:
                    (path,) = areas[category]
                    ys = below + height * np.array([-0.01, 0.01, 0.99, 1.01])
                    inside = path.contains_points(np.stack([np.full(4, middle), ys], axis=1))
                    assert inside.tolist() == [False, True, True, False]
                below += height


def test_curves_are_what_was_given():
    figure = curves(PANELS, x="degree", y="samples/s", log=("x", "y"))
    found = figure.numbers()
    assert {p["title"]: {k: [tuple(x) for x in v] for k, v in p["lines"].items()} for p in found} == PANELS
    assert (found[0]["x"], found[0]["y"]) == ("degree", "samples/s")
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["4", "8"]


BARS = {"time": ("s", {"a": [1.0, 2.0], "b": [3.0, 250.5]}), "rate": ("tokens/s", {"a": [5.0, 1.0], "b": [0.5, 2.0]})}


def test_no_two_names_of_points_look_alike():
    """Colour and marker together, of more names than there are colours."""
    axes = against({f"source {k}": [(1.0 + k, 2.0 + k)] for k in range(40)}, x="measured", y="predicted").axes[0]
    drawn = [line for line in axes.lines if str(line.get_label()).startswith("source")]
    assert len(drawn) == len({(line.get_color(), line.get_marker()) for line in drawn}) == 40


def test_bars_are_as_high_as_what_was_given():
    figure = grouped(BARS, ["1 rank", "2 ranks"])
    found = figure.numbers()
    assert {p["title"]: (p["y"], p["bars"]) for p in found} == BARS
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1 rank", "2 ranks"]
        drawn: list[Any] = list(axes.patches)
        edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in drawn)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(edges))
    assert {text.get_text() for text in figure.axes[0].texts} == {"1", "2", "3", "250"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert grouped({}, []).numbers() == []


def test_memory_of_one_class(simulation):
    names = [name for name, _ in live(simulation)]
    (panel,) = memory(simulation, names[1:2]).numbers()
    assert panel == {**memory(simulation).numbers()[1], "x": panel["x"]}
    assert panel["x"].startswith("time")


def test_svg_for_html(simulation):
    """It parses, refers to nothing, and two on a page have no id in common."""
    found = [memory(simulation).inline_svg('a "title" & more', prefix) for prefix in ("a", "b")]
    ids = [re.findall(r'\bid="([^"]*)"', text) for text in found]
    assert not set(ids[0]) & set(ids[1])
    for text, mine in zip(found, ids, strict=True):
        root = ElementTree.fromstring(text)
        assert (root.tag, root.get("aria-label")) == ("svg", 'a "title" & more')
        assert set(re.findall(r"(?:href=\"|url\()#([^\")]*)", text)) <= set(mine)
        assert "http" not in text
        assert "#000000" not in text
        assert "font-family" not in text
        assert "peak" in "".join(root.itertext())


def test_unknown_axis():
    with pytest.raises(UsageError, match="'z'"):
        curves(PANELS, x="", y="", log="z")


def test_nothing_to_show():
    assert curves({}, x="", y="").numbers() == []


def test_a_figure_shows_in_a_notebook_with_its_numbers(simulation, tmp_path):
    figure = timeline(simulation)
    bundle = figure._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert json.loads(json.dumps(bundle[MIME])) == figure.numbers()
    figure.savefig(tmp_path / "timeline.pdf")
    assert (tmp_path / "timeline.pdf").read_bytes().startswith(b"%PDF")


def test_without_matplotlib(simulation, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "distir.viz.figure")
    for draw in (
        lambda: timeline(simulation),
        lambda: memory(simulation),
        lambda: curves(PANELS, x="", y=""),
        lambda: grouped({}, []),
    ):
        with pytest.raises(UsageError, match=r"matplotlib.*pip install 'distir\[viz\]'"):
            draw()


def test_matplotlib_is_loaded_when_a_figure_is_drawn():
    code = "import sys, distir.viz; assert 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
