"""Switches batch norms on for training: statistics of the batch in place of running ones, which the step updates."""

from __future__ import annotations

from distir.ir.errors import MismatchError
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.spec import lookup
from distir.ops.rules import next_statistic
from distir.transforms.rewriting.claims import check_rewrite
from distir.transforms.rewriting.instances import Evaluate
from distir.transforms.rewriting.laws import Law, rewrites

RUNNING, OF_BATCH = map(lookup, ("RunningStatistic", "BatchStatistic"))


@rewrites(Law.OF_BATCH)
def with_batch_statistics(function: Function) -> Function:
    """The function with each `RunningStatistic` a `BatchStatistic`. Values stay the same objects."""
    if not any(op.spec is RUNNING for op in function.ops):
        return function
    ops = [Op(OF_BATCH, op.inputs, op.attributes, op.outputs) if op.spec is RUNNING else op for op in function.ops]
    return Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)


def next_statistics(maker: FunctionMaker) -> dict[Value, Value]:
    """Append the next value of each running statistic, of role state, that the maker's ops replace by the batch's; the
    result maps it to the input whose next value it is.

    One after the other where several batch norms share it.
    """
    replaced = [op for op in maker.ops if op.spec is OF_BATCH]
    made = {v: op for op in maker.ops for v in op.outputs} if replaced else {}
    latest: dict[Value, Value] = {}
    for op in replaced:
        running, batch = op.inputs
        while running in made:  # reshaped, repeated, cast
            running = made[running].inputs[0]
        if running.kind != "state":
            continue
        latest[running] = next_statistic(maker, latest.get(running, running), batch, **op.attributes)
    for running, new in latest.items():
        new.name = maker.fresh(f"{running.name}.new")
    return {new: old for old, new in latest.items()}


def check_batch_statistics(before: Function, after: Function, evaluate: Evaluate) -> None:
    """Raises MismatchError unless `after` is `before` with each running statistic replaced by the batch's."""

    def granted(old: Op, new: Op) -> bool:
        return old.spec is RUNNING and new.spec is OF_BATCH and new.inputs == old.inputs and new.outputs == old.outputs

    check_rewrite(before, after, evaluate, Law.MORE, granted)
    running = {op.outputs[0]: op for op in before.ops if op.spec is RUNNING}
    for op in after.ops:
        old = running.get(op.outputs[0]) if op.outputs else None
        if old is not None and not (granted(old, op) and op.attributes == old.attributes):
            raise MismatchError(f"{after.name}: {op}: expected the batch's statistic of %{old.outputs[0].name}")
