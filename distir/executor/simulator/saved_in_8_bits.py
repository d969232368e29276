"""What backward passes find saved in 8 bits, under a runtime whose products save what they have quantized
(`Runtime.fp8_saved`): Transformer Engine keeps of a product's input the copy in 8 bits, for the gradient of the weight.

Source: github NVIDIA/TransformerEngine, pytorch/module/linear.py and layernorm_linear.py (`prepare_for_saving`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distir.executor.simulator.compile import CompiledProgram
from distir.executor.simulator.eight_bits import eight_bits
from distir.ir.cached import producers
from distir.ir.function import Function, Op, Value
from distir.ir.host_runtime import Runtime
from distir.ir.type import Tensor, Type


class _Use(NamedTuple):
    """What uses a saved value: products in 8 bits, or others."""

    products: bool
    others: bool


def bytes_saved(program: CompiledProgram) -> dict[Value, int]:
    """The bytes of values of forward passes that differ from those of their types: of those that only products of
    backward passes take, half; of those that others take, too, half as much again, for the copy."""
    runtime = program.cost.runtime
    if runtime is None or not (runtime.fp8 and runtime.fp8_saved):
        return {}
    found: dict[Value, _Use] = {}
    known: dict[Function, _Uses] = {}
    for made, output, used, number in _saved_bundles(program.function):
        makers = producers(made)
        pack = makers.get(made.outputs[output])
        unpack = next(
            (op for op in used.ops if op.spec.bundle == "unpack" and op.inputs[0] is used.inputs[number]), None
        )
        if pack is None or unpack is None or pack.spec.bundle != "pack" or len(pack.inputs) != len(unpack.outputs):
            continue
        if used not in known:
            known[used] = _Uses(program, used)
        for v, u in zip(pack.inputs, unpack.outputs, strict=True):
            root = _root(v, makers)
            if root in makers and isinstance(t := root.type, Tensor) and t.dtype.floating and t.dtype.size == 2:
                use, before = known[used].of(u), found.get(root, _Use(False, False))
                found[root] = _Use(use.products or before.products, use.others or before.others)
    return {v: v.type.bytes * (3 if use.others else 1) // 2 for v, use in found.items() if use.products}


def least_share(runtime: Runtime | None) -> float:
    """The least share of the bytes of what forward passes save, by its types, that is saved."""
    return 0.5 if runtime is not None and runtime.fp8 and runtime.fp8_saved else 1.0


def _saved_bundles(main: Function) -> dict[tuple[Function, int, Function, int], None]:
    """The bundles that a body hands to another: as (body, output, body, input)."""
    made = {v: (op.callee, k) for op in main.ops if op.callee is not None for k, v in enumerate(op.outputs)}
    found: dict[tuple[Function, int, Function, int], None] = {}
    for op in main.ops:
        if op.callee is not None:
            for i, v in enumerate(op.inputs):
                if v in made and made[v][0] is not op.callee:
                    found[(*made[v], op.callee, i)] = None
    return found


class _Uses:
    """What uses the values of a body, found through views and gathers."""

    def __init__(self, program: CompiledProgram, body: Function) -> None:
        cost, runtime = program.cost, program.cost.runtime
        device = cost.topology.spec(program.classes.first[0])
        wide = {op for op, x in eight_bits(body, runtime, {}).items() if x.wide} if runtime is not None else set[Op]()
        self._users: dict[Value, list[Op]] = {}
        for op in body.ops:
            for v in op.inputs:
                self._users.setdefault(v, []).append(op)
        self._outputs = frozenset(body.outputs)
        self._products = {
            op
            for op in body.ops
            if op.spec.kernel == "product" and op not in wide and cost.in_fp8(op.spec, *_types(op), device)
        }

    def of(self, v: Value) -> _Use:
        products, others = False, v in self._outputs
        for op in self._users.get(v, ()):
            if op in self._products:
                products = True
            elif (op.spec.alias and op.spec.bundle is None) or (op.spec.comm is not None and op.spec.comm.gathers):
                for w in op.outputs:
                    use = self.of(w)
                    products, others = products or use.products, others or use.others
            else:
                others = True
        return _Use(products, others)


def _types(op: Op) -> tuple[list[Type], list[Type]]:
    return [v.type for v in op.inputs], [v.type for v in op.outputs]


def _root(v: Value, makers: Mapping[Value, Op]) -> Value:
    """The value in whose buffer a value lies."""
    while v in makers and makers[v].spec.alias and makers[v].spec.bundle is None:
        v = makers[v].inputs[0]
    return v
