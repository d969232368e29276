"""Faults in distributed programs are found by `verify` and `validate`, before anything runs.

`verify` alone rejects every fault in a collective, a placement or a mesh. `verify` and `validate` together reject
every mutant whose result differs; what they let through computes the same. `python -m tests.transforms.test_mutants
[COUNT [SEED]]` prints the table.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from distir.ir import Function, validate, verify
from distir.ir.errors import DistirError, InfeasibleError, IRTypeError, MismatchError
from distir.transforms.differentiation.training import SGD
from tests.transforms.mutate import COMMUNICATION, KINDS, Fault, Mutant, apply, mutants
from tests.transforms.programs import (
    Plan,
    Program,
    collectives,
    distributed,
    error,
    imported_mlp,
    run,
    small_gpt,
    written_mlp,
)
from tests.transforms.random_programs import LARGE, random_programs, split_and_join
from tests.transforms.test_halos import network

COUNT = 420
BY_TYPES, BY_TERMS, SAME, DIFFERENT = "verify", "validate", "let through, same result", "let through, DIFFERENT"
COLUMNS = (BY_TYPES, BY_TERMS, SAME, DIFFERENT)


class Case(NamedTuple):
    """A verified distributed program, what it is validated against, and the results it gives."""

    program: Program
    function: Function
    source: Function
    results: list[np.ndarray]


def case(program: Program, plan: Plan) -> Case:
    made = distributed(program, plan)
    return Case(program, made.program, made.source, run(made.program, program))


@functools.cache
def cases() -> list[Case]:
    """Small GPTs with fused QKV, tied embedding and padded vocabulary, convolutional networks with halos, MLPs, and
    programs found at random."""
    momentum = SGD(0.1, momentum=0.9)
    return [
        case(small_gpt(vocabulary=15, optimizer=momentum), Plan(2, 2, 2, 2)),
        case(small_gpt(layers=1), Plan(2, 2, 2, 2, host=True)),
        case(imported_mlp(momentum), Plan(2, 2, 2, 4)),
        case(small_gpt(layers=1), Plan(1, 2, 1, 2, sequence_parallel=True, split=("cp=2:*.1",))),
        case(network(size=8), Plan(2, split=("h=2:x.2", "w=2:x.3"))),
        case(network(size=8, pool="AveragePool", kernel=2), Plan(1, 1, 2, 2, split=("h=2:x.2", "w=2:x.3"))),
        case(written_mlp(), Plan(2, 2, 2, 2, "gpipe", host=True)),
        *[case(program, plan) for program, plan in random_cases()],
    ]


def random_cases() -> list[tuple[Program, Plan]]:
    """Random programs that hold what the others do not: all-gathers, all-to-alls, values joined over time."""
    plan = Plan(2, 2, 2, 2)
    found: dict[str, Program] = {}

    @settings(max_examples=300, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=LARGE)
    @given(random_programs(split_and_join))
    def look(program: Program) -> None:
        if len(found) == 2 or not 60 < len(program.function.ops) < 200:
            return
        try:
            kinds = collectives(distributed(program, plan).program)
        except InfeasibleError:
            return
        for kind in ("MPIAllgather", "MPIAlltoall"):
            if kinds[kind]:
                found.setdefault(kind, program)

    look()
    return [(program, plan) for program in found.values()]


def judged(one: Case, mutant: Mutant) -> str:
    """The column of the table that a mutant belongs to."""
    try:
        verify(mutant.function)
    except IRTypeError:
        return BY_TYPES
    try:
        validate(mutant.function, one.source)
    except MismatchError:
        return BY_TERMS
    return SAME if same(one, mutant) else DIFFERENT


def same(one: Case, mutant: Mutant) -> bool:
    """Whether the mutant runs with the program's results."""
    try:
        return error(run(mutant.function, one.program), one.results) <= 1e-9
    except DistirError:
        return False


class Verdict(NamedTuple):
    mutant: Mutant
    column: str


def judge(count: int, seed: int) -> list[Verdict]:
    """The column of each of `count` mutants."""
    known = cases()
    drawn = mutants([c.function for c in known], count, seed)
    return [Verdict(mutant, judged(known[i], mutant)) for i, mutant in drawn]


def table(verdicts: Sequence[Verdict]) -> str:
    """The number of mutants of each kind in each column."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for v in verdicts:
        counts[v.mutant.kind][v.column] += 1
    rows: list[tuple[str, ...]] = [("kind of fault", "mutants", *COLUMNS)]
    for kind in KINDS:
        row = counts[kind]
        rows.append((kind, str(row.total()), *[str(row[c] or "") for c in COLUMNS]))
    total = sum(counts.values(), Counter[str]())
    rows.append(("all", str(total.total()), *[str(total[c] or "") for c in COLUMNS]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [first.ljust(widths[0]) + "".join(f"  {x:>{w}}" for x, w in zip(rest, widths[1:])) for first, *rest in rows]
    unsound = [f"  {v.mutant.kind}: {v.mutant.where}" for v in verdicts if v.column == DIFFERENT]
    return "\n".join([*lines, *unsound])


def hold(verdicts: Sequence[Verdict]) -> None:
    """The guarantees of `verify` and `validate`."""
    assert [v.mutant.where for v in verdicts if v.column == DIFFERENT] == []
    late = [v for v in verdicts if v.mutant.kind in COMMUNICATION and v.column == BY_TERMS]
    assert [f"{v.mutant.kind}: {v.mutant.where}" for v in late] == []


def test_a_rebuilt_program_without_a_fault_passes() -> None:
    for one in cases():
        mutant = Mutant("none", "nothing", apply(one.function, Fault("nothing")))
        assert mutant.function is not one.function
        assert judged(one, mutant) == SAME


def test_seeded_faults_are_found() -> None:
    verdicts = judge(COUNT, seed=0)
    print(table(verdicts))
    hold(verdicts)
    for kind in KINDS:
        assert sum(v.mutant.kind == kind for v in verdicts) >= 10
    rejected = [v for v in verdicts if v.column in (BY_TYPES, BY_TERMS)]
    assert len(rejected) > 0.9 * len(verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_more_seeded_faults_are_found(seed: int) -> None:
    verdicts = judge(1200, seed)
    print(table(verdicts))
    hold(verdicts)


if __name__ == "__main__":
    numbers = [int(x) for x in sys.argv[1:]]
    print(table(judge(*[*numbers, *(COUNT, 0)[len(numbers) :]])))
