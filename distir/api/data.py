"""Input data of a model: from a file, from arrays, or random.

This is the only module that interprets names of inputs. Random data: an input called `attention_mask` is a causal mask:
of floating type (..., S, S) it is added to the scores (0, or the lowest number where attention is masked), of booleans
it is true where attention is allowed; a mask of integers, or of form (batch, S), is all ones. `position_ids` count from
0. Other integers are uniform in the range of what they index (rows of a table, classes of a loss); floating types are
normal. Text: the one other input of integers (batch, S) gets S consecutive tokens, and `labels` the token after each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.api.archive import archive
from distir.api.tokens import read_tokens
from distir.ir.errors import UsageError, counted
from distir.ir.function import Function, Value
from distir.ir.type import Tensor
from distir.ops.rules import shape_of
from distir.runtime.samples import Samples, batches
from distir.transforms.rewriting.decompose import decompose
from distir.transforms.roles import batch_dims, weights

MASK, POSITIONS, LABELS = "attention_mask", "position_ids", "labels"
ARRAYS = (".npz", ".npy")
"""Suffixes of files that hold arrays; all others are text."""


class Data:
    """The inputs of a program that are neither weights nor optimizer state, for each step.

    `given`: inputs whose arrays are already known. `source` is a text file (for `tokenizer` see `read_tokens`), or an
    array of samples, along the batch dim, for every data input, by name (masks and positions are optional), as a
    mapping or in an .npz file. Steps take samples in order, cyclically; epochs are made by `samples`. Arrays of inputs
    without a batch dim are taken whole. Without a source data are random, new for every step, from `seed`.

    Raises UsageError for a file that cannot be read, or a name, shape, type or number that does not fit.
    """

    def __init__(
        self,
        function: Function,
        given: Mapping[Value, Any] | None = None,
        source: Mapping[str, np.ndarray] | str | os.PathLike[str] | None = None,
        seed: int = 0,
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        self.seed = seed
        self.batch = batch_dims(function)
        self.path = Path(source) if isinstance(source, str | os.PathLike) else None
        self.name = "data" if self.path is None else os.fspath(self.path)
        not_data = set(weights(function)) | set(given or {})
        self.number = {v: k for k, v in enumerate(function.inputs) if v not in not_data and v.kind != "state"}
        self.range = index_ranges(function)
        self.known: dict[Value, np.ndarray] = {}
        if self.path is not None:
            text = self.path.suffix not in ARRAYS
            self.known = self._text(self.path, tokenizer) if text else self._by_name(archive(self.path))
        elif isinstance(source, Mapping):
            self.known = self._by_name({name: _array(name, x) for name, x in source.items()})
        elif source is not None:
            raise UsageError(f"data: expected a file, or arrays by name, got {type(source).__name__}")
        if tokenizer is not None and (self.path is None or self.path.suffix in ARRAYS):
            raise UsageError("a tokenizer is for a text, and there is none", "--data FILE.txt")

    @property
    def sampled(self) -> dict[Value, np.ndarray]:
        """The inputs with a batch dim that the source gives: arrays of samples."""
        return {v: x for v, x in self.known.items() if v in self.batch}

    def fixed(self) -> dict[Value, np.ndarray]:
        """Inputs that are the same in every step: without a batch dim, or, with a source, without samples."""
        known = [v for v in self.number if v not in self.batch or (self.sampled and v not in self.known)]
        return {v: self.known[v] if v in self.known else self._drawn(v, 0) for v in known}

    def step(self, step: int) -> dict[Value, np.ndarray]:
        """Inputs that change from step to step, for step number `step`."""
        if self.sampled:
            chosen = self.samples()[0].step(step)
            return {v: np.asarray(chosen[self.number[v]], v.type.dtype.numpy) for v in self.sampled}  # type: ignore[union-attr]
        return {v: self._drawn(v, step) for v in self.number if v in self.batch}

    def samples(self, epochs: bool = False, share: float = 0.0) -> tuple[Samples, Samples | None]:
        """(training samples, validation samples): the last `share` of the samples, in whole batches, is held out.

        With `epochs` training samples are shuffled in each epoch, by the seed. Raises UsageError if less than a batch
        is left for training, or if there are no samples.
        """
        arrays = {self.number[v]: x for v, x in self.sampled.items()}
        if not arrays:
            raise UsageError("there are no samples: no data were given")
        dims = {self.number[v]: self.batch[v] for v in self.sampled}
        v, x = next(iter(self.sampled.items()))
        batch, count = v.type.global_shape[self.batch[v]], x.shape[self.batch[v]]  # type: ignore[union-attr]
        train, held_out = batches(count, batch, share)
        if train < batch:
            detail = f"{counted(held_out, 'sample')} held out, a step needs {batch}"
            raise UsageError(f"{self.name} has {counted(count, 'sample')}, {detail}", "--val-fraction 0 holds out none")
        train_samples = Samples(arrays, dims, batch, 0, train, self.seed if epochs else None)
        return train_samples, Samples(arrays, dims, batch, train, held_out) if held_out else None

    # --- random data

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
        return random.integers(0, self.range[v].limit if v in self.range else 2, shape).astype(dtype.numpy)

    # --- given data

    def _by_name(self, arrays: Mapping[str, np.ndarray]) -> dict[Value, np.ndarray]:
        inputs = {v.name: v for v in self.number}
        names = ", ".join(inputs)
        if unknown := [name for name in arrays if name not in inputs]:
            raise UsageError(f"{self.name}: the model has no data input {unknown[0]!r}", f"its data inputs are {names}")
        provided = (*arrays, MASK, POSITIONS)
        if missing := [v.name for v in self.number if v in self.batch and v.name not in provided]:
            raise UsageError(f"{self.name} has no array {missing[0]!r}", f"the data inputs are {names}")
        found = {inputs[name]: self._checked(inputs[name], x) for name, x in arrays.items()}
        counts = {x.shape[self.batch[v]]: v.name for v, x in found.items() if v in self.batch}
        if len(counts) > 1:
            detail = ", ".join(f"{name} {n}" for n, name in counts.items())
            raise UsageError(f"{self.name}: its arrays hold different numbers of samples: {detail}")
        return found

    def _checked(self, v: Value, x: np.ndarray) -> np.ndarray:
        t = v.type
        if not isinstance(t, Tensor):
            raise UsageError(f"input %{v.name} is not a tensor: {t}")
        want, dim = list(t.global_shape), self.batch.get(v)
        fits = list(x.shape) == want
        if dim is not None and x.ndim == len(want):
            fits = [n for i, n in enumerate(x.shape) if i != dim] == [n for i, n in enumerate(want) if i != dim]
            if fits and x.shape[dim] < want[dim]:
                raise UsageError(f"{self.name}: {v.name} has {x.shape[dim]} samples, a step needs {want[dim]}")
        if not fits:
            detail = ", ".join("samples" if i == dim else str(n) for i, n in enumerate(want))
            raise UsageError(f"{self.name}: {v.name}: expected shape ({detail}), got {tuple(x.shape)}")
        kinds = {"float": "fiu", "int": "iu", "bool": "b"}[t.dtype.kind]
        if x.dtype.kind not in kinds and x.dtype != t.dtype.numpy:
            raise UsageError(f"{self.name}: {v.name}: expected {t.dtype.kind} numbers, got {x.dtype}")
        if v in self.range and x.dtype.kind in "iu":
            self._check_range(v, x)
        return x if v in self.batch else x.astype(t.dtype.numpy, copy=False)

    def _check_range(self, v: Value, x: np.ndarray) -> None:
        """Check that indices are in range. Raises UsageError that names the first sample out of range.

        Negative indices are rejected although ops accept them: in data they mark padding, or labels to be ignored.
        """
        allowed, dim = self.range[v], self.batch.get(v)
        rows = x[None] if dim is None else np.moveaxis(x, dim, 0)
        each = max(1, _CHUNK // max(1, rows[:1].size))
        for first in range(0, len(rows), each):
            wrong = allowed.wrong(rows[first : first + each])
            if wrong.any():
                at = tuple(np.argwhere(wrong)[0])
                where = "" if dim is None else f" in sample {first + at[0]}"
                raise UsageError(f"{self.name}: {v.name} holds {rows[first:][at]}{where}, expected {allowed}")

    def _text(self, path: Path, tokenizer: str | os.PathLike[str] | None) -> dict[Value, np.ndarray]:
        tokens, labels = self._of_text()
        t = tokens.type
        batch, length = t.global_shape  # type: ignore[union-attr]
        row = read_tokens(path, min(self.range[tokens].limit, self.range[labels].limit), tokenizer)
        count = (len(row) - 1) // length
        if count < batch:
            need = f"a step needs {batch:,} sequences of {length:,} and one more"
            raise UsageError(f"{path} is too short: it has {counted(len(row), 'token')}, {need}")
        return {
            tokens: row[: count * length].reshape(-1, length),
            labels: row[1 : count * length + 1].reshape(-1, length),
        }

    def _of_text(self) -> tuple[Value, Value]:
        """The inputs for tokens and for labels. Raises UsageError if the model has no such inputs."""
        rows = {
            v: v.type.global_shape
            for v in self.range
            if v in self.batch and isinstance(v.type, Tensor) and len(v.type.global_shape) == 2 and self.batch[v] == 0
        }
        labels = [v for v in rows if v.name == LABELS]
        tokens = [v for v in rows if v.name not in (LABELS, MASK, POSITIONS)]
        if len(tokens) != 1:
            names = f"it has {', '.join(v.name for v in tokens)}" if tokens else "it has none"
            raise UsageError(f"text needs a model with one input of tokens, integers (batch, length): {names}")
        if not labels or rows[labels[0]] != rows[tokens[0]]:
            raise UsageError("text needs a loss that looks at a label for each token", "--loss cross-entropy")
        if other := [v.name for v in self.number if v in self.batch and v.name not in _OF_TEXT | {tokens[0].name}]:
            raise UsageError(f"a text has no values for the input {other[0]!r}")
        return tokens[0], labels[0]


def _array(name: str, x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except ValueError:
        raise UsageError(f"data: {name} is not an array") from None


_OF_TEXT = {LABELS, MASK, POSITIONS}


def _mask(shape: tuple[int, ...], dtype: np.dtype[Any], sequences: bool) -> np.ndarray:
    if sequences or len(shape) < 2 or dtype.kind in "iu":
        return np.ones(shape, dtype)
    allowed = np.tri(shape[-2], shape[-1], shape[-1] - shape[-2], dtype=bool)
    if dtype.kind == "b":
        return np.ascontiguousarray(np.broadcast_to(allowed, shape))
    import ml_dtypes

    lowest = ml_dtypes.finfo(dtype).min  # numpy's, and those of the types numpy lacks
    return np.ascontiguousarray(np.broadcast_to(np.where(allowed, 0, lowest).astype(dtype), shape))


class IndexRange(NamedTuple):
    """The valid indices: 0 to `limit` - 1, and those in `ignored`."""

    limit: int
    ignored: frozenset[int]

    def both(self, other: IndexRange) -> IndexRange:
        """The indices that are valid in both ranges."""
        return IndexRange(min(self.limit, other.limit), self.ignored & other.ignored)

    def wrong(self, x: np.ndarray) -> np.ndarray:
        """Mask of the numbers that are out of range."""
        outside = (x < 0) | (x >= self.limit)
        for number in self.ignored:
            outside &= x != number
        return outside

    def __str__(self) -> str:
        ignored = "".join(f", or {number}, which is ignored" for number in sorted(self.ignored))
        return f"numbers from 0 to {self.limit - 1}{ignored}"


def index_ranges(function: Function) -> dict[Value, IndexRange]:
    """The range of each integer input that is used as an index.

    Uses are found through ops that preserve values, after decomposition of ops.
    """
    parts = decompose(function, False)  # a full decomposition would lose the attribute for ignored labels
    roots: dict[Value, Value] = {
        v: v for v in parts.inputs if isinstance(v.type, Tensor) and v.type.dtype.kind == "int"
    }
    found: dict[Value, IndexRange] = {}
    for op in parts.ops:
        indexed = op.spec.indexed(op.attributes)
        slot, dim = indexed or (-1, None)
        if slot >= 0 and dim is not None:
            whole = shape_of(op.inputs[slot])[dim]
            limit = op.attributes.get(op.spec.unpadded, whole) if op.spec.unpadded else whole
            ignored = op.attributes.get(op.spec.ignored) if op.spec.ignored else None
            here = IndexRange(limit, frozenset(() if ignored is None else (ignored,)))
            for k, v in enumerate(op.inputs):
                if k != slot and v in roots:
                    found[roots[v]] = here.both(found.get(roots[v], here))
        if op.spec.alias and op.inputs and op.inputs[0] in roots:
            roots.update((v, roots[op.inputs[0]]) for v in op.outputs)
        elif op.op_type in _KEEP and op.inputs[0] in roots and op.outputs[0].type.dtype.kind == "int":  # type: ignore[union-attr]
            roots[op.outputs[0]] = roots[op.inputs[0]]
    return found


_CHUNK = 1 << 22
"""Numbers checked at a time: data may be larger than memory."""
_KEEP = frozenset(("Cast", "Detach", "Expand", "Identity", "Slice", "Transpose", "Reshape"))
"""Ops whose result holds only values of the operand."""
