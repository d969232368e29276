"""What the check finds, and what it lets pass: faults are seeded into runs, at the size at which training goes."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import distir
from distir.api.check import Check, compare
from distir.api.data import Data
from distir.api.differences import Difference, largest_difference
from distir.api.locate import locate
from distir.api.rounding import perturbed
from distir.api.steps import compute_steps
from distir.executor.reference.sequential import SequentialExecutor, fit
from distir.ir import Device, FunctionMaker, Mesh
from distir.ir.errors import MismatchError
from distir.ir.function import Role
from distir.ir.type import REPLICATE, BFloat16, Float16, Float32, Float64, Shard, Tensor
from distir.runtime.job import Job
from distir.runtime.options import RunOptions
from distir.runtime.outcome import Outcome
from distir.transforms.differentiation.training import SGD, AdamW

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
OPTIMIZERS = {"sgd": SGD(0.5), "momentum": SGD(0.2, momentum=0.9), "adamw": AdamW(1e-2)}
DTYPES = ("float64", "float32", "bfloat16", "float16")


def optimizer_of(name, dtype):
    """With the usual eps AdamW diverges in float16, in which the squares of small gradients are 0."""
    return AdamW(1e-2, eps=1e-3) if (name, dtype) == ("adamw", "float16") else OPTIMIZERS[name]


class Case(NamedTuple):
    """A training step, what it begins with and is fed, its run, and that once more with its results disturbed."""

    model: distir.Model
    job: Job
    want: Outcome
    rounding: Outcome

    def check(self, got):
        return compare(self.model.function, self.job.arrays, got, self.want, self.rounding)

    @property
    def parameters(self):
        return [k for k, v in enumerate(self.model.function.inputs) if v.kind == "parameter"]

    def name(self, k):
        return self.model.function.inputs[k].name


def model_of(file, optimizer, dtype):
    loss = "mse" if file == "mlp" else "cross-entropy"
    return distir.load(ROOT / f"examples/{file}.onnx", {"batch": 8}, loss=loss, optimizer=optimizer, dtype=dtype)


def job_of(model, steps=STEPS):
    function = model.function
    arrays = model.initial(0)
    data = Data(function, arrays, seed=0)
    number = {v: k for k, v in enumerate(function.inputs)}
    given = {number[v]: fit(x, v) for v, x in (arrays | data.fixed()).items()}
    feed = lambda k: {number[v]: x for v, x in data.step(k).items()}  # noqa: E731
    return Job(function, given, feed, steps, RunOptions(backend="numpy", check=True, allow_nonfinite=True))


def case_of(file, optimizer, dtype, steps=STEPS):
    model = model_of(file, optimizer, dtype)
    job = job_of(model, steps)
    rounding = compute_steps(job, SequentialExecutor(tap=perturbed(model.function)))
    return Case(model, job, compute_steps(job), rounding)


@pytest.fixture(scope="module", params=[(o, d) for o in OPTIMIZERS for d in DTYPES], ids=lambda p: "-".join(p))
def case(request):
    name, dtype = request.param
    return case_of("mlp", optimizer_of(name, dtype), dtype)


def changed(case, factor, only=None):
    """The run as it is, but that the change of every weight (or of those in `only`) is `factor` times what it is."""
    values = dict(case.want.inputs)
    for k in case.parameters if only is None else only:
        start, end = (np.asarray(x, np.float64) for x in (case.job.arrays[k], case.want.inputs[k]))
        values[k] = (start + factor * (end - start)).astype(case.want.inputs[k].dtype)
    return replace(case.want, inputs=values)


FACTORS = {"none": 0.0, "half": 0.5, "twice": 2.0, "reversed": -1.0}


def found(case, got, faulty):
    """Whether the check fails, or at least does not say of any of the `faulty` parameters that it is right."""
    check = case.check(got)
    return not check.ok or {case.name(k) for k in faulty} <= set(check.unchecked)


@pytest.mark.parametrize("fault", FACTORS)
def test_changes_of_all_weights(case, fault):
    check = case.check(changed(case, FACTORS[fault]))
    assert not check.ok
    assert check.first.kind.endswith("change")


@pytest.mark.parametrize("fault", FACTORS)
def test_the_change_of_one_weight(case, fault):
    """In 16 bits a change may be lost in rounding: the parameter is then not said to be right. Most faults are seen."""
    found = 0
    for k in case.parameters:
        check = case.check(changed(case, FACTORS[fault], [k]))
        if check.ok:
            assert case.name(k) in check.unchecked
        else:
            assert check.first.name == case.name(k)
            found += 1
    assert found == len(case.parameters) or case.want.inputs[case.parameters[0]].dtype.itemsize == 2
    assert found >= len(case.parameters) / 2


def test_a_right_run_passes(case):
    for other in (case.want, case.rounding):
        check = case.check(other)
        assert check.ok, check
        assert check.weights is not None
        assert check.gradients is not None


def same_shape(case):
    """Two parameters of one shape, neither of which is hidden by rounding."""
    hidden = case.check(case.want).unchecked
    rows = {}
    for k in case.parameters:
        if case.name(k) not in hidden:
            rows.setdefault(case.want.inputs[k].shape, []).append(k)
    return max(rows.values(), key=len)[:2]


def test_updates_of_two_weights_exchanged(case):
    a, b = same_shape(case)
    values = dict(case.want.inputs)
    for k, other in ((a, b), (b, a)):
        start, change = (np.asarray(x, np.float64) for x in (case.job.arrays[k], case.want.inputs[other]))
        values[k] = (start + change - np.asarray(case.job.arrays[other], np.float64)).astype(values[k].dtype)
    check = case.check(replace(case.want, inputs=values))
    assert check.first.name in (case.name(a), case.name(b))


def trained_on(case, weights_of, data_of, steps=STEPS):
    """A run whose updates come of other weights (those of step `weights_of(k)`) or other data (`data_of` of a batch).

    The outputs are those of the right run, so that only what training changes can tell.
    """
    function, executor = case.model.function, SequentialExecutor()
    number = {v: k for k, v in enumerate(function.inputs)}
    values = {k: np.asarray(x) for k, x in case.job.arrays.items()}
    history = [dict(values)]
    first = {}
    for step in range(steps):
        seen = values | {k: history[weights_of(step)][k] for k in case.parameters} | data_of(case.job.feed(step))
        if step == 0:
            got = compute_steps(replace(case.job, arrays=seen, data=None, steps=1))
            first = got.gradients
        results = executor.compute(function, [seen[k] for k in range(len(function.inputs))])
        for v, x in zip(function.outputs, results, strict=True):
            if v in function.updates:
                k = number[function.updates[v]]
                moved = np.asarray(x, np.float64) - np.asarray(seen[k], np.float64)
                values = values | {k: (np.asarray(values[k], np.float64) + moved).astype(x.dtype)}
        history.append(dict(values))
    return replace(case.want, inputs={k: values[k] for k in case.want.inputs}, gradients=first)


def test_stale_weights(case):
    """Every step takes its gradient at the weights of the step before."""
    got = trained_on(case, lambda k: max(0, k - 1), lambda data: data)
    assert found(case, got, case.parameters)


def test_the_gradient_of_another_microbatch(case):
    """The second half of the batch is taken to be the first."""

    def halved(data):
        return {k: np.concatenate([np.asarray(x)[:4]] * 2) for k, x in data.items()}

    got = trained_on(case, lambda k: k, halved)
    check = case.check(got)
    assert not check.ok
    assert check.first.kind.endswith("gradient")


def test_what_the_check_says_is_found_in_16_bits_is_most_of_it():
    """Of GPT-2 in bfloat16: faults of nearly all weights are found, and of the others those of the gradients."""
    case = case_of("gpt2-tiny", SGD(0.5, momentum=0.9), "bfloat16", 2)
    check = case.check(case.want)
    hidden = [name for name in check.unchecked if name in map(case.name, case.parameters)]
    assert len(hidden) <= len(case.parameters) / 3
    for k in case.parameters[::5]:
        gradients = {**case.want.gradients, k: (case.want.gradients[k].astype(np.float32) / 2).astype("bfloat16")}
        first = case.check(replace(case.want, gradients=gradients)).first
        assert first is not None
        assert first.name == case.name(k)


def test_state_is_compared_as_weights_are():
    case = case_of("mlp", AdamW(1e-2), "float32")
    state = [k for k, v in enumerate(case.model.function.inputs) if v.kind == "state"]
    for k in state[::5] + state[-1:]:
        values = {**case.want.inputs, k: case.want.inputs[k] * 2 + (case.want.inputs[k].dtype.kind == "i")}
        first = case.check(replace(case.want, inputs=values)).first
        assert first is not None
        assert first.name == case.name(k)


@pytest.mark.parametrize(
    "plan",
    [
        distir.Plan(dp=2, zero=1),
        distir.Plan(tp=2, microbatches=2),
        distir.Plan(dp=2, zero=3, microbatches=2),
        distir.Plan(dp=2, tp=2, pp=2, microbatches=4),
        distir.Plan(pp=2, microbatches=4, schedule="interleaved", chunks=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_right_runs_of_all_plans_pass(optimizer, dtype, plan):
    model = model_of("mlp", optimizer_of(optimizer, dtype), dtype)
    check = distir.run(model, plan, steps=STEPS, backend="numpy", check=True).check
    assert check is not None
    assert check.ok
    assert check.gradients is not None
    assert check.weights is not None
    assert len(check.unchecked) < 16


@pytest.mark.parametrize(
    "plan", [distir.Plan(dp=2, pp=2, zero=1, microbatches=2), distir.Plan(tp=2), distir.Plan(dp=2, zero=3)], ids=str
)
def test_gradients_as_optimizers_take_them(plan):
    """By distributed programs, on numpy and on torch: those of the sequential program, which its updates tell."""
    model = model_of("gpt2-tiny", SGD(0.1), "float64")
    job = job_of(model, 1)
    want = compute_steps(job)
    weights = [k for k, v in enumerate(model.function.inputs) if v.kind == "parameter"]
    assert sorted(want.gradients) == weights
    for k in weights:  # a step of plain descent says what the gradient was
        start, end = np.asarray(job.arrays[k]), want.inputs[k]
        assert np.allclose((start - end) / 0.1, want.gradients[k], atol=1e-12)
    program = distir.distribute(model, plan)
    from distir.backends.processes.launch import run

    got = compute_steps(replace(job, program=program)).gradients
    launched = run(replace(job, program=program, options=replace(job.options, backend="gloo"))).gradients
    for other in (got, launched):
        assert sorted(other) == weights
        for k in weights:
            assert largest_difference(other[k], want.gradients[k]) < 1e-12


def test_a_lost_update_of_a_distributed_run_is_found(monkeypatch):
    """Through `run`, in bfloat16: one optimizer op of the distributed program does nothing."""
    from distir.executor.reference import sequential

    right = sequential.evaluate

    def wrong(op, ins, coord, xp=sequential.NUMPY):
        result = right(op, ins, coord, xp)
        lost = op.spec.gradient is not None and coord is not None and "layers.3.weight" in op.outputs[0].name
        return (ins[0], *result[1:]) if lost else result

    model = model_of("mlp", SGD(0.2, momentum=0.9), "bfloat16")
    monkeypatch.setattr(sequential, "evaluate", wrong)
    with pytest.raises(MismatchError, match=r"change of %layers\.3\.weight differs by 1 \(0 times as long"):
        distir.run(model, distir.Plan(dp=2), steps=STEPS, backend="numpy", check=True)


def test_what_a_run_does_not_give_is_not_said_to_be_right():
    case = case_of("mlp", SGD(0.1), "float32", 2)
    want, k = case.want, case.parameters[0]
    for less in (
        replace(want, gradients={i: x for i, x in want.gradients.items() if i != k}),
        replace(want, inputs={i: x for i, x in want.inputs.items() if i != k}),
        replace(want, outputs=want.outputs[:1]),
        Outcome(),
    ):
        check = case.check(less)
        assert check.ok
        assert check.unchecked
        assert "check passed:" not in str(check)


def test_a_change_that_goes_elsewhere_as_well_is_found():
    """In bfloat16 under AdamW, where single elements tell little: three times the change, at right angles to it."""
    case = case_of("mlp", AdamW(1e-3), "bfloat16", 3)
    hidden = case.check(case.want).unchecked
    draw = np.random.default_rng(0)
    tried = 0
    for k in case.parameters:
        if case.name(k) in hidden:
            continue
        tried += 1
        start, end = (np.asarray(x, np.float64) for x in (case.job.arrays[k], case.want.inputs[k]))
        aside, change = draw.standard_normal(start.shape), end - start
        aside -= change * np.vdot(aside, change) / np.vdot(change, change)
        moved = end + 3 * aside * np.linalg.norm(change) / np.linalg.norm(aside)
        values = {**case.want.inputs, k: moved.astype(case.want.inputs[k].dtype)}
        assert not case.check(replace(case.want, inputs=values)).ok
    assert tried >= 8


@pytest.mark.parametrize(
    ("plan", "steps", "seed"), [(distir.Plan(dp=4), 1, 1), (distir.Plan(dp=2, microbatches=4), 3, 53)], ids=str
)
def test_one_element_whose_gradient_is_nearly_rounding(plan, steps, seed):
    """AdamW makes of it a step of another length, which is nearly all the difference there is."""
    model = model_of("mlp", AdamW(1e-3), "float32")
    check = distir.run(model, plan, steps=steps, backend="numpy", check=True, seed=seed).check
    assert check is not None
    assert check.ok


@pytest.mark.parametrize("backend", ["numpy", "gloo"])
def test_a_weight_for_each_sample_is_updated_in_parts(backend):
    f = FunctionMaker("m")
    x = f.add_input_value("x", Tensor(Float64, (8, 4)), Role("data", 0))
    each = f.add_input_value("each", Tensor(Float64, (8, 4)), Role("parameter"))
    w, u = (f.add_input_value(n, Tensor(Float64, (4, 4)), Role("parameter")) for n in ("w", "u"))
    h = f.emit("Mul", f.emit("Tanh", f.emit("MatMul", x, w)), each)
    f.set_outputs([f.emit("MatMul", f.emit("Tanh", h), u)])
    model = distir.Model(f.finalize()).training("mse", "sgd")
    for plan in (distir.Plan(pp=2, microbatches=2), distir.Plan(dp=2)):
        check = distir.run(model, plan, steps=1, backend=backend, check=True).check
        assert check is not None
        assert check.ok
        assert check.unchecked == (("each in step 0",) if plan.microbatches > 1 else ())


def test_masks_are_not_disturbed():
    """A sample that is masked whole: what is added to its scores, -1e9, has a last place of 64."""
    f = FunctionMaker("m")
    x = f.add_input_value("x", Tensor(Float32, (4, 8)), Role("data", 0))
    mask = f.add_input_value("mask", Tensor(Float32, (4, 8)), Role("data", 0))
    w = f.add_input_value("w", Tensor(Float32, (8, 8)), Role("parameter"))
    low = f.emit("Constant", value=(-1e9,), shape=(), dtype=Float32)
    scores = f.emit("Add", f.emit("MatMul", x, w), f.emit("Mul", mask, low))
    f.set_outputs([f.emit("Softmax", scores, axis=-1)])
    model = distir.Model(f.finalize()).training("mse", SGD(0.1))
    hidden = np.zeros((4, 8), np.float32)
    hidden[1], hidden[2, 3:] = 1, 1
    draw = np.random.default_rng(0)
    data = {"x": draw.standard_normal((4, 8)), "mask": hidden, "target": draw.standard_normal((4, 8))}
    check = distir.run(model, distir.Plan(dp=2), data=data, backend="numpy", check=True).check
    assert check is not None
    assert check.ok
    assert not check.unchecked
    assert check.outputs is not None
    assert check.outputs.allowed == 1e-5


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_compared_with_its_maximum_stays_equal_to_it(dtype, choices):
    """Each token goes to the experts of largest probability: if the maximum were disturbed, to none."""
    sizes = f"gpt:layers=2,hidden=16,heads=2,vocab=32,seq=16,batch=4,experts=4,capacity=1.0,choices={choices}"
    model = distir.load(sizes, loss="cross-entropy", optimizer="adamw", dtype=dtype)
    check = distir.run(model, distir.Plan(dp=2), steps=2, backend="numpy", check=True).check
    assert check is not None
    assert check.ok
    assert not check.unchecked


def test_what_is_made_without_rounding_is_not_disturbed():
    f = FunctionMaker("m")
    w = f.add_input_value("w", Tensor(Float32, (8,)), Role("parameter"))
    largest = f.emit("ReduceMax", w, axes=(0,), keepdims=1)
    count = f.emit("Cast", f.emit("Equal", w, largest), to=Float32)
    grown = f.emit("Exp", w)
    f.set_outputs([largest, count, grown])
    tap, ones = perturbed(f.finalize()), np.ones(8, np.float32)
    for v, moves in ((largest, False), (count, False), (grown, True)):
        assert (tap(v, ones[: v.type.shape[0]]) != 1).all() == moves


def attention(dtype, tokens=8, width=8):
    """Attention of a token to others, all of whose keys `shift` moves alike: softmax does not see it."""
    f = FunctionMaker("m")
    x, y = (f.add_input_value(n, Tensor(dtype, (4, k, width)), Role("data", 0)) for n, k in (("x", tokens), ("y", 1)))
    names = ("query", "key", "value", "shift")
    q, k, v, s = (f.add_input_value(n, Tensor(dtype, (width, width)), Role("parameter")) for n in names)
    keys = f.emit("Add", f.emit("MatMul", x, k), f.emit("MatMul", y, s))
    scores = f.emit("MatMul", f.emit("MatMul", y, q), f.emit("Transpose", keys, perm=(0, 2, 1)))
    f.set_outputs([f.emit("MatMul", f.emit("Softmax", scores, axis=-1), f.emit("MatMul", x, v))])
    return distir.Model(f.finalize())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [Float64, Float32, BFloat16, Float16], ids=str)
def test_a_gradient_that_is_rounding_alone(optimizer, dtype):
    """A few numbers decide on it, so a disturbed run may come near to the undisturbed one, by chance."""
    model = attention(dtype).training("mse", optimizer_of(optimizer, dtype.name.replace("f16", "float16")))
    for seed in (1, 6, 7, 8, 11, 12):
        check = distir.run(model, distir.Plan(tp=2), steps=2, backend="numpy", seed=seed, check=True).check
        assert check is not None
        assert check.ok
        assert {"shift", "shift in step 0"} <= set(check.unchecked)
        assert "query in step 0" not in check.unchecked


# ---------------------------------------------------------------- by hand


def vanishing(gradient, disturbed):
    """Runs of two weights: a gradient of norm 1, and the one given, which rounding turns into `disturbed`."""
    f = FunctionMaker()
    a, b = (f.add_input_value(n, Tensor(Float64, (64,)), Role("parameter")) for n in ("a", "b"))
    f.set_outputs([f.emit("ReduceSum", f.emit("Mul", a, b), axes=(0,), keepdims=0)])
    large = np.full(64, 0.125)
    want, rounding = (Outcome([0.0], [{0: np.array(1.0)}], {}, {0: large, 1: x}) for x in (gradient, disturbed))
    return lambda got: compare(f.finalize(), {}, replace(want, gradients={0: large, 1: got}), want, rounding)


def test_faults_of_gradients_that_are_small():
    """One that is rounding alone may be another one, not a larger one; one that rounding hardly changes may not."""
    draw = np.random.default_rng(0)
    one, two, three = (draw.standard_normal(64) / 8 for _ in range(3))
    two -= one * (two @ one) / (one @ one)
    check = vanishing(1e-17 * one, 1e-17 * (one + two))
    assert check(1e-17 * three).unchecked == ("b in step 0",)
    assert check(1e-17 * three).ok
    assert str(check(1e-13 * three).first).startswith("gradient of %b in step 0 differs by ")
    check = vanishing(1e-17 * one, 1e-17 * (one + 1e-14 * two))
    assert not check(1e-17 * one).unchecked
    assert not check(1.001e-17 * one).ok
    check = vanishing(1e-10 * one, 1e-10 * (one + two))
    assert not check(1e-10 * three).ok


def tiny():
    f = FunctionMaker()
    w = f.add_input_value("w", Tensor(Float32, (200,)), Role("parameter"))
    y = f.emit("Relu", w)
    f.set_outputs([f.emit("ReduceSum", y, axes=(0,), keepdims=0), y])
    f.updates = {y: w}
    return f.finalize()


def steps_of(loss, change, begin):
    return Outcome([0.0], [{0: np.array(loss, np.float32)}], {0: (begin + change).astype(np.float32)})


def test_tolerances():
    begin = np.linspace(0.1, 1, 200, dtype=np.float32)
    change = 1e-3 * np.random.default_rng(0).standard_normal(200)

    def check(loss=0.0, weight=0.0):
        got, want = steps_of(2.0 + loss, change * (1 + weight), begin), steps_of(2.0, change, begin)
        return compare(tiny(), {0: begin}, got, want)

    assert check(1e-5).ok
    assert not check(3e-5).ok
    assert check(weight=5e-5).ok
    assert not check(weight=1e-3).ok
    assert str(check(weight=1e-1).first).startswith("change of %w differs by 0.1 (1.1 times as long, 1 the cosine)")
    assert not check(float("nan")).ok
    assert not check(weight=float("inf")).ok


@pytest.mark.parametrize(("precision", "allowed"), [("bf16", 1e-3), ("fp16", 1.2e-4), ("fp32", 1e-5)])
def test_a_loss_that_the_disturbed_run_meets_by_chance(precision, allowed):
    """One number: in 16 bits runs that are right differ from it by more than the disturbed one may do."""
    model = distir.load(
        "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4", loss="cross-entropy", precision=precision
    )
    loss = next(k for k, v in enumerate(model.function.outputs) if v.name == "loss")

    def differs(by):
        got, want = (Outcome([3.0], [{loss: np.array(3.0 * x)}], {}, {}) for x in (1 + by, 1.0))
        found = compare(model.function, {}, got, want, want).first
        return found is not None and found.name == "loss"

    assert not differs(0.9 * allowed)
    assert differs(1.1 * allowed)


def test_a_first_gradient_that_overflowed_is_no_warning():
    """Of a step in 16 bits that is skipped, and changes nothing."""
    model = distir.load(
        "gpt:layers=1,hidden=256,heads=4,seq=1,vocab=8192,batch=1,tied=0", loss="cross-entropy", precision="fp16"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = distir.run(model, distir.Plan(), steps=2, backend="numpy", check=True)
    assert result.check is not None
    assert result.check.ok


def test_what_is_not_finite_in_both_is_said_and_the_rest_compared():
    begin = np.linspace(0.1, 1, 200, dtype=np.float32)
    change = 1e-3 * np.random.default_rng(0).standard_normal(200)
    holes = np.where(np.arange(200) % 3 == 0, np.nan, change)

    def check(got, loss=np.nan):
        return compare(tiny(), {0: begin}, steps_of(loss, got, begin), steps_of(np.nan, holes, begin))

    both = check(holes)
    assert both.ok
    assert both.infinite == ("loss in step 0", "w") or both.infinite == (f"{tiny().outputs[0].name} in step 0", "w")
    assert "not finite in both runs: " in str(both)
    assert not check(holes * 2).ok
    assert check(change).ok  # what kernels make of nan is their own
    assert not check(change * 2).ok
    assert not check(holes, loss=1.0).ok


def test_a_change_that_rounding_takes_is_not_said_to_be_right():
    begin = np.linspace(0.1, 1, 200, dtype=np.float32)
    same = steps_of(2.0, 0.0, begin)
    check = compare(tiny(), {0: begin}, same, same)
    assert check.ok
    assert check.weights is None
    assert check.unchecked == ("w",)
    assert str(check).startswith("check passed in part: 1 of 2 values equal the sequential run's\n")
    assert "not checked (rounding error as large as the value, or not returned): %w" in str(check)
    moved = steps_of(2.0, 1e-3, begin)
    assert not compare(tiny(), {0: begin}, moved, same).ok  # but no weight moves that should not


def test_no_element_is_let_be():
    large = np.zeros(300_000)
    other = large.copy()
    other[:4] = [5.0, 4.0, 3.0, 2.0]
    assert largest_difference(large, other) == 5.0
    assert largest_difference(large, large[1:]) == float("inf")
    assert str(Check(None, None, Difference("loss", 1.0, 0.5, 2))) == (
        "check failed: %loss in step 2 differs by 1, 0.5 is allowed"
    )


def test_the_op_that_lost_an_update_is_named():
    """On one rank, where the weight that it leaves as it is differs by 1e-5 from what it should be."""
    model = model_of("mlp", SGD(1e-5), "float32")
    job = replace(job_of(model, 1), program=distir.distribute(model, distir.Plan(dp=2)))
    k = next(k for k, v in enumerate(job.program.inputs) if v.name == "layers.3.weight")

    class Losing(SequentialExecutor):
        def __init__(self, tap):
            def lose(v, values):
                if v.name == "layers.3.weight.new":
                    values = [values[0], np.asarray(job.arrays[k])]
                return tap(v, values)

            super().__init__(tap=lose)

    assert "%layers.3.weight.new = SGD(" in (said := locate(job, Losing))
    assert "changes by another amount on rank 1: 0 instead of" in said


@pytest.mark.parametrize("placements", [(REPLICATE, REPLICATE), (Shard(0), REPLICATE), (Shard(0), Shard(1))], ids=str)
@pytest.mark.parametrize("axis", ["tp", "mb"], ids=["two axes of devices", "microbatches"])
def test_on_a_mesh_results_are_disturbed_and_replicas_move_alike(axis, placements):
    """Each element of the whole by itself: by a unit up or down, the same one on every device that has it."""
    mesh = Mesh([Device("cpu", k) for k in range(2 if axis == "mb" else 4)], {axis: 2, "dp": 2})
    f = FunctionMaker("doubled")
    x = f.add_input_value("x", Tensor.whole(Float32, (32, 32), mesh, placements), Role("parameter"))
    f.set_outputs([f.emit("Add", x, x)])
    function, ones = f.finalize(), np.ones((32, 32), np.float32)
    (found,) = SequentialExecutor(tap=perturbed(function)).compute(function, [ones])
    up = found > 2
    assert np.array_equal(found, np.where(up, 2 + 2**-22, 2 - 2**-22))
    assert 0.4 < up.mean() < 0.6
    for half in (up[:16] == up[16:], up[:, :16] == up[:, 16:]):
        assert 0.4 < half.mean() < 0.6
