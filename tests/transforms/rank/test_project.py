"""Projection to one rank: the ops it has, the sides of transfers, and that ranks share programs."""

from __future__ import annotations

import time

import pytest

from distir.ir.device import Device, Mesh
from distir.ir.errors import UsageError
from distir.ir.function import Function, FunctionMaker, Role
from distir.ir.parse import parse
from distir.ir.same import same
from distir.ir.text import pformat
from distir.ir.type import REPLICATE, Float64, Shard, Tensor
from distir.ir.verify import verify
from distir.transforms.rank.project import coordinate, device_at, project, project_all, ranks

HOST = Device("cpu", 0)


def stages(dp: int, tp: int) -> tuple[Mesh, Mesh]:
    """Two meshes of dp * tp devices, numbered from 1."""
    n = dp * tp
    make = [Mesh([Device("gpu", 1 + s * n + k) for k in range(n)], {"dp": dp, "tp": tp}, f"stage{s}") for s in (0, 1)]
    return make[0], make[1]


def two_stages(dp: int = 2, tp: int = 2) -> Function:
    """A host scatters x, stage 0 multiplies, stage 1 adds, the host gathers; one update of w, on stage 1."""
    first, second = stages(dp, tp)
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float64, (64, 4), HOST), Role("data", 0))
    w = f.add_input_value("w", Tensor.whole(Float64, (64, 4), second, (Shard(0), REPLICATE)), Role("parameter"))
    a = f.emit("MPIScatter", x, to=first, placements=(Shard(0), REPLICATE))
    b = f.emit("Add", a, a)
    c = f.add_op("Pack", "bundle", [b, a])
    d, e = f.emit("Unpack", f.add_op("Send", "sent", [c], {"to": second}))
    new = f.emit("Add", f.emit("Mul", d, e), w)
    y = f.emit("MPIGather", new, to=HOST)
    f.set_outputs([y, new])
    f.updates = {new: w}
    return f.finalize()


def kinds(f: Function) -> list[str]:
    return [op.spec.name for op in f.ops]


def test_ranks_are_the_devices_in_order_of_index():
    assert ranks(two_stages()) == [HOST, *(Device("gpu", k) for k in range(1, 9))]


def test_each_side_of_a_transfer_stays_where_it_is():
    main = two_stages()
    host, first, second = (project(main, r) for r in (0, 3, 6))
    assert kinds(host.function) == ["MPISend", "MPIRecv"]
    assert kinds(first.function) == ["MPIRecv", "Add", "Pack", "Unpack", "MPISend", "MPISend"]
    assert kinds(second.function) == ["MPIRecv", "MPIRecv", "Pack", "Unpack", "Mul", "Add", "MPISend"]
    assert (host.inputs, host.outputs) == ((0,), (0,))
    assert (first.inputs, first.outputs) == ((), ())
    assert (second.inputs, second.outputs) == ((1,), (1,))
    (new,) = second.function.outputs
    assert second.function.updates == {new: second.function.inputs[0]}


def test_messages_pair_up():
    sent, got = {}, {}
    for p in {id(p.function): p for p in project_all(two_stages())}.values():
        for op in p.function.ops:
            where = {"MPISend": sent, "MPIRecv": got}.get(op.spec.name)
            if where is not None:
                where.setdefault(op.attributes["message"], []).append(op)
    assert {k: len(v) for k, v in sent.items()} == {k: len(v) for k, v in got.items()}
    assert len(sent) == 3


def test_a_device_that_is_in_both_places_keeps_the_transfer_whole():
    mesh = Mesh([Device("cpu", k) for k in range(2)], {"tp": 2})
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float64, (4,), HOST))
    a = f.emit("MPIScatter", x, to=mesh, placements=(Shard(0),))
    f.set_outputs([f.emit("MPIGather", a, to=HOST)])
    main = f.finalize()
    assert kinds(project(main, 0).function) == ["MPIScatter", "MPIGather"]
    assert kinds(project(main, 1).function) == ["MPIRecv", "MPISend"]


def test_restrict_goes_where_nothing_is_left():
    first, second = stages(1, 2)
    both = Mesh((*first.devices, *second.devices), {"pp": 2, "dp": 1, "tp": 2}, "both")
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float64, (4,), both))
    f.set_outputs([f.emit("Restrict", x, to=second)])
    main = f.finalize()
    assert [kinds(p.function) for p in project_all(main)] == [[], [], ["Restrict"], ["Restrict"]]
    assert [p.inputs for p in project_all(main)] == [(0,)] * 4


def test_what_is_nowhere_is_for_all():
    (stage,) = stages(1, 2)[:1]
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float64, (4,), stage))
    y = f.add_input_value("y", Tensor(Float64, (4,)))
    f.set_outputs([f.emit("Relu", x), f.emit("Relu", y)])
    assert [len(p.function.ops) for p in project_all(f.finalize())] == [2, 2]


def test_one_by_one_is_as_all_at_once():
    main = two_stages()
    for p in project_all(main):
        alone = project(main, p.rank)
        assert same(alone.function, p.function)
        assert (alone.rank, alone.device, alone.inputs, alone.outputs) == (
            p.rank,
            p.device,
            p.inputs,
            p.outputs,
        )


def test_a_rank_s_program_is_a_program():
    for p in project_all(two_stages()):
        verify(p.function)
        assert same(parse(pformat(p.function)), p.function)


def test_a_program_on_no_device_is_one_rank_s():
    f = FunctionMaker("main")
    f.emit("Add", f.add_input_value("x", Tensor(Float64, (2,))), f.inputs[0])
    main = f.finalize()
    p = project(main, 0)
    assert p.device is None
    assert same(p.function, main)


def test_what_a_stage_needs_of_another_s_inputs_is_sent_before_all_else():
    """A weight that is used last, and a part of one that is on both stages."""
    first, second = stages(1, 1)
    both = Mesh((*first.devices, *second.devices), {"pp": 2, "dp": 1, "tp": 1}, "both")
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float64, (4,), first))
    w = f.add_input_value("w", Tensor(Float64, (4,), first))
    v = f.add_input_value("v", Tensor(Float64, (4,), both))
    y = f.emit("Send", f.emit("Neg", x), to=second)
    a = f.emit("Send", w, to=second)
    b = f.emit("Send", f.emit("Restrict", v, to=first), to=second)
    f.set_outputs([f.emit("Add", f.emit("Add", y, a), b)])
    a, b = (p.function for p in project_all(f.finalize()))
    assert kinds(a) == ["MPISend", "Restrict", "MPISend", "Neg", "MPISend"]
    assert kinds(b) == ["MPIRecv", "MPIRecv", "MPIRecv", "Add", "Add"]
    assert [op.attributes["message"] for op in a.ops if op.inputs and op.spec.name == "MPISend"] == [
        op.attributes["message"] for op in b.ops if op.spec.name == "MPIRecv"
    ]


def test_no_such_rank():
    with pytest.raises(UsageError, match="runs on 9 ranks, there is no rank 9"):
        project(two_stages(), 9)


def test_ranks_of_the_same_meshes_share_and_many_cost_little():
    main = two_stages(dp=64, tp=8)
    begin = time.process_time()
    programs = project_all(main)
    assert time.process_time() - begin < 1
    assert len(programs) == 1025
    assert len({id(p.function) for p in programs}) == 3


@pytest.mark.parametrize(
    "axes", [{"dp": 2, "mb": 4, "tp": 3}, {"mb": 4, "dp": 2, "tp": 3}, {"dp": 2, "tp": 3, "mb": 1}]
)
def test_coordinates(axes: dict[str, int]):
    mesh = Mesh([Device("cpu", 10 + k) for k in range(6)], axes)
    for d, want in zip(mesh.devices, mesh.coords, strict=True):
        assert coordinate(mesh, d) == want
        assert device_at(mesh, want) is d
