"""What ranks send: published figures at full size, without a run, and every rank's own program on small models."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from distir.api.compilation import distribute as compiled
from distir.api.messages import Message, messages, most_sent
from distir.cli import main
from distir.ir import Device, Function, FunctionMaker, Mesh
from distir.ir.placement import REPLICATE, Shard
from distir.ir.type import Float32, Float64, Tensor, Tuple
from distir.models import mlp
from distir.models.decoder import Decoder
from distir.transforms.plan import Plan as RealPlan
from distir.transforms.rank.rank_program import rank_programs
from tests.transforms.programs import Plan, Program, distributed, gpt2_tiny, small_gpt

POSITIONS = any(f.name == "positions" for f in fields(Decoder))
"""Whether a model's table of positions may be longer than its sequence."""


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert main(["show", *flags, "--loss", "cross-entropy", "--messages", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def cut(layers: list[int]) -> tuple[str, str]:
    return "--cut", ",".join([f"{k}.norm1.weight" for k in layers])


@pytest.mark.parametrize("bucket", ["0", "25"])
def test_gpt2_large(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = "gpt:layers=48,hidden=1280,heads=20,vocab=50257,seq=632,tied=0,batch=64" + ",positions=1024" * POSITIONS
    plan = ["--dp", "8", "--pp", "4", "--microbatches", "8", "--schedule", "gpipe", *cut([12, 24, 36])]
    rows = shown(capsys, model, *plan, "--bucket-mb", bucket)
    assert {(m["elements"], m["times"]) for m in rows if m["op"] == "Send"} == {(808_960, 8)}
    assert len([m for m in rows if m["op"] == "Send"]) == 6  # to the next stage, and back
    first = 301_768_960 if POSITIONS else 301_768_960 - (1024 - 632) * 1280
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for m in rows:
        if m["op"] == "MPIAllreduce" and m["elements"] != 1:  # of the loss and its count: one number
            assert m["over"] == "dp"
            assert m["total_bytes"] == 4 * m["total_elements"]
            total[m["ranks"]] += m["total_elements"]
            calls[m["ranks"]] += m["times"]
    stages = ["0-7", "8-15", "16-23", "24-31"]
    assert [total[s] for s in stages] == [first, 236_129_280, 236_129_280, 300_460_800]
    if bucket == "0":
        assert [calls[s] for s in stages] == [146, 144, 144, 147]
    else:
        tensors = {s: sum(len(m["members"]) * m["times"] for m in rows if m["ranks"] == s) for s in stages[1:3]}
        assert [n - 16 for n in tensors.values()] == [144, 144]  # but for 8 sends each way
        assert calls["8-15"] < 40


def test_gpt3_by_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """96 stages of a layer, each of 4 shards, 8 microbatches of one sample."""
    model = "gpt:layers=96,hidden=12288,heads=96,vocab=50257,seq=2048,tied=0,batch=8"
    rows = shown(capsys, model, "--tp", "4", "--pp", "96", "--microbatches", "8", *cut(list(range(1, 96))))
    assert {(m["elements"], m["times"]) for m in rows if m["op"] == "Send"} == {(25_165_824, 8)}
    assert len([m for m in rows if m["op"] == "Send"]) == 2 * 95
    for k in range(1, 95):  # the first stage has the embedding too, the last the head
        here = [m for m in rows if m["ranks"] == f"{4 * k}-{4 * k + 3}" and m["op"] != "Send"]
        assert [(m["op"], m["over"], m["function"], m["elements"], m["times"]) for m in here] == [
            ("MPIAllreduce", "tp", f"fwd{k}", 25_165_824, 2 * 8),
            ("MPIAllreduce", "tp", f"bwd{k}", 25_165_824, 2 * 8),
        ]


# ---- against the program of every rank


def own(program: Function) -> list[Counter[tuple[str, int]]]:
    """For each rank how often it sends how many elements by which op, from its own program."""
    found: list[Counter[tuple[str, int]]] = []
    for mine in rank_programs(program):
        count: Counter[tuple[str, int]] = Counter()
        todo = [mine.function]
        while todo:
            for op in todo.pop().ops:
                if op.callee is not None:
                    todo.append(op.callee)
                route, name = op.spec.route, op.spec.name
                if route == "axis":
                    t = op.inputs[0].type
                    parts = [x for x in (t.types if isinstance(t, Tuple) else [t]) if isinstance(x, Tensor)]
                    axis = op.attributes["axis"]
                    mesh = parts[0].device
                    assert isinstance(mesh, Mesh)
                    if mesh.is_time(axis) or mesh.size(axis) == 1:
                        continue
                    elements = sum(x.bytes // x.dtype.size for x in parts)
                    count[name, elements // mesh.size(axis) if name == "MPIReduceScatter" else elements] += 1
                elif name == "MPISend":
                    t = op.inputs[0].type
                    assert isinstance(t, Tensor)
                    count["Send", t.bytes // t.dtype.size] += 1
        found.append(count)
    return found


def listed(rows: list[Message], size: int) -> list[Counter[tuple[str, int]]]:
    """The same, from the table."""
    found: list[Counter[tuple[str, int]]] = [Counter() for _ in range(size)]
    for m in rows:
        for run in m.ranks.split(","):
            first, _, last = run.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                found[rank][m.op, m.elements] += m.times
    return found


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, tp=2, pp=2, microbatches=2),
        Plan(dp=4, microbatches=2, zero=3, bucket_mb=0.0),
        Plan(dp=2, pp=2, microbatches=4, chunks=2, schedule="interleaved", zero=2, cut=()),
        Plan(tp=2, pp=2, microbatches=2, sequence_parallel=True),
        Plan(dp=2, pp=2, microbatches=2, split=("cp=2:input_ids.1,labels.1",)),
        Plan(tp=2, sequence_parallel=True, split=("cp=2:input_ids.1,labels.1",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("program", [gpt2_tiny, small_gpt])
def test_every_rank_sends_what_is_listed(program: Callable[[], Program], plan: Plan) -> None:
    made = distributed(program(), plan).program
    assert listed(messages(made), len(plan.devices)) == own(made)


def test_replicas_change_only_the_ranks() -> None:
    function = small_gpt(batch=64).function
    few, many = [messages(compiled(function, RealPlan(dp=n, pp=2, microbatches=64 // n), check=False)) for n in (2, 32)]
    assert {m.ranks for m in many} == {"0-31", "32-63"}
    strip = {(m.op, m.function, m.members) for m in few}
    assert strip == {(m.op, m.function, m.members) for m in many}
    sends = [m.times for m in few if m.op == "Send"]
    assert sorted(sends) == [1, 1, 32, 32]  # the tied table goes forward once a step, and its gradient back


def test_ranks_apart_and_transfers_with_a_host() -> None:
    """Ranks of a mesh may lie apart; the first device may hold all inputs and send them."""
    rows = messages(compiled(small_gpt().function, RealPlan(dp=2, tp=2, pp=2, order=("pp", "tp", "dp")), check=False))
    assert {m.ranks for m in rows} == {"0,2,4,6", "1,3,5,7"}
    assert {m.over for m in rows if m.op == "Send"} == {"to 0,2,4,6", "to 1,3,5,7"}
    host, mesh = Device("cpu", 0), Mesh([Device("cpu", k) for k in (1, 2, 3)], {"dp": 3}, "m")
    f = FunctionMaker("hosted")
    x = f.add_input_value("x", Tensor(Float64, (6, 4), host))
    split = f.emit("MPIScatter", x, to=mesh, placements=(Shard(0),))
    whole = f.emit("MPIBroadcast", x, to=mesh)
    f.set_outputs([f.emit("MPIGather", split, to=host), whole])
    assert messages(f.finalize()) == [
        Message("0", "MPIScatter", "to 1-3", "-", (8,), 64, 3),
        Message("0", "MPIBroadcast", "to 1-3", "-", (24,), 192, 3),
        Message("1-3", "MPIGather", "to 0", "-", (8,), 64, 1),
    ]


def test_joining_microbatches_sends_nothing() -> None:
    program = Program(mlp(4, 8, 8), [])
    assert messages(distributed(program, Plan(microbatches=2)).program) == []


# ---- the command


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = [
        "show",
        "gpt:layers=2,hidden=8,heads=2,vocab=16,seq=4,batch=4,tied=0",
        "--loss",
        "cross-entropy",
        "--messages",
    ]
    assert main([*model, "--dp", "2", "--pp", "2", "--microbatches", "2", "--cut", "1.norm1.weight"]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[:5] == ["ranks", "op", "over", "in", "elements"]
    assert rows[0] == ["0-1", "Send", "to", "2-3", "-", "32", "1", "2", "64", "256"]
    assert main(model) == 0
    assert capsys.readouterr().out == "nothing is sent\n"
    for flags in (["--rank", "0"], ["--python"], ["--after", "place"]):
        assert main([*model, *flags]) == 2
        assert f"and {flags[0]} shows a program" in capsys.readouterr().err


def test_a_message_adds_up() -> None:
    m = Message("0", "MPIAllreduce", "dp", "bwd0", (3, 4), 28, 5)
    assert m.elements == 7
    assert m.to_json()["total_elements"] == 35
    assert replace(m, times=1).to_json()["total_bytes"] == 28


@pytest.mark.parametrize(("lo", "hi"), [(1, 1), (1, 2), (2, 0), (0, 1)])
@pytest.mark.parametrize("axes", [{"h": 2}, {"h": 4}, {"dp": 2, "h": 3}, {"h": 3, "w": 2}], ids=str)
def test_devices_at_the_ends_of_an_axis_have_one_neighbour(axes: dict[str, int], lo: int, hi: int) -> None:
    """Each device sends what of its slice the others hold as a halo."""
    n, slices, row = axes["h"], 3, 5
    mesh = Mesh([Device("cpu", k) for k in range(math.prod(axes.values()))], axes, "all")
    placements = [Shard(0) if axis == "h" else REPLICATE for axis in axes]
    maker = FunctionMaker("halo")
    x = maker.add_input_value("x", Tensor.whole(Float32, (n * slices, row), mesh, placements))
    maker.set_outputs([maker.emit("HaloExchange", x, axis="h", lo=lo, hi=hi)])
    want: list[Counter[tuple[str, int]]] = []
    for coord in mesh.coords:
        here = coord[mesh.position("h")]
        own = set(range(here * slices, (here + 1) * slices))
        others = [k for k in range(n) if k != here]
        held = [own & set(range(k * slices - lo, (k + 1) * slices + hi)) for k in others]
        want.append(Counter([("HaloExchange", len(part) * row) for part in held if part]))
    rows = messages(maker.finalize())
    assert listed(rows, len(mesh.devices)) == want
    bytes_of = [4 * sum(elements * times for (_, elements), times in of.items()) for of in want]
    assert most_sent(rows) == {"HaloExchange": max(bytes_of)}
