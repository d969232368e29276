"""Stages begin where named weights are first used, and the program stays equal to the sequential one."""

from __future__ import annotations

import numpy as np
import pytest

from distir.api.named_dims import named_cuts
from distir.cli import main
from distir.ir import Function, FunctionMaker, Mesh
from distir.ir.errors import DistirError, InfeasibleError, UsageError
from distir.ir.function import Role
from distir.ir.type import Float64, Tensor
from distir.transforms.differentiation.training import training_step
from distir.transforms.passes import PassContext, run_passes
from distir.transforms.plan import Plan as RealPlan
from tests.transforms.programs import BATCH, Plan, Program, check, filled, small_gpt, written_mlp

LAYERS = ("h0.ln_2.weight", "h1.ln_1.weight", "ln.bias")


def stages(function: Function, source: Function) -> dict[str, str]:
    """The name of the mesh on which each input of a distributed program is."""
    found: dict[str, str] = {}
    for v, w in zip(source.inputs, function.inputs, strict=True):
        assert isinstance(w.type.device, Mesh)
        found[v.name] = w.type.device.name
    return found


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=4, microbatches=4, cut=LAYERS),
        Plan(pp=4, microbatches=2, cut=LAYERS, schedule="gpipe", recompute="full"),
        Plan(tp=2, pp=4, microbatches=4, cut=LAYERS),
        Plan(dp=2, pp=4, microbatches=2, cut=LAYERS, zero=3),
        Plan(pp=2, microbatches=4, chunks=2, schedule="interleaved", cut=LAYERS),
    ],
    ids=str,
)
def test_stages_begin_at_the_weights(plan: Plan) -> None:
    program = small_gpt()
    at = stages(check(program, plan), program.function)
    names = [name for name in at if name[0] in "hl" and name not in ("labels", "labels.1")]
    begin = [0, *[names.index(name) for name in LAYERS]]
    begin[3] -= 1  # the norm's weight, before its bias, is used in the same op
    for k, (a, b) in enumerate(zip(begin, [*begin[1:], len(names)], strict=True)):
        assert {at[name] for name in names[a:b]} == {f"stage{k % plan.pp}"}, k
    assert at["wpe"] == "stage0"


@pytest.mark.parametrize(
    ("plan", "same"),
    [
        (Plan(pp=2, microbatches=2, cut=("even",)), ("h1.ln_1.weight",)),
        (Plan(tp=2, pp=2, microbatches=4, cut=("1",)), ("h1.ln_1.weight",)),
        (Plan(dp=2, pp=3, microbatches=2, cut=("0", "2"), zero=3), ("h0.ln_1.weight", "ln.weight")),
        (Plan(pp=2, microbatches=2, cut=("ln.weight",)), ("ln.weight",)),
    ],
    ids=str,
)
def test_stages_begin_at_layers(plan: Plan, same: tuple[str, ...]) -> None:
    program = small_gpt()
    assert stages(check(program, plan), program.function) == stages(
        check(program, plan._replace(cut=same)), program.function
    )


def test_one_stage_has_all_layers() -> None:
    check(small_gpt(), Plan(dp=2, microbatches=2, cut=("even",)))
    f = FunctionMaker("m")  # in which nothing repeats
    x = f.add_input_value("x", Tensor(Float64, (BATCH, 8)), Role("data", 0))
    f.set_outputs([f.emit("MatMul", x, f.add_input_value("w", Tensor(Float64, (8, 8)), Role("parameter")))])
    assert named_cuts(f.finalize(), RealPlan(dp=2, cut=("even",))) == ()


def test_an_interleaved_schedule_has_stages_of_its_own() -> None:
    program = small_gpt(layers=4)
    plan = Plan(pp=2, microbatches=2, chunks=2, schedule="interleaved", cut=("even",))
    at = stages(check(program, plan), program.function)
    assert [at[f"h{i}.ln_1.weight"] for i in range(4)] == ["stage0", "stage1", "stage0", "stage1"]


def test_a_name_goes_before_a_number() -> None:
    f = FunctionMaker("m")
    x = f.add_input_value("x", Tensor(Float64, (BATCH, 8)), Role("data", 0))
    for name in ("1", "0", "even"):
        x = f.emit("MatMul", x, f.add_input_value(name, Tensor(Float64, (8, 8)), Role("parameter")))
    f.set_outputs([x])
    function = f.finalize()
    assert named_cuts(function, RealPlan(pp=2, cut=("1",))) == (1,)
    assert named_cuts(function, RealPlan(pp=2, cut=("even",))) == (3,)
    assert named_cuts(function, RealPlan(pp=2, cut=("2",))) == (3,)  # no name, but the third layer
    with pytest.raises(UsageError, match="there is no layer 3: m has 3 layers"):  # nor anything after the last
        named_cuts(function, RealPlan(pp=2, cut=("3",)))


@pytest.mark.parametrize("name", ["wpe", "h0.attn.proj.bias", "h1.mlp.proj.weight", "ln.weight"])
def test_a_stage_may_begin_anywhere(name: str) -> None:
    program = small_gpt()
    for plan in (Plan(pp=2, microbatches=2, cut=(name,)), Plan(tp=2, pp=2, microbatches=4, cut=(name,))):
        at = stages(check(program, plan), program.function)
        assert at[name] == "stage1"
        assert at["wte"] == "stage0"  # the table is tied to the head, and stays where it is first used


def test_a_backward_pass_written_by_hand_follows() -> None:
    program = written_mlp()
    at = stages(check(program, Plan(pp=3, microbatches=2, cut=("w1", "w5"))), program.function)
    assert [at[f"w{i}"] for i in range(6)] == ["stage0", *["stage1"] * 4, "stage2"]


def branches() -> Program:
    """Two branches, x and z, that meet; and one of x whose result is small, and used at the end."""
    f = FunctionMaker("branches")
    x, z = [f.add_input_value(name, Tensor(Float64, (BATCH, 8)), Role("data", 0)) for name in ("x", "z")]
    w = {name: f.add_input_value(name, Tensor(Float64, (8, 8)), Role("parameter")) for name in ("a", "b", "c", "d")}
    early = f.emit("Relu", f.emit("MatMul", f.emit("Tanh", x), w["a"]))
    late = f.emit("Relu", f.emit("MatMul", f.emit("Relu", z), w["b"]))
    side = f.emit("Tanh", f.emit("MatMul", early, w["d"]))
    y = f.emit("MatMul", f.emit("Add", early, late), w["c"])
    f.set_outputs([f.emit("Add", y, side)])
    return filled(training_step(f.finalize(), "mse", gradients=True), {}, np.random.default_rng(5))


def test_what_needs_only_inputs_is_where_it_is_needed() -> None:
    program = branches()
    at = stages(check(program, Plan(pp=2, microbatches=2, cut=("c",))), program.function)
    assert [at[name] for name in ("x", "z", "a", "b", "c", "d")] == [*["stage0"] * 4, "stage1", "stage0"]
    at = stages(check(program, Plan(pp=3, microbatches=2, cut=("b", "c"))), program.function)
    assert [at[name] for name in ("x", "z", "a", "b", "c", "d")] == [f"stage{k}" for k in (1, 0, 1, 1, 2, 2)]
    at = stages(check(program, Plan(pp=3, microbatches=2, cut=("b", "a"))), program.function)
    assert [at[name] for name in ("x", "z", "a", "b")] == [
        f"stage{k}" for k in (1, 0, 2, 1)
    ]  # what begins at a is late


@pytest.mark.parametrize(
    ("cut", "pp", "kind", "said", "hint"),
    [
        (("h1.ln_1.weigh",), 2, UsageError, "no input is called 'h1.ln_1.weigh'", "did you mean h1.ln_1.weight?"),
        (("input_ids",), 2, UsageError, "cut: 'input_ids' is data: a stage begins at a weight", "weights are wte, wpe"),
        (("colour",), 2, UsageError, "no input is called 'colour'", "weights are wte, wpe"),
        (("h1.ln_1.weight",), 3, InfeasibleError, "3 stages need 2 weights to begin at, got 1", "name one for each"),
        (("h1.ln_1.weight",), 1, InfeasibleError, "1 stage needs 0 weights to begin at, got 1", "leave --cut out"),
        (LAYERS[1::-1], 3, InfeasibleError, "%h1.ln_1.weight is first used after %h0.ln_2.weight", "in the order"),
        (LAYERS[:1] * 2, 3, InfeasibleError, "%h0.ln_2.weight is named twice", "one weight of each"),
        (("ln.weight", "ln.bias"), 3, InfeasibleError, "%ln.bias is first used in the same op as %ln.weight", "one"),
        (("wte",), 2, InfeasibleError, "no op comes before the first use of %wte", "leave it out"),
        (
            ("3",),
            2,
            UsageError,
            "there is no layer 3: gpt has 2 layers that repeat, which begin at h0.ln_1",
            "--cut W,W,... gives weights",
        ),
        (("even",), 3, InfeasibleError, "3 stages need a layer each: gpt has 2 layers that repeat", "--cut W,W"),
        (("evn",), 2, UsageError, "no input is called 'evn'", "did you mean even?"),
        (("even", "1"), 3, UsageError, "cut: 'even' stands alone", "or --cut even"),
        (("1", "balanced"), 3, UsageError, "cut: 'balanced' stands alone", "or --cut even"),
        (("9" * 5000,), 2, UsageError, "no input is called '999", "weights are wte, wpe"),
    ],
)
def test_a_cut_that_is_none(cut: tuple[str, ...], pp: int, kind: type[DistirError], said: str, hint: str) -> None:
    with pytest.raises(kind) as raised:
        check(small_gpt(), Plan(pp=pp, microbatches=2, cut=cut))
    assert said in raised.value.message
    assert hint in (raised.value.hint or "")


def test_an_input_that_the_forward_pass_does_not_use() -> None:
    f = FunctionMaker("unused")
    x = f.add_input_value("x", Tensor(Float64, (BATCH, 8)), Role("data", 0))
    w, u = [f.add_input_value(name, Tensor(Float64, (8, 8)), Role("parameter")) for name in "wu"]
    f.set_outputs([f.emit("Relu", f.emit("MatMul", x, w))])
    assert u.name == "u"
    with pytest.raises(InfeasibleError, match="the forward pass does not use %u"):
        check(Program(f.finalize(), []), Plan(pp=2, cut=("u",)))


def test_a_pass_needs_the_inputs_of_the_names() -> None:
    plan = RealPlan(pp=2, cut=("h1.ln_1.weight",))
    with pytest.raises(UsageError, match="cut: the inputs of these names are not given"):
        run_passes(small_gpt().function, ("fuse", "place", "schedule"), PassContext(plan, Plan(pp=2).devices))


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = [
        "show",
        "gpt:layers=2,hidden=8,heads=2,vocab=16,seq=4,batch=2",
        "--loss",
        "cross-entropy",
        "--pp",
        "2",
        "--full",
    ]
    assert main([*model, "--cut", "1.norm1.weight"]) == 0
    text = capsys.readouterr().out
    assert "%1.norm1.weight: f32[8] @ stage1" in text
    assert "%0.mlp.out.bias: f32[8] @ stage0" in text
    assert main([*model, "--cut", "1.norm1"]) == 2
    assert "hint: did you mean 1.norm1." in capsys.readouterr().err
    assert main([*model, "--cut", "1.norm1.weight,norm.weight"]) == 4
