"""How commands end that cannot go on: interrupted before they have begun, or with nowhere left to write."""

from __future__ import annotations

import ast
import contextlib
import errno
import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import distir
from distir.cli import main
from distir.ir.errors import UsageError
from distir.ir.files import no_room, temporary
from tests.runs import ROOT, Family

MLP, GPT = (str(ROOT / "examples" / f"{name}.onnx") for name in ("mlp", "gpt2-tiny"))
MSE = ["--dim", "batch=8", "--loss", "mse"]
SIGNAL_ON_IMPORT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Finder())
"""
SCRIPT = "import sys\nfrom distir.cli import console\nsys.exit(console())\n"


@pytest.mark.parametrize(
    "name", ["distir.ir", "distir.ops", "distir.ops.nn", "distir.cli", "distir.cli.flags", "numpy"]
)
@pytest.mark.parametrize("how", ["module", "script"])
def test_an_interrupt_while_modules_are_loaded_has_no_traceback(name: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_ON_IMPORT)
    script = tmp_path / "distir"
    if how == "script":  # as the installed one is
        script.write_text(SCRIPT)
    start = ["-m", "distir"] if how == "module" else [str(script)]
    env = Family().env(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", INTERRUPT_AT=name)
    line = [sys.executable, *start, "simulate", MLP, *MSE, "--cluster", "dgx-a100"]
    done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "distir: error: interrupted\n")


def test_an_interrupt_is_handled_before_anything_else_is_loaded() -> None:
    """Until then Ctrl-C shows a traceback: what is imported first is what the handler needs."""
    body = ast.parse((ROOT / "distir/__init__.py").read_text()).body
    begin = next(k for k, node in enumerate(body) if isinstance(node, ast.If))
    before = [ast.unparse(node) for node in body[:begin] if isinstance(node, ast.Import | ast.ImportFrom)]
    assert before == ["import os", "import signal", "import sys"]
    assert "signal.signal(signal.SIGINT, end_interrupted)" in ast.unparse(body[begin])


def test_importing_distir_leaves_signals_alone() -> None:
    code = "import signal, distir; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], env=Family().env(), cwd=ROOT, check=True)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A text, the metrics of a run, and a folder in which to write."""
    text, metrics, folder = tmp_path / "text.txt", tmp_path / "m.json", tmp_path / "new"
    text.write_text("".join(f"{k} bottles of beer on the wall, {k} bottles of beer\n" for k in range(300)))
    model = distir.load(MLP, {"batch": 8}, loss="mse")
    distir.run(model, steps=1, backend="numpy", metrics=metrics)
    folder.mkdir()
    return {"TEXT": text, "METRICS": metrics, "NEW": folder}


WRITERS = [
    ["plot", "METRICS", "-o", "NEW/f.pdf"],
    ["plot", "METRICS", "-o", "NEW/f.png"],
    ["plot", "METRICS", "-o", "NEW/f.svg"],
    ["simulate", MLP, *MSE, "--cluster", "dgx-a100", "--trace", "NEW/t.json"],
    ["run", MLP, *MSE, "--backend", "numpy", "--metrics", "NEW/m.json"],
    ["run", MLP, *MSE, "--backend", "numpy", "--save", "NEW/m.onnx"],
    [
        "run",
        GPT,
        "--dim",
        "batch=4",
        "--loss",
        "cross-entropy",
        "--backend",
        "numpy",
        "--data",
        "TEXT",
        "--tokenizer",
        "NEW/t.json",
    ],
    ["run", MLP, *MSE, "--dp", "2"],  # its temporary files
]


@pytest.mark.parametrize("line", WRITERS, ids=lambda line: f"{line[0]} {line[-1]}")
def test_a_full_disk_is_one_line(
    line: list[str], files: dict[str, Path], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow beyond a few hundred bytes."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python 3.11 keeps what it has written by halves
    argv = [str(files[x.partition("/")[0]] / x.partition("/")[2]) if x.partition("/")[0] in files else x for x in line]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with capfd.disabled():  # what is captured goes to a file, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
        try:
            code, said = _quietly(argv)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, ignored)
    assert code == 2
    first, *more = said.splitlines()
    assert first.startswith("distir: error: cannot write ")
    assert first.endswith(": File too large")
    assert all(text.startswith("hint: ") for text in more)
    assert list(files["NEW"].iterdir()) == []


def _quietly(line: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a command in this process; stdout goes nowhere."""
    said = io.StringIO()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(said):
        return main(line), said.getvalue()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_what_a_full_disk_says(number: int) -> None:
    with pytest.raises(UsageError, match=r"^cannot write temporary files: .* \(hint: TMPDIR "), temporary():
        raise OSError(number, os.strerror(number))
    assert no_room(OSError(errno.EACCES, "no")) is None
    with pytest.raises(PermissionError), temporary():
        raise PermissionError(errno.EACCES, "no")


def test_a_full_stdout() -> None:
    line = [sys.executable, "-m", "distir", "show", MLP, *MSE]
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, env=Family().env(), cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "distir: error: cannot write the results: No space left on device"


def test_where_a_profile_was_written_none_is_advised(tmp_path: Path) -> None:
    model = distir.load(MLP, {"batch": 8}, loss="mse")
    plain = distir.run(model, distir.Plan(), steps=3)
    profiled = distir.run(model, distir.Plan(), steps=3, profile=tmp_path)
    for result, advised in ((plain, True), (profiled, False)):
        result.seconds[:] = [100.0] * 3  # far from what is predicted
        assert any("distir run --profile" in text for text in result.lines()) == advised
