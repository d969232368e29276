"""Switches dropout on for training: each `Dropout`, elsewhere the identity, becomes one that is drawn at random."""

from __future__ import annotations

from distir.ir.errors import MismatchError
from distir.ir.function import Function, FunctionMaker, Op, Role, Value
from distir.ir.spec import lookup
from distir.ir.type import Int64, Tensor
from distir.transforms.rewriting.claims import check_rewrite
from distir.transforms.rewriting.instances import Evaluate
from distir.transforms.rewriting.laws import Law, rewrites

DROPOUT, RANDOM, KEY = map(lookup, ("Dropout", "RandomDropout", "RandomKey"))


@rewrites(Law.DRAWN)
def with_dropout(function: Function, seed: int) -> Function:
    """The function with each `Dropout` of a ratio above 0 drawn at random.

    A mask depends on the seed, on which dropout of the program it is of, on the number of the step, which is a new
    input of role state, and on each element's index. Values that remain are the same objects.
    """
    drawn = [op for op in function.ops if _is_drawn(op)]
    if not drawn:
        return function
    maker = FunctionMaker(function.name)
    maker.inputs.extend(function.inputs)
    maker.reserve([*function.inputs, *[v for op in function.ops for v in op.outputs]])
    step = maker.add_input_value("step", Tensor(Int64, ()), Role("state"))
    keys = {
        op: maker.add_op(KEY, f"{op.outputs[0].name}.key", [step], {"seed": seed, "stream": k})
        for k, op in enumerate(drawn)
    }
    for op in function.ops:
        if op in keys:
            _, mask = maker.add_op(RANDOM, None, [op.inputs[0], keys[op]], op.attributes)
            mask.name = maker.fresh(f"{op.outputs[0].name}.mask")
            random = maker.ops.pop()
            op = Op(RANDOM, random.inputs, random.attributes, (op.outputs[0], mask), op.of)
        maker.ops.append(op)
    maker.set_outputs(function.outputs)
    maker.updates, maker.sources = dict(function.updates), dict(function.sources)
    return maker.finalize()


def _is_drawn(op: Op) -> bool:
    return op.spec is DROPOUT and op.attributes["ratio"] > 0


def step_of(function: Function) -> Value | None:
    """The input from which the dropout of a program knows the number of the step; None without dropout."""
    return next((op.inputs[0] for op in function.ops if op.spec is KEY), None)


def check_dropout(before: Function, after: Function, evaluate: Evaluate) -> None:
    """Raises MismatchError unless `after` is `before` with each dropout drawn, of the same ratio and independently of
    the others."""

    def granted(old: Op, new: Op) -> bool:
        return (
            _is_drawn(old)
            and new.spec is RANDOM
            and new.inputs[0] is old.inputs[0]
            and new.outputs[0] is old.outputs[0]
            and new.attributes == old.attributes
        )

    check_rewrite(before, after, evaluate, Law.MORE, granted)
    made = after.producers()
    seen: set[object] = set()
    for op in after.ops:
        if _is_drawn(op):
            raise MismatchError(f"{after.name}: {op}: expected it to be drawn at random")
        if op.spec is not RANDOM:
            continue
        key = made.get(op.inputs[1])
        if key is None or key.spec is not KEY or key.inputs[0] not in after.inputs:
            raise MismatchError(f"{after.name}: {op}: expected a key of the step")
        if (stream := (key.attributes["seed"], key.attributes["stream"])) in seen:
            raise MismatchError(f"{after.name}: {op}: another dropout has the same key")
        seen.add(stream)
