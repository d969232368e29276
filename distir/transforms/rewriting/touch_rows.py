"""SGD of tables from which few rows were picked becomes one op on these rows.

    %g = LookupGrad(%d, %i, rows=v)
    %t.new = SGD(%t, %g)                 %t.new = LookupSGD(%t, %i, %d)

There is then no gradient as large as the tables, which all their rows are read and written for. Devices that have parts
of the batch send each other what was picked, not the sum of the tables' gradients.
"""

from __future__ import annotations

import math

from distir.ir.cached import cached
from distir.ir.function import Function, Op
from distir.ops.rules import shape_of, tensor
from distir.transforms.rewriting.laws import Law, rewrites
from distir.transforms.rewriting.matching import Found, Program, rewrite


@cached
@rewrites(Law.SAME)
def touch_rows(function: Function) -> Function:
    """The function with plain SGD of tables on the rows used, where their gradient has no other use and there are fewer
    indices than rows."""
    return rewrite(function, find_row_update, "SGD")


def find_row_update(program: Program, op: Op) -> Found | None:
    """Matches at SGD without momentum and weight decay."""
    if any([op.attributes.get(k) for k in ("momentum", "weight_decay", "dampening")]):
        return None
    tables, gradient, *numbers = op.inputs
    slope = program.made_by(gradient, "LookupGrad")
    if slope is None or tensor(gradient).dtype is not tensor(tables).dtype:
        return None
    d, index = slope.inputs
    number, rows, _ = shape_of(tables)
    if tensor(tables).dtype.size < 4 or math.prod(shape_of(index)) >= number * rows:
        return None
    given = {k: x for k, x in slope.attributes.items() if k in ("pooling", "count")}
    given |= {k: x for k, x in op.attributes.items() if k in ("lr", "scheduled", "skips")}
    return Found(op.outputs[0], frozenset((slope, op)), "LookupSGD", [tables, index, d, *numbers], given)
