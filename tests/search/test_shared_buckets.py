"""Reductions that share a bucket with a later one, against the buckets that bodies get."""

import math
import random

import pytest

from distir.api.model import load
from distir.api.named_dims import named_dims
from distir.hardware import load_cluster
from distir.ir.function import Op, Value
from distir.search.shared_buckets import may_share
from distir.search.space import space
from distir.transforms.passes import PassContext, bucketed_axes, run_passes
from distir.transforms.pipeline.bucket import bucket

UNTIL_SCHEDULE = ("fuse", "decompose", "pad", "place", "join", "narrow", "group", "recompute", "schedule")


def bundled(body, done):
    """The members of bundles in `done`, but the last of each."""
    before, maker = set(body.ops), {v: op for op in body.ops for v in op.outputs}
    rows = [[maker[v] for v in op.outputs if v in maker] for op in done.ops if op not in before]
    return {op for row in rows for op in row[:-1]}


@pytest.mark.parametrize(
    "sizes",
    [
        "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32",
        "llama:layers=2,hidden=64,heads=4,kv_heads=1,vocab=64,seq=32",
        "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32,experts=2,ffn=64",
    ],
)
def test_bodies(sizes):
    model = load(sizes, {"batch": 8}, loss="cross-entropy", optimizer="adamw", precision="bf16")
    topology = load_cluster("dgx-a100", devices=8)
    several = space(model.function, 8, 8, topology, fix={"zero": 0}).candidates
    chosen = [c for c in several if c.sequence_parallel or c.cp > 1 or c.ep > 1]
    shared = 0
    for c in random.Random(5).sample(chosen, 25):
        plan = c.plan(8)
        context = PassContext(plan, topology.devices, splits=named_dims(model.function, plan.split))
        program = run_passes(model.function, UNTIL_SCHEDULE, context)
        axes = bucketed_axes(plan)
        for body in {op.callee for op in program.ops if op.callee is not None}:
            found = may_share(body.ops, axes, True)
            assert found == bundled(body, bucket(body, axes, math.inf))
            shared += len(found)
            later = may_share(body.ops, axes, False)
            assert found <= later
            for op in later - found:  # its bucket is open: one more, at the end, shares it
                again = Op(op.spec, op.inputs, op.attributes, (Value("more", op.outputs[0].type),))
                assert op in may_share([*body.ops, again], axes, True)
    assert shared > 0
