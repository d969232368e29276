"""What README and CONTRIBUTING say holds: their code runs, the folders exist. Commands: `tests/docs/test_pages.py`."""

import re
from pathlib import Path

import numpy as np
import pytest

from distir.executor.reference.sequential import SequentialExecutor
from distir.importer import import_from_onnx
from distir.ir import Function, FunctionMaker, Op, Value, parse, pformat, same, verify
from distir.ir import spec as specs
from distir.ir.type import Float64, Tensor
from distir.ops.rules import points
from distir.ops.rules import same as same_dtype

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAIN = (
    "pip install -e . && distir run examples/gpt2-tiny.onnx --dim batch=8 --loss cross-entropy --optimizer adamw "
    "--dp 2 --pp 2 --microbatches 4 --steps 5 --check"
)
TESTS = "pip install -e '.[dev]' && pytest"


def blocks(text, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_two_commands_are_given_exactly():
    lines = [line for block in blocks(README, "bash") for line in block.splitlines()]
    assert MAIN in lines
    assert TESTS in lines
    assert TESTS in (ROOT / ".ci" / "run").read_text()


def test_python_of_the_readme_runs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (code,) = blocks(README, "python")
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert len(re.findall(r"^dp \d.*: [\d.]+ ms, [\d.]+ MiB$", out, re.MULTILINE)) == 3
    assert "check passed" in out


def test_it_takes_five_minutes_to_read():
    assert len(README.splitlines()) <= 150
    assert re.findall(r"!\[.+\]\((docs/images/\S+)\)", README) == ["docs/images/timeline.svg"]


def test_the_map_is_complete():
    folders = re.findall(r"^\| `([\w/]+)` \|", README, re.MULTILINE)
    assert all((ROOT / folder).is_dir() for folder in folders)
    parts = {f"distir/{p.parent.name}" for p in (ROOT / "distir").glob("*/__init__.py")}
    assert parts <= set(folders)


def test_exit_codes_are_those_of_the_errors():
    from distir.ir import errors

    page = (ROOT / "docs" / "command-line.md").read_text()
    said = {int(code) for code in re.findall(r"^\| (\d) \|", page, re.MULTILINE)}
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.DistirError)]
    assert said == {0} | {k.exit_code for k in kinds}


# ---------------------------------------------------------------- add an op


@pytest.fixture
def define():
    """Defines the op of CONTRIBUTING, for as long as the test runs, and gives its samples; `change` edits the text."""
    before = dict(specs._registry)

    def define(change=lambda text: text):
        from tests.ops import samples

        specs._registry.clear()
        specs._registry.update(before)
        (code,), (lines,) = blocks(CONTRIBUTING, "python op"), blocks(CONTRIBUTING, "python samples")
        names = {"op": specs.op, "points": points, "same": same_dtype}
        exec(compile(change(code), "CONTRIBUTING.md", "exec"), names)
        return eval(f"[{lines}]", {"sample": samples.sample, "real": samples.real})

    yield define
    specs._registry.clear()
    specs._registry.update(before)


def test_add_an_op(define):
    """The samples pass the matrix test: all its aspects."""
    from tests.ops import test_matrix

    found = define()
    assert [s.op for s in found] == ["HardSwish", "HardSwishGrad"]
    for s in found:
        test_matrix.test_inferred_type_is_the_evaluated_one(s, Float64)
        test_matrix.test_torch_computes_the_same(s, Float64)
        test_matrix.test_placements(s)
        test_matrix.test_mappings_run_both_ways(s)
        test_matrix.test_prints_and_parses_back(s)
    test_matrix.test_gradient_is_the_finite_difference(found[0])


def test_a_wrong_op_is_found(define):
    """A wrong gradient, and a partial sum let through where the op is not linear."""
    from tests.ops import test_matrix

    forward, _ = define(lambda text: text.replace("x / 3 + 0.5", "x / 3 + 0.4"))
    with pytest.raises(AssertionError):
        test_matrix.test_gradient_is_the_finite_difference(forward)
    _, backward = define(lambda text: text.replace("linear=[{1}]", "linear=[{0}]"))
    with pytest.raises(AssertionError):
        test_matrix.test_placements(backward)


def test_import_the_op(define, tmp_path):
    define()
    import onnx
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    from distir.importer.node import Node, Result
    from distir.importer.registry import RULES, rule

    (code,) = blocks(CONTRIBUTING, "python rule")
    known = dict(RULES)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 6]) for n in "xy")
    graph = helper.make_graph([helper.make_node("HardSwish", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    try:
        exec(compile(code, "CONTRIBUTING.md", "exec"), {"rule": rule, "Node": Node, "Result": Result})
        function, _ = import_from_onnx(tmp_path / "m.onnx")
    finally:
        RULES.clear()
        RULES.update(known)
    assert [op.op_type for op in function.ops] == ["HardSwish"]
    array = np.random.default_rng(0).uniform(-5, 5, (4, 6)).astype(np.float32)
    (want,) = ReferenceEvaluator(str(tmp_path / "m.onnx")).run(None, {"x": array})
    (got,) = SequentialExecutor().compute(function, [array])
    np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- add a pass


def test_add_a_pass():
    names = {
        "Function": Function, "FunctionMaker": FunctionMaker, "Op": Op, "Value": Value, "Tensor": Tensor,
        "Float64": Float64, "SequentialExecutor": SequentialExecutor, "lookup": specs.lookup, "np": np,
        "parse": parse, "pformat": pformat, "same": same, "verify": verify,
    }  # fmt: skip
    (code,), (test,) = blocks(CONTRIBUTING, "python pass"), blocks(CONTRIBUTING, "python test")
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    exec(compile(test, "CONTRIBUTING.md", "exec"), names)
    names["test_without_identities"]()
    names["without_identities"] = lambda function: function
    with pytest.raises(AssertionError):  # the test can fail
        names["test_without_identities"]()
