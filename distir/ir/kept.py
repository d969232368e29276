"""What passes find out about a Function, kept with it: a Function never changes, so it is found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from distir.ir.function import Function

P = ParamSpec("P")
T = TypeVar("T")


def kept(find: Callable[Concatenate[Function, P], T]) -> Callable[Concatenate[Function, P], T]:
    """A function of a Function and of hashable positional arguments, whose results are kept with the Function.

    Results must not be changed. An error is not kept.
    """

    @wraps(find)
    def look(function: Function, *args: P.args, **named: P.kwargs) -> T:
        key: Hashable = (find, *args, *named.items())
        if key not in function.found:
            function.found[key] = find(function, *args, **named)
        return cast(T, function.found[key])

    return look
