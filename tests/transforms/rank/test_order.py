"""Matching programs of ranks pass; those that would deadlock or differ are refused, ranks and ops named."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.ir import Device, Function, Mesh, Op
from distir.ir.errors import ModelError
from distir.ir.function import FunctionMaker
from distir.ir.type import SUM, Float32, Float64, Shard, Tensor
from distir.models import gpt
from distir.transforms import parallel_transform_3d
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.rank.order import check_order
from distir.transforms.rank.project import RankProgram, coordinate, device_at, project_all
from tests.transforms.programs import BATCH, Plan, distributed, plans, small_gpt


def programs(plan: Plan) -> list[RankProgram]:
    return project_all(distributed(small_gpt(), plan).program)


def changed(programs: Sequence[RankProgram], rank: int, change: Callable[[list[Op]], list[Op]]) -> list[RankProgram]:
    """The programs, with the ops of one rank's changed."""
    p = programs[rank]
    f = p.function
    new = Function(f.name, f.inputs, tuple(change(list(f.ops))), f.outputs, f.updates, f.sources)
    return [*programs[:rank], p._replace(function=new), *programs[rank + 1 :]]


def place(ops: Sequence[Op], op_type: str, n: int = 0) -> int:
    """The position of the n-th op of a type."""
    return [k for k, op in enumerate(ops) if op.spec.name == op_type][n]


def moved(op_type: str, n: int, to: Callable[[list[Op]], int]) -> Callable[[list[Op]], list[Op]]:
    def change(ops: list[Op]) -> list[Op]:
        op = ops.pop(place(ops, op_type, n))
        ops.insert(to(ops), op)
        return ops

    return change


def without(op_type: str, n: int) -> Callable[[list[Op]], list[Op]]:
    def change(ops: list[Op]) -> list[Op]:
        del ops[place(ops, op_type, n)]
        return ops

    return change


# ---- what is right passes


@pytest.mark.parametrize("plan", list(plans(("gpipe", "1f1b"), (False, True), limit=4)), ids=str)
def test_every_plan_passes(plan: Plan) -> None:
    check_order(programs(plan))


def test_interleaved_passes() -> None:
    check_order(programs(Plan(2, 1, 2, 4, "interleaved", False, 2)))


def test_a_thousand_ranks_share_their_programs() -> None:
    """The work does not grow with dp: 1,024 ranks have as many distinct programs as 64."""
    step = training_step(gpt(8, 64, 4, 128, 16, 512), "cross-entropy", AdamW())
    counts: list[int] = []
    for dp in (4, 64):
        devices = [Device("gpu", i) for i in range(dp * 16)]
        found = project_all(parallel_transform_3d(step, dp, 2, 8, devices, 8))
        assert len(found) == dp * 16
        begin = time.process_time()
        check_order(found)
        assert time.process_time() - begin < 1  # 0.01 s
        counts.append(len({p.function for p in found}))
    assert counts == [8, 8]


# ---- seeded faults


def test_two_stages_that_both_send_first() -> None:
    """Stage 1 sends its first gradient only after it got an activation; here it wants to send before."""
    right = programs(Plan(1, 1, 2, 2, "gpipe"))
    wrong = changed(right, 1, moved("MPISend", 0, lambda ops: 0))
    with pytest.raises(ModelError, match=r"wait for each other for ever: .*rank [01] in .* for rank [01]; rank") as e:
        check_order(wrong)
    assert "MPISend" in e.value.message


def test_two_that_send_to_each_other_first() -> None:
    a, b = Device("gpu", 0), Device("gpu", 1)
    t = [Tensor(Float64, (4,), d) for d in (a, b)]
    found: list[RankProgram] = []
    for rank, (here, there) in enumerate(((a, b), (b, a))):
        f = FunctionMaker(f"rank{rank}")
        x = f.add_input_value("x", t[rank])
        f.add_op("MPISend", None, [x], {"to": there, "message": rank})
        f.add_op(
            "MPIRecv", "y", (), {"source": there, "to": here, "dtype": Float64, "shape": (4,), "message": 1 - rank}
        )
        found.append(RankProgram(rank, here, f.finalize(), (0,), (0,)))
    with pytest.raises(
        ModelError, match=r"for ever: rank 0 in .*MPISend.* for rank 1; rank 1 in .*MPISend.* for rank 0"
    ):
        check_order(found)


def test_ranks_that_reduce_in_different_orders() -> None:
    right = programs(Plan(2, 1, 1, 1, bucket_mb=0))

    def swap(ops: list[Op]) -> list[Op]:
        k = next(k for k, op in enumerate(ops) if op.callee and len(_reductions(op.callee)) > 1)
        callee = ops[k].callee
        assert callee is not None
        inner = list(callee.ops)
        i, j = _reductions(callee)[:2]  # of equal shapes: what is reduced together would differ, not its size
        inner[i], inner[j] = inner[j], inner[i]
        body = Function(callee.name, callee.inputs, tuple(inner), callee.outputs)
        attributes = type(ops[k].attributes)({**ops[k].attributes, "callee": body})
        ops[k] = Op(ops[k].spec, ops[k].inputs, attributes, ops[k].outputs)
        return ops

    with pytest.raises(
        ModelError, match=r"rank [01] would run %.*MPIAllreduce.* where rank [01] would run %.*MPIAllred"
    ):
        check_order(changed(right, 1, swap))


def test_ranks_that_put_their_gradients_into_a_bucket_in_different_orders() -> None:
    """Members of the same type: only their names show that different gradients would be added."""
    mesh = Mesh([Device("gpu", i) for i in range(2)], {"dp": 2}, "m")
    found: list[RankProgram] = []
    for rank, order in enumerate(((0, 1), (1, 0))):
        f = FunctionMaker("main")
        grads = [f.add_input_value(name, Tensor(Float64, (4,), mesh, (SUM,))) for name in ("a", "b")]
        bucket = f.add_op("Pack", "bucket", [grads[k] for k in order])
        f.set_outputs(f.emit("Unpack", f.add_op("MPIAllreduce", "sums", [bucket], {"axis": "dp"})))
        found.append(RankProgram(rank, mesh.devices[rank], f.finalize(), (0, 1), (0, 1)))
    check_order([found[0], RankProgram(1, mesh.devices[1], found[0].function, (0, 1), (0, 1))])
    with pytest.raises(ModelError, match=r"rank [01] would run %sums.*MPIAllreduce.* where rank [01] would run"):
        check_order(found)


def test_a_bucket_that_lacks_a_gradient_on_one_rank() -> None:
    mesh = Mesh([Device("gpu", i) for i in range(2)], {"dp": 2}, "m")
    found: list[RankProgram] = []
    for rank, count in enumerate((2, 1)):
        f = FunctionMaker("main")
        grads = [f.add_input_value(name, Tensor(Float64, (4,), mesh, (SUM,))) for name in ("a", "b")]
        f.add_op("MPIAllreduce", "sums", [f.add_op("Pack", "bucket", grads[:count])], {"axis": "dp"})
        found.append(RankProgram(rank, mesh.devices[rank], f.finalize(), (0, 1), ()))
    with pytest.raises(ModelError, match="would run %sums"):
        check_order(found)


def _reductions(f: Function) -> list[int]:
    """The positions of the reductions over dp of the most frequent type."""
    found = [k for k, op in enumerate(f.ops) if op.spec.name == "MPIAllreduce" and op.attributes["axis"] == "dp"]
    types = Counter(f.ops[k].inputs[0].type for k in found)
    return [k for k in found if f.ops[k].inputs[0].type is types.most_common(1)[0][0]]


def test_an_unmatched_send() -> None:
    right = programs(Plan(1, 1, 2, 2))
    with pytest.raises(ModelError, match=r"rank 0: MPISend|rank 0: .*MPISend\(.*waits for rank 1, which never comes"):
        check_order(changed(right, 1, without("MPIRecv", 1)))
    with pytest.raises(ModelError, match=r"rank 1: .*MPIRecv\(.*waits for rank 0, which never comes"):
        check_order(changed(right, 0, without("MPISend", 1)))


def test_fewer_microbatches_than_stages_mishandled() -> None:
    """A stage that runs all warm-up forwards of its depth, though there are fewer microbatches."""
    few, many = programs(Plan(1, 1, 4, 2)), programs(Plan(1, 1, 4, 4))
    check_order(few)
    with pytest.raises(ModelError, match="rank"):
        check_order([many[0], *few[1:]])


def test_pieces_of_different_types() -> None:
    mesh = [Mesh([Device("gpu", 2 * s + i) for i in range(2)], {"dp": 2}, f"stage{s}") for s in range(2)]
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float64, (4,), mesh[0]))
    f.emit("Send", x, to=mesh[1])
    right = project_all(f.finalize())
    check_order(right)

    def other(ops: list[Op]) -> list[Op]:
        g = FunctionMaker("main")
        g.add_op("MPIRecv", "y", (), {**ops[0].attributes, "shape": (8,)})
        return g.ops

    with pytest.raises(ModelError, match=r"rank 2 would run|ranks 0 to 1 would run"):
        check_order(changed(right, 2, other))


@pytest.mark.parametrize("change", [{"shape": (8,)}, {"dtype": Float32}], ids=str)
def test_a_transfer_of_another_type(change: dict) -> None:
    """Between two devices, and from a host to a mesh."""
    host, device = Device("gpu", 0), Device("gpu", 1)
    mesh = Mesh([device, Device("gpu", 2)], {"dp": 2}, "m")
    for op_type, attributes in (("Send", {"to": device}), ("MPIScatter", {"to": mesh, "placements": (Shard(0),)})):
        f = FunctionMaker("main")
        f.emit(op_type, f.add_input_value("x", Tensor(Float64, (4,), host)), **attributes)
        right = project_all(f.finalize())
        check_order(right)

        def other(ops: list[Op]) -> list[Op]:
            g = FunctionMaker("main")
            g.add_op("MPIRecv", "y", (), {**ops[0].attributes, **change})
            return g.ops

        with pytest.raises(ModelError, match="would run"):
            check_order(changed(right, 1, other))


def test_a_reduction_on_one_rank_only() -> None:
    mesh = Mesh([Device("gpu", i) for i in range(3)], {"dp": 3}, "m")
    f = FunctionMaker("main")
    f.emit("MPIAllreduce", f.add_input_value("x", Tensor(Float64, (4,), mesh, (SUM,))), axis="dp")
    right = project_all(f.finalize())
    check_order(right)
    with pytest.raises(ModelError, match=r"ranks 0, 2: .*MPIAllreduce.*waits for rank 1, which never comes to it"):
        check_order(changed(right, 1, without("MPIAllreduce", 0)))


# ---- against walking every rank by itself


def blocks(programs: Sequence[RankProgram]) -> bool:
    """Whether the ranks deadlock: simulates every rank and every group, with calls inlined, without buffers."""
    rank_of = {p.device: p.rank for p in programs}
    rows = [list(_events(p.function, p, rank_of)) for p in programs]
    at = [0] * len(rows)
    moved_on = True
    while moved_on:
        moved_on = False
        for r, row in enumerate(rows):
            if at[r] == len(row):
                continue
            key, who = row[at[r]]
            if all(at[q] < len(rows[q]) and rows[q][at[q]][0] == key for q in who):
                for q in who:
                    at[q] += 1
                moved_on = True
    return any(at[r] < len(row) for r, row in enumerate(rows))


def _events(f: Function, p: RankProgram, rank_of: dict[Device | None, int], mb: int | None = None):
    assert p.device is not None
    for op in f.ops:
        if op.callee is not None:
            yield from _events(op.callee, p, rank_of, op.attributes.get("mb", mb))
        elif op.spec.name == "MPISend":
            twin = device_at(op.attributes["to"], coordinate(op.inputs[0].type.device, p.device))  # type: ignore[arg-type]
            yield ("sent", op.attributes["message"], p.rank, rank_of[twin]), (p.rank, rank_of[twin])
        elif op.spec.name == "MPIRecv":
            twin = device_at(op.attributes["source"], coordinate(op.attributes["to"], p.device))
            yield ("sent", op.attributes["message"], rank_of[twin], p.rank), (rank_of[twin], p.rank)
        elif op.spec.name == "MPIAllreduce" and op.attributes["axis"] != "mb":
            mesh = op.inputs[0].type.device
            assert isinstance(mesh, Mesh)
            who = tuple(rank_of[d] for d in mesh.group(op.attributes["axis"], mesh.devices.index(p.device)))
            yield (op.outputs[0].name, f.name, mb, who), who


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_what_passes_does_not_block(seed: int) -> None:
    """Ops of one rank swapped or removed at random: whatever would deadlock is refused."""
    rng = random.Random(seed)
    plan = rng.choice([p for p in plans(("gpipe", "1f1b"), limit=4) if p.pp > 1 and BATCH % p.microbatches == 0])
    right = programs(plan)
    assert not blocks(right)
    rank = rng.randrange(len(right))

    def change(ops: list[Op]) -> list[Op]:
        transfers = [k for k, op in enumerate(ops) if op.spec.name in ("MPISend", "MPIRecv")]
        i, j = rng.choice(transfers), rng.choice(transfers)
        if rng.random() < 0.2:
            del ops[i]
        else:
            ops[i], ops[j] = ops[j], ops[i]
        return ops

    wrong = changed(right, rank, change)
    try:
        check_order(wrong)
    except ModelError:
        return
    assert not blocks(wrong)
