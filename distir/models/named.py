"""Models by name and sizes: `gpt:layers=96,hidden=12288,heads=96,seq=2048`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from distir.ir.errors import UsageError
from distir.models.decoder import ARCHITECTURES, Decoder, kind_of

_KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (int, "N, a whole number"),
    float: (float, "X, a number"),
    int: (int, "N, a whole number"),
    str: (str, "WORD"),
}
"""By the type of a field how its value is read, and what is expected."""


def is_named(text: str) -> bool:
    """Whether a text is a model's name and sizes, not a file."""
    return text.partition(":")[0] in ARCHITECTURES and ":" in text


def named(text: str, dims: Mapping[str, int]) -> Decoder:
    """The decoder that a text describes; `dims` override its sizes.

    Raises UsageError, with a hint, for a key that there is not, a value of another type, or a size that is missing or
    does not fit.
    """
    name, _, rest = text.partition(":")
    known = {f.name: f for f in fields(Decoder)}
    given: dict[str, Any] = {}
    for entry in [x for x in rest.split(",") if x]:
        key, _, value = entry.partition("=")
        kind = kind_of(known[key]) if key in known else int
        parse, expected = _KINDS[kind]
        try:
            given[key] = parse(value)
        except ValueError:
            raise UsageError(f"{text}: expected {key}={expected}, got {entry!r}") from None
    given |= dims
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise UsageError(
                f"{text}: {name} has no {key!r}",
                f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}",
            )
        if isinstance(known[key].default, bool) and given[key] not in (0, 1):
            raise UsageError(f"{text}: {key} is 0 or 1, got {given[key]}")
    flags = {k: bool(x) if isinstance(known[k].default, bool) else x for k, x in given.items()}
    missing = [k for k in ("layers", "hidden", "heads") if k not in given]
    if missing:
        raise UsageError(f"{text}: {' and '.join(missing)} missing", f"such as {name}:layers=12,hidden=768,heads=12")
    try:
        return Decoder(**{**ARCHITECTURES[name], **flags})
    except UsageError as e:
        raise UsageError(f"{text}: {e.message}", e.hint) from None
