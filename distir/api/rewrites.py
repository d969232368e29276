"""Check every rewrite of a program by its law, starting at the imported program; and summarise the rewrites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from distir.api.masks import check_masks
from distir.executor.reference.sequential import evaluate
from distir.ir.function import Function, Op
from distir.ops.rules import shape_of
from distir.transforms.differentiation.batch_statistics import check_batch_statistics
from distir.transforms.differentiation.draw_dropout import check_dropout
from distir.transforms.rewriting.claims import check_gradients, check_rewrite
from distir.transforms.rewriting.laws import Law, Origin, origins
from distir.transforms.rewriting.mixed_precision import check_mixed_precision
from distir.transforms.rewriting.precision import check_dtype
from distir.transforms.sharding.check_padding import check_padding


def _check_more(origin: Origin, after: Function) -> None:
    check_rewrite(origin.before, after, evaluate, origin.law)
    check_gradients(origin.before, after, evaluate)


CHECKS: dict[Law, Callable[[Origin, Function], None]] = {
    Law.SAME: lambda origin, after: check_rewrite(origin.before, after, evaluate),
    Law.MORE: _check_more,
    Law.DRAWN: lambda origin, after: check_dropout(origin.before, after, evaluate),
    Law.OF_BATCH: lambda origin, after: check_batch_statistics(origin.before, after, evaluate),
    Law.KNOWN: lambda origin, after: check_masks(origin.before, after, *origin.given),
    Law.PADDED: lambda origin, after: check_padding(origin.before, after, evaluate),
    Law.RETYPED: lambda origin, after: check_dtype(origin.before, after, *origin.given),
    Law.MIXED: lambda origin, after: check_mixed_precision(origin.before, after, *origin.given),
}
"""By law: a check that raises MismatchError if a rewrite violates it."""


def check_origins(function: Function) -> None:
    """Check by its law every rewrite that led to the function, each once.

    Raises MismatchError that names the value that is not equal to that of the program before the rewrite.
    """
    steps: list[tuple[Origin, Function]] = []
    for origin, after in origins(function):
        if check_origins in after.cache:
            break
        steps.append((origin, after))
    for origin, after in reversed(steps):
        CHECKS[origin.law](origin, after)
        after.cache[check_origins] = True


def rewritten(function: Function) -> list[str]:
    """A line for each rewrite that led to the function, in order."""
    lines = [line for origin, after in origins(function) if (line := _line(origin, after))]
    return lines[::-1]


_MOST = 4
"""Kinds of ops named in a line."""


def _line(origin: Origin, after: Function) -> str:
    if origin.law in (Law.RETYPED, Law.MIXED):
        return f"{origin.rewrite}: {origin.given[0]}"
    if origin.law is Law.PADDED:
        pairs = {
            pair: v.name
            for v in reversed(after.inputs)
            if v.role and v.role.source
            for pair in zip(v.role.source, shape_of(v), strict=True)
            if pair[0] != pair[1]
        }
        rows = [f"{old} padded to {new} (%{name} and what goes with it)" for (old, new), name in pairs.items()]
        return f"{origin.rewrite}: {', '.join(rows)}"
    removed, new = _only(origin.before, after), _only(after, origin.before)
    decomposed = [op for op in removed if op.spec.decompose is not None]
    fused = [op for op in new if op.spec.meaning is not None]
    if decomposed:
        what = f"{_kinds(decomposed)} decomposed"
    elif not removed or origin.law is Law.MORE:  # what it adds is its purpose
        return ""
    else:
        what = f"{_kinds(fused or new)} in place of {_kinds(removed)}" if new else f"without {_kinds(removed)}"
    return f"{origin.rewrite}: {what}"


def _only(function: Function, other: Function) -> list[Op]:
    """The ops of a function that `other` lacks: it has none of this kind with the same result."""
    there = {(op.spec, len(op.inputs), op.attributes.get("causal"), v) for op in other.ops for v in op.outputs}
    return [
        op
        for op in function.ops
        if (op.spec, len(op.inputs), op.attributes.get("causal"), op.outputs[0]) not in there
        and op.op_type != "Constant"
    ]


def _kinds(ops: Iterable[Op]) -> str:
    counts = Counter(f"causal {op.op_type}" if op.attributes.get("causal") else op.op_type for op in ops)
    rows = [f"{n:,} {kind}" for kind, n in counts.most_common()]
    return ", ".join(rows if len(rows) <= _MOST else [*rows[:_MOST], f"{sum(counts.values()):,} ops in all"])
