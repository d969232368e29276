"""Import of mutated models: no traceback, no hang, no more than 1 GiB.

    python -m tests.importer.mutations SECONDS [SEED]

A process of its own changes bytes and fields of models at random, imports each, and verifies what it imported. It may
take `MEMORY` bytes more than it begins with, and `PATIENCE` seconds for a model. A failure prints the model's seed and
what was changed; `repeat(seed)` imports it again.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnx

from distir.importer import import_from_onnx, symbolic_dims
from distir.importer.survey import Survey, survey
from distir.ir import verify
from distir.ir.errors import DistirError
from tests.importer.node_cases import cases_of, modules

ROOT = Path(__file__).parents[2]
MEMORY = 1 << 30
"""The most address space that imports may take, beyond that of the libraries, in bytes."""
PATIENCE = 20
"""The most seconds for one model."""
_NUMBERS = (0, 1, -1, 2, 3, 7, 64, 65, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63))
_SHARE_OF_NODE_CASES = 0.5

Mutation = Callable[[random.Random, onnx.ModelProto], str]


@cache
def bases() -> list[bytes]:
    """The example models, their large weights outside, and each case of ONNX's backend test of single ops."""
    found: list[bytes] = []
    for name in ("gpt2-tiny.onnx", "mlp.onnx"):
        proto = onnx.load(ROOT / "examples" / name)
        for t in proto.graph.initializer:
            if len(t.raw_data) > 64:
                t.ClearField("raw_data")
                t.data_location = onnx.TensorProto.EXTERNAL
                t.external_data.add(key="location", value="w.bin")
        found.append(proto.SerializeToString())
    for module in modules():
        found += [case.model.SerializeToString() for case in cases_of(module) if case.model is not None]
    return found


def _bytes(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Some bytes changed, a part cut out, or a part repeated."""
    new = bytearray(data)
    kind = rng.choice(("change", "change", "change", "cut", "repeat"))
    at = rng.randrange(len(new))
    if kind == "change":
        for _ in range(rng.randint(1, 4)):
            new[rng.randrange(len(new))] = rng.randrange(256)
    elif kind == "cut":
        del new[at : at + rng.randint(1, 64)]
    else:
        new[at:at] = new[at : at + rng.randint(1, 64)]
    return bytes(new), f"bytes {kind}"


def _attribute(rng: random.Random, model: onnx.ModelProto) -> str:
    """An attribute has another number, or is gone."""
    node = rng.choice(model.graph.node)
    if not node.attribute:
        return ""
    a = rng.choice(node.attribute)
    if rng.random() < 0.1:
        node.attribute.remove(a)
        return f"{node.op_type} without an attribute"
    if a.ints and rng.random() < 0.8:
        if rng.random() < 0.3:
            a.ints.append(rng.choice(_NUMBERS))
        else:
            a.ints[rng.randrange(len(a.ints))] = rng.choice(_NUMBERS)
    elif a.type == onnx.AttributeProto.FLOAT:
        a.f = rng.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))
    elif a.type == onnx.AttributeProto.STRING:
        a.s = rng.choice((b"", b"NOTSET", b"SAME_UPPER", b"ij,jk", b"linear", b"\xff"))
    else:
        a.i = rng.choice(_NUMBERS)
    return f"{node.op_type}.{a.name}"


def _operand(rng: random.Random, model: onnx.ModelProto) -> str:
    """A node reads another value, one less or one more."""
    graph = model.graph
    names = [v.name for v in (*graph.input, *graph.initializer)] + [o for n in graph.node for o in n.output] + [""]
    node = rng.choice(graph.node)
    if not node.input or rng.random() < 0.2:
        node.input.append(rng.choice(names))
    elif rng.random() < 0.2:
        node.input.pop(rng.randrange(len(node.input)))
    else:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    return f"{node.op_type}'s operands"


def _op(rng: random.Random, model: onnx.ModelProto) -> str:
    """A node has another op."""
    node = rng.choice(model.graph.node)
    before = node.op_type
    node.op_type = rng.choice(_op_types())
    return f"{before} is {node.op_type}"


@cache
def _op_types() -> list[str]:
    return sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})


def _shape(rng: random.Random, model: onnx.ModelProto) -> str:
    """An input or an initializer has another size, or another type."""
    graph = model.graph
    of = [*graph.input, *graph.initializer]
    if not of:
        return ""
    v: Any = rng.choice(of)
    if isinstance(v, onnx.TensorProto):
        if v.dims and rng.random() < 0.7:
            v.dims[rng.randrange(len(v.dims))] = rng.choice(_NUMBERS)
        else:
            v.data_type = rng.randint(0, 24)
        return f"initializer {v.name}"
    t = v.type.tensor_type
    if t.shape.dim and rng.random() < 0.7:
        d = rng.choice(t.shape.dim)
        d.dim_value = rng.choice(_NUMBERS)
    elif rng.random() < 0.5:
        t.elem_type = rng.randint(0, 24)
    else:
        t.shape.dim.add(dim_value=rng.choice(_NUMBERS))
    return f"input {v.name}"


def _number(rng: random.Random, model: onnx.ModelProto) -> str:
    """An integer that is known at import, such as a shape, has another element."""
    of = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT64 and len(t.raw_data) >= 8]
    if not of:
        return _constant_input(rng, model)
    t = rng.choice(of)
    k = rng.randrange(len(t.raw_data) // 8)
    data = bytearray(t.raw_data)
    data[8 * k : 8 * k + 8] = rng.choice(_NUMBERS).to_bytes(8, "little", signed=True)
    t.raw_data = bytes(data)
    return f"a number of {t.name}"


def _constant_input(rng: random.Random, model: onnx.ModelProto) -> str:
    """An input of integers becomes an initializer of random numbers."""
    graph = model.graph
    of = [i for i in graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.INT64]
    of = [i for i in of if all(0 < d.dim_value < 100 for d in i.type.tensor_type.shape.dim)]
    if not of:
        return ""
    info = rng.choice(of)
    shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
    count = 1
    for n in shape:
        count *= n
    if count > 1000:
        return ""
    numbers = [rng.choice(_NUMBERS) if rng.random() < 0.3 else rng.randint(-2, 6) for _ in range(count)]
    numbers = [max(-(1 << 63), min((1 << 63) - 1, n)) for n in numbers]
    graph.initializer.append(onnx.helper.make_tensor(info.name, onnx.TensorProto.INT64, shape, numbers))
    graph.input.remove(info)
    return f"{info.name} is an initializer"


def _nodes(rng: random.Random, model: onnx.ModelProto) -> str:
    """A node is gone, there twice, or elsewhere."""
    nodes = list(model.graph.node)
    k = rng.randrange(len(nodes))
    kind = rng.choice(("gone", "twice", "moved"))
    node = nodes.pop(k) if kind != "twice" else nodes[k]
    if kind != "gone":
        nodes.insert(rng.randrange(len(nodes) + 1), node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return f"{node.op_type} {kind}"


def _opset(rng: random.Random, model: onnx.ModelProto) -> str:
    """Another opset."""
    if model.opset_import:
        model.opset_import[0].version = rng.choice((0, 1, 6, 7, 9, 11, 12, 13, 17, 18, 19, 22, 23, 1 << 40))
    return "opset"


_FIELDS: tuple[Mutation, ...] = (_attribute, _attribute, _operand, _op, _shape, _number, _number, _nodes, _opset)


def mutated(seed: int) -> tuple[bytes, str]:
    """The model of a seed, and what was changed in it."""
    rng = random.Random(seed)
    data = rng.choice(bases()[:2]) if rng.random() > _SHARE_OF_NODE_CASES else rng.choice(bases())
    if rng.random() < 0.3:
        return _bytes(rng, data)
    model = onnx.ModelProto.FromString(data)
    done = [rng.choice(_FIELDS)(rng, model) for _ in range(rng.randint(1, 3)) if model.graph.node]
    return model.SerializeToString(), ", ".join(filter(None, done))


def repeat(seed: int, folder: Path) -> None:
    """Import the model of a seed and verify it; then survey it. Raises AssertionError for an error of distir's that is
    not one line, or where the two differ in whether all is supported; whatever else is raised as it is."""
    data, _ = mutated(seed)
    path = folder / "m.onnx"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = _error(lambda: verify(import_from_onnx(path, dims=dict.fromkeys(symbolic_dims(path), 2))[0]))
        found: list[Survey] = []
        if late := _error(lambda: found.append(survey(path, dict.fromkeys(symbolic_dims(path), 2)))):
            assert refused, f"survey raises {late}, the import nothing"
        else:
            assert bool(found[0].unsupported) == bool(refused), f"import: {refused}, survey: {found[0].unsupported}"


def _error(step: Callable[[], object]) -> str | None:
    """The error of distir's that `step` raises, which is one line."""
    try:
        step()
    except DistirError as e:
        text = str(e)
    else:
        return None
    assert "\n" not in text, text
    return text


def _limited(folder: Path) -> None:
    """The folder's external data, and a limit on this process's memory."""
    with open(folder / "w.bin", "wb") as file:
        file.truncate(1 << 20)
    bases()
    repeat(0, folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _late(*_: object) -> None:
    raise TimeoutError(f"more than {PATIENCE} s")


def child(seconds: float, seed: int, folder: Path) -> None:
    """Import models for so long; prints a line of JSON for each failure, and one with the count at the end."""
    _limited(folder)
    signal.signal(signal.SIGALRM, _late)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end, first = time.monotonic() + seconds, seed
    while time.monotonic() < end:
        (folder / "seed").write_text(str(seed))
        signal.alarm(PATIENCE)
        try:
            repeat(seed, folder)
        except BaseException as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            row = {"seed": seed, "changed": mutated(seed)[1], "error": f"{type(e).__name__}: {e}"[:300]}
            print(json.dumps({**row, "where": f"{Path(where.filename).name}:{where.lineno}"}), flush=True)
        signal.alarm(0)
        seed += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024
    print(json.dumps({"models": seed - first, "grown": grown}), flush=True)


def failures(seconds: float, seed: int = 0) -> Iterator[dict[str, Any]]:
    """What failed in so many seconds, and at the end how many models were imported, and by how many bytes memory grew.

    A process that ends, or does not answer in time, is a failure too: of a crash or a hang in a library.
    """
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "tests.importer.mutations", "--child", str(seconds), str(seed), folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = None
        try:
            done = subprocess.run(
                line, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env, timeout=seconds + 120 + 2 * PATIENCE
            )
            out = done.stdout
        except subprocess.TimeoutExpired as e:
            out = e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout or ""
        yield from map(json.loads, out.splitlines())
        if done is None or done.returncode:
            last = Path(folder, "seed")
            at = last.read_text() if last.exists() else "before the first"
            yield {"seed": at, "error": "it hangs" if done is None else f"the process ended with {done.returncode}"}


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        for row in failures(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0):
            print(row)
