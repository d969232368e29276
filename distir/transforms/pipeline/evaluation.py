"""Extracts the forward pass of a distributed training step: a program without the ops that the loss does not need.

Ops of training alone (`training_only`, such as dropout) become the identity.
It is extracted from the training program, not distributed again: weights stay on the stages and in the shards that
training has them in, so a rank evaluates with the weights it has. Bundles become their members: most are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Value
from distir.ir.pause import no_collection
from distir.ir.spec import lookup
from distir.ir.type import Tuple, Type

Path = tuple[int, ...]
"""The indices that lead to a tensor in nested bundles; () for a tensor that is in none."""
Needed = tuple[frozenset[Path], ...]
"""For each of several values the tensors needed of it."""
NOTHING: frozenset[Path] = frozenset()
_IDENTITY = lookup("Identity")


@no_collection()
def evaluation(program: Function, outputs: Sequence[int] = (0,)) -> Function:
    """The program that computes only some outputs, by position, of `program`, and updates no weights.

    Its inputs are all inputs of `program`, the same Values. Output 0 of a training step is the loss.
    """
    chosen = [program.outputs[k] for k in outputs]
    needed = {v: paths(v.type) for v in chosen}
    maker = FunctionMaker(program.name)
    maker.inputs.extend(program.inputs)
    maker.reserve(program.inputs)
    env: Env = {v: {(): v} for v in program.inputs}
    _rebuild(_live(program, needed, {}), maker, env)
    maker.sources = {env[v][()]: program.sources[v] for v in chosen if v in program.sources}
    maker.set_outputs(env[v][()] for v in chosen)
    return maker.finalize()


def _memberwise(op: Op) -> bool:
    return op.spec.comm is not None and op.spec.comm.memberwise


def paths(t: Type) -> frozenset[Path]:
    """The paths of all tensors in a type."""
    if not isinstance(t, Tuple):
        return frozenset(((),))
    return frozenset((k, *path) for k, member in enumerate(t.types) for path in paths(member))


class Live(NamedTuple):
    """The live part of a function: its ops in order (each call with the live part of its callee), and the tensors
    needed of each input and output."""

    function: Function
    ops: list[tuple[Op, Live | None]]
    inputs: Needed
    outputs: Needed


Known = dict[tuple[Function, Needed], Live]
Env = dict[Value, dict[Path, Value]]
"""For each value of the old program its tensors in the new one."""


def _live(function: Function, needed: dict[Value, frozenset[Path]], known: Known) -> Live:
    outputs = tuple(needed.get(v, NOTHING) for v in function.outputs)
    key = function, outputs
    if key in known:
        return known[key]
    live: list[tuple[Op, Live | None]] = []

    def need(v: Value, more: frozenset[Path]) -> None:
        needed[v] = needed.get(v, NOTHING) | more

    for op in reversed(function.ops):
        got = tuple([needed.get(v, NOTHING) for v in op.outputs])
        if not any(got):
            continue
        if op.spec.training_only and not any(got[1:]):  # no gradient is needed
            op = Op(_IDENTITY, op.inputs[:1], NO_ATTRIBUTES, op.outputs[:1], op.of)
        inner = None
        if op.callee is not None:
            inner = _live(op.callee, dict(zip(op.callee.outputs, got, strict=True)), known)
            for v, more in zip(op.inputs, inner.inputs, strict=True):
                need(v, more)
        elif op.spec.bundle == "pack":
            for k, v in enumerate(op.inputs):
                need(v, frozenset(path[1:] for path in got[0] if path[0] == k))
        elif op.spec.bundle == "unpack":
            need(op.inputs[0], frozenset((k, *path) for k, some in enumerate(got) for path in some))
        else:
            for v in op.inputs:
                need(v, got[0] if _memberwise(op) else paths(v.type))
        live.append((op, inner))
    known[key] = Live(function, live[::-1], tuple(needed.get(v, NOTHING) for v in function.inputs), outputs)
    return known[key]


def _rebuild(live: Live, f: FunctionMaker, env: Env, bodies: dict[int, Function] | None = None) -> None:
    """Append the live ops to `f`. `env` holds the inputs; the results are added to it."""
    bodies = {} if bodies is None else bodies
    made: dict[Op, Op] = {}
    for op, inner in live.ops:
        if op.spec.bundle == "pack":
            env[op.outputs[0]] = {(k, *path): x for k, v in enumerate(op.inputs) for path, x in env.get(v, {}).items()}
        elif op.spec.bundle == "unpack":
            for path, x in env[op.inputs[0]].items():
                env.setdefault(op.outputs[path[0]], {})[path[1:]] = x
        elif inner is not None:
            _call(op, inner, f, env, bodies)
        elif _memberwise(op):
            for path in sorted(env[op.inputs[0]]):
                x = f.add_op(op.spec, _name(op.outputs[0], path), [env[v][path] for v in op.inputs], op.attributes)
                env.setdefault(op.outputs[0], {})[path] = x
        else:
            operands = [_whole(f, v.type, env[v], ()) for v in op.inputs]
            of = made.get(op.of) if op.of is not None else None
            f.add_op(op.spec, None, operands, op.attributes, (), [v.name for v in op.outputs], of)
            made[op] = f.ops[-1]
            for v, x in zip(op.outputs, f.ops[-1].outputs, strict=True):
                _take_apart(f, v, x, env)


def _call(op: Op, inner: Live, f: FunctionMaker, env: Env, bodies: dict[int, Function]) -> None:
    if id(inner) not in bodies:
        bodies[id(inner)] = _body(inner, bodies)
    operands = [env[v][path] for v, some in zip(op.inputs, inner.inputs, strict=True) for path in sorted(some)]
    slots = [(v, path) for v, some in zip(op.outputs, inner.outputs, strict=True) for path in sorted(some)]
    attributes = Attributes({**op.attributes, "callee": bodies[id(inner)]})
    f.add_op(op.spec, None, operands, attributes, (), [_name(v, path) for v, path in slots])
    for (v, path), x in zip(slots, f.ops[-1].outputs, strict=True):
        env.setdefault(v, {})[path] = x


def _body(live: Live, bodies: dict[int, Function]) -> Function:
    f = FunctionMaker(live.function.name)
    env: Env = {}
    for v, some in zip(live.function.inputs, live.inputs, strict=True):
        env[v] = {path: f.add_input_value(_name(v, path), _member(v.type, path), v.role) for path in sorted(some)}
    _rebuild(live, f, env, bodies)
    outputs = zip(live.function.outputs, live.outputs, strict=True)
    f.set_outputs([env[v][path] for v, some in outputs for path in sorted(some)])
    return f.finalize()


def _member(t: Type, path: Path) -> Type:
    for k in path:
        t = t.types[k]  # type: ignore[union-attr]
    return t


def _name(v: Value, path: Path) -> str:
    return ".".join((v.name, *map(str, path)))


def _whole(f: FunctionMaker, t: Type, tensors: dict[Path, Value], path: Path) -> Value:
    """The value of type `t` made of `tensors`; a bundle is packed again."""
    if not isinstance(t, Tuple):
        return tensors[path]
    return f.add_op(lookup("Pack"), None, [_whole(f, u, tensors, (*path, k)) for k, u in enumerate(t.types)])


def _take_apart(f: FunctionMaker, v: Value, x: Value, env: Env, path: Path = ()) -> None:
    """Add to `env` the tensors of `x`, which replaces the member of `v` at `path`."""
    if not isinstance(x.type, Tuple):
        env.setdefault(v, {})[path] = x
        return
    members = f.add_op(lookup("Unpack"), None, [x])
    for k, member in enumerate(members if isinstance(members, tuple) else (members,)):
        _take_apart(f, v, member, env, (*path, k))
