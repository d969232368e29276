"""The glossary: an entry a word, in order, short, with a place in the package that exists."""

import re

from tests.docs.console import ROOT

PAGE = (ROOT / "docs" / "glossary.md").read_text()
ENTRIES = dict(re.findall(r"^\*\*(.+?)\*\*: (.*?)(?=\n\n|\Z)", PAGE, re.MULTILINE | re.DOTALL))
EXPLAINED = (
    "mesh, axis, placement, shard, replicate, partial, sub-dimension, factor, stage, microbatch, bubble, "
    "schedule, cell, phase, prologue, collective, bus bandwidth, bucket, zero, liveness, alias analysis, "
    "donation, preflight, transport, rank program, body, bundle, erasure, validation, claim, strategy, plan, "
    "exposed communication, device class, max-plus"
)


def test_every_word_has_an_entry():
    assert set(EXPLAINED.split(", ")) <= {name.lower() for name in ENTRIES}
    assert list(ENTRIES) == sorted(ENTRIES, key=str.lower)


def test_entries_are_short_and_name_a_place():
    for name, text in ENTRIES.items():
        paths = re.findall(r"`(distir/[\w/]+(?:\.py)?)`", text)
        assert paths or "`distir." in text, name
        assert [p for p in paths if not (ROOT / p).exists()] == [], name
        said = re.sub(r"`distir[\w/.]*`", "", text)
        assert len(re.findall(r"[.?!](?:\s|$)", said)) <= 4, name
        assert len(said.split()) <= 70, name


def test_the_readme_links_the_pages():
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in readme
