"""All that is known of a communication op stands in its definition: each has what its route needs, and no other part of
the package tests its name.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from distir.ir.communication import TRANSFERS
from distir.ir.spec import all_ops

PACKAGE = Path(__file__).parents[2] / "distir"
COMMUNICATION = [spec for spec in all_ops() if spec.comm is not None]
ONE_SIDED = {"outgoing", "incoming"}
NAMING = {"ops": "defines them", "launchers.py": "launches them", "proxy_launchers.py": "launches their messages"}
"""Folders and files that name them, and why."""
MAKING = re.compile(r"\b(lookup\(|emit\(|add_op\(|map\(lookup,|along\(|slope\()")
"""What makes a particular op, or asks what it costs, may name it."""


def test_no_name_is_tested_outside_of_definitions_and_launchers() -> None:
    names = re.compile("|".join(f'"{spec.name}"' for spec in COMMUNICATION if spec.route != "here"))
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] in NAMING or path.name in NAMING:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if names.search(line) and not MAKING.search(line) and "waiting(" not in line:
                found.append(f"{place}:{number}: {line.strip()}")
    assert found == []


def test_each_says_what_its_route_needs() -> None:
    for spec in COMMUNICATION:
        comm = spec.comm
        assert comm is not None
        assert (comm.wire is not None) == (spec.route in ("axis", "scatter", "gather")), spec
        assert (comm.meaning is None) == (spec.route in ONE_SIDED or spec.name == "Call"), spec
        if spec.route == "axis":
            assert comm.takes, spec
            assert "axis" in spec.attributes, spec
        elif spec.route in TRANSFERS:
            assert "to" in spec.attributes, spec
        if comm.bundles or comm.sums or comm.gathers:
            assert comm.takes, spec


def test_what_is_sent_is_what_the_steps_of_the_best_algorithm_send() -> None:
    """Around a ring every step passes on an n-th; an all-reduce is a reduce-scatter and an all-gather."""
    sent = {s.name: s.comm.wire.sent for s in COMMUNICATION if s.comm is not None and s.comm.wire is not None}
    for n in (2, 3, 8):
        part = {name: Fraction(*of(n)) for name, of in sent.items()}
        assert part["MPIAllgather"] == part["MPIReduceScatter"] == part["MPIAlltoall"] == Fraction(n - 1, n)
        assert part["MPIAllreduce"] == part["MPIReduceScatter"] + part["MPIAllgather"]
        assert part["MPIPermute"] == 1
