"""The plan as one value: its fields, axes, files; and that no pass knows an axis by its name."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import distir
from distir.ir.errors import InfeasibleError, UsageError
from distir.transforms.pipeline.keep_whole import GATHERED_AGAIN
from distir.transforms.pipeline.recompute import WORDS
from distir.transforms.pipeline.schedule import gpipe, interleaved
from distir.transforms.plan import AXES, BATCH, STAGES, WEIGHTS, Axis, Plan, default_order, load_plan
from distir.transforms.sharding.strategies import STRATEGIES

ROOMS = Path(__file__).parents[2] / "distir" / "transforms"
PLANS = st.builds(
    Plan,
    dp=st.integers(1, 8),
    tp=st.integers(1, 8),
    pp=st.integers(1, 8),
    microbatches=st.integers(1, 64),
    schedule=st.sampled_from(["1f1b", "gpipe", "a table.csv"]),
    order=st.permutations(["dp", "tp", "pp"]).map(tuple),
    chunks=st.integers(1, 3),
    overlap=st.booleans(),
    bucket_mb=st.sampled_from([0.0, 0.25, 25.0, 1e6, float("inf")]),
    zero=st.sampled_from([0, 1, 2, 3]),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from([*WORDS, "1e9"]),
    gathered_again=st.sampled_from(GATHERED_AGAIN),
    loss_gradient=st.sampled_from(["forward", "backward"]),
    pad_multiple=st.sampled_from([1, 8, 64]),
    cut=st.lists(st.sampled_from(["h1.weight", "a b", 'c"d', "even", "3"]), max_size=3).map(tuple),
)


def test_axes_are_the_fields_with_a_strategy() -> None:
    plan = Plan(2, 3, 4, microbatches=5, zero=1)
    assert plan.axes == (Axis("dp", 2, BATCH), Axis("tp", 3, WEIGHTS), Axis("pp", 4, STAGES))
    assert {a.strategy for a in plan.axes} - {STAGES} <= set(STRATEGIES)
    assert plan.size == 24
    assert plan.stages == Axis("pp", 4, STAGES)
    assert plan.sharding.axes == plan.axes[:2]
    assert plan.sharding.pieces == 10
    assert Plan(tp=2).sharding.axes == (Axis("tp", 2, WEIGHTS),)  # axes of one device are none
    assert default_order() == plan.order == ("tp", "dp", "pp")
    assert [plan.spacing(axis) for axis in plan.order] == [1, 3, 6]
    assert [Plan(2, 3, 4, order=("pp", "dp", "tp")).spacing(a) for a in ("pp", "dp", "tp")] == [1, 4, 8]


def test_every_field_has_a_sentence_of_help() -> None:
    for f in fields(Plan):
        assert len(f.metadata["help"].split()) >= 2, f.name


@settings(deadline=None)
@given(plan=PLANS)
def test_a_plan_reads_back_from_its_file_and_its_repr(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    plan.save(path)
    assert Plan(**load_plan(path)) == plan
    assert eval(repr(plan), {"Plan": Plan, "inf": float("inf")}) == plan
    given = plan.to_json()
    assert given.pop("devices") == plan.size
    assert Plan(**{**given, "bucket_mb": float(given["bucket_mb"]), "order": tuple(given["order"])}) == plan


def test_where_stages_begin_may_be_said_in_other_ways(tmp_path: Path) -> None:
    for said, want in (
        ("even", ("even",)),
        ([2, 4], ("2", "4")),
        ((0, "w"), ("0", "w")),
        ([np.int64(3)], ("3",)),
        ("balanced", ()),
    ):
        plan = Plan(pp=2, cut=said)  # type: ignore[arg-type]
        assert plan.cut == want
        assert (plan == Plan(pp=2)) == (want == ())
    (tmp_path / "p.toml").write_text("cut = [2, 4]")
    assert load_plan(tmp_path / "p.toml")["cut"] == ("2", "4")
    assert "stages of equal numbers of layers" in str(Plan(pp=2, cut=("even",)))
    assert "stages" not in str(Plan(dp=2, cut=("even",)))
    assert "cut at 5 places" in str(Plan(pp=6, cut=("1", "2", "3", "4", "5")))
    assert "cut at 2, 4" in str(Plan(pp=3, cut=("2", "4")))


@pytest.mark.parametrize(
    ("plan", "stages"),
    [
        (Plan(), 1),
        (Plan(pp=4, microbatches=8), 4),
        (Plan(pp=2, microbatches=4, chunks=3, schedule="interleaved"), 6),
        (Plan(pp=2, microbatches=4, chunks=2, schedule=interleaved(2, 4, 2)), 4),
    ],
)
def test_the_number_of_stages(plan: Plan, stages: int) -> None:
    assert plan.stage_count == stages


def test_a_file_says_only_what_differs(tmp_path: Path) -> None:
    assert Plan().to_toml() == "# a plan of distir\n"
    text = Plan(dp=2, overlap=False).to_toml()
    assert [line for line in text.splitlines() if not line.startswith("#")] == ["dp = 2", "overlap = false"]


@pytest.mark.parametrize("table", [gpipe(2, 4), interleaved(2, 4, 2)])
def test_tables_are_written_into_the_file(table: Any, tmp_path: Path) -> None:
    plan = Plan(pp=2, microbatches=4, chunks=1 if table == gpipe(2, 4) else 2, schedule=table)
    plan.save(tmp_path / "p.toml")
    assert Plan(**load_plan(tmp_path / "p.toml")) == plan


def test_generators_are_written_as_their_table(tmp_path: Path) -> None:
    Plan(pp=2, microbatches=4, schedule=gpipe).save(tmp_path / "p.toml")
    assert load_plan(tmp_path / "p.toml")["schedule"] == gpipe(2, 4)


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("dp = ", "is no TOML", "dp = 2"),
        ("ziro = 2", "a plan has no 'ziro'", "did you mean zero?"),
        ("colour = 'red'", "a plan has no 'colour'", "known are dp, tp, pp"),
        ("dp = 0", "dp is a whole number of at least 1, got 0", None),
        ("pad_multiple = 0", "pad_multiple is a whole number of at least 1, got 0", None),
        ("dp = 2.5", "dp is a whole number of at least 1, got 2.5", None),
        ("dp = true", "dp is a whole number of at least 1, got True", None),
        ("zero = 4", "zero is 0, 1, 2 or 3, got 4", None),
        ("zero = true", "zero is 0, 1, 2 or 3, got True", None),
        ("overlap = 1", "overlap is true or false, got 1", None),
        ("sequence_parallel = 'true'", "sequence_parallel is true or false, got 'true'", None),
        ("recompute = -1", "recompute: expected none, gathers", None),
        ("bucket_mb = -1", "bucket_mb is a number of at least 0, got -1", None),
        ("cut = 'w'", "cut is a list of names or numbers of layers, 'even' or 'balanced', got 'w'", None),
        ("cut = ['']", "cut is a list of names or numbers of layers, 'even' or 'balanced', got ['']", None),
        ("cut = [-1]", "cut is a list of names or numbers of layers, 'even' or 'balanced', got [-1]", None),
        ("cut = [true]", "cut is a list of names or numbers of layers, 'even' or 'balanced', got [True]", None),
        ("order = 'tp'", "order is a list of names, got 'tp'", None),
        ("loss_gradient = 'sideways'", "loss_gradient is forward or backward, got 'sideways'", None),
        ("order = ['tp', 'tp', 'pp']", "an order names tp, dp and pp once each, got tp, tp, pp", None),
        ("schedule = '1f2b'", "schedule: unknown schedule '1f2b'", "known are 1f1b"),
        ("schedule = 3", "schedule: expected a row of cells for each pipeline rank, got 3", None),
        ("schedule = [['0F0', 'B']]", "schedule, rank 0, cell 1", None),
        ("schedule = '''\n0F0 0X0\n'''", "schedule, line 1, cell 2: expected stage, F or B, microbatch", None),
    ],
)
def test_a_file_that_is_no_plan(text: str, said: str, hint: str | None, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_plan(path)
    assert str(path) in raised.value.message
    assert said in raised.value.message
    assert hint is None or hint in (raised.value.hint or "")


def test_a_file_with_too_many_devices(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("dp = 1024\ntp = 2048\n")
    with pytest.raises(InfeasibleError) as raised:
        load_plan(path)
    assert raised.value.message.startswith(f"{path}: 2,097,152 devices")


def test_rows_of_a_table_may_be_an_array(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('schedule = [["0F0", "0B0"], "1F0 1B0"]\n')
    assert load_plan(path)["schedule"] == gpipe(2, 1)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_plan(tmp_path / "none.toml")


def test_values_that_are_none() -> None:
    with pytest.raises(UsageError, match="an order names tp, dp and pp once each, got tp, tp, pp"):
        Plan(order=("tp", "tp", "pp"))
    with pytest.raises(InfeasibleError, match="more than the"):
        Plan(dp=1 << 21)


NAMES = {f.name for f in AXES} | {f.name.upper() for f in AXES}


def named(tree: ast.AST) -> list[int]:
    """The lines where an axis is named: as a string, a name, or an attribute."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value in NAMES)
        or (isinstance(node, ast.Name) and node.id in NAMES)
        or (isinstance(node, ast.Attribute) and node.attr in NAMES)
        or (isinstance(node, ast.arg) and node.arg in NAMES)
    ]


# All but the table itself, and the founding notebook's signature.
NAMELESS = sorted(p for p in ROOMS.rglob("*.py") if p.name not in ("plan.py", "parallel3d.py"))


@pytest.mark.parametrize("path", NAMELESS, ids=lambda p: str(p.relative_to(ROOMS)))
def test_no_pass_names_an_axis(path: Path) -> None:
    assert named(ast.parse(path.read_text())) == []


def test_a_name_is_seen() -> None:
    assert sorted(named(ast.parse('f(x, "dp")\nDP = 1\nplan.tp\ndef g(pp): pass'))) == [1, 2, 3, 4]


def test_a_new_axis_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one's own with another name for replicas: nothing but the table knows it."""
    from distir.ir import Device, verify
    from distir.transforms.passes import PassContext, run_passes
    from distir.transforms.plan import Sharding
    from tests.transforms.programs import error, run, written_mlp

    class Renamed(Plan):
        @property
        def sharding(self) -> Sharding:
            own = super().sharding
            return own._replace(axes=tuple([a._replace(name={"dp": "replicas"}.get(a.name, a.name)) for a in own.axes]))

        def spacing(self, axis: str) -> int:
            return super().spacing({"replicas": "dp"}.get(axis, axis))

    program = written_mlp()
    plan = Renamed(2, 2, 2, 2, zero=3)
    names = ("fuse", "decompose", "pad", "place", "schedule", "bucket", "prefetch")
    made = run_passes(program.function, names, PassContext(plan, [Device("cpu", i) for i in range(8)]))
    verify(made)
    assert "replicas" in distir.pformat(made)
    assert error(run(made, program), program.results()) <= 1e-10


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_axes_of_replicas_are_two_rows(zero: int) -> None:
    """The batch is split over the second axis inside its split over the first."""
    from distir.ir import Device, verify
    from distir.ir.validate import validate
    from distir.transforms.parallel3d import source_of
    from distir.transforms.passes import PassContext, run_passes
    from distir.transforms.plan import BATCH, Axis, Sharding
    from tests.transforms.programs import error, run, written_mlp

    class TwoAxes(Plan):
        """Replicas along two axes, the second of 2."""

        @property
        def sharding(self) -> Sharding:
            own = super().sharding
            rest = [a for a in own.axes if a.strategy != BATCH]
            return own._replace(axes=(*rest, Axis("outer", self.dp // 2, BATCH), Axis("inner", 2, BATCH)))

        def spacing(self, axis: str) -> int:
            if axis not in ("outer", "inner"):
                return super().spacing(axis)
            return super().spacing("dp") * (2 if axis == "outer" else 1)

    program = written_mlp()
    names = ("fuse", "decompose", "pad", "place", "schedule", "bucket", "prefetch")
    plan = TwoAxes(4, 2, 1, 2, zero=zero)
    made = run_passes(program.function, names, PassContext(plan, [Device("cpu", i) for i in range(8)]))
    verify(made)
    validate(made, source_of(made, program.function))
    text = distir.pformat(made)
    assert "{mb,outer,inner}" in text
    assert error(run(made, program), program.results()) <= 1e-10
