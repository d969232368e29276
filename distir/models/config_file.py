"""The fields of a Hugging Face config.json, read one by one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distir.ir.errors import ModelError

FILE = "config.json"
REQUIRED: Any = object()
"""In place of a default: the field must be there."""
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_EXPECTED |= {dict: "an object"}


class ConfigFile:
    """The fields of a config, `label` in messages. Reading one that is missing or of another type raises ModelError."""

    def __init__(self, values: Mapping[str, Any], label: str) -> None:
        self.values, self.label = values, label

    def error(self, text: str, hint: str | None = None) -> ModelError:
        """The error to raise."""
        return ModelError(f"{self.label}: {text}", hint)

    def get(self, key: str, kind: type, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """The field `key`; `default` where it is not, `null` (by default `default`) where it is null."""
        value = self.values.get(key)
        if value is None:
            value = null if key in self.values and null is not REQUIRED else default
            if value is REQUIRED:
                models = self.values.get("model_type")
                raise self.error(f"no field {key}{f', which models of type {models} need' if models else ''}")
            return value
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            shown = json.dumps(value, default=repr)
            raise self.error(
                f"{key}: expected {_EXPECTED[kind]}, got {shown if len(shown) < 60 else shown[:60] + '...'}"
            )
        return value

    def positive(self, key: str, kind: type, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """As `get`, of a number above 0; a default may be otherwise."""
        value = self.get(key, kind, default, null)
        if self.values.get(key) is not None and value <= 0:
            raise self.error(f"{key}: expected a number above 0, got {value}")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        found = self.get(key, list)
        return tuple(
            [ConfigFile({f"{key}[{k}]": x}, self.label).positive(f"{key}[{k}]", float) for k, x in enumerate(found)]
        )

    def inside(self, key: str) -> ConfigFile:
        """The object at `key`, empty where there is none."""
        return ConfigFile(self.get(key, dict, {}), f"{self.label}: {key}")


def is_config(path: str | os.PathLike[str]) -> bool:
    """Whether a model is given by a config: a file .json, or a folder."""
    return Path(path).suffix == ".json" or os.path.isdir(path)


def opened(config: str | os.PathLike[str] | Mapping[str, Any]) -> ConfigFile:
    """The fields of a file, of that in a folder, or given. Raises ModelError for a file that cannot be read."""
    if isinstance(config, Mapping):
        return ConfigFile(config, "the config")
    path = Path(config)
    path = path / FILE if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        hint = f"the folder of a model has a Hugging Face {FILE}" if path.name == FILE else None
        raise ModelError(f"cannot read {path}: {e.strerror}", hint) from e
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON", f"a model may be a Hugging Face {FILE}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected an object, got {type(values).__name__}", f"a model may be a {FILE}")
    return ConfigFile(values, str(path))
