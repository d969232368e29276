"""The factor notation (like einsum) by which most ops declare their shapes.

`"... m k, ... k n -> ... m n | k:sum"`: operands, results, and kinds of factors. `...` stands for leading dims that
broadcast. A factor of a result only must get its size from elsewhere (`sizes`). Kinds: `sum`, `max` and `mean`
are reduced, so that a split factor leaves a Partial; `whole` may not be split. A dim of size 1 of a larger factor
broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from distir.ir.errors import IRTypeError

Shape = tuple[int, ...]
Names = tuple[str | None, ...]


class Factors:
    """The factors of one op at given shapes.

    `ins` and `outs` name the factor of each dim (None where the dim broadcasts), `sizes` gives every factor's size,
    `kinds` those that are reduced or whole. They are shared: nothing of them may be changed.
    """

    __slots__ = ("ins", "kinds", "outs", "sizes")

    def __init__(self, ins: list[Names], outs: list[Names], sizes: dict[str, int], kinds: Mapping[str, str]) -> None:
        self.ins, self.outs, self.sizes, self.kinds = ins, outs, sizes, kinds

    def out_shapes(self) -> list[Shape]:
        return [tuple(1 if f is None else self.sizes[f] for f in names) for names in self.outs]


def _side(text: str) -> list[tuple[str, ...]]:
    return [tuple(x.split()) for x in text.split(",")]


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]], dict[str, str]]:
    body, _, kinds = text.partition("|")
    left, _, right = body.partition("->")
    return _side(left), _side(right), dict([k.split(":") for k in kinds.split()])


def factors(text: str, shapes: Sequence[Shape], sizes: Mapping[str, int] | None = None) -> Factors:
    """The factors of `text` at these operand shapes. Raises IRTypeError, naming the operand, if they do not fit."""
    return _factors(text, tuple(shapes), tuple(sizes.items()) if sizes else ())


@lru_cache(maxsize=1 << 14)
def _factors(text: str, shapes: tuple[Shape, ...], sizes: tuple[tuple[str, int], ...]) -> Factors:
    ins, outs, kinds = _parse(text)
    if len(ins) != len(shapes) and not (len(shapes) == 0 and ins == [()]):
        raise IRTypeError(f"expected {len(ins)} operands, got {len(shapes)}")
    size: dict[str, int] = dict(sizes)
    spelled: list[list[str]] = []
    for k, (names, shape) in enumerate(zip(ins, shapes, strict=False)):
        lead = len(shape) - len(names)
        if "..." in names:
            lead += 1
            i = names.index("...")
            full = [*names[:i], *[f".{lead - j}" for j in range(lead)], *names[i + 1 :]]
        else:
            full = list(names)
        if lead < 0 or (lead and "..." not in names):
            raise IRTypeError(f"operand {k}: expected rank {len(names)} ({' '.join(names)}), got shape {shape}")
        for f, d in zip(full, shape, strict=True):
            known = size.get(f, 1)
            if d != known:
                if d != 1 and known != 1:
                    raise IRTypeError(f"operand {k}: expected {f} = {known}, got {d} in shape {shape}")
                size[f] = known if d == 1 else d
            else:
                size.setdefault(f, d)
        spelled.append(full)
    leads = sorted((f for f in size if f[0] == "."), key=lambda f: -int(f[1:]))
    results: list[Names] = []
    for names in outs:
        row: list[str | None] = []
        for f in names:
            row += leads if f == "..." else [None if f == "1" else f]
        results.append(tuple(row))
    sources: list[Names] = [
        tuple(f if d != 1 or size[f] == 1 else None for f, d in zip(full, shape, strict=True))
        for full, shape in zip(spelled, shapes, strict=True)
    ]
    return Factors(sources, results, size, kinds)
