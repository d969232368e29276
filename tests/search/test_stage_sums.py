"""What a cut's stages compute, save and hold is what the program has whose copies are on their own stages."""

import random
from collections import defaultdict

import numpy as np
import pytest

from distir.api.model import load
from distir.executor.cost_model import CostModel
from distir.hardware import load_cluster
from distir.ir.errors import DistirError
from distir.ir.type import Tensor
from distir.search.exact import Setting
from distir.search.placed_program import place_template
from distir.search.segments import made_once
from distir.search.space import space
from distir.search.stage_bounds import Cuts
from distir.search.stage_sums import StageSums
from distir.transforms.pipeline.copies import on_own_stages
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, phases
from distir.transforms.pipeline.stages import staged

MODELS = (
    "gpt:layers=3,hidden=64,heads=4,vocab=100,seq=32",
    "gpt:layers=3,hidden=64,heads=4,vocab=1000,seq=32,tied=0,dropout=0.1",
    "llama:layers=4,hidden=64,heads=4,kv_heads=2,vocab=64,seq=32",
    "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=32,experts=2,ffn=64",
)


def cuts(model):
    """Random candidates of a model with their placed programs, stages and types at their own sizes."""
    topology = load_cluster("dgx-a100", devices=8)
    step = load(model, {"batch": 8}, loss="cross-entropy", optimizer="adamw", precision="bf16")
    setting = Setting(step, 8, CostModel(topology), 0.0)
    candidates = [c for c in space(step.function, 8, 8, topology).candidates if c.pp > 1]
    for c in random.Random(0).sample(candidates, 24):
        try:
            placed = place_template(setting, c)
            found = Cuts(setting, placed)
            numbered = found._forward_stages(c)
        except DistirError:
            continue
        forward = dict(zip([placed.timed[i] for i in found._forward], numbered, strict=True))
        _, stage = staged(placed.function, c.pp * c.chunks, placed.rules, forward)
        assert found._stages(numbered, c.pp * c.chunks) == [stage[op] for op in placed.timed]
        yield placed, stage, c.pp * c.chunks, found._sizes(c)


def plainly(placed, stage, parts, sized):
    """Bytes held, made once, saved and summed, by stage, and how many ops run: one value after another."""
    function, at = on_own_stages(placed.function, {op: s for op, s in stage.items() if op in set(placed.timed)})
    phase = phases(function, placed.rules)
    ops = [op for op in function.ops if phase[op] in (FORWARD, BACKWARD)]
    maker = {v: op for op in ops for v in op.outputs}
    everything = {v: op for op in function.ops for v in op.outputs}
    saved, held, once, sums, count = (defaultdict(float) for _ in range(5))
    kept, home = set(), {}
    for op in ops:
        s = at[op]
        count[s] += 1
        for v in op.inputs:
            if v not in maker:
                root, source = made_once(v, everything, phase)
                if phase[op] == BACKWARD and root is not None and (root, s) not in kept:
                    kept.add((root, s))
                    once[s] += sized(root.type).bytes
                if phase[op] == FORWARD and source is not None:
                    home[source] = min(home.get(source, s), s)
    for v, s in home.items():
        held[s] += sized(v.type).bytes if v.kind == "parameter" else 0
    done = set()
    for owned, state in placed.updates:
        mine = [home[v] for v in owned if v in home]
        if mine:
            held[max(mine)] += sum([sized(v.type).bytes for v in state - done])
            done |= state
    here = defaultdict(set)
    for op in ops:
        if phase[op] == FORWARD:
            here[at[op]].update(op.inputs, op.outputs)
    kept = set()
    for op in ops:
        if phase[op] != BACKWARD:
            continue
        for v in op.inputs:
            while v in maker and maker[v].spec.alias and phase[maker[v]] == FORWARD and at[maker[v]] == at[op]:
                v = maker[v].inputs[0]
            if v in maker and phase[maker[v]] == FORWARD and v in here[at[op]] and isinstance(v.type, Tensor):
                kept.add((v, at[op]))
    for v, s in kept:
        saved[s] += sized(v.type).bytes if v.type.moves else 0
    for op in placed.sums:
        made = maker.get(op.inputs[0])
        if made is not None and phase[made] == BACKWARD:
            sums[at[made]] += sized(op.outputs[0].type).bytes
    return [(held[s], once[s], saved[s], sums[s], count[s]) for s in range(parts)]


@pytest.mark.parametrize("model", MODELS)
def test_sums_are_those_of_the_program(model):
    compared = 0
    for placed, stage, parts, sized in cuts(model):
        sums = StageSums(placed, phases(placed.function, placed.rules))
        cut = sums.cut([stage[op] for op in placed.timed], parts)
        memory = sums.memory(cut, lambda t, sized=sized: sized(t).bytes)
        ones = sums.compute(cut, np.ones(len(placed.kinds)))
        want = plainly(placed, stage, parts, sized)
        assert [(*x, n) for x, n in zip(memory, ones, strict=True)] == want
        compared += 1
    assert compared > 10
