"""An order of a program's ops that depends neither on names nor on the order in which they were written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

from distir.ir.exact_attributes import Form
from distir.ir.function import Function, Op, Value
from distir.ir.spec import Spec

_WHERE = ("device", "place")
"""Attributes that say where an op's result is, and how it is placed: plans of a program differ in these, and in the
attributes of communication."""


def canonical_order(function: Function, ops: Sequence[Op]) -> list[Op]:
    """`ops` in a topological order that depends neither on names nor on the order in which they are given, nor on how
    many devices there are along an axis, or how values are placed along it.

    Ops are sorted by the longest chain of ops that depends on them, longest first; ties by a hash of the term that an
    op computes; ops of equal terms by the position of their results among the function's outputs. But ops on which
    neither the end of the longest chain depends nor an output of the function follow their operands at once: in a
    forward pass what only the backward pass needs.
    """
    depth: dict[Value, int] = {}
    rows: dict[int, list[Op]] = {}  # by the length of the longest chain that begins with them
    known = depth.get
    for op in reversed(ops):
        height = 1 + max([known(v, 0) for v in op.outputs], default=0)
        rows.setdefault(height, []).append(op)
        for v in op.inputs:
            if known(v, 0) < height:
                depth[v] = height
    name = _term_names(function, [op for row in rows.values() if len(row) > 1 for op in row])
    place = {v: i for i, v in enumerate(function.outputs)}
    for row in rows.values():
        if len(row) > 1:
            row.reverse()  # in the order given
            row.sort(key=lambda op: (name[op], [place.get(v, -1) for v in op.outputs]))
    return _early([op for height in sorted(rows, reverse=True) for op in rows[height]], frozenset(function.outputs))


def _early(ops: list[Op], outputs: Collection[Value]) -> list[Op]:
    """The same, with ops on which neither these values depend, nor the end of the longest chain, as early as can be."""
    depth: dict[Value, int] = {}
    used: set[Value] = set()
    for op in ops:
        used.update(op.inputs)
        depth.update(dict.fromkeys(op.outputs, 1 + max([depth.get(v, 0) for v in op.inputs], default=0)))
    ends = [op for op in ops if used.isdisjoint(op.outputs)]
    if len(ends) < 2:
        return ops
    most = max([depth[v] for op in ends for v in op.outputs], default=0)
    needed = {v for op in ends for v in op.outputs if depth[v] == most or v in outputs}
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
    place: dict[Value, int] = {}
    order: list[tuple[int, int]] = []
    for k, op in enumerate(ops):
        early = needed.isdisjoint(op.outputs)
        at = max([place.get(v, -1) for v in op.inputs], default=-1) if early else k
        place.update(dict.fromkeys(op.outputs, at))
        order.append((at, k))
    return [ops[k] for _, k in sorted(order)]


def _term_names(function: Function, ops: Iterable[Op]) -> dict[Op, str]:
    """For each op a hash of the term that it computes, in terms of the positions of the function's inputs."""
    todo, needed = set(ops), list[Op]()
    last = max([k for k, op in enumerate(function.ops) if op in todo], default=-1)
    operands: set[Value] = set()
    for op in reversed(function.ops[: last + 1]):
        if op in todo or not operands.isdisjoint(op.outputs):
            needed.append(op)
            operands.update(op.inputs)
    digest = {v: f"in{i}" for i, v in enumerate(function.inputs)}
    name: dict[Op, str] = {}
    kinds: dict[tuple[Spec, Form], str] = {}
    for op in reversed(needed):
        key = op.spec, op.attributes.form
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _kind(op)
        text = kind + ",".join([digest[v] for v in op.inputs])
        found = name[op] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        for k, v in enumerate(op.outputs):
            digest[v] = f"{found}.{k}"
        if op.spec.comm is not None and op.spec.comm.takes:  # it is the same value, placed otherwise
            digest[op.outputs[0]] = digest[op.inputs[0]]
    return name


def _kind(op: Op) -> str:
    computed = op.spec.comm is None
    what = {key: x for key, x in op.attributes.items() if computed and key not in _WHERE}
    return f"{op.spec.name}|{what!r}|"
