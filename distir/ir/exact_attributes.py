"""The attributes of ops: compared exactly, as keys must be."""

from __future__ import annotations

from array import array
from math import isnan
from typing import Any, ClassVar
from weakref import WeakValueDictionary


class Form:
    """Stands for all equal attributes: it is hashed and compared by identity."""

    __slots__ = ("__weakref__",)


class Attributes(dict[str, Any]):
    """An op's attributes: a mapping of hashable values that is not changed once made.

    They compare exactly, as cache keys must: 1, 1.0 and True differ, so do 0.0 and -0.0; any two nan are equal. Equal
    ones have the same `form`, the quickest key.
    """

    __slots__ = ("form",)
    _forms: ClassVar[WeakValueDictionary[frozenset[tuple[str, Any]], Form]] = WeakValueDictionary()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        try:
            key = frozenset([(k, _exactly(v)) for k, v in self.items()])
            form = self._forms.get(key)
            self.form = form if form is not None else self._forms.setdefault(key, Form())
        except TypeError:  # what is not hashable is refused where types are inferred
            self.form = Form()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.form)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict):
            return False
        return self.form is (other if isinstance(other, Attributes) else Attributes(other)).form

    def __ne__(self, other: object) -> bool:  # dict's __ne__ does not call __eq__
        return not self == other

    def without(self, *names: str) -> Attributes:
        return Attributes({k: v for k, v in self.items() if k not in names})

    def __reduce__(self) -> tuple[type[Attributes], tuple[dict[str, Any]]]:
        return Attributes, (dict(self),)


NO_ATTRIBUTES = Attributes()
_EXACT = frozenset((int, str))
"""The types of values that `==` compares exactly."""


def _exactly(value: Any) -> Any:
    """The value, with its type where `==` needs it; a number with a fraction as text, tuples of them as bytes."""
    kind = type(value)
    if kind in _EXACT:
        return value
    if kind is float:
        return kind, repr(value)
    if kind is not tuple:
        return kind, getattr(value, "identity", value)  # a function is not kept alive by what stands for it
    if _EXACT.issuperset(map(type, value)):
        return value
    kinds = {*map(type, value)}
    if kinds == {float} and not any(map(isnan, value)):
        return float, array("d", value).tobytes()
    return (bool, value) if kinds == {bool} else tuple([_exactly(v) for v in value])
