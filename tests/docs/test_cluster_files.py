"""Cluster files that pages show can be loaded, and give what their comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distir.hardware import load_cluster

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = [
    pytest.param(block, id=f"{page.stem}-{k}")
    for page in sorted(DOCS.glob("*.md"))
    for k, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    if re.search(r"^(\[network\]|network =)", block, re.MULTILINE)
]


def test_there_are_such_files() -> None:
    assert len(SHOWN) >= 2


@pytest.mark.parametrize("text", SHOWN)
def test_it_is_loaded(text: str, tmp_path: Path) -> None:
    path = tmp_path / "shown.toml"
    path.write_text(text, encoding="utf-8")
    found = load_cluster(path, nodes=2).regular
    assert found is not None
    assert found.name in text
    needed = path.read_text(encoding="utf-8")
    for line in text.splitlines():  # what is said to have a default may be left out
        if re.search(r"#.*\bdefault\b", line):
            needed = needed.replace(f"{line}\n", "")
    path.write_text(needed, encoding="utf-8")
    assert load_cluster(path, nodes=2).regular is not None
