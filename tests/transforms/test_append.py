"""Functions rebuilt with some of their ops replaced."""

from __future__ import annotations

import pytest

from distir.ir import Function, FunctionMaker, Op, Value
from distir.ir.type import Float64, Tensor
from distir.ir.verify import verify
from distir.transforms.append import append, rebuilt


def chain(ops: int) -> Function:
    f = FunctionMaker("chain")
    x = f.add_input_value("x", Tensor(Float64, (4,)))
    for k in range(ops):
        x = f.add_op("Exp", f"y{k}", [x])
    f.set_outputs([x])
    return f.finalize()


@pytest.mark.parametrize("at", [0, 2, 4])
def test_what_is_before_a_replaced_op_keeps_its_names(at: int) -> None:
    """What replaces it asks for the name of the op before, and what comes after takes its results."""
    function = chain(5)
    old = function.ops[at]

    def replaced(maker: FunctionMaker, op: Op, env: dict[Value, Value], stages: dict[Op, int]) -> bool:
        if op is not old:
            return False
        names, types = [op.inputs[0].name], [v.type for v in op.outputs]
        env[op.outputs[0]] = append(maker, op.spec, op.inputs, op.attributes, names, types)[0]
        return True

    found, stages = rebuilt(function, dict.fromkeys(function.ops, 1), replaced)
    verify(found)
    assert [op.outputs[0].name for op in found.ops] == [
        f"{old.inputs[0].name}.1" if k == at else f"y{k}" for k in range(5)
    ]
    assert found.ops[:at] == function.ops[:at]
    assert [v for op in found.ops[1:] for v in op.inputs] == [v for op in found.ops[:-1] for v in op.outputs]
    assert stages == {op: 1 for k, op in enumerate(found.ops) if k != at}
