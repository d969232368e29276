"""Times that are given for a proxy's compute: of functions, of layers, of an earlier run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from distir.api import Model, load, run
from distir.api.compilation import distribute
from distir.api.given_times import Where, given_times
from distir.api.proxy import ProxyOptions, run_proxy
from distir.api.timings import PREDICTED
from distir.executor.simulator.labels import COMPUTE, labels
from distir.ir.errors import UsageError
from distir.ir.function import Function, Op
from distir.transforms.plan import Plan
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.proxied import is_slept

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def gpt() -> Model:
    return load(EXAMPLES / "gpt2-tiny.onnx", {"batch": 8}, loss="cross-entropy")


def by_bytes(op: Op) -> float:
    """A price of an op for tests."""
    return float(sum(v.type.bytes for v in op.outputs))


def times(folder: Path, text: str, model: Model, program: Function, free: bool = False) -> dict[Where, float]:
    path = folder / "times.toml"
    path.write_text(text)
    return dict(given_times(path, model, program, (lambda op: 0.0) if free else by_bytes))


def sums(found: dict[Where, float]) -> dict[str, float]:
    """Seconds by function."""
    out: dict[str, float] = defaultdict(float)
    for (f, _), x in found.items():
        out[f.name] += x
    return dict(out)


def test_a_function_takes_its_time_shared_as_predicted(gpt: Model, tmp_path: Path) -> None:
    program = as_run(distribute(gpt, Plan(2)))
    found = times(tmp_path, "fwd0 = 1000\nbwd0 = 3000", gpt, program)
    assert sums(found) == pytest.approx({"fwd0": 1e-3, "bwd0": 3e-3})
    of_forward = [(op, x) for (f, op), x in found.items() if f.name == "fwd0"]
    rates = [x / by_bytes(op) for op, x in of_forward]
    assert max(rates) == pytest.approx(min(rates))


def test_variants_of_a_function_take_its_time_or_their_own(gpt: Model, tmp_path: Path) -> None:
    program = as_run(distribute(gpt, Plan(2, microbatches=4)))
    assert {f.name for f in program.callees()} >= {"bwd0.first", "bwd0", "bwd0.last"}
    found = sums(times(tmp_path, 'bwd0 = 1000\n"bwd0.last" = 5000', gpt, program))
    assert found == pytest.approx({"bwd0.first": 1e-3, "bwd0": 1e-3, "bwd0.last": 5e-3})


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2),
        Plan(1, 2, microbatches=2),
        Plan(1, 1, 2, microbatches=2),
        Plan(2, microbatches=2, zero=3),
        Plan(recompute="full"),
        Plan(split=("cp=2:*.1",)),  # pyright: ignore[reportArgumentType]
    ],
    ids=str,
)
def test_a_layer_takes_its_time(gpt: Model, tmp_path: Path, plan: Plan) -> None:
    program = as_run(distribute(gpt, plan))
    text = "".join(
        f'[layers."transformer.h.{k}"]\nforward = {1000 * (k + 1)}\nbackward = {10_000 * (k + 1)}\n' for k in (0, 1)
    )
    found = times(tmp_path, text, gpt, program)
    each = [times(tmp_path, part, gpt, program) for part in ("[layers." + x for x in text.split("[layers.")[1:])]
    assert not each[0].keys() & each[1].keys()
    assert found.keys() == each[0].keys() | each[1].keys()
    for k, alone in enumerate(each):
        for name, x in sums(alone).items():
            assert x == pytest.approx((k + 1) * (1e-3 if name.startswith("fwd") else 1e-2))
    of_stages: dict[str, float] = defaultdict(float)  # layers of several stages: one variant of each runs at a time
    for name, x in sums(times(tmp_path, '[layers."transformer.h"]\nforward = 7000', gpt, program)).items():
        stem = name.partition(".")[0]
        of_stages[stem] = max(x, of_stages[stem])
    assert sum(of_stages.values()) == pytest.approx(7e-3)


def test_ops_of_a_layer(gpt: Model, tmp_path: Path) -> None:
    """From the first use of its weights to that of the next one's; backward ops are with those they differentiate."""
    program = as_run(distribute(gpt, Plan()))
    found = times(tmp_path, '[layers."transformer.h.1"]\nforward = 1\nbackward = 1', gpt, program)
    forward = [op.op_type for f, op in found if f.name == "fwd0"]
    backward = [op.op_type for f, op in found if f.name == "bwd0"]
    assert forward[0] == "LayerNorm"
    assert forward.count("Gemm") == 4  # of attention and the MLP
    assert forward.count("LayerNorm") == 2
    assert backward.count("MatMulGradWeight") == 4
    assert sum(x for (f, _), x in found.items()) == pytest.approx(2e-6)


@pytest.mark.parametrize("first", [True, False])
def test_ops_are_of_the_layer_that_is_named_most_closely(gpt: Model, tmp_path: Path, first: bool) -> None:
    program = as_run(distribute(gpt, Plan()))
    tables = ['[layers."transformer.h"]\nforward = 1000\n', '[layers."transformer.h.1"]\nforward = 200\n']
    found = times(tmp_path, "".join(tables if first else tables[::-1]), gpt, program)
    inner = times(tmp_path, tables[1], gpt, program)
    assert {where: x for where, x in found.items() if where in inner} == pytest.approx(inner)
    assert sum(found.values()) == pytest.approx(1.2e-3)


def test_the_optimizer_of_a_layer(tmp_path: Path) -> None:
    """Of weights whose names begin so; what updates those of several layers is of the layers above."""
    model = load("dlrm:rows=4096,batch=64")
    program = as_run(distribute(model, Plan()))
    updates = [op for f in program.callees() for op in f.ops if op.op_type in ("LookupSGD", "GroupedSGD")]
    found = times(tmp_path, "[layers.tables]\nupdate = 190\n[layers.top]\nforward = 3", model, program)
    of_updates = {op.op_type: x for (_, op), x in found.items() if op in updates}
    assert of_updates == pytest.approx({"LookupSGD": 190e-6})
    one_layer = times(tmp_path, '[layers."top.0"]\nforward = 1', model, program)
    assert not [op for _, op in one_layer if op in updates]


@pytest.mark.parametrize("text", ["fwd0 = 1000", '[layers."transformer.h.0"]\nforward = 1000'])
def test_what_is_predicted_to_take_no_time_takes_what_is_given(gpt: Model, tmp_path: Path, text: str) -> None:
    program = as_run(distribute(gpt, Plan(2)))
    found = times(tmp_path, text, gpt, program, free=True)
    assert sums(found) == pytest.approx({"fwd0": 1e-3})
    assert len(set(found.values())) == 1


def test_sleeps_of_a_program_take_what_is_given(tmp_path: Path) -> None:
    """Those of a pipeline's proxy that sleeps 0 seconds, and of a flat program."""
    for name, text, function in (
        ("proxy-gpt2-large:layers=4,stages=2", "fwd1 = 500", "fwd1"),
        ("proxy-dlrm", "dlrm = 500", "dlrm"),
    ):
        model = load(name)
        found = times(tmp_path, text, model, as_run(model.function), free=True)
        assert sums(found) == pytest.approx({function: 5e-4})


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("fwd9 = 1", "the program has no function 'fwd9'", "did you mean"),
        ("fwd0 = -1", "expected microseconds", None),
        ("fwd0 = true", "expected microseconds", None),
        ('fwd0 = "1"', "expected microseconds", None),
        ("layers = 3", "expected tables such as", None),
        ('[layers."transformer.h.9"]\nforward = 1', "the model has no layer 'transformer.h.9'", "did you mean"),
        ('[layers."transformer.w"]\nforward = 1', "the model has no layer 'transformer.w'", "did you mean"),
        ('[layers."transformer"]\nsideways = 1', "expected some of forward, backward, update", None),
        ('[layers."transformer.h.0"]', "expected some of forward, backward, update", None),
        ('[layers."transformer.h.0"]\nforward = -2', "expected microseconds", None),
        ('fwd0 = 1\n[layers."transformer.h.0"]\nforward = 2', "are also in a function with a time", "one of them"),
        ('[layers."transformer.h.0"]\nupdate = 300', "nothing is computed that could take 300 us", "--bucket-mb 0"),
        ("prologue0 = 3", "", None),
    ],
)
def test_times_that_do_not_fit(gpt: Model, tmp_path: Path, text: str, said: str, hint: str | None) -> None:
    program = as_run(distribute(gpt, Plan(2)))
    if text.startswith("prologue0"):
        assert sum(times(tmp_path, text, gpt, program).values()) == pytest.approx(3e-6)
        return
    with pytest.raises(UsageError) as e:
        times(tmp_path, text, gpt, program)
    assert said in e.value.message
    assert "\n" not in e.value.message
    assert hint is None or hint in (e.value.hint or "")


def test_layers_of_a_distributed_program(tmp_path: Path) -> None:
    model = load("proxy-dlrm")
    with pytest.raises(UsageError, match="is distributed already, and has no layers"):
        times(tmp_path, '[layers."h.0"]\nforward = 1', model, as_run(model.function))


def trace(folder: Path, rank: int, rows: list[tuple[Function, Op, float]]) -> None:
    """A rank's trace of one step with these ops, each taking so many seconds, one after the other."""
    about = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"rank {rank}", "rank": rank}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": COMPUTE}},
    ]
    events: list[object] = []
    now = 0.0
    for f, op, seconds in rows:
        args = {**labels(op, f), "step": 1}
        where = {"pid": 1, "tid": 1, "ts": now * 1e6, "dur": seconds * 1e6}
        events.append({**where, "cat": COMPUTE, "name": op.spec.name, "ph": "X", "args": args})
        now += seconds
    step = {"pid": 1, "tid": 1, "ts": 0.0, "dur": now * 1e6, "cat": "step", "name": "step 1", "args": {"step": 1}}
    events.append({**step, "ph": "X"})
    (folder / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [*about, *events]}))


def test_measured_times_are_means_over_ranks(gpt: Model, tmp_path: Path) -> None:
    program = as_run(distribute(gpt, Plan(2)))
    rows = [(f, op, 1e-3 * (k % 7 + 1)) for f in program.callees() for k, op in enumerate(f.ops) if is_slept(op)]
    about = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "all", "devices": 2}}]
    (tmp_path / PREDICTED).write_text(json.dumps({"traceEvents": about}))
    trace(tmp_path, 0, rows)
    trace(tmp_path, 1, [(f, op, 3 * x) for f, op, x in rows])
    found = given_times(tmp_path, gpt, program, by_bytes)
    assert found == pytest.approx({(f, op): 2 * x for f, op, x in rows})
    other = as_run(distribute(load(EXAMPLES / "mlp.onnx", {"batch": 8}, loss="mse"), Plan(2)))
    with pytest.raises(UsageError, match="which the program does not compute"):
        given_times(tmp_path, gpt, other, by_bytes)
    (tmp_path / PREDICTED).unlink()
    with pytest.raises(UsageError, match="cannot read"):
        given_times(tmp_path, gpt, program, by_bytes)


@pytest.mark.slow
def test_a_proxy_takes_what_a_run_took(tmp_path: Path) -> None:
    model = load(EXAMPLES / "mlp.onnx", {"batch": 8}, loss="mse")
    run(model, Plan(2), steps=4, profile=tmp_path / "traces")
    done = run_proxy(model, Plan(2), ProxyOptions(times=tmp_path / "traces", iterations=2, warmup=0))
    program = as_run(distribute(model, Plan(2)))
    found = given_times(tmp_path / "traces", model, program, by_bytes)
    assert done.compute >= 0.9 * sum(found.values())
