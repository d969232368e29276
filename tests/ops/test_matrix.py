"""Every op in every aspect: its type, gradient, placements, decomposition, text, and its meaning on torch."""

from __future__ import annotations

import itertools
import operator
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from distir.backends.lowering.native import NATIVE
from distir.backends.tensors.torch_namespace import TORCH, torch_dtype
from distir.executor.reference.joining import join
from distir.executor.reference.sequential import SequentialExecutor, evaluate
from distir.ir import parse, pformat, same, verify
from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.function import Function, FunctionMaker, Op
from distir.ir.spec import all_ops, lookup
from distir.ir.type import (
    SUM,
    BFloat16,
    DType,
    Float16,
    Float32,
    Float64,
    Partial,
    Placement,
    Replicate,
    Shard,
    Tensor,
)
from distir.ops.rules import statistic, tensor
from distir.transforms.differentiation.grad import grad
from distir.transforms.rewriting.decompose import decompose
from tests.ops.samples import SAMPLES, Sample

NAMES = [f"{s.op}-{i}" for i, s in enumerate(SAMPLES)]
MESH = Mesh([Device("cpu", i) for i in range(4)], {"a": 2, "b": 2})
each = pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)


def build(s: Sample) -> Function:
    """The function of the one op."""
    maker = FunctionMaker(s.op)
    operands = [maker.add_input_value(f"x{k}", Tensor(o.dtype, o.shape)) for k, o in enumerate(s.operands)]
    maker.emit(s.op, *operands, **s.attributes)
    maker.set_outputs(maker.ops[0].outputs)
    return maker.finalize()


def row(results: Any) -> Sequence[Any]:
    return results if isinstance(results, tuple) else (results,)


def run(function: Function, arrays: Sequence[Any]) -> list[Any]:
    return SequentialExecutor().compute(function, list(arrays))


def test_every_op_has_a_sample():
    missing = {spec.name for spec in all_ops() if spec.comm is None} - {s.op for s in SAMPLES}
    assert not missing, f"add a line to tests/ops/samples.py for {sorted(missing)}"


def narrow(s: Sample, dtype: DType) -> Sample:
    """The sample with another dtype in place of float64."""
    operands = tuple(
        o._replace(dtype=statistic(dtype) if o.saved else dtype) if o.dtype is Float64 else o for o in s.operands
    )
    given = {k: dtype if x is Float64 else x for k, x in s.attributes.items()}
    return s._replace(operands=operands, attributes=given)


@each
@pytest.mark.parametrize("dtype", [Float64, Float32, Float16, BFloat16], ids=repr)
def test_inferred_type_is_the_evaluated_one(sample: Sample, dtype: DType):
    sample = narrow(sample, dtype)
    op = build(sample).ops[0]
    assert len(op.outputs) == op.spec.count(op.attributes)
    results = run(build(sample), sample.arrays())
    for x, v in zip(results, op.outputs, strict=True):
        assert isinstance(v.type, Tensor)
        assert (x.shape, x.dtype) == (v.type.shape, v.type.dtype.numpy)


ROUNDED_ONCE = ("Softmax", "LogSoftmax", "Gelu", "Silu", "Tanh", "Sigmoid", "Exp", "Log", "Sqrt", "Erf", "Softplus")


@pytest.mark.parametrize("dtype", [Float16, BFloat16], ids=repr)
@pytest.mark.parametrize("name", [f"{name}{of}" for name in ROUNDED_ONCE for of in ("", "Grad")])
def test_16_bits_are_computed_in_float32_and_rounded_once(name: str, dtype: DType):
    for sample in [s for s in SAMPLES if s.op == name]:
        arrays = narrow(sample, dtype).arrays()
        (got,) = run(build(narrow(sample, dtype)), arrays)
        (want,) = run(build(narrow(sample, Float32)), [x.astype(np.float32) for x in arrays])
        np.testing.assert_array_equal(got, want.astype(dtype.numpy))


@each
def test_refuses_an_operand_more_or_less(sample: Sample):
    allowed = {len(s.operands) for s in SAMPLES if s.op == sample.op}
    x = sample.operands
    for operands in [x[:-1], (*x, x[-1])] if x and sample.op not in ("Concat", "Sum") else []:
        if len(operands) not in allowed:
            with pytest.raises(IRTypeError):
                build(sample._replace(operands=operands))


def rounds(sample: Sample) -> bool | None:
    """Whether a result has a number that is neither an operand's, nor given, nor whole or infinite, but for the sign;
    None without numbers that could be rounded."""
    arrays = sample.arrays()
    given = [x for x in sample.attributes.values() if isinstance(x, int | float)]
    there = np.abs(np.concatenate([[np.inf, *given], *[np.ravel(x).astype(float) for x in arrays]]))
    results = [np.abs(x) for x in run(build(sample), arrays) if np.issubdtype(x.dtype, np.floating)]
    return any([not (np.isin(x, there) | (x == np.round(x))).all() for x in results]) if results else None


ROUNDED_WHERE_SPLIT = {"BatchStatistic", "ReduceMaxGrad"}
"""Means of parts of a batch are averaged; equal maxima share a gradient."""


def test_exact_ops_round_nothing():
    """And all that do not are said to be exact, but for views."""
    found: dict[str, set[bool | None]] = {}
    for s in SAMPLES:
        if any([o.dtype.floating for o in s.operands]) and not lookup(s.op).alias:
            found.setdefault(s.op, set()).add(rounds(s))
    exact = {name for name in found if lookup(name).exact}
    assert exact == {name for name, seen in found.items() if seen == {False}} - ROUNDED_WHERE_SPLIT


# ---------------------------------------------------------------- torch


def on_torch(x: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(x))


@each
@pytest.mark.parametrize("dtype", [Float64, Float32], ids=repr)
def test_torch_computes_the_same(sample: Sample, dtype: DType):
    """Written once against a namespace, and the faster kernel if there is one."""
    sample = narrow(sample, dtype)
    op = build(sample).ops[0]
    arrays = sample.arrays()
    want = row(evaluate(op, arrays, None))
    got = [row(evaluate(op, [on_torch(x) for x in arrays], None, TORCH))]
    if op.spec.torch is not None:
        kernel = operator.attrgetter(op.spec.torch)(torch)
        got.append(row(kernel(*[on_torch(x) for x in arrays], **op.attributes)))
    if op.op_type in NATIVE:
        attributes = dict(op.attributes)
        if (indexed := op.spec.indexed(op.attributes)) is not None:
            slot, dim = indexed
            attributes["start"] = tensor(op.inputs[slot] if slot >= 0 else op.outputs[~slot]).starts(dim, None)
        if op.spec.local:
            attributes |= op.spec.local(op.attributes, [v.type for v in op.inputs], [v.type for v in op.outputs])
        got.append(row(NATIVE[op.op_type](*[on_torch(x) for x in arrays], **attributes)))
    close = 1e-12 if dtype is Float64 else 2e-5
    for results in got:
        for x, y, v in zip(want, results, op.outputs, strict=True):
            assert y.dtype is torch_dtype(v.type.dtype)  # type: ignore[union-attr]
            np.testing.assert_allclose(y.numpy(), x, rtol=close, atol=close)


# ---------------------------------------------------------------- gradients


def slopes(function: Function, arrays: list[Any], cotangents: list[Any], k: int) -> Any:
    """The central finite difference of <cotangents, results> in operand k."""

    def total(x: Any) -> float:
        given = [*arrays[:k], x, *arrays[k + 1 :]]
        return sum(float(np.sum(c * y)) for c, y in zip(cotangents, run(function, given), strict=True))

    out = np.zeros(arrays[k].shape)
    for i in np.ndindex(*arrays[k].shape):
        step = np.zeros(arrays[k].shape)
        step[i] = 1e-5
        out[i] = (total(arrays[k] + step) - total(arrays[k] - step)) / 2e-5
    return out


def differentiable(s: Sample) -> bool:
    floats = [v for v in build(s).outputs if v.type.dtype.floating]  # type: ignore[union-attr]
    return lookup(s.op).grad is not None and bool(floats) and bool(s.operands)


DIFFERENTIABLE = [s for s in SAMPLES if differentiable(s)]


@pytest.mark.filterwarnings("ignore:invalid value encountered in power")
@pytest.mark.parametrize("s", DIFFERENTIABLE, ids=lambda s: s.op)
def test_gradient_is_the_finite_difference(s: Sample):
    function = build(s)
    (op,) = function.ops
    arrays = s.arrays()
    flowing = op.outputs[: len(op.outputs) - op.spec.saved]
    results = [v for v in flowing if v.type.dtype.floating]  # type: ignore[union-attr]
    rng = np.random.default_rng(1)
    # all results have a gradient, then each alone
    for given in [set(results), *[{v} for v in results if len(results) > 1]]:
        maker = FunctionMaker("grad")
        maker.inputs += function.inputs
        maker.ops += function.ops
        cotangents, douts = [], []
        for v in op.outputs:
            shape = v.type.global_shape  # type: ignore[union-attr]
            cotangents.append(rng.uniform(-1, 1, shape) if v in given else np.zeros(shape))
            douts.append(maker.add_input_value("d", v.type) if v in given else None)
        grads = op.spec.grad(maker, op, *douts)  # type: ignore[misc]
        assert len(grads) == len(op.inputs)
        maker.set_outputs([g for g in grads if g is not None])
        given_arrays = [c for c, d in zip(cotangents, douts, strict=True) if d is not None]
        got = iter(run(maker.finalize(), [*arrays, *given_arrays]))
        for k, (v, g) in enumerate(zip(op.inputs, grads, strict=True)):
            if g is not None:
                assert g.type is v.type, f"gradient of operand {k}"
            if k in s.detached or not v.type.dtype.floating:  # type: ignore[union-attr]
                assert g is None, f"operand {k} has a gradient"
                continue
            want = slopes(function, arrays, cotangents, k)
            found = next(got) if g is not None else np.zeros(want.shape)
            close = 1e-2 if s.attributes.get("to") else 1e-6  # differences of rounded numbers
            if not np.isnan(want).any():  # the exponent of a negative number has no gradient
                np.testing.assert_allclose(found, want, rtol=close, atol=close)


# ---------------------------------------------------------------- placements


def splits(shape: tuple[int, ...]) -> list[Placement]:
    dims = [(d, outer) for d in range(len(shape)) for outer in (1, 2, 3)]
    return [Shard(d, outer) for d, outer in dims if shape[d] % (2 * outer) == 0]


def choices(s: Sample) -> list[tuple[Placement, ...]]:
    """Every combination of placements of the operands along one axis and, of a free factor, of the result."""
    rows = [[Replicate(), *splits(o.shape), *([SUM] if o.dtype.kind != "bool" else [])] for o in s.operands]
    for k, p in with_halos(s):
        (lo, hi), plain = p.widths, Shard(p.dim)
        rows[k] += [p, plain.with_halo(lo + 1, hi), plain.with_halo(lo, hi, 1.0)]  # no op takes the last two
    free: list[Placement] = [Replicate()]
    if lookup(s.op).sizes is not None:
        free += splits(build(s).outputs[0].type.global_shape)  # type: ignore[union-attr]
    return [*itertools.product(*rows, free)]


def with_halos(s: Sample) -> list[tuple[int, Shard]]:
    """The operands that mappings take with a halo."""
    op = build(s).ops[0]
    ins, outs = ([v.type.global_shape for v in vs] for vs in (op.inputs, op.outputs))  # type: ignore[union-attr]
    slots = [*enumerate(ins), *((~k, shape) for k, shape in enumerate(outs))]
    plain = [(k, p) for k, shape in slots for p in splits(shape) if isinstance(p, Shard)]
    asked = [op.spec.mapping(op.attributes, ins, outs, k, p, 2) for k, p in plain]
    rows = [m.ins for m in asked if m is not None]
    return sorted({(k, p) for row in rows for k, p in enumerate(row) if isinstance(p, Shard) and p.halo}, key=repr)


def typed(s: Sample, a: tuple[Placement, ...], b: tuple[Placement, ...]) -> Op | None:
    """The op on the mesh. None if operands cannot be placed so; raises IRTypeError if the op refuses it."""
    maker = FunctionMaker("placed")
    try:
        types = [
            Tensor.whole(o.dtype, o.shape, MESH, p) for o, p in zip(s.operands, zip(a, b, strict=True), strict=False)
        ]
    except IRTypeError:
        return None
    place = tuple((axis, p[-1]) for axis, p in (("a", a), ("b", b)) if isinstance(p[-1], Shard))
    attributes = s.attributes | ({"place": place} if place else {}) | ({} if types else {"device": MESH})
    maker.emit(s.op, *[maker.add_input_value("x", t) for t in types], **attributes)
    return maker.ops[0]


def pieces(x: Any, t: Tensor, rng: np.random.Generator) -> list[Any]:
    """What each device holds: cuts of the whole, or of terms that add up to it."""
    partial = [i for i, p in enumerate(t.placements) if isinstance(p, Partial)]
    terms: dict[tuple[int, ...], Any] = {}
    for key in itertools.product(*[range(MESH.sizes[i]) for i in partial]):
        terms[key] = rng.uniform(-2, 2, x.shape) if x.dtype.kind == "f" else rng.integers(-5, 5, x.shape)
    last = [*terms][-1]
    terms[last] = x - sum(y for key, y in terms.items() if key != last)
    return [t.cut(np.asarray(terms[tuple(c[i] for i in partial)], x.dtype), c) for c in MESH.coords]


def check_pieces(op: Op, arrays: list[Any], whole: Sequence[Any]) -> None:
    """Evaluated device by device, the results are the pieces of the whole."""
    rng = np.random.default_rng(2)
    placed = [pieces(x, v.type, rng) for x, v in zip(arrays, op.inputs, strict=True)]  # type: ignore[arg-type]
    each: dict[tuple[int, ...], Any] = {}
    for k, coord in enumerate(MESH.coords):
        each[coord] = row(evaluate(op, [x[k] for x in placed], coord))
    for i, (v, want) in enumerate(zip(op.outputs, whole, strict=True)):
        assert isinstance(v.type, Tensor)
        for y in each.values():
            assert np.shape(y[i]) == v.type.shape, f"{op}: {v}"
        got = join({c: np.asarray(y[i]) for c, y in each.items()}, v.type)
        close = 1e-5 if v.type.dtype.size < 8 else 1e-9
        np.testing.assert_allclose(got, want, rtol=close, atol=close, err_msg=f"{op.inputs} -> {v}")


def pairs(accepted: list[Any]) -> Iterator[tuple[Any, Any]]:
    """What the rule accepts along one axis, along both: all pairs, or where they are many some of each."""
    both = [*itertools.product(accepted, repeat=2)]
    if len(both) > 120:
        both = random.Random(0).sample(both, 120) + [(a, accepted[0]) for a in accepted]
    return iter(both)


@each
def test_placements(sample: Sample):
    """What the rule accepts computes the pieces of the whole; what it rejects names an operand."""
    arrays = sample.arrays()
    whole = run(build(sample), arrays)
    alone = tuple(Replicate() for _ in choices(sample)[0])
    accepted: list[tuple[Placement, ...]] = []
    refusals: list[str] = []
    for choice in choices(sample):
        try:
            op = typed(sample, choice, alone)
        except IRTypeError as e:
            refusals.append(e.message)
            continue
        if op is not None:
            accepted.append(choice)
    assert alone in accepted
    assert all(re.search(r"operand \d|result", message) for message in refusals)
    for a, b in pairs(accepted):
        try:
            op = typed(sample, a, b)
        except IRTypeError:
            continue  # sub-dimensions of the two axes that do not fit together in a result
        if op is not None:
            check_pieces(op, arrays, whole)


def shifted(choice: tuple[Placement, ...], only: int | None = None) -> tuple[Placement, ...]:
    """The placements with what is split shifted by a device: all of it, or one operand alone."""
    return tuple(p.shifted(1) if isinstance(p, Shard) and only in (None, k) else p for k, p in enumerate(choice))


@each
def test_shifted_placements(sample: Sample):
    """What the rule accepts it accepts with all that is split shifted, but not with one operand shifted alone."""
    arrays = sample.arrays()
    whole = run(build(sample), arrays)
    alone = tuple(Replicate() for _ in choices(sample)[0])
    split = [c for c in choices(sample) if any(isinstance(p, Shard) for p in c) and not any(p.halo for p in c)]
    for choice in random.Random(0).sample(split, min(30, len(split))):
        try:
            op = typed(sample, choice, alone)
        except IRTypeError:
            with pytest.raises(IRTypeError):
                typed(sample, shifted(choice), alone)
            continue
        if op is None:
            continue
        again = typed(sample, shifted(choice), alone)
        assert again is not None
        check_pieces(again, arrays, whole)
        along = [k for k, p in enumerate(choice) if isinstance(p, Shard)]
        for k in along if len(along) > 1 else ():
            with pytest.raises(IRTypeError, match=r"expected|may not be split"):
                typed(sample, shifted(choice, only=k), alone)


@each
def test_mappings_run_both_ways(sample: Sample):
    """From each operand or result that a mapping runs through, one finds the same mapping."""
    op = build(sample).ops[0]
    ins, outs = ([v.type.global_shape for v in vs] for vs in (op.inputs, op.outputs))  # type: ignore[union-attr]
    slots = [*enumerate(ins), *((~k, s) for k, s in enumerate(outs))]
    for slot, shape in slots:
        for split in splits(shape):
            assert isinstance(split, Shard)
            mapping = op.spec.mapping(op.attributes, ins, outs, slot, split, 2)
            if mapping is None:
                continue
            assert (mapping.ins[slot] if slot >= 0 else mapping.outs[~slot]).plain is split
            for k, p in [*enumerate(mapping.ins), *((~k, p) for k, p in enumerate(mapping.outs))]:
                if isinstance(p, Shard):
                    assert op.spec.mapping(op.attributes, ins, outs, k, p, 2) == mapping


# ---------------------------------------------------------------- text


@each
def test_prints_and_parses_back(sample: Sample):
    function = build(sample)
    verify(function)
    assert same(parse(pformat(function)), function)


# ---------------------------------------------------------------- decomposition

COMPOSED = [s for s in SAMPLES if lookup(s.op).decompose is not None]


@pytest.mark.parametrize("s", COMPOSED, ids=lambda s: s.op)
def test_decomposition_computes_the_same(s: Sample):
    function = build(s)
    parts = decompose(function)
    assert parts.inputs == function.inputs
    assert parts.outputs == function.outputs
    assert all(op.spec.decompose is None for op in parts.ops)
    for got, want in zip(run(parts, s.arrays()), run(function, s.arrays()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("s", COMPOSED, ids=lambda s: s.op)
def test_gradient_of_the_decomposition(s: Sample):
    function = build(s)
    maker = FunctionMaker("loss")
    maker.inputs += function.inputs
    maker.ops += function.ops
    y = function.outputs[0]
    c = maker.add_input_value("c", y.type)
    shape = y.type.global_shape  # type: ignore[union-attr]
    loss = maker.emit("Mul", y, c)
    loss = maker.emit("ReduceSum", loss, axes=tuple(range(len(shape))), keepdims=0) if shape else loss
    maker.set_outputs([loss])
    wrt = [v for v in function.inputs if v.type.dtype.floating]  # type: ignore[union-attr]
    arrays, cotangent = s.arrays(), np.random.default_rng(1).uniform(-1, 1, shape)
    got = run(decompose(grad(maker.finalize(), 0, wrt)), [*arrays, cotangent])[1:]
    for v, g in zip(wrt, got, strict=True):
        nothing = [np.zeros(v.type.global_shape) for v in function.outputs[1:]]  # type: ignore[union-attr]
        want = slopes(function, arrays, [cotangent, *nothing], function.inputs.index(v))
        np.testing.assert_allclose(g, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("xp", [np, TORCH], ids=["numpy", "torch"])
def test_the_gradient_of_a_weight_without_rows(xp: Any) -> None:
    a, d = np.zeros((8, 2, 0)), np.ones((8, 2, 4))
    arrays = (a, d) if xp is np else (torch.from_numpy(a), torch.from_numpy(d))
    assert tuple(lookup("MatMulGradWeight").eval(xp, *arrays).shape) == (0, 4)  # type: ignore[misc]
