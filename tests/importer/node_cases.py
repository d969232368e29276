"""The cases of ONNX's backend test of single ops: which of them distir imports, and computes as expected.

A case passes if it does so as given, or with its constant operands (shapes, axes, indices: see `constant_operands`) as
initializers, as exporters write them. `python -m tests.importer.node_cases` counts them by outcome and by reason, and
with `--write` writes the list of those that pass, `node_cases.txt`, which a test keeps: on each line the module, the
case, and `constants` if it passes only so.
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
ROUNDED = {"test_averagepool_2d_ceil_last_window_starts_on_pad": 5e-4}
"""Cases whose expected numbers are written with few digits: the tolerance, relative to the largest number."""
RANDOM = ("test_training_dropout", "test_training_dropout_default")
"""Cases whose expected numbers come from numpy's generator: distir has its own, and none outside training."""
REASONS = {
    r"element type (UINT16|UINT32|UINT64) is": "unsigned integers of 16 bits or more: torch does not add them",
    r"element type (U?INT[24]|FLOAT4\w+|FLOAT8\w+) is": "packed integers and floats of 8 bits or less",
    r"element type STRING is|TfIdf|StringNorm|texts": "texts",
    r"operands that are no tensors": "elements that onnx itself does not convert to arrays",
    r"is not a tensor of known rank": "sequences and optional values as inputs of a model",
    r"^output .* (is made by no node|is a sequence)": "sequences as outputs of a model",
    r"op (SequenceConstruct|SequenceInsert|Optional\w*) ": "sequences and optional values",
    r"opset 0 is|of domain": "ops of other domains: optimizers, trees, previews",
    r"opset 1 is": "opsets before 7: their broadcasting is another one",
    r"opset \d+ is not supported with": "graphs inside nodes of opsets before 13, which onnx does not convert",
    r"depends on data|of unknown size|op (NonMaxSuppression|Unique) ": "shapes that depend on data",
    r"op (RandomUniformLike|RandomNormalLike|Bernoulli) |Dropout: only": "random numbers that are results",
    r"op ImageDecoder ": "pictures in files",
    r"op (GridSample|RoiAlign|DeformConv|Col2Im|MaxUnpool|Det|TensorScatter) |the maxima": "no model yet",
    r"op (DFT|STFT|MelWeightMatrix) ": "spectra: models take them as inputs",
    r"op (ConvInteger|MatMulInteger|QLinearConv|BitCast) ": "quantized inference",
}
"""For each kind of refusal why it stays: a pattern of the message, without the names of nodes."""
FIRST = ("ConstantOfShape", "NonZero")
"""Ops whose first operand must be known at import: the shape of the result depends on it."""


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
    """The inputs that are no data: integers, truth values and single numbers; of the first input single numbers only
    (how often a loop runs, where a range begins), and what the ops in FIRST begin with."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    found = {name for n in graph.node if n.op_type == "Resize" for name in n.input[1:]}
    for k, info in enumerate(graph.input):
        t = info.type.tensor_type
        single = all(d.dim_value == 1 for d in t.shape.dim)
        if info.type.HasField("tensor_type") and (single or (t.elem_type not in floats and k > 0)):
            found.add(info.name)
    first = {n.input[0] for n in graph.node if n.input and n.op_type in FIRST}
    return found | first


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


def shortened(message: str) -> str:
    """The message without what differs from node to node."""
    message = re.sub(r"^(\w+) node '[^']*'", r"\1", message)
    return re.sub(r"'[^']*'", "_", message)[:110]


def reason(message: str) -> str:
    """Why a case of that message is not supported, or else the message."""
    short = shortened(message)
    return next((why for pattern, why in REASONS.items() if re.search(pattern, short)), short)


def listed() -> tuple[str, dict[str, dict[str, bool]]]:
    """The version of onnx with which the list was made, and for each module its cases: whether with constants."""
    head, *lines = LIST.read_text().splitlines()
    found: dict[str, dict[str, bool]] = {}
    for line in lines:
        module, name, *how = line.split()
        found.setdefault(module, {})[name] = bool(how)
    return head.split()[-1], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {LIST.name}")
    parser.add_argument("--all", action="store_true", help="print each case that does not pass")
    parser.add_argument("modules", nargs="*", help="of these modules only")
    options = parser.parse_args()
    ways: list[dict[str, Outcome]] = [{}, {}]
    lines = [f"# onnx {onnx.__version__}"]
    with tempfile.TemporaryDirectory() as folder:
        for module in options.modules or modules():
            for case in cases_of(module):
                for constants in (False, True):
                    ways[constants][case.name] = outcome(case, constants, Path(folder))
                given, fixed = [found[case.name].kind == PASSED for found in ways]
                if given or fixed:
                    lines.append(f"{module} {case.name}" + ("" if given else " constants"))
    for which, found in zip(("as given", "with constant operands as initializers"), ways, strict=True):
        print(f"{which}:", dict(collections.Counter(o.kind for o in found.values())))
    print(f"{len(lines) - 1} of {len(ways[0])} pass in one of these ways")
    left = {k: o for k, o in ways[1].items() if PASSED not in (o.kind, ways[0][k].kind)}
    for why, count in collections.Counter(reason(o.message) for o in left.values()).most_common():
        print(f"{count:5} {why}")
    for found in ways:
        for name, o in found.items():
            if o.kind in (WRONG, CRASHED) or (options.all and name in left):
                print(o.kind, name, o.message[:2000])
    if options.write:
        LIST.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
