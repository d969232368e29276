"""Building the distributed program: every op on the mesh, placed as decided, with the collectives that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distir.ir.device import TIME, Mesh
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.type import REPLICATE, SUM, Partial, Placement, Replicate, Shard, Tensor
from distir.ops.rules import tensor
from distir.transforms.graph import Graph
from distir.transforms.place import Placed

_COLLECTIVE = {
    (Partial, Replicate): "MPIAllreduce",
    (Partial, Shard): "MPIReduceScatter",
    (Shard, Replicate): "MPIAllgather",
    (Shard, Shard): "MPIAlltoall",
    (Replicate, Shard): "LocalSlice",
}


def shard(graph: Graph, mesh: Mesh, decisions: Mapping[str, Placed]) -> Function:
    """The graph's function on `mesh`, with the placements decided for each axis; the others stay replicated.

    The result is typed on the time axis but not scheduled: `MPIAllreduce(axis="mb")` stands for a sum over time.
    """
    return _Builder(graph, mesh, decisions).build()


class _Builder:
    def __init__(self, graph: Graph, mesh: Mesh, decisions: Mapping[str, Placed]) -> None:
        self.graph, self.mesh = graph, mesh
        self.decisions = {a: decisions[a] for a in mesh.axes if a in decisions}
        self.maker = FunctionMaker(graph.function.name)
        self.moved: dict[tuple[Value, str, Placement], Value] = {}
        self.env: dict[Value, Value] = {}
        self.ops: dict[Op, Op] = {}
        self.of: dict[Value, Op | None] = {}  # the forward op that a value's op differentiates

    def build(self) -> Function:
        source = self.graph.function
        for i, v in enumerate(source.inputs):
            self.env[v] = self.maker.add_input_value(v.name, self._input_type(i, v), v.role)
        for j, op in enumerate(source.ops):
            self._op(j, op)
        outputs = [self._whole(self.env[v]) for v in source.outputs]
        self.maker.set_outputs(outputs)
        place = dict(zip(source.outputs, outputs, strict=True))
        self.maker.updates = {place[a]: self.env[b] for a, b in source.updates.items()}
        self.maker.sources = {place[v]: shape for v, shape in source.sources.items()}
        return self.maker.finalize()

    def _input_type(self, i: int, v: Value) -> Tensor:
        placements = [
            self.decisions[a].inputs.get(i, REPLICATE) if a in self.decisions else REPLICATE for a in self.mesh.axes
        ]
        return Tensor.whole(tensor(v).dtype, self.graph.shapes[i], self.mesh, placements)

    def _op(self, j: int, op: Op) -> None:
        ins = [self.env[v] for v in op.inputs]
        free: list[tuple[str, Shard]] = []
        for axis, placed in self.decisions.items():
            strand = placed.strands[j]
            if strand is None:
                ins = self._pass(self.graph.sigs[j].linear, ins, axis)
                continue
            ins = [self.to(v, axis, want) for v, want in zip(ins, strand.ins, strict=True)]
            if all(p is REPLICATE for p in strand.ins) and isinstance(strand.outs[0], Shard):
                free.append((axis, strand.outs[0]))
        attributes = dict(op.attributes)
        if not ins:
            attributes["device"] = self.mesh
        if free:
            attributes["place"] = tuple(free)
        names = [v.name for v in op.outputs]
        of = self.ops.get(op.of) if op.of else None
        changed = len(attributes) != len(op.attributes)
        self.maker.add_op(op.spec, None, ins, attributes if changed else op.attributes, (), names, of)
        made = self.ops[op] = self.maker.ops[-1]
        for v, w in zip(op.outputs, made.outputs, strict=True):
            self.of[w] = of
            for axis, placed in self.decisions.items():
                reduced = self.graph.index[v] in placed.reduce and isinstance(tensor(w).on(axis), Partial)
                if reduced and not self._sums_in_time(w):
                    w = self.to(w, axis, REPLICATE)
            self.env[v] = w

    def _sums_in_time(self, v: Value) -> bool:
        """A sum over microbatches is reduced over devices once, where it is used: when it is complete."""
        return TIME in self.mesh.axes and isinstance(tensor(v).on(TIME), Partial)

    def _pass(self, linear: Sequence[frozenset[int]], ins: list[Value], axis: str) -> list[Value]:
        """Operands for an op that is not split: a Partial passes where the op is linear, all else is made whole."""
        have = [tensor(v).on(axis) for v in ins]
        partial = frozenset(k for k, p in enumerate(have) if p is SUM)
        if partial and partial in linear and all(p is SUM or p is REPLICATE for p in have):
            return ins
        return [self.to(v, axis, REPLICATE) for v in ins]

    def _whole(self, v: Value) -> Value:
        """An output: sums are paid for, and microbatches joined; splits over devices stay."""
        for axis in self.mesh.axes:
            p = tensor(v).on(axis)
            if isinstance(p, Partial) or (axis == TIME and p is not REPLICATE):
                v = self.to(v, axis, REPLICATE)
        return v

    def to(self, v: Value, axis: str, want: Placement) -> Value:
        """`v` placed as `want` along `axis`; each conversion is made once."""
        have = tensor(v).on(axis)
        if have is want:
            return v
        key = v, axis, want
        if key not in self.moved:
            if isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim:
                self.moved[key] = self.to(self.to(v, axis, REPLICATE), axis, want)
            else:
                attributes: dict[str, object] = {"axis": axis}
                if isinstance(want, Shard):
                    attributes["dim"] = want.dim
                    if want.outer != 1:
                        attributes["outer"] = want.outer
                of = self.of.get(v)
                new = self.maker.add_op(_COLLECTIVE[type(have), type(want)], v.name, [v], attributes, (), None, of)
                self.of[new] = of
                self.moved[key] = new
        return self.moved[key]
