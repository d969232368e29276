"""Receives posted ahead: their positions, that nothing else changes, and that nothing can deadlock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from distir.ir import Device, Mesh
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.type import Float64, Shard, Tensor
from distir.ir.verify import verify
from distir.transforms.rank.post_receives import posted_ahead
from distir.transforms.rank.project import RankProgram, coordinate, device_at, project_all
from tests.transforms.programs import Plan, distributed, plans, small_gpt

PLANS = [*plans(("gpipe", "1f1b"), (False, True), limit=4), Plan(2, 1, 2, 4, "interleaved", False, 2)]


def programs(plan: Plan) -> list[RankProgram]:
    return project_all(distributed(small_gpt(), plan).program)


def of_kind(f: Function, name: str) -> list[Op]:
    return [op for op in f.ops if op.spec.name == name]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_receives_stand_before_the_call_that_precedes_their_first_use(plan: Plan) -> None:
    for p in {id(p.function): p for p in programs(plan)}.values():
        f = posted_ahead(p).function
        verify(f)
        place = {op: k for k, op in enumerate(f.ops)}
        calls = [k for k, op in enumerate(f.ops) if op.callee is not None]
        for op in of_kind(f, "MPIRecv"):
            use = min((place[o] for o in f.ops if op.outputs[0] in o.inputs and o.spec.bundle is None), default=None)
            bundles = [o for o in f.ops if op.outputs[0] in o.inputs and o.spec.bundle == "pack"]
            for o in bundles:  # made just before they are used
                assert f.ops[place[o] + 1].callee is not None or f.ops[place[o] + 1].spec.bundle == "pack"
            if use is not None and (before := [k for k in calls if k < use]):
                assert place[op] < before[-1]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_all_else_stays_as_it_was(plan: Plan) -> None:
    for p in programs(plan):
        f = posted_ahead(p).function
        assert set(f.ops) == set(p.function.ops)
        for name in ("MPIRecv", "MPISend", "Call"):
            assert of_kind(f, name) == of_kind(p.function, name)
        assert (f.inputs, f.outputs, f.updates) == (p.function.inputs, p.function.outputs, p.function.updates)


def test_a_bundle_is_not_waited_for_before_it_is_needed() -> None:
    """Between the receive and its use the rank calls something else."""
    a, b = (Mesh([Device("gpu", k)], {"dp": 1}, f"m{k}") for k in range(2))
    body = FunctionMaker("body")
    x = body.add_input_value("x", Tensor(Float64, (4,), b, (Shard(0),)))
    body.set_outputs([body.emit("Neg", x)])
    callee = body.finalize()
    f = FunctionMaker("main")
    x = f.add_input_value("x", Tensor(Float64, (4,), a, (Shard(0),)))
    y = f.add_input_value("y", Tensor(Float64, (4,), b, (Shard(0),)))
    neg = f.emit("Neg", x)
    sent = f.emit("Send", f.emit("Pack", neg, neg), to=b)
    first = f.emit("Call", y, callee=callee)
    second = f.emit("Call", first, callee=callee)
    f.set_outputs([second, *f.emit("Unpack", sent)])  # type: ignore[misc]
    mine = posted_ahead(project_all(f.finalize())[1]).function
    assert [op.spec.name for op in mine.ops] == ["MPIRecv", "MPIRecv", "Call", "Call", "Pack", "Unpack"]


# ---- as it runs: receives do not block, sends only when a third is given


Event = tuple[object, ...]


def events(p: RankProgram, rank_of: dict[Device | None, int]) -> Iterator[Event]:
    """The events of a rank: "send" and "recv" begin a message between two ranks, "got" and "sent" wait for it."""
    waiting: dict[Value, Event] = {}
    sent: list[Event] = []
    for op in p.function.ops:
        for v in op.inputs:
            if v in waiting:
                yield ("got", *waiting.pop(v))
        name, message = op.spec.name, op.attributes.get("message")
        if op.callee is not None:
            yield from _rendezvous(op, p, rank_of)
        elif name == "MPISend":
            twin = device_at(op.attributes["to"], coordinate(op.inputs[0].type.device, p.device))  # type: ignore[arg-type]
            sent.append((message, p.rank, rank_of[twin]))
            yield ("send", *sent[-1])
            if len(sent) > 2:
                yield ("sent", *sent[-3])
        elif name == "MPIRecv":
            twin = device_at(op.attributes["source"], coordinate(op.attributes["to"], p.device))  # type: ignore[arg-type]
            waiting[op.outputs[0]] = (message, rank_of[twin], p.rank)
            yield ("recv", *waiting[op.outputs[0]])
    yield from [("got", *e) for e in waiting.values()]
    yield from [("sent", *e) for e in sent[-2:]]


def _rendezvous(call: Op, p: RankProgram, rank_of: dict[Device | None, int]) -> Iterator[Event]:
    assert call.callee is not None
    for op in call.callee.ops:
        mesh = op.inputs[0].type.device if op.inputs else None
        if op.spec.name.startswith("MPI") and op.attributes["axis"] != "mb" and isinstance(mesh, Mesh):
            who = mesh.group(op.attributes["axis"], mesh.devices.index(p.device))  # type: ignore[arg-type]
            yield ("meet", op, call.attributes.get("mb"), tuple(rank_of[d] for d in who))


def blocks(programs: Sequence[RankProgram]) -> bool:
    rank_of = {p.device: p.rank for p in programs}
    rows = [list(events(p, rank_of)) for p in programs]
    at = [0] * len(rows)
    posted: set[Event] = set()
    moved = True

    def passes(e: Event) -> bool:
        if e[0] == "meet":
            return all(at[r] < len(rows[r]) and rows[r][at[r]] == e for r in e[-1])  # type: ignore[attr-defined]
        return e[0] in ("send", "recv") or ("send" if e[0] == "got" else "recv", *e[1:]) in posted

    while moved:
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row) and passes(row[at[r]]):
                e = row[at[r]]
                posted.add(e)
                for q in e[-1] if e[0] == "meet" else (r,):  # type: ignore[attr-defined]
                    at[q] += 1
                moved = True
    return any(at[r] < len(row) for r, row in enumerate(rows))


@pytest.mark.parametrize("plan", [p for p in PLANS if p.pp > 1 and not p.host], ids=str)
def test_nothing_blocks_and_messages_keep_their_order(plan: Plan) -> None:
    found = [posted_ahead(p) for p in programs(plan)]
    assert not blocks(found)
    rank_of = {p.device: p.rank for p in found}
    order: dict[tuple[object, ...], dict[str, list[object]]] = {}
    for p in found:
        for e in events(p, rank_of):
            if e[0] in ("send", "recv"):
                order.setdefault(e[2:], {"send": [], "recv": []})[str(e[0])].append(e[1])
    for row in order.values():  # of each direction between two ranks: NCCL knows no other
        assert row["send"] == row["recv"]


def test_the_model_of_what_blocks_sees_what_is_left_out() -> None:
    found = [posted_ahead(p) for p in programs(Plan(1, 1, 2, 4))]
    f = found[0].function
    less = tuple(op for op in f.ops if op is not of_kind(f, "MPISend")[1])
    found[0] = found[0]._replace(function=Function(f.name, f.inputs, less, f.outputs, f.updates))
    assert blocks(found)
