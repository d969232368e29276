"""Masks known when a model is loaded make attention causal if they say just that, and nothing else does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir.api import masks
from distir.api.masks import with_causal_attention
from distir.executor.reference.repeats import once
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir import Function, FunctionMaker, Value, verify
from distir.ir.function import Op, Role
from distir.ir.type import Bool, Float64, Tensor

B, H, S, E = 2, 3, 5, 4
LOWEST = float(np.finfo(np.float64).min)


class Writer(FunctionMaker):
    """Writes attention of two layers out, with masks that are known."""

    def __init__(self, rows: int = S, columns: int = S) -> None:
        super().__init__("attention")
        self.q = self.add_input_value("q", Tensor(Float64, (B, H, rows, E)), Role("data", 0))
        self.k = self.add_input_value("k", Tensor(Float64, (B, H, E, columns)), Role("data", 0))
        self.v = self.add_input_value("v", Tensor(Float64, (B, H, columns, E)), Role("data", 0))
        self.arrays: dict[Value, Any] = {}

    def known(self, name: str, x: Any, role: str = "constant") -> Value:
        x = np.asarray(x)
        v = self.add_input_value(name, Tensor(Bool if x.dtype == bool else Float64, x.shape), Role(role))
        self.arrays[v] = x
        return v

    def of(self, x: float) -> Value:
        return self.emit("Constant", value=(x,), shape=(), dtype=Float64)

    def scores(self) -> Value:
        return self.emit("MatMul", self.q, self.k)

    def done(self, *scores: Value) -> Function:
        self.set_outputs([self.emit("MatMul", self.emit("Softmax", x, axis=-1), self.v) for x in scores])
        return self.finalize()

    def check(self, function: Function, causal: Sequence[bool | None]) -> Function:
        """Which of its layers become causal, None: lose their mask; it computes the same."""
        made = with_causal_attention(function, self.arrays)
        verify(made)
        if any(c is not False for c in causal):
            attention = [op for op in made.ops if op.op_type == "Attention"]
            assert [op.attributes.get("causal", False) for op in attention] == [bool(c) for c in causal]
            assert [len(op.inputs) for op in attention] == [4 if c is False else 3 for c in causal]
        else:
            assert made is function
        rng = np.random.default_rng(0)
        given = {v: self.arrays.get(v, rng.standard_normal(v.type.shape)) for v in function.inputs}  # type: ignore[union-attr]
        want, got = (SequentialExecutor().compute(f, given) for f in (function, made))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
        return made


def mask(low: float, *lead: int, rows: int = S, columns: int = S) -> np.ndarray:
    return np.broadcast_to(np.triu(np.full((rows, columns), low), 1), (*lead, rows, columns))


@pytest.mark.parametrize("low", [-math.inf, LOWEST, -1e30])
@pytest.mark.parametrize("lead", [(), (1, 1), (B, 1), (B, H)], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(S, S), (3, S), (S, 3), (1, 1)])
def test_a_causal_mask_goes(low: float, lead: tuple[int, ...], rows: int, columns: int) -> None:
    w = Writer(rows, columns)
    m = w.known("m", mask(low, *lead, rows=rows, columns=columns))
    made = w.check(w.done(w.emit("Add", w.scores(), m)), [True])
    assert m not in made.inputs


@pytest.mark.parametrize("keep", [True, False])
def test_scores_that_are_filled(keep: bool) -> None:
    """Where it is a condition, each layer makes a mask of it."""
    w = Writer()
    m = w.known("m", np.tri(S, dtype=bool) if keep else ~np.tri(S, dtype=bool))
    low = w.of(LOWEST)
    rows = [w.emit("Where", m, *((w.scores(), low) if keep else (low, w.scores()))) for _ in range(2)]
    assert m not in w.check(w.done(*rows), [True, True]).inputs


def test_a_mask_that_is_computed() -> None:
    """From what is known, in several ops."""
    w = Writer()
    ahead = w.emit("Sub", w.of(1.0), w.known("seen", np.tri(S)))
    made = w.check(w.done(w.emit("Add", w.scores(), w.emit("Mul", ahead, w.of(-1e38)))), [True])
    assert [v.name for v in made.inputs] == ["q", "k", "v"]


def test_another_mask_stays_beside_it() -> None:
    w = Writer()
    window = mask(LOWEST) + mask(LOWEST).T * (np.tri(S, k=-3) > 0)
    a, b = w.known("a", mask(LOWEST)), w.known("b", np.nan_to_num(window))
    made = w.check(w.done(w.emit("Add", w.scores(), a), w.emit("Add", w.scores(), b)), [True, False])
    assert b in made.inputs
    assert a not in made.inputs


@pytest.mark.parametrize("lead", [(), (B, 1)], ids=str)
def test_a_mask_that_hides_nothing_goes(lead: tuple[int, ...]) -> None:
    """As exporters write for models without one; beside it a causal one, and one that hides something."""
    w = Writer()
    nothing, all_seen = w.known("nothing", np.zeros((*lead, S, S))), w.known("all_seen", np.ones((*lead, S, S), bool))
    other = np.zeros((*lead, S, S))
    other[..., 0] = LOWEST
    added = [nothing, w.known("m", mask(LOWEST)), w.known("other", other)]
    rows = [w.emit("Add", w.scores(), m) for m in added]
    made = w.check(w.done(*rows, w.emit("Where", all_seen, w.scores(), w.of(LOWEST))), [None, True, False, None])
    assert [v.name for v in made.inputs] == ["q", "k", "v", "other"]


def test_what_else_needs_the_mask_keeps_it() -> None:
    w = Writer()
    m = w.known("m", mask(-1e30))
    scores = w.emit("Add", w.scores(), m)
    w.set_outputs([w.emit("MatMul", w.emit("Softmax", scores, axis=-1), w.v), w.emit("Neg", m)])
    assert m in w.check(w.finalize(), [True]).inputs


def test_inputs_that_nothing_needed_stay() -> None:
    w = Writer()
    idle = w.known("idle", np.zeros(3))
    made = w.check(w.done(w.emit("Add", w.scores(), w.known("m", mask(LOWEST)))), [True])
    assert idle in made.inputs


@pytest.mark.parametrize("role", ["parameter", "data"])
def test_a_mask_that_may_change_stays(role: str) -> None:
    w = Writer()
    w.known("constant", np.zeros(3))
    w.check(w.done(w.emit("Add", w.scores(), w.known("m", mask(LOWEST), role))), [False])


def test_a_mask_whose_numbers_are_not_known_stays() -> None:
    w = Writer()
    w.known("other", np.zeros((S, S)))
    m = w.add_input_value("m", Tensor(Float64, (S, S)), Role("constant"))
    made = with_causal_attention(w.done(w.emit("Add", w.scores(), m)), w.arrays)
    assert m in made.inputs


def test_a_mask_of_one_row_for_all_stays() -> None:
    """(1, t) says of no row that it sees less than another."""
    w = Writer()
    m = w.known("m", [[0.0] + [LOWEST] * (S - 1)])
    w.check(w.done(w.emit("Add", w.scores(), m)), [False])


@given(st.data())
def test_one_number_that_is_not_causal_is_enough(data: st.DataObject) -> None:
    w = Writer()
    numbers = mask(LOWEST, B, 1).copy()
    at = tuple([data.draw(st.integers(0, n - 1)) for n in numbers.shape])
    numbers[at] = data.draw(st.sampled_from([-1e4, 1.0, -1.0, 0.0 if numbers[at] else LOWEST]))
    if at[2:] == (0, 0):
        numbers[at] = 1.0  # the first row sees nothing else
    w.check(w.done(w.emit("Add", w.scores(), w.known("m", numbers))), [False])


def test_what_is_alike_for_all_samples_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a million, of which not one sample's mask would fit in memory: what is computed is counted."""
    batch, computed = 1 << 20, []
    evaluated = masks.evaluate_once

    def counting(op: Op, ins: Any, most: int) -> Any:
        results = evaluated(op, ins, most)
        computed.append(sum(once(x).size for x in results or ()))
        return results

    monkeypatch.setattr(masks, "evaluate_once", counting)
    f = FunctionMaker("attention")
    q, k, v = (
        f.add_input_value(n, Tensor(Float64, (batch, 1, *s)), Role("data", 0))
        for n, s in (("q", (S, E)), ("k", (E, S)), ("v", (S, E)))
    )
    m = f.add_input_value("m", Tensor(Bool, (1, 1, S, S)), Role("constant"))
    seen = f.emit("Not", f.emit("Expand", m, shape=(batch, 1, S, S)))
    low = f.emit("Constant", value=(LOWEST,), shape=(), dtype=Float64)
    scores = f.emit("Where", f.emit("Not", seen), f.emit("MatMul", q, k), low)
    f.set_outputs([f.emit("MatMul", f.emit("Softmax", scores, axis=-1), v)])
    made = with_causal_attention(f.finalize(), {m: np.tri(S, dtype=bool)[None, None]})
    assert [op.attributes["causal"] for op in made.ops if op.op_type == "Attention"] == [True]
    assert len(computed) >= 4
    assert max(computed) == S * S


@given(st.data())
def test_samples_that_differ_are_all_looked_at(data: st.DataObject) -> None:
    """Of a mask that is causal for samples from a number on, or for those of one, nothing is taken for granted."""
    w = Writer()
    rows = np.arange(B).reshape(B, 1, 1, 1)
    first = data.draw(st.integers(0, B))
    late = w.known("late", rows >= first)
    seen = w.known("seen", np.tri(S, dtype=bool)[None, None])
    everything = w.emit("Expand", w.known("all", np.ones((1, 1, 1, S), bool)), shape=(B, 1, S, S))
    allowed = w.emit("Where", late, w.emit("Expand", seen, shape=(B, 1, S, S)), everything)
    w.check(w.done(w.emit("Where", allowed, w.scores(), w.of(LOWEST))), [{0: True, B: None}.get(first, False)])
