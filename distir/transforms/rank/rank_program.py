"""The program that a rank runs: its projection of the distributed program, after all passes before lowering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distir.ir.cached import cached
from distir.ir.function import Function
from distir.transforms.rank.as_run import as_run
from distir.transforms.rank.outline import outline
from distir.transforms.rank.post_receives import posted_ahead
from distir.transforms.rank.project import RankProgram, project, project_all


class RankOptions(NamedTuple):
    """Options of the passes over a rank's program.

    `compiled`: runs of compute ops are outlined, for a compiler. `receives_ahead`: receives are posted before the call
    that precedes their first use, instead of at the position of the send.
    """

    compiled: bool = False
    receives_ahead: bool = True


DEFAULT = RankOptions()


def rank_program(program: Function, rank: int, options: RankOptions = DEFAULT) -> RankProgram:
    """The program that one rank runs. Raises UsageError if there is no such rank."""
    return _finished(project(as_run(program), rank), options)


@cached
def in_step(program: Function) -> Sequence[RankProgram]:
    """The programs of all ranks with receives at the positions of their sends: the order most prone to deadlock."""
    return tuple(project_all(as_run(program)))


def rank_programs(program: Function, options: RankOptions = DEFAULT) -> list[RankProgram]:
    """The programs that all ranks run, in order; ranks in the same meshes share one Function."""
    done: dict[Function, Function] = {}
    found: list[RankProgram] = []
    for p in in_step(program):
        if p.function not in done:
            done[p.function] = _finished(p, options).function
        found.append(p._replace(function=done[p.function]))
    return found


def _finished(mine: RankProgram, options: RankOptions) -> RankProgram:
    if options.receives_ahead:
        mine = posted_ahead(mine)
    return mine._replace(function=outline(mine.function)) if options.compiled else mine
