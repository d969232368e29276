"""Reductions that share a bucket with a later one, against the buckets that bodies get."""

import math
import random

import pytest

from distir.api.model import load
from distir.api.named_dims import named_dims
from distir.hardware import load_cluster
from distir.search.shared_buckets import may_share
from distir.search.space import space
from distir.transforms.passes import PassContext, bucketed_axes, run_passes
from distir.transforms.pipeline.bucket import SUMS, _buckets, along

UNTIL_SCHEDULE = ("fuse", "decompose", "pad", "place", "join", "recompute", "schedule")


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
            rows = _buckets(body, axes, math.inf, SUMS).values()
            found = may_share(body.ops, axes, True)
            assert found == {op for members in rows for op in members[:-1]}
            shared += len(found)
            used = {v for op in body.ops for v in op.inputs}
            unused = {op for op in body.ops if op.spec in SUMS and along(op, axes) and op.outputs[0] not in used}
            assert unused <= may_share(body.ops, axes, False)
    assert shared > 0
