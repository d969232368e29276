"""Proxies: programs that communicate as the real ones do, and sleep where those compute.

    %a = MatMul(%x, %w)                   %b = Sleep(%x, %w, seconds=0.002, types=(...))
    %b = Relu(%a)                         %c = MPIAllreduce(%b)
    %c = MPIAllreduce(%b)

Each run of compute ops, up to the first that waits for a communication (as `outline` finds them), also for one that an
earlier function has issued, becomes one op. So what is sent, when it is issued and what waits for it stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import Tuple
from distir.transforms.rank.as_run import calling
from distir.transforms.rank.idle import is_idle
from distir.transforms.rank.outline import Sort, UnderWay, runs

PACK, SLEEP = lookup("Pack"), lookup("Sleep")


def proxied(program: Function, seconds: Callable[[Function, Op], float], spin: bool = False) -> Function:
    """The proxy of a distributed program as it is run: `seconds` says what an op of a function takes.

    Of the main program only what sleeps already changes: between calls its other ops only move data.
    """
    arriving = _arriving(program)
    new = {f: _body(f, seconds, spin, arriving.get(f, set())) for f in program.callees()}
    return calling(program, {**new, program: _main(program, seconds, spin)})


def _main(program: Function, seconds: Callable[[Function, Op], float], spin: bool) -> Function:
    if not any([op.spec is SLEEP for op in program.ops]):
        return program
    ops = tuple([_again(op, seconds(program, op), spin) if op.spec is SLEEP else op for op in program.ops])
    return Function(program.name, program.inputs, ops, program.outputs, program.updates, program.sources)


def _again(op: Op, seconds: float, spin: bool) -> Op:
    """A sleep of another time."""
    given = op.attributes.without("seconds", "spin")
    return Op(SLEEP, op.inputs, Attributes({**given, **_taking(seconds, spin)}), op.outputs)


def _taking(seconds: float, spin: bool) -> dict[str, Any]:
    return {"seconds": seconds} | ({"spin": True} if spin else {})


def _arriving(program: Function) -> dict[Function, set[Value]]:
    """For each function that the program calls, the inputs that may be under way then."""
    found: dict[Function, set[Value]] = {}
    under_way: set[Value] = set()
    for op in program.ops:
        if (f := op.callee) is not None:
            inputs = found.setdefault(f, set())
            inputs.update([v for v, given in zip(f.inputs, op.inputs, strict=True) if given in under_way])
            inside = UnderWay(inputs)
            for each in f.ops:
                inside.next(each, _sort(each))
            under_way.update([v for v, made in zip(op.outputs, f.outputs, strict=True) if inside.awaits(made)])
        elif (place := _sort(op)) == "moves" or (place == "stays" and not under_way.isdisjoint(op.inputs)):
            under_way.update(op.outputs)
    return found


def _body(function: Function, seconds: Callable[[Function, Op], float], spin: bool, arriving: set[Value]) -> Function:
    uses = Counter([v for op in function.ops for v in op.inputs])
    uses.update(function.outputs)
    ops: list[Op] = []
    for run in runs(function, _sort, arriving):
        if run[0].spec is SLEEP:
            ops.append(_again(run[0], seconds(function, run[0]), spin))
            continue
        if not is_slept(run[0]):
            ops += [op if op.of is None else Op(op.spec, op.inputs, op.attributes, op.outputs) for op in run]
            continue
        inside = Counter([v for op in run for v in op.inputs])
        made = {v for op in run for v in op.outputs}
        operands = tuple(dict.fromkeys([v for op in run for v in op.inputs if v not in made]))
        results = [v for op in run for v in op.outputs if uses[v] > inside[v]]
        ops += _slept(operands, results, sum([seconds(function, op) for op in run]), spin)
    return Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)


def _slept(operands: tuple[Value, ...], results: Sequence[Value], seconds: float, spin: bool) -> list[Op]:
    """The op that gives these results after so long; bundles are packed of its results."""
    made: list[Value] = []
    packs: list[Op] = []
    for v in results:
        if isinstance(v.type, Tuple):
            members = tuple([Value(f"{v.name}.{k}", t) for k, t in enumerate(v.type.types)])
            packs.append(Op(PACK, members, NO_ATTRIBUTES, (v,)))
            made += members
        else:
            made.append(v)
    given = {**_taking(seconds, spin), "types": tuple([v.type for v in made])}
    return [Op(SLEEP, operands, Attributes(given), tuple(made)), *packs]


def is_slept(op: Op) -> bool:
    """Whether an op is part of a sleep in a proxy."""
    return _sort(op) == "joins"


def _sort(op: Op) -> Sort:
    """What only rearranges a device's own data is slept, too; bundles and control dependences stay."""
    comm = op.spec.comm
    if comm is None:
        return "joins"
    if op.callee is not None or comm.route != "here":
        return "stays" if op.callee is None and is_idle(op) else "moves"
    return "stays" if op.spec.bundle is not None or comm.unchanged or comm.seconds is not None else "joins"
