"""`docs/how-distir-works.md`: a wrong output is seen, it is short, and it names what is there."""

import re

import pytest

from tests.docs.console import ROOT, blocks, session

PAGE = ROOT / "docs" / "how-distir-works.md"


def test_a_wrong_state_is_seen(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = PAGE.read_text().split("\n")
    block = next(b for b in blocks(lines) if b.kind == "console")
    body = lines[block.begin : block.end]
    assert session(body, {}) == body
    wrong = [line if line.startswith("$ ") else line.replace("32", "33") for line in body]
    assert wrong != body
    assert session(wrong, {}) == body
    with pytest.raises(AssertionError, match="prints nothing"):
        session([*body[:1], "$ distir clusters | grep 'no such line'"], {})


def test_it_takes_ten_minutes_to_read():
    lines = PAGE.read_text().split("\n")
    for block in reversed(list(blocks(lines))):
        del lines[block.begin : block.end]
    assert 1200 < len(" ".join(lines).split()) < 2500


def test_files_and_rooms_that_are_named_are_there():
    names = re.findall(r"`(distir/[\w/]+(?:\.py)?|tests/[\w/]+\.py|examples/[\w.]+)`", PAGE.read_text())
    assert len(names) > 20
    assert [name for name in names if not (ROOT / name).exists()] == []
