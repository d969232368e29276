"""The command line: what it prints where, its exit codes, its errors."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import distir
from distir.cli import interrupt, main
from distir.ir import parse, same
from distir.ir.errors import ModelError
from distir.ir.type import Tensor
from tests.importer.models import model, node

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).parent.parent
GPT, MLP = (str(ROOT / "examples" / f"{name}.onnx") for name in ("gpt2-tiny", "mlp"))
TRAIN = ["--dim", "batch=8", "--loss", "cross-entropy"]
MSE = ["--dim", "batch=8", "--loss", "mse"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def command(*args, env=None, cwd=ROOT):
    """A process of its own."""
    line = [sys.executable, "-m", "distir", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, env=env or ENV, cwd=cwd, timeout=300)


@pytest.fixture
def cli(capfd):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def call(*args):
        code = main([str(x) for x in args])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def assert_error(result, code, *words):
    """One line, perhaps a hint, nothing on stdout, the exit code."""
    got, out, err = result
    lines = err.splitlines()
    assert got == code, err
    assert out == ""
    assert lines[0].startswith("distir: error: "), err
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), err
    for word in words:
        assert word in err


# ---------------------------------------------------------------- what is loaded, and how fast


def test_help_loads_nothing_heavy_and_is_quick():
    line = [sys.executable, "-X", "importtime", "-m", "distir", "--help"]
    before = os.times()
    done = subprocess.run(line, capture_output=True, text=True, env=ENV, cwd=ROOT, timeout=300)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == 0
    assert "simulate" in done.stdout
    loaded = {row.rsplit("|", 1)[1].strip().split(".")[0] for row in done.stderr.splitlines() if "|" in row}
    assert "argparse" in loaded
    assert not loaded & {"torch", "onnx", "numpy", "networkx", "rich", "prettyprinter", "ml_dtypes"}
    assert seconds < 2  # of CPU; bounds in seconds are shown by benchmarks: this one only catches a heavy import


def test_every_flag_with_a_default_says_it(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in (
        "dp",
        "tp",
        "pp",
        "microbatches",
        "schedule",
        "chunks",
        "order",
        "steps",
        "seed",
        "backend",
        "timeout",
    ):
        (said,) = re.findall(rf" --{flag} (.*?)(?= --|$)", text[text.index("the plan:") :])
        assert "default: " in said, flag


def test_version(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert e.value.code == 0
    assert re.fullmatch(r"distir \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["run", "simulate", "show", "schedule", "clusters"])
def test_each_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as e:
        main([name, "--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    assert "--json" in out
    assert "exit codes" in out


# ---------------------------------------------------------------- errors: bad flags 2, bad model 3, infeasible 4


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["COMMAND"]),
        (["walk"], ["walk"]),
        (["run"], ["MODEL.onnx"]),
        (["run", MLP, "--dim", "batch"], ["NAME=N"]),
        (["run", MLP, "--dim", "batch=zero"], ["whole number"]),
        (["run", MLP, "--dim", "batch=0"], ["at least 1"]),
        (["run", MLP, "--dim", "batch=8", "--dim", "batch=4"], ["twice"]),
        (["simulate", MLP, "--dim", "batch=99999999999999999999", "--cluster", "dgx-a100"], ["'x'", "more than 2^53"]),
        (["run", MLP], ["batch", "hint: --dim batch=8"]),
        (["run", MLP, "--dim", "batch=8", "--dim", "length=3"], ["length"]),
        (["run", MLP, *MSE, "--dp", "0"], ["--dp", "at least 1"]),
        (["run", MLP, *MSE, "--d", "2"], ["--d", "hint: did you mean --dp?"]),
        (["bench", "scaling", MLP, "--step", "2"], ["--step", "hint: did you mean --steps?"]),
        (["run", MLP, *MSE, "--schedule", "random"], ["1f1b"]),
        (["run", MLP, *MSE, "--order", "tp,dp"], ["an order names tp, dp and pp once each, got tp, dp"]),
        (["run", MLP, *MSE, "--steps", "0"], ["--steps"]),
        (["run", MLP, *MSE, "--timeout", "0"], ["--timeout"]),
        (["run", MLP, *MSE, "--lr", "nan"], ["--lr"]),
        (["run", MLP, *MSE, "--dtype", "float128"], ["float128", "float64"]),
        (["run", MLP, *MSE, "--optimizer", "adamw", "--momentum", "0.9"], ["momentum"]),
        (["run", MLP, "--dim", "batch=8", "--lr", "0.1"], ["--lr", "loss"]),
        (["run", MLP, "--dim", "batch=8", "--loss", "nothing"], ["nothing"]),
        (["run", MLP, "--dim", "batch=8", "--save", "x.onnx"], ["--save", "loss"]),
        (["run", MLP, *MSE, "--save", "/no/such/folder/x.onnx"], ["cannot write"]),
        (["run", MLP, *MSE, "--data", "missing.npz"], ["missing.npz"]),
        (["run", MLP, *MSE, "--backend", "numpy", "--cluster", "nowhere"], ["nowhere", "dgx-a100"]),
        (["simulate", MLP, *MSE], ["--cluster", "dgx-a100", "dgx-h100"]),
        (["simulate", MLP, *MSE, "--cluster", "missing.toml"], ["missing.toml"]),
        (["simulate", MLP, *MSE, "--cluster", "dgx-a100", "--trace", "/no/such/folder/t.json"], ["cannot write"]),
        (["show", MLP, "--dim", "batch=8", "--after", "training"], ["loss"]),
        (["show", MLP, *MSE, "--rank", "2"], ["rank 2"]),
        (["show", MLP, *MSE, "--rank", "0", "--after", "training"], ["--rank"]),
        (["show", MLP, *MSE, "--python", "--after", "training"], ["--python"]),
        (["show", MLP, *MSE, "--python", "--rank", "2"], ["rank 2"]),
    ],
)
def test_bad_flags_exit_2(cli, args, words):
    assert_error(cli(*args), 2, *words)


def test_nccl_without_gpus_exits_2(cli, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    code, _, err = cli("run", MLP, *MSE, "--dp", 2, "--backend", "nccl", "--steps", 1)
    assert code == 2
    assert "nccl needs a GPU per rank" in err


def test_gloo_on_gpus_without_one_exits_2(cli, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, _, err = cli("run", MLP, *MSE, "--dp", 2, "--backend", "gloo", "--device", "cuda", "--steps", 1)
    assert code == 2
    assert "device cuda needs a GPU" in err
    assert_error(cli("run", MLP, *MSE, "--backend", "numpy", "--device", "cuda"), 2, "numpy does not run on cuda")


def test_bad_models_exit_3(cli, tmp_path):
    text = tmp_path / "text.onnx"
    text.write_text("not a model")
    assert_error(cli("show", text), 3, "text.onnx")
    assert_error(cli("run", tmp_path / "missing.onnx"), 2, "missing.onnx")  # a wrong argument, not a bad model
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(Path(MLP).read_bytes()[:-100])
    assert_error(cli("simulate", cut, "--cluster", "dgx-a100"), 3, "cut.onnx")
    model = onnx.load(MLP)
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, tmp_path / "unheard.onnx")
    assert_error(cli("show", tmp_path / "unheard.onnx", "--dim", "batch=8"), 3, "Unheard")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dp", 3], ["batch of 8", "dp 3", "hint"]),
        (["--microbatches", 16], ["batch of 8"]),
        (["--pp", 64, "--microbatches", 2], ["64"]),
        (["--tp", 23], ["tp 23"]),
    ],
)
def test_infeasible_plans_exit_4(cli, flags, words):
    for name in (["run"], ["simulate", "--cluster", "dgx-a100"], ["show"]):
        assert_error(cli(name[0], MLP, *name[1:], *MSE, *flags), 4, *words)


def test_what_does_not_fit_in_memory_is_refused(cli):
    flags = ["--dim", "batch=1000000000", "--loss", "mse", "--steps", 1]
    code, _, err = cli("run", MLP, *flags)
    assert code == 4
    assert re.search(r"need .* GiB, .* GiB are available", err)
    code, _, err = cli("run", MLP, *flags, "--backend", "numpy")
    assert code == 4
    assert re.search(r"GiB of memory are needed, .* GiB are available", err)


def test_internal_errors_are_one_line(cli, monkeypatch):
    def fail(*args):
        raise RuntimeError("it broke\nin two lines")

    monkeypatch.setattr("distir.cli.commands.run", fail)
    monkeypatch.delenv("DISTIR_TRACEBACK", raising=False)
    assert_error(cli("run", MLP), 1, "internal error: RuntimeError: it broke", "--traceback")
    code, out, _ = cli("run", MLP, "--json")
    said = {"error": "internal error: RuntimeError: it broke", "hint": "--traceback shows where", "exit_code": 1}
    assert (code, json.loads(out)) == (1, said)
    monkeypatch.setenv("DISTIR_TRACEBACK", "")
    with pytest.raises(RuntimeError, match="it broke"):
        main(["run", MLP, "--traceback"])


def test_a_line_break_in_the_name_of_a_file_breaks_no_line(cli, tmp_path):
    file = tmp_path / "two\nlines.onnx"
    file.touch()
    assert_error(cli("inspect", file), 3, "two\\nlines.onnx: not an ONNX model")


def test_interrupted_exits_130(cli, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("distir.cli.programs.show", interrupt)
    assert_error(cli("show", MLP), 130, "interrupted")
    code, out, _ = cli("show", MLP, "--json")
    assert (code, json.loads(out)) == (130, {"error": "interrupted", "hint": None, "exit_code": 130})


def test_an_interrupt_that_a_library_takes_for_its_own_error(cli, monkeypatch):
    def load(*args):
        try:
            interrupt(signal.SIGINT, None)
        except KeyboardInterrupt:
            raise ImportError("please read this") from None

    monkeypatch.setattr("distir.cli._interrupts", [])
    monkeypatch.setattr("distir.cli.programs.show", load)
    assert_error(cli("show", MLP), 130, "interrupted")


def test_a_reader_that_has_enough_is_no_error():
    line = f"{sys.executable} -m distir show {GPT} --dim batch=8 --loss cross-entropy --pp 2; echo $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({line}) | head -1"], capture_output=True, text=True, env=ENV, cwd=ROOT, timeout=300
    )
    assert done.stdout.startswith("# ")
    assert done.stderr.splitlines()[-1] == "0"
    assert "error" not in done.stderr


# ---------------------------------------------------------------- show, clusters


def test_show_prints_each_stage(cli):
    said = []

    def shown(*flags):
        code, out, err = cli("show", GPT, "--dim", "batch=8", "--full", *flags)
        assert code == 0
        said.append(err)
        return parse(out), out

    imported, _ = shown()
    assert [v.name for v in imported.outputs] == ["logits"]
    training, _ = shown("--loss", "cross-entropy", "--optimizer", "adamw")
    assert training.updates
    program, text = shown("--loss", "cross-entropy", "--dp", 2, "--pp", 2)
    assert "mesh stage1(" in text
    mine, _ = shown("--loss", "cross-entropy", "--dp", 2, "--pp", 2, "--rank", 3)
    assert len(mine.ops) < len(program.ops)
    assert {op.op_type for op in mine.ops} & {"MPIRecv", "MPISend"}
    assert shown("--loss", "cross-entropy", "--dp", 2, "--after", "import")[1] == shown()[1]
    assert said[0] == said[-1] == ""
    assert all(text.startswith("fuse: 2 Attention, 2 Gelu in place of ") for text in said[1:4])


def test_show_begins_with_a_summary_and_folds(cli):
    flags = ["show", GPT, *TRAIN, "--dp", 2, "--tp", 2]
    code, whole, _ = cli(*flags, "--full")
    program = parse(whole)
    code, out, _ = cli(*flags)
    assert code == 0
    head = [line for line in out.splitlines() if line.startswith("# ")]
    assert out.startswith(head[0])
    ops = sum(len(f.ops) for f in (program, *program.callees()))
    calls = sum(op.callee is not None for f in (program, *program.callees()) for op in f.ops)
    assert f"distributed over 4 devices: {1 + len(program.callees())} function" in head[0]
    assert f"{ops - calls:,} ops" in head[0]
    assert any(re.match(r"# tp: a rank sends \d+ MPIAllreduce \([\d.]+ KiB\)", line) for line in head)
    assert re.search(r"\.\.\. \d+ more", out)
    assert max(map(len, out.splitlines())) < max(map(len, whole.splitlines())) / 2
    with pytest.raises(ModelError, match="folded: distir show --full"):
        parse(out)


def test_a_short_program_is_not_folded(cli):
    flags = ["show", "proxy-dlrm:ranks=2"]
    short, whole = cli(*flags)[1], cli(*flags, "--full")[1]
    assert same(parse(short), parse(whole))
    assert short.startswith("# ")


def test_show_json(cli):
    code, out, _ = cli("show", MLP, "--dim", "batch=8", "--tp", 2, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["after"] == "prefetch"
    assert isinstance(found["rewrites"], list)
    parse(found["program"])


def test_show_python(cli):
    code, out, err = cli("show", MLP, *MSE, "--dp", 2, "--python", "--rank", 1)
    assert (code, err) == (0, "grad: 8 Gemm, 1 MSELoss decomposed\nfold: without 7 Transpose, 1 Mul\n")
    compile(out, "source", "exec")
    assert "def main_graph(args, t):" in out
    assert "addmm(" in out
    code, out, _ = cli("show", MLP, *MSE, "--python", "--json")
    assert json.loads(out)["after"] == "rank"
    compile(json.loads(out)["python"], "source", "exec")


def test_clusters(cli):
    code, out, _ = cli("clusters")
    assert code == 0
    assert {"cpu-2core", "dgx-a100", "dgx-h100"} <= {row.split(" ")[0] for row in out.splitlines()}
    assert "h100-pcie" in out
    code, out, _ = cli("clusters", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["dgx-a100"]["devices_per_node"] == 8
    assert [rows["dgx-a100"][key] for key in ("device", "kind")] == ["a100-sxm-80gb", "gpu"]
    assert [rows["cpu-2core"][key] for key in ("device", "kind")] == ["cpu", "cpu"]
    code, out, _ = cli("clusters", "dgx-a100")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("###")][:2] == [
        "### cluster dgx-a100",
        "### device a100-sxm-80gb",
    ]
    code, out, _ = cli("clusters", "a100-sxm-80gb", "--json")
    assert json.loads(out)["device a100-sxm-80gb"]["memory_gb"] == 80
    assert_error(cli("clusters", "dgx-a10"), 2, "unknown cluster 'dgx-a10'", "did you mean dgx-a100?")


def test_bench_collectives(cli):
    code, out, _ = cli("bench", "collectives", "--collective", "all-reduce", "--size", "4096", "--size", "65536")
    assert code == 0
    rows = [row.split()[:3] for row in out.splitlines()[1:]]
    assert rows == [["all-reduce", "2", "4,096"], ["all-reduce", "2", "65,536"]]
    code, out, _ = cli("bench", "collectives", "--collective", "send-recv", "--size", "4096", "--json")
    (timing,) = json.loads(out)["timings"]
    assert timing["bus_bandwidth"] == pytest.approx(timing["size"] / timing["seconds"])
    assert timing["over"] in ("memory", "gloo")
    assert_error(cli("bench", "collectives", "--collective", "sned"), 2, "'sned'", "all-reduce", "device-to-host")
    assert_error(cli("bench", "collectives", "--nproc", "1"), 2, "at least 2 ranks, got 1", "--nproc 2")
    assert_error(cli("bench", "collectives", "--collective", "host-to-device"), 2, "needs a GPU", "--backend nccl")
    alone = ("bench", "collectives", "--backend", "nccl", "--nproc", "1")
    assert_error(cli(*alone, "--collective", "send-recv"), 2, "send-recv needs at least 2 ranks, got 1", "--nproc 2")
    assert_error(cli(*alone, "--out", "net.toml"), 2, "for backend mpi, not for nccl", "distir calibrate")
    assert_error(
        cli("bench", "collectives", "--out", "net.toml"), 2, "for backend mpi, not for gloo", "distir calibrate"
    )
    assert_error(cli("bench", "collectives", "--out", "net.toml", "--size", "64"), 2, "--out measures", "--size")


# ---------------------------------------------------------------- simulate


def test_simulate_says_what_and_how_long(cli, tmp_path):
    trace = tmp_path / "trace.json"
    plan = ["--dp", 2, "--tp", 2, "--pp", 2, "--microbatches", 2]
    code, out, err = cli("simulate", GPT, *TRAIN, *plan, "--cluster", "dgx-a100", "--trace", trace)
    assert (code, err) == (0, "")
    assert "dp 2 x tp 2 x pp 2, 2 microbatches, 1f1b, batch 8, on 8 devices" in out
    assert re.search(r"tp splits \d\d\.\d% of the FLOPs and \d\d\.\d% of the parameters", out)
    assert "not split: transformer.h.0.ln_1.weight (256 B)" in out  # what is not split is named
    assert re.search(r"133,696 parameters \(f32\), \d+ MFLOPs a step", out)
    assert re.search(r"model FLOPs utilization [\d.]+%", out)
    assert re.search(r"exposed communication, mean: dp .*%\), pp .*%\), tp .*%\)", out)
    assert re.search(r"memory at the peak of rank \d \(stage\d\): parameters .* gradients .* activations ", out)
    left = re.search(r"fits in memory: (\d\d\.\d) GiB of 79.1 GiB left", out)
    peaks = re.findall(r"^stage\d .* (\d\.\d) GiB$", out, re.MULTILINE)
    assert left is not None
    assert float(left[1]) == pytest.approx(79.1 - max(map(float, peaks)), abs=0.15)
    assert "transformer.wte.weight (509, 64) to (510, 64)" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("stage")]
    assert [row[0] for row in rows] == ["stage", "stage0", "stage1"]
    assert re.search(r"step .*s, .* samples/s, .* tokens/s", out)
    assert "fits in memory" in out
    assert json.loads(trace.read_text())["traceEvents"]


def test_simulate_json(cli):
    plan = ["--dp", 2, "--tp", 2, "--pp", 2, "--microbatches", 2]
    code, out, _ = cli("simulate", GPT, *TRAIN, *plan, "--cluster", "dgx-a100", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["plan"] == {
        "dp": 2, "tp": 2, "pp": 2, "microbatches": 2, "schedule": "1f1b", "order": ["tp", "dp", "pp"], "chunks": 1,
        "overlap": True, "bucket_mb": 25.0, "zero": 0, "gathered_again": "all", "sequence_parallel": False,
        "recompute": "none", "loss_gradient": "backward", "split": [], "cut": [], "pad_multiple": 1, "devices": 8
    }  # fmt: skip
    assert found["batch"] == 8
    assert found["tokens"] == 128
    assert found["samples_per_second"] == pytest.approx(8 / found["step_seconds"])
    assert found["tokens_per_second"] == pytest.approx(128 / found["step_seconds"])
    assert found["fits"] is True
    for stage in found["stages"]:
        parts = stage["compute"] + stage["exposed_communication"] + stage["bubble"]
        assert parts == pytest.approx(found["step_seconds"])
        assert sum(stage["memory_at_peak"].values()) == stage["peak_memory"]
        assert sum(stage["exposed"].values()) == pytest.approx(stage["exposed_communication"])
    mean = sum(stage["exposed_communication"] * stage["devices"] for stage in found["stages"]) / 8
    assert sum(found["exposed"].values()) == pytest.approx(mean)
    worst = max(found["stages"], key=lambda stage: stage["peak_memory"])
    rank = found["worst_rank"]
    assert (rank["stage"], rank["peak"], rank["categories"]) == (
        worst["name"],
        worst["peak_memory"],
        worst["memory_at_peak"],
    )
    assert rank["headroom"] == rank["memory"] - rank["peak"]
    assert found["parameters"]["f32"]["elements"] == 133_696


def test_utilization_is_the_products_at_the_peak(cli):
    """A step of one device with nothing to communicate: three products of the batch a layer, less the first input's
    gradient, at the peak, over the predicted time."""
    code, out, _ = cli("simulate", MLP, *MSE, "--cluster", "dgx-a100", "--json")
    assert code == 0
    found = json.loads(out)
    products = (3 * 8 - 1) * 2 * found["batch"] * 32 * 32
    assert found["utilization"] == pytest.approx(products / 19.5e12 / found["step_seconds"], rel=1e-6)
    assert found["flops"] >= products


def test_simulate_says_what_is_short(cli):
    code, out, _ = cli("simulate", MLP, "--dim", "batch=1000000000", "--loss", "mse", "--cluster", "dgx-a100")
    assert code == 0
    assert re.search(r"short by 1,[\d.]+ GiB on stage0", out)


def test_a_cluster_of_ones_own(cli, tmp_path):
    text = (ROOT / "distir" / "hardware" / "dgx-a100.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(text.replace('"dgx-a100"', '"mine"'))
    code, out, _ = cli("simulate", MLP, *MSE, "--dp", 2, "--cluster", own, "--nodes", 3)
    assert code == 0
    assert "mine, 3 nodes of 8" in out


def test_a_note_on_a_model_is_one_line(cli, tmp_path):
    proto = onnx.load(MLP)
    signature = "p: PARAMETER target='layers.9.bias'"
    proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=signature)
    entry = proto.graph.value_info.add(name="val_1")
    entry.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value="['layers.0.weight']")
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    code, out, err = cli("simulate", path, *MSE, "--cluster", "dgx-a100", "--json")
    assert (code, json.loads(out)["step_seconds"] > 0) == (0, True)
    note = f"{path}: 1 of the module's parameters, such as layers.9.bias, are not in the file."
    assert err.startswith(f"distir: note: {note}")


def test_more_devices_than_the_nodes_have(cli):
    code, out, err = cli("simulate", MLP, *MSE, "--dp", 8, "--pp", 2, "--cluster", "dgx-a100", "--nodes", 1)
    assert (code, out) == (4, "")
    assert "1 node of 8 cannot give 16 devices\nhint: 16 devices need 2 nodes" in err


def test_forward_only_is_simulated(cli):
    code, out, _ = cli("simulate", GPT, "--dim", "batch=8", "--tp", 2, "--cluster", "dgx-h100", "--json")
    assert code == 0
    assert "optimizer state" in (stage := json.loads(out)["stages"][0]["memory_at_peak"])
    assert stage["optimizer state"] == stage["gradients"] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--zero", "3"], ["ZeRO 3 splits nothing: there is one replica"]),
        (["--zero", "3", "--dp", "2"], []),
        (["--zero", "1", "--split", "cp=2:*.1"], []),
        (["--sequence-parallel"], ["sequence parallelism splits nothing: there is no tensor parallelism"]),
        (["--sequence-parallel", "--tp", "2"], []),
    ],
)
def test_what_has_nothing_to_split_is_said(cli, flags: list[str], said: list[str]) -> None:
    sizes = "gpt:layers=1,hidden=32,heads=2,vocab=64,seq=16,batch=4"
    code, out, _ = cli("simulate", sizes, "--loss", "cross-entropy", "--cluster", "dgx-a100", *flags)
    assert code == 0
    assert [line for line in out.splitlines() if "splits nothing" in line] == said


@pytest.mark.parametrize(
    "command", [("run", "--backend", "numpy", "--steps", 2), ("simulate", "--cluster", "cpu-2core")]
)
def test_what_trains_nothing_says_so(cli, command):
    """In text and in JSON; what trains does not."""
    first, *flags = command
    said = "on 1 device; forward only: no loss was given\n"
    for loss in ([], ["--loss", "mse"]):
        line = [first, MLP, "--dim", "batch=8", *flags, *loss]
        assert (said in cli(*line)[1]) is not bool(loss)
        found = json.loads(cli(*line, "--json")[1])
        assert found["forward_only"] is not bool(loss)
        if first == "run":
            assert len(found["seconds"]) == 2


# ---------------------------------------------------------------- run, in one process


def test_run_without_a_loss_shows_none(cli):
    code, out, _ = cli("run", MLP, "--dim", "batch=8", "--dp", 2, "--backend", "numpy", "--steps", 3)
    assert code == 0
    assert re.search(r"^step +time\n0 +[\d.]+ [mu]?s$", out, re.MULTILINE)
    assert "(median of steps 1 to 2)" in out


def test_one_step_is_compared_with_nothing(cli):
    """It warms up. Of two the second is."""
    one, two = (cli("run", MLP, *MSE, "--steps", n)[1] for n in (1, 2))
    assert "(the first step, warm-up)" in one
    assert re.search(r"^predicted .*; not compared: the first step is warm-up$", one, re.MULTILINE)
    assert "measured" not in one
    assert re.search(r"^step [\d.]+ [mu]?s \(step 1\), ", two, re.MULTILINE)
    assert "times as long" in two


def test_no_bubble_has_the_unit_of_the_step(cli):
    _, out, _ = cli("simulate", MLP, *MSE, "--cluster", "dgx-a100")
    assert re.search(r"^stage0 +1 +[\d.]+ (\ws) +0\.0+ \1 +0\.0+ \1 ", out, re.MULTILINE)


def test_run_prints_plan_steps_and_check(cli):
    plan = ["--dp", 2, "--tp", 2, "--microbatches", 2, "--backend", "numpy"]
    code, out, err = cli("run", GPT, *TRAIN, *plan, "--optimizer", "adamw", "--steps", 3, "--check")
    assert (code, err) == (0, "")
    assert "dp 2 x tp 2 x pp 1, 2 microbatches, batch 8, on 4 devices" in out
    steps = re.findall(r"^(\d) +(\d\.\d{6}) +[\d.]+ [mu]?s$", out, re.MULTILINE)
    assert [k for k, _ in steps] == ["0", "1", "2"]
    assert len({loss for _, loss in steps}) == 3  # every step has data of its own
    assert "predicted" not in out  # the reference runs all ranks in one process: no time to compare
    assert re.search(r"^check passed: (\d+) of \1 values equal the sequential run's$", out, re.MULTILINE)
    assert re.search(r"^  outputs +to \S+ +\(1e-05 allowed; most in %loss\)$", out, re.MULTILINE)
    assert re.search(r"^  changes of weights +to \S+ +\(\S+ allowed; most in %\S+\)$", out, re.MULTILINE)


def test_run_json(cli):
    plan = ["--tp", 2, "--backend", "numpy", "--dtype", "float64"]
    code, out, err = cli("run", MLP, *MSE, *plan, "--momentum", "0.9", "--steps", 2, "--check", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert len(found["losses"]) == len(found["seconds"]) == 2
    assert found["check"]["ok"] is True
    assert found["check"]["weights"]["error"] < found["check"]["weights"]["allowed"] == 1e-10
    assert found["predicted"]["step_seconds"] > 0
    assert found["tokens"] is None


def test_seed_and_order(cli):
    def losses(*flags):
        code, out, _ = cli("run", MLP, *MSE, "--backend", "numpy", "--steps", 2, "--json", *flags)
        assert code == 0
        return json.loads(out)["losses"]

    assert losses("--seed", 1) == losses("--seed", 1)
    assert losses("--seed", 1) != losses("--seed", 2)
    assert losses("--dp", 2, "--pp", 2, "--order", "pp,dp,tp") == pytest.approx(losses(), rel=1e-5)


def test_forward_only(cli):
    code, out, _ = cli("run", GPT, "--dim", "batch=8", "--dp", 2, "--backend", "numpy", "--steps", 2, "--check")
    assert code == 0
    assert "most in %logits" in out


def test_a_run_that_diverges_says_so_by_its_loss(cli):
    flags = ["--lr", "1e30", "--steps", 3, "--dp", 2, "--backend", "numpy", "--check"]
    code, out, err = cli("run", MLP, *MSE, *flags)
    assert (code, out.count(" nan ")) == (5, 1)
    assert "is not finite in step 1; check passed" in err
    code, out, err = cli("run", MLP, *MSE, *flags, "--allow-nonfinite")
    assert (code, err) == (0, "")
    assert out.count(" nan ") == 2
    code, out, _ = cli("run", MLP, *MSE, *flags, "--allow-nonfinite", "--json")
    assert json.loads(out)["losses"][1:] == [None, None]  # JSON has no nan


def test_a_loss_of_one_number_and_a_rank(cli, tmp_path):
    nodes = [
        node("MatMul", "x w", "y"),
        node("ReduceMean", "y", "mean", keepdims=0),
        node("Reshape", "mean to", "loss"),
    ]
    stored = {"w": np.ones((4, 3), np.float32), "to": np.array([1])}
    proto = model(nodes, {"x": np.ones((8, 4), np.float32)}, ["loss"], stored)
    onnx.save(proto, tmp_path / "m.onnx")
    code, out, err = cli("run", tmp_path / "m.onnx", "--loss", "loss", "--dp", 2, "--backend", "numpy", "--steps", 2)
    assert (code, err) == (0, "")
    assert re.search(r"^step\s+loss\s+time\n0 +-?\d\.\d{6} .*\n1 +-?\d\.\d{6} ", out, re.MULTILINE)


def test_bfloat16_runs(cli):
    code, out, _ = cli(
        "run", MLP, *MSE, "--dtype", "bfloat16", "--backend", "numpy", "--dp", 2, "--steps", 1, "--check"
    )
    assert code == 0
    assert "check passed" in out


def test_data_from_a_file(cli, tmp_path):
    random = np.random.default_rng(0)
    ids, labels = random.integers(0, 509, (2, 16, 16))
    np.savez(tmp_path / "data.npz", input_ids=ids, labels=labels)
    flags = [*TRAIN, "--backend", "numpy", "--lr", "1e-12", "--steps", 4, "--json", "--data"]
    code, out, _ = cli("run", GPT, *flags, tmp_path / "data.npz")
    assert code == 0
    a, b, c, d = json.loads(out)["losses"]
    assert a != b
    assert (a, b) == (c, d)  # 16 samples are two steps, then they come again
    shuffled = ids[::-1].copy()
    np.savez(tmp_path / "data.npz", input_ids=shuffled, labels=labels[::-1].copy())
    other = json.loads(cli("run", GPT, *flags, tmp_path / "data.npz")[1])["losses"]
    assert other[:2] == pytest.approx([b, a])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"input_ids": np.zeros((8, 16), int)}, ["labels"]),
        ({"input_ids": np.zeros((8, 16), int), "labels": np.zeros((8, 16), int), "rest": np.zeros(3)}, ["rest"]),
        ({"input_ids": np.zeros((8, 15), int), "labels": np.zeros((8, 16), int)}, ["input_ids", "(samples, 16)"]),
        ({"input_ids": np.zeros((8, 16), int), "labels": np.zeros((4, 16), int)}, ["labels", "4 samples"]),
        ({"input_ids": np.zeros((8, 16)), "labels": np.zeros((8, 16), int)}, ["input_ids", "float64"]),
        ({"input_ids": np.full((8, 16), 509), "labels": np.zeros((8, 16), int)}, ["509", "0 to 508"]),
        ({"input_ids": np.zeros((9, 16), int), "labels": np.zeros((8, 16), int)}, ["numbers of samples"]),
    ],
)
def test_bad_data(cli, tmp_path, arrays, words):
    np.savez(tmp_path / "data.npz", **arrays)
    assert_error(cli("run", GPT, *TRAIN, "--backend", "numpy", "--data", tmp_path / "data.npz"), 2, *words)


def test_data_that_are_no_archive(cli, tmp_path):
    (tmp_path / "data.npz").write_text("text")
    assert_error(cli("run", GPT, *TRAIN, "--backend", "numpy", "--data", tmp_path / "data.npz"), 2, "data.npz")
    np.savez(tmp_path / "cut.npz", input_ids=np.zeros((8, 16), int))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-30])
    assert_error(cli("run", GPT, *TRAIN, "--backend", "numpy", "--data", tmp_path / "cut.npz"), 2, "cut.npz")
    np.save(tmp_path / "data.npy", np.zeros(3))
    assert_error(cli("run", GPT, *TRAIN, "--backend", "numpy", "--data", tmp_path / "data.npy"), 2, "data.npy")


# ---------------------------------------------------------------- schedules of one's own

MINE = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
PIPELINE = ["--pp", 2, "--microbatches", 4]


@pytest.fixture
def table(tmp_path):
    """A schedule that has no name: the first stage's forward passes first, the second in turns."""
    path = tmp_path / "mine.csv"
    path.write_text(MINE)
    return path


def test_a_schedule_prints_as_a_grid(cli, table):
    code, out, err = cli("schedule", "1f1b", "--pp", 2, "--microbatches", 3)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "0F0 0F1 .   0B0 0F2 0B1 .   0B2",
        ".   1F0 1B0 1F1 1B1 1F2 1B2 .",
        "",
        "bubble: 2 of 8 steps per rank (25.0%), if each cell takes one step",
        "microbatches in flight, by rank: 2 1",
    ]
    code, out, _ = cli("schedule", table)
    assert out.splitlines()[0] == "0F0 0F1 0F2 0F3 0B0 0B1 .   0B2 .   0B3"
    assert "microbatches in flight, by rank: 4 1" in out


def test_a_bubble_longer_than_the_work(cli):
    _, out, _ = cli("schedule", "1f1b", "--pp", 4, "--microbatches", 2)
    assert "bubble: 6 of 10 steps per rank (60.0%)" in out


def test_a_schedule_prints_in_one_format(cli):
    assert cli("schedule", "1f1b", "--csv", "--json")[0] == 2


def test_interleaved_with_one_chunk_is_1f1b(cli):
    code, out, err = cli("schedule", "interleaved", *PIPELINE)
    assert (code, out) == cli("schedule", "1f1b", *PIPELINE)[:2]
    assert err == "hint: with 1 chunk per rank, interleaved is 1f1b; give --chunks 2 or more\n"


def test_a_schedule_as_csv_reads_back(cli, tmp_path):
    code, out, _ = cli("schedule", "interleaved", *PIPELINE, "--chunks", 2, "--csv")
    assert code == 0
    (tmp_path / "again.csv").write_text(out)
    assert cli("schedule", tmp_path / "again.csv", "--csv") == (0, out, "")
    code, text, _ = cli("schedule", tmp_path / "again.csv", "--json")
    result = json.loads(text)
    assert (result["steps"], result["idle_steps_per_rank"], result["in_flight_by_rank"]) == (18, 2, [5, 3])
    assert result["table"][0][:5] == ["0F0", "0F1", "2F0", "2F1", "0F2"]


@pytest.mark.parametrize(
    ("text", "flags", "code", "said"),
    [
        ("0F0,0B0\n1F0,1X0\n", [], 2, "mine.csv, line 2, cell 2: expected stage, F or B, microbatch"),
        ("0F0,0I0,0W0\n", [], 2, "mine.csv, line 1, cell 2: expected stage, F or B, microbatch"),
        ("", [], 2, "mine.csv has no cells"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n", [], 4, "mine.csv deadlocks: 0B0 and 1F1 would wait for ever"),
        ("0F0,0B0\n1F0\n", [], 4, "mine.csv: stage 1 B: expected microbatches 0 to 0 in order on rank 1, got []"),
        (
            MINE,
            ["--limit", 3],
            4,
            "mine.csv: rank 0 holds 4 microbatches in flight from 0F3 on, more than the limit of 3",
        ),
        (MINE, ["--pp", 3], 4, "mine.csv is a table for pp 2, microbatches 4, chunks 1; the plan has pp 3"),
    ],
)
def test_bad_tables_are_reported_in_a_line_and_a_hint(cli, table, text, flags, code, said):
    table.write_text(text)
    got, out, err = cli("schedule", table, *flags)
    first, hint, *grid = err.splitlines()
    assert (got, out) == (code, "")
    assert first.startswith(f"distir: error: {table.parent}")
    assert said in first
    assert hint.startswith("hint: ")
    if "--pp" not in flags and code == 4:
        assert len(grid) == 2
        assert "holds" not in first or "0F3!" in grid[0]


def test_bad_tables_stop_a_simulation(cli, table):
    line = ["simulate", MLP, *MSE, "--cluster", "dgx-a100", "--schedule", table]
    code, out, err = cli(*line, "--pp", 2, "--microbatches", 2)
    assert (code, out) == (4, "")
    assert "mine.csv is a table for pp 2, microbatches 4, chunks 1; the plan has pp 2, microbatches 2" in err
    table.write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    code, out, err = cli(*line, "--pp", 2, "--microbatches", 2)
    assert code == 4
    assert "0F0 0B0! 0F1 0B1" in err


def test_a_table_of_ones_own_is_simulated_and_shown(cli, table):
    line = [MLP, *MSE, *PIPELINE, "--schedule"]
    code, out, err = cli("simulate", *line, table, "--cluster", "dgx-a100")
    assert (code, err) == (0, "")
    assert f"4 microbatches, {table}" in out
    mine, named = (json.loads(cli("simulate", *line, x, "--cluster", "dgx-a100", "--json")[1]) for x in (table, "1f1b"))
    assert mine["plan"]["schedule"] == str(table)
    stages = [row["peak_memory"] for row in mine["stages"]], [row["peak_memory"] for row in named["stages"]]
    assert stages[0][0] > stages[1][0]  # all four microbatches are saved on stage 0, not two
    _, out, _ = cli("show", *line, table)
    calls = re.findall(r"= (fwd|bwd)(\d)[.\w]*\(.*mb=(\d)\)", out)
    for stage, row in enumerate(MINE.splitlines()):
        ran = [f"{s}{phase[0].upper()}{i}" for phase, s, i in calls if int(s) == stage]
        assert ran == [cell for cell in row.split(",") if cell]


def test_a_table_of_ones_own_runs(cli, table):
    flags = [*MSE, *PIPELINE, "--schedule", table, "--optimizer", "adamw", "--steps", 2, "--check"]
    code, out, err = cli("run", MLP, *flags)
    assert code == 0, err
    assert str(table) in out
    assert "check passed" in out


# ---------------------------------------------------------------- run, a process a rank


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """The README's main job, with `--save` and, in the same folder, `--profile`."""
    saved = tmp_path_factory.mktemp("saved") / "trained.onnx"
    plan = ["--dp", 2, "--pp", 2, "--microbatches", 4, "--steps", 5, "--check", "--profile", saved.parent / "traces"]
    return command("run", "examples/gpt2-tiny.onnx", *TRAIN, "--optimizer", "adamw", *plan, "--save", saved), saved


def test_the_main_job(gloo):
    done, _ = gloo
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(re.findall(r"^\d +\d\.\d{6} +[\d.]+ m?s$", done.stdout, re.MULTILINE)) == 5
    assert "check passed" in done.stdout
    assert "tokens/s" in done.stdout
    assert re.search(r"predicted [\d.]+ [mu]?s on this host, .*; measured [\d.]+ m?s here", done.stdout)


def test_what_is_saved_runs_elsewhere_and_is_trained(gloo):
    done, saved = gloo
    assert f"saved {saved}" in done.stdout
    before, after = (
        {t.name: np.asarray(onnx.numpy_helper.to_array(t)) for t in onnx.load(path).graph.initializer}
        for path in (GPT, saved)
    )
    assert before.keys() == after.keys()
    name = "transformer.wte.weight"
    assert before[name].shape == after[name].shape == (509, 64)
    assert 0 < np.max(np.abs(before[name] - after[name])) < 0.1
    session = onnxruntime.InferenceSession(saved)
    mask = np.triu(np.full((1, 1, 16, 16), -1e9, np.float32), 1)
    feed = {"input_ids": np.zeros((2, 16), np.int64), "attention_mask": mask, "position_ids": np.arange(16)[None]}
    (logits,) = session.run(None, feed)
    assert np.isfinite(np.asarray(logits)).all()


def test_a_profile_is_compared(gloo, cli):
    done, saved = gloo
    folder = saved.parent / "traces"
    assert done.stdout.endswith(f"profile written: distir compare {folder}\n")
    assert {p.name for p in folder.iterdir()} == {"predicted.json", *(f"rank{r}.json" for r in range(4))}
    code, out, err = cli("compare", folder)
    assert (code, err) == (0, "")
    assert "4 ranks, the 2 fastest of 4 recorded steps" in out
    assert re.search(r"^stage1 \(2 devices\) +predicted .*\n +measured ", out, re.MULTILINE)
    errors = [float(x.group(1)) for x in re.finditer(r"^MatMul\w* .* [+-]([\d.]+) [mu]?s$", out, re.MULTILINE)]
    assert len(errors) == 2
    code, out, _ = cli("compare", folder, "--json")
    found = json.loads(out)
    worst = [abs(row["error"]) for row in found["compute"]]
    assert worst == sorted(worst, reverse=True)


def test_profiles_that_cannot_be(cli, tmp_path):
    flags = [*MSE, "--profile", tmp_path / "p"]
    code, _, err = cli("run", MLP, *flags, "--backend", "numpy", "--steps", 1)
    assert (code, "cannot be profiled" in err) == (2, True)
    (tmp_path / "p").write_text("")
    code, _, err = cli("run", MLP, *flags, "--steps", 1)
    assert (code, "cannot make the folder" in err) == (2, True)
    assert_error(cli("compare", tmp_path), 2, "predicted.json")


CORRUPT = """
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


class Corrupt(MetaPathFinder):  # once the backend is loaded, rank 1 puts a wrong number into its all-reduces
    def find_spec(self, name, path, target=None):
        if name != "distir.backends.lowering.emitters":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            from distir.backends.transport.torch_distributed import Network

            right = Network.allreduce

            def wrong(self, before, axis, own=False):
                start = right(self, before, axis, own)
                return lambda x: start(x + 1e-2 if self.rank == 1 else x)

            Network.allreduce = wrong

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Corrupt())
"""


def test_a_wrong_result_exits_5_and_names_value_op_and_rank(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CORRUPT)
    env = {**ENV, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    plan = ["--tp", 2, "--microbatches", 2, "--steps", 2, "--check"]
    done = command("run", MLP, *MSE, *plan, env=env)
    assert done.returncode == 5, done.stderr
    assert len(done.stderr.splitlines()) == 1
    found = re.search(
        r"%loss in step 0 differs by .*; in step 0 %(\S+) = MPIAllreduce\(%(\S+)\) .* on rank \d", done.stderr
    )
    assert found, done.stderr
    assert found[2].startswith("linear_1")  # the first all-reduce of the program
    assert "check passed" not in done.stdout


def test_a_killed_worker_exits_6_and_leaves_nothing(tmp_path):
    env = {**ENV, "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-m", "distir", "run", MLP, *MSE, "--dp", "2", "--steps", "1000000", "--timeout", "20"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("0 "):
            assert process.poll() is None
        ranks = [pid for pid in _descendants(process.pid) if _name(pid) == "distir-rank1"]
        os.kill(ranks[0], signal.SIGKILL)
        family = _descendants(process.pid)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 6, err
    assert "rank 1 was killed by SIGKILL" in err
    assert not [pid for pid in family if _alive(pid)]
    assert not list(tmp_path.iterdir())


def _descendants(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_descendants(int(child))]
    return found


def _name(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _alive(pid):
    try:
        return _name(pid) != "" and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [*[("gpt2-tiny", plan) for plan in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)]], ("mlp", (1, 2, 2))],
)
def test_plans_on_gloo(cli, model, plan):
    flags = [GPT, *TRAIN] if model == "gpt2-tiny" else [MLP, *MSE]
    dp, tp, pp = plan
    degrees = ["--dp", dp, "--tp", tp, "--pp", pp, "--microbatches", 2]
    code, out, err = cli("run", *flags, *degrees, "--optimizer", "adamw", "--steps", 3, "--check")
    assert code == 0, err
    assert "check passed" in out


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 2 --tp 2 --microbatches 2 --zero 2 --sequence-parallel --recompute selective --clip-norm 0.1",
        pytest.param("--tp 4 --sequence-parallel --clip-norm 0.1", marks=pytest.mark.slow),
        pytest.param(
            "--dp 2 --pp 2 --microbatches 4 --zero 3 --recompute full --clip-norm 0.1", marks=pytest.mark.slow
        ),
        pytest.param(
            "--tp 2 --pp 2 --microbatches 4 --schedule interleaved --chunks 2 --sequence-parallel --recompute full "
            "--clip-norm 0.1",
            marks=pytest.mark.slow,
        ),
        pytest.param("--dp 4 --zero 1 --no-overlap --bucket-mb 0 --clip-norm 0.1", marks=pytest.mark.slow),
        "--dp 2 --pp 2 --microbatches 2 --zero 1 --precision fp16 --clip-norm 0.1 --weight-decay 0.3 "
        "--no-decay-vectors --warmup 2 --lr-decay cosine --decay-steps 9",
        pytest.param(
            "--dp 2 --tp 2 --microbatches 2 --zero 3 --precision bf16 --grad-dtype bf16", marks=pytest.mark.slow
        ),
    ],
)
def test_settings_on_gloo(cli, flags):
    """Sequence parallelism, recomputation, clipping, mixed precision, with all types widened to float64: on ranks they
    are the sequential program."""
    precise = ["--optimizer", "adamw", "--dtype", "float64", "--steps", 2, "--check"]
    code, out, err = cli("run", GPT, *TRAIN, *flags.split(), *precise)
    assert code == 0, err
    assert "check passed" in out


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("--precision bf16 --grad-dtype bf16", "--optimizer adamw --dp 2 --zero 1"),
        pytest.param("--precision fp16", "--dp 2 --tp 2 --momentum 0.9 --clip-norm 1", marks=pytest.mark.slow),
    ],
)
def test_mixed_precision_on_gloo(cli, precision, flags):
    """In its own types: the losses are those of float32, to what 16 bits allow."""
    losses = []
    for more in (precision.split(), []):
        code, out, err = cli("run", GPT, *TRAIN, *flags.split(), *more, "--steps", 4, "--json")
        assert code == 0, err
        losses.append(json.loads(out)["losses"])
    narrow, wide = losses
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=5e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr-decay linear", "--lr-decay needs --decay-steps"),
        ("--min-lr 0.1", "--min-lr needs --lr-decay"),
        ("--warmup 5 --lr-decay cosine --decay-steps 5", "the learning rate decays from step 5 to step 5"),
        ("--lr 0.1 --lr-decay cosine --decay-steps 5 --min-lr 0.2", "the learning rate would decay from 0.1 to 0.2"),
        ("--precision fp16 --dtype float16", "precision fp16 keeps weights in float32, dtype f16 makes them f16, too"),
        ("--precision bf16 --dtype bfloat16", "precision bf16 keeps weights in float32, dtype bf16 makes them bf16"),
        (
            "--precision bf16 --grad-dtype fp16",
            "gradients are accumulated in f32 or in the precision, bf16; got f16",
        ),
        ("--grad-dtype bf16", "gradients are accumulated in f32 or in the precision, f32; got bf16"),
    ],
)
def test_settings_of_training_that_do_not_fit(cli, flags, message):
    code, _, err = cli("simulate", GPT, *TRAIN, *flags.split(), "--cluster", "dgx-a100")
    assert code == 2
    assert err.startswith(f"distir: error: {message}")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_float64_widens_all_of_a_step_in_mixed_precision(precision):
    model = distir.load(GPT, {"batch": 8}, loss="cross-entropy", precision=precision, dtype="float64")
    types = [v.type for op in model.function.ops for v in op.outputs]
    assert {t.dtype.name for t in types if isinstance(t, Tensor) and t.dtype.floating} == {"f64"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_float32_changes_nothing_of_mixed_precision(cli, precision):
    line = "simulate", GPT, *TRAIN, "--precision", precision, "--cluster", "dgx-a100"
    assert cli(*line, "--dtype", "float32") == cli(*line)


# ---------------------------------------------------------------- the progress bar


class Terminal(io.StringIO):
    """Something like stderr, on a terminal or not."""

    def __init__(self, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.mark.parametrize(("tty", "patience", "seen"), [(True, 0.01, True), (False, 0.01, False), (True, 60.0, False)])
def test_the_bar_is_for_terminals_and_for_what_takes_long(monkeypatch, tty, patience, seen):
    from distir.cli import output

    terminal = Terminal(tty)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(output, "_PATIENCE_SECONDS", patience)
    before = sys.getswitchinterval()
    with output.Progress("loading") as progress:
        progress.phase("running", 4)
        for step in range(4):
            time.sleep(0.05)
            progress.advance(step)
        end = time.monotonic() + 20
        while seen and "running" not in terminal.getvalue() and time.monotonic() < end:  # on a busy host
            time.sleep(0.05)
    assert ("running" in terminal.getvalue()) is seen
    assert sys.getswitchinterval() == before


def test_the_bar_says_what_is_prepared(cli, monkeypatch):
    from distir.cli import output

    phases, phase = [], output.Progress.phase
    monkeypatch.setattr(
        output.Progress, "phase", lambda bar, what, *total: (phases.append(what), phase(bar, what, *total))
    )
    assert cli("run", MLP, *MSE, "--dp", 2, "--steps", 2)[0] == 0
    assert "loading torch" in phases  # recorded, not read off the bar: a phase may end before the bar is drawn again
