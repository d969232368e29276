"""Assignments by a mask (`h[mask] = x`): torch's exporter writes them as a scatter to the positions where the mask is
true, whose number depends on data:

    ScatterND(h, Transpose(NonZero(Expand(mask, Shape(h)))), Reshape(Expand(x, Concat(ReduceSum(mask), rest))))

They become one node, `MASKED_WRITE` of the domain `OWN`, with the operands h, mask, x, rest and Shape(h), of which the
last two may be left out. Its rule (rules_index.py) checks their shapes, and chooses between x and h.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import onnx

OWN, MASKED_WRITE = "distir", "MaskedWrite"
INSTEAD = {"NonZero": "how many it selects depends on data: torch.where(mask, a, b) chooses element by element"}
"""For ops that are not supported what to write in their place."""
_IN_PLACE = ("Identity", "Reshape", "Unsqueeze")
"""Ops that keep all elements in their order."""


def join_masked_writes(graph: onnx.GraphProto) -> None:
    """Replace scatters to the positions of a mask, in place. Others stay as they are."""
    scatters = [node for node in graph.node if node.op_type == "ScatterND"]
    made = {name: node for node in graph.node for name in node.output} if scatters else {}
    replaced: list[str] = []
    for node in scatters:
        replaces = all([a.s == b"none" for a in node.attribute])
        if replaces and (found := _operands(node, made)) is not None:
            replaced += node.input[1:]
            node.op_type, node.domain = MASKED_WRITE, OWN
            node.input[:] = [node.input[0], *found]
            del node.attribute[:]
    if replaced:
        _drop(graph, replaced, made)


def _operands(node: onnx.NodeProto, made: Mapping[str, onnx.NodeProto]) -> tuple[str, str, str, str] | None:
    """The operands of a scatter to the positions of a mask but the first; None if it is no such scatter."""
    positions = _maker(node.input[1], made, "Identity", "Cast")
    if (
        positions is None
        or positions.op_type != "Transpose"
        or any(list(a.ints) != [1, 0] for a in positions.attribute)
    ):
        return None
    nonzero, written = _maker(positions.input[0], made), _maker(node.input[2], made, *_IN_PLACE)
    if nonzero is None or written is None or (nonzero.op_type, written.op_type) != ("NonZero", "Expand"):
        return None
    mask, shape = nonzero.input[0], ""
    if (expand := _maker(mask, made)) is not None and expand.op_type == "Expand":
        mask, shape = expand.input
    sizes = _maker(written.input[1], made, "Identity", "Cast")
    count, *rest = sizes.input if sizes is not None and sizes.op_type == "Concat" else [written.input[1]]
    total = _maker(count, made, *_IN_PLACE, "Cast")
    if len(rest) > 1 or total is None or total.op_type != "ReduceSum" or not _is_of_all(total):
        return None
    if _source(total.input[0], made, *_IN_PLACE, "Cast") != _source(mask, made, *_IN_PLACE, "Cast"):
        return None
    return mask, written.input[0], rest[0] if rest else "", shape


def _is_of_all(total: onnx.NodeProto) -> bool:
    """Whether a sum has no axes, and without them is of all elements."""
    return not any(total.input[1:]) and not any(a.ints or a.i for a in total.attribute if a.name != "keepdims")


def _source(name: str, made: Mapping[str, onnx.NodeProto], *through: str) -> str:
    """What a name is made from by these ops alone."""
    while (node := made.get(name)) is not None and node.op_type in through:
        name = node.input[0]
    return name


def _maker(name: str, made: Mapping[str, onnx.NodeProto], *through: str) -> onnx.NodeProto | None:
    """The node that makes a name, but for these ops behind it."""
    return made.get(_source(name, made, *through))


def _drop(graph: onnx.GraphProto, names: list[str], made: Mapping[str, onnx.NodeProto]) -> None:
    """Remove the nodes that made these names, and what only they needed."""
    used = Counter([name for g in _graphs(graph) for node in g.node for name in node.input])
    used.update([info.name for g in _graphs(graph) for info in g.output])
    gone: set[str] = set()
    while names:
        node = made.get(names.pop())
        if node is not None and gone.isdisjoint(node.output) and not any([used[name] for name in node.output]):
            gone.update(node.output)
            used.subtract(node.input)
            names += node.input
    for k in reversed(range(len(graph.node))):
        if graph.node[k].output and gone.issuperset(graph.node[k].output):
            del graph.node[k]


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _graphs(inner)
