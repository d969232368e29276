"""Passes by name: every state prints, parses and verifies, and from any state the rest of the way is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import distir
from distir.ir import Device, parse, pformat, same, verify
from distir.ir.errors import UsageError
from distir.transforms.parallel3d import distribute
from distir.transforms.passes import DISTRIBUTED, PASSES, PLACED, SEQUENTIAL, PassContext, form_of, run_passes
from distir.transforms.pipeline.bucket import GATHERS
from distir.transforms.plan import InputSplit, Plan
from distir.transforms.relocate import devices_of, relocate
from tests.transforms.programs import ADAMW, error, gpt2_tiny, imported_mlp, run, small_gpt

NAMES = [p.name for p in PASSES]
CASES = {
    "gpt": (lambda: small_gpt(optimizer=ADAMW), Plan(2, 2, 2, 2)),
    "gpt2-tiny": (gpt2_tiny, Plan(1, 2, 2, 4, "gpipe")),
    "mlp-zero3": (lambda: imported_mlp(ADAMW), Plan(2, 1, 2, 2, zero=3, bucket_mb=0.001)),
    "mlp-interleaved": (imported_mlp, Plan(1, 1, 2, 4, "interleaved", chunks=2)),
}


def given(plan: Plan) -> PassContext:
    return PassContext(plan, [Device("cpu", i) for i in range(plan.size)])


@pytest.mark.parametrize("name", CASES)
def test_every_state_is_a_program_from_which_the_way_goes_on(name: str) -> None:
    make, plan = CASES[name]
    program = make()
    want = distribute(program.function, plan, given(plan).devices).program
    state = program.function
    for k, p in enumerate(PASSES):
        assert form_of(state) == p.takes
        state = run_passes(state, [p.name], given(plan))
        assert form_of(state) == p.gives
        verify(state)
        read = parse(pformat(state))
        assert same(read, state), p.name
        verify(read)
        assert same(run_passes(read, NAMES[k + 1 :], given(plan)), want), f"on from the text after {p.name}"
    assert same(state, want)
    assert error(run(state, program), program.results()) <= 1e-10


def test_bodies_made_at_once_are_those_of_the_passes(tmp_path: Path) -> None:
    """`distribute` does to each body at once what `bucket` and `prefetch` do to a program: seed that it does not."""
    make, plan = CASES["mlp-zero3"]
    function = make().function
    full = distribute(function, plan, given(plan).devices).program
    before = run_passes(function, NAMES[: NAMES.index("schedule") + 1], given(plan))
    assert not same(full, before)
    assert not same(full, run_passes(before, ["bucket"], given(plan)))
    assert same(full, run_passes(before, ["bucket", "prefetch"], given(plan)))


def test_weights_that_a_further_axis_shards_are_gathered_ahead_in_units() -> None:
    """As those that replicas shard: ZeRO 3 over two devices that split the sequence."""
    model = distir.load("gpt:layers=4,hidden=32,heads=2,vocab=64,seq=16,batch=4", loss="cross-entropy")
    gathers: list[int] = []
    for plan in (
        Plan(2, zero=3, bucket_mb=0.02),
        Plan(split=(InputSplit("cp", 2, (("*", 1),)),), zero=3, bucket_mb=0.02),
    ):
        program = distir.distribute(model, plan)
        forward = next(f for f in program.callees() if f.name == "fwd0")
        gathers.append(sum(op.spec in GATHERS for op in forward.ops))
    assert gathers[1] == gathers[0] + 2 * 4  # and keys and values of each layer


def test_passes_take_the_form_they_are_made_for() -> None:
    function = imported_mlp().function
    with pytest.raises(UsageError, match="unknown pass 'placed'") as raised:
        run_passes(function, ["placed"], given(Plan()))
    assert raised.value.hint == "did you mean place?"
    with pytest.raises(UsageError, match=r"schedule takes a placed program; .* is sequential") as raised:
        run_passes(function, ["schedule"], given(Plan()))
    assert raised.value.hint == "run place first"
    placed = run_passes(function, ["decompose", "place"], given(Plan()))
    with pytest.raises(UsageError, match=r"fuse takes a sequential program; .* is placed"):
        run_passes(placed, ["fuse"], given(Plan()))


def test_forms() -> None:
    function = imported_mlp().function
    forms = [form_of(run_passes(function, NAMES[: NAMES.index(last) + 1], given(Plan(2)))) for last in NAMES]
    assert form_of(function) == SEQUENTIAL
    assert forms == [p.gives for p in PASSES]
    assert set(forms) == {SEQUENTIAL, PLACED, DISTRIBUTED}


def test_a_program_on_other_devices_computes_the_same() -> None:
    program, plan = small_gpt(), Plan(2, 2, 2, 2)
    made = distribute(program.function, plan, given(plan).devices).program
    others = [Device("gpu", 3 * i + 1) for i in range(8)]
    moved = relocate(made, others)
    verify(moved)
    assert devices_of(made) == given(plan).devices
    assert devices_of(moved) == others
    assert pformat(moved) == pformat(distribute(program.function, plan, others).program)
    assert error(run(moved, program), program.results()) <= 1e-10
