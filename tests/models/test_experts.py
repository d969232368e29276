"""Which tokens go to which experts: a loop over tokens is the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distir
from distir.api.model import load
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import verify
from distir.ir.errors import UsageError
from distir.ir.function import FunctionMaker
from distir.ir.type import Float64, Tensor
from distir.models.decoder import Decoder, decoder
from distir.models.experts import routes
from distir.models.named import built, named, own_loss
from distir.ops.rules import shape_of


def oracle(probabilities: np.ndarray, choices: int, slots: int, normalized: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens one after the other, first choices before second ones."""
    groups, tokens, experts = probabilities.shape
    dispatch = np.zeros((groups, tokens, experts, slots))
    combine = np.zeros_like(dispatch)
    for g in range(groups):
        taken = [0] * experts
        for k in range(choices):
            for t in range(tokens):
                p = probabilities[g, t]
                order = sorted(range(experts), key=lambda e: (-p[e], e))[:choices]
                e = order[k]
                if taken[e] < slots:
                    dispatch[g, t, e, taken[e]] = 1
                    combine[g, t, e, taken[e]] = p[e] / sum(p[order]) if normalized else p[e]
                    taken[e] += 1
    flat = (groups, tokens, experts * slots)
    return dispatch.reshape(flat), combine.reshape(flat)


@given(st.data())
def test_routes_are_those_of_a_loop_over_tokens(data: st.DataObject) -> None:
    """With ties: probabilities are of few values."""
    groups, tokens, experts = (data.draw(st.integers(low, 5)) for low in (1, 1, 2))
    choices, slots = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 6))
    normalized = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    probabilities = rng.integers(1, data.draw(st.integers(2, 6)), (groups, tokens, experts)) / 8
    maker = FunctionMaker("routes")
    x = maker.add_input_value("x", Tensor(Float64, probabilities.shape))
    maker.set_outputs([*routes(maker, x, choices, slots, normalized)])
    function = maker.finalize()
    verify(function)
    got = SequentialExecutor().compute(function, [probabilities])
    for a, b in zip(got, oracle(probabilities, choices, slots, normalized), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)


@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_adds_what_each_tokens_experts_make_of_it(choices: int, gated: bool) -> None:
    """By a loop over tokens and experts, from what the layer is given."""
    config = Decoder(1, 8, 2, 11, 6, 2, ffn=5, gated=gated, experts=3, choices=choices, capacity=0.6, groups=4)
    function = decoder(config, Float64)
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {v.name: rng.standard_normal(shape_of(v)) for v in function.inputs}
    given["input_ids"] = rng.integers(0, 11, (2, 6))
    values: dict[str, np.ndarray] = {}
    made = {v: op for op in function.ops for v in op.outputs}
    router = next(op for op in function.ops if any(v.name == "0.mlp.router.weight" for v in op.inputs))
    combined = next(op for op in reversed(function.ops) if op.op_type == "Add" and made.get(op.inputs[1]) is not None)
    maker = FunctionMaker("inside")
    maker.inputs, maker.ops = list(function.inputs), list(function.ops)
    maker.set_outputs([router.inputs[0], combined.inputs[1]])
    x, got = SequentialExecutor().compute(maker.finalize(), [given[v.name] for v in function.inputs])
    values |= {name.removeprefix("0.mlp."): w for name, w in given.items() if name.startswith("0.mlp.")}
    scores = torch.softmax(torch.tensor(x @ values["router.weight"]), -1).numpy()
    assert x.shape == (4, 3, 8)
    assert config.slots == math.ceil(3 * choices * 0.6 / 3)
    _, combine = oracle(scores, choices, config.slots, choices > 1)
    share = combine.reshape(4, 3, 3, config.slots).sum(-1)
    want = np.zeros_like(x)
    for e in range(3):
        y = x @ values["experts.in.weight"][e] + values["experts.in.bias"][e]
        if gated:
            y = torch.nn.functional.silu(torch.tensor(y[..., :5])).numpy() * y[..., 5:]
        else:
            y = torch.nn.functional.gelu(torch.tensor(y), approximate="tanh").numpy()
        want += share[..., e, None] * (y @ values["experts.out.weight"][e] + values["experts.out.bias"][e])
    np.testing.assert_allclose(got.reshape(x.shape), want, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("gpt3-moe", 128),
        ("gpt3-moe:batch=16,choices=2", 256),
        ("gpt:layers=1,hidden=8,heads=2,seq=100,batch=1,experts=11,capacity=1.1", 10),  # in floats above 10
        ("gpt:layers=1,hidden=8,heads=2,seq=10,batch=6,experts=4,groups=3", 5),
        ("gpt:layers=1,hidden=8,heads=2,seq=10,batch=6,experts=4,groups=3,capacity=1.01", 6),
    ],
)
def test_slots(text: str, slots: int) -> None:
    assert named(text, {}).slots == slots


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gpt2-large", 301_768_960 + 2 * 236_129_280 + 300_460_800),
        ("gpt3-175b", 96 * (12 * 12_288**2 + 13 * 12_288) + (50_257 + 2048 + 2) * 12_288),
        ("dlrm", 4 * 80_000 * 128 + 49_536 + 728_065),
    ],
)
def test_presets(text: str, count: int) -> None:
    """As published of their gradients, by pipeline stages or MLPs."""
    model = built(text, {}).function
    assert sum(math.prod(shape_of(v)) for v in model.inputs if v.kind == "parameter") == count


def test_a_table_of_more_positions_than_the_sequence_has() -> None:
    """The first rows are added; the others have no gradient."""
    text = "gpt:layers=1,hidden=8,heads=2,vocab=7,seq=3,batch=2"
    long, short = (decoder(named(f"{text}{more}", {}), Float64) for more in (",positions=5", ""))
    rng = np.random.default_rng(0)
    given = {v.name: rng.standard_normal(shape_of(v)) for v in long.inputs} | {"input_ids": rng.integers(0, 7, (2, 3))}
    (got,) = SequentialExecutor().compute(long, [given[v.name] for v in long.inputs])
    given["positions"] = given["positions"][:3]
    (want,) = SequentialExecutor().compute(short, [given[v.name] for v in short.inputs])
    np.testing.assert_array_equal(got, want)


def test_a_model_whose_name_comes_with_a_loss_is_trained() -> None:
    assert [own_loss(name) for name in ("gpt2-large", "dlrm:rows=9", "gpt:layers=1", "model.onnx")] == [
        "cross-entropy",
        "loss",
        None,
        None,
    ]
    small = "dlrm:tables=2,rows=9,width=4,dense=3,top=5-1,batch=4"
    assert distir.load(small).optimizer is not None
    forward = distir.load(small, loss="none")
    assert forward.optimizer is None
    assert [v.name for v in forward.function.outputs] == ["loss"]


SMALL = "gpt:layers=1,hidden=8,heads=2,seq=6,batch=2,experts=4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SMALL},choices=5", "choices is a number from 1 to 4, got 5"),
        (f"{SMALL},capacity=0", "capacity is a number above 0, got 0"),
        (f"{SMALL},capacity=inf", "capacity is a number above 0, got inf"),
        (f"{SMALL},groups=5", "2 x 6 tokens do not divide by 5 groups"),
        (f"{SMALL},positions=5", "5 positions are fewer than a sequence of 6 has"),
        ("gpt", "layers and hidden and heads missing"),
        ("dlrm:top=5-2", "top ends with 1, got 5-2"),
        ("dlrm:width=4,bottom=4-5", "bottom ends with 4, got 4-5"),
        ("dlrm:top=5-x-1", "top is widths such as 512-256-1, got '5-x-1'"),
        ("dlrm:rows=0", "rows is a whole number of at least 1, got 0"),
        ("dlrm:layers=2", "dlrm has no 'layers'"),
    ],
)
def test_what_is_none(text: str, message: str) -> None:
    with pytest.raises(UsageError) as e:
        load(text)
    assert e.value.message == f"{text}: {message}"
