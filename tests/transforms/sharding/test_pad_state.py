"""What ZeRO cannot divide is stored with padding: no result changes, and all is kept in parts."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from distir.api import compilation
from distir.api.model import load
from distir.api.results import Summary
from distir.executor.cost_model.fusion import UNFUSED, fused, unwritten
from distir.executor.reference.sequential import evaluate
from distir.hardware import load_runtime
from distir.ir import Function, FunctionMaker, Op, Role
from distir.ir.device import Device
from distir.ir.errors import IRTypeError, MismatchError
from distir.ir.function import Attributes
from distir.ir.parse import parse
from distir.ir.same import same
from distir.ir.type import BFloat16, DType, Float32, Float64, Shard, Tensor
from distir.ops.rules import tensor
from distir.transforms import plan as plans_of
from distir.transforms.differentiation.grad import grad
from distir.transforms.differentiation.training import SGD, AdamW, training_step, with_loss, with_updates
from distir.transforms.parallel3d import source_of
from distir.transforms.sharding.check_padding import check_padding
from distir.transforms.sharding.pad import pad, paddable
from distir.transforms.sharding.pad_state import Share, pad_state
from tests.transforms.programs import Plan, Program, check, distributed, filled, small_gpt

ADAMW = AdamW(0.01)
CONTEXT = ("cp=2:input_ids.1,labels.1,position_ids.1,attention_mask.2",)
"""Context parallelism of `small_gpt`."""


def odd_gpt(batch: int = 30) -> Program:
    """Widths and vocabulary that neither 3 nor 5 divide."""
    return small_gpt(width=16, vocabulary=22, optimizer=ADAMW, batch=batch)


PLANS = [
    *[Plan(dp, microbatches=2, zero=zero, bucket_mb=0) for dp in (3, 5) for zero in (1, 2, 3)],
    Plan(3, zero=2),
    Plan(3, 2, 1, 2, zero=1, sequence_parallel=True),
    Plan(3, 2, 1, 2, zero=3, recompute="selective"),
    Plan(3, 1, 2, 2, zero=1),
    Plan(3, 1, 2, 2, zero=2, recompute="full"),
    Plan(3, 1, 2, 2, zero=3, gathered_again="blocks"),
    Plan(5, 2, 2, 2, zero=3),
    Plan(3, zero=3, split=CONTEXT),
    Plan(3, 1, 1, 2, zero=1, split=CONTEXT),
    Plan(3, zero=2, host=True),
    Plan(3, 4, 1, 1, zero=3, pad_multiple=8),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_equals_sequential(plan: Plan) -> None:
    program = check(odd_gpt(), plan)
    kept = [v for v in program.inputs if v.kind == "state" and tensor(v).shape]
    padded = [v for v in kept if v.role is not None and v.role.used is not None]
    assert padded
    if not plan.host:
        whole = [v for v in kept if not isinstance(tensor(v).on("dp"), Shard)]
        assert not any([v in padded for v in whole])
        assert plan.tp > 1 or not whole  # biases whose one dim tp splits stay as they are


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_device_stores_a_share(zero: int) -> None:
    plan = Plan(3, microbatches=2, zero=zero)
    function = distributed(odd_gpt(), plan).program
    for v in function.inputs:
        t, role = tensor(v), v.role
        if v.kind == "state" and role is not None and role.source:
            assert t.bytes * plan.dp == np.prod(t.global_shape) * t.dtype.size
            grown = np.prod(t.global_shape) / np.prod(role.source)
            assert grown <= (1 + 2 / 16)  # 16 to 18


def bodies_of(program: Function, op_type: str) -> Counter[str]:
    """How many ops of a type are in bodies of each phase."""
    return Counter(
        [f.name.split(".")[0].rstrip("0123456789") for f in program.callees() for op in f.ops if op.op_type == op_type]
    )


def chain(layers: int = 3, width: int = 16, dtype: DType = Float64) -> Function:
    """Products with square weights."""
    return products(12, *[width] * (layers + 1), dtype=dtype)


def products(rows: int, *widths: int, dtype: DType = Float64) -> Function:
    """Products of data with weights w0, w1, ... of these widths."""
    f = FunctionMaker("products")
    y = f.add_input_value("x", Tensor(dtype, (rows, widths[0])), Role("data", batch=0))
    for k, shape in enumerate(itertools.pairwise(widths)):
        y = f.emit("MatMul", y, f.add_input_value(f"w{k}", Tensor(dtype, shape), Role("parameter")))
    f.set_outputs([y])
    return f.finalize()


def test_sums_of_all_microbatches_are_extended_once_under_zero_1() -> None:
    """In the last of four backward passes, where they are reduced; under ZeRO 2 and 3 in each: in two bodies."""
    program = Program(training_step(chain(), "mse", ADAMW), [])
    for zero, count in ((1, 3), (2, 6), (3, 6)):
        made = distributed(program, Plan(3, microbatches=4, zero=zero, bucket_mb=0)).program
        assert bodies_of(made, "PadTo") == {"bwd": count}
        scattered = bodies_of(made, "MPIReduceScatter")
        assert scattered["bwd"] == count
        assert scattered["update"] == 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_that_are_clipped_are_extended_before_their_norm(zero: int) -> None:
    """Each device squares its share: they are scattered as without clipping."""
    plan = Plan(3, microbatches=4, zero=zero, bucket_mb=0)
    clipped, plain = (Program(training_step(chain(), "mse", AdamW(0.01, clip_norm=c)), []) for c in (1.0, None))
    found, expected = (distributed(p, plan).program for p in (clipped, plain))
    for op_type in ("PadTo", "MPIReduceScatter"):
        assert bodies_of(found, op_type) == bodies_of(expected, op_type)


def test_a_cut_of_the_model_itself_is_none_of_padding() -> None:
    f = FunctionMaker("cut")
    x = f.add_input_value("x", Tensor(Float64, (6, 17)), Role("data", batch=0))
    w = f.add_input_value("w", Tensor(Float64, (17, 17)), Role("parameter"))
    f.set_outputs([f.emit("MatMul", x, f.emit("CutTo", w, dim=0, size=17))])
    step = training_step(f.finalize(), "mse", SGD(0.1))
    check(filled(step, {}, np.random.default_rng(0)), Plan(3, zero=3))


def test_what_is_only_stored_with_padding_is_not_said_to_be_padded() -> None:
    made = load("gpt:layers=1,hidden=64,heads=4,vocab=100,seq=16,batch=6", loss="cross-entropy")
    plan = plans_of.Plan(dp=3, zero=3)
    program = compilation.distribute(made, plan, [Device("gpu", i) for i in range(3)])
    assert any([v.role is not None and v.role.used is not None for v in program.inputs])
    assert Summary.of(made, plan, program).padded == {}


def test_padding_again_enlarges_the_shape_that_is_used() -> None:
    source = step()
    weight = [v.kind for v in source.inputs].index("parameter")
    once = pad_state(source, [Share(weight, 0, 18)])
    again = pad(once, paddable(once, 17))
    role = again.inputs[weight].role
    assert role is not None
    assert (role.source, role.used) == ((16, 16), (16, 17))


def test_weights_are_gathered_in_both_passes_and_cut_there() -> None:
    program = Program(training_step(chain(), "mse", ADAMW), [])
    made = distributed(program, Plan(3, microbatches=2, zero=3, bucket_mb=0)).program
    gathers, cuts = bodies_of(made, "MPIAllgather"), bodies_of(made, "CutTo")
    assert gathers["update"] == 0
    assert gathers["fwd"] >= 3 <= gathers["bwd"]
    assert cuts["fwd"] >= 3 <= cuts["bwd"]
    saved = [
        t for f in made.callees() if f.name.startswith("fwd") for v in f.outputs for t in getattr(v.type, "types", ())
    ]
    assert all([t.shape != (16, 16) for t in saved])  # no weight


def test_what_is_cast_is_cut_once_it_is_gathered_as_the_narrower() -> None:
    step = training_step(chain(dtype=Float32), "mse", ADAMW, precision=BFloat16)
    made = distributed(Program(step, []), Plan(3, zero=3)).program
    producer = {v: op for f in made.callees() for op in f.ops for v in op.outputs}
    cuts = [op for f in made.callees() for op in f.ops if op.op_type == "CutTo"]
    assert cuts
    for op in cuts:
        assert tensor(op.inputs[0]).dtype is BFloat16
        assert producer[op.inputs[0]].op_type in ("MPIAllgather", "Unpack")


def test_a_weight_that_is_not_trained_is_stored_so_too() -> None:
    forward = with_loss(chain(layers=2), "mse", 0)
    trained = next(v for v in forward.inputs if v.name == "w1")
    step = with_updates(grad(forward, 0, [trained]), SGD(0.1), [trained], False)
    program = filled(step, {}, np.random.default_rng(0))
    for zero, shape in ((2, (16, 16)), (3, (18, 16))):
        found = {v.name: tensor(v).global_shape for v in check(program, Plan(3, zero=zero)).inputs}
        assert found["w0"] == shape
        assert found["w1"] == (18, 16)


def test_nothing_is_padded_that_divides_or_that_would_grow_by_half() -> None:
    def grown(width: int, dp: int) -> list[str]:
        program = Program(training_step(chain(width=width), "mse", ADAMW), [])
        function = distributed(program, Plan(dp, zero=3)).program
        return [v.name for v in function.inputs if v.role is not None and v.role.used]

    assert grown(12, 3) == []
    assert grown(8, 6) == []  # 8 to 12
    assert len(grown(8, 3)) == 9  # 8 to 9


def test_the_dim_that_grows_least_is_padded_if_none_grows_by_little() -> None:
    program = filled(training_step(products(7, 9, 13, 33), "mse", SGD(0.1)), {}, np.random.default_rng(0))
    found = {v.name: tensor(v).global_shape for v in check(program, Plan(7, zero=3)).inputs}
    assert found["w0"] == (9, 14)  # not 14 rows of 9, and 1 of 13 more
    assert found["w1"] == (14, 33)  # 13 to 14 is little; the first dim needs no copy


def test_text_keeps_the_shape_that_is_used() -> None:
    function = distributed(odd_gpt(), Plan(3, zero=3)).program
    again = parse(str(function))
    assert same(again, function)
    assert [v.role for v in again.inputs] == [v.role for v in function.inputs]
    assert any([v.role is not None and v.role.used is not None for v in again.inputs])


def test_the_source_of_a_program_that_was_read_again() -> None:
    """Its roles say which dims ops use padded, as tp splits them, and which are only stored so."""
    program = small_gpt(width=16, vocabulary=21, optimizer=ADAMW, batch=30)
    function = parse(str(distributed(program, Plan(3, 2, zero=3)).program))
    source = source_of(function, program.function)
    embedding = next(v for v in source.inputs if v.role is not None and v.role.source == (21, 16))
    assert embedding.role is not None
    assert embedding.role.used == (22, 16)
    assert [v.type for v in source.inputs] == [v.type.erased() for v in function.inputs]


@pytest.mark.parametrize("runtime", ["distir", "megatron"])
def test_time_of_extending_a_gradient(runtime: str) -> None:
    """Frameworks with buffers for what is reduced fill these up: that takes no time of its own."""
    program = Program(training_step(chain(), "mse", ADAMW), [])
    bodies = distributed(program, Plan(3, zero=2)).program.callees()
    joined = {op: x for f in bodies for op, x in fused(f, load_runtime(runtime)).items()}
    extensions = [op for f in bodies for op in f.ops if op.op_type == "PadTo"]
    assert len(extensions) == 3
    for op in extensions:
        assert unwritten(op, joined.get(op, UNFUSED)) == (runtime == "megatron")


@pytest.mark.parametrize("used", ["by an op", "as an output"])
def test_an_extension_that_is_used_elsewhere_takes_time(used: str) -> None:
    f = FunctionMaker("extended")
    x = f.add_input_value("x", Tensor(Float64, (16, 16)))
    y = f.emit("PadTo", x, dim=0, size=18)
    f.set_outputs([f.emit("Relu", y) if used == "by an op" else y])
    assert list(fused(f.finalize(), load_runtime("torch-eager")).values()) == []


# ---------------------------------------------------------------- faults


def step() -> Function:
    return training_step(chain(layers=1), "mse", SGD(0.1, momentum=0.9))


def rebuilt(function: Function, change: Any) -> Function:
    """The function with each op replaced by what `change` gives for it, if it is another."""
    maker = FunctionMaker(function.name)
    maker.inputs.extend(function.inputs)
    for op in function.ops:
        maker.ops.append(change(op) or op)
    maker.set_outputs(function.outputs)
    maker.updates, maker.sources = dict(function.updates), dict(function.sources)
    return maker.finalize()


def with_attributes(op_type: str, **given: Any) -> Any:
    def change(op: Op) -> Op | None:
        if op.op_type != op_type:
            return None
        return Op(op.spec, op.inputs, Attributes({**op.attributes, **given}), op.outputs, op.of)

    return change


FAULTS = {
    "one row less": with_attributes("CutTo", size=15),
    "a gradient extended by ones": with_attributes("PadTo", value=1.0),
    "a gradient one row longer": with_attributes("PadTo", size=19),
    "a gradient of one row less": with_attributes("PadTo", dim=1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    source = step()
    padded = pad_state(
        source, [Share(source.inputs.index(next(v for v in source.inputs if v.kind == "parameter")), 0, 18)]
    )
    check_padding(source, padded, evaluate)
    with pytest.raises((MismatchError, IRTypeError)):
        check_padding(source, rebuilt(padded, FAULTS[fault]), evaluate)
