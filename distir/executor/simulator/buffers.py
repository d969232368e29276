"""Buffers: blocks of tensors that are allocated and freed together, and which blocks hold a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

Sizes = tuple[tuple[int, int], ...]
"""(category, bytes) of each tensor of a block."""
Layout = tuple[tuple[int, int], ...]
"""For each tensor of a value, (position of its block, number in the block)."""


class Block:
    """Tensors that are allocated and freed together: their (category, bytes). `outside`: the caller holds them, too."""

    __slots__ = ("outside", "refs", "sizes")

    def __init__(self, sizes: Sizes, outside: bool = False) -> None:
        self.sizes, self.outside, self.refs = sizes, outside, 0


class Holding:
    """Where a value lies: its blocks, and for each of its tensors (block position, number in the block).

    Holdings of equal `key` have equal layouts and sizes.
    """

    __slots__ = ("_key", "blocks", "layout")
    _keys: ClassVar[dict[object, int]] = {}

    def __init__(self, blocks: tuple[Block, ...], layout: Layout, key: int | None = None) -> None:
        self.blocks, self.layout, self._key = blocks, layout, key

    @property
    def key(self) -> int:
        if self._key is None:
            self._key = self.key_of(self.layout, [b.sizes for b in self.blocks])
        return self._key

    @classmethod
    def key_of(cls, layout: Layout, sizes: Iterable[Sizes]) -> int:
        return cls._keys.setdefault((layout, tuple(sizes)), len(cls._keys))

    def tensors(self) -> list[tuple[Block, int]]:
        return [(self.blocks[p], i) for p, i in self.layout]


def holding(tensors: Sequence[tuple[Block, int]]) -> Holding:
    """The holding of a value whose tensors are these."""
    if len(tensors) == 1:
        return Holding((tensors[0][0],), ((0, tensors[0][1]),))
    position: dict[Block, int] = {}
    layout = tuple([(position.setdefault(b, len(position)), i) for b, i in tensors])
    return Holding(tuple(position), layout)


def alone(kind: int, size: int) -> Holding:
    """The holding of a new tensor, alone in its block, which one value refers to."""
    block = Block(((kind, size),))
    block.refs = 1
    return Holding((block,), _FIRST)


_FIRST: Layout = ((0, 0),)


class Given(NamedTuple):
    """The operands of a call: their holdings by number, and the blocks that die in it."""

    holdings: dict[int, Holding]
    dying: frozenset[Block]

    def key(self) -> object:
        """The cache key of the call's result: layouts and sizes, which blocks die, and which operands share blocks."""
        operands = self.holdings.items()
        if sum(len(h.blocks) for _, h in operands) == len({b for _, h in operands for b in h.blocks}):
            return tuple([(i, h.key, self._dying(h)) for i, h in operands])
        number: dict[Block, int] = {}
        shared = [tuple([number.setdefault(b, len(number)) for b in h.blocks]) for _, h in operands]
        return tuple([(i, h.key, self._dying(h), n) for (i, h), n in zip(operands, shared, strict=True)])

    def _dying(self, h: Holding) -> tuple[bool, ...]:
        return () if self.dying.isdisjoint(h.blocks) else tuple([b in self.dying for b in h.blocks])
