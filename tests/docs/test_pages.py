"""The README and the pages of `docs/`: their commands run, their outputs are as shown, their links lead somewhere."""

import difflib
import re

import pytest

from distir.cli.flags import parse as parse_flags
from tests.backends.mpi import needs_mpi
from tests.docs.console import ROOT, blocks, commands, in_this_process, output_of, regenerated, shell, workspace

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def name(page):
    return str(page.relative_to(ROOT))


def bash(page):
    """The commands of each `bash` block that has any."""
    lines = page.read_text().split("\n")
    for block in blocks(lines):
        if block.kind == "bash":
            found = [words for line in lines[block.begin : block.end] for words in commands(line)]
            if found:
                yield found


def console(page):
    """The `distir` commands of `console` blocks, variables put in, pipes left out."""
    variables = {}
    for line in re.findall(r"^\$ (.*)$", page.read_text(), re.MULTILINE):
        if found := re.fullmatch(r'([A-Z]+)="(.*)"', line):
            variables[found[1]] = found[2]
        else:
            line = re.sub(r"\$([A-Z]+)", lambda m: variables[m[1]], line)
            yield from commands(line.partition(" | ")[0])


def anchors(page):
    """The anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def cases(quick):
    """The `bash` blocks of all pages that are run in this process, or those that are not."""
    return [
        needs_mpi_if(pytest.param(block, id=f"{name(page)}-{k}"), any(words[0] == "mpirun" for words in block))
        for page in PAGES
        for k, block in enumerate(bash(page))
        if all(map(in_this_process, block)) == quick
    ]


def needs_mpi_if(case, runs_mpi):
    return pytest.param(*case.values, id=case.id, marks=needs_mpi) if runs_mpi else case


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which commands run."""
    monkeypatch.chdir(workspace(tmp_path))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_outputs_are_as_shown(page, folder):
    text = page.read_text()
    changed = list(difflib.unified_diff(text.splitlines(), regenerated(text).splitlines(), "page", "now", "", "", 0))
    again = f"python -m tests.docs.console {name(page)}"
    assert not changed, "\n".join([*changed, f"regenerate the page: {again}"])


@pytest.mark.parametrize("block", cases(True))
def test_commands_run(block, folder):
    for words in block:
        output_of.__wrapped__(words)


@pytest.mark.slow
@pytest.mark.parametrize("block", cases(False))
def test_commands_that_start_processes_run(block, folder):
    for words in block:
        shell(words, folder)


def test_every_command_parses_and_is_somewhere():
    found = set()
    for page in PAGES:
        for words in [*console(page), *(words for block in bash(page) for words in block)]:
            if "distir" in words:
                args = parse_flags(list(words[words.index("distir") + 1 :]))
                found.add(words[words.index("distir") + 1])
                if hasattr(args, "model") and "examples/" in str(args.model):
                    assert (ROOT / args.model).exists()
    want = {"run", "simulate", "accuracy", "show", "passes", "opt", "clusters", "schedule", "bench", "compare", "plot"}
    want |= {"explain", "export", "inspect", "plan"}
    assert found == want


def test_a_command_that_fails_is_seen(folder):
    with pytest.raises(AssertionError, match="exit code 2"):
        output_of.__wrapped__(("distir", "simulate", "missing.onnx", "--cluster", "dgx-a100"))
    with pytest.raises(AssertionError, match="exit code 2"):
        shell(("distir", "schedule", "missing.csv"), folder)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_are_there(page):
    names = re.findall(r"`((?:distir|tests|examples|benchmarks|docs)/[\w/.]+)`", page.read_text())
    assert [found for found in names if not (ROOT / found).exists()] == []


def test_the_picture_is_drawn_from_the_present_prediction():
    import importlib.util

    spec = importlib.util.spec_from_file_location("timeline", ROOT / "docs" / "images" / "timeline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    figure, text = module.draw()
    assert "time (ms)" in {axes.get_xlabel() for axes in figure.axes}
    again = "draw it again: python docs/images/timeline.py"
    assert f">{text}<" in module.FILE.read_text(), again
    assert module.FILE.stat().st_size < 100_000
