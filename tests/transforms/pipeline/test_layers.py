"""The layers of programs: what repeats, by the weights that it uses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir.api.model import load
from distir.ir import Function, FunctionMaker, Value
from distir.ir.function import Role
from distir.ir.type import Float64, Tensor
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.pipeline.layers import _crossing, even_layers, layers
from tests.transforms.programs import small_gpt

WIDTH = 4
STEP = {"loss": "cross-entropy", "optimizer": "adamw"}
OPS = {"p": "MatMul", "a": "Add", "m": "Mul", "d": "Div"}
"""What uses a weight, by letter: a product by a matrix, or a pointwise op with a vector."""


class Chain:
    """A program in which each letter uses a weight of its own, and a dot none."""

    def __init__(self) -> None:
        self.f = FunctionMaker("chain")
        self.x = self.f.add_input_value("x", Tensor(Float64, (2, WIDTH)), Role("data", 0))

    def use(self, letter: str, x: Value, name: str) -> Value:
        shape = (WIDTH, WIDTH) if letter == "p" else (WIDTH,)
        w = self.f.add_input_value(name, Tensor(Float64, shape), Role("parameter"))
        return self.f.emit(OPS[letter], x, w)

    def of(self, letters: str) -> Function:
        x = self.x
        for i, letter in enumerate(letters):
            x = self.f.emit("Tanh", x) if letter == "." else self.use(letter, x, f"{letter}{i}")
        self.f.set_outputs([x])
        return self.f.finalize()


def names(function: Function) -> list[str]:
    return [function.inputs[i].name for i in layers(function).first]


def after(function: Function) -> str | None:
    i = layers(function).after
    return None if i is None else function.inputs[i].name


@pytest.mark.parametrize(
    ("letters", "starts", "end"),
    [
        ("papa", [0, 2], None),
        ("mpapapad", [1, 3, 5], 7),
        ("m.pa.pa.pa.d", [2, 5, 8], 11),
        ("dpmpmpmp", [2, 4, 6], None),  # what comes before the first ends as a layer does
        ("pppp", [0, 1, 2, 3], None),
        ("ppaappaappaa", [0, 4, 8], None),  # though its parts repeat, too
        ("pamd", [], None),
        ("", [], None),
        ("p", [], None),
        ("pampampamdada", [0, 3, 6], 9),  # vectors alone are no layers beside products
        ("pmpmdpaapaa", [0, 2, 5, 8], None),  # those before the longest, too
        ("paapaapaadpmpmd", [0, 3, 6, 10, 12], 14),  # and behind it
    ],
)
def test_what_repeats_is_a_layer(letters: str, starts: list[int], end: int | None) -> None:
    function = Chain().of(letters)
    found = [int(name[1:]) for name in names(function)]
    assert found == starts
    last = after(function)
    assert (None if last is None else int(last[1:])) == end


def longest(text: str) -> tuple[int, int, int]:
    """The start, period and number of the longest repetition of a text, by trying all."""
    found = [
        (-count * period, period, start, count)
        for start in range(len(text))
        for period in range(1, len(text))
        for count in range(2, len(text) // period + 1)
        if start + count * period <= len(text)
        if text[start : start + count * period] == text[start : start + period] * count
    ]
    _, period, start, count = min(found)
    return start, period, count


@settings(deadline=None, max_examples=150)
@given(
    letters=st.text("pam.", min_size=1, max_size=6).filter(lambda x: x.strip(".")),
    count=st.integers(2, 5),
    before=st.text("pamd", max_size=4),
    behind=st.text("pamd", max_size=4),
)
def test_the_longest_repetition_is_found(letters: str, count: int, before: str, behind: str) -> None:
    text = before + letters * count + behind
    function = Chain().of(text)
    uses = [i for i, letter in enumerate(text) if letter != "."]
    used = "".join([text[i] for i in uses])
    start, period, number = longest(used)
    while used[start + number * period :][:1] == used[start]:  # it goes on: as well from the next use on
        start += 1
    found = [int(name[1:]) for name in names(function)]
    assert set(found) >= {uses[start + k * period] for k in range(number)}


def test_branches_are_no_layers() -> None:
    """The projections of one attention: alike, and beside each other."""
    chain = Chain()
    x, y, z = [chain.use("p", chain.x, name) for name in ("q", "k", "v")]
    chain.f.set_outputs([chain.use("p", chain.f.emit("Mul", chain.f.emit("Add", x, y), z), "out")])
    assert names(chain.f.finalize()) == []


def test_layers_may_be_smaller_than_branches() -> None:
    chain = Chain()
    x = chain.x
    for name in ("q", "k", "v", "o"):
        x = chain.f.emit("Add", x, chain.use("p", chain.x, name))
    for i in range(3):
        x = chain.use("a", x, f"a{i}")
    chain.f.set_outputs([x])
    assert names(chain.f.finalize()) == ["a0", "a1", "a2"]


@given(spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda s: s[0] < s[1]), max_size=8))
def test_values_that_cross_are_counted(spans: list[tuple[int, int]]) -> None:
    want = [sum(begin < n <= end for begin, end in spans) for n in range(10)]
    assert _crossing(10, spans) == want


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_layers_begin_where_fewest_values_cross(first: bool, trained: bool) -> None:
    """Norms before attention and MLP, and one behind the last layer; or behind them, and one before the first."""
    chain = Chain()
    emit, use = chain.f.emit, chain.use
    x = chain.x if first else use("m", chain.x, "norm")
    for i in range(3):
        y = use("m", x, f"{i}.norm") if first else x
        y = emit("Add", x, use("p", emit("Tanh", use("p", y, f"{i}.in")), f"{i}.out"))
        x = y if first else use("m", y, f"{i}.norm")
    chain.f.set_outputs([use("a", use("m", x, "norm") if first else x, "head")])
    function = chain.f.finalize()
    if trained:  # the backward pass uses values of all layers
        function = training_step(function, "mse", AdamW(0.1))
    assert names(function) == [f"{i}.{'norm' if first else 'in'}" for i in range(3)]
    assert after(function) == ("norm" if first else "head")


def test_an_encoder_and_a_decoder_have_layers_each() -> None:
    chain = Chain()
    x = chain.x
    for i in range(3):
        x = chain.use("a", chain.use("p", x, f"e{i}.product"), f"e{i}.bias")
    y = chain.use("d", chain.x, "between")
    for i in range(3):
        y = chain.f.emit("Add", chain.use("p", y, f"d{i}.own"), chain.use("p", x, f"d{i}.other"))
        y = chain.use("m", y, f"d{i}.scale")
    chain.f.set_outputs([chain.use("a", y, "head")])
    function = chain.f.finalize()
    assert names(function) == [*[f"e{i}.product" for i in range(3)], *[f"d{i}.own" for i in range(3)]]
    assert after(function) == "head"


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("gpt:layers=5,hidden=8,heads=2,vocab=16,seq=4,batch=2", {}),
        ("llama:layers=4,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=16,seq=4,batch=2", {}),
        ("llama:layers=3,hidden=8,heads=2,vocab=16,seq=4,batch=2,experts=4,choices=2", {}),
        ("gpt:layers=5,hidden=8,heads=2,vocab=16,seq=4,batch=2", STEP),
        ("gpt:layers=4,hidden=8,heads=2,vocab=16,seq=4,batch=2", {**STEP, "precision": "bf16"}),
    ],
)
def test_layers_of_decoders(model: str, more: dict[str, str]) -> None:
    function = load(model, **more).function
    count = int(model.split("layers=")[1].split(",")[0])
    assert names(function) == [f"{i}.norm1.weight" for i in range(count)]
    assert after(function) == "norm.weight"


def test_layers_of_a_model_with_other_names() -> None:
    assert names(small_gpt().function) == ["h0.ln_1.weight", "h1.ln_1.weight"]


def test_a_layer_begins_where_its_weight_is_used_not_where_it_is_cast() -> None:
    chain = Chain()
    ws = [chain.f.add_input_value(f"w{i}", Tensor(Float64, (WIDTH,)), Role("parameter")) for i in range(6)]
    half = chain.f.emit("Constant", value=(0.5,), dtype=Float64, shape=())
    scaled = [chain.f.emit("Mul", half, w) for w in reversed(ws)][::-1]
    x = chain.x
    for k, w in enumerate(scaled):
        x = chain.f.emit("Sub", x, w) if k % 2 else chain.f.emit("Sub", w, x)
    chain.f.set_outputs([x])
    assert names(chain.f.finalize()) == ["w0", "w2", "w4"]


def test_states_are_no_weights_of_layers() -> None:
    """The moments of the optimizer are as many as the weights, and used one after the other."""
    function = training_step(Chain().of("mpapad"), "mse", AdamW(0.1))
    assert names(function) == ["p1", "p3"]


@pytest.mark.parametrize(
    ("count", "stages", "want"),
    [
        (8, 4, [2, 2, 2, 2]),
        (126, 8, [15, 16, 16, 16, 16, 16, 16, 15]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [2, 3, 3, 3]),
        (5, 2, [2, 3]),
        (3, 1, [3]),
        (2, 2, [1, 1]),
    ],
)
def test_even_layers(count: int, stages: int, want: Sequence[int]) -> None:
    assert even_layers(count, stages) == want
