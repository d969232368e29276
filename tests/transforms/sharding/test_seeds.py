"""Which splits tensor parallelism finds: the same for every batch, and attention always by its heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.ir import Device, Function, FunctionMaker
from distir.ir.function import Role
from distir.ir.spec import Spec, lookup
from distir.ir.type import Float64, Placement, Shard, Tensor
from distir.models.gpt import gpt
from distir.ops.rules import shape_of, tensor
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.passes import stage_meshes
from distir.transforms.plan import Plan
from distir.transforms.rewriting.decompose import decompose
from distir.transforms.rewriting.fuse import fuse
from distir.transforms.roles import batch_dims, weights
from distir.transforms.sharding.classes import all_classes
from distir.transforms.sharding.graph import Signature, graph_of
from distir.transforms.sharding.place import View, place_all, view
from distir.transforms.sharding.quotient import quotient
from distir.transforms.sharding.seeds import tensor_parallel
from distir.transforms.sharding.shares import shares
from distir.transforms.sharding.spread import SplitDims, padded, place
from tests.transforms.llama import llama

SIZES = (4, 16, 32, 64, 128)
BATCHES = (1, 2, 3, 4, 8, 12, 32, 1024)


class Model(NamedTuple):
    """Sizes of a transformer; `kv` is 0 for one like GPT-2."""

    tp: int
    heads: int
    size: int
    kv: int = 0
    layers: int = 1
    sequence: int = 16
    vocabulary: int = 512
    ffn: float = 3.25
    tied: bool = False
    flat: bool = False
    clip: float | None = None

    def step(self, batch: int) -> Function:
        width = self.heads * self.size
        if not self.kv:
            made = gpt(self.layers, width, self.heads, self.vocabulary, self.sequence, batch, Float64)
        else:
            sizes = self.layers, width, self.heads, self.kv, int(self.ffn * width), self.vocabulary, self.sequence
            made = llama(*sizes, batch, self.tied, self.flat)
        return decompose(fuse(training_step(made, "cross-entropy", AdamW(0.01, clip_norm=self.clip))), True)


@st.composite
def models(draw: Any) -> Model:
    tp = draw(st.sampled_from((2, 4, 8)))
    heads = draw(st.sampled_from([h for h in (4, 8, 12, 16, 32, 64, 128) if h % tp == 0]))
    shared = [k for k in (2, 4, 8, heads) if heads % k == 0 and k % tp == 0]
    return Model(
        tp,
        heads,
        draw(st.sampled_from([s for s in SIZES if s * heads <= 16384])),
        draw(st.sampled_from([0, *shared])),
        draw(st.sampled_from((1, 2))),
        draw(st.sampled_from((4, 16, 1024, 8192))),
        draw(st.sampled_from((64, 509, 8192, 128256))),
        draw(st.sampled_from((2, 2.5, 3.25, 4))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from((None, 1.0))),
    )


class Splits(NamedTuple):
    weights: list[Placement]
    attention: set[Placement]


def splits(model: Model, batch: int, dp: int = 1, microbatches: int = 1) -> Splits:
    """How weights are split over tp, and the queries of attention and of its gradient."""
    source = model.step(batch)
    plan = Plan(dp, model.tp, microbatches=microbatches)
    mesh = stage_meshes(plan, [Device("gpu", i) for i in range(plan.size)]).meshes[0]
    dims = batch_dims(source)
    data = SplitDims(tuple([(i, dims[v]) for i, v in enumerate(source.inputs) if v in dims]))
    placed = place(padded(source, data, plan.sharding), data, plan.sharding, mesh)
    queries = [op.inputs[0] for op in placed.ops if op.op_type in ("Attention", "AttentionGrad")]
    assert len(queries) == 2 * model.layers
    return Splits([tensor(v).on("tp") for v in weights(placed)], {tensor(v).on("tp") for v in queries})


def by_heads(found: Splits) -> bool:
    return found.attention == {Shard(1)}


@settings(max_examples=10)
@given(models(), st.sampled_from(BATCHES))
def test_splits_do_not_depend_on_the_batch_and_attention_is_split(model: Model, batch: int) -> None:
    """Nor on the number of microbatches and of replicas, and not where the batch is as long as another dim."""
    found = splits(model, 1)
    assert by_heads(found)
    assert splits(model, batch) == found
    assert splits(model, model.heads) == splits(model, model.sequence) == found
    assert splits(model, 16, dp=2, microbatches=4) == found


def test_a_llama_of_405_billion_weights() -> None:
    """Of which two layers: 128 heads on 8 devices were on each of them at a batch of 4 or 8."""
    large = partial(Model, heads=128, size=128, kv=8, layers=2, sequence=8192, vocabulary=128256)
    for tp in (4, 8):
        found = [splits(large(tp), batch) for batch in (1, 4, 8, 32, 1024)]
        assert by_heads(found[0])
        assert all(x == found[0] for x in found)


@settings(max_examples=20)
@given(models())
def test_no_choice_of_groups_costs_less(model: Model) -> None:
    """Against all choices; less by 2 % may be left, and what takes more collectives."""
    source = model.step(2)
    graph = graph_of(source)
    batch = tuple((graph.index[v], Shard(dim)) for v, dim in batch_dims(source).items())
    found = tensor_parallel(graph, model.tp, [graph.index[v] for v in weights(source)], batch)
    problem = next(x for x in graph.cache.values() if type(x).__name__ == "_Problem")
    choices = [frozenset[int]()]
    for group, clash in enumerate(problem.groups.clash):
        choices += [c | {group} for c in choices if group not in clash and not clash & c]
    every = [place_all(problem.small.view, model.tp, c) for c in choices]
    cheapest = min(every, key=lambda p: p.price)
    assert found.placed.price <= cheapest.price / 0.98 or found.placed.collectives < cheapest.collectives


@settings(max_examples=20)
@given(models(), st.integers(3, 5))
def test_ops_of_equal_layers_are_placed_as_each_would_be(model: Model, layers: int) -> None:
    source = model._replace(layers=layers).step(2)
    graph = graph_of(source)
    batch = tuple((graph.index[v], Shard(dim)) for v, dim in batch_dims(source).items())
    found = tensor_parallel(graph, model.tp, [graph.index[v] for v in weights(source)], batch)
    rows = [[(s, c) for s, c in row if c in found.chosen] for row in found.classes.mappings]
    alone = place_all(view(graph, rows, shares(graph, batch)), model.tp, found.chosen)
    assert found.placed.mappings == alone.mappings
    assert found.placed.inputs == alone.inputs
    assert found.placed.collectives == alone.collectives


def plain(layers: int) -> Function:
    return Model(2, heads=4, size=4, kv=2, layers=layers, vocabulary=64, sequence=4, ffn=2).step(2)


def clipped(layers: int) -> Function:
    """Its norm takes the gradients of all layers."""
    return Model(2, heads=4, size=4, layers=layers, vocabulary=64, sequence=4, clip=1.0).step(2)


def with_dropout(layers: int) -> Function:
    """Each dropout has a stream of its own."""
    f = FunctionMaker("net")
    x = f.add_input_value("x", Tensor(Float64, (2, 4)), Role("data", 0))
    for _ in range(layers):
        w = f.add_input_value("w", Tensor(Float64, (4, 4)), Role("parameter"))
        x = f.emit("Dropout", f.emit("Tanh", f.emit("MatMul", x, w)), ratio=0.5)
    f.set_outputs([x])
    return decompose(fuse(training_step(f.finalize(), "mse")), True)


def form(sig: Signature) -> tuple[object, ...]:
    """What ops that are merged have in common: also their attributes, if they are on more than single numbers."""
    shapes = *map(tuple, sig.ins), *map(tuple, sig.outs)
    return sig.spec, len(sig.ins), shapes, sig.attrs if any(shapes) else None


@pytest.mark.parametrize("step", [plain, clipped, with_dropout])
def test_a_quotient_does_not_grow_with_the_layers(step: Callable[[int], Function]) -> None:
    found: list[int] = []
    for layers in (6, 7, 9):
        source = step(layers)
        graph = graph_of(source)
        full = view(graph, [[] for _ in graph.sigs], shares(graph))
        small = quotient(graph, full)
        assert sum(small.view.times) == len(graph.sigs)
        assert sum(small.view.copies) == len(graph.values) == len(small.values)
        for j, (sig, outs) in enumerate(zip(graph.sigs, graph.outs, strict=True)):
            same = {small.values[v] for v in outs}
            kinds = {form(k) for k, made in zip(small.view.sigs, small.view.outs, strict=True) if same & {*made}}
            assert kinds == {form(sig)}, f"op {j} is merged with another kind"
        found.append(len(small.view.sigs))
    assert found[0] == found[1] == found[2] < 300


def test_a_quotient_merges_what_cannot_be_told_apart() -> None:
    """Not ops of different kinds, nor those of which the function gives one alone."""
    for second, outputs, ops in (("Exp", 2, 1), ("Tanh", 2, 2), ("Exp", 1, 2)):
        f = FunctionMaker("net")
        x = f.add_input_value("x", Tensor(Float64, (4, 8)))
        f.set_outputs([f.emit("Exp", x), f.emit(second, x)][:outputs])
        graph = graph_of(f.finalize())
        small = quotient(graph, view(graph, [[] for _ in graph.sigs], shares(graph))).view
        assert len(small.sigs) == ops, (second, outputs)


def with_split(function: Function, spec: Spec) -> tuple[View, View]:
    """The graph in which the ops of one kind may be split along their first dim, and its quotient."""
    graph = graph_of(function)
    mappings = all_classes(graph, 2, 1).mappings
    split = [[(row[0][0], 0)] if sig.spec is spec else [] for sig, row in zip(graph.sigs, mappings, strict=True)]
    full = view(graph, split, shares(graph))
    return full, quotient(graph, full).view


@pytest.mark.parametrize("layers", [3, 4, 9])
def test_what_several_ops_take_is_converted_once_in_a_quotient(layers: int) -> None:
    """As in the whole graph, though ops of a quotient stand for several."""
    f = FunctionMaker("net")
    x, t = (f.add_input_value(name, Tensor(Float64, shape)) for name, shape in (("x", (4, 8)), ("t", (8,))))
    table = f.emit("Exp", t)
    for _ in range(layers):
        for _ in range(3):  # so that the first of these products has the same neighbours as the others
            x = f.emit("Neg", x)
        x = f.emit("Tanh", f.emit("Mul", x, table))
        for _ in range(3):
            x = f.emit("Neg", x)
    f.set_outputs([x])
    full, small = with_split(f.finalize(), lookup("Exp"))
    assert layers in small.times
    whole, merged = (place_all(v, 2, {0}) for v in (full, small))
    assert whole.collectives == merged.collectives == 1
    assert merged.price == pytest.approx(whole.price, rel=1e-12)


@pytest.mark.parametrize("layers", [4, 9])
def test_what_ops_that_differ_take_is_converted_for_most_in_a_quotient(layers: int) -> None:
    """The first sum is told from the others, and what they take is not: as many are converted as one of both takes."""
    f = FunctionMaker("net")
    x = f.add_input_value("x", Tensor(Float64, (4, 8)))
    for _ in range(layers):
        y = f.emit("Exp", f.emit("Tanh", f.emit("Tanh", x)))
        x = f.emit("Abs", f.emit("Abs", f.emit("Add", f.emit("Neg", x), y)))
    f.set_outputs([x])
    full, small = with_split(f.finalize(), lookup("Exp"))
    sums = [n for sig, n in zip(small.sigs, small.times, strict=True) if sig.spec.name == "Add"]
    assert sums == [1, layers - 1]
    assert place_all(full, 2, {0}).collectives == layers
    assert place_all(small, 2, {0}).collectives == layers - 1


def test_shares_are_those_of_one_sample() -> None:
    found = {}
    for batch in (1, 2, 6):
        source = Model(2, heads=4, size=4, kv=2, vocabulary=16, sequence=4).step(batch)
        graph = graph_of(source)
        dims = tuple((graph.index[v], Shard(dim)) for v, dim in batch_dims(source).items())
        found[batch] = shares(graph, dims)
        assert sum(found[batch].flops) == pytest.approx(1)
        parameters = weights(source)
        total = sum(math.prod(shape_of(v)) for v in parameters)
        assert [found[batch].stored[graph.index[v]] for v in parameters] == [
            math.prod(shape_of(v)) / total for v in parameters
        ]
    assert found[1].made == found[2].made == found[6].made
    assert found[1].flops == pytest.approx(found[6].flops, rel=1e-12)
