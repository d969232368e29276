"""Joins collectives that follow each other along different axes into one along both.

A gradient that is partial over replicas and over the length of sequences is reduced once, not twice.
"""

from __future__ import annotations

from distir.ir.cached import cached
from distir.ir.device import names_of
from distir.ir.errors import IRTypeError
from distir.ir.function import Attributes, Function, Op, Value
from distir.ir.infer import infer
from distir.ir.type import Shard, Tensor
from distir.ops.rules import tensor
from distir.transforms.pipeline.bucket import maker_like
from distir.transforms.pipeline.phases import users


@cached
def join_axes(function: Function) -> Function:
    """The function with such pairs joined; the function itself if there are none.

    Only all-reduces, all-gathers and reduce-scatters take several axes, none of them time. Two are joined if the second
    alone uses the result of the first, and if along both axes values are placed as along one.
    """
    several = [op for op in function.ops if _takes_several(op)]
    results = {op.outputs[0] for op in several}
    if results.isdisjoint([op.inputs[0] for op in several]):
        return function
    used = users(function)
    outputs = set(function.outputs)
    joined: dict[Value, Op] = {}
    """By its result the last of the collectives that are joined so far."""
    gone: set[Op] = set()
    for op in several:
        before = joined.get(op.inputs[0])
        alone = before is not None and before.outputs[0] not in outputs and len(used[before.outputs[0]]) == 1
        both = _both(before, op) if before is not None and alone else None
        if before is not None and both is not None:
            gone.add(before)
        joined[op.outputs[0]] = both or op
    if not gone:
        return function
    maker = maker_like(function)
    dead = {op.outputs[0] for op in gone}
    for op in function.ops:
        if op.outputs and op.outputs[0] in joined:
            if op.outputs[0] not in dead:
                maker.ops.append(joined[op.outputs[0]])
        else:
            maker.ops.append(op)
    return maker.finalize()


def _takes_several(op: Op) -> bool:
    """Whether it is a collective over devices that may be along several axes."""
    if op.spec.route != "axis" or op.spec.attributes["axis"].kind != "mesh-axis" or len(op.inputs) != 1:
        return False
    (v,) = op.inputs
    t = v.type
    return isinstance(t, Tensor) and not t.mesh.is_time(op.attributes["axis"])


def _both(first: Op, second: Op) -> Op | None:
    """One collective for two in a row; None if there is none."""
    if first.spec is not second.spec:
        return None
    before, after = tensor(first.inputs[0]), tensor(second.outputs[0])
    axes = [a for op in (first, second) for a in names_of(op.attributes["axis"])]
    split = {a: p for t in (before, after) for a in axes if (p := t.on(a)).dim is not None}
    # the axis whose parts are larger varies slowest
    axes.sort(key=lambda a: (split[a].outer if a in split else 1, before.mesh.position(a)))
    given: dict[str, object] = {"axis": tuple(axes)}
    if first.spec.comm is not None and first.spec.comm.gives is Shard:
        given |= split[axes[0]].attributes
    try:
        (made,) = infer(first.spec, Attributes(given), (before,))
    except IRTypeError:
        return None
    return Op(first.spec, first.inputs, Attributes(given), second.outputs, second.of) if made is after else None
