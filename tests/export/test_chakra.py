"""Chakra traces, decoded by google.protobuf: the schema, dependences, that ranks match, and the simulator's time."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from distir.api import Plan
from distir.api.compilation import distribute
from distir.api.exporting import export
from distir.api.messages import messages
from distir.export.wire import number, numbers, text, varint
from tests.export.clusters import PLANS, exchanges, flat, model, simulated

KINDS = {"double": 1, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "message": 11}
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7


def schema() -> dict[str, Any]:
    """The messages of the schema that traces use."""
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="chakra", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, str, bool], of: str = "") -> Any:
        made = file.message_type.add(name=name)
        for field, n, kind, repeated in fields:
            one = made.field.add(name=field, number=n, type=KINDS[kind], label=3 if repeated else 1)  # type: ignore[arg-type]
            if kind == "message":
                one.type_name = f".chakra.{of}"
        return made

    attribute = message("Attribute", ("name", 1, "string", False))
    attribute.oneof_decl.add(name="value")
    for kind, n in (("int32", 7), ("int64", 9), ("uint64", 13), ("bool", 27), ("string", 29)):
        attribute.field.add(name=f"{kind}_val", number=n, type=KINDS[kind], label=1, oneof_index=0)
    message("GlobalMetadata", ("version", 1, "string", False), ("attr", 2, "message", True), of="Attribute")
    message(
        "Node",
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "uint64", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("duration_micros", 7, "uint64", False),
        ("attr", 10, "message", True),
        of="Attribute",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("GlobalMetadata", "Node")
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"chakra.{n}")) for n in names}


SCHEMA = schema()


def decode(path: Path) -> list[dict[str, Any]]:
    """The nodes of a trace, attributes by name; each is encoded once more to the same bytes."""
    data, at, found = path.read_bytes(), 0, list[dict[str, Any]]()
    while at < len(data):
        size, shift = 0, 0
        while True:
            byte = data[at]
            size, shift, at = size | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                break
        raw, at = data[at : at + size], at + size
        kind = "Node" if found else "GlobalMetadata"
        node = SCHEMA[kind].FromString(raw)
        assert node.SerializeToString() == raw
        if kind == "GlobalMetadata":
            found.append({"version": node.version})
            continue
        attributes = {a.name: (a.WhichOneof("value"), getattr(a, a.WhichOneof("value"))) for a in node.attr}
        fields = {"id": node.id, "name": node.name, "type": node.type, "micros": node.duration_micros}
        assert len(attributes) == len(node.attr)
        found.append({**fields, "ctrl": list(node.ctrl_deps), "data": list(node.data_deps), "attr": attributes})
    assert found.pop(0) == {"version": "0.0.4"}
    return found


def traces(folder: Path, ranks: int) -> tuple[list[list[dict[str, Any]]], dict[str, list[int]]]:
    found = [decode(folder / f"x.{rank}.et") for rank in range(ranks)]
    assert len(list(folder.iterdir())) == ranks + 1
    return found, json.loads((folder / "x.groups.json").read_text())


def rendezvous(rows: list[list[dict[str, Any]]], groups: dict[str, list[int]]) -> dict[tuple[int, int], object]:
    """For each node (rank, id) that communicates what it is part of; those of all ranks are checked to match."""
    key: dict[tuple[int, int], object] = {}
    members: dict[object, list[tuple[int, tuple[object, ...]]]] = defaultdict(list)
    for rank, nodes in enumerate(rows):
        count: Counter[str] = Counter()
        for node in nodes:
            attr = {name: x for name, (_, x) in node["attr"].items()}
            if node["type"] == COLLECTIVE:
                group = attr["pg_name"]
                assert rank in groups[group]
                what: object = ("group", group, count[group])
                form = attr["comm_type"], attr["comm_size"], node["name"]
                count[group] += 1
            elif node["type"] in (SEND, RECEIVE):
                assert attr["comm_src" if node["type"] == SEND else "comm_dst"] == rank
                what = attr["comm_src"], attr["comm_dst"], attr["comm_tag"]
                form = attr["comm_size"], node["name"]
            else:
                continue
            key[rank, node["id"]] = what
            members[what].append((rank, form))
    for what, found in members.items():
        assert isinstance(what, tuple)
        want = groups[what[1]] if what[0] == "group" else [what[0], what[1]]
        assert sorted(rank for rank, _ in found) == sorted(want)
        assert len({form for _, form in found}) == 1
    return key


def micros(rows: list[list[dict[str, Any]]], key: dict[tuple[int, int], object]) -> int:
    """The time until all nodes are done: those that belong together begin together."""
    alike: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for node, what in key.items():
        alike[what].append(node)
    took = {(rank, n["id"]): n["micros"] for rank, nodes in enumerate(rows) for n in nodes}
    deps = {
        (rank, n["id"]): [(rank, d) for d in n["ctrl"] + n["data"]] for rank, nodes in enumerate(rows) for n in nodes
    }
    end: dict[tuple[int, int], int] = {}
    left = list(took)
    while left:
        later: list[tuple[int, int]] = []
        for node in left:
            if node in end:
                continue
            together = alike[key[node]] if node in key else [node]
            needed = [d for one in together for d in deps[one]]
            if all(d in end for d in needed):
                start = max([end[d] for d in needed], default=0)
                end.update({one: start + took[one] for one in together})
            else:
                later.append(node)
        assert len(later) < len(left), "a deadlock"
        left = later
    return max(end.values())


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_traces_match_and_take_the_simulators_time(plan: Plan, tmp_path: Path) -> None:
    function = model()
    done = export(function, plan, tmp_path / "x", "chakra", flat(plan.size))
    rows, groups = traces(tmp_path, plan.size)
    assert done.steps == sum(map(len, rows))
    assert done.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    for nodes in rows:
        assert [n["id"] for n in nodes] == list(range(1, len(nodes) + 1))
        assert all(d < n["id"] for n in nodes for d in n["ctrl"] + n["data"])
        assert all(len(n["ctrl"]) <= 1 and not set(n["ctrl"]) & set(n["data"]) for n in nodes)
    want = simulated(function, plan, plan.size).seconds * 1e6
    rounded = 0.5 * max(map(len, rows))  # nodes take whole microseconds
    assert micros(rows, rendezvous(rows, groups)) == pytest.approx(want, rel=0.01, abs=rounded)


def test_what_is_sent_is_what_messages_list(tmp_path: Path) -> None:
    plan = Plan(dp=2, tp=2, pp=2, microbatches=4, schedule="gpipe", cut=("h2.ln_1.weight",))
    function = model()
    export(function, plan, tmp_path / "x", "chakra", flat(plan.size))
    rows, _ = traces(tmp_path, plan.size)
    want: Counter[int] = Counter()
    for m in messages(distribute(function, plan)):
        first, _, last = m.ranks.partition("-")
        for rank in range(int(first), int(last) + 1):
            want[rank] += m.bytes * m.times
    for rank, nodes in enumerate(rows):
        assert sum(n["attr"]["comm_size"][1] for n in nodes if n["type"] in (SEND, COLLECTIVE)) == want[rank]


def test_nodes_of_all_kinds(tmp_path: Path) -> None:
    export(exchanges(), Plan(), tmp_path / "x", "chakra", flat(12))
    rows, groups = traces(tmp_path, 12)
    rendezvous(rows, groups)
    whole = 60 * 600 * 3 * 4
    nodes = [n for n in rows[1] if n["type"] != COMPUTE]
    given = [(n["type"], *[n["attr"][k][1] for k in ("comm_type", "comm_size") if k in n["attr"]]) for n in nodes]
    third = whole // 3
    assert given == [
        (7, 7, whole),
        (7, 6, third),
        (7, 6, third),
        (7, 6, third),
        (7, 2, third),
        (5, whole),
        (7, 0, whole),
    ]
    assert groups[nodes[0]["attr"]["pg_name"][1]] == [0, 1, 2]
    assert {k: kind for k, (kind, _) in nodes[0]["attr"].items()} == {
        "is_cpu_op": "bool_val",
        "comm_type": "int64_val",
        "comm_size": "int64_val",
        "pg_name": "string_val",
    }
    assert nodes[5]["attr"] == {
        "is_cpu_op": ("bool_val", False),
        "comm_size": ("int64_val", whole),
        "comm_tag": ("int32_val", nodes[5]["attr"]["comm_tag"][1]),
        "comm_src": ("int32_val", 1),
        "comm_dst": ("int32_val", 7),
    }
    relu = next(n for n in rows[1] if n["type"] == COMPUTE)
    assert relu["name"] == "Relu relu"
    assert relu["attr"]["num_ops"] == ("int64_val", third // 4)
    assert relu["attr"]["tensor_size"] == ("uint64_val", 2 * third)
    assert relu["data"] == [1]
    first = simulated(exchanges(), Plan(), 12)
    event = next(e for e in first.trace if e.op.spec.name == "Relu")
    assert relu["micros"] == round(event.dur * 1e6)


def test_the_wire_format() -> None:
    assert varint(0) == b"\x00"
    assert varint(300) == b"\xac\x02"
    assert varint(-1) == b"\xff" * 9 + b"\x01"
    assert number(3, 7) == b"\x18\x07"
    assert text(2, "ab") == b"\x12\x02ab"
    assert numbers(4, [1, 300]) == b"\x22\x03\x01\xac\x02"
    assert numbers(4, []) == b""
