"""The notebooks run from a clean kernel, and their figures show the numbers of the committed ones.

Where predictions change for good: `jupyter execute --inplace notebooks/*.ipynb`, and see that the text is still right.
"""

import copy
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from distir.viz.figure import MIME

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = ROOT / "notebooks"
FIGURES = {"first_steps": 4, "mlp_grid_search": 4}
"""Figures of each notebook."""
SAVED = {
    "first_steps": set(),
    "mlp_grid_search": {"grid_throughput.pdf", "grid_communication.pdf", "simulator_time.pdf", "scaling.pdf"},
}
MEASURED = {"simulator time (s, measured)", "time (ms)"}
"""What is shown upwards where it is not compared: seconds of this machine."""


def committed(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def figures(notebook):
    """The numbers of each figure, in order."""
    return [output["data"][MIME] for output in outputs(notebook) if MIME in output.get("data", {})]


def panel_numbers(panel):
    """Lines and areas by kind and name, as lists of points; of what is measured only where its points stand along x."""
    measured = panel["y"] in MEASURED
    found = {("line", name): [line] for name, line in panel["lines"].items()}
    found |= {("area", name): areas for name, areas in panel["areas"].items()}
    return {key: [[p[:1] if measured else p for p in points] for points in lists] for key, lists in found.items()}


def assert_same_figures(got, want):
    assert len(got) == len(want)
    for a, b in zip([p for panels in got for p in panels], [p for panels in want for p in panels], strict=True):
        assert [a[k] for k in ("title", "x", "y")] == [b[k] for k in ("title", "x", "y")]
        title = a["title"]
        a, b = panel_numbers(a), panel_numbers(b)
        assert a.keys() == b.keys()
        for key in a:
            assert len(a[key]) == len(b[key])
            for points, expected in zip(a[key], b[key], strict=True):
                flat, expected = [x for p in points for x in p], [x for p in expected for x in p]
                assert flat == pytest.approx(expected, rel=1e-9, abs=1e-12), (title, *key)


@pytest.mark.parametrize("name", FIGURES)
def test_notebook_runs_and_shows_the_committed_numbers(name, tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    want, notebook = committed(name), committed(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    where = {"metadata": {"path": str(tmp_path / "notebooks")}}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where)
    client.execute(env={**os.environ, "PYTHONPATH": path})
    assert_same_figures(figures(notebook), figures(want))
    saved = {p.name: p.read_bytes() for p in (tmp_path / "notebooks").glob("figures/*")}
    assert saved.keys() == SAVED[name]
    assert all(pdf.startswith(b"%PDF") for pdf in saved.values())


@pytest.mark.parametrize("name", FIGURES)
def test_committed_notebook_is_whole(name):
    """It was run from top to bottom, without warnings, and says nothing of the machine it ran on."""
    notebook = committed(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.output_type for output in outputs(notebook)} <= {"stream", "display_data", "execute_result"}
    assert {output.name for output in outputs(notebook) if output.output_type == "stream"} == {"stdout"}
    assert len(figures(notebook)) == FIGURES[name]
    assert all("image/png" in output["data"] for output in outputs(notebook) if MIME in output.get("data", {}))
    assert str(Path.home()) not in (NOTEBOOKS / f"{name}.ipynb").read_text()


def test_every_notebook_is_tested():
    assert {p.stem for p in NOTEBOOKS.glob("*.ipynb")} == FIGURES.keys()


@pytest.mark.parametrize("name", FIGURES)
def test_another_number_is_seen(name):
    """The comparison fails for any number that is a little off, unless it is measured."""
    want = figures(committed(name))
    assert_same_figures(want, want)
    for k, panels in enumerate(want):
        for j, panel in enumerate(panels):
            for kind in ("lines", "areas"):
                for label in panel[kind]:
                    changed = copy.deepcopy(want)
                    last = changed[k][j][kind][label][-1]
                    last = last if kind == "lines" else last[-1]
                    last[1] = last[1] * (1 + 1e-8) + 1e-8
                    if panel["y"] in MEASURED:
                        assert_same_figures(changed, want)
                        last[0] += 1
                    with pytest.raises(AssertionError):
                        assert_same_figures(changed, want)
    with pytest.raises(AssertionError):
        assert_same_figures(want[:-1], want)
