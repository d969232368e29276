"""The laws that rewrites claim, and the provenance of rewritten programs.

A rewrite is a pass that replaces ops of a program; it is decorated with `rewrites(LAW)`. Its result records the program
it was made from, so that `validate` can trace a program back to the imported one, and check every rewrite by its law
(`distir.api.rewrites`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec

from distir.ir.function import Function

P = ParamSpec("P")


class Law(Enum):
    """What a rewrite may claim."""

    SAME = "the same results for the same inputs"
    MORE = "existing values are computed as before; the added backward ops are gradients of the ops they are `of`"
    DRAWN = "the same ops, with dropout drawn at random where it was the identity"
    OF_BATCH = "the same ops, with statistics of the batch in place of running ones"
    KNOWN = "the same results, given the values of known constants"
    PADDED = "the same results within the source shapes, if the padding of the inputs is 0"
    RETYPED = "the same ops in another floating-point type"
    MIXED = "the same ops, products in another floating-point type"


class Origin(NamedTuple):
    """The provenance of a function: the function before, the rewrite, its law and its other arguments."""

    before: Function
    rewrite: str
    law: Law
    given: tuple[Any, ...]


REWRITES: dict[str, Law] = {}
"""The law of every rewrite, by its name."""


def rewrites(
    law: Law,
) -> Callable[[Callable[Concatenate[Function, P], Function]], Callable[Concatenate[Function, P], Function]]:
    """Decorator of a rewrite: registers the law that it claims, and records the origin of each result."""

    def wrap(rewrite: Callable[Concatenate[Function, P], Function]) -> Callable[Concatenate[Function, P], Function]:
        name = rewrite.__name__
        REWRITES[name] = law

        @wraps(rewrite)
        def noted(function: Function, *args: P.args, **named: P.kwargs) -> Function:
            made = rewrite(function, *args, **named)
            if made is not function:
                made.cache.setdefault(Origin, Origin(function, name, law, (*args, *named.values())))
            return made

        return noted

    return wrap


def origins(function: Function) -> Iterator[tuple[Origin, Function]]:
    """The rewrites that led to a function, the last first: the origin, and the rewrite's result."""
    while (origin := function.cache.get(Origin)) is not None:
        yield origin, function
        function = origin.before
