"""Models by a Hugging Face config.json: its architecture as a `Decoder`, and the program of that."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from distir.ir.dtype import dtype_named
from distir.ir.errors import UsageError
from distir.ir.type import DType, Float32
from distir.models.architectures import ARCHITECTURES, Architecture, Key
from distir.models.config_file import ConfigFile, opened
from distir.models.decoder import OPTIONAL, Decoder, angles, decoder, kind_of
from distir.models.named import Built, check_sizes
from distir.models.pretrained import Pretrained
from distir.ops.rules import shape_of

LONGEST = 8192
"""Sequences have this many tokens, or fewer if the config says so, unless a number is given."""
_GROUP = 1024
"""The most tokens of a group that shares experts' slots: what it costs to dispatch a token grows with the group."""

Config = str | os.PathLike[str] | Mapping[str, Any]


def from_config(
    config: Config,
    *,
    sequence: int | None = None,
    batch: int = 1,
    capacity: float = 1.0,
    dtype: DType | str = Float32,
    weights: Mapping[str, Any] | None = None,
) -> Built:
    """The forward pass of the model that a Hugging Face config describes: a config.json, its folder, or its fields.

    `batch` sequences of `sequence` tokens: `input_ids` (batch, sequence) to `logits` (batch, sequence, vocabulary).
    `sequence` is by default as long as the config allows, up to 8,192. `capacity`, of mixtures of experts: see
    `Decoder`; experts / choices drops no token, as transformers does not. `weights`: arrays by the names in files that
    transformers saves, read when they are needed; without them weights are random. Dropout is left out.

    Raises ModelError for a file that cannot be read, an architecture that is not known, or a field that is missing, of
    another type, or not supported; UsageError for sizes that do not fit the model, or a type of weights that is none.
    """
    sizes = {"seq": sequence, "batch": batch, "capacity": capacity}
    return built_from(config, {name: n for name, n in sizes.items() if n is not None}, dtype, weights)


def built_from(
    config: Config, dims: Mapping[str, Any], dtype: DType | str = Float32, weights: Mapping[str, Any] | None = None
) -> Built:
    """As `from_config`; `dims` are fields of `Decoder`, and override those that the config gives."""
    file = opened(config)
    architecture = _architecture(file)
    model = _described(file, architecture, dims)
    function = decoder(model, dtype_named(dtype))
    if weights is None:
        return Built(function, angles(model))
    shapes = {v.name: shape_of(v) for v in function.inputs if v.kind == "parameter"}
    read = Pretrained(model, architecture, shapes, weights)
    return Built(function, ChainMap(angles(model), read))  # type: ignore[arg-type]  # nothing writes to it


def described(config: Config, dims: Mapping[str, Any] | None = None) -> Decoder:
    """The decoder that a config describes; see `from_config`. `dims` override its fields."""
    file = opened(config)
    return _described(file, _architecture(file), dims or {})


def title_of(config: Config) -> str:
    """What the model is called: as the file, or as the folder that a config.json is in."""
    if isinstance(config, Mapping):
        return str(config.get("model_type"))
    path = os.path.abspath(config)
    if os.path.basename(path) == "config.json":
        path = os.path.dirname(path)
    return os.path.basename(path)


def _architecture(file: ConfigFile) -> Architecture:
    known = f"known are {', '.join(ARCHITECTURES)}"
    if file.values.get("model_type") is None:
        raise file.error("no field model_type, which names the architecture", known)
    name = file.get("model_type", str)
    if name not in ARCHITECTURES:
        raise file.error(f"unknown architecture {name!r} (model_type)", known)
    return ARCHITECTURES[name]


def _described(file: ConfigFile, architecture: Architecture, dims: Mapping[str, Any]) -> Decoder:
    try:
        given = _fields(file, architecture)
        Decoder(**given)  # what is wrong here is not wrong because of `dims`
    except UsageError as e:
        raise file.error(e.message, e.hint) from None
    known = {f.name: f for f in fields(Decoder) if kind_of(f) is not str}
    check_sizes(file.label, known, dims)
    given |= dims
    if given.get("experts", 1) > 1 and "groups" not in dims:
        sequence = given["seq"]
        group = next(n for n in range(min(sequence, _GROUP), 0, -1) if sequence % n == 0) if sequence > 0 else 1
        given["groups"] = given.get("batch", 1) * sequence // group
    try:
        return Decoder(**given)
    except UsageError as e:
        raise UsageError(f"{file.label}: {e.message}", e.hint) from None


def _fields(file: ConfigFile, architecture: Architecture) -> dict[str, Any]:
    """The fields of the decoder that the config gives."""
    for key, expected in architecture.only.items():
        wanted = file.get(expected.name, int) if isinstance(expected, Key) else expected
        if file.values.get(key, wanted) not in (wanted, None):
            raise file.error(f"{key} {file.values[key]!r} is not supported", f"supported is {wanted!r}")
    found: dict[str, Any] = {}
    for f in fields(Decoder):
        if f.name in architecture.fields:
            value = architecture.fields[f.name]
            if isinstance(value, Key):
                read = file.positive if kind_of(f) is int and f.name not in OPTIONAL else file.get
                value = read(value.name, kind_of(f), value.default, value.null)
            found[f.name] = value(file) if callable(value) else value
    found["seq"] = min(LONGEST, file.positive(architecture.length, int, found.get("positions", LONGEST)))
    return found
