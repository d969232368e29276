"""What context parallelism sends: keys and values of attention, and their gradients, along axes that split the sequence
of the queries."""

from __future__ import annotations

from typing import NamedTuple

from distir.ir.device import names_of
from distir.ir.function import Function, Op, Value
from distir.ops.attention import KEYS_AND_VALUES
from distir.ops.rules import tensor


class SentKeys(NamedTuple):
    """An op of attention, and which of its keys and values, or of their gradients, a collective sends."""

    attention: Op
    values: tuple[Value, ...]

    def along(self, collective: Op) -> list[bool]:
        """Of each axis of a collective, whether it splits the sequence of the queries."""
        queries = tensor(self.attention.inputs[0])
        sequence = len(queries.shape) - 2
        return [queries.on(axis).dim == sequence for axis in names_of(collective.attributes.get("axis", ()))]


def sent_keys(f: Function) -> dict[Op, SentKeys]:
    """Collectives that gather keys or values, each with the first op of attention that needs them, or sum up their
    gradients, with the op that makes these."""
    found: dict[Op, SentKeys] = {}
    needed: dict[Value, SentKeys] = {}
    """By what keys or values are made of."""
    for op in reversed(f.ops):
        if op.spec.kernel == "attention":
            needed.update({op.inputs[k]: SentKeys(op, (op.inputs[k],)) for k in KEYS_AND_VALUES})
        elif op.outputs and (sent := needed.get(op.outputs[0])) is not None:
            if op.spec.comm is not None:
                if op.spec.comm.gathers and any(sent.along(op)):
                    found[op] = sent
            elif not op.spec.kernel:
                needed[op.inputs[0]] = sent
    made: dict[Value, SentKeys] = {}
    """By what is made of the gradients."""
    for op in f.ops:
        if op.spec.kernel == "attention" and len(op.outputs) > max(KEYS_AND_VALUES):
            made.update({op.outputs[k]: SentKeys(op, (op.outputs[k],)) for k in KEYS_AND_VALUES})
        elif op.spec.bundle == "pack":
            parts = [made[v] for v in op.inputs if v in made]
            if len(parts) == len(op.inputs) > 0:
                made[op.outputs[0]] = SentKeys(parts[0].attention, tuple([v for sent in parts for v in sent.values]))
        elif op.inputs and (sent := made.get(op.inputs[0])) is not None:
            if op.spec.comm is not None:
                if op.spec.comm.sums and any(sent.along(op)):
                    found[op] = sent
            elif not op.spec.kernel and len(op.outputs) == 1:
                made.setdefault(op.outputs[0], sent)
    return found
