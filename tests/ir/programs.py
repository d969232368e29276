"""Programs by hand for the tests of the IR: a sequential one, and a pipeline of two stages."""

from __future__ import annotations

from distir.ir import Device, Function, FunctionMaker, Mesh, Role, Value
from distir.ir.type import NOW, REPLICATE, SUM, Float, Int64, Placement, Shard, Tensor

AXES = {"mb": 2, "dp": 2, "tp": 2}
STAGE0 = Mesh([Device("gpu", i) for i in range(4)], AXES, name="stage0")
STAGE1 = Mesh([Device("gpu", i) for i in range(4, 8)], AXES, name="stage1")
BATCH, WIDTH, HIDDEN = 16, 8, 12
BY_BATCH = (Shard(0), Shard(0, 2))
"""A batch split over microbatches and over dp."""


def tensor(shape: tuple[int, ...], mesh: Mesh, *placements: Placement, piece: tuple[int, int] | None = None) -> Tensor:
    """A float tensor of that global shape, replicated along the axes that get no placement."""
    rest = (REPLICATE,) * (len(mesh.axes) - len(placements))
    return Tensor.whole(Float(), shape, mesh, (*placements, *rest), piece)


def sequential() -> Function:
    """y = relu(x w) + x, without types on purpose: `infer_types` gives them."""
    f = FunctionMaker("net")
    x = f.add_input_value("x", None, Role("data", batch=0))
    w = f.add_input_value("w", None, Role("parameter"))
    h = f.add_op("MatMul", "h", [x, w])
    h = f.add_op("Relu", "r", [h])
    f.set_outputs([f.add_op("Add", "y", [h, x])])
    return f.finalize()


def _forward() -> Function:
    """On stage 0: cuts its microbatch, then two matrix products split over tp, reduced once."""
    f = FunctionMaker("fwd0")
    w0 = f.add_input_value("w0", tensor((WIDTH, 3 * HIDDEN), STAGE0, REPLICATE, REPLICATE, Shard(1, 3)))
    w1 = f.add_input_value("w1", tensor((3 * HIDDEN, WIDTH), STAGE0, REPLICATE, REPLICATE, Shard(0, 3)))
    x = f.add_input_value("x", tensor((BATCH, WIDTH), STAGE0, REPLICATE, Shard(0, 2), REPLICATE))
    cut = f.add_op("LocalSlice", "x.mb", [x], {"axis": "mb", "dim": 0})
    h = f.add_op("Relu", "h", [f.add_op("MatMul", "a", [cut, w0])])
    y = f.add_op("MatMul", "y", [h, w1])
    f.set_outputs([f.add_op("MPIAllreduce", "y", [y], {"axis": "tp"})])
    return f.finalize()


def _backward(last: bool) -> Function:
    """On stage 1: loss = sum (h w)^2 / 2 and its gradient in w; the last one adds up all and reduces over dp."""
    f = FunctionMaker("bwd1.last" if last else "bwd1")
    w = f.add_input_value("w", tensor((WIDTH, HIDDEN), STAGE1))
    h = f.add_input_value("h", tensor((BATCH, WIDTH), STAGE1, *BY_BATCH))
    total = []
    if last:
        sums = tensor((WIDTH, HIDDEN), STAGE1, SUM, SUM, REPLICATE, piece=(0, NOW))
        count = tensor((), STAGE1, SUM, SUM, REPLICATE, piece=(0, NOW))
        total = [f.add_input_value("dw.sum", sums), f.add_input_value("loss.sum", count)]
    z = f.add_op("MatMul", "z", [h, w])
    forward = f.ops[-1]
    square = f.add_op("Mul", "square", [z, z])
    loss = f.add_op("ReduceSum", "loss", [square], {"axes": (0, 1), "keepdims": 0})
    rows = f.add_op("Transpose", "h.t", [h], {"perm": (1, 0)}, of=forward)
    dw = f.add_op("MatMul", "dw", [rows, z], of=forward)
    outputs = [dw, loss]
    if last:
        outputs = [f.add_op("Accumulate", v.name, [s, v]) for s, v in zip(total, outputs, strict=True)]
        outputs = [f.add_op("MPIAllreduce", v.name, [v], {"axis": "dp"}) for v in outputs]
    f.set_outputs(outputs)
    return f.finalize()


def _update() -> Function:
    """On stage 1, once a step: all microbatches added up (they have been, one by one), then w - dw / 8."""
    f = FunctionMaker("update1")
    w = f.add_input_value("w", tensor((WIDTH, HIDDEN), STAGE1))
    dw = f.add_input_value("dw", tensor((WIDTH, HIDDEN), STAGE1, SUM, REPLICATE, REPLICATE, piece=(0, 2)))
    loss = f.add_input_value("loss", tensor((), STAGE1, SUM, REPLICATE, REPLICATE, piece=(0, 2)))
    dw = f.add_op("MPIAllreduce", "dw", [dw], {"axis": "mb"})
    loss = f.add_op("MPIAllreduce", "loss", [loss], {"axis": "mb"})
    attributes = {"value": (-0.125,), "shape": (), "dtype": Float(), "device": STAGE1}
    rate = f.add_op("Constant", "rate", [], attributes)
    step = f.add_op("Mul", "step", [dw, rate])
    f.set_outputs([f.add_op("Add", "w.new", [w, step]), loss])
    return f.finalize()


def pipeline() -> Function:
    """Two stages, two microbatches: `tests/golden/pipeline.distir` is its text."""
    f = FunctionMaker("main")
    fwd0, first, last, update = _forward(), _backward(False), _backward(True), _update()
    w0, w1, x = [f.add_input_value(v.name, v.type, Role("parameter")) for v in fwd0.inputs]
    x.role = Role("data", batch=0)
    w = f.add_input_value("w", first.inputs[0].type, Role("parameter", source=(WIDTH, HIDDEN - 1)))
    ids = f.add_input_value("ids", Tensor(Int64(), (4,), Device("host", 0)), Role("constant"))
    f.add_op("MPIBroadcast", "ids.0", [ids], {"to": STAGE0})
    grads: list[Value] = []
    for mb in range(2):
        y = f.add_op("Call", "y", [w0, w1, x], {"mb": mb}, [fwd0])
        y = f.add_op("Send", "y", [y], {"to": STAGE1})
        grads = list(f.add_op("Call", None, [w, y, *grads], {"mb": mb}, [last if grads else first], ["dw", "loss"]))
    new, loss = f.add_op("Call", None, [w, *grads], {}, [update], ["w.new", "loss"])
    f.set_outputs([loss, new])
    f.updates[new], f.sources[new] = w, (WIDTH, HIDDEN - 1)
    return f.finalize()
