"""What a model is fed: data from a file, else data that are drawn.

This is the only place where names of inputs count. An input called `attention_mask` is a causal mask: of floating type
(..., S, S) it is added to the scores (0, or the lowest number where a position may not look), of booleans it says
where it may; a mask of any other form, (batch, S), lets every position count. `position_ids` count from 0.
Other integers are in the range of what they index: rows of a table, classes of a loss. All else is normal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from distir.ir.errors import UsageError
from distir.ir.function import Function, Value
from distir.ir.type import Tensor
from distir.transforms.decompose import decompose
from distir.transforms.roles import batch_dims, weights
from distir.transforms.training import IGNORED

MASK, POSITIONS = "attention_mask", "position_ids"


class Data:
    """The inputs of a program that are neither weights nor optimizer state, step by step.

    `given` maps input Values that are already known to their arrays. `file` is an .npz file with an array for every
    data input, by name: along the input's batch dim it holds samples, which the steps take in order, from the
    beginning again when they are used up. Other inputs may be in it, whole. Without a file data are drawn, anew for
    every step and sample, by `seed`.

    Raises UsageError, in one line, for a file that cannot be read, or a name, shape, type or number that does not fit.
    """

    def __init__(
        self,
        function: Function,
        given: Mapping[Value, Any] | None = None,
        file: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.seed = seed
        self.batch = batch_dims(function)
        held = set(weights(function)) | set(given or {})
        self.number = {v: k for k, v in enumerate(function.inputs) if v not in held and v.kind != "state"}
        self.limit = index_limits(function)
        self.file = {} if file is None else self._read(Path(file))

    def fixed(self) -> dict[Value, np.ndarray]:
        """Inputs that stay the same in every step."""
        return {
            v: self._drawn(v, 0) if v not in self.file else self.file[v] for v in self.number if v not in self.batch
        }

    def step(self, step: int) -> dict[Value, np.ndarray]:
        """Inputs that are new in step number `step`."""
        return {
            v: self._drawn(v, step) if v not in self.file else self._cut(v, step)
            for v in self.number
            if v in self.batch
        }

    # --- drawn

    def _drawn(self, v: Value, step: int) -> np.ndarray:
        t = v.type
        if not isinstance(t, Tensor):
            raise UsageError(f"input %{v.name} is not a tensor: {t}")
        shape, dtype = t.global_shape, t.dtype
        random = np.random.default_rng((self.seed, step, self.number[v]))
        if v.name == MASK:
            return _mask(shape, dtype.numpy, sequences=v in self.batch and len(shape) == 2)
        if v.name == POSITIONS and shape and not dtype.floating:
            return np.ascontiguousarray(np.broadcast_to(np.arange(shape[-1], dtype=dtype.numpy), shape))
        if dtype.floating:
            return random.standard_normal(shape).astype(dtype.numpy)
        return random.integers(0, self.limit.get(v, 2), shape).astype(dtype.numpy)

    # --- from a file

    def _read(self, path: Path) -> dict[Value, np.ndarray]:
        arrays = _archive(path)
        inputs = {v.name: v for v in self.number}
        names = ", ".join(inputs)
        if unknown := [name for name in arrays if name not in inputs]:
            raise UsageError(f"{path}: the model has no data input {unknown[0]!r}", f"its data inputs are {names}")
        if missing := [v.name for v in self.number if v in self.batch and v.name not in arrays]:
            raise UsageError(f"{path} has no array {missing[0]!r}", f"the data inputs are {names}")
        found = {inputs[name]: self._checked(path, inputs[name], x) for name, x in arrays.items()}
        counts = {x.shape[self.batch[v]]: v.name for v, x in found.items() if v in self.batch}
        if len(counts) > 1:
            said = ", ".join(f"{name} {n}" for n, name in counts.items())
            raise UsageError(f"{path}: its arrays hold different numbers of samples: {said}")
        return found

    def _checked(self, path: Path, v: Value, x: np.ndarray) -> np.ndarray:
        t = v.type
        if not isinstance(t, Tensor):
            raise UsageError(f"input %{v.name} is not a tensor: {t}")
        want, dim = list(t.global_shape), self.batch.get(v)
        fits = list(x.shape) == want
        if dim is not None and x.ndim == len(want):
            fits = [n for i, n in enumerate(x.shape) if i != dim] == [n for i, n in enumerate(want) if i != dim]
            if fits and x.shape[dim] < want[dim]:
                raise UsageError(f"{path}: {v.name} has {x.shape[dim]} samples, a step needs {want[dim]}")
        if not fits:
            said = ", ".join("samples" if i == dim else str(n) for i, n in enumerate(want))
            raise UsageError(f"{path}: {v.name}: expected shape ({said}), got {tuple(x.shape)}")
        kinds = {"float": "fiu", "int": "iu", "bool": "b"}[t.dtype.kind]
        if x.dtype.kind not in kinds and x.dtype != t.dtype.numpy:
            raise UsageError(f"{path}: {v.name}: expected {t.dtype.kind} numbers, got {x.dtype}")
        limit = self.limit.get(v)
        if limit is not None and x.size and x.dtype.kind in "iu":
            bad = x[((x < 0) & (x != IGNORED)) | (x >= limit)]
            if bad.size:
                raise UsageError(f"{path}: {v.name} holds {bad.flat[0]}, expected numbers from 0 to {limit - 1}")
        return x.astype(t.dtype.numpy, copy=False)

    def _cut(self, v: Value, step: int) -> np.ndarray:
        x, dim = self.file[v], self.batch[v]
        n = v.type.global_shape[dim]  # type: ignore[union-attr]
        steps = x.shape[dim] // n
        first = step % steps * n
        return np.ascontiguousarray(x[(slice(None),) * dim + (slice(first, first + n),)])


def _archive(path: Path) -> dict[str, np.ndarray]:
    try:
        archive = np.load(path, allow_pickle=False)
        arrays = {} if isinstance(archive, np.ndarray) else {name: archive[name] for name in archive.files}
    except OSError as e:
        raise UsageError(f"cannot read data file {path}: {e.strerror or e}") from None
    except (ValueError, EOFError, BadZipFile) as e:
        raise UsageError(f"{path} is not an .npz file: {e}") from None
    if not arrays:
        raise UsageError(f"{path} is not an .npz file", "write it with numpy.savez(path, name=array, ...)")
    return arrays


def _mask(shape: tuple[int, ...], dtype: np.dtype[Any], sequences: bool) -> np.ndarray:
    if sequences or len(shape) < 2 or dtype.kind in "iu":
        return np.ones(shape, dtype)
    allowed = np.tri(shape[-2], shape[-1], shape[-1] - shape[-2], dtype=bool)
    if dtype.kind == "b":
        return np.ascontiguousarray(np.broadcast_to(allowed, shape))
    import ml_dtypes

    lowest = ml_dtypes.finfo(dtype).min  # numpy's, and those of the types numpy lacks
    return np.ascontiguousarray(np.broadcast_to(np.where(allowed, 0, lowest).astype(dtype), shape))


def index_limits(function: Function) -> dict[Value, int]:
    """For each input of integers that indexes something, how many there are to choose from.

    Followed from the input through ops that keep its numbers, in the parts that ops are decomposed into.
    """
    parts = decompose(function)
    roots: dict[Value, Value] = {
        v: v for v in parts.inputs if isinstance(v.type, Tensor) and v.type.dtype.kind == "int"
    }
    found: dict[Value, int] = {}
    for op in parts.ops:
        indexed = op.spec.indexed(op.attributes)
        if indexed is not None and indexed[0] >= 0:
            slot, dim = indexed
            limit = op.inputs[slot].type.global_shape[dim]  # type: ignore[union-attr]
            for k, v in enumerate(op.inputs):
                if k != slot and v in roots:
                    found[roots[v]] = min(limit, found.get(roots[v], limit))
        if op.spec.alias and op.inputs and op.inputs[0] in roots:
            roots.update((v, roots[op.inputs[0]]) for v in op.outputs)
        elif op.op_type in _KEEP and op.inputs[0] in roots and op.outputs[0].type.dtype.kind == "int":  # type: ignore[union-attr]
            roots[op.outputs[0]] = roots[op.inputs[0]]
    return found


_KEEP = frozenset(("Cast", "Detach", "Expand", "Identity", "Slice", "Transpose", "Reshape"))
"""Ops whose result holds the operand's numbers."""
