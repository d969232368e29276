"""Checks the programs of all ranks before a run starts."""

from __future__ import annotations

from collections.abc import Sequence

from distir.ir.errors import IRTypeError
from distir.ir.function import Function
from distir.ir.verify import verify
from distir.transforms.rank.order import check_ahead, check_order
from distir.transforms.rank.project import RankProgram
from distir.transforms.rank.rank_program import in_step
from distir.transforms.rank.validate_ranks import validate_ranks


def check_programs(program: Function, ranks: Sequence[RankProgram]) -> None:
    """Check that the programs of all ranks (see `rank_programs`) are well typed, together compute what the distributed
    program does, and cannot deadlock.

    Raises IRTypeError, MismatchError or ModelError, naming ranks and ops. Ranks that share a program are checked once.
    """
    checked: set[Function] = set()
    for p in ranks:
        if p.function not in checked:
            checked.add(p.function)
            try:
                verify(p.function)
            except IRTypeError as e:
                raise IRTypeError(f"rank {p.rank}: {e.message}", e.hint) from None
    validate_ranks(program, ranks)
    check_order(in_step(program))
    check_ahead(ranks, in_step(program))
