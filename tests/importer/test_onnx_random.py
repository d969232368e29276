"""Random small ONNX graphs: results equal onnxruntime's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.importer.models import computed, equal, expected, model, node

UNARY = ["Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Identity", "Softplus", "Sin", "Erf", "Elu", "HardSwish"]
BINARY = ["Add", "Sub", "Mul", "Max", "Min"]
REDUCTIONS = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare"]


class Graph:
    """A graph under construction: floating-point values by name, with their shapes."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for _ in range(draw(st.integers(1, 2))):
            self.add_input(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))))

    def add_input(self, shape: tuple[int, ...]) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.rng.standard_normal(shape).astype(np.float32)
        self.shapes[name] = shape
        return name

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = array
        return name

    def numbers(self, *shape: int) -> str:
        return self.weight(self.rng.standard_normal(shape).astype(np.float32))

    def ints(self, *values: int) -> str:
        return self.weight(np.array(values, np.int64))

    def one_of(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(options))

    def emit(self, op_type: str, inputs: str, *shapes: tuple[int, ...], **attributes: object) -> None:
        """A node whose results, if shapes are given, may be operands of later ones."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(max(1, len(shapes)))]
        self.nodes.append(node(op_type, inputs, " ".join(names), f"n{len(self.nodes)}", **attributes))
        self.shapes.update(zip(names, shapes))

    @property
    def last(self) -> str:
        return self.nodes[-1].output[0]

    def grow(self) -> None:
        """Add one op (and the shape arithmetic it needs) on a random value."""
        v = self.one_of(list(self.shapes))
        rules = [f for name, f in sorted(vars(Graph).items()) if name.startswith("op_")]
        self.one_of(rules)(self, v, self.shapes[v])

    def op_unary(self, v: str, s: tuple[int, ...]) -> None:
        self.emit(self.one_of(UNARY), v, s)

    def op_binary(self, v: str, s: tuple[int, ...]) -> None:
        same = [u for u, t in self.shapes.items() if t == s]
        broad = self.numbers(*[d if self.draw(st.booleans()) else 1 for d in s])
        other = self.one_of([*same, broad, self.numbers()])
        pair = [v, other] if self.draw(st.booleans()) else [other, v]
        self.emit(self.one_of(BINARY), " ".join(pair), s)

    def op_matmul(self, v: str, s: tuple[int, ...]) -> None:
        if s:
            n = self.draw(st.integers(1, 4))
            self.emit("MatMul", f"{v} {self.numbers(s[-1], n)}", (*s[:-1], n))

    def op_gemm(self, v: str, s: tuple[int, ...]) -> None:
        if len(s) == 2:
            self.emit("Gemm", f"{v} {self.numbers(3, s[1])} {self.numbers(3)}", (s[0], 3), transB=1, alpha=0.5)

    def op_softmax(self, v: str, s: tuple[int, ...]) -> None:
        if s:
            self.emit("Softmax", v, s, axis=self.one_of(range(-len(s), len(s))))

    def op_layer_norm(self, v: str, s: tuple[int, ...]) -> None:
        if s and s[-1] > 1:
            self.emit("LayerNormalization", f"{v} {self.numbers(s[-1])} {self.numbers(s[-1])}", s, epsilon=0.01)

    def op_transpose(self, v: str, s: tuple[int, ...]) -> None:
        perm = self.draw(st.permutations(range(len(s))))
        if s:
            self.emit("Transpose", v, tuple(s[i] for i in perm), perm=perm)

    def op_reduce(self, v: str, s: tuple[int, ...]) -> None:
        axes = [i for i in range(len(s)) if self.draw(st.booleans())] or list(range(len(s)))
        keep = self.draw(st.booleans())
        out = tuple(1 if i in axes else d for i, d in enumerate(s) if keep or i not in axes)
        self.emit(self.one_of(REDUCTIONS), f"{v} {self.ints(*axes)}", out, keepdims=int(bool(keep)))

    def op_flat(self, v: str, s: tuple[int, ...]) -> None:
        """To (first dim, all others), its target computed from Shape."""
        if len(s) > 1:
            self.emit("Shape", v)
            self.emit("Gather", f"{self.last} {self.weight(np.array(0))}", axis=0)
            self.emit("Unsqueeze", f"{self.last} {self.ints(0)}")
            self.emit("Concat", f"{self.last} {self.ints(-1)}", axis=0)
            self.emit("Reshape", f"{v} {self.last}", (s[0], int(np.prod(s[1:]))))

    def op_unsqueeze(self, v: str, s: tuple[int, ...]) -> None:
        if len(s) < 4:
            at = self.draw(st.integers(0, len(s)))
            self.emit("Unsqueeze", f"{v} {self.ints(at)}", (*s[:at], 1, *s[at:]))

    def op_squeeze(self, v: str, s: tuple[int, ...]) -> None:
        self.emit("Squeeze", v, tuple(d for d in s if d != 1))

    def op_expand(self, v: str, s: tuple[int, ...]) -> None:
        if len(s) < 4:
            self.emit("Shape", v)
            self.emit("Concat", f"{self.ints(2)} {self.last}", axis=0)
            self.emit("Expand", f"{v} {self.last}", (2, *s))

    def op_concat(self, v: str, s: tuple[int, ...]) -> None:
        if s:
            axis = self.one_of(range(len(s)))
            same = [u for u, t in self.shapes.items() if t == s]
            self.emit("Concat", f"{v} {self.one_of(same)}", (*s[:axis], 2 * s[axis], *s[axis + 1 :]), axis=axis)

    def op_split(self, v: str, s: tuple[int, ...]) -> None:
        if s and s[0] > 1:
            self.emit("Split", f"{v} {self.ints(1, s[0] - 1)}", (1, *s[1:]), (s[0] - 1, *s[1:]), axis=0)

    def op_slice(self, v: str, s: tuple[int, ...]) -> None:
        if s:
            step = self.one_of([-2, -1, 1, 2])
            taken = range(s[-1])[::step]
            ends = (-1, -100) if step < 0 else (0, 100)
            row = [self.ints(ends[0]), self.ints(ends[1]), self.ints(-1), self.ints(step)]
            self.emit("Slice", f"{v} {' '.join(row)}", (*s[:-1], len(taken)))

    def op_gather(self, v: str, s: tuple[int, ...]) -> None:
        if s:
            index = self.rng.integers(-s[0], s[0], (2,))
            self.emit("Gather", f"{v} {self.ints(*index)}", (2, *s[1:]), axis=0)

    def op_where(self, v: str, s: tuple[int, ...]) -> None:
        self.emit("Greater", f"{v} {self.numbers()}")
        self.emit("Where", f"{self.last} {v} {self.numbers()}", s)

    def op_mask(self, v: str, s: tuple[int, ...]) -> None:
        """Added, a causal mask computed at import from the shape."""
        if len(s) > 1 and s[-1] == s[-2]:
            self.emit("Shape", v, start=-2)
            self.emit("ConstantOfShape", self.last)
            self.emit("Sub", f"{self.last} {self.weight(np.array(9, np.float32))}")
            self.emit("Trilu", f"{self.last} {self.weight(np.array(1))}", upper=1)
            self.emit("Add", f"{v} {self.last}", s)


@settings(max_examples=80)
@given(st.data())
def test_random_graphs(data: st.DataObject) -> None:
    graph = Graph(data.draw)
    for _ in range(data.draw(st.integers(1, 8))):
        graph.grow()
    outputs = [n.output[0] for n in graph.nodes if n.output[0] in graph.shapes][-3:]
    if not outputs:
        return
    proto = model(graph.nodes, graph.inputs, outputs, graph.weights)
    with tempfile.TemporaryDirectory() as folder:
        _, got = computed(proto, graph.inputs, Path(folder, "m.onnx"))
    for name, y in zip(outputs, got, strict=True):
        assert y.shape == graph.shapes[name]
    equal(got, expected(proto, graph.inputs), 1e-4)
