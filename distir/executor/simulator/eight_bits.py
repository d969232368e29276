"""What is in 8 bits under a runtime whose products of weights are (`Runtime.fp8`).

A product quantizes what it takes beside its weight, which is quantized once a step: a value that several products take,
in the first of them. The gradient of a weight takes what other products have quantized. What a product gathers may be
quantized before (`Runtime.fp8_gathers`; github NVIDIA/TransformerEngine, pytorch/module/base.py,
`grad_output_preprocess`; github pytorch/ao, float8/float8_tensor_parallel.py). The head stays in 16 bits: products that
make logits, or take their gradient (github NVIDIA/Megatron-LM, core/models/gpt/gpt_model.py, `output_layer`; github
pytorch/torchtitan, float8.py, the filter of "output").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from distir.executor.cost_model.fusion import alike
from distir.ir.function import Function, Op, Value
from distir.ir.host_runtime import Runtime
from distir.ir.type import Tensor


class EightBits(NamedTuple):
    """Of an op. `wide`: it is left in 16 bits. `sent`: it gathers in 8 bits. `quantized`: the numbers that a product
    quantizes, on a device; `turned`: the numbers of 8 bits that it transposes, where those are not the same."""

    wide: bool = False
    sent: bool = False
    quantized: int = 0
    turned: int = 0

    def moved(self, runtime: Runtime) -> float:
        """The bytes that are read and written for it beside the op."""
        return runtime.quantized_bytes * self.quantized + 2.0 * self.turned


SAME = EightBits()
"""Of an op that neither quantizes nor is left out."""


def eight_bits(f: Function, runtime: Runtime, products: Mapping[Op, Op]) -> dict[Op, EightBits]:
    """Of the ops of a function under a runtime with products in 8 bits; those that are not there are SAME. `products`:
    the product of each collective that has one (`beside_products`)."""
    found = dict.fromkeys(_heads(f), EightBits(wide=True))
    root: dict[Value, Value] = {}
    """Of views."""
    gathered: dict[Value, Op] = {}
    known: set[Value] = set()
    for op in f.ops:
        spec = op.spec
        if spec.alias and spec.bundle is None and op.inputs:
            v = op.inputs[0]
            root.update(dict.fromkeys(op.outputs, root.get(v, v)))
        elif op in products and products[op] in found and found[products[op]].wide:
            found[op] = EightBits(wide=True)
        elif op in products and runtime.fp8_gathers and spec.comm is not None and spec.comm.gathers:
            found[op] = EightBits(sent=True)
            gathered[op.outputs[0]] = op
        elif (
            spec.kernel == "product" and spec.weight is not None and op not in found and _matrix(op.inputs[spec.weight])
        ):
            quantized = turned = 0
            for k, v in enumerate(op.inputs):
                v = root.get(v, v)
                if k == spec.weight or v in known or (count := _numbers(v)) == 0:
                    continue
                known.add(v)
                if v in gathered:
                    quantized += _numbers(gathered[v].inputs[0])
                    turned += count
                else:
                    quantized += count
            if quantized:
                found[op] = EightBits(quantized=quantized, turned=turned)
    return found


def _heads(f: Function) -> list[Op]:
    """The products whose result, or one of whose operands, is that of a cross-entropy of the same function: logits, or
    their gradient, as it is or computed from it point by point."""
    found: list[Op] = []
    logits: set[Value] = set()
    for op in reversed(f.ops):
        if op.spec.logits is not None:
            logits.add(op.inputs[0])
        elif not logits.isdisjoint(op.outputs):
            if op.spec.kernel == "product":
                found.append(op)
            elif op.inputs and _passes(op, op.inputs[0]):
                logits.add(op.inputs[0])
    gradients: set[Value] = set()
    for op in f.ops:
        if op.spec.logits == "backward":
            gradients.add(op.outputs[0])
        elif not gradients.isdisjoint(op.inputs):
            if op.spec.kernel == "product":
                found.append(op)
            elif _passes(op, op.inputs[0]):
                gradients.update(op.outputs)
    return found


def _passes(op: Op, v: Value) -> bool:
    """Whether the op hands the numbers of an operand on, one by one."""
    if op.spec.alias:
        return op.spec.bundle is None
    return op.spec.comm is None and not op.spec.kernel and len(op.outputs) == 1 and alike(v, op.outputs[0])


def _matrix(v: Value) -> bool:
    return isinstance(v.type, Tensor) and len(v.type.shape) == 2


def _numbers(v: Value) -> int:
    """The numbers of 16 bits of a value on a device; 0 for a vector, such as a bias, and for other types."""
    t = v.type
    return math.prod(t.shape) if isinstance(t, Tensor) and t.dtype.size == 2 and len(t.shape) > 1 else 0
