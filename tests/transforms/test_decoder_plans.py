"""A small decoder with root-mean-square norms under plans: distributed, it computes what it computes on one device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distir.ir import Value
from distir.ir.spec import lookup
from distir.ir.type import Float64, Partial, Shard
from distir.models.decoder import angles, decoder
from distir.models.named import named
from distir.ops.rules import tensor
from distir.transforms.differentiation.training import AdamW, training_step
from tests.transforms.programs import BATCH, TOLERANCE, Plan, Program, check, distributed, error, filled, run

SIZES = named("llama:layers=2,hidden=16,heads=4,kv_heads=2,ffn=24,vocab=24,seq=8", {"batch": BATCH})


@functools.cache
def llama() -> Program:
    """A training step that also gives gradients."""
    step = training_step(decoder(SIZES, Float64), "cross-entropy", AdamW(0.01), gradients=True)
    rng = np.random.default_rng(3)
    ids, labels = rng.integers(0, SIZES.vocab, (2, BATCH, SIZES.seq))
    return filled(step, {"input_ids": ids, "labels": labels, **angles(SIZES)}, rng)


CONTEXT = ("cp=2:input_ids.1,labels.1,cos.2,sin.2",)
PLANS = [
    Plan(),
    Plan(dp=2),
    Plan(tp=2),
    Plan(pp=2, microbatches=4),
    Plan(2, 2, 2, 2),
    Plan(tp=2, sequence_parallel=True),
    Plan(2, 2, 2, 2, sequence_parallel=True),
    *[Plan(2, 2, 1, 2, zero=zero) for zero in (1, 2, 3)],
    Plan(4, 1, 2, 2, zero=3),
    Plan(1, 2, 2, 2, recompute="full"),
    Plan(1, 2, 2, 2, recompute="selective", sequence_parallel=True),
    Plan(tp=2, sequence_parallel=True, split=CONTEXT),
    Plan(2, 2, 2, 2, zero=3, sequence_parallel=True, split=CONTEXT),
    Plan(2, 2, 1, 2, zero=1, recompute="gathers", sequence_parallel=True, split=("cp=4:input_ids.1,labels.1",)),
    Plan(1, 4, sequence_parallel=True, split=CONTEXT),
    *[Plan(2, 1, 2, 2, zero=zero, split=CONTEXT) for zero in (1, 2, 3)],
    Plan(1, 2, 2, 2, zero=3, split=CONTEXT, gathered_again="blocks"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_equals_sequential(plan: Plan) -> None:
    check(llama(), plan)


def norms(plan: Plan) -> Counter[str]:
    """Norms and their gradients by how the data are held along tp."""
    placed = distributed(llama(), plan).placed
    ops = [op for op in placed.ops if op.op_type.startswith("RMSNorm")]
    return Counter(f"{op.op_type} {placement_name(op.inputs[0])}" for op in ops)


def placement_name(v: Value) -> str:
    placement = tensor(v).on("tp")
    return f"split in {placement.dim}" if isinstance(placement, Shard) else "whole"


def test_each_norm_is_one_op_and_split_over_the_sequence() -> None:
    assert norms(Plan(tp=2)) == {"RMSNorm whole": 5, "RMSNormGrad whole": 5}
    assert norms(Plan(tp=2, sequence_parallel=True)) == {"RMSNorm split in 1": 5, "RMSNormGrad split in 1": 5}


def test_the_gradient_of_a_gain_is_a_sum_over_what_the_data_are_split_over() -> None:
    placed = distributed(llama(), Plan(2, 2, sequence_parallel=True)).placed
    gains = [op.outputs[1] for op in placed.ops if op.op_type == "RMSNormGrad"]
    assert len(gains) == 5
    assert all(isinstance(tensor(v).on(axis), Partial) for v in gains for axis in ("dp", "tp"))


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "another epsilon": ("RMSNorm", lambda old, xp, x, w, **more: old(xp, x, w, **{**more, "epsilon": 1e-2})),
    "x for its norm": ("RMSNormGrad", lambda old, xp, x, w, s, d, **more: old(xp, x, w, s * 0 + 1, d, **more)),
    "the gain left out": ("RMSNormGrad", lambda old, xp, x, w, s, d, **more: old(xp, x, w * 0 + 1, s, d, **more)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_ops_compute_counts(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they computed wrongly on devices, results would differ."""
    name, change = FAULTS[fault]
    program = llama()
    made = distributed(program, Plan(2, 2, sequence_parallel=True)).program
    want = program.results()
    assert error(run(made, program), want) <= TOLERANCE
    old = lookup(name).eval
    monkeypatch.setattr(lookup(name), "eval", lambda xp, *row, **more: change(old, xp, *row, **more))
    assert error(run(made, program), want) > 1e-6
