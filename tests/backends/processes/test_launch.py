"""Starting, watching and ending the ranks of a run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import distir
from distir.backends.processes import launch
from distir.backends.processes.preflight import (
    LESS_MEMORY,
    backend_and_device,
    check_backend,
    check_memory,
    out_of_memory,
)
from distir.backends.processes.worker import _failure
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.device import Device, Mesh
from distir.ir.errors import InfeasibleError, IRTypeError, UsageError, WorkerError
from distir.ir.function import Function, FunctionMaker, Op, Role, Value
from distir.ir.type import REPLICATE, Float32, Float64, Shard, Tensor
from distir.ops.rules import tensor
from distir.runtime import pieces
from distir.runtime.options import STAGED, backend_on
from distir.runtime.outcome import Outcome
from distir.transforms.differentiation.training import SGD, initial_state, training_step
from distir.transforms.parallel3d import parallel_transform_3d
from distir.transforms.rank.project import RankProgram
from distir.transforms.rank.rank_program import RankOptions, rank_programs
from tests.backends.launching import run
from tests.backends.transport.test_transports import everything

ROOT = Path(__file__).parents[3]
BATCH, WIDTH = 8, 6


def counter(devices: int = 2, scale: int = 1) -> Function:
    """y = the sum of w and x over all devices; w becomes w + scale * x."""
    mesh = Mesh([Device("cpu", k) for k in range(devices)], {"dp": devices})
    f = FunctionMaker("main")
    w = f.add_input_value("w", Tensor.whole(Float32, (BATCH, 3), mesh, (Shard(0),)), Role("parameter"))
    x = f.add_input_value("x", Tensor.whole(Float32, (BATCH, 3), mesh, (Shard(0),)), Role("data", 0))
    new = w
    for _ in range(scale):
        new = f.emit("Add", new, x)
    total = f.emit("ReduceSum", new, axes=(0, 1), keepdims=0)
    f.set_outputs([f.emit("MPIAllreduce", total, axis="dp"), new])
    f.updates = {new: w}
    return f.finalize()


def ones(function: Function) -> list[np.ndarray]:
    return [np.ones(tensor(v).global_shape, tensor(v).dtype.numpy) for v in function.inputs]


def descendants() -> list[tuple[int, str]]:
    """(pid, name) of the ranks this process started, in order of rank."""
    children: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it ended in the meantime
        name = text[text.index("(") + 1 : text.rindex(")")]
        parent = int(text[text.rindex(")") + 2 :].split()[1])
        children.setdefault(parent, []).append((int(stat.parent.name), name))
    found = [rank for child, _ in children.get(os.getpid(), []) for rank in children.get(child, [])]
    return sorted((x for x in found if x[1].startswith("distir-rank")), key=lambda x: x[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no file in the temporary folder, no process below this one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("distir-*")) == []
    assert descendants() == []


def test_steps_data_updates_and_results():
    main = counter()
    w, x = main.inputs
    seen: list[tuple[int, float]] = []
    result = run(
        main,
        {w: np.zeros((BATCH, 3), np.float32)},
        3,
        data=lambda k: {x: np.full((BATCH, 3), k + 1, np.float32)},
        timeout=300,
        on_step=lambda k, seconds, outputs: seen.append((k, float(outputs[0]))),
    )
    assert seen == [(0, 24.0), (1, 72.0), (2, 144.0)]
    assert [float(o[0]) for o in result.outputs] == [24.0, 72.0, 144.0]
    np.testing.assert_array_equal(result.inputs[0], np.full((BATCH, 3), 6))
    assert len(result.seconds) == 3


def test_memory_mapped_and_broadcast_arrays_are_not_copied(tmp_path: Path):
    main = counter()
    file = tmp_path / "weights.bin"
    np.arange(BATCH * 300, dtype=np.float32).tofile(file)
    mapped = np.memmap(file, np.float32, "r", 12, (BATCH, 3))
    result = run(main, [mapped, np.broadcast_to(np.float32(2), (BATCH, 3))], timeout=300)
    np.testing.assert_array_equal(result.inputs[0], np.asarray(mapped) + 2)
    file.unlink()


def test_files_with_data_are_removed_once_their_step_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of the run, of which two are ahead; not those of the user."""
    monkeypatch.setattr(pieces, "_INLINE_BYTES", 0)
    main = counter()
    w, x = main.inputs
    own = tmp_path / "own.bin"
    np.arange(BATCH * 3, dtype=np.float32).tofile(own)
    mapped = np.memmap(own, np.float32, "r", 0, (BATCH, 3))
    left: list[int] = []
    result = run(
        main,
        {w: np.zeros((BATCH, 3), np.float32)},
        6,
        data=lambda k: {x: mapped if k % 3 == 2 else np.arange(BATCH * 3, dtype=np.float32).reshape(BATCH, 3)},
        timeout=300,
        on_step=lambda *_: left.append(len(list(tmp_path.glob("distir-*/data*")))),
    )
    np.testing.assert_array_equal(result.inputs[0], 6 * np.asarray(mapped))
    assert left == [1, 1, 2, 1, 0, 0]
    assert own.exists()


def train(schedule: str) -> tuple[Function, Function, list[np.ndarray]]:
    """A four-layer MLP's training step, spread over 2 stages of 2 replicas, the sequential one, and its
    arrays.
    """
    f = FunctionMaker("mlp")
    h = f.add_input_value("x", Tensor(Float64, (BATCH, WIDTH)), Role("data", 0))
    for k in range(4):
        w = f.add_input_value(f"w{k}", Tensor(Float64, (WIDTH, WIDTH)), Role("parameter"))
        h = f.emit("Tanh", f.emit("MatMul", h, w))
    f.set_outputs([h])
    step = training_step(f.finalize(), "mse", SGD(lr=0.1, momentum=0.9))
    rng = np.random.default_rng(0)
    state = initial_state(step)
    arrays = [state.get(v, rng.standard_normal(tensor(v).global_shape)) for v in step.inputs]
    main = parallel_transform_3d(step, 2, 1, 2, [Device("cpu", k) for k in range(4)], 4, schedule)
    return step, main, arrays


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_trains_as_the_sequential_program(schedule: str):
    step, main, arrays = train(schedule)
    result = run(main, arrays, 3, timeout=300)
    losses = []
    for _ in range(3):
        outputs = SequentialExecutor().compute(step, arrays)
        losses.append(float(outputs[0]))
        for v, x in zip(step.outputs, outputs, strict=True):
            if v in step.updates:
                arrays[step.inputs.index(step.updates[v])] = x
    assert [float(o[0]) for o in result.outputs] == pytest.approx(losses, rel=1e-10)
    assert len(result.inputs) == len(step.updates)
    for k, x in result.inputs.items():
        np.testing.assert_allclose(x, arrays[k], rtol=1e-10, atol=1e-10)


def test_how_long_the_ranks_took_to_be_ready_is_reported():
    begin = time.monotonic()
    main = counter()
    result = run(main, ones(main), timeout=300)
    assert 0 < result.load_seconds < result.start_seconds < time.monotonic() - begin


def run_and_hurt(number: int, hurt: signal.Signals, timeout: float) -> tuple[WorkerError, float]:
    """Send rank `number` a signal after the first of many steps; the error, and how long it took to come."""
    sent: list[float] = []

    def on_step(k: int, seconds: float, outputs: dict[int, np.ndarray]) -> None:
        if k == 0:
            os.kill(descendants()[number][0], hurt)
            sent.append(time.monotonic())

    main = counter()
    with pytest.raises(WorkerError) as e:
        run(main, ones(main), 10**6, timeout=timeout, on_step=on_step)
    return e.value, time.monotonic() - sent[0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named(number: int):
    error, seconds = run_and_hurt(number, signal.SIGKILL, 60)
    assert f"rank {number} was killed by SIGKILL" in str(error)
    assert error.exit_code == 6
    assert seconds < 5


def test_a_rank_that_stops_answering_is_named():
    error, seconds = run_and_hurt(1, signal.SIGSTOP, 4)
    found = re.fullmatch(r"rank 1 did not respond for (\d+) s in step \d+", str(error))
    assert found
    assert int(found[1]) <= seconds + 1
    assert seconds < 7


def stop_without_locks(pid: int) -> None:
    """Stop a process where it holds no lock on a file: one on the rendezvous store would block the other rank, too."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        if not any("->" not in words and str(pid) in words for words in locks):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)


def test_a_rank_that_stops_while_it_starts_was_silent_so_long_as_is_said():
    """Not as long as ranks may take to start where none fails. A busy host may stop it later, in a step: then again."""
    for _ in range(5):
        main, begun = counter(), time.monotonic()

        def stop() -> None:
            while not (found := [pid for pid, name in descendants() if name == "distir-rank1"]):
                time.sleep(0.001)
            stop_without_locks(found[0])

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(WorkerError) as e:
            run(main, ones(main), 2, timeout=4)
        thread.join()
        if "in step" not in str(e.value):
            break
    found = re.fullmatch(r"rank 1 did not respond for (\d+) s during start-up", str(e.value))
    assert found, e.value
    assert int(found[1]) <= time.monotonic() - begun + 1


def test_a_rank_that_raises_is_named_with_one_line():
    main = counter()
    bad = ones(main)
    bad[1] = np.ones((BATCH, 4), np.float32)
    with pytest.raises(UsageError, match=r"input %x: expected shape \(8, 3\), got \(8, 4\)"):
        run(main, bad, timeout=300)


def test_an_error_of_a_rank_s_own_is_named_with_it(tmp_path: Path):
    file = tmp_path / "weights.bin"
    np.zeros((BATCH, 3), np.float32).tofile(file)
    main = counter()
    mapped = np.memmap(file, np.float32, "r", 0, (BATCH, 3))
    file.unlink()
    with pytest.raises(WorkerError, match=r"rank \d failed: FileNotFoundError: .*weights.bin") as e:
        run(main, [mapped, mapped], timeout=300)
    assert "Traceback" in e.value.__notes__[0]


HAVE = "Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 14.75 GiB of which 1.61 GiB is free"
NO_MEMORY = f"CUDA out of memory. {HAVE}. Including non-PyTorch memory, this process has 13.13 GiB memory in use."


def test_a_gpu_without_memory_is_reported_in_one_line():
    failure = _failure(torch.OutOfMemoryError(NO_MEMORY))
    assert failure.kind == "InfeasibleError"
    assert not failure.peer
    assert failure.message.endswith(
        "Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 14.75 GiB of which 1.61 GiB is free"
    )
    assert failure.hint == LESS_MEMORY
    assert out_of_memory(RuntimeError("shapes do not match")) is None
    assert out_of_memory(UsageError("out of memory")) is None


def test_gpus_do_not_compute_in_the_host_s_memory():
    check_memory(1 << 60, 2, "nccl")
    check_memory(1 << 60, 2, STAGED)
    with pytest.raises(InfeasibleError, match=r"2 ranks of 1048576\.0 GiB need 2097152\.0 GiB"):
        check_memory(1 << 50, 2)


@pytest.mark.parametrize(("backend", "need"), [("gloo", "2 ranks of"), ("numpy", "of memory are needed")])
def test_a_model_that_does_not_fit_draws_no_weights(backend: str, need: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distir.Model, "initial", lambda *_: pytest.fail("its weights are drawn"))
    model = distir.load("gpt:layers=4,hidden=65536,heads=64,vocab=50000,seq=8,batch=2", loss="cross-entropy")
    with pytest.raises(InfeasibleError, match=need):
        distir.run(model, distir.Plan(dp=2), backend=backend)


def test_temporary_files_of_ranks_go_with_the_run():
    """Also those that torch and compilers leave when they are killed."""
    main, found = counter(), list[str]()

    def on_step(k: int, seconds: float, outputs: dict[int, np.ndarray]) -> None:
        for pid, _ in descendants() if k == 0 else ():
            with contextlib.suppress(OSError):  # it has just ended
                env = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                found.extend(line.partition("=")[2] for line in env if line.startswith("TMPDIR="))

    run(main, ones(main), 500, timeout=300, on_step=on_step)  # the ranks still run when the first step is told
    assert len(found) >= 2
    assert not any(Path(folder).exists() for folder in found)


def test_the_end_of_the_supervisor_is_the_end_of_all():
    def on_step(k: int, seconds: float, outputs: dict[int, np.ndarray]) -> None:
        if k == 0:
            rank = descendants()[0][0]
            parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(parent, signal.SIGKILL)

    main = counter()
    with pytest.raises(WorkerError, match="the process that starts the ranks was ended"):
        run(main, ones(main), 10**6, timeout=300, on_step=on_step)


RUNNING = """
import signal

# a shell's background job begins with SIGINT ignored, and so do its children
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
SCRIPT = """
from tests.backends.processes.test_launch import counter, descendants, ones, run

def on_step(k, seconds, outputs):
    if k == 0:
        print(" ".join(str(pid) for pid, _ in descendants()), flush=True)

main = counter()
run(main, ones(main), 10**6, timeout=300, on_step=on_step)
"""


def end_running(script: str, end: signal.Signals, tmp_path: Path) -> list[int]:
    """End a script that runs ranks when it has printed pids, and wait until these processes and its temporary files are
    gone, too. The pids."""
    env = dict(os.environ, TMPDIR=str(tmp_path), PYTHONPATH=str(ROOT))
    line = [sys.executable, "-c", RUNNING + script]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pids = [int(x) for x in process.stdout.readline().split()]
        begin = time.monotonic()
        process.send_signal(end)
        try:
            process.wait(10)
        finally:
            process.kill()  # no test hangs in the end of this block
        while any(map(alive, pids)) or list(tmp_path.glob("distir-*")):
            assert time.monotonic() - begin < 20  # far less than the 300 s after which they give up by themselves
            time.sleep(0.02)
    return pids


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_started_the_ranks_ends_and_they_with_it(end: signal.Signals, tmp_path: Path):
    assert len(end_running(SCRIPT, end, tmp_path)) == 2


JOINING = """
import os
import sys
import numpy as np
from distir.ir.errors import DistirError
from tests.backends.processes.test_launch import counter, ones, run

main = counter(scale=int(sys.argv[1]))
try:
    result = run(main, ones(main), 2, timeout=100)
except DistirError as e:
    print(type(e).__name__, e)
    sys.exit(e.exit_code)
print(os.environ["RANK"], len(result.seconds), [float(o[0]) for o in result.outputs], [x.sum() for x in
result.inputs.values()])
"""


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def torchrun(scales: tuple[int, int]) -> list[tuple[int, str]]:
    """(exit code, output) of two processes with torchrun's environment."""
    port = str(free_port())
    processes = []
    for rank, scale in enumerate(scales):
        env = dict(os.environ, PYTHONPATH=str(ROOT), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", JOINING, str(scale)]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
    outputs = [p.communicate(timeout=300)[0].strip() for p in processes]
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


def test_the_environment_of_torchrun_is_joined():
    (code0, out0), (code1, out1) = torchrun((1, 1))
    assert (code0, code1) == (0, 0)
    assert out0 == "0 2 [48.0, 72.0] [np.float32(72.0)]"
    assert out1 == "1 2 [] []"


def test_ranks_with_different_plans_do_not_run():
    results = torchrun((1, 2))
    assert [code for code, _ in results] == [6, 6]
    assert all(out.startswith("WorkerError rank 1 would run another plan than rank 0") for _, out in results)


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    main = counter()
    with pytest.raises(UsageError, match="the plan has 2 ranks, torchrun started 3"):
        run(main, ones(main))


def test_what_is_refused_before_anything_starts():
    main = counter()
    arrays = ones(main)
    with pytest.raises(UsageError, match="unknown backend 'ucc'"):
        run(main, arrays, backend="ucc")
    with pytest.raises(UsageError, match="steps: expected at least 1, got 0"):
        run(main, arrays, 0)


def test_programs_of_ranks_are_verified_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    """Without a sum over devices that all ranks have lost: nothing of the order in which they meet shows it."""

    def lossy(program: Function, options: RankOptions) -> list[RankProgram]:
        first, *others = rank_programs(program, options)
        f = first.function
        ops: list[Op] = []
        env: dict[Value, Value] = {}
        for op in f.ops:
            if op.op_type == "MPIAllreduce":
                env[op.outputs[0]] = op.inputs[0]
            else:
                ops.append(Op(op.spec, tuple([env.get(v, v) for v in op.inputs]), op.attributes, op.outputs))
        new = Function(f.name, f.inputs, tuple(ops), f.outputs, f.updates)
        return [p._replace(function=new) for p in (first, *others)]

    f = FunctionMaker("main")
    mesh = Mesh([Device("cpu", 0), Device("cpu", 1)], {"dp": 2}, "m")
    x = f.add_input_value("x", Tensor(Float64, (4,), mesh, [Shard(0)]))
    total = f.emit("MPIAllreduce", f.emit("ReduceSum", x, axes=(0,), keepdims=0), axis="dp")
    f.set_outputs([f.emit("Exp", total)])
    monkeypatch.setattr(launch, "rank_programs", lossy)
    monkeypatch.setattr(launch, "run_here", lambda *given: pytest.fail("ranks were started"))
    with pytest.raises(IRTypeError, match=r"rank 0: main: op 1 .*Exp.*: expected Replicate, got Partial"):
        run(f.finalize(), [np.ones(8)])


def test_nccl_needs_gpus(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    main = counter()
    with pytest.raises(UsageError, match="a GPU per rank: 2 ranks, 1 GPU here") as e:
        run(main, ones(main), backend="nccl")
    assert e.value.exit_code == 2


@pytest.mark.gpu
def test_nccl_runs():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    main = counter(1)
    result: Outcome = run(main, ones(main), 2, backend="nccl", timeout=300)
    assert [float(o[0]) for o in result.outputs] == [48.0, 72.0]


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_a_gpu(world: int):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    main, arrays, want = everything(world)
    got = run(main, arrays, 2, backend="gloo", device="cuda", timeout=300).outputs[-1]
    for k, v in enumerate(main.outputs):
        np.testing.assert_array_equal(got[k], want[k], err_msg=f"{v}")


def test_gloo_on_gpus_needs_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    main = counter()
    with pytest.raises(UsageError, match="device cuda needs a GPU, and there is none here"):
        run(main, ones(main), backend="gloo", device="cuda")


def test_gpus_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [backend_and_device("gloo:cuda", rank) for rank in range(3)] == [("gloo", f"cuda:{k}") for k in (0, 1, 0)]
    assert backend_and_device("nccl", 1) == ("nccl", "cuda:1")
    assert backend_and_device("gloo", 1) == ("gloo", "cpu")
    check_backend("gloo:cuda", 8)


@pytest.mark.parametrize(
    ("backend", "device", "found"),
    [
        (None, None, "gloo"),
        (None, "cpu", "gloo"),
        (None, "cuda", "nccl"),
        ("nccl", None, "nccl"),
        ("gloo", "cuda", "gloo:cuda"),
        ("numpy", "cpu", "numpy"),
    ],
)
def test_of_backend_and_device_either_is_enough(backend: str | None, device: str | None, found: str):
    assert backend_on(backend, device) == found


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("nccl", "cpu", "backend nccl does not run on cpu"),
        ("numpy", "cuda", "backend numpy does not run on cuda"),
        ("gloo:cuda", None, "unknown backend 'gloo:cuda'"),
        ("gloo", "tpu", "unknown device 'tpu'"),
    ],
)
def test_backends_and_devices_that_do_not_fit(backend: str, device: str | None, message: str):
    with pytest.raises(UsageError, match=message):
        backend_on(backend, device)


def test_from_another_thread():
    main = counter()
    results: list[Outcome] = []
    thread = threading.Thread(target=lambda: results.append(run(main, ones(main), timeout=300)))
    thread.start()
    thread.join()
    assert float(results[0].outputs[0][0]) == 48.0


def test_replicas_report_once():
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"dp": 2})
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float32, (), mesh, (REPLICATE,)))
    f.set_outputs([f.emit("Add", x, x)])
    assert float(run(f.finalize(), [np.float32(3)], timeout=300).outputs[0][0]) == 6


def test_a_program_with_a_host_runs_one_step() -> None:
    """The host holds the weights and never sees their next values: a second step would start from the first ones."""
    host, mesh = Device("cpu", 0), Mesh([Device("cpu", 1), Device("cpu", 2)], {"dp": 2}, "stage0")
    f = FunctionMaker("main")
    w = f.add_input_value("w", Tensor(Float32, (4,), host), Role("parameter"))
    here = f.emit("MPIBroadcast", w, to=mesh)
    new = f.emit("Add", here, here)
    f.set_outputs([new])
    f.updates = {new: w}
    program = f.finalize()
    result = run(program, ones(program))
    assert result.inputs == {}
    assert np.array_equal(result.outputs[0][0], np.full(4, 2, np.float32))
    with pytest.raises(UsageError, match="main cannot run 2 steps: the next %w is not on the device of the input"):
        run(program, ones(program), steps=2)


def test_what_is_prepared_is_reported() -> None:
    program, reported = counter(), list[str]()
    run(program, ones(program), steps=2, on_phase=reported.append, on_step=lambda step, *_: reported.append(str(step)))
    assert reported == ["loading torch", "choosing kernels", "reading weights", "running the first step", "0", "1"]
