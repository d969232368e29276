"""Decomposes ops before sharding: ops that do not accept partial sums (Gemm with its bias, means) into ones that do."""

from __future__ import annotations

from distir.ir.cached import cached
from distir.ir.errors import ModelError
from distir.ir.function import Attributes, Function, FunctionMaker, Op, Value
from distir.transforms.rewriting.laws import Law, rewrites


@cached
@rewrites(Law.SAME)
def decompose(function: Function, split: bool = True) -> Function:
    """The function with every op that has a `decompose` rule replaced by its parts, in callees too.

    Without `split`, ops with a gradient rule stay: they are decomposed only to be split along a dim that the op itself
    needs whole.

    Inputs and all values that remain are the same objects; new values are named after the op they come from. A backward
    op of a decomposed op is `of` the part that makes its result. Types must be known.
    """
    return _decomposed(function, split, {})


def stays(op: Op, split: bool) -> bool:
    """Whether `decompose` leaves an op as it is."""
    return op.spec.decompose is None or (op.spec.grad is not None and not split)


def _decomposed(function: Function, split: bool, done: dict[Function, Function]) -> Function:
    if function in done:
        return done[function]
    maker = FunctionMaker(function.name)
    maker.inputs.extend(function.inputs)
    maker.set_outputs(function.outputs)
    maker.updates = dict(function.updates)
    maker.sources = dict(function.sources)
    maker.reserve([*function.inputs, *[v for op in function.ops for v in op.outputs]])
    became: dict[Op, Op] = {}
    for source in function.ops:
        op = _rebuilt(source, became, split, done)
        if stays(op, split):
            maker.ops.append(op)
            became[source] = op
        else:
            became[source] = expand(maker, op, split)
    changed = any(a is not b for a, b in became.items())
    done[function] = maker.finalize() if changed else function
    return done[function]


def _rebuilt(op: Op, became: dict[Op, Op], split: bool, done: dict[Function, Function]) -> Op:
    """The op with `of` and its callee replaced by what they became."""
    of = became.get(op.of, op.of) if op.of else None
    callee = _decomposed(op.callee, split, done) if op.callee else None
    if of is op.of and callee is op.callee:
        return op
    attributes = op.attributes if callee is op.callee else Attributes({**op.attributes, "callee": callee})
    return Op(op.spec, op.inputs, attributes, op.outputs, of)


def expand(maker: FunctionMaker, op: Op, split: bool = False) -> Op:
    """Append the parts of `op`, recursively; they make the op's own output Values.

    Returns the part that makes the first output. Raises ModelError if there is no rule.
    """
    if op.spec.decompose is None:
        raise ModelError(f"{op} cannot be decomposed")
    first = len(maker.ops)
    results = list(op.spec.decompose(maker, op))
    became: dict[Value, Value] = {}
    for k, (value, result) in enumerate(zip(op.outputs, results, strict=True)):
        if result in became or not any(result in part.outputs for part in maker.ops[first:]):
            result = results[k] = maker.emit("Identity", result)  # an operand, or a result returned twice
        became[result] = value
    parts = maker.ops[first:]
    del maker.ops[first:]
    made: dict[Op, Op] = {}
    for part in parts:
        for v in part.outputs:
            if v not in became:
                v.name = maker.fresh(f"{op.outputs[0].name}.{part.op_type.lower()}")
        inputs, outputs = (tuple([became.get(v, v) for v in row]) for row in (part.inputs, part.outputs))
        of = made.get(part.of, part.of) if part.of else op.of
        new = Op(part.spec, inputs, part.attributes, outputs, of)
        if stays(new, split):
            maker.ops.append(new)
            made[part] = new
        else:
            made[part] = expand(maker, new, split)
    return next(made[part] for part in parts if results[0] in part.outputs)
