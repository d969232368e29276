"""One placed program for plans of several sizes: its types and bounds are those of each plan's own."""

import random

import pytest

from distir.api.model import load
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir.errors import IRTypeError
from distir.ir.type import Tensor
from distir.search import placed_sizes
from distir.search.candidate_bounds import Bounds
from distir.search.exact import Setting
from distir.search.placed_program import place_template
from distir.search.placed_sizes import template_of
from distir.search.space import space
from distir.search.stage_bounds import Cuts

DENSE = "llama:layers=2,hidden=128,heads=8,kv_heads=4,vocab=256,seq=64", ("dp", "tp", "pp", "cp")
EXPERTS = "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32,experts=8", ("dp", "tp", "pp", "ep")
SETTINGS = ("microbatch", "schedule", "zero", "recompute", "sequence_parallel", "order")


def templates(model, axes, batch, gpus, count, has=lambda c: True):
    """Candidates of random templates that stand for several plans, up to four of each."""
    cost = CostModel(load_cluster("dgx-a100", devices=gpus))
    name = load(model, {"batch": batch}, loss="cross-entropy", optimizer="adamw", precision="bf16")
    setting = Setting(name, batch, cost, 0.0)
    groups = {}
    for c in space(setting.model.function, batch, gpus, cost.topology, (*axes, *SETTINGS)).candidates:
        if has(c):
            groups.setdefault(template_of(c, setting.model.function, batch), []).append(c)
    draw = random.Random(0)
    several = [g for g in groups.values() if len({(c.dp, c.microbatch) for c in g}) > 1]
    return setting, [draw.sample(g, min(4, len(g))) for g in draw.sample(several, count)]


def differing(setting, group):
    """How many values of the candidates' own programs have another shape or size on a device."""
    placed = place_template(setting, group[0])
    template = Cuts(setting, placed)
    count = 0
    for c in group[1:]:
        sized, own = template._sizes(c), place_template(setting, c).function
        assert [op.spec for op in own.ops] == [op.spec for op in placed.function.ops]
        for mine, shared in zip(own.ops, placed.function.ops, strict=True):
            for v, w in zip(mine.outputs, shared.outputs, strict=True):
                t, u = sized(w.type), v.type
            assert isinstance(t, Tensor) == isinstance(u, Tensor)
            if isinstance(t, Tensor) and isinstance(u, Tensor):
                count += (t.shape, t.bytes, t.moves) != (u.shape, u.bytes, u.moves)
    return count


def test_types_where_zero_pads_what_replicas_do_not_divide():
    setting, groups = templates(*DENSE, 24, 24, 12, lambda c: c.zero > 0 and c.dp % 3 == 0)
    assert not any([differing(setting, group) for group in groups])


@pytest.mark.parametrize(("model", "axes"), [DENSE, EXPERTS])
def test_types_are_those_of_the_plans_own_programs(model, axes):
    setting, groups = templates(model, axes, 16, 16, 12)
    assert not any([differing(setting, group) for group in groups])


@pytest.mark.parametrize(("model", "axes"), [DENSE, EXPERTS])
def test_bounds_are_those_of_each_plan_alone(model, axes):
    setting, groups = templates(model, axes, 16, 16, 12)
    for group in groups:
        for c, bound in zip(group, Bounds(setting).of_cuts(group), strict=True):
            assert bound == pytest.approx(Bounds(setting).of_cuts([c])[0], rel=1e-12), c


def test_what_zero_cannot_split_alike_is_another_template(monkeypatch):
    """Seeded: templates that do not ask what the replicas divide."""
    monkeypatch.setattr(placed_sizes, "_divides", lambda function, dp, inside: ())
    model = "gpt:layers=1,hidden=64,heads=4,vocab=64,seq=32,experts=4"
    setting, groups = templates(model, ("dp", "pp"), 16, 8, 1, lambda c: c.zero == 3 and c.recompute == "none")
    with pytest.raises(IRTypeError, match="cannot be split"):
        differing(setting, groups[0])
