"""Import rules of ONNX's recurrent ops: unrolled, some ops a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distir.importer.node import Node, Result
from distir.importer.registry import rule
from distir.ir.function import Value
from distir.ir.type import Int64
from distir.ops.rules import shape_of

ACTIVATIONS = ("Relu", "Sigmoid", "Softplus", "Tanh")
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}

Step = Callable[[Value, list[Value]], list[Value]]
"""(a step's part of the input times its weights, the states before it) -> the states after it; the first is the
output."""


class _Direction(NamedTuple):
    """The weights of one direction: x (input, gates), h (hidden, gates), their biases (gates,), and of the cell."""

    x: Value
    h: Value
    x_bias: Value | None
    h_bias: Value | None
    cell: list[Value]
    activations: list[str]


@rule(*GATES)
def _recurrent(n: Node) -> Sequence[Result]:
    """The dims of the operand are (time, batch, input), or with `layout` (batch, time, input)."""
    kind, way = n.proto.op_type, n.attr("direction", "forward")
    n.require("direction", "forward", "forward", "reverse", "bidirectional")
    backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[way]
    for name in ("activation_alpha", "activation_beta"):
        n.require(name, (), ())
    batch_first, hidden = n.attr("layout", 0), n.shape(2)[2]
    n.require("hidden_size", hidden, hidden)
    x = n.emit("Transpose", n.operand(0), perm=(1, 0, 2)) if batch_first else n.operand(0)
    valid = _valid(n, *shape_of(x)[:2])
    ys: list[Value] = []
    ends: list[list[Value]] = []
    for k, back in enumerate(backwards):
        weights = _weights(n, k, hidden)
        states = [_state(n, i, k, x, hidden, batch_first) for i in (5, 6)[: 2 if kind == "LSTM" else 1]]
        y, last = _run(n, x, weights, _CELLS[kind](n, weights), states, valid, back)
        ys.append(y)
        ends.append(last)
    y = ys[0] if len(ys) == 1 else n.emit("Concat", *ys, axis=1)
    results = [n.emit("Transpose", y, perm=(2, 0, 1, 3)) if batch_first else y]
    for each in zip(*ends, strict=True):
        rows = [n.reshape(v, (1, *shape_of(v))) for v in each]
        last = rows[0] if len(rows) == 1 else n.emit("Concat", *rows, axis=0)
        results.append(n.emit("Transpose", last, perm=(1, 0, 2)) if batch_first else last)
    return results


def _row(n: Node, v: Value, k: int) -> Value:
    """Row k along the first dim, without that dim."""
    shape = shape_of(v)
    v = v if shape[0] == 1 else n.emit("Slice", v, starts=(k,), ends=(k + 1,), axes=(0,), steps=(1,))
    return n.reshape(v, shape[1:])


def _weights(n: Node, k: int, hidden: int) -> _Direction:
    """Those of direction k."""
    kind = n.proto.op_type
    x, h = [n.emit("Transpose", _row(n, n.operand(i), k), perm=(1, 0)) for i in (1, 2)]
    none: Sequence[Value | None] = (None, None)
    biases = n.emit("Split", _row(n, n.operand(3), k), axis=0, parts=2) if n.has(3) else none
    cell = n.emit("Split", _row(n, n.operand(7), k), axis=0, parts=3) if kind == "LSTM" and n.has(7) else ()
    count, names = len(_DEFAULT[kind]), list(n.attr("activations", ()))
    names = [name.capitalize() for name in names[k * count : (k + 1) * count]] or _DEFAULT[kind]
    if len(names) != count or not set(names) <= set(ACTIVATIONS):
        raise n.error(f"activations {names} are not supported", f"supported: {', '.join(ACTIVATIONS)}")
    if shape_of(x)[1] != GATES[kind] * hidden or shape_of(h) != (hidden, GATES[kind] * hidden):
        raise n.error(f"weights of shapes {n.shape(1)} and {n.shape(2)} are not of {GATES[kind]} gates")
    of_x, of_h = biases
    return _Direction(x, h, of_x, of_h, list(cell), names)


def _state(n: Node, i: int, k: int, x: Value, hidden: int, batch_first: int) -> Value:
    """The initial state of direction k, operand i; zeros if it is left out."""
    if not n.has(i):
        return n.full((shape_of(x)[1], hidden), 0, x)
    v = n.emit("Transpose", n.operand(i), perm=(1, 0, 2)) if batch_first else n.operand(i)
    return _row(n, v, k)


def _valid(n: Node, times: int, batch: int) -> list[Value] | None:
    """For each step whether it is within the sequence, (batch, 1); None if all are."""
    if not n.has(4) or (n.scope.is_known(n.proto.input[4]) and (n.known(4, "the lengths") == times).all()):
        return None
    lengths = n.reshape(n.emit("Cast", n.operand(4), to=Int64), (batch, 1))
    return [n.emit("Greater", lengths, n.constant(t, lengths)) for t in range(times)]


def _run(
    n: Node, x: Value, w: _Direction, cell: Step, states: list[Value], valid: list[Value] | None, back: bool
) -> tuple[Value, list[Value]]:
    """The outputs of all steps, (time, 1, batch, hidden), and the states after the last. Beyond the end of a sequence
    outputs are 0 and states stay."""
    parts = n.emit("MatMul", x, w.x)
    parts = parts if w.x_bias is None else n.emit("Add", parts, w.x_bias)
    (times, batch), hidden = shape_of(x)[:2], shape_of(w.h)[0]
    ys: list[Value] = []
    for t in reversed(range(times)) if back else range(times):
        new = cell(_row(n, parts, t) if times == 1 else _at(n, parts, t), states)
        y = new[0]
        if valid is not None:
            new = [n.emit("Where", valid[t], a, b) for a, b in zip(new, states, strict=True)]
            y = n.emit("Mask", valid[t], y)
        states = new
        ys.insert(0 if back else len(ys), n.reshape(y, (1, 1, batch, hidden)))
    return (ys[0] if len(ys) == 1 else n.emit("Concat", *ys, axis=0)), states


def _at(n: Node, v: Value, t: int) -> Value:
    return n.reshape(n.emit("Slice", v, starts=(t,), ends=(t + 1,), axes=(0,), steps=(1,)), shape_of(v)[1:])


def _activated(n: Node, name: str, v: Value) -> Value:
    """Clipped, if the node says so."""
    limit = n.attr("clip")
    return n.emit(name, v if limit is None else n.emit("Clip", v, min=-limit, max=limit))


def _plus(n: Node, a: Value, b: Value | None) -> Value:
    return a if b is None else n.emit("Add", a, b)


def _one_minus(n: Node, v: Value) -> Value:
    return n.emit("Sub", n.constant(1, v), v)


def _rnn(n: Node, w: _Direction) -> Step:
    def step(part: Value, states: list[Value]) -> list[Value]:
        total = n.emit("Add", part, _plus(n, n.emit("MatMul", states[0], w.h), w.h_bias))
        return [_activated(n, w.activations[0], total)]

    return step


def _gru(n: Node, w: _Direction) -> Step:
    """Gates z, r and h; with `linear_before_reset` r is multiplied after the product."""
    f, g = w.activations
    after, hidden = n.attr("linear_before_reset", 0), shape_of(w.h)[0]
    gates, candidate = n.emit("Split", w.h, axis=1, sizes=(2 * hidden, hidden))
    sums = None if w.h_bias is None else n.emit("Split", w.h_bias, axis=0, sizes=(2 * hidden, hidden))

    def step(part: Value, states: list[Value]) -> list[Value]:
        (h,), bias = states, sums or (None, None)
        of_gates, of_candidate = n.emit("Split", part, axis=1, sizes=(2 * hidden, hidden))
        both = n.emit("Add", of_gates, _plus(n, n.emit("MatMul", h, gates), bias[0]))
        z, r = n.emit("Split", _activated(n, f, both), axis=1, parts=2)
        if after:
            own = n.emit("Mul", r, _plus(n, n.emit("MatMul", h, candidate), bias[1]))
        else:
            own = _plus(n, n.emit("MatMul", n.emit("Mul", r, h), candidate), bias[1])
        new = _activated(n, g, n.emit("Add", of_candidate, own))
        return [n.emit("Add", n.emit("Mul", _one_minus(n, z), new), n.emit("Mul", z, h))]

    return step


def _lstm(n: Node, w: _Direction) -> Step:
    """Gates i, o, f and c; `cell` weighs the cell's state in i, o and f."""
    f, g, last = w.activations
    coupled = n.attr("input_forget", 0)

    def step(part: Value, states: list[Value]) -> list[Value]:
        h, c = states
        total = n.emit("Add", part, _plus(n, n.emit("MatMul", h, w.h), w.h_bias))
        i, o, forget, new = n.emit("Split", total, axis=1, parts=4)
        if w.cell:
            i, forget = [n.emit("Add", v, n.emit("Mul", p, c)) for v, p in ((i, w.cell[0]), (forget, w.cell[2]))]
        i = _activated(n, f, i)
        forget = _one_minus(n, i) if coupled else _activated(n, f, forget)
        c = n.emit("Add", n.emit("Mul", forget, c), n.emit("Mul", i, _activated(n, g, new)))
        o = n.emit("Add", o, n.emit("Mul", w.cell[1], c)) if w.cell else o
        return [n.emit("Mul", _activated(n, f, o), n.emit(last, c)), c]

    return step


_CELLS: dict[str, Callable[[Node, _Direction], Step]] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
