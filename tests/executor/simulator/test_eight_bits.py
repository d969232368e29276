"""What is in 8 bits under a runtime that quantizes, and what the simulator makes of it."""

from __future__ import annotations

from dataclasses import replace

from distir.executor import Simulator
from distir.executor.cost_model import CostModel
from distir.executor.cost_model.seconds import in_8_bits
from distir.executor.simulator.beside_products import beside_products
from distir.executor.simulator.eight_bits import SAME, EightBits, eight_bits
from distir.hardware import load_cluster
from distir.ir import Function, FunctionMaker, Mesh
from distir.ir.host_runtime import Runtime
from distir.ir.type import BFloat16, Float32, Int64, Shard, Tensor

TOKENS, WIDTH, CLASSES, DEVICES = 512, 256, 1024, 8
GATHERS = Runtime("fp8", fp8=True, fp8_gathers=True, quantized_bytes=7.0)


def layer() -> Function:
    """Two products of gathered activations, one of the sum of both, the head, the loss, and the gradients of logits and
    head."""
    mesh = Mesh(load_cluster("dgx-h100").devices, {"tp": DEVICES}, "m")
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor.whole(BFloat16, (TOKENS, WIDTH), mesh, [Shard(0)]))
    weights = [f.add_input_value(n, Tensor.whole(BFloat16, (WIDTH, WIDTH), mesh, [Shard(1)])) for n in "qk"]
    down = f.add_input_value("down", Tensor.whole(BFloat16, (WIDTH, WIDTH), mesh, [Shard(0)]))
    head = f.add_input_value("head", Tensor.whole(BFloat16, (WIDTH, CLASSES), mesh))
    labels = f.add_input_value("labels", Tensor.whole(Int64, (TOKENS,), mesh))
    slope = f.add_input_value("slope", Tensor.whole(Float32, (TOKENS,), mesh))
    whole = f.emit("MPIAllgather", x, axis="tp")
    q, k = (f.emit("MatMul", whole, w) for w in weights)
    y = f.emit("MPIReduceScatter", f.emit("MatMul", f.emit("Add", q, k), down), axis="tp", dim=0)
    z = f.emit("MPIAllgather", y, axis="tp")
    logits = f.emit("Reshape", f.emit("MatMul", z, head), shape=(TOKENS, CLASSES))
    _, lse = f.emit("CrossEntropy", logits, labels, result=BFloat16)
    gradient = f.emit("CrossEntropyGrad", logits, labels, lse, slope)
    of_z = f.emit("MatMul", gradient, f.emit("Transpose", head, perm=(1, 0)))
    f.set_outputs([of_z, f.emit("MatMulGradWeight", z, gradient)])
    return f.finalize()


def found(f: Function, runtime: Runtime) -> list[tuple[str, EightBits]]:
    eights = eight_bits(f, runtime, beside_products(f))
    return [(op.spec.name, eights.get(op, SAME)) for op in f.ops if op.spec.kernel or op.spec.comm]


def test_a_value_is_quantized_once_and_the_head_is_left_in_16_bits() -> None:
    wide = EightBits(wide=True)
    assert found(layer(), replace(GATHERS, fp8_gathers=False)) == [
        ("MPIAllgather", SAME),
        ("MatMul", EightBits(quantized=TOKENS * WIDTH)),
        ("MatMul", SAME),  # of what the first has quantized
        ("MatMul", EightBits(quantized=TOKENS * WIDTH // DEVICES)),
        ("MPIReduceScatter", SAME),
        ("MPIAllgather", wide),
        ("MatMul", wide),
        ("MatMul", wide),
        ("MatMulGradWeight", wide),
    ]


def test_what_a_product_gathers_is_quantized_before() -> None:
    """On each device its part; all of it is transposed after."""
    gather, first, *_ = found(layer(), GATHERS)
    assert gather == ("MPIAllgather", EightBits(sent=True))
    assert first == ("MatMul", EightBits(quantized=TOKENS * WIDTH // DEVICES, turned=TOKENS * WIDTH))
    assert first[1].moved(GATHERS) == 7 * TOKENS * WIDTH / DEVICES + 2 * TOKENS * WIDTH
    assert ("MPIAllgather", EightBits(wide=True)) in found(layer(), GATHERS)


def test_the_step_has_8_bits_where_they_are() -> None:
    """Op by op: gathers, quantized operands, and the head; what a search takes as a bound is not above it."""
    topology, f = load_cluster("dgx-h100"), layer()
    device, group = topology.devices[0], topology.group(topology.devices)
    narrow, plain = (CostModel(topology, runtime=r) for r in (GATHERS, replace(GATHERS, fp8=False)))
    eights = eight_bits(f, GATHERS, beside_products(f))
    want = dict[str, list[float]]()
    for op in f.ops:
        ins, outs = [v.type for v in op.inputs], [v.type for v in op.outputs]
        eight = eights.get(op, SAME)
        if op.spec.comm is not None:
            in_16 = plain.collective(op.spec, op.attributes, ins, outs, group)
            in_8 = plain.collective(op.spec, op.attributes, in_8_bits(ins), in_8_bits(outs), group)
            seconds = in_8 if eight.sent else in_16
            assert (seconds < in_16) == eight.sent
            assert narrow.least(op.spec, op.attributes, ins, outs, group) <= seconds
        elif narrow.free(op.spec, op.attributes, ins):
            continue
        else:
            cost = plain if eight.wide else narrow
            seconds = cost.compute(op.spec, op.attributes, ins, outs, device, moved=eight.moved(GATHERS))
        want.setdefault(op.spec.name, []).append(seconds)
    events = Simulator(narrow).interpret(f).trace
    for name, seconds in want.items():
        took = [e.dur for e in sorted(events, key=lambda e: e.ts) if e.name == name and e.pid == events[0].pid]
        assert [t for t in took if t] == seconds
