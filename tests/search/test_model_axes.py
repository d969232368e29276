"""Which further axes a model offers: found in the program, whatever its inputs are called; plans with them."""

from __future__ import annotations

import pytest

from distir.api.model import Model, load
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir import FunctionMaker
from distir.ir.errors import DistirError, InfeasibleError, UsageError
from distir.ir.function import Role
from distir.ir.type import Float32, Tensor
from distir.search.best_first import search
from distir.search.candidate_bounds import Bounds, relatives
from distir.search.exact import Setting, evaluate
from distir.search.model_axes import model_axes
from distir.search.planning import plan
from distir.search.simulating import Simulators
from distir.search.space import RULES, SETTINGS, Candidate, space

GPT = "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32"
MOE = f"{GPT},experts=2,ffn=64"
EXPERTS = (("*", 0), *[(f"*.mlp.experts.{name}", 0) for name in ("in.weight", "out.weight", "in.bias", "out.bias")])


def trained(name: str, batch: int = 4) -> Model:
    return load(name, {"batch": batch}, loss="cross-entropy", optimizer="adamw", precision="bf16")


@pytest.mark.parametrize(
    ("name", "loss", "found"),
    [
        (GPT, "cross-entropy", {"cp": (32, (("*", 1),))}),
        ("llama:layers=2,hidden=64,heads=4,vocab=64,seq=96", "cross-entropy", {"cp": (96, (("*", 1),))}),
        (MOE, "cross-entropy", {"cp": (32, (("*", 1),)), "ep": (2, EXPERTS)}),
        ("dlrm", None, {"ep": (4, (("dense", 0), ("indices", 1), ("labels", 0), ("tables", 0)))}),
        ("dlrm:pooling=4", None, {"ep": (4, (("dense", 0), ("indices", 1), ("labels", 0), ("tables", 0)))}),
        ("cosmoflow:filters=32-64", "mse", {}),
    ],
)
def test_axes_of_models(name: str, loss: str | None, found: dict[str, tuple[int, tuple[tuple[str, int], ...]]]) -> None:
    """A router's matrix and the features of a recommender are no experts, heights and widths no sequences."""
    axes = model_axes(load(name, {}, loss=loss, optimizer="adamw").function)
    assert {axis.name: (axis.size, axis.dims) for axis in axes.values()} == found


def test_what_is_no_sequence() -> None:
    """The features of a product, and a height that a convolution needs neighbours along."""
    maker = FunctionMaker("features")
    x = maker.add_input_value("x", Tensor(Float32, (8, 16)), Role("data", 0))
    w = maker.add_input_value("w", Tensor(Float32, (16, 4)), Role("parameter"))
    maker.set_outputs([maker.emit("MatMul", x, w)])
    assert model_axes(maker.finalize()) == {}
    maker = FunctionMaker("heights")
    x = maker.add_input_value("x", Tensor(Float32, (8, 4, 16, 16)), Role("data", 0))
    w = maker.add_input_value("w", Tensor(Float32, (4, 4, 3, 3)), Role("parameter"))
    windows = {"strides": (1, 1), "dilations": (1, 1), "pads": (1, 1, 1, 1), "groups": 1}
    maker.set_outputs([maker.emit("Conv", x, w, **windows)])
    assert model_axes(maker.finalize()) == {}


def test_a_batch_of_matrices_of_weights_is_experts() -> None:
    """Under any name; the matrix of a router, whose columns are the experts, and its bias are whole."""
    maker = FunctionMaker("experts")
    x = maker.add_input_value("p", Tensor(Float32, (8, 16)), Role("data", 0))
    router = maker.add_input_value("q", Tensor(Float32, (16, 4)), Role("parameter"))
    bias = maker.add_input_value("r", Tensor(Float32, (4,)), Role("parameter"))
    stack = maker.add_input_value("s", Tensor(Float32, (4, 16, 32)), Role("parameter"))
    shift = maker.add_input_value("t", Tensor(Float32, (4, 1, 32)), Role("parameter"))
    shares = maker.emit("Sigmoid", maker.emit("Add", maker.emit("MatMul", x, router), bias))
    each = maker.emit("Reshape", maker.emit("Transpose", shares, perm=(1, 0)), shape=(4, 8, 1))
    done = maker.emit("Add", maker.emit("MatMul", maker.emit("Mul", each, x), stack), shift)
    maker.set_outputs([maker.emit("ReduceSum", done, axes=(0,), keepdims=0)])
    found = model_axes(maker.finalize())
    assert set(found["ep"].dims) == {("*", 0), ("s", 0), ("t", 0)}
    assert found["ep"].size == 4


def setting_of(name: str, gpus: int, batch: int = 4, cluster: str = "dgx-a100") -> Setting:
    return Setting(trained(name, batch), batch, CostModel(load_cluster(cluster, devices=gpus)), 0.0)


def candidates(setting: Setting, gpus: int, *vary: str) -> list[Candidate]:
    return space(setting.model.function, setting.batch, gpus, setting.cost.topology, vary or None).candidates


@pytest.mark.parametrize(("name", "axis"), [(GPT, "cp"), (MOE, "ep")])
def test_no_regret(name: str, axis: str) -> None:
    """The best of a search is the best of all, every one simulated; among all there are plans with the axis."""
    setting = setting_of(name, 4, 2)
    found = candidates(setting, 4, "dp", "tp", "pp", axis, "zero")
    assert any([getattr(c, axis) > 1 for c in found])
    outcomes = {c: evaluate(setting, c) for c in found}
    assert all([x.reason is None for c, x in outcomes.items() if c.split])
    best = min([x.seconds for x in outcomes.values() if x.fits])
    state = search(Bounds(setting), found, Simulators(setting))
    assert state.fitting[0].outcome.seconds == best
    assert state.violations == 0


@pytest.mark.parametrize(("axis", "least"), [("cp", 0.4), ("ep", 0.6)])
def test_bounds_are_near_the_simulation(axis: str, least: float) -> None:
    """Of compute alone, of the profile and of memory: below, and not far below."""
    setting = setting_of("gpt:layers=2,hidden=512,heads=8,vocab=64,seq=1024,experts=4,ffn=1024", 2)
    split = (model_axes(setting.model.function)[axis].split(2),)
    c = Candidate(1, 1, 1, 1, order=("tp", axis, "dp", "pp"), split=split)
    bounds, said = Bounds(setting), evaluate(setting, c)
    for seconds in (bounds.of_all(relatives(c), 1, 2), bounds.of(c)[0]):
        assert least < seconds / said.seconds <= 1
    assert 0 < bounds.of(c)[1] <= said.memory


def test_more_replicas_are_no_slower_than_context_parallelism() -> None:
    """What the rule leaves out takes no less time than the plan that it names, nor less memory."""
    setting = setting_of(GPT, 4)
    split = (model_axes(setting.model.function)["cp"].split(2),)
    for order in (("tp", "cp", "dp", "pp"), ("cp", "pp", "tp", "dp")):
        for zero in (0, 1, 3):
            c = Candidate(2, 1, 1, 2, zero=zero, order=order, split=split)
            assert [rule.free for rule in RULES if rule.drops(c, 4)] == [("dp", "cp", "microbatch")]
            mine, other = evaluate(setting, c), evaluate(setting, Candidate(4, 1, 1, 1, zero=zero))
            assert other.seconds <= mine.seconds
            assert other.memory <= mine.memory


def test_the_space() -> None:
    """By default sequences are split where they are long; a rule drops nothing whose better plan is not there."""
    setting = setting_of(GPT, 4)
    assert {c.cp for c in candidates(setting, 4)} == {1}
    varied = candidates(setting, 4, *[x for x in SETTINGS if x != "ep"])
    assert {c.cp for c in varied} == {1, 2, 4}
    assert {c.tp for c in varied if c.cp > 1 and c.sequence_parallel} == {2}
    long = load("gpt:layers=1,hidden=16,heads=2,vocab=16,seq=32768,batch=4", loss="cross-entropy").function
    assert {c.cp for c in space(long, 4, 8, setting.cost.topology).candidates} == {1, 2, 4}
    fixed = space(setting.model.function, 4, 4, setting.cost.topology, ("tp",), {"cp": 2, "dp": 2}).candidates
    assert [(c.dp, c.cp, c.microbatch) for c in fixed] == [(2, 2, 2)]
    assert all([c.devices == c.plan(4).size == 4 and c.order == c.plan(4).order for c in candidates(setting, 4)])


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"vary": ("dp", "ep")}, UsageError, "ep: the model has no experts"),
        ({"fix": {"cp": 5}}, InfeasibleError, "cp 5 does not divide"),
        ({"fix": {"cp": 0}}, UsageError, "at least 1"),
    ],
)
def test_bad_axes(more: dict[str, object], kind: type[DistirError], words: str) -> None:
    with pytest.raises(kind, match=words):
        plan(trained(GPT), "dgx-a100", 2, **more)  # type: ignore[arg-type]


def test_the_table_has_its_column() -> None:
    table = plan(trained(GPT), "dgx-a100", 2, vary=("dp",), fix={"cp": 2}, top=1)
    assert table.rows[0].plan.split
    assert "cp" in table.table()[0]
    said = table.rows[0].to_json()
    assert said["exposed"]["cp"] > 0
    assert said["compute"] + said["bubble"] + sum(said["exposed"].values()) == pytest.approx(1, abs=1e-9)
