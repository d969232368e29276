"""`distir plan`: its table, JSON and exit codes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distir.cli import main
from distir.hardware import host_cores

ROOT = Path(__file__).parent.parent.parent
LINE = ["plan", "gpt:layers=2,hidden=64,heads=4,vocab=64", "--seq", "32", "--cluster", "dgx-a100", "--batch", "4"]


def test_table(capsys):
    assert main([*LINE, "--gpus", "2", "--vary", "dp,tp,pp", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "MFU" in out
    assert "plans: " in out
    assert "the best plan loses most to " in out


def test_json(capsys):
    assert main([*LINE, "--gpus", "1,2", "--vary", "dp,tp", "--fix", "recompute=full", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [x["devices"] for x in found] == [1, 2]
    assert all(p["plan"]["recompute"] == "full" for x in found for p in x["plans"])
    assert all(p["bound_seconds"] <= p["step_seconds"] for x in found for p in x["plans"])


def test_numbers_of_devices_for_which_there_is_no_plan(capsys):
    line = [*LINE, "--gpus", "2,3", "--vary", "dp", "--top", "1"]
    assert main([*line, "--json"]) == 0
    _, failed = json.loads(capsys.readouterr().out)
    why = "no plan for a batch of 4 on 3 devices"
    assert failed == {"devices": 3, "plans": [], "error": why, "hint": "let tp vary or let pp vary"}
    assert main(line) == 0
    assert f"3 devices: {why} (let tp vary or let pp vary)" in capsys.readouterr().out


def test_chunks_are_kept(capsys):
    """They are those of an interleaved schedule: other plans have none."""
    assert (
        main(
            [*LINE, "--gpus", "2", "--fix", "chunks=2", "--vary", "pp,microbatch,schedule,sequence-parallel", "--json"]
        )
        == 0
    )
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert {(p["plan"]["schedule"], p["plan"]["chunks"]) for p in plans} == {("interleaved", 2)}


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        (["--gpus", "0"], 2, "at least 1"),
        (["--gpus", "2", "--fix", "tp"], 2, "NAME=X"),
        (["--gpus", "2", "--vary", "dp,dq"], 2, "dq"),
        (["--gpus", "2", "--memory-reserve", "77.7"], 4, "fits"),
        (["--gpus", "2", "--memory-reserve", "78.9"], 4, "leaves nothing of the 79.1 GiB of a device"),
        (["--gpus", "2", "--memory-reserve", "1000"], 4, "a reserve of 1,000.0 GiB, beside what a process takes"),
        (["--gpus", "7", "--fix", "dp=7"], 4, "no plan for a batch of 4 on 7 devices with dp 7\nhint: without dp"),
        (["--gpus", "3", "--vary", "dp"], 4, "no plan for a batch of 4 on 3 devices\nhint: let tp vary or let pp vary"),
        (["--gpus", "2", "--fix", "microbatch=3"], 4, "with microbatch 3\nhint: without microbatch"),
        (["--gpus", "2", "--fix", "zero=1", "--fix", "dp=1"], 4, "hint: without zero or without dp"),
        (["--gpus", "64", "--fix", "pp=64"], 4, "hint: use at most --pp"),
        (["--gpus", "100003"], 4, "plans can be applied: tp 100003 splits nothing in decoder\nhint: use --tp 2"),
        (["--gpus", "2", "--fix", "tp=2", "--fix", "tp=1"], 2, "--fix tp is given twice: 2 and 1"),
        (["--gpus", "2", "--fix", "tp=true"], 2, "tp is a whole number of at least 1, got True"),
        (["--gpus", "2", "--fix", "zero=true"], 2, "zero is one of 0, 1, 2, 3, got True"),
        (["--gpus", "2", "--fix", "sequence-parallel=1"], 2, "sequence_parallel is one of false, true, got 1"),
        (["--gpus", "2", "--fix", "order=tp"], 2, "order names tp, dp and pp once each"),
        (["--gpus", "2", "--fix", "order=tp,dp,pp,qp"], 2, "order names tp, dp and pp once each"),
        (["--gpus", "2", "--fix", "order=5"], 2, "order names tp, dp and pp once each"),
        (["--gpus", "2,3", "--fix", "dp=3"], 4, "no plan for a batch of 4 on 2 devices with dp 3"),
        (["--gpus", "2", "--loss", "none"], 2, "training"),
        (["--gpus", "1,2", "--emit", "distir", "p.toml"], 2, "--emit writes one plan"),
        (["--gpus", "2", "--emit", "deepspeed", "p"], 2, "no plans are written for 'deepspeed'"),
        (["--gpus", "2", "--top", "3", "--emit-rank", "4"], 2, "the table has 3 rows"),
        (["--gpus", "2", "--plot", "front.gif"], 2, "cannot draw front.gif"),
        (["--gpus", "2", "--plot", "no/such/front.pdf"], 2, "cannot write no/such/front.pdf: no/such is no folder"),
        (["--gpus", "2", "--report", "."], 2, "cannot write .: it is a folder"),
        (["--gpus", "2", "--report", ""], 2, "cannot write '': it is a folder"),
        (["--gpus", "2", "--report", "/dev/null"], 2, "cannot write /dev/null: it is there and is no regular file"),
        (["--gpus", "2", "--emit", "distir", "p", "--report", "./p"], 2, "./p is to be written twice"),
    ],
)
def test_errors(capsys, monkeypatch, tmp_path, more, code, word):
    monkeypatch.chdir(tmp_path)
    assert main([*LINE, *more]) == code
    found = capsys.readouterr()
    assert found.out == ""
    assert word in found.err
    assert len(found.err.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tool", "flag"), [("distir", "plan"), ("torchtitan", "torchtitan"), ("megatron", "megatron-args")]
)
def test_a_plan_is_written_and_simulated(capsys, tmp_path, tool, flag):
    """Each row of the table is what `simulate` predicts of the file that is written for it."""
    path = str(tmp_path / "plan")
    fixed = {"dp": 2, "tp": 2, "zero": 2, "sequence_parallel": "true", "recompute": "full"}
    fixes = [x for name, value in fixed.items() for x in ("--fix", f"{name}={value}")]
    line = [*LINE, "--gpus", "4", "--batch", "8", "--vary", "microbatch", *fixes, "--json", "--emit", tool, path]
    for rank in (1, 2):
        assert main([*line, "--emit-rank", str(rank)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["emitted"] == [{"tool": tool, "file": path}]
        sizes = ["--dim", "batch=8", "--dim", "seq=32", *(["--precision", "bf16"] if tool == "distir" else [])]
        trained = ["--loss", "cross-entropy", "--optimizer", "adamw", "--cluster", "dgx-a100"]
        assert main(["simulate", LINE[1], f"--{flag}", path, *sizes, *trained, "--json"]) == 0
        read = json.loads(capsys.readouterr().out)
        assert read["step_seconds"] == found["plans"][rank - 1]["step_seconds"]
        assert read["plan"]["microbatches"] == found["plans"][rank - 1]["plan"]["microbatches"]


def test_a_plan_that_a_tool_cannot_express(capsys, tmp_path):
    """The table is there; nothing is written."""
    path = tmp_path / "plan"
    line = [*LINE, "--gpus", "2", "--vary", "tp", "--fix", "dp=2", "--fix", "zero=1"]
    assert main([*line, "--emit", "distir", f"{path}.toml", "--emit", "torchtitan", str(path)]) == 4
    found = capsys.readouterr()
    assert "plans: 1 simulated" in found.out or "1 plan: 1 simulated" in found.out
    assert found.err == "distir: error: torchtitan cannot express ZeRO 1\nhint: nearest: --zero 2\n"
    assert main([*line, "--emit", "torchtitan", str(path), "--json"]) == 4
    said = json.loads(capsys.readouterr().out)
    assert (said["error"], said["exit_code"]) == ("torchtitan cannot express ZeRO 1", 4)
    assert len(said["result"]["plans"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert main([*line, "--emit", "megatron", str(path)]) == 0
    assert "--use-distributed-optimizer" in path.read_text()
    assert f"plan written for megatron to {path}" in capsys.readouterr().out


def test_the_first_row_that_a_tool_can_express(capsys, tmp_path):
    path = str(tmp_path / "plan.toml")
    line = [*LINE, "--gpus", "2", "--vary", "zero", "--fix", "dp=2", "--emit", "torchtitan", path]
    assert main([*line, "--emit-rank", "2"]) == 4
    found = capsys.readouterr()
    assert ["ZeRO 1" in x for x in found.out.splitlines() if x.startswith("dp ")] == [False, True, False]
    assert found.err.endswith("; or --emit-rank 1: the first row that can be expressed\n")
    assert main([*line, "--emit-rank", "1"]) == 0


def test_a_batch_that_is_not_given(capsys):
    line = ["plan", str(ROOT / "examples/gpt2-tiny.onnx"), "--cluster", "cpu-2core", "--gpus", "2"]
    assert main(line) == 2
    assert capsys.readouterr().err.endswith("is not given\nhint: --batch 64\n")
    assert main([*line, "--dim", "batch=4", "--vary", "dp"]) == 0


def test_figure_and_report(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    figure, report = tmp_path / "front.svg", tmp_path / "report.html"
    line = [*LINE, "--gpus", "1,2", "--vary", "dp,tp,zero", "--plot", str(figure), "--report", str(report)]
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all((x["figure"], x["report"]) == (str(figure), str(report)) for x in found)
    drawn = figure.read_text()  # with what its letters say in comments
    assert "<svg" in drawn
    assert all(f"on {n} of dgx-a100" in drawn for n in ("1 device", "2 devices"))
    assert len(re.findall(r"<!-- timeline of dp", drawn)) == len(re.findall(r"<!-- memory of \d", drawn)) == 2
    text = report.read_text()
    assert text.count("<article>") == 2
    assert all(row["plan"] in text for x in found for row in x["simulated_plans"] if row["plan"])
    assert {p.name for p in tmp_path.iterdir()} == {figure.name, report.name}


def test_files_are_written_for_a_reader_that_has_gone(tmp_path):
    """Such as head: it may end between the table and the files."""
    path = tmp_path / "best.toml"
    reader, writer = os.pipe()
    os.close(reader)
    line = [*LINE, "--gpus", "2", "--vary", "dp", "--emit", "distir", str(path)]
    process = subprocess.run([sys.executable, "-m", "distir", *line], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (process.returncode, process.stderr) == (0, b"")
    assert path.exists()


def test_interrupted_while_the_shown_plans_are_examined(capsys, monkeypatch, tmp_path):
    """The table is printed, files are written, and the exit code is that of an interrupt."""

    def interrupt(setting, c):
        raise KeyboardInterrupt

    monkeypatch.setattr("distir.search.planning.host_cores", lambda: 1)
    monkeypatch.setattr("distir.search.simulating.examine", interrupt)
    path = tmp_path / "best.toml"
    assert main([*LINE, "--gpus", "2", "--vary", "dp,tp", "--top", "2", "--emit", "distir", str(path)]) == 130
    found = capsys.readouterr()
    assert len([x for x in found.out.splitlines() if x.startswith("dp ")]) == 2
    assert "interrupted: the programs of" in found.out
    assert "the best plan " not in found.out
    assert "distir: error: interrupted" in found.err
    assert path.exists()


def test_interrupted():
    """Ctrl-C at a terminal, when the progress bar shows a plan, prints the best so far."""
    line = ["plan", "gpt:layers=24,hidden=256,heads=8,vocab=1024", "--seq", "128", "--cluster", "dgx-a100"]
    line += ["--gpus", "64", "--batch", "512", "--top", "1"]
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "distir", *line],
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160", "TERM": "xterm"},
        start_new_session=True,
        text=True,
    )
    os.close(stderr)
    shown = b""
    while b"plans simulated" not in shown or b"best" not in shown:
        shown += os.read(terminal, 4096)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    out = process.stdout.read()
    try:
        while more := os.read(terminal, 4096):
            shown += more
    except OSError:  # Linux: the other side is closed
        pass
    os.close(terminal)
    assert process.wait(timeout=60) == 130
    assert "interrupted: the search had not ended" in out
    assert "no plan left out is quicker than" in out
    assert len([x for x in out.splitlines() if x.startswith("dp ")]) == 1
    assert b"distir: error: interrupted" in shown
    assert b"Traceback" not in shown


several_processes = pytest.mark.skipif(
    sys.platform != "linux" or host_cores() == 1, reason="Linux ends the processes of a search, if there are any"
)


def started(*more):
    """A search that takes long, and its processes, once these are there."""
    line = ["plan", "gpt:layers=24,hidden=256,heads=8,vocab=1024", "--seq", "128", "--cluster", "dgx-a100", *more]
    command = [sys.executable, "-m", "distir", *line, "--gpus", "64", "--batch", "512"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found: list[int] = []
    while len(found) < 2:
        found = [int(pid) for pid in children.read_text().split()]
    time.sleep(0.5)  # they may still begin
    return process, found


@several_processes
def test_processes_end_with_a_command_that_is_killed():
    process, _ = started()
    process.kill()
    process.communicate(timeout=20)  # waits for all that have its streams


@several_processes
def test_a_process_of_the_search_that_is_killed():
    process, children = started("--json")
    os.kill(children[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 6
    assert json.loads(out)["exit_code"] == 6
    assert "a process of the search was ended from outside" in err
    assert "memory" in err
