"""Chakra execution traces: for each rank a file of protocol buffers, a `GlobalMetadata` and then a `Node` a step.

The bytes of a class of devices are made once; for each rank the numbers of its groups and partners are put in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from distir.executor.cost_model.seconds import wire_of, work
from distir.export.rank_steps import Across, Along, Partners, RankStep
from distir.export.wire import block, delimited, number, numbers, text, varint
from distir.ir.device import Device
from distir.ir.function import Op

VERSION = "0.0.4"
"""Of the schema, in the metadata."""
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
"""Types of nodes."""
ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 6, 7
"""Types of collectives."""
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29
"""Fields of an attribute, by the type of its value."""


def write(
    path: Path, name: str, steps: Sequence[Sequence[RankStep]], partners: Partners, on_rank: Callable[[int], None]
) -> None:
    """Write the ranks of each group to `path`, and `name`.RANK.et of every rank beside it."""
    templates = [_Template.of(row) for row in steps]
    groups: dict[tuple[int, ...], int] = {}
    head = delimited(text(1, VERSION))
    for rank, (device, c) in enumerate(partners.devices):
        with open(path.parent / f"{name}.{rank}.et", "wb") as file:
            file.write(head + templates[c].of_rank(rank, device, partners, groups))
        on_rank(rank)
    found = {str(n): list(ranks) for ranks, n in groups.items()}
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


class _Message(NamedTuple):
    """A step that communicates: what its node has before and after what differs between ranks."""

    before: bytes
    where: Along | Across
    sizes: dict[int, bytes]
    """By the length of what differs the length of the node, and `before`: they are the same for many ranks."""


class _Template(NamedTuple):
    """The nodes of a class: bytes, and messages, which differ between ranks."""

    parts: tuple[bytes | _Message, ...]

    @staticmethod
    def of(row: Sequence[RankStep]) -> _Template:
        parts: list[bytes | _Message] = []
        attributes: dict[Op, bytes] = {}
        for k, step in enumerate(row):
            node = _node(k, step, attributes)
            if step.where is not None:
                parts.append(_Message(node, step.where, {}))
            elif parts and isinstance(parts[-1], bytes):
                parts[-1] += delimited(node)
            else:
                parts.append(delimited(node))
        return _Template(tuple(parts))

    def of_rank(self, rank: int, device: Device, partners: Partners, groups: dict[tuple[int, ...], int]) -> bytes:
        """The nodes of a rank. `groups` are those that ranks had so far, and their numbers."""
        ends: dict[Along | Across, bytes] = {}
        out: list[bytes] = []
        for part in self.parts:
            if isinstance(part, bytes):
                out.append(part)
                continue
            end = ends.get(part.where)
            if end is None:
                end = ends[part.where] = _end(part.where, rank, device, partners, groups)
            start = part.sizes.get(len(end))
            if start is None:
                start = part.sizes[len(end)] = varint(len(part.before) + len(end)) + part.before
            out += (start, end)
        return b"".join(out)


def _end(
    where: Along | Across, rank: int, device: Device, partners: Partners, groups: dict[tuple[int, ...], int]
) -> bytes:
    """The attributes that differ between ranks: of a collective the group, of a transfer the ends."""
    if isinstance(where, Along):
        group = partners.group(where, device)
        return _attribute("pg_name", text(_STRING, str(groups.setdefault(group, len(groups)))))
    other = partners.partner(where, device)
    source, target = (rank, other) if where.sends else (other, rank)
    return _attribute("comm_src", number(_INT32, source)) + _attribute("comm_dst", number(_INT32, target))


def _node(k: int, step: RankStep, attributes: dict[Op, bytes]) -> bytes:
    """The node of step k, without what differs between ranks. Ids count from 1."""
    kind = _kind(step)
    made = step.op.outputs[0].name if step.op.outputs else step.op.inputs[0].name
    label = f"{step.op.spec.name} {made}" + ("" if step.microbatch is None else f" {step.microbatch}")
    if step.op not in attributes:
        attributes[step.op] = _attributes(step.op, kind)
    data = [j + 1 for j in step.needs]
    control = [step.before + 1] if step.before >= 0 and step.before not in step.needs else []
    fields = number(1, k + 1) + text(2, label) + number(3, kind) + numbers(4, control) + numbers(5, data)
    tag = b"" if kind in (COMPUTE, COLLECTIVE) else _attribute("comm_tag", number(_INT32, step.message))
    micros = round(step.seconds * 1e6)
    return fields + (number(7, micros) if micros else b"") + attributes[step.op] + tag


def _kind(step: RankStep) -> int:
    if step.where is None:
        return COMPUTE
    if isinstance(step.where, Along):
        return COLLECTIVE
    return SEND if step.where.sends else RECEIVE


def _attribute(name: str, value: bytes) -> bytes:
    return block(10, text(1, name) + value)


def _attributes(op: Op, kind: int) -> bytes:
    """The attributes of an op that are the same on all ranks."""
    fields = _attribute("is_cpu_op", number(_BOOL, 0))
    ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
    if kind == COMPUTE:
        flops, moved = work(op.spec, op.attributes, ins, outs)
        fields += _attribute("num_ops", number(_INT64, round(flops)))
        return fields + _attribute("tensor_size", number(_UINT64, round(moved)))
    if kind == COLLECTIVE:
        fields += _attribute("comm_type", number(_INT64, collective_type(op)))
    sent = ins[0].bytes
    if kind == COLLECTIVE and "next" in wire_of(op.spec).patterns:  # such as a halo, of which only that is sent
        sent = wire_of(op.spec).size(sent, op.outputs[0].type.bytes)
    return fields + _attribute("comm_size", number(_INT64, sent))


def collective_type(op: Op) -> int:
    """The number of a collective. One that passes pieces on to the next device is an all-to-all."""
    comm = op.spec.comm
    if comm is not None and comm.sums:
        return ALL_REDUCE if "tree" in wire_of(op.spec).patterns else REDUCE_SCATTER
    return ALL_GATHER if comm is not None and comm.gathers else ALL_TO_ALL
