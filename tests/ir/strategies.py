"""Random programs for hypothesis: well formed as text, with nasty names, but not well typed."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from distir.ir import Device, Function, Mesh, Op, Role, Value
from distir.ir.function import Attributes
from distir.ir.spec import all_ops, lookup
from distir.ir.type import NOW, REPLICATE, DType, Partial, Shard, Tensor, Tuple, Type

NASTY = (
    ["", " ", "x", "w.1", "a b", "%", "%x", "=", "->", "of", "return", "fn", "mesh", "}", "){", "a,b", "x: f32[2]"]
    + ['"', '"x"', "\\", "\\n", "\n", "\r\n", "\t", "a#1", "#1", "T0", "T0#1", "f32", "f32[2]", "inf", "nan", "-inf"]
    + ["onnx::MatMul_1", "/h.0/attn/MatMul_output_0", ":", "a:", "gpu:0", "@", "&f", "MatMul", "Call", "None", "True"]
    + [
        "é",
        "名前",
        "a\u0301",
        "\u200b",
        "\u2028",
        "\U0001f600",
        "\x00",
        "\x1b[31m",
        "'",
        "1",
        "1e5",
        "-",
        ".",
    ]
)
names = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
"""Without lone surrogates, which Hypothesis cannot report in UTF-8: `test_text` has one."""
numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.integers(-3, 300)


def unique(k: int) -> st.SearchStrategy[list[str]]:
    return st.lists(names, min_size=k, max_size=k, unique=True)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Of up to 3 axes; devices on a grid with any strides, or in any order."""
    axes = draw(st.lists(st.just("mb") | names, max_size=3, unique=True))
    sizes = [draw(st.integers(1, 3)) for _ in axes]
    count = 1
    for a, n in zip(axes, sizes, strict=True):
        count *= 1 if a == "mb" else n
    kind = draw(names)
    if draw(st.booleans()):
        indices = [draw(st.integers(-5, 100))]
        for _ in range(3):
            step = draw(st.integers(-9, 9))
            indices = [i + k * step for k in range(3) for i in indices]
        devices = list(dict.fromkeys(Device(kind, i) for i in indices))[:count]
    else:
        devices = []
    while len(devices) < count:
        device = Device(draw(names), draw(st.integers(-2, 9)))
        devices += [] if device in devices else [device]
    return Mesh(devices, dict(zip(axes, sizes, strict=True)), draw(names))


microbatches = st.integers(0, 5) | st.integers(NOW - 2, NOW + 2)
pieces = st.none() | st.tuples(microbatches, microbatches) | st.integers(0, 5).map(lambda k: (k, k + 1))


@st.composite
def tensors(draw: st.DrawFn, where: st.SearchStrategy[Any]) -> Tensor:
    dtype, at = draw(st.sampled_from(list(DType.all.values()))), draw(where)
    rank = draw(st.integers(0, 3))
    piece = draw(pieces)
    if not isinstance(at, Mesh):
        return Tensor(dtype, [draw(st.integers(0, 4)) for _ in range(rank)], at, None, piece)
    end = [1] * rank
    placements: list[Any] = [REPLICATE] * len(at.axes)
    for i in draw(st.permutations(range(len(at.axes)))):
        kind = draw(st.sampled_from(["replicate", "sum", "max", "mean" if dtype.floating else "max", "shard"]))
        if kind == "shard" and rank:
            dim = draw(st.integers(0, rank - 1))
            outer = end[dim] * draw(st.integers(1, 3))
            shift = 0 if i == at.time else draw(st.integers(0, at.sizes[i] - 1))
            placements[i], end[dim] = Shard(dim, outer, shift), outer * at.sizes[i]
        elif kind in ("sum", "max", "mean"):
            placements[i] = Partial(kind)
    return Tensor.whole(dtype, [n * draw(st.integers(0, 3)) for n in end], at, placements, piece)


def types(where: st.SearchStrategy[Any]) -> st.SearchStrategy[Type]:
    leaves = tensors(where)
    bundles = st.lists(leaves | st.lists(leaves, max_size=6).map(Tuple), max_size=6).map(Tuple)
    return leaves | bundles | st.builds(lambda t, k: t.at(k), bundles, st.integers(0, 4))


def attributes(where: st.SearchStrategy[Any], functions: list[Function]) -> st.SearchStrategy[Attributes]:
    partials = [Partial(kind) for kind in ("sum", "max", "mean")]
    leaves = numbers | names | st.sampled_from([*DType.all.values(), REPLICATE, *partials])
    leaves |= st.builds(Shard, st.integers(0, 3), st.integers(1, 3), st.integers(0, 2)) | where
    if functions:
        leaves |= st.sampled_from(functions)
    values = st.recursive(leaves, lambda x: st.lists(x, max_size=3).map(tuple), max_leaves=6)
    keys = st.sampled_from(["axis", "perm", "to", "mb", "place"]) | names
    return st.dictionaries(keys, values, max_size=3).map(Attributes)


roles = st.none() | st.builds(
    Role,
    st.sampled_from(["data", "parameter", "state", "constant"]),
    st.none() | st.integers(0, 3),
    st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


@st.composite
def functions(draw: st.DrawFn, where: st.SearchStrategy[Any], callees: list[Function]) -> Function:
    arity = draw(st.integers(0, 7))
    results = [draw(st.integers(0, 5 if k == 0 else 2)) for k in range(draw(st.integers(0, 5)))]
    supply = iter(draw(unique(arity + sum(results))))

    def value(role: Role | None = None) -> Value:
        return Value(next(supply), draw(st.none() | types(where)), role)

    values = inputs = [value(draw(roles)) for _ in range(arity)]
    ops: list[Op] = []
    for count in results:
        if callees and draw(st.booleans()):
            spec, callee = lookup("Call"), {"callee": draw(st.sampled_from(callees))}
        else:
            spec, callee = draw(st.sampled_from(list(all_ops()))), {}
        operands = draw(st.lists(st.sampled_from(values), max_size=3)) if values else []
        of = draw(st.none() | st.sampled_from(ops)) if ops else None
        attrs = Attributes({**callee, **draw(attributes(where, callees))})
        ops.append(Op(spec, tuple(operands), attrs, tuple(value() for _ in range(count)), of))
        values = [*values, *ops[-1].outputs]
    outputs = draw(st.lists(st.sampled_from(values), max_size=6)) if values else []
    updates = {v: draw(st.sampled_from(inputs)) for v in outputs if inputs and draw(st.booleans())}
    sources = {v: (draw(st.integers(0, 9)),) for v in outputs if draw(st.booleans())}
    return Function(draw(names), tuple(inputs), tuple(ops), tuple(outputs), updates, sources)


@st.composite
def programs(draw: st.DrawFn) -> Function:
    """A function over up to two others, which may share its name, as may its meshes theirs."""
    found = [draw(meshes()) for _ in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        found += [Mesh([Device("gpu", k)], {}, m.name) for k, m in enumerate(found)]
    devices = st.builds(Device, names, st.integers(-2, 9))
    where = st.none() | devices | st.sampled_from(found)
    callees: list[Function] = []
    for _ in range(draw(st.integers(0, 2))):
        callees.append(draw(functions(where, list(callees))))
    return draw(functions(where, callees))
