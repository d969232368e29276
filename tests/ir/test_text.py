"""Printing and parsing: text is readable, and is read back as what was printed."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distir.ir import Device, Function, FunctionMaker, Mesh, cpprint, parse, pformat, same, verify
from distir.ir.errors import ModelError, UsageError
from distir.ir.infer import infer_types
from distir.ir.notation import format_type
from distir.ir.same import difference
from distir.ir.type import NOW, REPLICATE, SUM, BFloat16, Bool, Float, Int64, Partial, Shard, Tensor, Tuple
from tests.ir.programs import STAGE0, pipeline, sequential, tensor
from tests.ir.strategies import programs

GOLDEN = Path(__file__).parents[1] / "golden" / "pipeline.distir"


def test_golden() -> None:
    """A change of the text form shows here: print `pipeline()` to the file once it is meant."""
    assert pformat(pipeline()) + "\n" == GOLDEN.read_text()


def test_golden_parses_and_verifies() -> None:
    f = parse(GOLDEN.read_text())
    verify(f)
    assert difference(f, pipeline()) is None


def test_untyped_program_round_trips() -> None:
    f = sequential()
    assert pformat(f).splitlines()[1] == "  %h = MatMul(%x, %w)"
    assert same(parse(pformat(f)), f)
    typed = infer_types(f, [Tensor(Float(), (4, 8)), Tensor(Float(), (8, 8))])
    assert not same(typed, f)
    assert same(parse(pformat(typed)), typed)


SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@settings(max_examples=50, suppress_health_check=SLOW)
@given(programs())
def test_round_trip(f: Function) -> None:
    text = pformat(f)
    g = parse(text)
    assert difference(g, f) is None
    assert pformat(g) == text


@pytest.mark.slow
@settings(max_examples=250, suppress_health_check=SLOW)
@given(programs())
def test_round_trip_of_many(f: Function) -> None:
    assert difference(parse(pformat(f)), f) is None


def test_a_device_whose_name_looks_like_the_end_of_a_type() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float(), (2,), Device("]#", 0)))
    f.set_outputs([x])
    assert difference(parse(pformat(f.finalize())), f.finalize()) is None


NASTY = """\
mesh "m\\""("a b"=2, mb=3) = gpu:0..1 x1 by 3
bundle T0 = (f32[2{"a b"}]+mb#0:t+1 @ "m\\"", (i64[], bool[1] @ "x\\ny":-1))
fn "MatMul"#1(%"": T0#3 parameter(1) source=(3, 4)) {
  %"\\x00\\ud800": f32[] = Neg(%"", "k%"=(1, -inf, nan, 1e-05, "s\\\\", (Shard(0, 3),)), to=@"m\\"")
  %z = "MatMul"(%"") of %"\\x00\\ud800"
  return %z -> %"" source=(1,)
}
"""


@settings(max_examples=300)
@given(st.sampled_from([GOLDEN.read_text(), NASTY]), st.data())
def test_damaged_text_is_refused_or_read(text: str, data: st.DataObject) -> None:
    """Whatever the text, there is a ModelError that says where, or a Function."""
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(text)))
        j = min(len(text), i + data.draw(st.integers(0, 9)))
        patch = data.draw(st.sampled_from(["", *' \n"()%x1#@-,[]{}=:+.\\']))
        text = text[:i] + patch + text[j:]
    try:
        pformat(parse(text))
    except ModelError as e:
        assert re.match(r"line \d+: ", str(e))  # noqa: PT017


@pytest.mark.parametrize(
    ("type", "text"),
    [
        (Tensor(Float(), ()), "f32[]"),
        (Tensor(BFloat16(), (2, 3), Device("gpu", 1)), "bf16[2, 3] @ gpu:1"),
        (tensor((8, 36), STAGE0, REPLICATE, REPLICATE, Shard(1, 3)), "f32[8, 18{3:tp}] @ stage0"),
        (tensor((8, 32), STAGE0, Shard(1), Shard(1, 2), Shard(1, 4)), "f32[8, 4{mb,dp,tp}] @ stage0"),
        (tensor((8, 48), STAGE0, Shard(1, 6), Shard(1), Shard(0)), "f32[4{tp}, 12{dp,6:mb}] @ stage0"),
        (tensor((8, 48), STAGE0, REPLICATE, Shard(1, 3, 1), Shard(0, 1, 1)), "f32[4{tp+1}, 24{3:dp+1}] @ stage0"),
        (tensor((8,), STAGE0, SUM, Partial("max"), REPLICATE), "f32[8]+mb+max:dp @ stage0"),
        (tensor((8,), STAGE0, SUM, Partial("mean"), REPLICATE), "f32[8]+mb+mean:dp @ stage0"),
        (tensor((8,), STAGE0, SUM, SUM, SUM, piece=(3, 4)), "f32[8]+mb+dp+tp#3 @ stage0"),
        (tensor((8,), STAGE0, SUM, SUM, SUM, piece=(0, 3)), "f32[8]+mb+dp+tp#0:3 @ stage0"),
        (tensor((8,), STAGE0, SUM, SUM, SUM, piece=(0, NOW)), "f32[8]+mb+dp+tp#0:t @ stage0"),
        (tensor((8,), STAGE0, SUM, SUM, SUM, piece=(0, NOW + 1)), "f32[8]+mb+dp+tp#0:t+1 @ stage0"),
        (Tuple((Tensor(Bool(), (1,)), Tensor(Int64(), ()))), "(bool[1], i64[])"),
        (Tensor(Float(), (2,), Device("a b", 0)), 'f32[2] @ "a b":0'),
        (tensor((2,), Mesh([Device("gpu", 0)], {"a b": 1}, 'm"'), Shard(0)), 'f32[2{"a b"}] @ "m\\""'),
    ],
)
def test_types(type: Tensor | Tuple, text: str) -> None:
    assert format_type(type) == text
    assert repr(type) == text
    f = FunctionMaker("f")
    f.add_input_value("x", type)
    assert parse(pformat(f.finalize())).inputs[0].type is type


def devices(*indices: int) -> list[Device]:
    return [Device("gpu", i) for i in indices]


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh(devices(0), {}, "m"), "mesh m() = gpu:0"),
        (Mesh(devices(0, 1, 2, 3), {"mb": 4, "dp": 2, "tp": 2}, "m"), "mesh m(mb=4, dp=2, tp=2) = gpu:0..3"),
        (Mesh(devices(1, 5, 9, 13), {"dp": 4}, "m"), "mesh m(dp=4) = gpu:1..13:4"),
        (Mesh(devices(3, 2, 1, 0), {"dp": 4}, "m"), "mesh m(dp=4) = gpu:3..0:-1"),
        (Mesh(devices(0, 1, 8, 9, 16, 17), {"dp": 6}, "m"), "mesh m(dp=6) = gpu:0..1 x3 by 8"),
        (Mesh([*devices(0, 1, 7), Device("cpu", 0)], {"dp": 4}, "m"), "mesh m(dp=4) = gpu:0..1, gpu:7, cpu:0"),
        (Mesh(devices(0), {"=": 1}, "gpu:0"), 'mesh "gpu:0"("="=1) = gpu:0'),
    ],
)
def test_meshes(mesh: Mesh, text: str) -> None:
    f = FunctionMaker("f")
    f.add_input_value("x", Tensor(Float(), (4,), mesh))
    f = f.finalize()
    assert pformat(f).splitlines()[0] == text
    assert same(parse(pformat(f)), f)


def test_length_does_not_grow_with_devices() -> None:
    """A cluster of 8,192 devices, of which every stage has two of each node of 16."""

    def text(nodes: int) -> str:
        on = [Device("gpu", 16 * n + 2 * t + half * 8) for n in range(nodes) for half in (0, 1) for t in range(4)]
        f = FunctionMaker("f")
        f.add_input_value("x", Tensor(Float(), (4,), Mesh(on, {"dp": 2 * nodes, "tp": 4}, "m")))
        return pformat(f.finalize())

    assert "gpu:0..6:2 x2 by 8 x512 by 16" not in text(512)  # the inner two repetitions are one run of 8
    assert text(512).splitlines()[0] == "mesh m(dp=1024, tp=4) = gpu:0..8190:2"
    assert len(text(512)) < len(text(2)) + 10


def test_strided_mesh_is_short_too() -> None:
    on = [Device("gpu", 1000 * a + 100 * b + c) for a in range(20) for b in range(3) for c in range(5)]
    f = FunctionMaker("f")
    f.add_input_value("x", Tensor(Float(), (4,), Mesh(on, {"dp": 300}, "m")))
    text = pformat(f.finalize())
    assert text.splitlines()[0] == "mesh m(dp=300) = gpu:0..4 x3 by 100 x20 by 1000"
    assert same(parse(text), f.finalize())


def test_names_that_collide() -> None:
    """Two meshes and three functions of one name, which is also that of an op."""
    f = FunctionMaker("MatMul")
    calls = []
    for k in range(2):
        g = FunctionMaker("MatMul")
        g.add_input_value("x", Tensor(Float(), (4,), Mesh([Device("gpu", k)], {"dp": 1}, "m")))
        g.set_outputs(g.inputs)
        calls.append(g.finalize())
    for g in calls:
        x = f.add_input_value("x", g.inputs[0].type)
        f.add_op("Call", "y", [x], {}, [g])
    program = f.finalize()
    text = pformat(program)
    assert 'fn "MatMul"#1(%x: f32[4] @ m#1) {' in text
    assert '%y.1: f32[4] @ m#1 = "MatMul"#1(%x.1)' in text
    read = parse(text)
    assert difference(read, program) is None
    verify(read)
    assert [op.callee.name for op in read.ops if op.callee] == ["MatMul", "MatMul"]


def test_long_bundles_stand_in_the_head_once() -> None:
    """Residuals of many microbatches are one line however many calls there are."""

    def program(calls: int) -> str:
        body = FunctionMaker("body")
        x = body.add_input_value("x", tensor((16, 8), STAGE0, Shard(0), Shard(0, 2)))
        body.add_op("Pack", "all", [x] * 50)
        callee = body.finalize()
        f = FunctionMaker("main")
        for k in range(calls):
            x = f.add_input_value("x", callee.inputs[0].type.at(k % 2))
            f.add_op("Call", "y", [x], {"mb": k % 2}, [callee])
        assert same(parse(pformat(f.finalize())), f.finalize())
        return pformat(f.finalize())

    assert "%y: T0#0 = body(%x, mb=0)" in program(2)
    assert program(40).count("bundle") == 1
    assert len(program(40)) - len(program(20)) < 20 * 120


def test_a_bundle_keeps_its_microbatch_when_no_callee_says_it() -> None:
    body = Tuple([tensor((16,), STAGE0, Shard(0)), *[tensor((4,), STAGE0, SUM, piece=(0, NOW + 1))] * 4])
    f = FunctionMaker("main")
    for k in range(3):
        f.add_input_value("x", body.at(k))
    text = pformat(f.finalize())
    assert [line.split(": ")[1] for line in text.splitlines() if "%x" in line.split(":")[0]][:1] != []
    assert text.count("bundle") <= 2
    assert same(parse(text), f.finalize())


def test_one_line_an_op() -> None:
    f = FunctionMaker("f\n")
    x = f.add_input_value("x\ny", Tensor(Float(), (4,)))
    for _ in range(5):
        x = f.add_op("Neg", "a\u2028b", [x])
    assert len(pformat(f.finalize()).splitlines()) == 1 + 5 + 2


def test_cpprint_is_pformat_in_colours() -> None:
    out = io.StringIO()
    cpprint(pipeline(), out)
    assert re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()) == pformat(pipeline()) + "\n"


def test_cpprint_has_colours() -> None:
    code = (
        "import colorful; colorful.use_true_colors(); from distir.ir import cpprint;"
        "from tests.ir.programs import pipeline; cpprint(pipeline())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "\x1b[" in run.stdout
    assert re.sub(r"\x1b\[[\d;]*m", "", run.stdout) == pformat(pipeline()) + "\n"


def test_parts_of_a_program_print_too() -> None:
    f = pipeline()
    assert pformat(f.inputs[0]) == "%w0: f32[8, 18{3:tp}] @ stage0 parameter"
    assert pformat(f.ops[1]) == "%y: f32[4{mb,dp}, 8]#0 @ stage0 = fwd0(%w0, %w1, %x, mb=0)"
    assert pformat(f.inputs[0].type) == "f32[8, 18{3:tp}] @ stage0"
    assert pformat([1, 2]) == "[1, 2]"
    assert repr(f) == pformat(f)


def test_attributes_of_other_kinds_are_refused() -> None:
    f = FunctionMaker("f")
    x = f.add_input_value("x", Tensor(Float(), (4,)))
    f.add_op("Identity", "y", [x])
    for value in (np.int64(3), {1, 2}, b"x"):
        f.ops[0].attributes = type(f.ops[0].attributes)({"k": value})
        with pytest.raises(ModelError, match="has no text"):
            pformat(f.finalize())


def test_invalid_programs_print() -> None:
    """What verify will refuse can be looked at."""
    f, g = FunctionMaker("f"), FunctionMaker("g")
    x = f.add_input_value("x", Tensor(Float(), (4,)))
    y = g.add_input_value("x", Tensor(Float(), (4,)))
    g.add_op("Neg", "foreign", [y])
    f.add_op("Neg", "y", [x], of=g.ops[0])
    f.set_outputs([])
    f.updates[f.ops[0].outputs[0]] = x
    text = pformat(f.finalize())
    assert "%y: f32[4] = Neg(%x) of #?" in text
    assert "update %y -> %x" in text


def program(*lines: str) -> str:
    return "\n".join(["fn f(%x: f32[2]) {", *lines, "}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected more lines, got the end of the text"),
        ("mesh m(a=2) = gpu:0", "line 1: mesh m {'a': 2} needs 2 devices, got 1"),
        ("mesh m(a=2) gpu:0", "line 1: expected mesh name(axis=size, ...) = kind:first..last, ..., got mesh"),
        ("hello", "line 1: expected mesh, bundle or fn, got hello"),
        (program("  return %z"), "line 2: expected a value of the function, got %z"),
        (program("  %y = MatMul(%x, %z)"), "line 2: expected a value defined before, got %z"),
        (program("  %y = Matmul(%x)"), "line 2: unknown op 'Matmul'"),
        (program("  %x = Neg(%x)"), "line 2: expected a new name, got %x, which is defined already"),
        (program("  %y, %y = Neg(%x)"), "line 2: expected a new name, got %y, which is defined already"),
        (program("  %y = Neg(%y)"), "line 2: expected a value defined before, got %y"),
        (program("  %y: f33[2] = Neg(%x)"), "line 2: expected a dtype, got f33"),
        (program("  %y: f32[2] @ m = Neg(%x)"), "line 2: expected a mesh of the head or a device, got m"),
        (program("  %y: f32[2{tp}] = Neg(%x)"), "line 2: expected a mesh that has these axes, got f32[2{tp}]"),
        (program("  %y: = Neg(%x)"), "line 2: expected a type, got ="),
        (program("  %y = Neg %x"), "line 2: expected an op, and (, got Neg %x"),
        (program("  %y Neg(%x)"), "line 2: a role is data, parameter, state or constant, got 'Neg'"),
        (program("  %y = Neg(%x"), "line 2: expected ), got %x"),
        (program("  %y = Neg(%x, axis)"), "line 2: expected name=value, got axis"),
        (program("  %y = Neg(%x, axis=!)"), "line 2: expected an attribute, got !"),
        (program("  %y = Neg(%x, a=1, a=2)"), "line 2: expected name=value, got a="),
        (program("  %y = Neg(%x, a=Shard(x))"), "line 2: expected an attribute, got x"),
        (
            program("  %y = Neg(%x, a=Shard(1, 2, 3, 4))"),
            "line 2: expected Shard(dim), Shard(dim, outer), Shard(dim, outer, shift) or a halo after these",
        ),
        (program("  %y = Neg(%x) of %x"), "line 2: expected the first result of an op before this one, got %x"),
        (program("  %y = Neg(%x) of #0"), "line 2: expected the first result of an op before this one, got #0"),
        (program("  return %x %x"), "line 2: expected , or ), got %x"),
        (program("  return %x source(1)"), "line 2: expected source=(shape), got source(1"),
        ("mesh m() = gpu:0\nmesh m() = gpu:1", "line 2: expected a new name, got m, which is a mesh already"),
        (program("  return %x") + "\n" + program("  return %x"), "line 4: expected a new name and (, got f ("),
        ("fn f(%x: f32[2], %x) {", "line 1: expected a new name, got %x, which is defined already"),
        ("fn f(%x: f32[2])", "line 1: expected {, got the end of the line"),
        ("fn f(%x: f32[2]) {\n  return %x", "line 2: expected more lines, got the end of the text"),
        ("fn f(%x: f32[2]) {\n  return %x\n  %y = Neg(%x)", "line 3: expected }, got %y"),
        ("bundle T0 (f32[2])", "line 1: expected =, got ("),
        ("bundle T0 = (f32[2]) x", "line 1: expected the end of the line, got x"),
    ],
)
def test_errors_of_parse(text: str, message: str) -> None:
    with pytest.raises(ModelError) as found:
        parse(text)
    assert found.value.message.startswith(message)
    line = text.splitlines()[int(message[5]) - 1 : int(message[5])]
    assert found.value.message.endswith("".join(line).strip())


@pytest.mark.parametrize("what", [None, 3, b"fn f() {}", pipeline()])
def test_what_is_no_text_is_reported(what: object) -> None:
    with pytest.raises(UsageError, match=f"expected the text of a program, got {type(what).__name__}"):
        parse(what)  # type: ignore[arg-type]


def test_names_may_be_quoted_where_they_need_not() -> None:
    f = parse('fn "f"(%"x": f32[2]) {\n\n  %"y": f32[2] = Neg(%x)\n  return %y,\n}\n\n')
    assert [v.name for v in (*f.inputs, *f.outputs)] == ["x", "y"]
    verify(f)


def test_printing_is_loaded_on_demand() -> None:
    code = "import sys, distir.ir; print([m for m in ('prettyprinter', 'networkx', 'numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text",
    [
        "fn f(%x: f64[4{0:tp}] @ stage0) {\n  return %x\n}",
        "mesh stage0(mb=0, tp=2) = gpu:0..1\nfn f(%x: f64[4{mb}] @ stage0) {\n  return %x\n}",
        "mesh a(mb=1) = cpu:0..99999999999\nfn f(%x: f64[4] @ a) {\n  return %x\n}",
        "fn f(%x: f64[4]) {\n  %y: f64[4] = Loss(%x, %x, N=" + "(" * 5000 + ")\n  return %y\n}",
        "fn f(%x: f64[" + "9" * 5000 + "]) {\n  return %x\n}",
    ],
)
def test_numbers_and_nesting_beyond_reason(text):
    with pytest.raises(ModelError):
        parse(text)


def test_a_name_may_hold_a_lone_surrogate() -> None:
    """Any character of a Python string can be written in the text, which itself is one."""
    f = FunctionMaker("\udfff")
    f.emit("Relu", f.add_input_value("x\ud800", Tensor(Float(), (2,))))
    function = f.finalize()
    assert same(parse(pformat(function)), function)
