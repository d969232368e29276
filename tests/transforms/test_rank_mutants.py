"""Faults in the programs of ranks, as passes of one rank would make them: found before anything runs.

All ranks that share a program share the fault. What `check_programs` lets through computes the same, run rank by rank.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from distir.executor.reference.numpy_namespace import NUMPY
from distir.ir import Function, Op, Value
from distir.ir.errors import DistirError, IRTypeError, MismatchError, ModelError
from distir.ir.function import Attributes
from distir.ir.spec import lookup
from distir.transforms.rank.check_programs import check_programs
from distir.transforms.rank.project import RankProgram
from distir.transforms.rank.rank_program import RankOptions, rank_programs
from tests.transforms.programs import ADAMW, MOMENTUM, Plan, Program, distributed, error, imported_mlp, small_gpt
from tests.transforms.run_ranks import Blocked, run_ranks

COUNT = 480


class Case(NamedTuple):
    source: Program
    program: Function
    ranks: list[RankProgram]


@functools.cache
def cases() -> list[Case]:
    """With all passes over ranks' programs: recomposed products, groups, receives ahead, outlined parts."""
    gpt = small_gpt(vocabulary=15, optimizer=ADAMW)
    found = [
        (gpt, Plan(2, 2, 2, 2), RankOptions()),
        (gpt, Plan(2, 1, 1, 1, bucket_mb=0.001), RankOptions(compiled=True)),
        (small_gpt(layers=1, optimizer=MOMENTUM), Plan(2, 1, 2, 2, host=True), RankOptions()),
        (imported_mlp(), Plan(2, 1, 2, 4, zero=2), RankOptions(compiled=True)),
    ]
    return [Case(p, f, rank_programs(f, o)) for p, plan, o in found for f in [distributed(p, plan).program]]


# ---- faults: each gives the ops of a function anew, or None if there is no place for it

Ops = list[Op]
Fault = Callable[[random.Random, Function], Ops | None]
_FAULTS: dict[str, Fault] = {}


def fault(make: Fault) -> Fault:
    _FAULTS[make.__name__] = make
    return make


def again(op: Op, inputs: Sequence[Value] | None = None, **attributes: Any) -> Op:
    """The op with other operands or attributes."""
    inputs = op.inputs if inputs is None else tuple(inputs)
    return Op(op.spec, inputs, Attributes({**op.attributes, **attributes}), op.outputs)


def put(ops: Sequence[Op], k: int, *new: Op) -> Ops:
    return [*ops[:k], *new, *ops[k + 1 :]]


def without(f: Function, k: int, stands: dict[Value, Value]) -> Ops:
    """The ops without number k, other values in the place of its results."""
    return [again(op, [stands.get(v, v) for v in op.inputs]) for j, op in enumerate(f.ops) if j != k]


def drawn(rng: random.Random, f: Function, expected: Callable[[Op], bool]) -> int | None:
    found = [k for k, op in enumerate(f.ops) if expected(op)]
    return rng.choice(found) if found else None


@fault
def another_operand(rng: random.Random, f: Function) -> Ops | None:
    """Of the same type, made before."""
    k = drawn(rng, f, lambda op: bool(op.inputs))
    if k is None:
        return None
    op, j = f.ops[k], rng.randrange(len(f.ops[k].inputs))
    before = [*f.inputs, *(v for o in f.ops[:k] for v in o.outputs)]
    like = [v for v in before if v.type is op.inputs[j].type and v is not op.inputs[j]]
    return put(f.ops, k, again(op, [*op.inputs[:j], rng.choice(like), *op.inputs[j + 1 :]])) if like else None


@fault
def operands_exchanged(rng: random.Random, f: Function) -> Ops | None:
    """Two of the same type: a gradient with a moment, a weight with another of the group."""
    k = drawn(rng, f, lambda op: len(op.inputs) > 1)
    if k is None:
        return None
    row = list(f.ops[k].inputs)
    pairs = [(i, j) for i in range(len(row)) for j in range(i) if row[i].type is row[j].type and row[i] is not row[j]]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    row[i], row[j] = row[j], row[i]
    return put(f.ops, k, again(f.ops[k], row))


@fault
def results_exchanged(rng: random.Random, f: Function) -> Ops | None:
    k = drawn(rng, f, lambda op: len(op.outputs) > 1)
    if k is None:
        return None
    op, row = f.ops[k], list(f.ops[k].outputs)
    pairs = [(i, j) for i in range(len(row)) for j in range(i) if row[i].type is row[j].type]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    row[i], row[j] = row[j], row[i]
    return put(f.ops, k, Op(op.spec, op.inputs, op.attributes, tuple(row)))


@fault
def op_dropped(rng: random.Random, f: Function) -> Ops | None:
    def like(op: Op) -> dict[Value, Value] | None:
        found = {v: next((x for x in op.inputs if x.type is v.type), None) for v in op.outputs}
        return None if None in found.values() else found  # type: ignore[return-value]

    k = drawn(rng, f, lambda op: like(op) is not None)
    return None if k is None else without(f, k, like(f.ops[k]) or {})


@fault
def a_side_of_a_transfer_dropped(rng: random.Random, f: Function) -> Ops | None:
    k = drawn(rng, f, lambda op: op.op_type == "MPISend")
    return None if k is None else put(f.ops, k)


@fault
def another_number(rng: random.Random, f: Function) -> Ops | None:
    """In an attribute."""
    k = drawn(rng, f, lambda op: any(type(x) in (int, float) for x in op.attributes.values()))
    if k is None:
        return None
    op = f.ops[k]
    name = rng.choice([n for n, x in op.attributes.items() if type(x) in (int, float)])
    x = op.attributes[name]
    new: dict[str, Any] = {name: x + rng.choice([-1, 1]) if type(x) is int else x * 1.5 + 0.1}
    return put(f.ops, k, again(op, None, **new))


@fault
def another_attribute(rng: random.Random, f: Function) -> Ops | None:
    """That of another op of its kind."""
    k = drawn(rng, f, lambda op: bool(op.attributes))
    if k is None:
        return None
    op = f.ops[k]
    name = rng.choice(list(op.attributes))
    other = [o.attributes[name] for o in f.ops if o.spec is op.spec and name in o.attributes]
    other = [x for x in other if x != op.attributes[name]]
    return put(f.ops, k, again(op, **{name: rng.choice(other)})) if other else None


@fault
def another_way_round(rng: random.Random, f: Function) -> Ops | None:
    """A square matrix is transposed in a recomposed product, or the operands of the gradient of one change places."""
    k = drawn(rng, f, lambda op: op.op_type in ("Gemm", "MatMulGradWeight"))
    if k is None:
        return None
    op = f.ops[k]
    if op.op_type == "Gemm":
        return put(f.ops, k, again(op, transB=1 - op.attributes.get("transB", 0)))
    return put(f.ops, k, again(op, op.inputs[::-1]))


@fault
def ops_exchanged(rng: random.Random, f: Function) -> Ops | None:
    """Two that communicate: sends, receives, collectives, or one of each."""
    found = [k for k, op in enumerate(f.ops) if op.spec.comm is not None and op.callee is None and not op.spec.bundle]
    if len(found) < 2:
        return None
    i, j = rng.sample(found, 2)
    ops = list(f.ops)
    ops[i], ops[j] = ops[j], ops[i]
    return ops


@fault
def a_sum_doubled(rng: random.Random, f: Function) -> Ops | None:
    k = drawn(rng, f, lambda op: op.op_type in ("Accumulate", "Add", "MPIAllreduce"))
    if k is None or (twin := twice(f, k)) is None:
        return None
    return twin


def twice(f: Function, k: int) -> Ops | None:
    """Op number k done on its result once more, where that has the type of an operand."""
    op = f.ops[k]
    j = next((j for j, v in enumerate(op.inputs) if v.type is op.outputs[0].type), None)
    if j is None:
        return None
    inner = Value(f"{op.outputs[0].name}.once", op.outputs[0].type)
    first = Op(op.spec, op.inputs, op.attributes, (inner,))
    return put(f.ops, k, first, again(op, [*op.inputs[:j], inner, *op.inputs[j + 1 :]]))


# ---- seeding them


def changed(rng: random.Random, f: Function) -> tuple[str, Function] | None:
    """A function with one fault in its ops or, now and then, its interface."""
    if rng.random() < 0.05:
        row = list(f.outputs)
        pairs = [(i, j) for i in range(len(row)) for j in range(i) if row[i].type is row[j].type]
        if not pairs:
            return None
        i, j = rng.choice(pairs)
        row[i], row[j] = row[j], row[i]
        return "outputs_exchanged", Function(f.name, f.inputs, f.ops, tuple(row), f.updates, f.sources)
    name = rng.choice(list(_FAULTS))
    ops = _FAULTS[name](rng, f)
    if ops is None:
        return None
    made = {*f.inputs, *(v for op in ops for v in op.outputs)}
    stands = {v: next((x for x in made if x.type is v.type), v) for v in f.outputs if v not in made}
    if any(v not in made for v in stands.values()):
        return None
    outputs = tuple([stands.get(v, v) for v in f.outputs])
    updates = {stands.get(new, new): old for new, old in f.updates.items()}
    sources = {stands.get(v, v): s for v, s in f.sources.items()}
    return name, Function(f.name, f.inputs, tuple(ops), outputs, updates, sources)


def calling(f: Function, old: Function, new: Function) -> Function:
    """The function with another callee in the place of one, however deep."""
    if f is old:
        return new
    ops = [again(op, callee=calling(op.callee, old, new)) if op.callee is not None else op for op in f.ops]
    if all(a.callee is b.callee for a, b in zip(ops, f.ops, strict=True)):
        return f
    return Function(f.name, f.inputs, tuple(ops), f.outputs, f.updates, f.sources)


def mutants(count: int, seed: int) -> Iterator[tuple[Case, str, list[RankProgram]]]:
    rng = random.Random(seed)
    while count:
        case = rng.choice(cases())
        f = rng.choice(case.ranks).function
        g = f if rng.random() < 0.4 or not f.ops else rng.choice([f, *f.callees()])
        found = changed(rng, g)
        if found is not None:
            count -= 1
            bad = calling(f, g, found[1])
            yield case, found[0], [p._replace(function=bad) if p.function is f else p for p in case.ranks]


def judged(case: Case, bad: list[RankProgram]) -> str:
    try:
        check_programs(case.program, bad)
    except (IRTypeError, MismatchError, ModelError) as e:
        return type(e).__name__
    try:
        gap = error(run_ranks(case.program, bad, case.source), case.source.results())
    except (Blocked, DistirError):
        return "DIFFERENT"
    return "same" if gap <= 1e-9 else "DIFFERENT"


def table(count: int, seed: int) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for case, name, bad in mutants(count, seed):
        found.setdefault(name, Counter())[judged(case, bad)] += 1
    return found


def hold(found: dict[str, Counter[str]]) -> None:
    print("\n".join(f"{name:30} {dict(row)}" for name, row in sorted(found.items())))
    assert {name: row["DIFFERENT"] for name, row in found.items() if row["DIFFERENT"]} == {}
    total = sum(found.values(), Counter[str]())
    assert total["same"] < 0.2 * total.total()
    assert all(total[kind] > 0.02 * total.total() for kind in ("IRTypeError", "MismatchError", "ModelError"))


@pytest.mark.parametrize("k", range(4))
def test_programs_without_a_fault_pass_and_give_the_same(k: int) -> None:
    case = cases()[k]
    assert judged(case, case.ranks) == "same"


def test_seeded_faults_are_found() -> None:
    found = table(COUNT, seed=0)
    hold(found)
    assert all(found[name].total() >= 10 for name in (*_FAULTS, "outputs_exchanged"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_more_seeded_faults_are_found(seed: int) -> None:
    hold(table(1500, seed))


# ---- one by one


def with_ops(case: Case, change: Callable[[Op], Op]) -> list[RankProgram]:
    """The programs of a case, ops of the functions that the first rank calls changed."""
    f = case.ranks[0].function
    bad = f
    for g in f.callees():
        new = Function(g.name, g.inputs, tuple([change(op) for op in g.ops]), g.outputs, g.updates, g.sources)
        bad = calling(bad, g, new)
    return [p._replace(function=bad) if p.function is f else p for p in case.ranks]


def test_a_gradient_of_another_weight_in_a_group() -> None:
    def wrong(op: Op) -> Op:
        if op.op_type != "GroupedAdamW":
            return op
        row = list(op.inputs)
        i, j = next((i, j) for j in range(1, len(row) - 1, 4) for i in range(1, j, 4) if row[i].type is row[j].type)
        row[i], row[j] = row[j], row[i]
        return again(op, row)

    with pytest.raises(MismatchError, match=r"^rank 0: update\d\.?\w*: output %[\w.]+: expected .*, got "):
        check_programs(cases()[0].program, with_ops(cases()[0], wrong))


def test_another_bias_in_a_recomposed_product() -> None:
    """Of two that have its type, in the last stage."""
    case = cases()[3]
    seen: dict[Any, Value] = {}
    done: list[Op] = []

    def wrong(op: Op) -> Op:
        if op.op_type == "Gemm" and not done:
            *rest, bias = op.inputs
            if bias.type in seen and seen[bias.type] is not bias:
                done.append(op)
                return again(op, [*rest, seen[bias.type]])
            seen[bias.type] = bias
        return op

    forward = next(g for p in case.ranks for g in p.function.callees() if sum(o.op_type == "Gemm" for o in g.ops) > 1)
    new = Function(forward.name, forward.inputs, tuple(map(wrong, forward.ops)), forward.outputs)
    assert done
    bad = [p._replace(function=calling(p.function, forward, new)) for p in case.ranks]
    with pytest.raises(MismatchError, match=r"^rank \d: fwd\d.*: output %.*: expected .*, got "):
        check_programs(case.program, bad)


def test_laws_that_terms_are_equal_up_to() -> None:
    """On numbers."""
    rng = np.random.default_rng(0)
    for rows in [(4,), (2, 3), (2, 3, 4)]:
        x, d = rng.standard_normal((*rows, 5)), rng.standard_normal((*rows, 7))
        weight: Any = lookup("MatMulGradWeight").eval
        np.testing.assert_allclose(weight(NUMPY, x, d).T, weight(NUMPY, d, x), rtol=1e-13)
        add: Any = lookup("Add").eval
        assert np.array_equal(add(NUMPY, x, x[::-1]), add(NUMPY, x[::-1], x))
