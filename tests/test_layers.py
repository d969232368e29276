"""Which part of the package may import which; read from the source, imports inside functions included."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "distir"
LAYERS = [
    {"ir"},
    {"ops"},
    {"importer", "transforms", "executor", "hardware"},
    {"models", "backends", "viz"},
    {"api"},
    {"cli"},
    {"__main__"},
]
"""From the lowest. Each part may import itself and what is in layers below."""
HOME = {
    "onnx": {"importer"},
    "torch": {"backends"},
    "matplotlib": {"viz"},
    "tokenizers": {"api"},
    "rich": {"cli"},
    "networkx": {"ir"},
    "prettyprinter": {"ir"},
}
"""Where alone a package is imported."""
HEAVY = {"numpy", "onnx", "torch", "networkx", "prettyprinter", "rich", "ml_dtypes", "matplotlib", "tokenizers"}


def layer(part):
    return next(k for k, parts in enumerate(LAYERS) if part in parts)


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """(line, dotted name) of each import in a file, those of type checkers left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # what stands under `if TYPE_CHECKING` is never imported
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            yield node.lineno, node.module
            if node.module == "distir":
                yield from ((node.lineno, f"distir.{alias.name}") for alias in node.names)


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def test_every_part_has_a_layer():
    assert {part_of(p) for p in FILES} == set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    here = part_of(path)
    for line, name in imported(path):
        top, *rest = name.split(".")
        if top == "distir" and rest:
            part = rest[0]
            if part in set().union(*LAYERS):
                assert part == here or layer(part) < layer(here), f"{path}:{line}: {here} may not import {part}"
        elif top in HOME:
            assert here in HOME[top], f"{path}:{line}: {top} is imported only in {', '.join(HOME[top])}"


def test_a_wrong_import_is_seen(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("def f():\n    from distir.api import run\n    import torch.nn\n")
    assert list(imported(file)) == [(2, "distir.api"), (3, "torch.nn")]
    assert layer("api") > layer("ir")


def test_import_is_light():
    code = "import sys, distir, distir.cli, distir.executor; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(ast.literal_eval(done.stdout))
