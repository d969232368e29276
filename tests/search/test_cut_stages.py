"""The programs of a cut's passes, what they hand on, gather and reduce, against a walk over the ops one by one."""

import random
from collections import defaultdict

import pytest

from distir.api.model import load
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir.errors import DistirError
from distir.ir.type import Tensor
from distir.search import cut_stages
from distir.search.cut_stages import CellOp, CutStages, Handed, StagePrograms
from distir.search.exact import Setting
from distir.search.placed_program import of_replicas, place_template
from distir.search.segments import axis_of
from distir.search.shared_buckets import may_share
from distir.search.space import space
from distir.search.stage_bounds import Cuts
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, FREE, PROLOGUE, ends_time, phases

MODELS = (
    "gpt:layers=3,hidden=64,heads=4,vocab=1000,seq=32,tied=0,dropout=0.1",
    "llama:layers=4,hidden=64,heads=4,kv_heads=2,vocab=64,seq=32",
    "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32,experts=2,ffn=64",
)


def cut_programs(model, count=20, has=lambda c: c.pp > 1 or c.zero):
    """Random candidates of a model: their placed programs, phases, cuts and the numbers of these."""
    topology = load_cluster("dgx-a100", devices=8)
    step = load(model, {"batch": 8}, loss="cross-entropy", optimizer="adamw", precision="bf16")
    setting = Setting(step, 8, CostModel(topology), 0.0)
    several = [c for c in space(step.function, 8, 8, topology).candidates if has(c)]
    for c in random.Random(3).sample(several, count):
        try:
            placed = place_template(setting, c)
            numbered = Cuts(setting, placed)._cut(c)
        except DistirError:
            continue
        phase = phases(placed.function, placed.rules)
        yield placed, phase, numbered, StagePrograms(placed, phase)


class Walked:
    """A cut, walked over op by op."""

    def __init__(self, placed, phase, cut):
        self.placed, self.phase, self.parts = placed, phase, cut.parts
        self.stage = dict(zip(placed.timed, cut.stage.tolist(), strict=True))
        runs = dict(zip(placed.timed, cut.runs.tolist(), strict=True))
        self.kind = dict(placed.kind)
        for op, whole in placed.parts.items():  # what is fused only if its parts are together
            if (self.stage[op], runs[op]) != (self.stage[whole], runs[whole]):
                self.kind[whole] = 0
        self.ops, self.inputs = defaultdict(list), {}
        for op in placed.timed:
            if runs[op]:
                self.inputs[op] = [self.seen(v, self.stage[op]) for v in op.inputs]
                self.ops[phase[op], self.stage[op]].append(op)
        self.number = {at: self.numbers(at) for at in [(w, s) for w in (FORWARD, BACKWARD) for s in range(cut.parts)]}

    def seen(self, v, here):
        copied = self.placed.copied
        return copied[v] if v in copied and self.stage[self.placed.maker[v]] != here else v

    def of(self, v):
        op = self.placed.maker.get(v)
        return (self.phase[op], self.stage[op]) if op in self.inputs else None

    def numbers(self, at):
        number, made, other = {}, 0, 0
        for op in self.ops[at]:
            for v in self.inputs[op]:
                if v not in number:
                    other -= 1
                    number[v] = other
            for v in op.outputs:
                number[v] = made
                made += 1
        return number

    def passes(self, at):
        placed, number = self.placed, self.number[at]
        used = {v for op in self.ops[at] for v in self.inputs[op]}
        shared = may_share(self.ops[at], placed.bucketed, True)
        return tuple(
            CellOp(
                0 if op in shared else self.kind[op],
                op in placed.free or op in shared,
                op in placed.parts.values(),
                not used.isdisjoint(op.outputs),
                tuple(number[v] for v in self.inputs[op]),
                len(op.outputs),
            )
            for op in self.ops[at]
        )

    def hands(self, at):
        after = at[0], at[1] + (1 if at[0] == FORWARD else -1)
        if after not in self.number:
            return ()
        taken = dict.fromkeys(v for op in self.ops[after] for v in self.inputs[op])
        given = [v for v in taken if self.of(v) == at and isinstance(v.type, Tensor) and v.type.moves]
        return tuple(Handed(v.type, self.number[at][v], self.number[after][v]) for v in given)

    def replicas(self, axis, price):
        gathered, reduced = defaultdict(list), defaultdict(list)
        made = [(at, k, op) for at, ops in self.ops.items() for k, op in enumerate(ops)]
        origin = {v: (s, k) for (word, s), k, op in made if word == BACKWARD for v in op.outputs}
        summed = {op.inputs[0] for op in self.placed.function.ops if ends_time(op)}
        for op in self.placed.reducing:
            if op.inputs[0] not in origin:
                continue
            (s, k), along = origin[op.inputs[0]], axis_of(op)
            if along == axis and op.spec.comm.sums:
                reduced[self.phase[op], s].append((k, price(op.spec.name, op.inputs[0].type, op.outputs[0] in summed)))
            if (along is not None and of_replicas(along)) or ends_time(op):
                origin.update(dict.fromkeys(op.outputs, (s, k)))
        there = set()
        for at, k, op in made:
            for g in dict.fromkeys(g for v in self.inputs[op] for g in self.placed.gathers.get(v, ())):
                if axis != "dp" or (at, g) in there:
                    continue
                there.add((at, g))
                word = at[0] if self.phase[g] == FREE else PROLOGUE if at[0] == FORWARD else None
                if word is not None:
                    gathered[word, at[1]].append((k, price(g.spec.name, g.outputs[0].type, False)))
        return [{at: sorted(rows) for at, rows in found.items()} for found in (gathered, reduced)]


def price(name, t, summed):
    return t.bytes, name, summed


def differences(model):
    """How many passes and collectives there were, and how many are not as walked."""
    count = wrong = 0
    for placed, phase, numbered, programs in cut_programs(model):
        walked, found = Walked(placed, phase, numbered), CutStages(programs, numbered)
        for at in walked.number:
            wrong += (found.passes[at], found.hands[at]) != (walked.passes(at), walked.hands(at))
            count += 1
        for axis in placed.sent:
            moved = [{at: sorted(x) for at, x in one.items()} for one in found.replicas(axis, price)]
            wrong += moved != walked.replicas(axis, price)
            count += sum(map(len, moved))
    return count, wrong


@pytest.mark.parametrize("model", MODELS)
def test_stages_are_those_of_a_walk(model):
    count, wrong = differences(model)
    assert count > 100
    assert wrong == 0


def test_equal_passes_are_one_object():
    model = "llama:layers=8,hidden=64,heads=4,kv_heads=2,vocab=64,seq=32"
    for _, _, numbered, programs in cut_programs(model, 1, lambda c: c.pp == 8 and c.chunks == 1):
        one, other = (CutStages(programs, numbered).passes for _ in range(2))
        assert all(one[at] is other[at] for at in one)
        assert len({id(x) for x in one.values()}) < len(one)


def test_sums_that_are_not_followed_are_seen(monkeypatch):
    """Seeded: what is reduced once a step, of sums over microbatches, is not traced to its stage."""
    monkeypatch.setattr(cut_stages, "ends_time", lambda op: False)
    assert differences(MODELS[0])[1]
