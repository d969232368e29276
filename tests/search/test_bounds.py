"""Lower bounds never exceed the simulation; a bound that is too high is seen."""

import itertools
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distir.api.model import load
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster, load_runtime
from distir.ir.topology import Topology, regular_group
from distir.search import cut_stages, placed_program, run_ops
from distir.search.bounds import groups_along, lane, slope
from distir.search.candidate_bounds import Bounds, relatives
from distir.search.exact import Setting, evaluate
from distir.search.memory_bounds import _least_memory
from distir.search.model_axes import model_axes
from distir.search.space import FURTHER, SETTINGS, Candidate, space
from distir.transforms.differentiation.training import AdamW
from distir.transforms.plan import InputSplit

MODELS = (
    "gpt:layers=2,hidden=64,heads=4,vocab=100,seq=32",
    "gpt:layers=3,hidden=64,heads=4,vocab=1000,seq=32,tied=0,dropout=0.1",
    "llama:layers=4,hidden=64,heads=4,kv_heads=2,vocab=64,seq=32",
    "llama:layers=4,hidden=512,heads=8,vocab=1000,seq=256",
    "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32,experts=2,ffn=64",
    "gpt:layers=2,hidden=128,heads=4,vocab=64,seq=64,experts=4,ffn=512,choices=2,capacity=2",
    "gpt:layers=2,hidden=4096,heads=32,vocab=5000,seq=256,dropout=0.1",
    "llama:layers=3,hidden=2048,heads=16,kv_heads=4,vocab=32000,seq=512",
)
SEQUENCES = InputSplit("cp", 4, (("*", 1),))
CALIBRATED = str(Path(__file__).parents[1] / "calibrated.toml")
"""Ranks share two cores; each op has seconds of its own."""
MEASURED = str(Path(__file__).parents[1] / "measured_collectives.toml")
"""Collectives have seconds of their own, of which more bytes sometimes take less; devices have tensors alone."""


class Case(NamedTuple):
    setting: Setting
    bounds: Bounds
    candidates: list[Candidate]


@cache
def case(name, batch, gpus, cluster, precision, runtime=None, clip=None):
    model = load(name, {"batch": batch}, loss="cross-entropy", optimizer=AdamW(clip_norm=clip), precision=precision)
    topology = load_cluster(cluster, devices=gpus)
    own = topology.regular and topology.regular.runtime
    cost = CostModel(topology, runtime=own if runtime is None else load_runtime(runtime))
    found = Setting(model, batch, cost, 0.0)
    vary = [name for name in SETTINGS if name not in FURTHER or name in model_axes(model.function)]
    return Case(found, Bounds(found), space(model.function, batch, gpus, topology, vary).candidates)


def too_high(found, c, factor=1.0):
    """Whether a bound of a candidate, times a factor, is above its simulation."""
    outcome = evaluate(found.setting, c)
    if outcome.reason is not None:
        return False
    seconds, memory = found.bounds.of(c)
    shared = found.bounds.of_all(relatives(c), c.microbatch, c.devices)
    if found.bounds.refines:
        for replicas in (False, True):
            [more] = Bounds(found.setting).of_cuts([c], replicas=replicas)
            seconds, memory = max(seconds, more[0]), max(memory, more[1])
    return max(seconds, shared) * factor > outcome.seconds or memory * factor > outcome.memory


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(MODELS),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([2, 4, 16]),
    st.sampled_from(["dgx-a100", "dgx-v100", "distir-v100-x4", "b200-8", CALIBRATED, MEASURED]),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([None, None, "megatron", "torch-eager", "megatron-core", "composer", "megatron-core-default"]),
    st.sampled_from([None, 1.0]),
    st.integers(0, 1 << 30),
)
def test_bounds_are_below_the_simulation(name, batch, gpus, cluster, precision, runtime, clip, seed):
    found = case(name, batch, gpus, cluster, precision, runtime, clip)
    draw = random.Random(seed)
    further = [c for c in found.candidates if c.split]
    assert not too_high(found, draw.choice(found.candidates))
    assert not further or not too_high(found, draw.choice(further))


@pytest.mark.parametrize(
    ("model", "gpus", "precision", "c"),
    [
        (MODELS[4], 2, "fp32", Candidate(2, 1, 1, 1, "1f1b", 1, 1)),
        (MODELS[3], 4, "bf16", Candidate(2, 1, 2, 1, "interleaved", 2, 1, "selective")),
        (MODELS[3], 4, "bf16", Candidate(2, 1, 2, 1, "interleaved", 2, 0, "selective")),
        (MODELS[4], 16, "bf16", Candidate(2, 1, 2, 1, zero=1, order=("tp", "dp", "cp", "pp"), split=(SEQUENCES,))),
    ],
)
@pytest.mark.parametrize("cluster", [CALIBRATED, MEASURED])
def test_bounds_of_bytes_where_a_device_has_tensors_alone(model, gpus, precision, c, cluster):
    """A context of 1 GiB hides that bounds are too high: of weights that replicas have whole, for whose share counted
    beside them; of sums over microbatches that are reduced before the last backward pass of the rank; of weights in 16
    bits of a stage that has had its last backward pass, when another of the rank has its own; of sums of experts'
    gradients that ZeRO 1 splits along context parallelism's axis."""
    assert not too_high(case(model, 4, gpus, cluster, precision), c)


@pytest.mark.parametrize(
    ("cluster", "runtime", "batch", "first", "sharded"),
    [(CALIBRATED, "torch-eager", 4, "tp", 3), (MEASURED, None, 8, "ep", 2), (MEASURED, None, 8, "ep", 3)],
)
def test_bounds_of_bytes_where_gradients_are_split_over_experts(cluster, runtime, batch, first, sharded):
    """Stages are those of the plan without ZeRO, though its reductions, of each microbatch, are along the experts."""
    found = case(MODELS[4], batch, 8, cluster, "fp32", runtime)
    about = (1, 2, 2, 2, 1, sharded, first)
    chosen = [c for c in found.candidates if (c.dp, c.tp, c.pp, c.ep, c.microbatch, c.zero, c.order[0]) == about]
    assert chosen
    for c in chosen:
        assert not too_high(found, c)


@pytest.mark.parametrize(
    ("model", "batch", "precision", "c"),
    [
        (MODELS[6], 16, "fp32", Candidate(1, 4, 1, 4, "1f1b", 1, 0, "full", sequence_parallel=True)),
        (MODELS[3], 8, "bf16", Candidate(2, 4, 1, 2, "1f1b", 1, 1, "selective")),
    ],
)
def test_bounds_where_kernels_are_those_of_products(model, batch, precision, c):
    """Products take most of the seconds of what is sent beside them; and hand on gradients in 32 bits of the first
    microbatch, that take their bytes."""
    assert not too_high(case(model, batch, c.devices, MEASURED, precision, "megatron-core"), c)


def test_bounds_where_a_product_is_quicker_alone(monkeypatch):
    """Measured, a product and its bias take longer as one op than as two, as which they run where weights are gathered
    first. Seeded: they always are one."""
    about, c = (MODELS[6], 8, 2, CALIBRATED, "bf16", "torch-compiled"), Candidate(2, 1, 1, 2, "1f1b", 1, 3, "full")
    assert not too_high(case(*about), c)
    joined = run_ops.run_ops

    def one(placed, joins):
        return {op: run._replace(product=None) for op, run in joined(placed, joins).items()}

    for module in ("segments", "placed_program"):
        with monkeypatch.context() as patch:
            patch.setattr(f"distir.search.{module}.run_ops", one)
            assert too_high(case.__wrapped__(*about), c)


@pytest.mark.parametrize("runtime", ["megatron-core+fp8", "torchtitan-compiled+fp8", "torchtitan-async+fp8"])
@pytest.mark.parametrize("seed", range(4))
def test_bounds_where_products_are_in_8_bits(seed, runtime):
    found = case(MODELS[seed], 8, 8, "b200-8", "bf16", runtime)
    assert not too_high(found, random.Random(seed).choice(found.candidates))


@pytest.mark.parametrize("module", ["candidate_bounds", "stage_bounds"])
def test_bounds_where_products_save_8_bits(monkeypatch, module):
    """Most memory is of what is saved for them. Seeded: all of it is in 16 bits."""
    name = "gpt:layers=4,hidden=4096,heads=32,vocab=64,seq=4096,ffn=65536"
    about, c = (name, 32, 8, "b200-8", "bf16", "megatron-core+fp8"), Candidate(1, 8, 1, 32, "1f1b")
    found = case(*about)
    assert not too_high(found, c)
    monkeypatch.setattr(f"distir.search.{module}.least_share", lambda runtime: 1.0)
    assert too_high(case.__wrapped__(*about), c)


def test_reductions_that_share_a_bucket(monkeypatch):
    """With sequence parallelism the sums of a cross-entropy over shards are reduced as one. Seeded: one by one."""
    c = Candidate(1, 4, 4, 1, "gpipe", sequence_parallel=True, order=("dp", "pp", "tp"))
    assert not too_high(case(MODELS[2], 8, 16, MEASURED, "bf16"), c)
    monkeypatch.setattr("distir.search.cut_stages.may_share", lambda *args: set())
    assert too_high(case.__wrapped__(MODELS[2], 8, 16, MEASURED, "bf16"), c)


def test_segments_do_not_price_what_may_share_a_bucket():
    """One of the two sums of a cross-entropy, and a reduction that is used in another segment."""
    profile = case(MODELS[2], 8, 8, "dgx-a100", "bf16").bounds.profile((4, True, "none", ()))
    assert profile is not None
    found = [
        sorted(
            [
                profile.kinds[row.kind].op.spec.name
                for segment in segments
                for row in segment.rows
                if unpriced(row, profile)
            ]
        )
        for segments in (profile.forward, profile.backward)
    ]
    assert found == [["MPIAllreduce"], ["MPIReduceScatter"]]


def unpriced(row, profile):
    """Whether a row of a segment communicates along tp, and is not priced."""
    return profile.kinds[row.kind].axis == "tp" and not profile.kinds[row.kind].priced


def test_views_take_no_turn(monkeypatch):
    """What is gathered of a saved value is there before compute comes to its view. Seeded: views take their turn."""
    found = case(MODELS[1], 16, 2, "dgx-v100", "fp32")
    c = next(c for c in found.candidates if c.cp == 2 and c.microbatch == 1)
    assert not too_high(found, c)
    monkeypatch.setattr("distir.search.placed_program.is_free", lambda op: False)
    assert too_high(found, c)


@pytest.mark.parametrize(
    ("batch", "gpus", "cluster", "precision", "c"),
    [
        (8, 4, "dgx-v100", "fp32", Candidate(1, 1, 4, 8, "1f1b", 1, 0, "full")),
        (16, 64, "dgx-v100", "bf16", Candidate(4, 2, 8, 1, "gpipe", 1, 2, "selective")),
    ],
)
def test_a_cut_between_a_product_and_its_bias(monkeypatch, batch, gpus, cluster, precision, c):
    """Then they run as two ops, on their stages. Seeded: the second takes what both take where they run as one."""
    found = case(MODELS[-2], batch, gpus, cluster, precision)
    assert not too_high(found, c)
    kinds = placed_program._kinds
    monkeypatch.setattr(placed_program, "_kinds", lambda *args: (*kinds(*args)[:2], {}))
    assert too_high(found, c)


def test_a_gather_between_a_product_and_its_bias(monkeypatch):
    """Then they run as two ops, and the product does not wait for the bias. Seeded: it does."""
    model = "gpt:layers=2,hidden=2048,heads=16,vocab=64,seq=256,experts=2,ffn=4096"
    found = case(model, 8, 4, "dgx-v100", "fp32", None, 1.0)
    c = Candidate(2, 1, 2, 4, "1f1b", 1, 3, "full")
    assert not too_high(found, c)
    rows = cut_stages._rows
    monkeypatch.setattr(cut_stages, "_rows", lambda *args: tuple(row._replace(fused=False) for row in rows(*args)))
    assert too_high(found, c)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_backward_passes_wait_for_tensor_parallelism(recompute):
    """Where what is recomputed of one block stands between the backward ops of another, too."""
    found = case("llama:layers=6,hidden=2048,heads=16,kv_heads=4,vocab=4000,seq=256", 16, 8, "dgx-a100", "bf16")
    profile = found.bounds.profile((4, False, recompute, ()))
    assert profile is not None
    waiting = sum([n for segment, n in profile.backward.items() if segment.waits])
    assert waiting >= 0.8 * sum(profile.backward.values()) > 4


def test_bounds_are_above_zero():
    found = case(MODELS[3], 16, 4, "dgx-a100", "bf16")
    for c in random.Random(0).sample(found.candidates, 10):
        assert min(found.bounds.of(c)) > 0


@pytest.mark.parametrize("by_cuts", [False, True])
def test_bounds_that_suffice_are_no_higher(by_cuts):
    """Where so many seconds are enough, a bound is that many at least, or what it is without that."""
    found = case(MODELS[2], 16, 8, "dgx-a100", "bf16")

    def of(c, *enough):
        return found.bounds.of_cuts([c], *enough)[0] if by_cuts else found.bounds.of(c, *enough)

    stopped = 0
    for c in random.Random(1).sample(found.candidates, 40):
        seconds, memory = of(c)
        some, same = of(c, seconds / 2)
        assert same == memory or (by_cuts and not same)
        assert seconds / 2 <= some <= seconds
        assert of(c, seconds * 1.01) == (seconds, memory)
        stopped += some < seconds
    assert stopped


def test_a_bound_that_is_too_high_is_seen():
    """On one device the bound of a step is the step but for launches of updates: 5 % more is above it."""
    found = case(MODELS[3], 16, 1, "dgx-a100", "bf16")
    assert any(too_high(found, c, 1.05) for c in found.candidates)
    assert not any(too_high(found, c) for c in found.candidates)


def test_on_rails_bounds_hold_and_all_orders_differ(tmp_path: Path) -> None:
    """Seeded: the bound of a transfer that stays on its rails as if it crossed the spine is too high."""
    file = tmp_path / "mine.toml"
    network = "[network]\nlink_gbs = 20\nlink_us = 10\noversubscription = 500\n"
    head = 'name = "mine"\ndevice = "a100-sxm-80gb"\n'
    model, orders = MODELS[3], list[int]()
    for rails in ("", "rails = true\n"):
        file.write_text(f'{head}{network}{rails}source = "none"\n[node]\ndevices = 2\nlink_gbs = 300\nlink_us = 5\n')
        found = case.__wrapped__(model, 16, 8, file, "bf16")  # the file changes
        orders.append(len({c.order for c in found.candidates if c.dp == c.tp == c.pp == 2}))
        draw = random.Random(0)
        assert not any([too_high(found, c) for c in draw.sample(found.candidates, 15)])
    assert orders[1] == 6 > orders[0]


def test_links_that_differ_in_a_node_have_all_orders() -> None:
    """Neighbours share a quicker link: which axis has it matters, even on one node."""
    model = load("gpt:layers=2,hidden=64,heads=4,vocab=64,seq=16,batch=8", loss="cross-entropy")
    near, plain = load_cluster("distir-v100-x4", devices=4), load_cluster("dgx-a100", devices=4)
    orders = [{c.order for c in space(model.function, 8, 4, t).candidates if c.dp == c.tp == 2} for t in (near, plain)]
    assert len(orders[1]) == 1 < len(orders[0])


def test_bounds_know_which_devices_share_a_quicker_link() -> None:
    """Tensor parallelism within a pair takes less than across, in bounds as in the simulation."""
    found = case(MODELS[3], 8, 4, "distir-v100-x4", "bf16")
    across, within = (Candidate(1, 2, 2, 1, order=order) for order in (("tp", "dp", "pp"), ("pp", "dp", "tp")))
    least, most = (evaluate(found.setting, c).seconds for c in (within, across))
    (low, _), (high, _) = Bounds(found.setting).of_cuts([within, across])
    assert 0.8 * least < low <= least < high <= most
    assert lane(Candidate(2, 1, 2, 1, order=("pp", "dp", "tp")), found.setting.cost)(1e9, 0, 1) > 1
    assert lane(Candidate(2, 1, 2, 1), found.setting.cost)(1e9, 0, 1) < 0.5


def test_bounds_of_what_was_measured() -> None:
    """More bytes may take less than fewer, and than links say, or more than fewer one by one."""
    found = case(MODELS[0], 8, 4, MEASURED, "bf16")
    cost, c = found.setting.cost, Candidate(1, 2, 2, 1)
    cluster, groups = cost.topology.regular, groups_along(c, cost, "tp")
    assert cluster is not None
    sizes = [2**k for k in range(6, 25)]
    of_pairs = cluster.measured[0]
    assert (of_pairs.collective, of_pairs.ranks) == ("all-reduce", 2)
    for group in groups:
        least = [next(m for m in group.measured if m[:2] == of_pairs[:2]).seconds(n) for n in sizes]
        assert least == sorted(least)
        assert all([x <= of_pairs.seconds(n) for x, n in zip(least, sizes, strict=True)])
    assert all([slope("MPIAllreduce", groups) * n <= of_pairs.seconds(n) for n in sizes])
    one, half = (cost.transfer_seconds(n, cluster.intra) for n in (65536, 32768))
    assert lane(c, cost)(65536, 0, 1) <= 2 * half < one


@given(st.data())
def test_groups_along_axes(data):
    """Along one axis or several, with any order of the axes: those of all devices, counted one by one."""
    sizes = {axis: data.draw(st.integers(1, 6), axis) for axis in ("dp", "tp", "pp")}
    order = data.draw(st.permutations(list(sizes)))
    axes = data.draw(st.lists(st.sampled_from(order), min_size=1, unique=True))
    topology = with_nodes_of(data.draw(st.integers(1, 9)))
    c = Candidate(sizes["dp"], sizes["tp"], sizes["pp"], 1, order=tuple(order))
    devices: dict[object, list[int]] = {}
    for number, at in enumerate(itertools.product(*[range(sizes[axis]) for axis in reversed(order)])):
        place = dict(zip(reversed(order), at, strict=True))
        devices.setdefault(tuple([place[axis] for axis in order if axis not in axes]), []).append(number)
    found = groups_along(c, CostModel(topology), tuple(axes))
    regular = topology.regular
    assert regular is not None
    wanted = {regular_group(regular, numbers) for numbers in devices.values()}
    assert set(found) == (wanted if any([sizes[axis] > 1 for axis in axes]) else set())


def with_nodes_of(per_node):
    """A cluster with nodes of so many devices."""
    regular = load_cluster("dgx-a100", devices=8).regular
    assert regular is not None
    return Topology(replace(regular, nodes=216, per_node=per_node, rails=1, rail_link=None, measured=()))


def test_bounds_of_large_batches() -> None:
    """Of larger microbatches there are fewer: the logits of all of them are then no more than 2^53 either."""
    found = case("gpt:layers=1,hidden=64,heads=4,vocab=100000,seq=1024", 1 << 14, 8, "dgx-h100", "bf16")
    chosen = [Candidate(1, 1, 8, 1 << 14), Candidate(1, 8, 1, 1 << 14), Candidate(8, 1, 1, 1 << 11, zero=1)]
    for c, by_cuts in zip(chosen, found.bounds.of_cuts(chosen), strict=True):
        assert found.bounds.of_all(relatives(c), c.microbatch, 8) > 0
        assert max(by_cuts) > 0  # of seconds, or of bytes where these do not fit: not what says that nothing is known
        assert found.bounds.of(c)[1] > 0


def test_links_that_are_given_one_by_one_have_bounds_of_bytes_alone() -> None:
    """Of any topology: what a plan needs does not depend on links."""
    model = load(MODELS[0], {"batch": 8}, loss="cross-entropy", optimizer="adamw", precision="bf16")
    topology = load_cluster(MEASURED, devices=4)
    topology.set_bandwidth(topology.devices[0], topology.devices[1], 100)
    setting = Setting(model, 8, CostModel(topology), 0.0)
    bounds = Bounds(setting)
    assert not bounds.refines
    for c in random.Random(2).sample(space(model.function, 8, 4, topology).candidates, 40):
        seconds, memory = bounds.of(c)
        assert seconds == bounds.of_all(relatives(c), c.microbatch, 4) == 0
        assert 0 < memory <= evaluate(setting, c).memory


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=20),
    st.one_of(st.just(0.0), st.floats(1.0, 1e12)),
    st.one_of(st.just(0.0), st.floats(1.0, 1e12)),
)
def test_the_least_memory_of_ranks(flights: list[int], kept: float, saved: float) -> None:
    """Against filling rank after rank, those with most in flight first with what is kept: just less does not fit, and
    hardly more does."""
    flights.sort(reverse=True)

    def fits(most: float) -> bool:
        left, room = kept, 0.0
        for n in flights:
            part = min(left, most)
            left -= part
            room += (most - part) / n
        return left <= 0 and room >= saved

    found = _least_memory(tuple(flights), kept, saved)
    assert fits(found * 1.0003)
    assert not found or not fits(found * (1 - 1e-6))
