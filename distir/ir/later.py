"""Names of a package that are imported from their modules when they are used: what is quick to import stays so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package, given the module of each name that is imported later."""

    def find(name: str) -> Any:
        import importlib

        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return find
