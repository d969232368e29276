"""Recomputation: the backward pass recomputes values that the forward pass would have to save.

Also called activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). Which values
are saved is chosen by cost, on the placed program:

- `gathers`: only what is all-gathered from saved shards, as with sequence parallelism;
- `attention`: that, and attention's scores and probabilities: what lies between two products of activations. This is
  what Megatron-LM calls selective (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
  2022, section 5);
- `selective`: what is cheap to compute for its size is recomputed, such as scores and softmax of attention, norms and
  activation functions, and what is all-gathered from saved shards;
- `full`: of repeated blocks only the values that cross from one to the next are saved;
- `products`: of repeated blocks that, what attention makes, and what the first, third, fifth, .. product with a weight
  makes. This is what torchtitan calls selective by op (github pytorch/torchtitan, parallelize_llama.py, `_save_list`);
- `all-products`: that, needed or not: PyTorch's eager mode keeps what the policy names until the block's backward pass
  (github pytorch/pytorch, torch/utils/checkpoint.py, `_CachingTorchDispatchMode`), a compiler what is needed;
- a number of bytes: `selective`, and as many blocks in full as it takes for what a device saves of one microbatch.

A recomputed op is a copy of the forward op just before the first op that needs it, with that op as its `of`: so it runs
in the backward pass, on its forward op's stage. Collectives inside blocks are repeated, as in Megatron-LM.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from distir.ir.cached import cached
from distir.ir.errors import InfeasibleError
from distir.ir.function import Function, FunctionMaker, Op, Value
from distir.ir.type import Tensor
from distir.ops.rules import shape_of, tensor
from distir.transforms.pipeline.canonical import canonical_order
from distir.transforms.pipeline.held import held
from distir.transforms.pipeline.phases import BACKWARD, FORWARD, FREE, phases
from distir.transforms.pipeline.stages import FLOP_PER_BYTE, plain_cost

WORDS = ("none", "gathers", "attention", "selective", "full", "products", "all-products")
"""What to recompute, from nothing to all, but for bytes."""
CHEAP = 8.0
"""An op is cheap if it costs no more than moving this many times the bytes of its result through memory."""

_FEW = 8
"""Among so few parts between cuts, blocks are looked for that begin and end at any two cuts."""


def recompute(function: Function, how: str, stages: int = 1) -> Function:
    """The placed program with values recomputed in the backward pass: `how` is one of `WORDS`, or bytes.

    The bytes are what a device may hold saved for one microbatch, if `stages` stages save equally much. Raises
    InfeasibleError if so little cannot be reached.
    """
    if how == "none":
        return function
    saving = _saving(function)
    if how == "gathers":
        again = _gathered(saving)
    elif how == "attention":
        again = _gathered(saving) | _between_products(saving)
    elif how == "selective":
        again = _cheap(saving)
    elif how == "full":
        again = _blocks_again(saving, saving.blocks)
    elif how in ("products", "all-products"):
        kept = _of_products(function, saving)
        again = _blocks_again(saving, saving.blocks) - kept
        made = _with_copies(function, saving, again)
        if how == "products":
            return made
        unneeded = kept - _still_saved(saving, again)
        return held(made, {v: op for op in saving.forward for v in op.outputs if v in unneeded})
    else:
        again = _within(saving, float(how) * stages)
    return _with_copies(function, saving, again)


def repeated_blocks(function: Function) -> Sequence[Sequence[Op]]:
    """The repeated blocks of the forward ops of a placed program; none if no two are alike."""
    return _saving(function).blocks


class _Saving(NamedTuple):
    """What the backward pass of a placed program needs of the forward pass."""

    forward: Sequence[Op]
    """In an order that does not depend on names."""
    maker: Mapping[Value, Op]
    """The op of each value that the forward pass makes."""
    needed: Mapping[Value, None]
    """Those of these values that backward ops use."""
    backward: frozenset[Op]
    blocks: Sequence[Sequence[Op]]
    """Repeated blocks of forward ops."""


@cached
def _saving(function: Function) -> _Saving:
    phase = phases(function)
    forward = canonical_order(function, [op for op in function.ops if phase[op] == FORWARD])
    maker = {v: op for op in forward for v in op.outputs}
    backward = frozenset([op for op in function.ops if phase[op] == BACKWARD])
    needed = dict.fromkeys([v for op in function.ops if op in backward for v in op.inputs if v in maker])
    free = {v: op for op in function.ops if phase[op] == FREE for v in op.outputs}
    return _Saving(forward, maker, needed, backward, _alike(function, forward, maker, free))


def _root(v: Value, maker: Mapping[Value, Op]) -> Value:
    """The value in whose buffer a value lies."""
    while v in maker and maker[v].spec.alias:
        v = maker[v].inputs[0]
    return v


def _bytes(v: Value) -> float:
    return float(v.type.bytes) if isinstance(v.type, Tensor) else 0.0


def _whole_bytes(v: Value) -> float:
    """The bytes of a value on all devices, of all microbatches: what `plain_cost` is a cost of."""
    return float(math.prod(shape_of(v)) * tensor(v).dtype.size)


def saved_bytes(saving: _Saving, again: Collection[Value]) -> float:
    """The bytes that a device saves of one microbatch, on all stages together."""
    roots = {_root(v, saving.maker) for v in _still_saved(saving, again)}
    return sum([_bytes(v) for v in roots if v in saving.maker])


def _still_saved(saving: _Saving, again: Collection[Value]) -> set[Value]:
    """What must be saved if these values are recomputed: the other operands of backward ops and of copies."""
    found: set[Value] = set()
    seen: set[Value] = set()
    todo = list(saving.needed)
    while todo:
        v = todo.pop()
        if v in seen or v not in saving.maker:
            continue
        seen.add(v)
        if v in again or saving.maker[v].spec.alias:
            todo += saving.maker[v].inputs
        else:
            found.add(v)
    return found


# ---- by cost


def _cheap(saving: _Saving) -> set[Value]:
    """The values that are cheap to compute from available ones: saved ones, or recomputed ones."""
    again: set[Value] = set()
    there: set[Value] = set()  # saved, or recomputed
    for op in saving.forward:
        for v in op.outputs:
            if v not in saving.needed:
                continue
            path, cost = _path(saving, op, there)
            if all([_repeatable(step) for step in path]) and cost <= CHEAP * FLOP_PER_BYTE * _whole_bytes(v):
                again.update([w for step in path for w in step.outputs])
                there.update([w for step in path for w in step.outputs])
            there.add(v)
    return again


def _path(saving: _Saving, op: Op, there: Collection[Value]) -> tuple[list[Op], float]:
    """The ops that must run again for `op` to, itself the last, and what they cost."""
    path: dict[Op, None] = {}
    todo = [op]
    while todo:
        step = todo.pop()
        if step in path:
            continue
        path[step] = None
        todo += [saving.maker[v] for v in step.inputs if v in saving.maker and v not in there]
    return [*path], sum([plain_cost(step) for step in path])


def _repeatable(op: Op) -> bool:
    """Whether an op may be cheap: communication is not, except all-gathers of saved shards."""
    return op.spec.comm is None or op.spec.alias or _gathers(op)


def _gathers(op: Op) -> bool:
    """Whether an op all-gathers shards."""
    return op.spec.comm is not None and op.spec.comm.gathers


# ---- by dataflow


def _gathered(saving: _Saving) -> set[Value]:
    """The values that are all-gathered from shards that the forward pass makes."""
    return {v for op in saving.forward if _gathers(op) and op.inputs[0] in saving.maker for v in op.outputs}


def _between_products(saving: _Saving) -> set[Value]:
    """The values from one product of activations (queries and keys) up to another (with values), with no other product
    in between."""
    products = {op for op in saving.forward if _contracts(op)}
    ends = [op for op in products if all([v in saving.maker for v in op.inputs])]
    after = {v for op in ends for v in op.outputs}
    for op in saving.forward:
        if op not in products and not after.isdisjoint(op.inputs):
            after.update(op.outputs)
    between = {v for op in ends for v in op.inputs if v in after}
    for op in reversed(saving.forward):
        if op not in products and not between.isdisjoint(op.outputs):
            between.update(op.outputs)
            between.update([v for v in op.inputs if v in after])
    return between


def _contracts(op: Op) -> bool:
    """Whether an op multiplies two operands and sums the products."""
    f = op.spec.factors(op.attributes, [shape_of(v) for v in op.inputs]) if op.spec.comm is None else None
    summed = [name for name, kind in f.kinds.items() if kind == "sum"] if f is not None else []
    return f is not None and any(sum(name in row for row in f.ins) > 1 for name in summed)


# ---- in blocks


def _of_products(function: Function, saving: _Saving) -> set[Value]:
    """What attention makes in repeated blocks, and of products with a weight the first, the third and so on."""
    at = {op: k for k, op in enumerate(function.ops)}
    found: set[Value] = set()
    for block in saving.blocks:
        products = 0
        for op in sorted(block, key=lambda op: at[op]):
            weighs = _contracts(op) and any([v not in saving.maker for v in op.inputs])
            products += weighs
            if op.spec.kernel == "attention" or (weighs and products % 2):
                found.update(op.outputs)
    return found


def _blocks_again(saving: _Saving, blocks: Sequence[Sequence[Op]]) -> set[Value]:
    """All values computed in these blocks, except those used outside."""
    block_of = {op: k for k, block in enumerate(blocks) for op in block}
    made = {v: k for op, k in block_of.items() for v in op.outputs}
    leaving = {v for op in saving.forward for v in op.inputs if v in made and made[v] != block_of.get(op)}
    return made.keys() - leaving


def _alike(
    function: Function, forward: Sequence[Op], maker: Mapping[Value, Op], free: Mapping[Value, Op]
) -> list[list[Op]]:
    """The repeated blocks of forward ops, cut where the fewest bytes cross; empty if no two blocks are alike."""
    kinds: dict[object, int] = {}
    row = [
        kinds.setdefault(
            (op.spec, op.attributes.form, tuple([v.type for v in op.inputs]), tuple([v.type for v in op.outputs])),
            len(kinds),
        )
        for op in forward
    ]
    cuts: dict[tuple[object, ...], list[int]] = {}
    size: dict[tuple[object, ...], float] = {}
    for p, crossing in enumerate(_crossings(function, forward, maker, free)):
        if 0 < p < len(forward):
            key = row[p - 1], row[p], frozenset(Counter([v.type for v in crossing]).items())
            cuts.setdefault(key, []).append(p)
            size[key] = sum([_bytes(v) for v in crossing])
    best: tuple[tuple[float, float, int], list[int]] | None = None
    for key, at in sorted(cuts.items(), key=lambda row: size[row[0]]):
        if best is not None and size[key] > best[0][0]:
            break
        borders = _periodic(row, at)
        if len(borders) > 2:  # at least two blocks
            covered = borders[-1] - borders[0]
            rank = size[key], -covered, len(borders)
            if best is None or rank < best[0]:
                best = rank, borders
    if best is None:
        return []
    borders = best[1]
    return [list(forward[a:b]) for a, b in itertools.pairwise(borders)]


def _extended(row: Sequence[int], borders: list[int]) -> list[int]:
    """The borders, and those of blocks that are alike before the first and after the last."""
    length = borders[1] - borders[0]
    block = sorted(row[borders[0] : borders[1]])
    while borders[0] >= length and sorted(row[borders[0] - length : borders[0]]) == block:
        borders = [borders[0] - length, *borders]
    while sorted(row[borders[-1] : borders[-1] + length]) == block:
        borders = [*borders, borders[-1] + length]
    return borders


def _most(row: Sequence[int], start: int, second: int, end: int) -> int:
    """The most that blocks from `start` to `end`, of which the second begins there, can cover once extended."""
    length = second - start
    return end - start + start // length * length + (len(row) - end) // length * length


def _crossings(
    function: Function, forward: Sequence[Op], maker: Mapping[Value, Op], free: Mapping[Value, Op]
) -> list[set[Value]]:
    """For each position the values that are made before it and used at or after it, without views."""
    last: dict[Value, int] = {}
    for p, op in enumerate(forward):
        todo = list(op.inputs)
        while todo:
            v = todo.pop()
            if v in maker:
                last[_root(v, maker)] = p
            elif v in free:
                todo += free[v].inputs
    alive: set[Value] = set()
    found: list[set[Value]] = []
    ends: dict[int, list[Value]] = {}
    for v, p in last.items():
        ends.setdefault(p, []).append(v)
    for p, op in enumerate(forward):
        found.append(set(alive))
        alive.difference_update(ends.get(p, ()))
        alive.update([v for v in op.outputs if last.get(v, -1) > p])
    return found


def _periodic(row: Sequence[int], at: Sequence[int]) -> list[int]:
    """The longest run of these positions between which the row repeats, taken so far apart that it does."""
    kinds: dict[tuple[int, ...], int] = {}  # independent ops may come in any order
    parts = [kinds.setdefault(tuple(sorted(row[a:b])), len(kinds)) for a, b in itertools.pairwise(at)]
    best: list[int] = []
    for period in range(1, len(parts) // 2 + 1):
        start = 0
        while start + 2 * period <= len(parts):
            end = start + period
            while end < len(parts) and parts[end] == parts[end - period]:
                end += 1
            for first in range(start, min(start + period, end - 2 * period + 1)):
                blocks = (end - first) // period
                most = _most(row, at[first], at[first + period], at[first + blocks * period])
                if best and most <= best[-1] - best[0]:
                    continue
                borders = _extended(row, [at[first + k * period] for k in range(blocks + 1)])
                if not best or borders[-1] - borders[0] > best[-1] - best[0]:
                    best = borders
            start = max(start + 1, end - period + 1)
    if not best and len(parts) <= _FEW:  # of two blocks the first may begin, or the last end, in another way
        pairs = [_extended(row, list(pair)) for pair in itertools.combinations(at, 2)]
        best = max([borders for borders in pairs if len(borders) > 2], key=lambda b: b[-1] - b[0], default=[])
    return best


def _within(saving: _Saving, limit: float) -> set[Value]:
    """Values to recompute so that at most `limit` bytes are saved: none, the cheap ones, then block by block."""
    if saved_bytes(saving, ()) <= limit:
        return set()
    cheap = _cheap(saving)

    def again(count: int) -> set[Value]:
        return cheap | _blocks_again(saving, saving.blocks[:count])

    if (least := saved_bytes(saving, again(len(saving.blocks)))) <= limit:
        counts = range(len(saving.blocks) + 1)
        return again(bisect.bisect_left(counts, -limit, key=lambda count: -saved_bytes(saving, again(count))))
    raise InfeasibleError(
        f"recompute: {limit:,.0f} bytes saved a microbatch are too few: with all blocks made again it is {least:,.0f}",
        "more microbatches or more devices leave less to save",
    )


# ---- the program


def _with_copies(function: Function, saving: _Saving, again: Collection[Value]) -> Function:
    """The function with a copy of each op whose results are recomputed, before the first backward op that needs one."""
    if not again:
        return function
    maker = FunctionMaker(function.name)
    maker.inputs.extend(function.inputs)
    maker.reserve([*function.inputs, *[v for op in function.ops for v in op.outputs]])
    copies: dict[Value, Value] = {}
    became: dict[Op, Op] = {}
    may_be_copied = {v for v, op in saving.maker.items() if v in again or op.spec.alias}

    def copied(v: Value) -> Value:
        if v in copies or v not in may_be_copied:
            return copies.get(v, v)
        todo = [saving.maker[v]]
        while todo:  # an op after what it takes
            step = todo[-1]
            if step.outputs[0] in copies:
                todo.pop()
                continue
            above = [saving.maker[w] for w in step.inputs if w in may_be_copied and w not in copies]
            if above:
                todo += above
                continue
            inputs = tuple([copies.get(w, w) for w in step.inputs])
            if step.spec.alias and inputs == step.inputs:
                copies.update(zip(step.outputs, step.outputs, strict=True))  # a view of a saved value is available
            else:
                outputs = tuple([Value(maker.fresh(w.name), w.type) for w in step.outputs])
                maker.ops.append(Op(step.spec, inputs, step.attributes, outputs, step))
                copies.update(zip(step.outputs, outputs, strict=True))
            todo.pop()
        return copies[v]

    for op in function.ops:
        of = became.get(op.of, op.of) if op.of else None
        inputs = op.inputs
        if op in saving.backward and not (may_be_copied.isdisjoint(inputs) and copies.keys().isdisjoint(inputs)):
            inputs = tuple([copied(v) for v in inputs])
        changed = inputs != op.inputs or of is not op.of
        new = became[op] = Op(op.spec, inputs, op.attributes, op.outputs, of) if changed else op
        maker.ops.append(new)
    maker.set_outputs(function.outputs)
    maker.updates = dict(function.updates)
    maker.sources = dict(function.sources)
    return maker.finalize()
