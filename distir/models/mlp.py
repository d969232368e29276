"""A multi-layer perceptron with its loss and a backward pass written by hand: the program of the founding notebook."""

from __future__ import annotations

from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import DType, Float32, Tensor


def mlp(layers: int, batch: int, width: int, dtype: DType = Float32) -> Function:
    """Forward and backward pass of `layers` square layers, each a MatMul and a Relu.

    Inputs: `x` and the target `z`, (batch, width); weights `wA`, `wB`, ... (width, width). Outputs: the loss of each
    element, (batch, width), whose sum is the mean squared error over samples; then the gradient of each weight.
    """
    maker = FunctionMaker("mlp")
    x = maker.add_input_value("x", Tensor(dtype, (batch, width)), Role("data", 0))
    z = maker.add_input_value("z", Tensor(dtype, (batch, width)), Role("data", 0))
    square = Tensor(dtype, (width, width))
    weights = [maker.add_input_value(f"w{chr(ord('A') + i)}", square, Role("parameter")) for i in range(layers)]
    inputs: list[Value] = []
    a = x
    for i, w in enumerate(weights):
        inputs.append(a)
        y = maker.add_op("MatMul", f"y{i}", [a, w])
        a = maker.add_op("Relu", f"a{i}", [y])
    loss = maker.add_op("Loss", "l", [a, z], {"N": batch})
    d = maker.add_op("LossGrad", "dl", [a, z], {"N": batch})
    gradients: list[Value] = []
    for i in reversed(range(layers)):
        d = maker.add_op("ReluGrad", f"dy{i}", [a, d])
        a = inputs[i]
        d, dw = maker.add_op("MatMulGrad", None, [a, weights[i], d], output_names=[f"da{i}", f"d{weights[i].name}"])
        gradients.append(dw)
    maker.set_outputs([loss, *reversed(gradients)])
    return maker.finalize()
