"""Cuts forward ops into stages that begin where given inputs, such as weights of layers, are first used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distir.ir.errors import InfeasibleError, counted
from distir.ir.function import Function, Op, Value
from distir.transforms.pipeline.phases import FORWARD, FREE, PROLOGUE, users


def cut_at(function: Function, phase: Mapping[Op, str], inputs: Sequence[int]) -> dict[Op, int]:
    """The stage of each forward op, of a stage more than there are `inputs` (positions).

    Stage k begins with the first forward op that uses the k-th input: what that op needs is in earlier stages, what
    needs it is in this stage or in later ones. An op that needs nothing but inputs is where it is first needed.

    Raises InfeasibleError for an input that the forward pass does not use, and for an order that is no pipeline.
    """
    names = [function.inputs[i].name for i in inputs]
    begins = _begins(function, phase, inputs)
    forward = [op for op in function.ops if phase[op] == FORWARD]
    needed = _needed(function, begins)
    stage = _reached(
        forward, {op for op, k in needed.items() if k == 0}, {op: k for k, op in enumerate(begins, 1)}, names
    )
    used = users(function)
    for op in reversed(forward):
        if op not in stage:
            latest = [stage[user] for v in op.outputs for user in used.get(v, ()) if user in stage]
            stage[op] = min([*latest, needed.get(op, len(inputs))])
    if 0 not in stage.values():
        raise InfeasibleError(f"cut: no op comes before the first use of %{names[0]}", "leave it out")
    return stage


def check_cut(inputs: Sequence[int], parts: int) -> None:
    """Raises InfeasibleError unless these inputs are one fewer than the stages."""
    if len(inputs) != parts - 1:
        raise InfeasibleError(
            f"cut: {counted(parts, 'stage')} {'needs' if parts == 1 else 'need'} {counted(parts - 1, 'weight')} to "
            f"begin at, got {len(inputs)}",
            "name one for each stage but the first, or leave --cut out",
        )


def _begins(function: Function, phase: Mapping[Op, str], inputs: Sequence[int]) -> list[Op]:
    """For each input the first forward op that uses it, directly or through ops that are not of a microbatch."""
    roots: dict[Value, frozenset[Value]] = {v: frozenset((v,)) for v in function.inputs}
    first: dict[Value, Op] = {}
    for op in function.ops:
        found = frozenset[Value]().union(*[roots.get(v, frozenset()) for v in op.inputs])
        if phase[op] in (FREE, PROLOGUE):
            roots.update(dict.fromkeys(op.outputs, found))
        elif phase[op] == FORWARD:
            for v in found:
                first.setdefault(v, op)
    chosen: dict[Op, str] = {}
    for i in inputs:
        v = function.inputs[i]
        if v not in first:
            raise InfeasibleError(f"cut: the forward pass does not use %{v.name}", "name a weight of each stage")
        if first[v] in chosen:
            again = chosen[first[v]]
            said = "named twice" if again == v.name else f"first used in the same op as %{again}"
            raise InfeasibleError(f"cut: %{v.name} is {said}", "name one weight of each stage but the first")
        chosen[first[v]] = v.name
    return list(chosen)


def _needed(function: Function, begins: Sequence[Op]) -> dict[Op, int]:
    """For each op that one of `begins` needs, not counting itself, the number of the first that does."""
    number = {op: k for k, op in enumerate(begins)}
    none = len(begins)
    found: dict[Op, int] = {}
    taken: dict[Value, int] = {}
    """For values the first of `begins` that uses them, or needs what does."""
    for op in reversed(function.ops):
        first = min([taken.get(v, none) for v in op.outputs], default=none)
        if first < none:
            found[op] = first
        first = min(first, number.get(op, none))
        if first < none:
            taken.update([(v, min(first, taken.get(v, none))) for v in op.inputs])
    return found


def _reached(forward: Sequence[Op], first: set[Op], begins: Mapping[Op, int], names: Sequence[str]) -> dict[Op, int]:
    """The stage of the ops of the first stage, of those that begin others, and of all that need one of these."""
    stage: dict[Op, int] = {}
    at: dict[Value, int] = {}
    for op in forward:
        above = [at[v] for v in op.inputs if v in at]
        if op in begins:
            k = begins[op]
            if above and max(above) > k:
                raise InfeasibleError(
                    f"cut: %{names[k - 1]} is first used after %{names[max(above) - 1]}",
                    "name weights in the order in which the forward pass uses them",
                )
            above = [k]
        if above or op in first:
            stage[op] = max(above, default=0)
            at.update(dict.fromkeys(op.outputs, stage[op]))
    return stage
