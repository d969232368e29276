"""The report is one HTML file with the figures of the table; the front against brute force."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from distir.api.model import load
from distir.ir.errors import UsageError, counted
from distir.search.plan_report import choices, least_room, limits, plan_figure, report, save_report
from distir.search.plan_table import PlanPoint, PlanTable
from distir.search.planning import plan
from distir.transforms.plan import Plan
from distir.viz import memory, pareto, timeline
from distir.viz.draw import PIXEL

SECTIONS = ("question", "answer", "search", "plans", "families", "front", "parts", "timeline", "memory")
NAME = '<i>a & "b"</i>'
UNITS = {"s": 1, "ms": 1e3, "us": 1e6, "GiB": 2**-30, "MiB": 2**-20, "KiB": 2**-10}
VOID = {"meta", "br", "link", "img"}


@pytest.fixture(scope="module")
def table() -> PlanTable:
    model = load(
        "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32", {"batch": 4}, loss="cross-entropy", optimizer="adamw"
    )
    found = plan(model, "dgx-a100", 2, vary=("dp", "tp", "pp", "zero", "microbatch"), top=4)
    return replace(found, model=NAME)


class Page(HTMLParser):
    """What a page consists of: ids, references, text, and the cells of tables. Fails for tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.tables: list[list[tuple[str, ...]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._attributes(attrs)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append(())
        if tag in ("td", "th"):
            self.tables[-1][-1] += ("",)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1] = (*self.tables[-1][-1][:-1], self.tables[-1][-1][-1] + data)

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, x in attrs:
            if name == "id":
                self.ids.append(x or "")
            elif name in ("href", "src", "srcset", "data", "action", "poster"):
                self.references.append(x or "")
            else:
                self.references += [f"#{found}" for found in re.findall(r"url\(#([^)]*)\)", x or "")]


@pytest.fixture(scope="module")
def text(table: PlanTable) -> str:
    return report([table, table])


def test_a_name_that_is_no_utf_8(table: PlanTable, tmp_path: Path) -> None:
    save_report([replace(table, model="m\udcfe.onnx")], tmp_path / "report.html")
    assert "m\\xfe.onnx" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_report_is_one_file(text: str) -> None:
    """No reference leaves the page, each one within has its target once, and the page has both colour schemes."""
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert page.references
    assert {x.removeprefix("#") for x in page.references} <= set(page.ids)
    assert all(x.startswith("#") for x in page.references)
    assert not re.search(r"https?:|//|@import|<script|<link|xmlns", text)
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"var\((--\w+)\)", text)) - {"--font"} <= set(re.findall(r"(--\w+):", text))
    assert [x for x in page.ids if "-" in x and x.split("-")[1] in SECTIONS] == [
        f"s{k}-{name}" for k in (0, 1) for name in SECTIONS
    ]


def test_its_figures_are_the_tables(table: PlanTable, text: str) -> None:
    page, explained = Page(text), table.explain()
    assert f"{NAME} on 2 devices" in page.words
    assert table.table() in page.tables
    assert table.family_table() in page.tables
    assert explained.table() in page.tables
    words, found = "".join(page.words), table.to_json()
    assert f"{found['counts']['plans']:,} plans: {found['counts']['simulated']:,} simulated" in words
    best = found["plans"][0]
    assert f"{best['step_seconds'] * 1e6:.1f} us" in words or f"{best['step_seconds'] * 1e3:.3f} ms" in words
    assert f"{best['mfu']:.1%}" in words
    assert best["next"] in words
    assert table.rows[0].plan.to_toml().strip() in words
    front = next(rows for rows in page.tables if rows[0][0] == "front")
    assert [row[3] for row in front[1:]] == [str(x.plan) for x in table.front()]
    assert explained.step_seconds == table.rows[0].seconds
    assert table.explain() is explained  # figure and report share it


def test_the_figure_has_every_simulated_plan(table: PlanTable) -> None:
    (panel, *_) = table.figure().numbers()
    drawn = [tuple(p) for name, points in panel["lines"].items() if "(" in name for p in points]
    rows = table.to_json()["simulated_plans"]
    x, y = (UNITS[re.findall(r"\((\w+)\)", panel[name])[-1]] for name in "xy")
    assert len(rows) == table.simulated
    assert sorted(drawn) == sorted([(row["peak_memory"] * x, row["step_seconds"] * y) for row in rows])
    assert any(name.startswith("Pareto front") for name in panel["lines"])
    assert table.rows[0].plan == table.front()[0].plan


def test_the_figure_of_several_searches(table: PlanTable) -> None:
    """Of each: the front with its list, the timeline of its best plan, and the memory of the devices with least room,
    each as it is when drawn alone."""
    other = replace(table, model="other", rows=table.rows[1:])
    figure = plan_figure([table, other])
    panels = figure.numbers()
    assert len(panels) == 8
    for found, (front, _, time, size) in ((table, panels[:4]), (other, panels[4:])):
        explained = found.explain()
        simulation = explained.prediction.simulation
        assert front == pareto(found.head(), choices(found), limits(found)).numbers()[0]
        title = f"timeline of {found.rows[0].plan}"
        assert time == {**timeline(simulation, PIXEL).numbers()[0], "title": title}
        name, devices = least_room(explained)
        alone = memory(simulation, [name]).numbers()[0]
        assert size == {**alone, "title": f"memory of {counted(devices, 'device')} of {alone['title']}"}
    figure.draw_without_rendering()
    boxes = [box for axes in figure.axes if (box := axes.get_tightbbox()) is not None]
    assert len(boxes) == 8
    assert [x.y0 for x in boxes] == sorted([x.y0 for x in boxes], reverse=True)
    assert all(below.y1 <= above.y0 for above, below in itertools.pairwise(boxes))


@pytest.mark.parametrize(("vocab", "stage"), [(64, "stage0"), (65536, "stage1")])
def test_least_room(vocab: int, stage: str) -> None:
    """Of a pipeline the first stage, of which more is in flight, or the last, which has the logits."""
    model = load(
        f"gpt:layers=2,hidden=64,heads=4,vocab={vocab},seq=32", {"batch": 64}, loss="cross-entropy", optimizer="adamw"
    )
    found = plan(model, "dgx-a100", 2, fix={"pp": 2, "microbatch": 32}, top=1).explain()
    peaks = found.prediction.simulation.peak_memory
    first, last = [peaks[device] for device in sorted(peaks, key=lambda x: x.index) if peaks[device]]
    assert (first < last) == (stage == "stage1")
    assert least_room(found) == (stage, 1)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans()), max_size=12))
@settings(max_examples=200, deadline=None)
def test_the_front(found: list[tuple[int, int, bool]]) -> None:
    """What no other plan that fits is better than: each pair of seconds and bytes once."""
    points = [PlanPoint(Plan(), float(s), m, -1.0 if fits else 1.0) for s, m, fits in found]
    fitting = {(p.seconds, p.memory) for p in points if p.fits}
    want = {p for p in fitting if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in fitting)}
    table = PlanTable("m", "c", 1, 0.0, [], [], 0, 0, 0, math.inf, 0.0, None, points=points)
    front = [(p.seconds, p.memory) for p in table.front()]
    assert front == sorted(want)


def test_no_such_row(table: PlanTable) -> None:
    with pytest.raises(UsageError, match="no plan of rank 5"):
        table.explain(5)
