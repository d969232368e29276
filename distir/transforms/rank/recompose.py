"""Recomposes decomposed ops before a run: a product and its bias become one op again.

    %t = Transpose(%w, perm=(1, 0))
    %m = MatMul(%x, %t)
    %y = Add(%m, %b)                     %y = Gemm(%x, %w, %b, transB=1)

    %m = MatMulGradWeight(%x, %d)
    %g = Transpose(%m, perm=(1, 0))      %g = MatMulGradWeight(%d, %x)

The result is for execution: it need not be splittable any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from distir.ir.cached import cached
from distir.ir.function import NO_ATTRIBUTES, Attributes, Function, Op, Value
from distir.ir.spec import lookup
from distir.ir.type import Tensor
from distir.transforms.rewriting.laws import Law, rewrites

ADD, MATMUL, WEIGHT, TRANSPOSE, GEMM = map(lookup, ("Add", "MatMul", "MatMulGradWeight", "Transpose", "Gemm"))
_PARTS = (ADD, MATMUL, WEIGHT, TRANSPOSE)
_TURNED = Attributes(transB=1)


@cached
@rewrites(Law.SAME)
def recompose(function: Function) -> Function:
    """The function with those ops recomposed. Its inputs, outputs, calls and communication do not change.

    Backward ops of recomposed ops lose their `of`.
    """
    parts = [op for op in function.ops if op.spec in _PARTS]
    made_of_parts = {op.outputs[0] for op in parts if op.spec is not ADD}
    used = _uses(made_of_parts, function.ops, function.outputs)
    products = {v: op for op in parts if op.spec in (MATMUL, WEIGHT) and used[v := op.outputs[0]] == 1}
    swapped = {op.outputs[0]: op.inputs[0] for op in parts if _swaps(op)}
    ends = [op for op in parts if op.spec is ADD or op.outputs[0] in swapped]
    joined = {op: new for op in ends if (new := _joined(op, products, swapped)) is not op}
    if not joined:
        return function
    ops = [joined.get(op, op) for op in function.ops]
    # remove products that have become part of another op, then the transposes that only those used
    left = _uses(made_of_parts, ops, function.outputs)
    parts = [joined.get(op, op) for op in parts]
    absorbed = {op for op in parts if op.spec in (WEIGHT, MATMUL) and used[v := op.outputs[0]] and not left[v]}
    for op in absorbed:
        left.subtract(op.inputs)
    absorbed.update([op for op in parts if op.spec is TRANSPOSE and used[v := op.outputs[0]] and not left[v]])
    ops = [op for op in ops if op not in absorbed]
    if any([op.of is not None for op in ops]):
        made: dict[Op, Op] = {}
        for op in ops:
            of = made.get(op.of) if op.of else None
            made[op] = op if of is op.of else Op(op.spec, op.inputs, op.attributes, op.outputs, of)
        ops = list(made.values())
    return Function(function.name, function.inputs, tuple(ops), function.outputs, function.updates, function.sources)


def _uses(values: Set[Value], ops: Iterable[Op], outputs: Sequence[Value]) -> Counter[Value]:
    """How often each of these values is used."""
    return Counter([v for op in ops for v in op.inputs if v in values] + [v for v in outputs if v in values])


def _joined(op: Op, products: Mapping[Value, Op], swapped: Mapping[Value, Value]) -> Op:
    """A sum, or an op whose result is in `swapped`, recomposed with those that make its operands, or the op itself.
    `products` have a single use."""
    if op.spec is ADD:
        for product, bias in (op.inputs, op.inputs[::-1]):
            matmul = products.get(product)
            if matmul is not None and matmul.spec is MATMUL and _fit(matmul, bias, op.outputs[0]):
                a, b = matmul.inputs
                attributes = _TURNED if b in swapped else NO_ATTRIBUTES
                return Op(GEMM, (a, swapped.get(b, b), bias), attributes, op.outputs, op.of)
    elif (product := products.get(op.inputs[0])) is not None and product.spec is WEIGHT:  # swapped
        return Op(WEIGHT, product.inputs[::-1], NO_ATTRIBUTES, op.outputs, op.of)
    return op


def _swaps(op: Op) -> bool:
    return op.spec is TRANSPOSE and op.attributes["perm"] == (1, 0)


def _fit(matmul: Op, bias: Value, result: Value) -> bool:
    """Whether Gemm can do the work, by local shapes: floats, a matrix times a matrix, and a bias that is a row or has
    the result's shape. With a row, the first operand may be a batch of matrices."""
    shapes: list[tuple[int, ...]] = []
    for v in (*matmul.inputs, *matmul.outputs, bias, result):
        if not isinstance(v.type, Tensor) or not v.type.dtype.floating:
            return False
        shapes.append(v.type.shape)
    a, b, product, c, y = shapes
    return len(a) >= 2 and len(b) == 2 and product == y and (c == y[-1:] or (c == y and len(y) == 2))
