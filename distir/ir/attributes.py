"""The attributes an op takes: their names and kinds, and a check of given attributes against these.

`"axis:dim sizes:sizes? min:number/none?"`: a `?` marks those that may be left out, `/none` those that may be None, and
`none|tanh` is one of these words. A dim is one of operand 0, a size one of operands or results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from distir.ir.device import Device, Mesh
from distir.ir.dtype import DType
from distir.ir.errors import IRTypeError
from distir.ir.placement import Placement
from distir.ir.type import Tensor


class Attribute(NamedTuple):
    """The declaration of one attribute."""

    kind: str
    none: bool
    optional: bool
    said: str
    fits: Callable[[Any, int], bool]
    """(value, rank of operand 0) -> whether it is of this kind."""


class _Kind(NamedTuple):
    said: str
    fits: Callable[[Any, int], bool]
    """(value, rank of operand 0) -> whether it is of this kind."""


def _is_int(x: Any) -> bool:
    return type(x) is int


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _each(fits: Callable[[Any], bool]) -> Callable[[Any, int], bool]:
    return lambda x, rank: type(x) is tuple and all(map(fits, x))


def _is_dim(x: Any, rank: int) -> bool:
    return type(x) is int and 0 <= x < rank


def _are_dims(x: Any, rank: int) -> bool:
    return type(x) is tuple and all(_is_dim(d, rank) for d in x) and len(set(x)) == len(x)


def _is_mesh_axis(x: Any) -> bool:
    return type(x) is str or (type(x) is tuple and len(set(x)) == len(x) > 1 and all(type(a) is str for a in x))


_KINDS = {
    "flag": _Kind("True or False", lambda x, rank: type(x) is bool or (type(x) is int and x in (0, 1))),
    "int": _Kind("an integer", lambda x, rank: _is_int(x)),
    "ints": _Kind("a tuple of integers", _each(_is_int)),
    "number": _Kind("a number", lambda x, rank: _is_number(x)),
    "numbers": _Kind("a tuple of numbers", _each(lambda x: type(x) in (bool, int, float))),
    "pair": _Kind("two numbers", lambda x, rank: type(x) is tuple and len(x) == 2 and all(map(_is_number, x))),
    "index": _Kind("an integer from 0", lambda x, rank: _is_int(x) and x >= 0),
    "size": _Kind("an integer from 0", lambda x, rank: _is_int(x) and x >= 0),
    "sizes": _Kind("a tuple of integers from 0", _each(lambda n: _is_int(n) and n >= 0)),
    "count": _Kind("an integer from 1", lambda x, rank: _is_int(x) and x >= 1),
    "dim": _Kind("a dim of operand 0, counted from 0", _is_dim),
    "dims": _Kind("a tuple of different dims of operand 0, counted from 0", _are_dims),
    "order": _Kind("all dims of operand 0 in some order", lambda x, rank: _are_dims(x, rank) and len(x) == rank),
    "axis": _Kind("a dim of operand 0, from either end", lambda x, rank: _is_int(x) and -rank <= x < rank),
    "dtype": _Kind("a dtype", lambda x, rank: isinstance(x, DType)),
    "text": _Kind("a string", lambda x, rank: type(x) is str),
    "mesh-axis": _Kind("the name of a mesh axis, or a tuple of several", lambda x, rank: _is_mesh_axis(x)),
    "split": _Kind(
        "an integer, or one for each member of a bundle", lambda x, rank: _is_int(x) or _each(_is_int)(x, rank)
    ),
    "duration": _Kind("a number of seconds from 0", lambda x, rank: _is_number(x) and 0 <= x < math.inf),
    "types": _Kind("a tuple of types of tensors", _each(lambda t: isinstance(t, Tensor))),
    "home": _Kind("a device or a mesh", lambda x, rank: isinstance(x, Device | Mesh)),
    "placements": _Kind("a tuple of placements", _each(lambda p: isinstance(p, Placement))),
    "piece": _Kind("two integers", lambda x, rank: type(x) is tuple and len(x) == 2 and all(map(_is_int, x))),
    "function": _Kind("a function", lambda x, rank: hasattr(x, "ops")),
}


def declared(text: str) -> dict[str, Attribute]:
    """Parse the text that declares an op's attributes; the module's docstring defines its form.

    Any op that computes may also have `device` and `place`, which say where it is: `infer` checks those.
    """
    found: dict[str, Attribute] = {}
    for entry in text.split():
        name, _, kind = entry.partition(":")
        kind, _, none = kind.rstrip("?").partition("/")
        if "|" not in kind and kind not in _KINDS:
            raise TypeError(f"attribute {entry}: expected a kind of {sorted(_KINDS)}, or one|another")
        found[name] = Attribute(kind, none == "none", entry.endswith("?"), *_kind(kind))
    return found


def _kind(name: str) -> _Kind:
    if "|" not in name:
        return _KINDS[name]
    words = name.split("|")
    return _Kind(f"one of {words}", lambda x, rank: type(x) is str and x in words)


def short(value: Any) -> str:
    """A value on one line, cut short."""
    text = f"function {value.name}" if hasattr(value, "ops") else repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."


def check(attributes: Mapping[str, Any], takes: Mapping[str, Attribute], rank: int) -> None:
    """Check attributes against a declaration, for an operand 0 of that rank. Raises IRTypeError."""
    for name, value in attributes.items():
        one = takes.get(name)
        if one is None:
            raise IRTypeError(f"expected no attribute {name}", f"it takes {', '.join(takes) or 'none'}")
        if not one.fits(value, rank) and not (value is None and one.none):
            raise IRTypeError(f"attribute {name}: expected {one.said}, got {short(value)}")
    if len(attributes) < len(takes):
        for name, one in takes.items():
            if not one.optional and name not in attributes:
                raise IRTypeError(f"attribute {name}: expected {one.said}, got no attribute of that name")
