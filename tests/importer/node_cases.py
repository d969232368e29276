"""The cases of ONNX's backend test of single ops: which of them distir imports, and computes as expected.

A case passes if it does so as given, or with its constant operands (shapes, axes, indices: see `constant_operands`) as
initializers, as exporters write them. `python -m tests.importer.node_cases` counts them by outcome and by reason, and
with `--write` writes the list of those that pass, `node_cases.txt`, which a test keeps.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import pkgutil
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from distir.executor.reference.sequential import SequentialExecutor
from distir.importer import import_from_onnx
from distir.ir import verify
from distir.ir.errors import DistirError

LIST = Path(__file__).with_name("node_cases.txt")
PASSED, REFUSED, WRONG, CRASHED = "passed", "refused", "wrong", "crashed"
ULPS = 8
"""The most by which a float may differ from the expected one, in units in the last place of the result's largest."""
ROUNDED = {}
"""Cases whose expected numbers are written with few digits: the tolerance, relative to the largest number."""
FIRST = ("ConstantOfShape", "Range", "Optional", "NonZero", "Unique", "Compress", "SequenceEmpty", "Loop", "If")
"""Ops whose first operand, too, must be known at import."""


class Outcome(NamedTuple):
    """`kind` is one of PASSED, REFUSED, WRONG and CRASHED; `message` says why it did not pass."""

    kind: str
    message: str = ""


@functools.cache
def modules() -> tuple[str, ...]:
    """The names of the modules that have the cases, one an op or two."""
    from onnx.backend.test.case import node

    prefix = f"{node.__name__}."
    found = [m.name.removeprefix(prefix) for m in pkgutil.walk_packages(node.__path__, prefix) if not m.ispkg]
    return tuple(sorted(found))


@functools.cache
def cases_of(module: str) -> list[Any]:
    """The cases of one module; all modules together take about ten seconds."""
    from onnx.backend.test.case import node

    known = node._NodeTestCases
    before = len(known)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node.__name__}.{module}")
    return known[before:]


def constant_operands(graph: onnx.GraphProto) -> set[str]:
    """The inputs that are no data: integers, booleans and single numbers that are not the first operand of a node."""
    types = {i.name: i.type.tensor_type for i in graph.input if i.type.HasField("tensor_type")}
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    first = {n.input[0] for n in graph.node if n.input and n.op_type not in FIRST}
    given = {name for n in graph.node if n.op_type == "Resize" for name in n.input[1:]}
    return {
        name
        for name, t in types.items()
        if name not in first and (t.elem_type not in floats or not t.shape.dim or name in given)
    }


def with_initializers(model: onnx.ModelProto, names: Iterable[str], arrays: dict[str, Any]) -> onnx.ModelProto:
    """The model with these inputs as initializers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    kept = [i for i in model.graph.input if i.name not in names]
    del result.graph.input[:]
    result.graph.input.extend(kept)
    result.graph.initializer.extend([numpy_helper.from_array(np.asarray(arrays[name]), name) for name in names])
    return result


def difference(got: Sequence[Any], want: Sequence[Any], ulps: float, rounded: float = 0.0) -> str:
    """What is wrong with the results; nothing if they are as expected."""
    if len(got) != len(want):
        return f"{len(got)} results, expected {len(want)}"
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        w = np.asarray(w)
        if (g.dtype, g.shape) != (w.dtype, w.shape):
            return f"result {k} is {g.dtype}{list(g.shape)}, expected {w.dtype}{list(w.shape)}"
        if w.dtype.kind in "biu":
            if not np.array_equal(g, w):
                return f"result {k} differs"
            continue
        import ml_dtypes

        g, w, eps = g.astype(np.float64), w.astype(np.float64), float(ml_dtypes.finfo(w.dtype).eps)
        finite = np.isfinite(w)
        if not np.array_equal(g[~finite], w[~finite], equal_nan=True):
            return f"result {k} differs where infinite or no number"
        size = max(
            float(np.max(np.abs(w[finite]), initial=0.0)), float(ml_dtypes.finfo(np.asarray(want[k]).dtype).tiny)
        )
        error = float(np.max(np.abs(g[finite] - w[finite]), initial=0.0)) / size
        if not error <= max(ulps * eps, rounded):
            return f"result {k} differs by {error / eps:.3g} ulp, {error:.3g} of the largest"
    return ""


def outcome(case: Any, constants: bool, folder: Path) -> Outcome:
    """What becomes of a case: as given, or with its constant operands as initializers."""
    model, path = case.model, folder / "case.onnx"
    for inputs, outputs in case.data_sets:
        given = [numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x for x in inputs]
        outputs = [numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x for x in outputs]
        feeds = dict(zip([i.name for i in model.graph.input], given, strict=True))
        chosen = constant_operands(model.graph) if constants else set()
        try:
            proto = with_initializers(model, [name for name in feeds if name in chosen], feeds)
        except Exception as e:  # operands that are no tensors
            return Outcome(REFUSED, f"operands that are no tensors: {type(e).__name__}")
        path.write_bytes(proto.SerializeToString())
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                function, arrays = import_from_onnx(path)
                verify(function)
                arrays = {v: arrays[v] if v in arrays else np.asarray(feeds[v.name]) for v in function.inputs}
                got = SequentialExecutor().compute(function, arrays)
        except DistirError as e:
            return Outcome(REFUSED, e.message.replace(f"{path}: ", ""))
        except Exception:
            return Outcome(CRASHED, traceback.format_exc())
        wrong = difference(got, outputs, ULPS, ROUNDED.get(case.name, 0.0))
        if wrong:
            return Outcome(WRONG, wrong)
    return Outcome(PASSED)


def reason(message: str) -> str:
    """The message without what differs from node to node."""
    message = re.sub(r"^(\w+) node '[^']*'", r"\1", message)
    return re.sub(r"'[^']*'", "_", message)[:110]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {LIST.name}")
    parser.add_argument("--all", action="store_true", help="print each case that does not pass")
    parser.add_argument("modules", nargs="*", help="of these modules only")
    options = parser.parse_args()
    both: list[dict[str, Outcome]] = [{}, {}]
    with tempfile.TemporaryDirectory() as folder:
        for module in options.modules or modules():
            for case in cases_of(module):
                for constants in (False, True):
                    both[constants][case.name] = outcome(case, constants, Path(folder))
    for which, found in zip(("as given", "with constant operands as initializers"), both, strict=True):
        print(which, dict(collections.Counter(o.kind for o in found.values())))
    passed = sorted(k for k in both[0] if PASSED in (both[0][k].kind, both[1][k].kind))
    left = {k: both[1][k] if both[1][k].kind != PASSED else both[0][k] for k in both[0] if k not in passed}
    print(f"{len(passed)} of {len(both[0])} pass in one of these ways")
    for kind in (WRONG, CRASHED):
        for found in both:
            for name, o in found.items():
                if o.kind == kind:
                    print(kind, name, o.message)
    for why, count in collections.Counter(reason(o.message) for o in left.values()).most_common():
        print(f"{count:5} {why}")
    if options.all:
        for name, o in left.items():
            print(name, o.kind, o.message[:300])
    if options.write:
        LIST.write_text("".join(f"{name}\n" for name in passed))


if __name__ == "__main__":
    main()
