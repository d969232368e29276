"""The distributed program computes what the sequential one does: loss, gradients, next weights and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distir.ir import Device, Value
from distir.ir.errors import InfeasibleError, MismatchError, UsageError
from distir.ops.rules import tensor
from distir.transforms.differentiation.training import SGD, AdamW
from distir.transforms.parallel3d import parallel_transform_3d
from tests.transforms.programs import (
    BATCH,
    TOLERANCE,
    Plan,
    Program,
    check,
    distributed,
    error,
    gpt2_tiny,
    imported_mlp,
    plans,
    run,
    small_gpt,
    written_mlp,
)

PROGRAMS: dict[str, Callable[[], Program]] = {
    "gpt2-tiny, AdamW": lambda: gpt2_tiny(AdamW(0.01)),
    "gpt2-tiny, SGD": lambda: gpt2_tiny(SGD(0.1, momentum=0.9, weight_decay=0.01)),
    "mlp, AdamW": lambda: imported_mlp(AdamW(0.01)),
    "mlp, SGD": lambda: imported_mlp(SGD(0.1, momentum=0.9, nesterov=True)),
    "written mlp": written_mlp,
    "written mlp, padded": lambda: written_mlp(layers=4, width=15),
    "small gpt": small_gpt,
}
SPREAD = [
    Plan(),
    Plan(2, 1, 1, 1),
    Plan(1, 2, 1, 1),
    Plan(1, 1, 2, 1),
    Plan(1, 1, 1, 4),
    Plan(2, 2, 1, 2, "gpipe"),
    Plan(1, 2, 2, 2, host=True),
    Plan(2, 1, 2, 4),
    Plan(2, 2, 2, 2),
    Plan(2, 2, 2, 4, "gpipe", host=True),
    Plan(1, 4, 2, 4),
    Plan(4, 1, 2, 2, host=True),
    Plan(1, 1, 4, 4, "gpipe"),
    Plan(1, 2, 4, 4),
    Plan(8, 1, 1, 1),
    Plan(1, 8, 1, 2),
    Plan(1, 1, 8, 2),
    Plan(2, 2, 2, 2, "interleaved", chunks=2),
    Plan(1, 1, 2, 4, "interleaved", host=True, chunks=3),
    Plan(2, 2, 2, 2, overlap=False),
    Plan(2, 1, 2, 4, "gpipe", host=True, overlap=False),
    *[Plan(2, 1, 1, 2, zero=z) for z in (1, 2, 3)],
    *[Plan(4, 1, 1, 1, zero=z, bucket_mb=0.0005) for z in (1, 2, 3)],
    *[Plan(2, 2, 2, 2, zero=z) for z in (1, 2, 3)],
    *[Plan(2, 1, 2, 4, "gpipe", host=True, zero=z, bucket_mb=0) for z in (1, 2, 3)],
    *[Plan(2, 2, 1, 2, zero=z, overlap=False) for z in (1, 2, 3)],
    Plan(2, 1, 2, 2, "interleaved", chunks=2, zero=3),
    Plan(2, 1, 1, 2, bucket_mb=0),
    Plan(2, 2, 2, 2, bucket_mb=0.001),
    Plan(4, 1, 2, 2, "gpipe", host=True, bucket_mb=float("inf")),
    Plan(pad_multiple=8),
    Plan(2, 1, 1, 2, zero=3, pad_multiple=64),
    Plan(1, 1, 2, 2, pad_multiple=4),
    Plan(2, 2, 2, 2, pad_multiple=8),
    Plan(2, 2, 1, 1, zero=2, pad_multiple=2),
    Plan(2, 1, 2, 4, "distir2021"),
    Plan(1, 2, 4, 2, "distir2021", host=True),
]


@pytest.mark.parametrize("plan", SPREAD, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_sequential(name: str, plan: Plan) -> None:
    check(PROGRAMS[name](), plan)


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True], ids=["", "host"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "distir2021"])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "gpt2-tiny, SGD"])
def test_equals_sequential_under_every_plan(name: str, schedule: str, host: bool) -> None:
    """Every feasible plan of up to 8 devices; only a tp that splits nothing is refused."""
    program = PROGRAMS[name]()
    count = 0
    for plan in plans([schedule], [host]):
        try:
            check(program, plan)
            count += 1
        except InfeasibleError as e:
            if plan.tp == 1 or "splits nothing" not in e.message:
                raise
    assert count >= 73


def test_every_plan_means_all_degrees() -> None:
    every = list(plans())
    assert len(set(every)) == len(every) > 80
    assert {p.dp for p in every} == {1, 2, 4, 8}
    assert {p.tp for p in every} == {p.pp for p in every} == set(range(1, 9))


@pytest.mark.parametrize("order", [("tp", "dp", "pp"), ("pp", "dp", "tp"), ("dp", "tp", "pp")])
def test_any_order_of_devices(order: tuple[str, str, str]) -> None:
    program, plan = small_gpt(layers=1), Plan(2, 2, 2, 2)
    function = parallel_transform_3d(program.function, 2, 2, 2, plan.devices, 2, order=order)
    assert error(run(function, program), program.results()) <= TOLERANCE
    mesh = tensor(function.callees()[0].outputs[0]).mesh
    strides = {axis: mesh.group(axis)[1].index - mesh.devices[0].index for axis in ("dp", "tp")}
    assert strides == {axis: 2 ** order.index(axis) for axis in ("dp", "tp")}


# ---- what the comparison rests on


@pytest.mark.parametrize("name", PROGRAMS)
def test_data_differ_in_every_sample(name: str) -> None:
    program = PROGRAMS[name]()
    batched = [
        x
        for v, x in zip(program.function.inputs, program.arrays, strict=True)
        if (v.role is None and not v.name.startswith("w")) or (v.role is not None and v.role.batch == 0)
    ]
    assert batched
    for x in batched:
        assert len(x) == BATCH
        assert len({sample.tobytes() for sample in x}) == BATCH


class Corrupt:
    """A tap that adds 1 to one number that one device holds of the `number`-th result among `values`."""

    def __init__(self, values: set[Value], number: int, lane: int) -> None:
        self.values, self.number, self.lane, self.seen = values, number, lane, 0

    def __call__(self, value: Value, arrays: Any) -> Any:
        if value not in self.values:
            return arrays
        self.seen += 1
        if self.seen != self.number:
            return arrays
        lanes = [np.array(x) for x in arrays]
        lanes[self.lane].reshape(-1)[-1] += 1.0
        return lanes


@pytest.mark.parametrize("plan", [Plan(2, 2, 2, 2), Plan(4, 1, 2, 2, "gpipe"), Plan(1, 4, 2, 4)], ids=str)
def test_corrupting_one_piece_changes_the_result(plan: Plan) -> None:
    """Each device computes a piece of its own: one wrong number of one device's matrix product shows in the results."""
    program = small_gpt(layers=1)
    function = distributed(program, plan).program
    products = ("MatMul", "MatMulGradWeight", "Attention", "AttentionGrad")
    values = {v for f in function.callees() for op in f.ops if op.op_type in products for v in op.outputs}
    want = program.results()
    nothing = Corrupt(values, 0, 0)
    assert error(run(function, program, nothing), want) <= TOLERANCE
    assert nothing.seen >= 20 * plan.microbatches
    rng = np.random.default_rng(0)
    for number in range(1, nothing.seen + 1, 1 + nothing.seen // 30):
        lane = int(rng.integers(plan.dp * plan.tp))
        try:
            got = run(function, program, Corrupt(values, number, lane))
        except MismatchError:  # replicas of a result differ
            continue
        assert error(got, want) > 1e-9, f"product {number} on lane {lane} left no trace"


# ---- what is refused


@pytest.mark.parametrize(
    ("degrees", "count", "said"),
    [
        ((2, 2, 2, 2), 7, "dp 2 x tp 2 x pp 2 needs 8 devices (or one more, a host), got 7"),
        ((2, 2, 2, 2), 10, "needs 8 devices (or one more, a host), got 10"),
        (
            (3, 1, 1, 1),
            3,
            "a batch of 8 does not divide by dp 3 x 1 microbatch = 3 (hint: use a batch that is a multiple of 3, "
            "or a dp that divides 8)",
        ),
        ((2, 1, 1, 8), 2, "(hint: with dp 2 use 1, 2, 4 microbatches)"),
        ((1, 1, 14, 1), 14, "13 cuttable pieces cannot make 14 stages (hint: use at most --pp 13)"),
        ((1, 7, 1, 1), 7, "tp 7 splits nothing in mlp (hint: use --tp 2 or 4 or 8 or 16)"),
    ],
)
def test_infeasible_says_what_would_fit(degrees: tuple[int, int, int, int], count: int, said: str) -> None:
    dp, tp, pp, microbatches = degrees
    devices = [Device("gpu", i) for i in range(count)]
    with pytest.raises(InfeasibleError) as e:
        parallel_transform_3d(written_mlp().function, dp, tp, pp, devices, microbatches)
    assert said in str(e.value)
    assert "\n" not in str(e.value)


def test_infeasible_where_nothing_can_be_split() -> None:
    with pytest.raises(InfeasibleError, match=r"tp 2 splits nothing in mlp .*use --tp 1: its weights cannot be split"):
        parallel_transform_3d(written_mlp(width=1).function, 1, 2, 1, Plan(1, 2).devices, 1)


def test_a_device_stands_once() -> None:
    a, b = Device("gpu", 0), Device("gpu", 1)
    with pytest.raises(InfeasibleError, match="needs 2 different devices, got gpu:1 more than once"):
        parallel_transform_3d(small_gpt().function, 1, 1, 2, [b, b], 1)
    with pytest.raises(InfeasibleError, match="got gpu:1 more than once"):
        parallel_transform_3d(small_gpt().function, 1, 1, 2, [b, a, b], 1)


def test_degrees_are_at_least_one() -> None:
    with pytest.raises(UsageError, match="dp is a whole number of at least 1, got 0"):
        parallel_transform_3d(written_mlp().function, 0, 1, 1, [], 1)


def test_an_order_names_each_axis_once() -> None:
    with pytest.raises(UsageError, match="an order names tp, dp and pp once each"):
        parallel_transform_3d(written_mlp().function, 1, 1, 1, Plan().devices, 1, order=("tp", "tp", "pp"))
