"""Factor classes: which sub-dimensions of which values must be split together.

A node is (value, split): one sub-dimension of one dim. A factor mapping of an op joins the nodes in it, operands and
results alike, so a class is a connected component over the whole program. A class is *clean* if every op with one of
its nodes has exactly one mapping for it: the only collectives that splitting it takes are reductions.

Mappings are asked for once per signature, and nodes joined in arrays: programs have few signatures, but many ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from distir.ir.axes import Shape
from distir.ir.spec import FactorMapping
from distir.ir.type import Shard
from distir.transforms.sharding.graph import Graph, Rows, Signature, distinct_rows

if TYPE_CHECKING:
    import numpy as np

Node = tuple[int, Shard]
_Asked = dict[Node, FactorMapping | None]
"""The mappings of a signature, by slot and split."""


class Through(NamedTuple):
    """The mappings of the ops of a signature; `classes[i, k]`: the class of mapping k of the i-th of them, or -1."""

    mappings: Sequence[FactorMapping]
    classes: np.ndarray


class Classes:
    """The classes of a graph for an axis of n devices, grown from `starts`, which earlier axes split `outside` ways.

    Starts are nodes or, by shape, splits of all values. Classes are numbered: `label` has that of each node, -1 if no
    start leads there; `through` by signature those of mappings. `bad` are the classes that are not clean.
    """

    def __init__(
        self, graph: Graph, n: int, starts: Sequence[Node] | Mapping[Shape, Sequence[Shard]], outside: int = 1
    ) -> None:
        import numpy as np

        self.graph, self.n, self.outside = graph, n, outside
        everywhere: Mapping[Shape, Sequence[Shard]] = starts if isinstance(starts, Mapping) else {}
        nodes: Sequence[Node] = () if isinstance(starts, Mapping) else starts
        shapes, of_value = graph.numbered_shapes
        splits = {shape: set(everywhere.get(shape, ())) for shape in shapes}
        for v, split in nodes:
            splits[graph.shapes[v]].add(split)
        self._asked = self._ask(splits)
        # nodes are numbered by value, and by split: places[shape][split], from first[value]
        self._places = {shape: {p: k for k, p in enumerate(sorted(row, key=_sizes))} for shape, row in splits.items()}
        counts = np.array([len(row) for row in splits.values()], np.int64)[of_value]
        self._first = np.cumsum(counts) - counts
        begun = [np.array([self._first[v] + self._places[graph.shapes[v]][split] for v, split in nodes], np.int64)]
        for shape, row in everywhere.items():
            values = self._first[of_value == shapes[shape]]
            begun += [values + self._places[shape][split] for split in row]
        self.through, self.label = self._joined(int(counts.sum()), np.concatenate(begun))
        self.bad = self._unclean()

    def _ask(self, splits: Mapping[Shape, set[Shard]]) -> list[_Asked]:
        """The mappings of each signature at all splits that values of a shape may have: those in `splits`, and those
        that mappings lead to, which are added to them."""
        kinds = self.graph.kinds
        slots: dict[Shape, list[tuple[Signature, int]]] = {shape: [] for shape in splits}
        for sig in kinds:
            for k, shape in sig.slots:
                slots[shape].append((sig, k))
        asked: list[_Asked] = [{} for _ in kinds]
        todo = [(shape, split) for shape, row in splits.items() for split in row]
        while todo:
            shape, split = todo.pop()
            for sig, k in slots[shape]:
                mapping = asked[sig.number][k, split] = self.mapping(sig, k, split)
                for slot, p in mapping.splits() if mapping is not None else ():
                    other = sig.shape(slot)
                    if p not in splits[other]:
                        splits[other].add(p)
                        todo.append((other, p))
        return asked

    def mapping(self, sig: Signature, k: int, split: Shard) -> FactorMapping | None:
        """The factor mapping of ops of a signature with a split at one of its slots."""
        return sig.mapping(k, split, self.n, self.outside)

    def _nodes(self, sig: Signature, rows: Rows, at: Sequence[Node]) -> np.ndarray:
        """The numbers of a signature's nodes at these slots and splits, as (op, slot)."""
        import numpy as np

        places = [self._places[sig.shape(k)][p] for k, p in at]
        return self._first[rows.values[:, [k for k, _ in at]]] + np.array(places, np.int64)

    def _joined(self, count: int, begun: np.ndarray) -> tuple[list[Through], np.ndarray]:
        """Join the nodes of each mapping: the classes of mappings, and of nodes; -1 if no start is in it."""
        import numpy as np

        found: list[tuple[list[FactorMapping], np.ndarray]] = []
        ends: list[tuple[np.ndarray, np.ndarray]] = []
        for sig, rows, asked in zip(self.graph.kinds, self.graph.rows, self._asked, strict=True):
            distinct = {id(m): m for m in asked.values() if m is not None}
            # in an order that is independent of that of the ops
            ordered = sorted([(m.splits(), m) for m in distinct.values()], key=_by_slots)
            one = self._nodes(sig, rows, [at[0] for at, _ in ordered])
            other = [(k, node) for k, (at, _) in enumerate(ordered) for node in at[1:]]
            ends.append((one[:, [k for k, _ in other]].ravel(), self._nodes(sig, rows, [p for _, p in other]).ravel()))
            found.append(([m for _, m in ordered], one))
        a, b = [np.concatenate([begun[:0], *[end[side] for end in ends]]) for side in (0, 1)]
        label = components(count, a, b)
        reached = np.zeros(count, bool)
        reached[label[begun]] = True
        label = np.where(reached[label], label, -1)
        return [Through(mappings, label[one]) for mappings, one in found], label

    def _unclean(self) -> set[int]:
        """The classes with a node that some op has no mapping for, or several mappings of one op.

        What was asked at no node of a class is forgotten.
        """
        import numpy as np

        bad = np.zeros(len(self.label) + 1, bool)
        of_kinds = zip(self.graph.kinds, self.graph.rows, self._asked, self.through, strict=True)
        for sig, rows, asked, (mappings, classes) in of_kinds:
            refused = [at for at, mapping in asked.items() if mapping is None]
            labels = self.label[self._nodes(sig, rows, refused)]
            bad[labels] = True
            if len(mappings) > 1:
                sides = np.sort(classes, axis=1)
                bad[sides[:, 1:][sides[:, 1:] == sides[:, :-1]]] = True
            reached = {id(mappings[k]) for k in np.flatnonzero(np.any(classes >= 0, axis=0)).tolist()}
            known = {refused[k] for k in np.flatnonzero(np.any(labels >= 0, axis=0)).tolist()}
            for at in [at for at, mapping in asked.items() if at not in known and id(mapping) not in reached]:
                del asked[at]
        return set(np.flatnonzero(bad[:-1]).tolist())

    @cached_property
    def at(self) -> list[dict[Shard, int]]:
        """Per value the class of each sub-dimension that is in one."""
        labels = self.label.tolist()
        rows = zip(self.graph.shapes, self._first.tolist(), strict=True)
        return [{p: c for p, k in self._places[s].items() if (c := labels[first + k]) >= 0} for s, first in rows]

    def of(self, value: int, split: Shard) -> int | None:
        """The class of a sub-dimension of a value, if it is in one."""
        place = self._places[self.graph.shapes[value]].get(split)
        c = -1 if place is None else int(self.label[self._first[value] + place])
        return c if c >= 0 else None

    def nodes(self, values: Sequence[int] | np.ndarray) -> Iterator[tuple[Shard, np.ndarray, np.ndarray]]:
        """For each split and shape those of the values that have it in a class, and these classes."""
        import numpy as np

        values = np.asarray(values, np.int64)
        shapes, of_value = self.graph.numbered_shapes
        of_values = of_value[values]
        for shape, number in shapes.items():
            here = values[of_values == number]
            for split, place in self._places[shape].items() if len(here) else ():
                found = self.label[self._first[here] + place]
                yield split, here[found >= 0], found[found >= 0]

    @cached_property
    def varying(self) -> list[bool]:
        """Which values have a sub-dimension in a class."""
        import numpy as np

        values = np.searchsorted(self._first, np.flatnonzero(self.label >= 0), "right") - 1
        found = np.zeros(len(self._first), bool)
        found[values] = True
        return found.tolist()

    @cached_property
    def mappings(self) -> list[Sequence[tuple[FactorMapping, int]]]:
        """Per op its mappings with their class."""
        return self.grouped({c: c for c in set(self.label.tolist()) if c >= 0})

    def grouped(self, group: Mapping[int, int]) -> list[Sequence[tuple[FactorMapping, int]]]:
        """Per op its mappings of classes that have a group, with that. Ops with the same share the list."""
        import numpy as np

        of = np.full(len(self.label) + 1, -1)
        of[list(group)] = list(group.values())
        found: list[Sequence[tuple[FactorMapping, int]]] = [()]
        number = np.zeros(len(self.graph.sigs), np.int64)
        for rows, (mappings, classes) in zip(self.graph.rows, self.through, strict=True):
            groups = of[classes]
            if np.any(groups >= 0):
                first, kind = distinct_rows(groups)
                number[rows.ops] = len(found) + kind
                for row in groups[first].tolist():
                    found.append([(m, g) for m, g in zip(mappings, row, strict=True) if g >= 0])
        return [found[k] for k in number.tolist()]

    def hold_for(self, n: int) -> bool:
        """Whether the classes are the same for an axis of n devices: every signature has the same mappings then."""
        return all(
            sig.mapping(k, split, n, self.outside) is mapping
            for sig, asked in zip(self.graph.kinds, self._asked, strict=True)
            for (k, split), mapping in asked.items()
        )

    def inside(self, outer: int, n: int) -> dict[int, FactorMapping] | None:
        """The classes' mappings for an axis of n devices that splits inside `outer` outer parts.

        Maps the ids of the mappings here to the mappings there; None if some signature has other mappings there.
        """
        there: dict[int, FactorMapping] = {}
        for sig, asked in zip(self.graph.kinds, self._asked, strict=True):
            for (k, split), mapping in asked.items():
                moved = sig.mapping(k, split.nested(outer), n, outer)
                if mapping is not None:
                    if moved is None or moved != mapping.nested(outer):
                        return None
                    there[id(mapping)] = moved
                elif moved is not None:
                    return None
        return there

    def clashing(self, n: int, taken: Classes, m: int) -> set[int]:
        """The classes, split n ways, that overlap a sub-dimension `taken` by an earlier mesh axis of m devices, or that
        have halos of a dim of it."""
        import numpy as np

        found = np.zeros(len(self.label) + 1, bool)
        wide, theirs_wide = (np.isin(x.label, list(x.with_halos)) for x in (self, taken))
        shapes, of_value = self.graph.numbered_shapes
        for shape, number in shapes.items():
            values = np.flatnonzero(of_value == number)
            for split, k in self._places[shape].items():
                for other, i in taken._places[shape].items():
                    if split.dim == other.dim:
                        mine, theirs = self._first[values] + k, taken._first[values] + i
                        both = (self.label[mine] >= 0) & (taken.label[theirs] >= 0)
                        if not split.overlaps(n, other, m):
                            both &= wide[mine] | theirs_wide[theirs]
                        found[self.label[mine[both]]] = True
        return set(np.flatnonzero(found).tolist())

    @cached_property
    def with_halos(self) -> frozenset[int]:
        """The classes of which some op takes an operand with a halo."""
        wide = [
            classes[:, k]
            for mappings, classes in self.through
            for k, mapping in enumerate(mappings)
            if mapping.has_halo
        ]
        return frozenset({c for row in wide for c in row.tolist() if c >= 0})

    def members(self) -> dict[int, list[Node]]:
        """The nodes of each class."""
        result: dict[int, list[Node]] = {}
        for v, row in enumerate(self.at):
            for split, c in row.items():
                result.setdefault(c, []).append((v, split))
        return result


def classes_from(graph: Graph, n: int, starts: tuple[Node, ...], outside: int = 1) -> Classes:
    """As `Classes(graph, n, starts, outside)`, cached with the graph: the same classes often hold for several n."""
    key = outside, *starts
    return _known(graph, n, key) or _keep(graph, key, Classes(graph, n, starts, outside))


def all_classes(graph: Graph, n: int, outer: int = 1) -> Classes:
    """The classes of all dims, split inside `outer` parts, cached with the graph. Weights alone would miss heads."""
    splits = {
        shape: tuple([Shard(dim, outer) for dim, size in enumerate(shape) if size % (outer * n) == 0])
        for shape in graph.numbered_shapes[0]
    }
    key = "all", *splits.values()
    return _known(graph, n, key) or _keep(graph, key, Classes(graph, n, splits))


def _known(graph: Graph, n: int, key: object) -> Classes | None:
    return next((c for c in graph.cache.get((Classes, key), ()) if c.hold_for(n)), None)


def _keep(graph: Graph, key: object, classes: Classes) -> Classes:
    graph.cache.setdefault((Classes, key), []).append(classes)
    return classes


def components(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For each of `count` nodes the first of those with which it is connected by edges from a[i] to b[i].

    Every node points to the first node that one of its edges leads to, then to the end of its chain; edges between ends
    are treated in the same way, until there is none.
    """
    import numpy as np

    first = np.arange(count)
    while len(a):
        np.minimum.at(first, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(further := first[first], first):
            first = further
        a, b = first[a], first[b]
        apart = a != b
        a, b = a[apart], b[apart]
    return first


def _sizes(split: Shard) -> tuple[int, int, int]:
    return split.dim, split.outer, split.shift


def _by_slots(row: tuple[list[Node], FactorMapping]) -> list[tuple[int, int, int]]:
    return [(k, p.dim, p.outer) for k, p in row[0]]
