"""The passes over a distributed program before it is run: recompose ops, group optimizers, send inputs first.

The result is still the distributed program of all ranks: it is simulated, and projected to each rank (see
`rank_program`).
"""

from __future__ import annotations

import operator

from distir.ir.cached import cached
from distir.ir.function import Attributes, Function, Op
from distir.ir.mesh_form import MeshForm, mesh_form
from distir.transforms.rank.group_optimizers import group_optimizers
from distir.transforms.rank.project import inputs_first
from distir.transforms.rank.recompose import recompose


@cached
def as_run(program: Function) -> Function:
    """The program as ranks run it. Values keep their names, except intermediate values of recomposed ops."""
    recomposed = calling(program, _recomposed(program))
    grouped = calling(recomposed, group_optimizers(recomposed))
    return inputs_first(grouped)


def _recomposed(program: Function) -> dict[Function, Function]:
    """The program and its callees recomposed. If there is nothing to do in one, nor is there in others of its form."""
    left: set[MeshForm] = set()
    found: dict[Function, Function] = {}
    for f in (*program.callees(), program):
        formed = mesh_form(f)
        form = formed and formed[0]
        found[f] = f if form in left else recompose(f)
        if form is not None and found[f] is f:
            left.add(form)
    return found


def calling(program: Function, new: dict[Function, Function]) -> Function:
    """The program and its callees replaced as `new` says, and the callees in their calls."""
    done: dict[Function, Function] = {}
    for before in (*program.callees(), program):
        f = new[before]
        ops = [_call(op, done[op.callee]) if op.callee is not None else op for op in f.ops]
        same = all(map(operator.is_, ops, f.ops))
        done[before] = f if same else Function(f.name, f.inputs, tuple(ops), f.outputs, f.updates, f.sources)
    return done[program]


def _call(op: Op, callee: Function) -> Op:
    if callee is op.callee:
        return op
    return Op(op.spec, op.inputs, Attributes({**op.attributes, "callee": callee}), op.outputs, op.of)
