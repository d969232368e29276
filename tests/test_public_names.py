"""The names that programs may rely on, and what is loaded with them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = {
    "distir": [
        "AdamW", "Comparison", "CostModel", "Data", "Device", "Explanation", "Function", "FunctionMaker", "Inspection",
        "Mesh", "Model", "Plan", "PlanDifference", "PlanTable", "Prediction", "RunCallbacks", "RunOptions", "RunResult",
        "SGD", "Topology", "compare", "cpprint", "diff", "distribute", "explain", "inspect", "load", "parse", "pformat",
        "plan", "preloaded", "run", "same", "simulate", "validate", "verify",
    ],
    "distir.ir": [
        "Device", "Function", "FunctionMaker", "Mesh", "Op", "Topology", "Value", "cpprint", "parse", "pformat",
        "validate", "verify",
    ],
    "distir.ir.type": ["Bool", "Float", "Float16", "Float32", "Float64", "BFloat16", "Int32", "Int64", "Tensor"],
    "distir.importer": ["import_from_onnx", "parse_tensor_from_file"],
    "distir.executor": ["SequentialExecutor", "Simulator", "infer_types"],
    "distir.executor.cost_model": ["CostModel"],
    "distir.transforms": ["PipeDreamScheduler", "parallel_transform_3d", "steady_state_transform"],
    "distir.models": ["gpt", "mlp"],
    "distir.viz": ["curves", "memory", "timeline"],
}  # fmt: skip


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_public_name(module, name):
    found = getattr(importlib.import_module(module), name)
    assert not isinstance(found, type(sys)), f"{module}.{name} is a module"


def test_all_and_dir_agree():
    import distir

    assert set(distir.__all__) == set(NAMES["distir"])
    assert set(distir.__all__) <= set(dir(distir))
    with pytest.raises(AttributeError, match="nothing"):
        distir.nothing  # noqa: B018


def test_the_names_of_the_ir_are_functions_after_importing_their_modules():
    """`distir.ir.verify` is a module, too."""
    import distir.ir
    import distir.ir.validate
    import distir.ir.verify  # noqa: F401

    code = "import distir.ir.verify, distir.ir.validate, distir.ir as ir; assert callable(ir.verify), ir.verify"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_the_founding_notebook_does_first():
    """Its imports and its way of building a program."""
    from distir.executor import SequentialExecutor, Simulator, infer_types
    from distir.executor.cost_model import CostModel
    from distir.ir import FunctionMaker, Topology, pformat
    from distir.ir.type import Float, Tensor

    maker = FunctionMaker(name="mlp")
    topology = Topology()
    device = topology.add_device("gpu", throughput=1e14, dram_bandwidth=1.2e12, kernel_launch_overhead=0)
    x = maker.add_input_value("x", Tensor(dtype=Float(), shape=(4, 4), device=device))
    w = maker.add_input_value("w", Tensor(dtype=Float(), shape=(4, 4), device=device))
    y = maker.add_op("MatMul", "y", inputs=[x, w], output_names=["y"])
    maker.add_op("Relu", "a", inputs=[y], output_names=["a"])
    assert maker.ops[1].inputs[0] is y
    function = maker.finalize()
    assert [v.name for v in function.outputs] == ["a"]
    function = infer_types(function, function.inputs)
    simulation = Simulator(CostModel(topology)).interpret(function, (v.type for v in function.inputs))
    assert simulation.timestamps[device] > 0
    assert len(simulation.trace) == len(function.ops)
    (a,) = SequentialExecutor("numpy").compute(function, [[[1.0] * 4] * 4, [[-1.0] * 4] * 4])
    assert (a == 0).all()
    assert "MatMul(%x, %w)" in pformat(function)
