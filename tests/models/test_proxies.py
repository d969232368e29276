"""The published sequences: ops, sizes, order and axes against what is published, written out here once more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from distir.api import load, simulate
from distir.api.messages import messages, most_sent
from distir.api.proxy import ProxyOptions, run_proxy
from distir.cli import main
from distir.ir import Function, Op, parse, pformat, same, verify
from distir.ir.errors import UsageError
from distir.models.proxies import proxy
from distir.models.sequences import (
    CosmoflowSequence,
    DlrmSequence,
    Gpt2Sequence,
    Gpt3Sequence,
    MoeSequence,
    ProxySizes,
)
from distir.ops.rules import tensor
from distir.transforms.plan import Plan
from distir.transforms.rank.order import check_order
from distir.transforms.rank.proxied import proxied
from distir.transforms.rank.rank_program import in_step

pytestmark = pytest.mark.usefixtures("preloaded")

SMALL: dict[str, Any] = {"layers": 4, "stages": 2, "microbatches": 3, "activation": 64}
EVERY: list[ProxySizes] = [
    DlrmSequence(),
    DlrmSequence(ranks=1),
    CosmoflowSequence(),
    CosmoflowSequence(dp=2),
    CosmoflowSequence(h=1),
    CosmoflowSequence(h=1, w=1),
    Gpt2Sequence(),
    Gpt2Sequence(layers=8, stages=2, dp=1, tensors=True),
    Gpt3Sequence(**SMALL, recompute=True),
    Gpt3Sequence(**SMALL, tp=1, dp=1),
    MoeSequence(**SMALL, ep=2, dp=2),
    MoeSequence(**SMALL, ep=1),
]

Step = int | tuple[str, int | tuple[int, ...], str]
"""Microseconds of a sleep; or an op, the elements that a device sends of it, and its axes, as `--messages` has them."""


def steps(function: Function) -> list[Step]:
    """What a device does, in order, without waits."""
    return [step for op in function.ops for step in _steps(op)]


def _steps(op: Op) -> Iterator[Step]:
    if op.op_type == "Sleep":
        if op.attributes["seconds"]:
            yield round(op.attributes["seconds"] * 1e6, 4)
    elif op.op_type != "Send":
        axis = op.attributes["axis"]
        moved = op.outputs[0] if op.op_type == "MPIReduceScatter" else op.inputs[0]
        yield op.op_type, tensor(moved).bytes // 4, axis if isinstance(axis, str) else "+".join(axis)


@pytest.mark.parametrize("sizes", EVERY, ids=str)
def test_they_are_distributed_programs(sizes: ProxySizes) -> None:
    program = proxy(sizes)
    verify(program)
    assert same(parse(pformat(program)), program)
    check_order(in_step(program))


def test_dlrm() -> None:
    assert steps(proxy(DlrmSequence())) == [
        95,
        ("MPIAlltoall", 262_144, "ep"),
        *[341, 209, 455, 910],
        ("MPIAllreduce", 728_065, "ep"),
        *[209, 682],
        ("MPIAllreduce", 49_536, "ep"),
        ("MPIAlltoall", 262_144, "ep"),
        190,
    ]


def test_a_collective_that_is_started_is_waited_for_at_the_end() -> None:
    program = proxy(DlrmSequence())
    reduced = [op.outputs[0] for op in program.ops if op.op_type == "MPIAllreduce"]
    assert [op for op in program.ops if set(reduced) & set(op.inputs)] == [program.ops[-1]]
    exchanged = [i for i, op in enumerate(program.ops) if op.op_type == "MPIAlltoall"]
    assert all(program.ops[i].outputs[0] in program.ops[i + 1].inputs for i in exchanged)  # these block


def test_cosmoflow() -> None:
    def faces(size: int) -> list[Step]:
        return [("MPIPermute", size, axis) for axis in ("h", "w")]

    def of_all(op: str, size: int) -> Step:
        return op, size, "h+w"

    assert steps(proxy(CosmoflowSequence(dp=2))) == [
        *[6567, *faces(2_097_152), 13135, *faces(1_048_576), 6567, *faces(524_288), 3283, *faces(262_144)],
        *[1641, of_all("MPIAllgather", 65_536), 5, of_all("MPIAllgather", 256), 3, of_all("MPIAllgather", 128), 1],
        *[2, of_all("MPIReduceScatter", 128), 6, of_all("MPIReduceScatter", 256)],
        *[10, of_all("MPIReduceScatter", 65_536), ("MPIAllreduce", 1_050_737, "dp")],
        *[3283, *faces(131_072), ("MPIAllreduce", 3_539_456, "dp+h+w")],
        *[6567, *faces(262_144), ("MPIAllreduce", 884_992, "dp+h+w")],
        *[13135, *faces(524_288), ("MPIAllreduce", 221_312, "dp+h+w")],
        *[26270, *faces(1_048_576), ("MPIAllreduce", 55_360, "dp+h+w")],
        *[13135, ("MPIAllreduce", 3_488, "dp+h+w")],
    ]


def test_gradients_of_one_replica_are_not_reduced_over_it() -> None:
    reduced = [s for s in steps(proxy(CosmoflowSequence())) if not isinstance(s, int | float) and "reduce" in s[0]]
    assert ("MPIAllreduce", 3_539_456, "h+w") in reduced
    assert not any(size == 1_050_737 for _, size, _ in reduced)


def of_stage(program: Function, name: str) -> list[Step]:
    return steps(next(f for f in program.callees() if f.name == name))


def test_gpt2_large() -> None:
    program = proxy(Gpt2Sequence())
    first, layer, last = 85_317_120, 19_677_440, 84_008_960
    want = [[first, *[layer] * 8], [layer] * 9, [layer] * 9, [*[layer] * 8, last]]
    for stage, sizes in enumerate(want):
        assert of_stage(program, f"fwd{stage}") == of_stage(program, f"bwd{stage}") == []
        assert of_stage(program, f"bwd{stage}.last") == [("MPIAllreduce", n, "dp") for n in sizes]
    sent = [m for m in messages(program) if m.op == "Send"]
    assert {m.elements for m in sent} == {808_960}
    assert sum(m.times for m in sent) == 8 * 2 * 3
    # all forward sends of a stage come before its backward ones
    calls = [op for op in program.ops if op.callee is not None]
    words = [op.callee.name[:3] for op in calls if op.callee is not None]
    assert words == sorted(words, reverse=True)


def test_gpt2_large_by_tensor() -> None:
    """146, 144, 144 and 147 all-reduces in 12 layers a stage, of as many elements in all as by layer."""
    sizes = Gpt2Sequence(layers=48, tensors=True)
    assert [len(sizes.reduced(stage)) for stage in range(4)] == [146, 144, 144, 147]
    sums = [sum(n for n, _ in sizes.reduced(stage)) for stage in range(4)]
    assert sums == [301_768_960, 236_129_280, 236_129_280, 300_460_800]


def test_all_reduces_of_gpt2_block() -> None:
    program = proxy(Gpt2Sequence())
    last = next(f for f in program.callees() if f.name == "bwd1.last")
    makers = last.producers()
    reduced = [op for op in last.ops if op.op_type == "MPIAllreduce"]
    for before, after in itertools.pairwise(reduced):
        assert makers[after.inputs[0]].inputs == before.outputs


def test_gpt3() -> None:
    program = proxy(Gpt3Sequence())
    twice = [("MPIAllreduce", 25_165_824, "tp")] * 2
    assert of_stage(program, "fwd5") == [15_915, *twice]
    assert of_stage(program, "bwd5") == [31_830, *twice]
    assert of_stage(program, "bwd5.last") == [31_830, *twice, ("MPIAllreduce", 452_984_832, "dp")]
    assert of_stage(proxy(Gpt3Sequence(recompute=True)), "bwd5") == [47_745, *twice]
    assert {m.elements for m in messages(program) if m.op == "Send"} == {25_165_824}


def test_gpt3_with_experts() -> None:
    program = proxy(MoeSequence(dp=2))
    exchange = ("MPIAlltoall", 25_165_824, "ep")
    assert of_stage(program, "fwd5") == [22_367, exchange, 41_293 / 16, exchange]
    backward = [44_734, exchange, round(82_586 / 16, 4), exchange]
    assert of_stage(program, "bwd5") == backward
    reduced = [("MPIAllreduce", 75_497_472, "dp"), ("MPIAllreduce", 603_979_776, "dp+ep")]
    assert of_stage(program, "bwd5.last") == [*backward, *reduced]


def test_the_size_does_not_grow_with_devices() -> None:
    def size(sizes: ProxySizes) -> int:
        program = proxy(sizes)
        return sum(len(f.ops) for f in (program, *program.callees()))

    assert size(DlrmSequence()) == size(DlrmSequence(ranks=64))
    assert size(CosmoflowSequence(dp=2)) == size(CosmoflowSequence(dp=64))
    assert size(Gpt3Sequence(**SMALL)) == size(Gpt3Sequence(**SMALL, tp=8, dp=16))


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("proxy-dlrm", 3091e-6),
        ("proxy-cosmoflow", (6567 + 13135 + 6567 + 3283 + 1641 + 9 + 18 + 3283 + 6567 + 13135 + 26270 + 13135) * 1e-6),
        ("proxy-gpt2-large", 0),
        ("proxy-gpt3-175b:layers=4,stages=4", 11 * (15_915 + 31_830) * 1e-6),  # 8 microbatches, and 3 to fill
    ],
)
def test_a_step_takes_what_is_slept_and_more(name: str, least: float) -> None:
    prediction = simulate(name, cluster="dgx-a100")
    assert least < prediction.step_seconds < least + 1.5
    assert prediction.summary.split is None  # there are no weights


def test_the_batch_and_the_axes_are_said() -> None:
    summary = simulate("proxy-gpt3-moe:layers=2,stages=2", cluster="dgx-a100").summary
    assert (summary.plan.size, summary.plan.microbatches, summary.batch) == (32, 8, 8 * 16)
    assert "pp 2 x ep 16" in summary.lines()[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("proxy-dlrm:rank=2", "has no 'rank'"),
        ("proxy-dlrm:ranks=3", "alltoall is a multiple of ranks 3"),
        ("proxy-dlrm:forward=1-2-3", "forward is 4 numbers such as 95-341-209-455, got 3"),
        ("proxy-dlrm:top=0", "top is a whole number of at least 1"),
        ("proxy-cosmoflow:h=4", "h is 1 or 2"),
        ("proxy-cosmoflow:halos=0-1-2-3", "halos is widths such as"),
        ("proxy-cosmoflow:convolutions=1-2", "convolutions is 5 numbers"),
        ("proxy-gpt2-large:stages=5", "layers are a multiple of stages 5"),
        ("proxy-gpt3-moe:ep=7", "is a multiple of ep 7"),
    ],
)
def test_sizes_that_do_not_fit(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(text)


@pytest.mark.parametrize(
    "flags", [["--dp", "2"], ["--pp", "2"], ["--split", "cp=2:x.0"], ["--loss", "mse"], ["--microbatches", "2"]]
)
def test_they_take_no_plan(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "proxy-dlrm", "--cluster", "cpu-2core", *flags]) == 2
    said = capsys.readouterr().err
    assert "proxy-dlrm is" in said
    assert "distributed" in said


def test_of_another_type() -> None:
    program = load("proxy-dlrm", dtype="bfloat16").function
    verify(program)
    assert {m.bytes // m.elements for m in messages(program)} == {2}


@pytest.mark.parametrize(
    "name",
    [
        "proxy-dlrm:ranks=2",
        pytest.param("proxy-cosmoflow:halos=64-32-16-8,backward_halos=8-16-32-64", marks=pytest.mark.slow),
        pytest.param("proxy-gpt2-large:layers=4,stages=2,dp=2,first=9-8,layer=7,last=5", marks=pytest.mark.slow),
        pytest.param("proxy-gpt3-moe:layers=2,stages=2,ep=2,activation=64,mlp=64,attention=8", marks=pytest.mark.slow),
    ],
)
def test_they_run(name: str) -> None:
    done = run_proxy(name, Plan(), ProxyOptions(emulate="none", iterations=2, warmup=1))
    assert len(done.seconds) == 2
    assert done.compute == 0
    assert done.bytes == most_sent(messages(load(name).function))


@pytest.mark.parametrize("sizes", [DlrmSequence(), Gpt3Sequence(**SMALL)], ids=["flat", "of passes"])
def test_sleeps_of_a_program_take_another_time(sizes: ProxySizes) -> None:
    """As `--scale` and `--emulate` say; each stays an op of its own."""
    program = proxy(sizes)
    made = proxied(program, lambda function, op: op.attributes["seconds"] * 2, spin=True)
    verify(made)
    for before, after in zip((program, *program.callees()), (made, *made.callees()), strict=True):
        for a, b in zip(before.ops, after.ops, strict=True):
            assert a.spec is b.spec
            if a.op_type == "Sleep":
                assert b.attributes == {**a.attributes, "seconds": a.attributes["seconds"] * 2, "spin": True}
