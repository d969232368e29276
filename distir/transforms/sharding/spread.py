"""Placement of a sequential program on a mesh: each axis by its strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from distir.ir.cached import cached
from distir.ir.device import TIME, Mesh
from distir.ir.errors import InfeasibleError, IRTypeError, counted
from distir.ir.function import Function
from distir.transforms.plan import BATCH, INPUTS, Axis, Sharding
from distir.transforms.rewriting.part_constants import part_constants
from distir.transforms.roles import batch_size
from distir.transforms.sharding.graph import graph_of
from distir.transforms.sharding.pad_state import Share, StateAxis, divides_evenly, pad_state, unsplit_shares
from distir.transforms.sharding.place import Placed
from distir.transforms.sharding.shard import shard
from distir.transforms.sharding.strategies import (
    IN_TIME,
    STRATEGIES,
    Batch,
    Problem,
    pad_to_multiple,
    state_along_inputs,
)

_RECENT = 1 << 16
"""The most ops of placed functions cached with their source: plans that differ only in their schedule share them."""


class SplitDims(NamedTuple):
    """The dims of inputs that axes split, inputs by their numbers: the batch dim of each data input, and by axis those
    that a user names."""

    batch: Batch
    named: tuple[tuple[str, Batch], ...] = ()

    def problem(self, function: Function, sharding: Sharding, decided: Mapping[str, Placed]) -> Problem:
        """What a strategy is given."""
        return Problem(function, self.batch, sharding, decided, dict(self.named))


def padded(function: Function, dims: SplitDims, sharding: Sharding) -> Function:
    """The function, padded where that lets an axis split more, and to the plan's multiple. It must be decomposed."""
    for axis in _decided_in_turn(sharding):
        function = STRATEGIES[axis.strategy].pad(dims.problem(function, sharding, {}), axis)
    function = pad_to_multiple(dims.problem(function, sharding, {}))
    shares = _unsplit(function, dims, sharding) if sharding.zero else ()
    return _stored(function, shares) if shares else function


@cached
def _stored(function: Function, shares: tuple[Share, ...]) -> Function:
    return pad_state(part_constants(function), shares)


def _unsplit(function: Function, dims: SplitDims, sharding: Sharding) -> tuple[Share, ...]:
    """What ZeRO could split only if it were padded."""
    if divides_evenly(function, math.prod([a.size for a in sharding.axes])):
        return ()  # without a look at which axis splits what, as most
    decided, owners = _decide(function, dims, sharding)
    state = [StateAxis(a.size, decided[a.name]) for a in sharding.along(BATCH)]
    state += [StateAxis(a.size, owners[a.name], decided[a.name]) for a in sharding.axes if a.name in owners]
    others = [(decided[a.name], a.size) for a in sharding.axes if a.strategy != BATCH and a.name not in owners]
    return tuple(unsplit_shares(graph_of(function), state, others, sharding.zero))


def place(function: Function, dims: SplitDims, sharding: Sharding, mesh: Mesh) -> Function:
    """The function on a mesh: the batch split over time and replicas, weights, ...; not scheduled.

    The function must be decomposed, and padded for the same axes. Raises InfeasibleError for a batch, or a named dim,
    that does not divide.
    """
    _check_batch(batch_size(function, dict(dims.batch)), sharding)
    key = sharding, mesh, dims
    recent: dict[object, Function] = function.cache.setdefault(place, {})
    if key not in recent:
        recent[key] = _place(function, dims, sharding, mesh)
        while len(recent) > 1 and sum(len(placed.ops) for placed in recent.values()) > _RECENT:
            del recent[next(iter(recent))]
    return recent[key]


def _place(function: Function, dims: SplitDims, sharding: Sharding, mesh: Mesh) -> Function:
    axes = _decided_in_turn(sharding)
    decided, owners = _decide(function, dims, sharding)
    decided |= owners
    # ZeRO 2 and 3: scatter each microbatch's gradients before adding them; else scatter the sum of all microbatches
    time = [a.name for a in axes if a.strategy == IN_TIME]
    replicas = [a.name for a in axes if a.strategy == BATCH]
    first = [*replicas, *owners, *time] if sharding.zero > 1 else [*time, *replicas, *owners]
    converted = [*first, *[a.name for a in axes if a.name not in first]]
    try:
        return shard(graph_of(function), mesh, {name: decided[name] for name in converted})
    except IRTypeError as e:
        if not (named := sharding.along(INPUTS)):
            raise
        axes_named = " and ".join([a.name for a in named])
        raise InfeasibleError(
            f"{axes_named} split what other axes of the plan split otherwise: {e.message}", "leave one of the axes out"
        ) from None


def _decide(function: Function, dims: SplitDims, sharding: Sharding) -> tuple[dict[str, Placed], dict[str, Placed]]:
    """The placements along each axis; and those along axes of inputs with what ZeRO splits along them, too."""
    decided: dict[str, Placed] = {}
    for axis in _decided_in_turn(sharding):
        decided[axis.name] = STRATEGIES[axis.strategy].place(dims.problem(function, sharding, decided), axis)
    return decided, state_along_inputs(dims.problem(function, sharding, decided)) if sharding.zero else {}


def _decided_in_turn(sharding: Sharding) -> list[Axis]:
    axes = (Axis(TIME, sharding.microbatches, IN_TIME), *sharding.axes)
    return sorted(axes, key=lambda a: list(STRATEGIES).index(a.strategy))


def _check_batch(size: int, sharding: Sharding) -> None:
    """Raises InfeasibleError, with what would fit, for a batch that is not of equal pieces."""
    if size % sharding.pieces == 0:
        return
    axes = sharding.along(BATCH)
    replicas = " x ".join([f"{a.name} {a.size}" for a in axes])
    n = sharding.pieces // sharding.microbatches
    fits = [str(m) for m in range(1, size // n + 1) if size % (n * m) == 0] if size % n == 0 else []
    into = " x ".join([*([replicas] if axes else []), counted(sharding.microbatches, "microbatch", "es")])
    if fits:
        noun = "microbatch" if fits == ["1"] else "microbatches"
        hint = f"{f'with {replicas} ' if axes else ''}use {', '.join(fits)} {noun}"
    else:
        hint = f"use a batch that is a multiple of {n}, or a {' x '.join([a.name for a in axes])} that divides {size}"
    raise InfeasibleError(f"a batch of {size} does not divide by {into} = {sharding.pieces}", hint)
