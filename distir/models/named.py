"""Models by name and sizes: `gpt:layers=96,hidden=12288,heads=96,seq=2048`, or by name alone: `gpt3-moe`, `dlrm`.

Those whose names begin with `proxy-` are distributed programs, of published sequences (`distir.models.proxies`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.ir.errors import UsageError, did_you_mean
from distir.ir.function import Function
from distir.models.config_file import is_config
from distir.models.decoder import ARCHITECTURES, PRESETS, Decoder, angles, decoder, kind_of
from distir.models.recommender import Recommender, recommender
from distir.models.volumes import Volumes, volumes

if TYPE_CHECKING:
    import numpy as np

    from distir.models.sequences import ProxySizes

    Sizes = Decoder | Recommender | Volumes | ProxySizes
    Builder = tuple[type[Sizes], Callable[[Any], Function]]
    """The class of a model's sizes, and the function that builds a model of these."""

_KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (int, "N, a whole number"),
    float: (float, "X, a number"),
    int: (int, "N, a whole number"),
    str: (str, "WORD"),
}
"""By the type of a field how its value is read, and what is expected."""


class _Family(NamedTuple):
    """Models of one name: the class of their sizes and what builds them, imported when they are asked for, the sizes
    that the name gives, and the loss by which they are trained if none is asked for."""

    builder: Callable[[], Builder]
    given: Mapping[str, Any] = {}
    loss: str | None = None


def _sequence(name: str) -> Builder:
    from distir.models import proxies, sequences

    return getattr(sequences, name), proxies.proxy


_FAMILIES: dict[str, _Family] = {
    **{name: _Family(lambda: (Decoder, decoder), given) for name, given in ARCHITECTURES.items()},
    **{name: _Family(lambda: (Decoder, decoder), given, "cross-entropy") for name, given in PRESETS.items()},
    "dlrm": _Family(lambda: (Recommender, recommender), loss="loss"),
    "cosmoflow": _Family(lambda: (Volumes, volumes), loss="mse"),
    "proxy-dlrm": _Family(lambda: _sequence("DlrmSequence")),
    "proxy-cosmoflow": _Family(lambda: _sequence("CosmoflowSequence")),
    "proxy-gpt2-large": _Family(lambda: _sequence("Gpt2Sequence")),
    "proxy-gpt3-175b": _Family(lambda: _sequence("Gpt3Sequence")),
    "proxy-gpt3-moe": _Family(lambda: _sequence("MoeSequence")),
}


class Built(NamedTuple):
    """A model's forward pass, and by name the arrays of its constants, and of its weights if they are known."""

    function: Function
    arrays: Mapping[str, np.ndarray]


def model_names() -> list[str]:
    """The names of all models."""
    return list(_FAMILIES)


def is_named(text: str) -> bool:
    """Whether a text is a model's name, or its name and sizes: not a file (that of this name is ./NAME)."""
    return text.partition(":")[0] in _FAMILIES


def own_loss(model: str | os.PathLike[str] | Mapping[str, Any]) -> str | None:
    """The loss by which a model of that name, or that config, is trained if none is asked for; None without one, and
    for files of programs."""
    if not isinstance(model, Mapping) and is_named(os.fspath(model)):
        return _FAMILIES[os.fspath(model).partition(":")[0]].loss
    return "cross-entropy" if isinstance(model, Mapping) or is_config(model) else None


def built(text: str, dims: Mapping[str, int]) -> Built:
    """The model that a text describes; see `named`."""
    sizes = _sizes(text, dims)
    _, build = _FAMILIES[text.partition(":")[0]].builder()
    return Built(build(sizes), angles(sizes) if isinstance(sizes, Decoder) else {})


def named(text: str, dims: Mapping[str, int]) -> Decoder:
    """The decoder that a text describes; `dims` override its sizes.

    Raises UsageError, with a hint, for a key that there is not, a value of another type, or a size that is missing or
    does not fit, and for a model that is no decoder.
    """
    sizes = _sizes(text, dims)
    if not isinstance(sizes, Decoder):
        raise UsageError(f"{text} is no decoder")
    return sizes


def sizes_of(text: str, dims: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the model that a text describes, which `dims` may override; those that are 0 are left out."""
    return whole_sizes(_sizes(text, dims))


def whole_sizes(sizes: Sizes) -> dict[str, int]:
    """The fields that are whole numbers, but for those that are 0."""
    return {f.name: n for f in fields(sizes) if kind_of(f) is int and (n := getattr(sizes, f.name))}


def _sizes(text: str, dims: Mapping[str, int]) -> Sizes:
    name, _, rest = text.partition(":")
    family = _FAMILIES[name]
    sizes, _ = family.builder()
    known = {f.name: f for f in fields(sizes) if kind_of(f) in _KINDS}
    given: dict[str, Any] = {}
    for entry in [x for x in rest.split(",") if x]:
        key, _, value = entry.partition("=")
        kind = kind_of(known[key]) if key in known else int
        parse, expected = _KINDS[kind]
        if key in given:
            raise UsageError(f"{text}: {key} is given twice")
        try:
            given[key] = parse(value)
        except ValueError:
            raise UsageError(f"{text}: expected {key}={expected}, got {entry!r}") from None
    given |= dims
    check_sizes(f"{text}: {name}", known, given)
    for key in given:
        if isinstance(known[key].default, bool) and given[key] not in (0, 1):
            raise UsageError(f"{text}: {key} is 0 or 1, got {given[key]}")
    flags = {k: bool(x) if isinstance(known[k].default, bool) else x for k, x in given.items()}
    whole = {**family.given, **flags}
    missing = [k for k, f in known.items() if f.default is MISSING and k not in whole]
    if missing:
        raise UsageError(f"{text}: {' and '.join(missing)} missing", f"such as {name}:layers=12,hidden=768,heads=12")
    try:
        return sizes(**whole)
    except UsageError as e:
        raise UsageError(f"{text}: {e.message}", e.hint) from None


def check_sizes(model: str, known: Collection[str], given: Collection[str]) -> None:
    """Raises UsageError, with a hint, if a name of `given` is not known."""
    for key in given:
        if key not in known:
            raise UsageError(f"{model} has no {key!r}", did_you_mean(key, known, f"it has {', '.join(known)}"))
