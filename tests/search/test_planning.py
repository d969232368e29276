"""The search against brute force; what is ranked is what `simulate` says; errors."""

import os
import random
import signal
from dataclasses import replace
from multiprocessing import Value

import pytest

import distir
from distir.api.model import load
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir import Topology
from distir.ir.errors import InfeasibleError, UsageError
from distir.search.best_first import search
from distir.search.candidate_bounds import Bounds
from distir.search.exact import Setting, evaluate, examine
from distir.search.plan_table import BINDINGS, what_binds
from distir.search.planning import plan
from distir.search.simulating import Simulators
from distir.search.space import RULES, SETTINGS, Candidate, space

TINY = "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32"
NARROW = ("dp", "tp", "pp", "microbatch", "zero", "schedule")


def trained(name=TINY, batch=4, **more):
    return load(name, {"batch": batch}, loss="cross-entropy", optimizer="adamw", precision="bf16", **more)


def quickest(setting, candidates, count=1):
    """The seconds of the quickest that fit, every one simulated."""
    return sorted([x.seconds for c in candidates if (x := evaluate(setting, c)).fits])[:count]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_regret(seed):
    """The best three of a search are those of all."""
    draw = random.Random(seed)
    name = f"{draw.choice(['gpt', 'llama'])}:layers={draw.choice([1, 2])},hidden=64,heads=4,vocab=64,seq=32"
    batch, gpus = draw.choice([2, 4]), draw.choice([2, 4])
    cost = CostModel(load_cluster(draw.choice(["dgx-a100", "dgx-v100", "distir-v100-x4"]), devices=gpus))
    setting = Setting(trained(name, batch), batch, cost, 0.0)
    found = space(setting.model.function, batch, gpus, cost.topology, NARROW).candidates
    state = search(Bounds(setting), found, Simulators(setting), at_least=3)
    best = quickest(setting, found, 3)
    assert [x.outcome.seconds for x in state.fitting[:3]] == best
    assert state.bound >= best[-1] or len(best) < 3
    assert state.violations == 0


def test_a_bound_that_is_too_high_gives_regret(monkeypatch):
    """Seeded: with bounds 5 % above the simulation of the best plan, the search leaves it out."""
    cost = CostModel(load_cluster("dgx-a100", devices=2))
    setting = Setting(trained(), 4, cost, 0.0)
    found = space(setting.model.function, 4, 2, cost.topology, ("dp", "tp", "pp", "zero")).candidates
    best = min([(evaluate(setting, c).seconds, c) for c in found])
    low = Bounds.of

    def wrong(self, c, enough):
        return (best[0] * 1.05 * 4, 0.0) if c == best[1] else low(self, c, enough)

    monkeypatch.setattr(Bounds, "of", wrong)
    state = search(Bounds(setting), found, Simulators(setting))
    assert state.fitting[0].outcome.seconds > best[0]


def test_what_rules_leave_out_is_not_quicker():
    """A plan that a rule leaves out takes no less time than the best that it keeps."""
    cost = CostModel(load_cluster("dgx-a100", devices=2))
    setting = Setting(trained(), 4, cost, 0.0)
    kept = space(setting.model.function, 4, 2, cost.topology, NARROW).candidates
    [best] = quickest(setting, kept)
    extra = [
        Candidate(2, 1, 1, 2, "gpipe"),
        Candidate(2, 1, 1, 1, "gpipe"),
        Candidate(1, 1, 2, 4, "gpipe"),
        Candidate(1, 2, 1, 4, zero=1),
        Candidate(2, 1, 1, 2, zero=2),
    ]
    for c in extra:
        assert any(rule.drops(c, 4) for rule in RULES), c
        assert evaluate(setting, c).seconds >= best


def test_ranked_is_what_simulate_says():
    model = trained()
    table = plan(model, "dgx-a100", 4, vary=("dp", "tp", "pp"), top=3)
    assert len(table.rows) == 3
    for row in table.rows:
        assert row.detail is not None
        said = distir.simulate(model, row.plan, CostModel(load_cluster("dgx-a100", devices=4)))
        assert row.mfu == pytest.approx(said.utilization, rel=1e-9)
        assert row.seconds == said.step_seconds
        assert row.memory == said.peak_memory
        stages = said.simulation.stages
        for share, what in (
            (row.detail.compute, "compute"),
            (sum(row.detail.exposed.values()), "communication"),
            (row.detail.bubble, "bubble"),
        ):
            mean = sum([getattr(s, what) * s.devices for s in stages]) / row.plan.size / row.seconds
            assert share == pytest.approx(mean, abs=1e-9)
        busiest = max(said.to_json()["stages"], key=lambda s: s["peak_memory"])
        assert row.detail.memory == busiest["memory_at_peak"]
    assert [r.seconds for r in table.rows] == sorted(r.seconds for r in table.rows)
    assert table.simulated <= table.plans
    assert "<table>" in table._repr_html_()
    assert table.to_json()["counts"]["plans"] == table.plans


def test_interrupted(monkeypatch):
    """Ctrl-C ends the search with the best so far."""
    done = []

    def interrupted(setting, c):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(c)
        return evaluate(setting, c)

    monkeypatch.setattr("distir.search.simulating.evaluate", interrupted)
    monkeypatch.setattr("distir.search.planning.host_cores", lambda: 1)
    table = plan(trained(), "dgx-a100", 2, vary=("dp", "tp", "pp", "zero", "microbatch"))
    assert table.interrupted
    assert [row.plan for row in table.rows] == [
        c.plan(4) for c in sorted(done, key=lambda c: (evaluate(_plain(table), c).seconds, c))
    ]
    assert "interrupted" in str(table)


@pytest.mark.parametrize("where", ["first", "families"])
def test_interrupted_elsewhere(monkeypatch, where):
    """Before any plan is known there is nothing to show; when the best is known, only families are missing."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("distir.search.planning.host_cores", lambda: 1)
    search_for = {"vary": ("dp", "tp"), "top": 2}
    if where == "first":
        monkeypatch.setattr("distir.search.simulating.evaluate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            plan(trained(), "dgx-a100", 2, **search_for)
        return
    whole = plan(trained(), "dgx-a100", 2, **search_for)
    assert whole.families
    monkeypatch.setattr("distir.search.planning._families", interrupt)
    table = plan(trained(), "dgx-a100", 2, **search_for)
    assert [row.plan for row in table.rows] == [row.plan for row in whole.rows]
    assert table.interrupted
    assert table.families == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupted_while_the_shown_plans_are_examined(monkeypatch, jobs):
    """The rows are those of a search that ends; of those that are not examined only time and memory are known."""
    process = os.getpid()
    asked = Value("i", 0)

    def interrupt(setting, c):
        with asked.get_lock():
            asked.value += 1
            number = asked.value
        if number == 2:
            os.kill(process, signal.SIGINT)
        return examine(setting, c)

    monkeypatch.setattr("distir.search.planning.host_cores", lambda: jobs)
    search_for = {"vary": ("dp", "tp", "zero"), "top": 4}
    whole = plan(trained(), "dgx-a100", 2, **search_for)
    monkeypatch.setattr("distir.search.simulating.examine", interrupt)
    table = plan(trained(), "dgx-a100", 2, **search_for)
    assert table.interrupted
    assert not whole.interrupted
    assert [(row.plan, row.seconds, row.memory) for row in table.rows] == [
        (row.plan, row.seconds, row.memory) for row in whole.rows
    ]
    assert len(table.families) == len(whole.families)
    missing = [row.detail is None for row in table.rows]
    assert any(missing)
    if jobs == 1:
        assert missing == [False, True, True, True]
        assert table.rows[0] == whole.rows[0]
    assert all((row.binds is None) == (row.detail is None) for row in table.rows)
    assert "are not verified" in str(table)
    assert "the best plan " in str(table) or missing[0]
    found = table.to_json()["plans"]
    assert [x["compute"] is None and x["next"] is None and x["exposed"] is None for x in found] == missing


def _plain(table):
    cost = CostModel(load_cluster("dgx-a100", devices=table.gpus))
    return Setting(trained(), 4, cost, 0.0)


def test_fixed_settings_are_kept():
    table = plan(trained(), "dgx-a100", 4, vary=("dp", "tp", "pp"), fix={"tp": 2, "recompute": "full"}, top=5)
    assert {(row.plan.tp, row.plan.recompute) for row in table.rows} == {(2, "full")}


def test_nothing_fits():
    topology = Topology()
    devices = [topology.add_device("gpu", memory=2**20) for _ in range(2)]
    topology.set_bandwidth(devices[0], devices[1], 100)
    with pytest.raises(InfeasibleError, match=r"fits in .*least short is .*short by .* on .*most of it") as error:
        plan(trained(), topology, 2, vary=("dp", "tp", "pp"), memory_reserve=0)
    assert "more GPUs" in (error.value.hint or "")
    assert "let recompute vary" in (error.value.hint or "")
    with pytest.raises(InfeasibleError, match="fits in") as error:
        plan(trained(), topology, 2, memory_reserve=0.9 / 1024)
    assert (error.value.hint or "").endswith(" may do; or context parallelism: let cp vary")  # all else does
    one = Topology()
    one.add_device("gpu", memory=2**20)
    with pytest.raises(InfeasibleError, match="fits in") as error:
        plan(trained(), one, 1, memory_reserve=0)
    assert (error.value.hint or "").endswith(" may do")  # nothing to split


@pytest.mark.parametrize(
    ("fix", "hint"),
    [
        ({"tp": 3}, "tp 3 does not divide 2"),
        ({"tp": 1, "sequence_parallel": True}, "sequence parallelism is along the axis of tensor parallelism"),
    ],
)
def test_why_there_is_no_plan(fix, hint):
    with pytest.raises(InfeasibleError, match="no plan for a batch of 4") as error:
        plan(trained(), "dgx-a100", 2, fix=fix)
    assert hint in (error.value.hint or "")


def test_a_setting_that_is_fixed_leaves_no_plan_out():
    """Rules leave out what equals another plan, which is not there where the setting is fixed."""

    def degrees(**fix):
        found = plan(trained(), "dgx-a100", 4, fix=fix, top=99).rows
        return {(x.plan.dp, x.plan.tp, x.plan.pp) for x in found}

    everything = degrees(microbatch=1, recompute="none")
    assert (1, 4, 1) in everything
    assert degrees(microbatch=1, recompute="none", schedule="gpipe") == everything
    alike = {(dp, tp, pp) for dp, tp, pp in everything if dp > 1}  # with one replica there is no ZeRO
    assert degrees(microbatch=1, recompute="none", zero=2) == alike
    assert degrees(microbatch=4 // 2, recompute="none", zero=2) == {x for x in alike if x[0] == 2}


def test_with_one_microbatch_zero_2_differs_where_stages_share_a_weight():
    """Sums of a tied weight's gradient are taken in another order then."""
    model = load(
        "gpt:layers=2,hidden=64,heads=4,vocab=4000,seq=64", {"batch": 4}, loss="cross-entropy", optimizer="adamw"
    )
    found = plan(model, "dgx-a100", 4, vary=("dp", "tp", "pp", "zero"), fix={"dp": 2, "pp": 2}, top=9)
    seconds = {x.plan.zero: x.seconds for x in found.rows}
    assert seconds.keys() == {0, 1, 2, 3}
    assert seconds[2] != seconds[1]


def test_what_to_change_is_no_setting_that_was_tried():
    row = plan(trained(), "dgx-a100", 2, top=1).rows[0]
    assert row.detail is not None
    detail = row.detail._replace(exposed={"dp": 0.25, "cp+dp": 0.125, "tp": 0.5}, bubble=0.0625)
    row, waits = replace(row, detail=detail), detail._replace(exposed={}, bubble=0.25)
    change = BINDINGS["dp"].change
    dp = "loses most to data-parallel communication, 37.5% of its step"
    assert replace(row, binds="dp").limit == (dp, change)
    assert replace(row, binds="dp", held=("zero", "chunks")).limit == (dp, f"let zero vary; {change}")
    bubble = "loses most to the pipeline's bubble, 6.2% of its step"
    piped = replace(row, plan=distir.Plan(pp=2, microbatches=2))
    assert replace(piped, binds="bubble").limit == (bubble, BINDINGS["bubble"].change)
    assert what_binds(waits, piped.plan, False) == "bubble"
    host = "loses most to waiting for the host, 6.2% of its step"
    alone = replace(row, plan=distir.Plan(dp=2))
    assert replace(alone, binds="host").limit == (host, BINDINGS["host"].change)
    assert what_binds(waits, alone.plan, False) == "host"
    assert replace(row, binds="compute").limit == ("is limited by compute", BINDINGS["compute"].change)
    assert {name for b in BINDINGS.values() for name in b.settings} <= set(SETTINGS)


def test_the_step_that_was_planned():
    table = plan(trained(), "dgx-a100", 2, top=1, vary=("dp",))
    assert "a step of 4 samples" in str(table)
    assert "parameters (f32, products in bf16)" in table.step()
    assert (table.to_json()["batch"], table.to_json()["tokens"]) == (4, table.rows[0].work.tokens)
    volumes = load("examples/mlp.onnx", {"batch": 4}, loss="mse", optimizer="sgd")
    rows = plan(volumes, "cpu-2core", 2, top=1, vary=("dp",)).table()
    assert "samples/s" in rows[0]
    assert "tokens/s" not in rows[0]
    assert float(rows[1][rows[0].index("TFLOP/s")]) > 0


def test_nothing_is_certain_before_a_bound_is():
    table = replace(plan(trained(), "dgx-a100", 2, top=1, vary=("dp",)), bound=0.0, interrupted=True)
    assert table.lines()[-2].endswith("; others may be quicker")


@pytest.mark.parametrize(
    ("gpus", "more", "kind", "words"),
    [
        (0, {}, UsageError, "at least 1"),
        (3, {"fix": {"dp": 3}}, InfeasibleError, "no plan for a batch of 4"),
        (2, {"vary": ("dq",)}, UsageError, "dq"),
        (2, {"vary": "dp"}, UsageError, "vary is a list of settings, got 'dp'"),
        (2.0, {}, UsageError, "gpus is a whole number of at least 1, got 2.0"),
        (2, {"top": "1"}, UsageError, "top is a whole number of at least 1, got '1'"),
        (2, {"fix": {"zero": 7}}, UsageError, "zero"),
        (2, {"memory_reserve": -1.0}, UsageError, "memory_reserve"),
        (
            2,
            {"memory_reserve": 80.0},
            InfeasibleError,
            "a reserve of 80.0 GiB, beside what .* leaves nothing of the 79.1 GiB",
        ),
    ],
)
def test_bad_arguments(gpus, more, kind, words):
    with pytest.raises(kind, match=words):
        plan(trained(), "dgx-a100", gpus, **more)


def test_a_cluster_that_is_smaller():
    topology = Topology()
    topology.add_device("gpu")
    with pytest.raises(InfeasibleError, match="1 device, 2 are asked for"):
        plan(trained(), topology, 2)


def test_a_model_that_is_not_trained():
    with pytest.raises(UsageError, match="not trained"):
        plan(load(TINY, {"batch": 4}), "dgx-a100", 2)
