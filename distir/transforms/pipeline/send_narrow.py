"""Sends values where they are narrowest: gathers what is expanded, or made wider, before that, scatters what is summed
after it.

Keys and values of grouped queries are expanded to one head for each head of queries. Where the length of sequences is
split they are gathered for attention: as they were before, with fewer heads. Their gradients are summed over the heads
that share them before they are scattered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distir.ir.cached import cached, producers
from distir.ir.errors import IRTypeError
from distir.ir.exact_attributes import Attributes
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.infer import infer
from distir.ir.type import Tensor
from distir.ops.rules import tensor
from distir.transforms.pipeline.bucket import maker_like
from distir.transforms.pipeline.phases import users

Moved = tuple[Op, ...]
"""Ops that take the place of a collective and of those that it changes places with, in this order."""


@cached
def send_narrow(function: Function) -> Function:
    """The function with each such gather before, and each such reduce-scatter after, the ops of one operand that come
    between it and the narrowest value; the function itself if there are none."""
    made, used, outputs = producers(function), users(function), set(function.outputs)
    maker = maker_like(function)
    moved: dict[Op, Moved] = {}
    """What is done in place of a gather, or of the last op that a scatter changes places with."""
    gone: dict[Op, Op] = {}
    """The ops that are done elsewhere, each with what does the same."""
    for op in function.ops:
        if not _sends(op):
            continue
        gathers = op.spec.comm is not None and op.spec.comm.gathers
        chain = _above(op, made, used, outputs) if gathers else _below(op, used, outputs)
        found = _exchanged(maker, op, chain, gathers)
        if found:
            moved[op if gathers else chain[-1]] = found
            gone.update(zip([op, *chain] if gathers else [*chain, op], found, strict=True))
    return _rebuilt(maker, function, moved, gone) if moved else function


def _sends(op: Op) -> bool:
    """Whether it gathers a value over devices, or scatters a sum."""
    comm = op.spec.comm
    if op.spec.route != "axis" or comm is None or len(op.inputs) != 1 or not isinstance(t := op.inputs[0].type, Tensor):
        return False
    return (comm.gathers or comm.scatters) and not t.mesh.is_time(op.attributes["axis"])


def _changes_places(op: Op, computed: int) -> bool:
    """Whether an op may change places with a collective, beside so many others that are not views.

    It then computes, on every device, what the collective would have written or read there. A second op would be more
    work than before.
    """
    return op.spec.comm is None and len(op.inputs) == len(op.outputs) == 1 and (op.spec.alias or not computed)


def _above(gather: Op, made: Mapping[Value, Op], used: Mapping[Value, Sequence[Op]], outputs: set[Value]) -> list[Op]:
    """The ops that make what is gathered of the narrowest value before it, in their order."""
    v, chain, best, computed = gather.inputs[0], list[Op](), 0, 0
    least = tensor(v).bytes
    while len(used[v]) == 1 and v not in outputs and (op := made.get(v)) is not None and _changes_places(op, computed):
        chain.append(op)
        computed += not op.spec.alias
        (v,) = op.inputs
        if not isinstance(v.type, Tensor):
            break
        if v.type.bytes < least:
            least, best = v.type.bytes, len(chain)
    return chain[:best][::-1]


def _below(scatter: Op, used: Mapping[Value, Sequence[Op]], outputs: set[Value]) -> list[Op]:
    """The ops that make the narrowest value of what is scattered, in their order."""
    v, chain, best, computed = scatter.outputs[0], list[Op](), 0, 0
    least = tensor(v).bytes
    while len(uses := used.get(v, ())) == 1 and v not in outputs and _changes_places(op := uses[0], computed):
        chain.append(op)
        computed += not op.spec.alias
        (v,) = op.outputs
        if not isinstance(v.type, Tensor) or v.type.dtype is not tensor(scatter.outputs[0]).dtype:
            break  # a sum in another dtype is another sum
        if v.type.bytes < least:
            least, best = v.type.bytes, len(chain)
    return chain[:best]


def _exchanged(maker: FunctionMaker, op: Op, chain: Sequence[Op], gathers: bool) -> Moved:
    """The collective before the ops that were before it, or after those that were after it, typed anew; nothing if
    that does not give the same value."""
    if not chain:
        return ()
    v, last = (chain[0].inputs[0], op.outputs[0]) if gathers else (op.inputs[0], chain[-1].outputs[0])
    axis = op.attributes["axis"]
    alike = op if gathers else _scatter(op, tensor(last).on(axis).dim)
    if alike is None:
        return ()
    steps = [alike, *chain] if gathers else [*chain, alike]
    names = [x.outputs[0].name for x in chain[:-1]]
    names = [maker.fresh(v.name), *names] if gathers else [*names, maker.fresh(last.name)]
    found: list[Op] = []
    for step, name in zip(steps, [*names, last.name], strict=True):
        try:
            (t,) = infer(step.spec, step.attributes, (v.type,))
        except IRTypeError:
            return ()
        w = last if len(found) == len(chain) else Value(name, t)
        if w.type is not t:
            return ()
        found.append(Op(step.spec, (v,), step.attributes, (w,), step.of))
        v = w
    return tuple(found)


def _scatter(op: Op, dim: int | None) -> Op | None:
    """The reduce-scatter of another dim; None without one."""
    return None if dim is None else Op(op.spec, op.inputs, Attributes({**op.attributes, "dim": dim}), op.outputs, op.of)


def _rebuilt(maker: FunctionMaker, function: Function, moved: Mapping[Op, Moved], gone: Mapping[Op, Op]) -> Function:
    """The function with the collectives moved; gradients know what their forward ops have become."""
    renewed: dict[Op, Op] = {}
    for op in function.ops:
        for new in moved.get(op, () if op in gone else (op,)):
            of = gone.get(new.of, new.of) if new.of is not None else None
            of = renewed.get(of, of) if of is not None else None
            if of is not new.of:
                old, new = new, Op(new.spec, new.inputs, new.attributes, new.outputs, of)
                renewed[old] = new
            maker.ops.append(new)
    return maker.finalize()
