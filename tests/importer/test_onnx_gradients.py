"""Gradients of ops that become several: against torch's autograd, of the same function written in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from distir.executor.reference.sequential import SequentialExecutor
from distir.importer import import_from_onnx
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.grad import grad
from distir.transforms.rewriting.cleanup import extend
from tests.importer.models import model, node

rng = np.random.default_rng(0)


def x(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


def ints(high: int, *shape: int) -> np.ndarray:
    return rng.integers(0, high, shape)


def orders(count: int, below: int, columns: int) -> np.ndarray:
    """In each column so many different integers."""
    return np.stack([rng.permutation(below)[:count] for _ in range(columns)], 1)


def check(
    op_type: str,
    operands: Sequence[Any],
    of_torch: Callable[..., torch.Tensor],
    path: Path,
    attributes: Mapping[str, Any],
    stored: Sequence[int] = (),
    opset: int = 20,
) -> None:
    """The first result and the gradients of all floating operands, in float64."""
    names = ["-" if a is None else f"x{k}" for k, a in enumerate(operands)]
    arrays = {f"x{k}": np.asarray(a) for k, a in enumerate(operands) if a is not None}
    inputs = {k: a for k, a in arrays.items() if int(k[1:]) not in stored}
    constants = {k: a for k, a in arrays.items() if k not in inputs}
    proto = model([node(op_type, " ".join(names), "y", **attributes)], inputs, ["y"], constants, opset)
    path.write_bytes(proto.SerializeToString())
    function, known = import_from_onnx(path)
    (y,) = function.outputs
    weights, maker = x(*shape_of(y)), extend(function)
    c = maker.add_input_value("c", tensor(y))
    axes = tuple(range(len(shape_of(y))))
    maker.set_outputs([maker.emit("ReduceSum", maker.emit("Mul", y, c), axes=axes, keepdims=0)])
    wrt = [v for v in function.inputs if v.name in inputs and tensor(v).dtype.floating]
    assert wrt
    feeds = [known[v] if v in known else arrays[v.name] for v in function.inputs]
    _, *slopes = SequentialExecutor().compute(grad(maker.finalize(), 0, wrt), [*feeds, weights])
    (result,) = SequentialExecutor().compute(function, feeds)
    tensors = {k: torch.tensor(a, requires_grad=a.dtype.kind == "f") for k, a in arrays.items()}
    want = of_torch(*[None if a is None else tensors[f"x{k}"] for k, a in enumerate(operands)])
    np.testing.assert_allclose(result, want.detach().numpy(), rtol=1e-12, atol=1e-12)
    (want * torch.tensor(weights)).sum().backward()
    for v, slope in zip(wrt, slopes, strict=True):
        grown = tensors[v.name].grad
        assert grown is not None
        np.testing.assert_allclose(slope, grown.numpy(), rtol=1e-10, atol=1e-10, err_msg=v.name)


def each(name: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """torch's scatter with that reduction, along dim 0."""
    return lambda x, i, u: x.scatter_reduce(0, i, u, name)


def interpolated(size: tuple[int, int], mode: str, **how: Any) -> Callable[..., torch.Tensor]:
    return lambda x, *rest: functional.interpolate(x, size, mode=mode, **how)


HALF = {"coordinate_transformation_mode": "half_pixel"}
CORNERS = {"coordinate_transformation_mode": "align_corners"}
FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
SIZES = np.array([2, 3, 8, 7])
CASES: list[tuple[str, tuple[Any, ...], Callable[..., torch.Tensor], dict[str, Any], tuple[int, ...]]] = [
    ("GatherElements", (x(3, 4), ints(4, 3, 6)), lambda x, i: x.gather(1, i), {"axis": 1}, ()),
    ("GatherND", (x(3, 4, 2), ints(3, 5, 2)), lambda x, i: x[i[:, 0], i[:, 1]], {}, ()),
    ("ScatterElements", (x(4, 3), orders(2, 4, 3), x(2, 3)), lambda x, i, u: x.scatter(0, i, u), {}, ()),
    ("ScatterElements", (x(4, 3), ints(4, 7, 3), x(7, 3)), each("sum"), {"reduction": "add"}, ()),
    ("ScatterElements", (x(4, 3), ints(4, 7, 3), x(7, 3)), each("prod"), {"reduction": "mul"}, ()),
    ("ScatterElements", (x(4, 3), ints(4, 7, 3), x(7, 3)), each("amax"), {"reduction": "max"}, ()),
    ("ScatterND", (x(4, 3), np.array([[2], [0]]), x(2, 3)), lambda x, i, u: x.index_put((i[:, 0],), u), {}, ()),
    (
        "ScatterND",
        (x(4, 3), ints(3, 6, 2), x(6)),
        lambda x, i, u: x.index_put((i[:, 0], i[:, 1]), u, accumulate=True),
        {"reduction": "add"},
        (),
    ),
    ("TopK", (x(3, 6), [4]), lambda x, k: x.topk(4).values, {}, (1,)),
    ("Resize", (x(2, 3, 5, 4), None, None, SIZES), interpolated((8, 7), "bilinear"), {"mode": "linear", **HALF}, (3,)),
    (
        "Resize",
        (x(2, 3, 5, 4), None, None, SIZES),
        interpolated((8, 7), "bicubic", align_corners=True),
        {"mode": "cubic", **CORNERS},
        (3,),
    ),
    ("Resize", (x(2, 3, 4, 7), None, None, SIZES), interpolated((8, 7), "nearest"), FLOOR, (3,)),
    *[
        (
            "Pad",
            (x(1, 4, 5), [0, 0, 2, 0, 0, 3]),
            lambda x, p, to=to: functional.pad(x, (2, 3), to),
            {"mode": mode},
            (1,),
        )
        for mode, to in (("edge", "replicate"), ("reflect", "reflect"), ("wrap", "circular"))
    ],
    ("Einsum", (x(2, 3, 3), x(3, 4)), lambda a, b: torch.einsum("bii,ij->bj", a, b), {"equation": "bii,ij->bj"}, ()),
    ("Einsum", (x(2, 3), x(3, 4), x(4)), lambda *a: torch.einsum("ab,bc,c->a", *a), {"equation": "ab,bc,c->a"}, ()),
    (
        "ReduceProd",
        (np.array([[2.0, 0, 3], [0, 4, 0], [1, 2, 3]]),),
        lambda x: x.prod(1, keepdim=True),
        {"axes": [1]},
        (),
    ),
    ("Mod", (x(3, 4), x(4)), torch.remainder, {}, ()),
    ("Mod", (x(3, 4), x(4)), torch.fmod, {"fmod": 1}, ()),
    (
        "LRN",
        (x(2, 5, 3),),
        lambda x: functional.local_response_norm(x, 3, 0.5, 0.75, 2.0),
        {"size": 3, "alpha": 0.5, "beta": 0.75, "bias": 2.0},
        (),
    ),
]


@pytest.mark.parametrize(
    ("op_type", "operands", "of_torch", "attributes", "stored"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_gradient(
    op_type: str, operands: Any, of_torch: Any, attributes: dict[str, Any], stored: Any, tmp_path: Path
) -> None:
    opset = 13 if "axes" in attributes or op_type == "Mod" else 20
    check(op_type, operands, of_torch, tmp_path / "m.onnx", attributes, stored, opset)


def test_products_up_to_each(tmp_path: Path) -> None:
    check("CumProd", (x(3, 5), 1), lambda x, a: x.cumprod(1), tmp_path / "m.onnx", {}, (1,), 26)


GATES = {"RNN": ([0], 1), "GRU": ([1, 0, 2], 3), "LSTM": ([0, 2, 3, 1], 4)}
"""Which of ONNX's gates each of torch's is, and how many there are."""


@pytest.mark.parametrize("way", ["forward", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_recurrent(kind: str, way: str, tmp_path: Path) -> None:
    """torch's own op, its weights made of ONNX's by reordering the gates."""
    order, gates = GATES[kind]
    ways, size, hidden, states = 1 if way == "forward" else 2, 3, 4, 2 if kind == "LSTM" else 1
    shapes = [(ways, gates * hidden, size), (ways, gates * hidden, hidden), (ways, 2 * gates * hidden)]

    def of_torch(data: Any, w: Any, r: Any, b: Any, lengths: None, *start: Any) -> torch.Tensor:
        of_ways: list[Any] = []
        for k in range(ways):
            parts = w[k], r[k], b[k][: gates * hidden], b[k][gates * hidden :]
            of_ways += [torch.cat([p[g * hidden : (g + 1) * hidden] for g in order]) for p in parts]
        run = {"RNN": torch.rnn_tanh, "GRU": torch.gru, "LSTM": torch.lstm}[kind]
        first = list(start) if kind == "LSTM" else start[0]
        y = run(data, first, of_ways, True, 1, 0.0, True, ways == 2, False)[0]
        return y.reshape(*y.shape[:2], ways, hidden).transpose(1, 2)

    operands = [x(5, 2, size), *[x(*s) for s in shapes], None, *[x(ways, 2, hidden) for _ in range(states)]]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": way}
    attributes |= {"linear_before_reset": 1} if kind == "GRU" else {}
    check(kind, operands, of_torch, tmp_path / "m.onnx", attributes)
