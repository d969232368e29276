"""Caching of analyses with the Function they analyse: Functions are immutable, so each is computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from distir.ir.function import Function

P = ParamSpec("P")
T = TypeVar("T")


def cached(find: Callable[Concatenate[Function, P], T]) -> Callable[Concatenate[Function, P], T]:
    """Decorator for a function of a Function and hashable arguments: cache its results with that Function.

    Results must not be mutated. Errors are not cached.
    """

    @wraps(find)
    def look(function: Function, *args: P.args, **named: P.kwargs) -> T:
        key: Hashable = (find, *args, *named.items())
        if key not in function.cache:
            function.cache[key] = find(function, *args, **named)
        return cast(T, function.cache[key])

    return look


producers = cached(Function.producers)
"""The op that makes each value that is not an input, cached: for programs that are examined often."""
