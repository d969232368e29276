"""Bounds of memory from how stages are balanced: below those of the real cut, near them, and seen when too high."""

import random

import pytest

import distir.search.balanced_memory as balanced_memory
from distir.api.model import load
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.search.candidate_bounds import Bounds
from distir.search.exact import Setting
from distir.search.schedule_bounds import followed, rank_memory
from distir.search.space import space

MODELS = ("llama:layers=12,hidden=512,heads=8,vocab=1000,seq=256", "gpt:layers=3,hidden=64,heads=4,vocab=1000,seq=32")


def shares(name, count, seed=0):
    """The bounds of some plans with stages, as shares of what their cuts have."""
    model = load(name, {"batch": 16}, loss="cross-entropy", optimizer="adamw", precision="bf16")
    topology = load_cluster("dgx-a100", devices=16)
    bounds = Bounds(Setting(model, 16, CostModel(topology), 0.0))
    several = [c for c in space(model.function, 16, 16, topology, None).candidates if c.pp > 1]
    for c in random.Random(seed).sample(several, count):
        m = c.microbatches(16)
        cuts = bounds._cuts(c)
        sized = cuts._sizes(c)
        memories = cuts._sums.memory(cuts._cut(c), lambda t, sized=sized: sized(t).bytes)
        schedule = followed(c.schedule, c.pp, m, c.chunks)
        assert schedule is not None
        yield bounds._balanced(c) / rank_memory(schedule, memories, m)


@pytest.mark.parametrize("name", MODELS)
def test_bounds_are_below_the_cut_and_near_it(name):
    found = list(shares(name, 30))
    assert max(found) <= 1
    assert sorted(found)[len(found) // 2] > 0.5


def test_what_candidates_share_changes_no_bound():
    """Bounds are those of each alone, though seconds of ops are kept."""
    name = MODELS[0]
    model = load(name, {"batch": 16}, loss="cross-entropy", optimizer="adamw", precision="bf16")
    setting = Setting(model, 16, CostModel(load_cluster("dgx-a100", devices=16)), 0.0)
    several = [
        c
        for c in space(model.function, 16, 16, setting.cost.topology, None).candidates
        if (c.tp, c.pp, c.dp, c.recompute, c.zero, c.schedule) == (2, 4, 2, "none", 0, "1f1b")
    ]
    assert len({c.microbatch for c in several}) > 1
    assert len({c.order for c in several}) > 1
    together = Bounds(setting)
    for c in several:
        assert together._balanced(c) == Bounds(setting)._balanced(c), c


def test_stages_that_are_balanced_too_well_are_seen(monkeypatch):
    """Seeded: the most that a stage costs is taken to be a fifth less than it is."""
    maximum = balanced_memory.maximum
    monkeypatch.setattr(balanced_memory, "maximum", lambda given, stages: maximum(given, stages) * 0.8)
    assert max(shares(MODELS[0], 12)) > 1
