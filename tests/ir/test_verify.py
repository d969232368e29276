"""Verification: each rule refuses what breaks it, with a message that says where and what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distir.ir import Device, Function, FunctionMaker, Mesh, Op, Role, Value, parse, pformat, verify
from distir.ir.errors import IRTypeError
from distir.ir.function import Attributes
from distir.ir.infer import infer_types
from distir.ir.type import NOW, SUM, Float, Float32, Partial, Shard, Tensor, Tuple
from tests.ir.programs import BATCH, STAGE0, STAGE1, WIDTH, pipeline, sequential, tensor


def refused(f: Function) -> str:
    with pytest.raises(IRTypeError) as found:
        verify(f)
    return str(found.value)


def attributes(op: Op, **new: Any) -> None:
    op.attributes = Attributes({k: v for k, v in {**op.attributes, **new}.items() if v is not ...})


def callee(f: Function, name: str) -> Function:
    return next(c for c in f.callees() if c.name == name)


def plain() -> Function:
    x, w = Tensor(Float(), (4, 8)), Tensor(Float(), (8, 8))
    return infer_types(sequential(), [x, w])


def test_programs_that_are_right() -> None:
    verify(plain())
    verify(pipeline())
    for f in pipeline().callees():
        verify(f)


# values and ops


def test_types_are_needed() -> None:
    assert refused(sequential()) == "net: input %x: has no type (hint: run infer_types first)"
    f = plain()
    f.ops[1].outputs[0].type = None  # type: ignore[assignment]
    assert refused(f) == "net: op 1 %r = Relu: result %r has no type (hint: run infer_types first)"


def test_use_before_definition() -> None:
    f = plain()
    f.ops = (f.ops[1], f.ops[0], f.ops[2])
    assert refused(f) == "net: op 0 %r = Relu: operand 0 (%h): expected a value defined before, got a result of op 1"


def test_value_of_another_function() -> None:
    f = plain()
    f.ops[2].inputs = (f.ops[2].inputs[0], plain().inputs[0])
    assert refused(f).startswith(
        "net: op 2 %y = Add: operand 1 (%x): expected a value defined before, got one of another"
    )


def test_defined_twice() -> None:
    f = plain()
    f.ops = (*f.ops, Op(f.ops[0].spec, f.ops[0].inputs, f.ops[0].attributes, f.ops[0].outputs))
    assert refused(f) == "net: op 3 %h = MatMul: expected new results, got one that is defined already"


def test_result_twice() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float(), (4,)))
    parts = f.add_op("Split", "y", [x], {"axis": 0, "parts": 2})
    f.ops[-1].outputs = (parts[0], parts[0])
    f.set_outputs([])
    assert "expected new results" in refused(f.finalize())


def test_input_twice() -> None:
    f = plain()
    f.inputs = (*f.inputs, f.inputs[0])
    assert refused(f) == "net: an input is there twice"


def test_result_is_an_input() -> None:
    f = plain()
    f.ops[0].outputs = (f.inputs[0],)
    f.inputs[0].type = f.ops[1].inputs[0].type
    assert "expected new results" in refused(f) or "expected a value defined before" in refused(f)


def test_names_are_unique() -> None:
    f = plain()
    f.ops[1].outputs[0].name = "x"
    assert refused(f) == "net: two values have the name %x"


def test_operand_types() -> None:
    f = plain()
    f.inputs[1].type = Tensor(Float(), (9, 8))
    assert refused(f).startswith("net: op 0 %h = MatMul: operand 1 (%w): expected k = 8, got 9")


def test_result_types() -> None:
    f = plain()
    f.ops[1].outputs[0].type = Tensor(Float(), (4, 9))
    assert refused(f) == "net: op 1 %r = Relu: result %r: expected f32[4, 8], got f32[4, 9]"


def test_results_of_ops_that_are_alike_but_for_these() -> None:
    """Of two ops of equal spec and operands the second has the wrong type: one of its own, or with its attributes."""

    def sums(keepdims: int) -> Function:
        f = FunctionMaker("net")
        x = f.add_input_value("x", Tensor(Float(), (4, 8)))
        f.set_outputs([f.add_op("ReduceSum", n, [x], {"axes": (1,), "keepdims": 0}) for n in ("first", "second")])
        made = f.finalize()
        attributes(made.ops[1], keepdims=keepdims)
        return made

    verify(sums(0))
    assert "second: expected f32[4, 1], got f32[4]" in refused(sums(1))
    f = sums(0)
    f.ops[1].outputs[0].type = Tensor(Float(), (4, 1))
    assert "second: expected f32[4], got f32[4, 1]" in refused(f)


def test_arity() -> None:
    f = plain()
    f.ops[0].inputs = f.ops[0].inputs[:1]
    assert "expected 2 operands, got 1" in refused(f)
    f = plain()
    f.ops[1].outputs = (*f.ops[1].outputs, Value("extra", f.inputs[0].type))
    assert refused(f) == "net: op 1 %r, %extra = Relu: expected 1 results, got 2"


def test_devices() -> None:
    f = plain()
    f.inputs[1].type = Tensor(Float(), (8, 8), Device("gpu", 0))
    assert refused(f).startswith("net: op 0 %h = MatMul: operand 1 (%w): expected it on None, got f32[8, 8] @ gpu:0")


def test_placements() -> None:
    """The bias that is added once a device: a Partial where the op is not linear."""
    f = FunctionMaker("f")
    x = f.add_input_value("x", tensor((8,), STAGE0, SUM))
    b = f.add_input_value("b", tensor((8,), STAGE0))
    y = f.add_op("Add", "y", [x, x])
    f.ops[-1].inputs = (x, b)
    f.set_outputs([y])
    assert refused(f.finalize()).startswith(
        "f: op 0 %y = Add: on mesh axis 'mb': operand 0 (%x): expected Replicate, got"
    )


def test_of_is_an_earlier_op_of_the_function() -> None:
    for other in (plain().ops[0], None):
        f = plain()
        f.ops[1].of = other or f.ops[2]
        assert refused(f).startswith("net: op 1 %r = Relu: expected `of` an earlier op of net, got")
    f.ops[1].of = f.ops[1]
    assert "expected `of` an earlier op" in refused(f)
    f.ops[1].of = f.ops[0]
    verify(f)


def test_operand_names_in_messages_are_quoted() -> None:
    f = plain()
    f.name, f.inputs[1].name = "a net", "a\nb"
    f.inputs[1].type = Tensor(Float(), (9, 8))
    assert refused(f).startswith('"a net": op 0 %h = MatMul: operand 1 (%"a\\nb"): expected')


# outputs, roles, updates


def test_outputs_are_values_of_the_function() -> None:
    f = plain()
    f.outputs = (Value("z", f.inputs[0].type),)
    assert refused(f) == "net: output %z is not a value of the function"


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (Role("data", batch=2), "expected the batch among the dims of data, got f32[4, 8]"),
        (Role("data", batch=-1), "expected the batch among the dims of data, got f32[4, 8]"),
        (Role("parameter", batch=0), "expected the batch among the dims of data, got f32[4, 8]"),
        (Role("parameter", source=(4,)), "expected a source shape within (4, 8), got (4,)"),
        (Role("parameter", source=(4, 9)), "expected a source shape within (4, 8), got (4, 9)"),
        (Role("parameter", source=(4, 7), used=(3, 7)), "expected a source shape within (3, 7), got (4, 7)"),
        (
            Role("parameter", source=(4, 7), used=(4, 9)),
            "expected a source shape, and that in which it is used within (4, 8), got (4, 9)",
        ),
        (
            Role("parameter", used=(4, 7)),
            "expected a source shape, and that in which it is used within (4, 8), got (4, 7)",
        ),
    ],
)
def test_roles_fit(role: Role, message: str) -> None:
    f = plain()
    f.inputs[0].role = role
    assert refused(f) == f"net: input %x: {role}: {message}"


def test_only_tensors_have_roles() -> None:
    f = FunctionMaker("f")
    f.add_input_value("x", Tuple([Tensor(Float(), ())]), Role("data"))
    assert refused(f.finalize()) == "f: input %x: Role('data'): expected a tensor, got (f32[])"


def test_source_shapes_of_outputs_fit() -> None:
    f = plain()
    f.sources = {f.outputs[0]: (3, 8)}
    verify(f)
    for shape in ((4,), (5, 8)):
        f.sources = {f.outputs[0]: shape}
        assert refused(f) == f"net: source {shape} of %y: expected a shape within that of f32[4, 8]"
    f.sources = {f.inputs[0]: (4, 8)}
    assert refused(f) == "net: source (4, 8) of %x: expected an output of the function"


def updating(old: int = 1, role: str | None = "parameter", rows: int = 8) -> Function:
    f = plain()
    f.inputs[1].role = Role(role) if role else None
    new = Value("w.new", Tensor(Float(), (rows, 8)))
    f.inputs = (*f.inputs, new)
    f.outputs = (*f.outputs, new)
    f.updates = {new: f.inputs[old]}
    return f


def test_updates_fit() -> None:
    verify(updating())
    verify(updating(role=None))
    verify(updating(role="state"))
    where = "net: update of %w by %w.new"
    assert refused(updating(rows=4)) == f"{where}: expected f32[8, 8], got f32[4, 8]"
    assert refused(updating(role="constant")) == f"{where}: expected a parameter or a state, got Role('constant')"
    f = updating()
    f.outputs = f.outputs[:1]
    assert refused(f) == f"{where}: expected an input and an output of the function"
    f = updating()
    f.updates = {f.outputs[1]: f.outputs[0]}
    assert "expected an input and an output of the function" in refused(f)
    f = updating()
    f.outputs = (*f.outputs, f.inputs[1])
    f.updates[f.inputs[1]] = f.inputs[1]
    assert refused(f) == "net: update of %w by %w: expected one update of an input, got two"


def test_an_update_may_be_distributed_where_a_host_holds_the_input() -> None:
    f = FunctionMaker("f")
    old = f.add_input_value("w", Tensor(Float(), (8,), Device("host", 0)), Role("parameter"))
    for placement in (Shard(0), SUM):
        new = f.add_input_value("new", tensor((8,), STAGE0, placement))
    f.set_outputs([new])
    f.updates[new] = old
    verify(f.finalize())
    new.type = tensor((16,), STAGE0, Shard(0))
    assert "update of %w by" in refused(f.finalize())


# calls and time


def test_callees_are_verified() -> None:
    f = pipeline()
    callee(f, "fwd0").ops[1].outputs[0].type = Tensor(Float(), (1,))
    assert refused(f).startswith(
        "fwd0: op 1 %a = MatMul: result %a: expected f32[4{mb,dp}, 18{3:tp}] @ stage0, got f32[1]"
    )


def test_operands_of_a_call() -> None:
    f = pipeline()
    f.ops[-1].inputs = (f.ops[-1].inputs[0], *f.ops[-1].inputs[:0:-1])
    assert refused(f).startswith(
        "main: op 7 %w.new, %loss.2 = Call: update1: operand 1 (%dw): expected f32[8, 12]+mb#0:2"
    )


def test_a_call_needs_a_function() -> None:
    f = pipeline()
    attributes(f.ops[-1], callee=3)
    assert refused(f) == "main: op 7 %w.new, %loss.2 = Call: expected a function as callee, got 3"


@pytest.mark.parametrize("microbatch", [2, -1, 1.0, True, "1"])
def test_mb_is_one_of_the_microbatches(microbatch: object) -> None:
    f = pipeline()
    attributes(f.ops[1], mb=microbatch)
    assert f"Call: expected mb of fwd0 in 0..1, got {microbatch!r}" in refused(f)


def test_wrong_microbatch() -> None:
    f = pipeline()
    attributes(f.ops[1], mb=1)
    assert "result %y: expected f32[4{mb,dp}, 8]#1 @ stage0, got f32[4{mb,dp}, 8]#0 @ stage0" in refused(f)


def test_function_called_without_mb_is_whole_in_time() -> None:
    """It cuts a microbatch, as only a body may."""
    f = pipeline()
    attributes(f.ops[1], mb=...)
    message = refused(f)
    assert message.startswith("fwd0: op 0 %x.mb: expected a whole, or microbatches within 0..1, got f32[4{mb,dp}, 8]")


def test_caller_is_whole_in_time() -> None:
    f = FunctionMaker("main")
    x = f.add_input_value("x", tensor((BATCH, WIDTH), STAGE0))
    f.set_outputs([f.add_op("LocalSlice", "y", [x], {"axis": "mb", "dim": 0})])
    verify(f.finalize())  # not scheduled yet
    g = FunctionMaker("nothing")
    f.add_op("Call", None, [], {}, [g.finalize()])
    assert refused(f.finalize()).startswith(
        "main: op 0 %y: expected a whole, or microbatches within 0..1, got f32[8{mb}, 8]"
    )


@pytest.mark.parametrize("piece", [None, (0, NOW), (NOW, NOW + 1), (1, 3), (-1, 1), (1, 0)])
def test_pieces_of_a_caller(piece: tuple[int, int] | None) -> None:
    f = pipeline()
    f.inputs = (*f.inputs, Value("sum", tensor((4,), STAGE1, SUM, piece=piece)))
    assert refused(f).startswith("main: input %sum: expected a whole, or microbatches within 0..1, got f32[4]+mb")
    f.inputs = (*f.inputs[:-1], Value("sum", Tuple([tensor((4,), STAGE1, SUM, piece=piece)])))
    assert "expected a whole, or microbatches" in refused(f)


def test_a_split_is_of_one_microbatch() -> None:
    f = pipeline()
    f.inputs = (*f.inputs, Value("x", tensor((4,), STAGE1, Shard(0), piece=(0, 2))))
    f.inputs[-1].name = "all"
    assert "is split over time: expected one microbatch, got f32[2{mb}]#0:2" in refused(f)


def test_what_does_not_vary_is_of_no_microbatch() -> None:
    f = pipeline()
    f.inputs = (*f.inputs, Value("constant", tensor((4,), STAGE1, piece=(0, 1))))
    assert "does not vary in time: expected no microbatch, got f32[4]#0 @ stage1" in refused(f)


def body(build: Callable[[FunctionMaker, Value], object], *placements: Any, piece: Any = None) -> Function:
    """main calls a body whose value `sum` is placed so, with what `build` adds."""
    f = FunctionMaker("body")
    x = f.add_input_value("sum", tensor((4,), STAGE0, *placements, piece=piece))
    build(f, x)
    f.set_outputs([])
    main = FunctionMaker("main")
    callee = f.finalize()
    main.add_op("Call", None, [main.add_input_value("x", x.type.at(0))], {"mb": 0}, [callee])
    return main.finalize()


def test_a_body_does_not_reduce_over_time() -> None:
    f = body(lambda f, x: f.add_op("MPIAllreduce", "y", [x], {"axis": "mb"}), Partial("sum"))
    assert refused(f) == (
        "body: op 0 %y = MPIAllreduce: operand 0 (%sum): expected all microbatches, got a body's own: "
        "f32[4]+mb @ stage0 (hint: reduce over time in a function that is called without mb)"
    )
    verify(body(lambda f, x: f.add_op("MPIAllreduce", "y", [x], {"axis": "dp"}), Partial("sum"), Partial("sum")))
    verify(f.ops[0].attributes["callee"])  # a program that is not scheduled may


def test_a_body_does_not_gather_over_time() -> None:
    f = body(lambda f, x: f.add_op("MPIAllgather", "y", [x], {"axis": "mb"}), Shard(0))
    assert refused(f).startswith(
        "body: op 0 %y = MPIAllgather: operand 0 (%sum): expected all microbatches, got a body's"
    )


def test_a_body_knows_its_own_microbatch_only() -> None:
    f = body(lambda f, x: None, Partial("sum"))
    g = f.ops[0].attributes["callee"]
    g.inputs = (*g.inputs, Value("other", tensor((4,), STAGE0, SUM, piece=(1, 2))))
    f.ops[0].inputs = (*f.ops[0].inputs, f.ops[0].inputs[0])
    assert refused(f).startswith("body: input %other: expected its own microbatch, got f32[4]+mb#1 @ stage0")


def test_a_body_reduces_what_covers_all_microbatches() -> None:
    g = FunctionMaker("body")
    x = g.add_input_value("x", tensor((4,), STAGE0, SUM, piece=(0, 2)))
    g.add_op("MPIAllreduce", "y", [x], {"axis": "mb"})
    f = body(lambda f, x: None, Partial("sum"))
    attributes(f.ops[0], callee=g.finalize())
    assert "operand 0" in refused(f)
    assert "expected all microbatches" not in refused(f)  # only the call is wrong: no caller has such an operand


def test_a_body_calls_at_its_own_microbatch() -> None:
    inner = FunctionMaker("inner")
    x = inner.add_input_value("x", tensor((4,), STAGE0, SUM))
    inner.set_outputs([inner.add_op("Neg", "y", [x])])
    callee = inner.finalize()
    verify(body(lambda f, x: f.add_op("Call", "y", [x], {}, [callee]), SUM))
    f = body(lambda f, x: f.add_op("Call", "y", [x], {}, [callee]), SUM)
    attributes(f.ops[0].attributes["callee"].ops[0], mb=0)
    assert refused(f) == (
        "body: op 0 %y = Call: expected no mb in a body, got mb=0 (hint: a callee shares its microbatch)"
    )


def test_long_bundles_are_compared_entry_by_entry() -> None:
    f = FunctionMaker("f")
    x = [f.add_input_value("x", Tensor(Float(), (k,))) for k in range(9)]
    f.add_op("Pack", "all", x)
    f.ops[-1].outputs[0].type = Tuple([v.type if k != 7 else Tensor(Float(), (70,)) for k, v in enumerate(x)])
    message = refused(f.finalize())
    assert message == "f: op 0 %all = Pack: result %all: expected entry 7 to be f32[7], got f32[70]"


def test_every_callee_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And types are inferred once for each kind of op."""
    import sys

    from distir.ir import verify as _  # noqa: F401
    from distir.ir.infer import infer

    module = sys.modules["distir.ir.verify"]
    named: list[Function] = []
    inferred: list[Any] = []

    def naming(f: Function, defined: Any) -> None:
        named.append(f)

    def inferring(spec: Any, attrs: Any, types: Any) -> Any:
        inferred.append((spec, attrs, types))
        return infer(spec, attrs, types)

    monkeypatch.setattr(module, "_check_names", naming)
    monkeypatch.setattr(module, "infer", inferring)
    f = pipeline()
    verify(f)
    assert len(named) == 1 + len(f.callees()) == len(set(named))
    ops = [(op.spec, op.attributes, tuple([v.type for v in op.inputs])) for g in (f, *f.callees()) for op in g.ops]
    assert set(inferred) == set(ops)
    assert len(inferred) == len(set(ops)) < len(ops)


def test_same_function_is_seen_both_ways() -> None:
    """What may be called without mb may be called with it; each is checked."""
    g = FunctionMaker("g")
    x = g.add_input_value("x", tensor((4,), STAGE0))
    g.set_outputs(
        [g.add_op("MPIAllreduce", "y", [g.add_input_value("s", tensor((4,), STAGE0, SUM))], {"axis": "mb"}), x]
    )
    callee = g.finalize()
    f = FunctionMaker("main")
    x = f.add_input_value("x", tensor((4,), STAGE0))
    s = f.add_input_value("s", tensor((4,), STAGE0, SUM, piece=(0, 1)))
    f.add_op("Call", "y", [x, s], {"mb": 0}, [callee])
    assert "expected all microbatches" in refused(f.finalize())


def test_parsed_programs_verify() -> None:
    verify(parse(pformat(pipeline())))
    verify(parse(pformat(plain())))


def test_meshes_that_only_share_a_name_are_not_the_same() -> None:
    other = Mesh(list(STAGE0.devices), {"mb": 2, "dp": 4}, name=STAGE0.name)
    f = FunctionMaker("f")
    x = f.add_input_value("x", tensor((8,), STAGE0))
    y = f.add_input_value("y", tensor((8,), STAGE0))
    f.add_op("Add", "z", [x, y])
    y.type = tensor((8,), other)
    assert "operand 1 (%y): expected it on stage0(mb=2, dp=2, tp=2)" in refused(f.finalize())


def test_a_result_is_of_all_microbatches():
    """A microbatch's piece may not be returned in place of the whole."""
    mesh = Mesh([Device("gpu", 0)], {"mb": 2}, "stage0")
    body = FunctionMaker("fwd0")
    x = body.add_input_value("x", Tensor(Float32, (8, 4), mesh))
    body.set_outputs([body.emit("Relu", body.emit("LocalSlice", x, axis="mb", dim=0))])
    callee = body.finalize()
    main = FunctionMaker("main")
    x = main.add_input_value("x", Tensor(Float32, (8, 4), mesh))
    pieces = [main.add_op("Call", None, [x], {"mb": i}, (callee,)) for i in range(2)]
    main.set_outputs([main.emit("MPIAllgather", *pieces, axis="mb")])
    verify(main.finalize())
    main.set_outputs([pieces[0]])
    with pytest.raises(IRTypeError, match="expected all microbatches"):
        verify(main.finalize())
