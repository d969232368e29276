"""Decoders of several architectures under plans: distributed, they compute what they compute on one device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from distir.ir.spec import lookup
from distir.ir.type import Float64
from distir.models.configs import described
from distir.models.decoder import angles, decoder
from distir.transforms.differentiation.training import AdamW, training_step
from distir.transforms.sharding import seeds, sequence
from distir.transforms.sharding.graph import Graph
from distir.transforms.sharding.place import View
from distir.transforms.sharding.quotient import Quotient, quotient
from tests.transforms.programs import (
    BATCH,
    TOLERANCE,
    Plan,
    Program,
    check,
    collectives,
    distributed,
    error,
    filled,
    run,
)

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 24,
    "max_position_embeddings": 8,
}
GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {**GQA, "sliding_window": 3},
    "gemma3_text": {**GQA, "sliding_window": 3, "sliding_window_pattern": 2},
    "mixtral": {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
    "qwen2_moe": {
        **SIZES,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "gpt_neox": {**SIZES, "rotary_pct": 0.5},
    "phi": {**SIZES, "partial_rotary_factor": 0.5},
    "phi3": {**SIZES, "sliding_window": 5},
}


@functools.cache
def program(name: str, layers: int = 2) -> Program:
    """A training step that also gives gradients."""
    sizes = described({"model_type": name, **CONFIGS[name]}, {"batch": BATCH, "layers": layers})
    step = training_step(decoder(sizes, Float64), "cross-entropy", AdamW(0.01), gradients=True)
    rng = np.random.default_rng(3)
    ids, labels = rng.integers(0, sizes.vocab, (2, BATCH, sizes.seq))
    return filled(step, {"input_ids": ids, "labels": labels, **angles(sizes)}, rng)


ALL = Plan(2, 2, 2, 2)
CONTEXT = ("cp=2:input_ids.1,labels.1,cos.2,sin.2",)
MORE = [
    Plan(2, 1, 2, 2, split=CONTEXT),
    Plan(1, 2, 2, 2, sequence_parallel=True),
    Plan(2, 2, 1, 2, sequence_parallel=True, split=CONTEXT, recompute="gathers"),
    Plan(2, 2, 1, 2, zero=3),
    Plan(1, 2, 2, 2, recompute="full"),
    Plan(1, 4, 1, 2),
]


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_sequential(name: str) -> None:
    check(program(name), ALL)


@pytest.mark.slow
@pytest.mark.parametrize("plan", MORE, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_sequential_under_other_plans(name: str, plan: Plan) -> None:
    if plan.split and name == "gemma3_text":
        plan = plan._replace(split=(f"{CONTEXT[0]},local_cos.2,local_sin.2",))
    check(program(name), plan)


@pytest.mark.parametrize(("name", "reductions"), [("phi", 2), ("gpt_neox", 3), ("phi3", 4)])
def test_parallel_layers_reduce_what_attention_and_mlp_give_once(name: str, reductions: int) -> None:
    """Of both together, before their biases; with one norm also the gradients of what they are given."""

    def count(layers: int) -> int:
        return collectives(distributed(program(name, layers), Plan(tp=2)).placed, "tp")["MPIAllreduce"]

    assert count(3) - count(2) == reductions


FAULTS = {
    "one key more": lambda how: {**how, "window": how["window"] + 1} if "window" in how else how,
    "another cap": lambda how: {**how, "softcap": 2 * how["softcap"]} if "softcap" in how else how,
    "rows counted from 0": lambda how: {**how, "start": 0},
}


@pytest.mark.parametrize("kind", ["GroupedAttention", "GroupedAttentionGrad"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_attention_computes_counts(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it computed wrongly on devices, results would differ."""
    given = program("gemma2")
    made = distributed(given, Plan(2, 2, split=CONTEXT)).program
    want = given.results()
    assert error(run(made, given), want) <= TOLERANCE
    old = lookup(kind).eval
    assert old is not None
    monkeypatch.setattr(lookup(kind), "eval", lambda xp, *row, **how: old(xp, *row, **FAULTS[fault](how)))
    assert error(run(made, given), want) > 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_layers_have_the_collectives_that_each_would_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided once, as on a quotient, or one by one. With 2 heads of keys on 4 devices each is on several, so that the
    gradients of keys are sums."""
    plan, found = Plan(1, 4, sequence_parallel=True), []
    for decided in (quotient, _one_by_one):
        monkeypatch.setattr(seeds, "quotient", decided)
        monkeypatch.setattr(sequence, "quotient", decided)
        found.append(collectives(distributed(program.__wrapped__(name, 4), plan).program))
    assert found[0] == found[1]


def _one_by_one(graph: Graph, full: View) -> Quotient:
    return Quotient(full, range(len(graph.values)))
