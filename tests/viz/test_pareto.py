"""Fronts of time and memory: numbers that can be read, axes that suit the values."""

import random

import pytest

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from distir.viz import Choice, pareto
from distir.viz.pareto import numbered_front


def front(draw, n, wide):
    """A front of so many plans, some of which are hard to tell apart, and as many other plans."""
    seconds, memory, found = 1.0, 1e12, []
    for k in range(n):
        seconds *= 1 + draw.random() ** 3 * wide
        memory /= 1 + draw.random() ** 3 * wide
        found.append(Choice(f"plan {k}", seconds, memory, True, True))
        found.append(Choice("other", seconds * 2, memory * 2, draw.random() < 0.5, False))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_numbers_do_not_overlap(seed):
    draw = random.Random(seed)
    figure = pareto("a", front(draw, draw.randint(2, 15), draw.choice([0.02, 0.5])), [2e12])
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # an annotation's has its line, too
    assert len(boxes) >= 2
    centres = [((b.x0 + b.x1) / 2, (b.y0 + b.y1) / 2) for b in boxes]
    overlaps = [
        (a, b) for k, a in enumerate(centres) for b in centres[:k] if abs(a[0] - b[0]) < 10 and abs(a[1] - b[1]) < 8
    ]
    assert overlaps == []


def test_a_long_front_has_numbers_at_its_ends():
    plans = front(random.Random(0), 40, 0.5)
    numbered = numbered_front(plans)
    assert [k for k, _ in numbered] == list(range(1, 16))
    mine = sorted([x for x in plans if x.front], key=lambda x: x.seconds)
    assert (numbered[0][1], numbered[-1][1]) == (mine[0], mine[-1])


def test_axes():
    """Logarithmic where values differ much; the limit is inside."""
    near = [Choice("a", 1.0, 2.0**30, True, True), Choice("b", 1.5, 2.0**29, True, True)]
    far = [*near, Choice("c", 30.0, 2.0**35, False, False)]
    plain, wide = (pareto("t", plans, [2.0**31]).axes[0] for plans in (near, far))
    assert (plain.get_xscale(), plain.get_yscale()) == ("log", "linear")
    assert (wide.get_xscale(), wide.get_yscale()) == ("log", "log")
    assert plain.get_xlim()[0] < 0.5
    assert plain.get_xlim()[1] > 2
    assert plain.get_xlabel().endswith("(GiB)")
    assert plain.get_ylabel() == "step (s)"


def test_nothing_to_draw():
    assert [axes.get_title() for axes in pareto("a", [], []).axes] == ["a", ""]


def test_names_of_files_are_no_mathematics_and_may_be_no_utf_8(tmp_path):
    """A $ begins none, and bytes that are no text are shown as escapes."""
    figure = pareto("a$\\frac$b\udcfe.onnx", [Choice("x$y$\udcfe", 1.0, 2.0**30, True, True)], [])
    for name in ("a.svg", "a.png"):
        figure.savefig(tmp_path / name)
    assert figure.axes[0].get_title() == "a$\\frac$b\\xfe.onnx"
